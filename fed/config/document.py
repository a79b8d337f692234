"""Documents: sections that stand in a YAML file of their own."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from pydantic import ValidationError

from fed.config import yaml
from fed.config.components import Component, is_object
from fed.config.validation import Section, sentences
from fed.errors import InvalidExperiment, located

__all__ = ["Document"]


class Document(Section):
    """A section that is read from a file, and whose errors are the user's.

    Raises:
        InvalidExperiment: on construction, one line for each thing wrong.
    """

    def __init__(self, **keys: Any) -> None:
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise InvalidExperiment("\n".join(sentences(error))) from None

    @classmethod
    def load(cls, path: str | Path, objects: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Read a YAML file.

        Args:
            path: path of the file.
            objects: section → object to take where the file says that one was given in Python.

        Raises:
            InvalidInput: if there is no such file.
            InvalidExperiment: one line, which begins with the file, for each thing wrong.
        """
        path = Path(path)
        keys = yaml.load(path)
        with located(path):
            return cls.of(keys, objects)

    @classmethod
    def of(cls, keys: Mapping[str, Any], objects: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Read what :meth:`dump` gave, by this code or an earlier one: a key that is missing has its default.

        Args:
            keys: the keys of the document.
            objects: section → object to take where the keys say that one was given in Python.

        Raises:
            InvalidExperiment: one line for each thing wrong.
        """
        # An object counts only where the keys ask for one: it must not replace a section that the file names.
        given = {name: made for name, made in objects.items() if any(map(is_object, _parts_of(keys.get(name))))}
        return cls(**{**keys, **given})

    def __reduce__(self) -> tuple[Any, ...]:
        # As keys, for the classes of its sections are made when their kinds are known, and pickle knows none of them.
        return partial(type(self), **self.given_keys()), ()

    def given_keys(self) -> dict[str, Any]:
        """The keys that were given, in the form that YAML holds; but objects that no file can name."""
        # Only what was given: a default may follow from a key that an override changes.
        return {**self.model_dump(mode="json", exclude_unset=True), **self.objects()}

    def objects(self) -> dict[str, Any]:
        """The sections that are objects given in Python, which no file can name."""
        held = {name: part for name, part in self if any(map(_holds_object, _parts_of(part)))}
        return {name: [*map(_given, part)] if isinstance(part, tuple) else _given(part) for name, part in held.items()}

    def dump(self) -> dict[str, Any]:
        """Every value in force, in the form that YAML holds."""
        return self.model_dump(mode="json")


def _parts_of(section: object) -> Sequence[object]:
    """The sections of a list, or a section alone."""
    return section if isinstance(section, list | tuple) else (section,)


def _holds_object(part: object) -> bool:
    return isinstance(part, Component) and part.is_object


def _given(part: Component) -> Any:
    """The object that a section holds, or its keys."""
    return part.make() if part.is_object else part.model_dump(mode="json", exclude_unset=True)
