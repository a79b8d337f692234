"""Tables, a row a sample: ``csv`` with a header, and ``npz`` as NumPy saves it. Shapes: N rows, D features."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from fed.clients.data.samples import Samples
from fed.clients.data.sources.files import files_of
from fed.clients.data.sources.sheet import read_sheet
from fed.config.validation import nearest
from fed.errors import InvalidData

__all__ = ["csv", "npz"]


def csv(
    path: str,
    label: str = "label",
    client: str | None = None,
    metadata: list[str] | None = None,
    classes: PositiveInt | None = None,
) -> Samples:
    """A table with a header: every column is a feature but the label's, the client's and those named as metadata.

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
    sheet = read_sheet(files_of(path, ".csv"), named)
    reals = {name: sheet.reals(name) for name in sheet.cells if name not in named}
    if not reals:
        raise InvalidData(f"{path}: must have a column beside {', '.join(named)} to be a feature, got none: add one")
    columns: dict[str, NDArray[np.generic]] = {**reals, **{name: sheet.values(name) for name in metadata or []}}
    if client:
        columns[client] = sheet.names(client)
    columns = _with_holders(columns, client, [file.stem for file, _ in sheet.places])
    labels_N = _labels(sheet.integers(label), path, label, classes)
    inputs_ND = np.stack(list(reals.values()), axis=1)
    return Samples(torch.from_numpy(inputs_ND), torch.from_numpy(labels_N), None, {**columns, label: labels_N}, classes)


def npz(
    path: str,
    label: str = "label",
    client: str | None = None,
    inputs: str | None = None,
    classes: PositiveInt | None = None,
) -> Samples:
    """Arrays that NumPy saved side by side, their first axis the samples: inputs, labels, and perhaps clients.

    Inputs become float32, as they are: nothing is scaled. Other arrays of one value a sample serve the partitions
    ``hash``, ``range`` and ``rank`` under their names.

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
    arrays, files_N = _arrays(files)
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
    labels_N = _labels(arrays[label].astype(np.int64), path, label, classes)
    columns = {name: array for name, array in arrays.items() if name != left[0] and array.shape == labels_N.shape}
    columns = _with_holders(columns, client, files_N)
    return Samples(_reals(arrays[left[0]], files[0], left[0]), torch.from_numpy(labels_N), None, columns, classes)


def _with_holders(
    columns: dict[str, NDArray[np.generic]], client: str | None, files: list[str]
) -> dict[str, NDArray[np.generic]]:
    """The columns, where ``client`` and ``file`` are what partitions take them for, and not a feature of that name."""
    held = {name: column for name, column in columns.items() if name != "client"}
    return {**held, "file": np.array(files), **({"client": columns[client]} if client else {})}


def _labels(labels_N: NDArray[np.int64], path: str, label: str, classes: int | None) -> NDArray[np.int64]:
    wrong = np.flatnonzero((labels_N < 0) | (labels_N >= (classes or np.iinfo(np.int64).max)))
    if len(wrong):
        allowed = "at least 0" if classes is None else f"in 0 … {classes - 1}, as data.classes says"
        raise InvalidData(
            f"{path}: labels must be {allowed}, got {labels_N[wrong[0]]} in row {wrong[0] + 1} of {label}: "
            "number the classes from 0"
        )
    return labels_N


def _reals(array: NDArray[np.generic], file: Path, name: str) -> torch.Tensor:
    if array.dtype.kind not in "fiub":
        raise InvalidData(f"{file}: array {name!r} must be real numbers, got {array.dtype}: save it as float32")
    with np.errstate(over="ignore"):
        values = np.asarray(array, dtype=np.float32)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise InvalidData(
            f"{file}: array {name!r} must be finite in float32, got {array[place]} in row {place[0] + 1}, "
            f"index {place}: clean or drop that sample"
        )
    return torch.from_numpy(values.reshape(-1, 1) if values.ndim == 1 else values)


def _arrays(files: list[Path]) -> tuple[dict[str, NDArray[np.generic]], list[str]]:
    """The arrays of all files, one file after the other, and the file of each sample."""
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
            archive = np.load(content, allow_pickle=False)
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
