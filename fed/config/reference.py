"""The reference of all keys in Markdown: every section, kind and key with its default, values and meaning."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, cast, get_args

from pydantic.fields import FieldInfo

from fed.config import docstrings
from fed.config.components import Component, Family
from fed.config.validation import Section

__all__ = ["markdown", "values_of", "written"]

_HEAD = """# Reference

Every section, kind and key of an experiment and of a comparison, with default, values and meaning. `make docs` writes
this page from the code's docstrings: change them, not this page. [Experiments](experiments.md) explains how sections
work together. A default of – means that the key must be given."""


def markdown() -> str:
    """Write the whole page: an experiment's keys, then a comparison's."""
    from fed.config.comparison import Comparison
    from fed.config.experiment import Experiment

    blocks = [_HEAD, "## An experiment", *_keys(Experiment), "## A comparison", *_keys(Comparison)]
    return "\n\n".join(blocks) + "\n"


def _keys(section: type[Section], path: str = "") -> Iterator[str]:
    """A table of a section's plain keys, then each part that has keys of its own."""
    fields = section.model_fields
    if plain := [key for key in fields if _part(fields[key]) is None]:
        yield _table("key", [_row(key, {"": section}) for key in plain])
    for key, field in fields.items():
        yield from _described(_part(field), path + key, field, _text(section, key))


def _text(section: type[Section], key: str) -> str:
    return section.model_fields[key].description or docstrings.attributes(section).get(key, "")


def _described(part: "type[Section] | Family[Any] | None", path: str, field: FieldInfo, text: str) -> Iterator[str]:
    heading = f"{'#' * (3 + path.count('.'))} `{path}`"
    if isinstance(part, Family):
        yield f"{heading}, by default {_default(field)}"
        yield from filter(None, [text])
        yield from _kinds({kind: part.section(kind) for kind in part.builtin}, f"{path}.")
    elif part is not None:
        yield heading
        yield text or docstrings.summary(part)
        yield from _keys(part, f"{path}.")


def _kinds(sections: Mapping[str, type[Component]], path: str) -> Iterator[str]:
    """The keys that all kinds take, then each kind with its others, then the parts that have kinds of their own."""
    common = set.intersection(*(set(section.model_fields) for section in sections.values())) - {"kind"}
    shared = [key for key in next(iter(sections.values())).model_fields if key in common and len(sections) > 1]
    if shared:
        yield "Every kind takes:\n\n" + _table("key", [_row(key, sections) for key in shared])
    rows: list[str] = []
    for kind, section in sections.items():
        rows.append(f"| **`{kind}`** | | | {_cell(docstrings.summary(section.target))} |")
        own = {key: _row(key, {kind: section}) for key in section.model_fields if key not in ("kind", *shared)}
        # Rows that repeat share one line: else the page would be twice as long.
        again = [f"`{key}`" for key, row in own.items() if row in rows]
        rows += [row for row in own.values() if row not in rows]
        rows += [f"| {', '.join(again)} | | | as above |"] if again else []
    yield _table("kind, key", rows)
    parts = {key: section for section in sections.values() for key in section.model_fields}
    for key, section in parts.items():
        field = section.model_fields[key]
        yield from _described(_part(field), path + key, field, _text(section, key))


def _table(first: str, rows: list[str]) -> str:
    return "\n".join([f"| {first} | default | values | meaning |", "|---|---|---|---|", *rows])


def _row(key: str, sections: Mapping[str, type[Section]]) -> str:
    """A key; where kinds differ in its default, the first one's and then the others'."""
    fields = {kind: section.model_fields[key] for kind, section in sections.items()}
    defaults = {kind: _default(field) for kind, field in fields.items()}
    (_, first), *others = defaults.items()
    default = ", ".join([first, *(f"of `{kind}` {other}" for kind, other in others if other != first)])
    field = next(iter(fields.values()))
    section = next(iter(sections.values()))
    values = "below" if _part(field) else values_of(_properties(section)[key])
    return f"| `{key}` | {default} | {_cell(values)} | {_cell(_text(section, key))} |"


@cache
def _properties(section: type[Section]) -> Mapping[str, Any]:
    """JSON schema of each key, made once for all rows of a section: it is most of the work."""
    properties: Mapping[str, Any] = section.model_json_schema()["properties"]
    return properties


def _part(field: FieldInfo) -> "type[Section] | Family[Any] | None":
    """The kinds that a key chooses from, or the section that it holds; None of a plain value."""
    inside: list[Any] = [*field.metadata, field.annotation]
    for part in inside:
        is_section = isinstance(part, type) and issubclass(part, Section) and not issubclass(part, Component)
        if (isinstance(part, Family) and part.builtin) or is_section:
            return cast("type[Section] | Family[Any]", part)
        inside += get_args(part)
    return None


def _default(field: FieldInfo) -> str:
    from fed.config.experiment import Experiment

    if field.is_required() or field.default == "":  # a function cannot require a parameter behind an optional one
        return "–"
    value = field.get_default(call_default_factory=True, validated_data=vars(Experiment()))
    return f"`{value.kind if isinstance(value, Component) else written(value)}`"


def _cell(text: str) -> str:
    """A docstring's text without its markup, on one line, as a row of a table must be."""
    line = " ".join(text.split())
    return re.sub(r":math:`([^`]*)`", r"\1", line).replace("``", "`").replace("|", r"\|")


def written(value: Any) -> str:
    """A default as an experiment writes it.

    Example:
        >>> [written(value) for value in (None, False, 0.0, "clients", (16, 32))]
        ['null', 'false', '0.0', 'clients', '[16, 32]']
    """
    return value if isinstance(value, str) else json.dumps(value, default=lambda section: section.kind)


def values_of(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows.

    Example:
        >>> values_of({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}]})
        'whole > 0 or null'
    """
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:
        return " or ".join(values_of(choice) for choice in schema["anyOf"])
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    words = {"integer": "whole", "boolean": "true or false", "null": "null", "number": "", "string": "text"}
    words |= {"array": "a list", "object": "a mapping"}
    return " ".join(filter(None, [words.get(schema.get("type", ""), ""), ", ".join(bounds)])) or "any"
