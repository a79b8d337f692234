"""Validation: strict, frozen sections, and one plain sentence for each wrong value."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from fed.config import docstrings

__all__ = ["Section", "nearest", "sentence_error", "sentences"]


def _describe(schema: dict[str, Any], section: type[BaseModel]) -> None:
    """Add the texts below a section's keys to its schema; Pydantic's own way costs each start the time to read them."""
    for key, text in docstrings.attributes(section).items():
        if key in schema["properties"] and section.model_fields[key].description is None:
            schema["properties"][key]["description"] = text


class Section(BaseModel):
    """Keys and values of one section: frozen, strictly typed, unknown keys and non-finite numbers refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # YAML has types: a quoted 5 is a text
        allow_inf_nan=False,
        validate_default=True,
        json_schema_extra=_describe,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, keys: Any) -> Any:
        if not isinstance(keys, dict) or cls.model_config["extra"] == "allow":
            return keys
        known = list(cls.model_fields)
        unknown = [
            sentence_error(f"unknown key{nearest(str(key), known)}", str(key), value)
            for key, value in keys.items()
            if key not in known
        ]
        if unknown:
            raise ValidationError.from_exception_data(cls.__name__, unknown)
        return keys


def sentence_error(sentence: str, key: str, value: object) -> InitErrorDetails:
    """Validation error with this sentence about a key.

    Args:
        sentence: the whole message.
        key: name of the key.
        value: value that was given.
    """
    return InitErrorDetails(type=PydanticCustomError("sentence", cast("Any", sentence)), loc=(key,), input=value)


def nearest(name: str, known: list[str]) -> str:
    """End of a message on an unknown name: the nearest known one, and all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    # A second try in small letters: FedAvg is far from fedavg by letters.
    near = near or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ";"
    return f"{meant} known: {', '.join(known)}"


def sentences(error: ValidationError) -> Iterator[str]:
    """One sentence for each error: the path of the key, what is allowed, and the value."""
    for problem in _without_alternatives(error):
        path = _path(problem["loc"])
        message = problem["msg"]
        value = problem["input"]
        match problem["type"]:
            case "default_factory_not_called":  # it would have followed from a key that has a sentence of its own
                continue
            case "missing":
                yield f"{path}: missing key"
            case "sentence":
                yield f"{path}: {message} (value: {_short(value)})"
            case "value_error":
                yield (f"{path}: " if path else "") + message.removeprefix("Value error, ")
            case "model_type" | "dict_type":
                yield f"{path or 'the document'} must be a mapping of keys to values, got {_short(value)}"
            case "list_type" | "tuple_type" if isinstance(value, str):
                # One name in place of a list is the likeliest slip.
                yield f"{path} must be a list, got {_short(value)}: write [{value}]"
            case "list_type" | "tuple_type" if isinstance(value, dict):
                yield f"{path} must be a list, got {_short(value)}: put it in brackets, [{{…}}]"
            case _:
                allowed = re.sub(r"^\w+ should ", "", message).partition(" after validation")[0].replace("a valid", "a")
                allowed = allowed.replace("a tuple", "a list")
                yield f"{path} must {allowed.replace('a integer', 'an integer')}, got {_short(value)}"


def _without_alternatives(error: ValidationError) -> list[dict[str, Any]]:
    """The errors, those of a union's alternatives joined into one: "be an integer or 'all'"."""
    joined: dict[tuple[int | str, ...], dict[str, Any]] = {}
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        # Pydantic reports each alternative of a union as a place of its own.
        if location and re.fullmatch(r"constrained-\w+|literal\[.*\]|int|float|str|bool", str(location[-1])):
            location = location[:-1]
        if location in joined and joined[location]["input"] is problem["input"]:
            joined[location]["msg"] += problem["msg"].replace("Input should be", " or")
        else:
            joined[location] = {**problem, "loc": location}
    return list(joined.values())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
