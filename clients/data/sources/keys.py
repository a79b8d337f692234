"""Keys of a source that reads columns: which are predicted, which say who holds a row, and which are for testing.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fed.config.validation import Section
from fed.errors import InvalidData

__all__ = ["SourceKeys", "TestFile"]


class TestFile(Section):
    """File of which every row is for testing."""

    __test__ = False  # pytest takes a class of this name for tests

    path: Annotated[str, Field(min_length=1)]
    """Path of the file, or of a folder of files with the same columns; relative to the working directory."""


@dataclass(frozen=True, kw_only=True)
class SourceKeys:
    """Keys of a source; a column may be an array of an archive."""

    path: str | None = field(kw_only=False)
    label: str | None = field(kw_only=False)
    targets: str | list[str] | None = field(kw_only=False)
    client: str | None
    split: str | None
    metadata: list[str] | None
    classes: int | None
    test: TestFile | None

    def named(self) -> dict[str, str]:
        """Columns that are neither features nor targets → the key that names each."""
        keys = {"client": self.client, "split": self.split}
        named = dict.fromkeys(self.metadata or [], "data.metadata")
        return named | {name: f"data.{key}" for key, name in keys.items() if name is not None}

    def of_test(self, path: str) -> "SourceKeys":
        """Keys of the test file, which has no clients and no split."""
        return replace(self, path=path, client=None, split=None, metadata=None, test=None)

    def aims(self) -> list[str]:
        """Names of the columns to predict: of class labels, or of real targets.

        Raises:
            InvalidData: if both are named, or targets more than once or with classes.
        """
        if self.targets is None:
            return ["label" if self.label is None else self.label]
        given = {"label": self.label, "classes": self.classes}
        others = [f"data.{key}: {value}" for key, value in given.items() if value is not None]
        if others:
            raise InvalidData(
                f"{self.path}: data.targets names real targets, which have no classes, got {' and '.join(others)} "
                "beside it: give the labels or the targets"
            )
        names = [self.targets] if isinstance(self.targets, str) else self.targets
        if not names or len(set(names)) < len(names):
            raise InvalidData(
                f"{self.path}: data.targets must name a column or several, each once, got {names}: correct the list"
            )
        return names

    def test_rows(
        self, said_E: Sequence[str] | NDArray[Any], wrong: Callable[[str, int, str], InvalidData] | None = None
    ) -> NDArray[np.bool_]:
        """Rows of the test set, as the column ``split`` says: train or test.

        Args:
            said_E: content of that column.
            wrong: (name of the column, row from 0, rule for the cell) → error on that cell.

        Raises:
            InvalidData: if a row says something else, or none is to train on or none to test on.
        """
        assert self.split is not None
        said = [str(one) for one in said_E]
        others = [row for row, one in enumerate(said) if one not in ("train", "test")]
        if others and wrong is not None:
            raise wrong(self.split, others[0], "say train or test")
        if others:
            raise InvalidData(
                f"{self.path}: array {self.split!r} must say train or test, got {said[others[0]]!r} in row "
                f"{others[0] + 1}: save these texts"
            )
        if len(set(said)) < 2:
            raise InvalidData(
                f"{self.path}: {self.split} must leave samples to train on and samples to test on, got {said[0]} in "
                f"all {len(said)} rows: correct it, or leave out data.split, and data.test_fraction is held out"
            )
        return np.array([one == "test" for one in said])

    def with_holders(
        self, columns: dict[str, NDArray[np.generic]], stems_E: NDArray[np.generic]
    ) -> dict[str, NDArray[np.generic]]:
        """Columns with the partitions' own meaning of ``client`` and ``file``, not a feature that has that name."""
        held = {name: column for name, column in columns.items() if name != "client"}
        return {**held, "file": stems_E, **({"client": columns[self.client]} if self.client else {})}

    def class_labels(self, labels_E: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels of the column that is predicted, once they are found to be classes."""
        # Without data.classes any number from 0 on may be a class.
        wrong = np.flatnonzero((labels_E < 0) | (labels_E >= (self.classes or np.iinfo(np.int64).max)))
        if len(wrong):
            allowed = "at least 0" if self.classes is None else f"in 0 … {self.classes - 1}, as data.classes says"
            raise InvalidData(
                f"{self.path}: labels must be {allowed}, got {labels_E[wrong[0]]} in row {wrong[0] + 1} of "
                f"{self.aims()[0]}: number the classes from 0"
            )
        return labels_E
