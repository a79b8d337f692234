"""Documents: sections that stand in a YAML file of their own."""

from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from fed.config import yaml
from fed.config.validation import Section, sentences
from fed.errors import InvalidExperiment

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
    def load(cls, path: str | Path) -> Self:
        """Read a YAML file.

        Raises:
            InvalidInput: if there is no such file.
            InvalidExperiment: one line, which begins with the file, for each thing wrong.
        """
        path = Path(path)
        keys = yaml.load(path)
        try:
            return cls(**keys)
        except InvalidExperiment as error:
            raise InvalidExperiment("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None

    def __reduce__(self) -> tuple[Any, ...]:
        # As keys, for the classes of its sections are made when their kinds are known, and pickle knows none of them.
        return _made_of, (type(self), self.model_dump(mode="json", exclude_unset=True))

    def dump(self) -> dict[str, Any]:
        """Every value in force, in the form that YAML holds."""
        return self.model_dump(mode="json")


def _made_of(document: type[Document], keys: dict[str, Any]) -> Document:
    return document(**keys)
