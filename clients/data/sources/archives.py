"""Archives of arrays as a source: ``npz``, as NumPy saves it.

Shapes: see :mod:`fed.vectors.layout`.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fed.clients.data.samples import Samples
from fed.clients.data.sources.files import files_of
from fed.clients.data.sources.keys import SourceKeys
from fed.config.validation import nearest
from fed.errors import InvalidData
from fed.vectors.tensors import torch

__all__ = ["npz"]


def npz(
    path: str,
    label: str | None = None,
    targets: str | None = None,
    client: str | None = None,
    split: str | None = None,
    inputs: str | None = None,
    classes: PositiveInt | None = None,
) -> Samples:
    """Arrays that NumPy saved side by side, their first axis the samples: inputs, labels or targets, perhaps clients.

    Inputs become float32, unscaled. Other arrays of one value a sample serve the partitions ``hash``, ``range`` and
    ``rank`` under their names.

    Args:
        path: a file, or a folder of .npz files with the same arrays, each a client of the partition ``file``; relative
            to the working directory.
        label: the array of class labels, integers from 0; ``label`` unless ``targets`` are given.
        targets: array of real targets in place of labels, [E] or [E, T], which become float32.
        client: array with the name of each sample's client, for the partition ``natural``.
        split: an array of texts that say ``train`` or ``test``. Samples that say ``test`` are the test set, and where
            the partition names clients also each client's own.
        inputs: the array of inputs; unless given, the one that is left.
        classes: number of classes; one more than the largest label unless given.

    Raises:
        InvalidData: if a file is no such archive, or an array is missing, of another type, or of another length.
    """
    files = files_of(path, ".npz")
    arrays, files_E = _arrays(files)
    keys = SourceKeys(path, label, targets, client=client, split=split, metadata=None, classes=classes, test=None)
    (aim,) = keys.aims()
    named = {"label" if targets is None else "targets": aim, "client": client, "split": split}
    for key, name in {**named, "inputs": inputs}.items():
        if name is not None and name not in arrays:
            raise InvalidData(f"{files[0]}: data.{key} must name an array, got {name!r}{nearest(name, list(arrays))}")
    left = [inputs] if inputs else [name for name in arrays if name not in named.values()]
    if len(left) != 1:
        found = ", ".join(left) or "none left"
        raise InvalidData(
            f"{files[0]}: data.inputs must name the one array of inputs, got {found}: name one; for a model of several "
            "inputs write a source that returns a dictionary of them, python:module:function"
        )
    lengths = {name: len(array) for name, array in arrays.items() if name in (*named.values(), left[0])}
    if len(set(lengths.values())) > 1:
        raise InvalidData(f"{files[0]}: arrays must be of one length, got {lengths}: give each sample one of each")
    if targets is None:
        targets_E = torch.from_numpy(keys.class_labels(_integers(arrays[aim], files[0], aim)))
    else:
        targets_E = _targets(arrays[aim], files[0], aim)
    is_test_E = None if split is None else keys.test_rows(arrays[split])
    shape = (len(targets_E),)
    # A partition may name any array with one value a sample.
    columns = {name: array for name, array in arrays.items() if name != left[0] and array.shape == shape}
    columns = keys.with_holders(columns, np.array(files_E))
    inputs_E = _reals(arrays[left[0]], files[0], left[0])
    # Models take features [E, F]: one number a sample is one feature.
    inputs_E = inputs_E.unsqueeze(1) if inputs_E.ndim == 1 else inputs_E
    return Samples(inputs_E, targets_E, columns=columns, classes=classes, is_test=is_test_E)


def _integers(array: NDArray[np.generic], file: Path, name: str) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu" or array.ndim != 1:
        remedy = f"{name}.argmax(1)" if array.ndim == 2 else f"{name}.astype(int)"
        if array.dtype.kind in "US":
            remedy = f"numpy.searchsorted(classes, {name}) with the sorted list of all classes"
        raise InvalidData(
            f"{file}: array {name!r} must be one integer a sample, got {array.dtype} of shape {array.shape}: give "
            f"class numbers, {remedy}, or name it with data.targets"
        )
    return array.astype(np.int64)


def _targets(array: NDArray[np.generic], file: Path, name: str) -> "torch.Tensor":
    if array.ndim > 2 or array.shape[1:] == (0,):
        raise InvalidData(
            f"{file}: array {name!r} must be one number or one row of numbers a sample, got shape {array.shape}: "
            "reshape it to [E] or [E, T]"
        )
    return _reals(array, file, name)


def _reals(array: NDArray[np.generic], file: Path, name: str) -> "torch.Tensor":
    if array.dtype.kind not in "fiub":
        raise InvalidData(f"{file}: array {name!r} must be real numbers, got {array.dtype}: save it as float32")
    with np.errstate(over="ignore"):
        values = np.asarray(array, dtype=np.float32)  # an overflow becomes infinite, and is refused with its place
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise InvalidData(
            f"{file}: array {name!r} must be finite in float32, got {array[place]} in row {place[0] + 1}, "
            f"index {place}: clean or drop that sample"
        )
    return torch.from_numpy(values)


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
    # NumPy raises any of these for a damaged file.
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
