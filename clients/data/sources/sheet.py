"""Comma-separated files, read cell by cell so that what is wrong has a place."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fed.config.validation import nearest
from fed.errors import InvalidData

__all__ = ["Sheet", "read_sheet"]

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Sheet:
    """The cells of files that share a header.

    Args:
        cells: column → the text of each row.
        places: the file of each row, and its number there: 1 for the first below the header, empty lines left out.
    """

    cells: dict[str, tuple[str, ...]]
    places: list[tuple[Path, int]]

    def column(self, name: str) -> tuple[str, ...]:
        """The text of a column, no cell of it empty."""
        for row, cell in enumerate(self.cells[name]):
            if not cell.strip():
                raise self._wrong(name, row, "not be empty")
        return self.cells[name]

    def integers(self, name: str) -> NDArray[np.int64]:
        """A column of integers."""
        return np.array(self._numbers(name, _int64, "be an integer"), dtype=np.int64)

    def reals(self, name: str) -> NDArray[np.float32]:
        """A column of numbers that float32 can hold."""
        if not any(_is_number(cell) for cell in self.column(name)):
            raise self._wrong(
                name, 0, "be a number", "a column of texts is no feature; name it in data.metadata or as data.client"
            )
        with np.errstate(over="ignore"):
            values = np.array(self._numbers(name, float, "be a number")).astype(np.float32)
        if not np.isfinite(values).all():
            raise self._wrong(name, int(np.flatnonzero(~np.isfinite(values))[0]), "be finite in float32")
        return values

    def names(self, name: str) -> NDArray[np.generic]:
        """A column of integers where every cell is one as Python would write it, else of texts."""
        cells = self.column(name)
        try:
            numbers = [_int64(cell) for cell in cells]
        except ValueError:
            return np.array(cells)
        return np.array(numbers if tuple(map(str, numbers)) == cells else cells)

    def values(self, name: str) -> NDArray[np.generic]:
        """A column of numbers where every cell is one, else of texts."""
        try:
            return np.array([float(cell) for cell in self.column(name)])
        except ValueError:
            return np.array(self.column(name))

    def _numbers(self, name: str, number: Callable[[str], _Number], allowed: str) -> list[_Number]:
        values = []
        for row, cell in enumerate(self.column(name)):
            try:
                values.append(number(cell))
            except ValueError:
                raise self._wrong(name, row, allowed) from None
        return values

    def _wrong(
        self, name: str, row: int, allowed: str, remedy: str = "correct the cell, or remove the row"
    ) -> InvalidData:
        file, number = self.places[row]
        return InvalidData(
            f"{file}: row {number}, column {name} must {allowed}, got {self.cells[name][row]!r}: {remedy}"
        )


def read_sheet(files: list[Path], required: dict[str, str]) -> Sheet:
    """Read files that share a header.

    Args:
        files: at least one.
        required: columns that must be there → the key of ``data`` that named them.

    Raises:
        InvalidData: if a file cannot be read, headers differ, a column is missing, or a row has cells too many or few.
    """
    header: list[str] | None = None
    rows: list[list[str]] = []
    places: list[tuple[Path, int]] = []
    for file in files:
        first, *below = _rows(file)
        _check_header(first, file, required)
        if header is not None and first != header:
            raise InvalidData(f"{file}: must have the header of {files[0]}, {header}, got {first}: make them alike")
        header = first
        for number, row in enumerate(below, start=1):
            if len(row) != len(header):
                raise InvalidData(
                    f"{file}: row {number} must have {len(header)} cells like the header, got {len(row)}: correct it"
                )
            places.append((file, number))
        rows += below
    if not rows or header is None:
        raise InvalidData(f"{files[0]}: must have rows below the header, got none: give it data")
    return Sheet(dict(zip(header, zip(*rows, strict=True), strict=True)), places)


def _rows(file: Path) -> list[list[str]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = [row for row in csv.reader(lines) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidData(f"{file}: cannot be read as comma-separated text in UTF-8 ({error}): convert it") from None
    if not rows:
        raise InvalidData(f"{file}: must begin with a header, got an empty file: give it data")
    rows[0] = [name.strip() for name in rows[0]]
    return rows


def _check_header(header: list[str], file: Path, required: dict[str, str]) -> None:
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise InvalidData(f"{file}: the header must name each column once, got {twice[0]!r} again: rename one")
    for name, key in required.items():
        if name not in header:
            raise InvalidData(f"{file}: data.{key} must name a column, got {name!r}{nearest(name, header)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _int64(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{value} needs more than 64 bits")
    return value
