"""Table files as sources, a row a sample: ``csv`` with a header, and ``npz`` as NumPy saves it.

Shapes: see :mod:`fed.layout`.
"""

import zipfile
import zlib
from collections.abc import Sequence
from csv import Error as CSVError
from csv import reader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fed.clients.data.samples import Names, Samples
from fed.clients.data.sources.files import files_of
from fed.config.validation import nearest
from fed.errors import InvalidData
from fed.tensors import torch

__all__ = ["csv", "npz"]


def csv(
    path: str,
    label: str = "label",
    client: str | None = None,
    metadata: list[str] | None = None,
    classes: PositiveInt | None = None,
) -> Samples:
    """Table with a header: every column is a feature but the label's, the client's and those named as metadata.

    Each column, feature or not, serves the partitions ``hash``, ``range`` and ``rank`` under its name.

    Args:
        path: a file, or a folder of .csv files with one header, each a client of the partition ``file``; relative to
            the working directory.
        label: the column of labels, integers from 0.
        client: a column that names each row's client, for the partition ``natural``.
        metadata: columns that are no features; they may hold text.
        classes: how many classes there are; one more than the largest label unless given.

    Raises:
        InvalidData: if a column is missing, or a cell empty or no number; the message names row and column.
    """
    named = {label: "label", **dict.fromkeys(metadata or [], "metadata"), **({client: "client"} if client else {})}
    sheet = _read_sheet(files_of(path, ".csv"), named)
    reals = {name: sheet.reals(name) for name in sheet.cells if name not in named}
    if not reals:
        raise InvalidData(f"{path}: must have a column beside {', '.join(named)} to be a feature, got none: add one")
    columns: dict[str, NDArray[np.generic]] = {**reals, **{name: sheet.values(name) for name in metadata or []}}
    if client:
        columns[client] = sheet.names(client)
    columns = _with_holders(columns, client, [file.stem for file, _ in sheet.places])
    labels_E = _labels(sheet.numbers(label, np.int64, "be an integer"), path, label, classes)
    inputs_EF = np.stack(list(reals.values()), axis=1)
    inputs, targets = torch.from_numpy(inputs_EF), torch.from_numpy(labels_E)
    return Samples(inputs, targets, None, {**columns, label: labels_E}, classes, Names((*reals, label)))


def npz(
    path: str,
    label: str = "label",
    client: str | None = None,
    inputs: str | None = None,
    classes: PositiveInt | None = None,
) -> Samples:
    """Arrays that NumPy saved side by side, their first axis the samples: inputs, labels, and perhaps clients.

    Inputs become float32, unscaled. Other arrays of one value a sample serve the partitions ``hash``, ``range`` and
    ``rank`` under their names.

    Args:
        path: a file, or a folder of .npz files with the same arrays, each a client of the partition ``file``; relative
            to the working directory.
        label: the array of labels, integers from 0.
        client: an array that names each sample's client, for the partition ``natural``.
        inputs: the array of inputs; unless given, the one that is left.
        classes: how many classes there are; one more than the largest label unless given.

    Raises:
        InvalidData: if a file is no such archive, or an array is missing, of another type, or of another length.
    """
    files = files_of(path, ".npz")
    arrays, files_E = _arrays(files)
    for key, name in (("label", label), ("client", client), ("inputs", inputs)):
        if name is not None and name not in arrays:
            raise InvalidData(f"{files[0]}: data.{key} must name an array, got {name!r}{nearest(name, list(arrays))}")
    left = [inputs] if inputs else [name for name in arrays if name not in (label, client)]
    if len(left) != 1:
        found = ", ".join(left) or "none left"
        raise InvalidData(f"{files[0]}: data.inputs must name the one array of inputs, got {found}")
    lengths = {name: len(array) for name, array in arrays.items() if name in (label, client, left[0])}
    if len(set(lengths.values())) > 1:
        raise InvalidData(f"{files[0]}: arrays must be of one length, got {lengths}: give each sample one of each")
    if arrays[label].dtype.kind not in "iu" or arrays[label].ndim != 1:
        remedy = f"{label}.argmax(1)" if arrays[label].ndim == 2 else f"{label}.astype(int)"
        raise InvalidData(
            f"{files[0]}: array {label!r} must be one integer a sample, got {arrays[label].dtype} of shape "
            f"{arrays[label].shape}: give class numbers, {remedy}"
        )
    labels_E = _labels(arrays[label].astype(np.int64), path, label, classes)
    columns = {name: array for name, array in arrays.items() if name != left[0] and array.shape == labels_E.shape}
    columns = _with_holders(columns, client, files_E)
    return Samples(_reals(arrays[left[0]], files[0], left[0]), torch.from_numpy(labels_E), None, columns, classes)


def _with_holders(
    columns: dict[str, NDArray[np.generic]], client: str | None, files: list[str]
) -> dict[str, NDArray[np.generic]]:
    """Columns with the partitions' own meaning of ``client`` and ``file``, not a feature that has that name."""
    held = {name: column for name, column in columns.items() if name != "client"}
    return {**held, "file": np.array(files), **({"client": columns[client]} if client else {})}


def _labels(labels_E: NDArray[np.int64], path: str, label: str, classes: int | None) -> NDArray[np.int64]:
    wrong = np.flatnonzero((labels_E < 0) | (labels_E >= (classes or np.iinfo(np.int64).max)))
    if len(wrong):
        allowed = "at least 0" if classes is None else f"in 0 … {classes - 1}, as data.classes says"
        raise InvalidData(
            f"{path}: labels must be {allowed}, got {labels_E[wrong[0]]} in row {wrong[0] + 1} of {label}: "
            "number the classes from 0"
        )
    return labels_E


def _reals(array: NDArray[np.generic], file: Path, name: str) -> "torch.Tensor":
    if array.dtype.kind not in "fiub":
        raise InvalidData(f"{file}: array {name!r} must be real numbers, got {array.dtype}: save it as float32")
    with np.errstate(over="ignore"):
        values = np.asarray(array, dtype=np.float32)  # what overflows becomes infinite, and is refused with its place
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise InvalidData(
            f"{file}: array {name!r} must be finite in float32, got {array[place]} in row {place[0] + 1}, "
            f"index {place}: clean or drop that sample"
        )
    return torch.from_numpy(values.reshape(-1, 1) if values.ndim == 1 else values)


def _arrays(files: list[Path]) -> tuple[dict[str, NDArray[np.generic]], list[str]]:
    """Arrays of all files, one file after the other, and the file of each sample."""
    archives = [_archive(file) for file in files]
    for file, archive in zip(files, archives, strict=True):
        shapes = {name: array.shape[1:] for name, array in archive.items()}
        expected = {name: array.shape[1:] for name, array in archives[0].items()}
        if shapes != expected:
            raise InvalidData(
                f"{file}: must hold arrays like those of {files[0]}, {expected} a sample, got {shapes}: make them alike"
            )
    arrays = {name: np.concatenate([archive[name] for archive in archives]) for name in archives[0]}
    stems = [file.stem for file, archive in zip(files, archives, strict=True) for _ in next(iter(archive.values()))]
    return arrays, stems


def _archive(file: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with file.open("rb") as content:
            archive = np.load(content, allow_pickle=False)  # unpickling would run the file's code
            arrays = None if isinstance(archive, np.ndarray) else {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidData(
            f"{file}: cannot be read as arrays of numbers or texts ({type(error).__name__}): save it with numpy.savez, "
            "texts with .astype(str) and nothing as objects"
        ) from None
    if arrays is None:
        raise InvalidData(
            f"{file}: must hold arrays by name, inputs and labels, got one array without a name: save both with "
            "numpy.savez(file, x=…, label=…)"
        )
    if not arrays or any(array.ndim == 0 or not len(array) for array in arrays.values()):
        shapes = {name: array.shape for name, array in arrays.items()}
        raise InvalidData(f"{file}: must hold arrays of at least one sample, got {shapes}: give it data")
    return arrays


@dataclass(frozen=True)
class _Sheet:
    """Cells of files that share a header.

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

    def numbers(self, name: str, kind: type[Any], allowed: str) -> NDArray[Any]:
        """A column of numbers.

        Args:
            name: the column's.
            kind: of NumPy's types.
            allowed: what each cell must be, for the message.
        """
        cells = self.column(name)
        if (values := _numbers(cells, kind)) is not None:
            return values
        wrong = [row for row, cell in enumerate(cells) if _numbers([cell], kind) is None]
        raise self._wrong(name, wrong[0], allowed, are_texts=kind is np.float64 and len(wrong) == len(cells))

    def reals(self, name: str) -> NDArray[np.float32]:
        """A column of numbers that float32 can hold."""
        with np.errstate(over="ignore"):
            # as above, what overflows is refused with its place
            values = self.numbers(name, np.float64, "be a number").astype(np.float32)
        if not np.isfinite(values).all():
            raise self._wrong(name, int(np.flatnonzero(~np.isfinite(values))[0]), "be finite in float32")
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

    def _wrong(self, name: str, row: int, allowed: str, *, are_texts: bool = False) -> InvalidData:
        file, number = self.places[row]
        remedy = "correct the cell, or remove the row"
        if are_texts:
            remedy = "a column of texts is no feature; name it in data.metadata or as data.client"
        return InvalidData(
            f"{file}: row {number}, column {name} must {allowed}, got {self.cells[name][row]!r}: {remedy}"
        )


def _read_sheet(files: list[Path], required: dict[str, str]) -> _Sheet:
    """Read files that share a header.

    Args:
        files: at least one.
        required: columns that must be there → the key of ``data`` that named them.

    Raises:
        InvalidData: if a file cannot be read, headers differ, a column is missing, or a row has cells too many or few.
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
                    f"{file}: row {number} must have {len(header)} cells like the header, got {len(row)}: correct it"
                )
    rows = [row for sheet in sheets.values() for row in sheet[1:]]
    if not rows:
        raise InvalidData(f"{files[0]}: must have rows below the header, got none: give it data")
    places = [(file, number) for file, sheet in sheets.items() for number in range(1, len(sheet))]
    return _Sheet(dict(zip(header, zip(*rows, strict=True), strict=True)), places)


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
        # a type of texts would give every cell the longest one's room
        return np.array(cells, dtype=object).astype(kind)
    except (ValueError, OverflowError):
        return None
