"""Table files as sources, a row a sample: ``csv`` with a header, ``parquet``, and ``npz`` as NumPy saves it.

Shapes: see :mod:`fed.vectors.layout`.
"""

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fed.clients.data.by_schema import NamedColumns, by_schema, names_by_key
from fed.clients.data.samples import Names, Samples
from fed.clients.data.sheets import Sheet
from fed.clients.data.sources.files import files_of
from fed.config.table import TableSection
from fed.config.validation import Section, nearest
from fed.errors import InvalidData
from fed.vectors.tensors import torch

if TYPE_CHECKING:
    from fed.clients.data.held import Pair

__all__ = ["TestFile", "csv", "npz", "parquet"]


class TestFile(Section):
    """File of which every row is for testing."""

    __test__ = False  # pytest takes a class of this name for tests

    path: Annotated[str, Field(min_length=1)]
    """Path of the file, or of a folder of files with the same columns; relative to the working directory."""


def csv(
    path: str | None = None,
    label: str | None = None,
    targets: str | list[str] | None = None,
    client: str | None = None,
    split: str | None = None,
    metadata: list[str] | None = None,
    classes: PositiveInt | None = None,
    test: TestFile | None = None,
    schema: TableSection | None = None,
) -> Samples:
    """Table with a header: every column is a feature but those that the keys name.

    Each column, feature or not, serves the partitions ``hash``, ``range`` and ``rank`` under its name.

    Args:
        path: a file, or a folder of .csv files with one header, each a client of the partition ``file``; relative to
            the working directory.
        label: the column of class labels, integers from 0; ``label`` unless ``targets`` are given.
        targets: column of real targets in place of labels, [E] in float32, or list of columns, [E, T] in their order,
            such as a survival's time and event.
        client: column with the name of each row's client, for the partition ``natural``.
        split: a column that says ``train`` or ``test``. Rows that say ``test`` are the test set, and where the
            partition names clients also each client's own.
        metadata: columns that are no features; they may hold text.
        classes: number of classes; one more than the largest label unless given.
        test: file whose rows are all the test set; it needs no column of clients and none of the split. A server may
            have it alone, without ``path``.
        schema: the experiment's section table, by which columns are found; None: by the keys above.

    Raises:
        InvalidData: if a column is missing or has no name, or a cell is empty or no number; the message names row and
            column.
    """
    keys = _Keys(path, label, targets, client=client, split=split, metadata=metadata, classes=classes, test=test)
    return _samples(keys, schema, ".csv")


def parquet(
    path: str | None = None,
    label: str | None = None,
    targets: str | list[str] | None = None,
    client: str | None = None,
    split: str | None = None,
    metadata: list[str] | None = None,
    classes: PositiveInt | None = None,
    test: TestFile | None = None,
    schema: TableSection | None = None,
) -> Samples:
    """Table of Parquet: every column is a feature but those that the keys name, as in ``csv``.

    Null and NaN are empty cells.

    Args:
        path: a file, or a folder of .parquet files with the same columns, each a client of the partition ``file``;
            relative to the working directory.
        label: the column of class labels, integers from 0; ``label`` unless ``targets`` are given.
        targets: column of real targets in place of labels, [E] in float32, or list of columns, [E, T] in their order,
            such as a survival's time and event.
        client: column with the name of each row's client, for the partition ``natural``.
        split: a column that says ``train`` or ``test``. Rows that say ``test`` are the test set, and where the
            partition names clients also each client's own.
        metadata: columns that are no features; they may hold text.
        classes: number of classes; one more than the largest label unless given.
        test: file whose rows are all the test set; it needs no column of clients and none of the split. A server may
            have it alone, without ``path``.
        schema: the experiment's section table, by which columns are found; None: by the keys above.

    Raises:
        InvalidData: if a column is missing or has no name, or a cell is empty or no number; the message names row and
            column.
    """
    keys = _Keys(path, label, targets, client=client, split=split, metadata=metadata, classes=classes, test=test)
    return _samples(keys, schema, ".parquet")


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
    (aim,) = _aims(path, label, targets, classes)
    keys = {"label" if targets is None else "targets": aim, "client": client, "split": split}
    for key, name in {**keys, "inputs": inputs}.items():
        if name is not None and name not in arrays:
            raise InvalidData(f"{files[0]}: data.{key} must name an array, got {name!r}{nearest(name, list(arrays))}")
    left = [inputs] if inputs else [name for name in arrays if name not in keys.values()]
    if len(left) != 1:
        found = ", ".join(left) or "none left"
        raise InvalidData(f"{files[0]}: data.inputs must name the one array of inputs, got {found}")
    lengths = {name: len(array) for name, array in arrays.items() if name in (*keys.values(), left[0])}
    if len(set(lengths.values())) > 1:
        raise InvalidData(f"{files[0]}: arrays must be of one length, got {lengths}: give each sample one of each")
    if targets is None:
        targets_E = torch.from_numpy(_labels(_integers(arrays[aim], files[0], aim), path, aim, classes))
    else:
        targets_E = _targets(arrays[aim], files[0], aim)
    is_test_E = None if split is None else _is_test(arrays[split], path, split)
    shape = (len(targets_E),)
    # A partition may name any array with one value a sample.
    columns = {name: array for name, array in arrays.items() if name != left[0] and array.shape == shape}
    columns = _with_holders(columns, client, np.array(files_E))
    inputs_E = _reals(arrays[left[0]], files[0], left[0])
    # Models take features [E, F]: one number a sample is one feature.
    inputs_E = inputs_E.unsqueeze(1) if inputs_E.ndim == 1 else inputs_E
    return Samples(inputs_E, targets_E, columns=columns, classes=classes, is_test=is_test_E)


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """Keys of a source that reads a table."""

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

    def of_test(self, path: str) -> "_Keys":
        """Keys of the test file, which has no clients and no split."""
        return replace(self, path=path, client=None, split=None, metadata=None, test=None)


def _samples(keys: _Keys, schema: TableSection | None, suffix: str) -> Samples:
    """Samples of a table, and of its test file."""
    classes = keys.classes if schema is None or schema.classes is None else len(schema.classes)
    test: Pair | None = None
    if keys.test is not None:
        _, table = _read(keys.of_test(keys.test.path), schema, suffix)
        kept = slice(None) if table.is_kept is None else table.is_kept
        test = torch.from_numpy(table.inputs[kept]), torch.from_numpy(table.targets[kept])
        if keys.path is None:
            # Nothing to train on: these are the samples of a server.
            none = slice(0, 0)
            return Samples(test[0][none], test[1][none], test=test, classes=classes, names=table.names)
    if keys.path is None:
        raise InvalidData("data.path must name a table, got none: give one, or to a server data.test alone")
    sheet, table = _read(keys, schema, suffix)
    is_test = None
    if keys.split is not None:
        if test is not None:
            raise InvalidData(f"{keys.path}: data.split and data.test both give a test set, got both: remove one")
        is_test = _is_test(sheet.column(keys.split), keys.path, keys.split, sheet.wrong)
    samples = Samples(
        inputs=torch.from_numpy(table.inputs),
        targets=torch.from_numpy(table.targets),
        test=test,
        columns=_columns(sheet, keys, table.columns),
        classes=classes,
        names=table.names,
        is_test=is_test,
    )
    return samples if table.is_kept is None else samples.take(np.flatnonzero(table.is_kept))


def _read(keys: _Keys, schema: TableSection | None, suffix: str) -> tuple[Sheet, NamedColumns]:
    assert keys.path is not None
    files = files_of(keys.path, suffix)
    if schema is None:
        return _as_it_stands(keys, files)
    given = {"label": keys.label, "targets": keys.targets, "classes": keys.classes}
    for key, value in given.items():
        if value is not None:
            raise InvalidData(
                f"{keys.path}: the experiment's section table says what to predict, got data.{key}: {value} beside it: "
                "remove the key"
            )
    return _by_name(keys, schema, files)


def _as_it_stands(keys: _Keys, files: list[Path]) -> tuple[Sheet, NamedColumns]:
    """A table whose columns are all features but those that the keys name."""
    assert keys.path is not None
    path = keys.path
    aims = _aims(path, keys.label, keys.targets, keys.classes)
    named = dict.fromkeys(aims, "data.label" if keys.targets is None else "data.targets") | keys.named()
    sheet = Sheet.read(files, named)
    reals = {name: sheet.reals(name) for name in sheet.names if name not in named}
    if not reals:
        raise InvalidData(f"{path}: must have a column beside {', '.join(named)} to be a feature, got none: add one")
    aimed_at: dict[str, NDArray[Any]]
    if keys.targets is None:
        aimed_at = {aims[0]: _labels(sheet.integers(aims[0]), path, aims[0], keys.classes)}
    else:
        aimed_at = {name: sheet.reals(name) for name in aims}
    targets_E = np.stack(list(aimed_at.values()), axis=1) if isinstance(keys.targets, list) else aimed_at[aims[0]]
    inputs_EF = np.stack(list(reals.values()), axis=1)
    return sheet, NamedColumns(inputs_EF, targets_E, {**reals, **aimed_at}, Names((*reals, *aims)))


def _by_name(keys: _Keys, schema: TableSection, files: list[Path]) -> tuple[Sheet, NamedColumns]:
    """A table whose columns are found by the names of a schema, wherever they stand."""
    sheet = Sheet.read(files, names_by_key(schema) | keys.named(), are_found_by_name=True)
    return sheet, by_schema(sheet, schema)


def _columns(sheet: Sheet, keys: _Keys, read: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    """Columns that partitions may name: those that are read, and those that the keys name."""
    columns: dict[str, NDArray[np.generic]] = {**{name: sheet.values(name) for name in keys.metadata or []}, **read}
    if keys.client:
        columns[keys.client] = sheet.identities(keys.client)
    return _with_holders(columns, keys.client, sheet.stems)


def _aims(path: str, label: str | None, targets: str | list[str] | None, classes: int | None) -> list[str]:
    """Names of the columns to predict: of class labels, or of real targets.

    Raises:
        InvalidData: if both are named, or targets more than once or with classes.
    """
    if targets is None:
        return ["label" if label is None else label]
    others = [f"data.{key}: {value}" for key, value in (("label", label), ("classes", classes)) if value is not None]
    if others:
        raise InvalidData(
            f"{path}: data.targets names real targets, which have no classes, got {' and '.join(others)} beside it: "
            "give the labels or the targets"
        )
    names = [targets] if isinstance(targets, str) else targets
    if not names or len(set(names)) < len(names):
        raise InvalidData(
            f"{path}: data.targets must name a column or several, each once, got {names}: correct the list"
        )
    return names


def _is_test(
    said_E: Sequence[str] | NDArray[Any],
    path: str,
    split: str,
    wrong: Callable[[str, int, str], InvalidData] | None = None,
) -> NDArray[np.bool_]:
    """Rows of the test set, as a column says.

    Args:
        said_E: ``train`` or ``test`` for each row.
        path: path of the source, named in errors.
        split: name of the column, named in errors.
        wrong: (name of the column, row from 0, rule for the cell) → error on that cell.

    Raises:
        InvalidData: if a row says something else, or none is to train on or none to test on.
    """
    said = [str(one) for one in said_E]
    others = [row for row, one in enumerate(said) if one not in ("train", "test")]
    if others and wrong is not None:
        raise wrong(split, others[0], "say train or test")
    if others:
        raise InvalidData(
            f"{path}: array {split!r} must say train or test, got {said[others[0]]!r} in row {others[0] + 1}: save "
            "these texts"
        )
    if len(set(said)) < 2:
        raise InvalidData(
            f"{path}: {split} must leave samples to train on and samples to test on, got {said[0]} in all "
            f"{len(said)} rows: correct it, or leave out data.split, and data.test_fraction is held out"
        )
    return np.array([one == "test" for one in said])


def _with_holders(
    columns: dict[str, NDArray[np.generic]], client: str | None, stems_E: NDArray[np.generic]
) -> dict[str, NDArray[np.generic]]:
    """Columns with the partitions' own meaning of ``client`` and ``file``, not a feature that has that name."""
    held = {name: column for name, column in columns.items() if name != "client"}
    return {**held, "file": stems_E, **({"client": columns[client]} if client else {})}


def _labels(labels_E: NDArray[np.int64], path: str, label: str, classes: int | None) -> NDArray[np.int64]:
    # Without data.classes any number from 0 on may be a class.
    wrong = np.flatnonzero((labels_E < 0) | (labels_E >= (classes or np.iinfo(np.int64).max)))
    if len(wrong):
        allowed = "at least 0" if classes is None else f"in 0 … {classes - 1}, as data.classes says"
        raise InvalidData(
            f"{path}: labels must be {allowed}, got {labels_E[wrong[0]]} in row {wrong[0] + 1} of {label}: "
            "number the classes from 0"
        )
    return labels_E


def _integers(array: NDArray[np.generic], file: Path, name: str) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu" or array.ndim != 1:
        remedy = f"{name}.argmax(1)" if array.ndim == 2 else f"{name}.astype(int)"
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
