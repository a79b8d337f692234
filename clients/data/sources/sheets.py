"""Sheets: files of comma-separated text that share a header, and errors that name the wrong cell.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from csv import Error as CSVError
from csv import reader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed.config.validation import nearest
from fed.errors import InvalidData

__all__ = ["Sheet"]


@dataclass(frozen=True)
class Sheet:
    """Cells of files that share a header.

    Args:
        cells: column → the text of each row.
        places: the file of each row, and its number there: 1 for the first below the header, empty lines left out.
    """

    cells: dict[str, tuple[str, ...]]
    places: list[tuple[Path, int]]

    @classmethod
    def read(cls, files: list[Path], required: dict[str, str]) -> "Sheet":
        """Read files that share a header.

        Args:
            files: paths of the files, at least one.
            required: columns that must be there → the key of ``data`` that named them.

        Raises:
            InvalidData: if a file cannot be read, headers differ, a column is missing, or a row has too many or too
                few cells.
        """
        sheets = {file: _rows(file) for file in files}
        header = sheets[files[0]][0]
        _check_header(header, files[0], required)
        for file, (first, *below) in sheets.items():
            if first != header:
                raise InvalidData(f"{file}: must have the header of {files[0]}, {header}, got {first}: make them alike")
            for number, row in enumerate(below, start=1):
                if len(row) != len(header):
                    raise InvalidData(
                        f"{file}: row {number} must have {len(header)} cells like the header, got {len(row)}: "
                        "correct it"
                    )
        rows = [row for sheet in sheets.values() for row in sheet[1:]]
        if not rows:
            raise InvalidData(f"{files[0]}: must have rows below the header, got none: give it data")
        places = [(file, number) for file, sheet in sheets.items() for number in range(1, len(sheet))]
        return cls(dict(zip(header, zip(*rows, strict=True), strict=True)), places)

    def column(self, name: str) -> tuple[str, ...]:
        """The text of a column, no cell of it empty."""
        for row, cell in enumerate(self.cells[name]):
            if not cell.strip():
                raise self.wrong(name, row, "not be empty")
        return self.cells[name]

    def numbers(self, name: str, kind: type[Any], allowed: str) -> NDArray[Any]:
        """A column of numbers.

        Args:
            name: name of the column.
            kind: type of NumPy's, such as ``numpy.int64``.
            allowed: rule for each cell, as the error says it behind "must", such as "be a number".
        """
        cells = self.column(name)
        if (values := _numbers(cells, kind)) is not None:
            return values
        wrong = [row for row, cell in enumerate(cells) if _numbers([cell], kind) is None]
        raise self.wrong(name, wrong[0], allowed, are_texts=kind is np.float64 and len(wrong) == len(cells))

    def reals(self, name: str) -> NDArray[np.float32]:
        """A column of numbers that float32 can hold."""
        with np.errstate(over="ignore"):
            # An overflow becomes infinite, and is refused below with its place.
            values = self.numbers(name, np.float64, "be a number").astype(np.float32)
        if not np.isfinite(values).all():
            raise self.wrong(name, int(np.flatnonzero(~np.isfinite(values))[0]), "be finite in float32")
        return values

    def names(self, name: str) -> NDArray[np.generic]:
        """A column of integers where every cell is one as Python would write it, else of texts."""
        cells = self.column(name)
        numbers = _numbers(cells, np.int64)
        if numbers is None or tuple(map(str, numbers.tolist())) != cells:  # 7 and 007 may be two clients
            return np.array(cells)
        return numbers

    def values(self, name: str) -> NDArray[np.generic]:
        """A column of numbers where every cell is one, else of texts."""
        numbers = _numbers(self.column(name), np.float64)
        return np.array(self.column(name)) if numbers is None else numbers

    def wrong(self, name: str, row: int, allowed: str, *, are_texts: bool = False) -> InvalidData:
        """Error on a cell.

        Args:
            name: name of the column.
            row: number of the row, from 0.
            allowed: rule for the cell, as the error says it behind "must", such as "be a number".
            are_texts: True where all cells of the column are texts.
        """
        file, number = self.places[row]
        remedy = "correct the cell, or remove the row"
        if are_texts:
            remedy = "a column of texts is no feature; name it in data.metadata or as data.client"
        return InvalidData(
            f"{file}: row {number}, column {name} must {allowed}, got {self.cells[name][row]!r}: {remedy}"
        )


def _rows(file: Path) -> list[list[str]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
            rows = [row for row in reader(lines) if row]
    except (OSError, UnicodeDecodeError, CSVError) as error:
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


def _numbers(cells: Sequence[str], kind: type[Any]) -> NDArray[Any] | None:
    """Cells as numbers of one of NumPy's types; None where one is no such number."""
    try:
        # A type of texts would give every cell the longest one's room.
        return np.array(cells, dtype=object).astype(kind)
    except (ValueError, OverflowError):
        return None
