"""Table files as sources, a row a sample: ``csv`` with a header, and ``parquet``.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fed.clients.data.by_schema import NamedColumns, by_schema, names_by_key
from fed.clients.data.samples import Names, Samples
from fed.clients.data.sheets import Sheet
from fed.clients.data.sources.files import files_of
from fed.clients.data.sources.keys import SourceKeys, TestFile
from fed.config.table import TableSection
from fed.errors import InvalidData
from fed.vectors.tensors import torch

if TYPE_CHECKING:
    from fed.clients.data.held import Pair

__all__ = ["csv", "parquet"]

_TARGETS = (
    "data.targets names columns of numbers; where texts are names of classes, list these in the experiment's section "
    "table in its place"
)


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
        path: a file, or a folder of such files with the same columns, each a client of the partition ``file``;
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
    keys = SourceKeys(path, label, targets, client=client, split=split, metadata=metadata, classes=classes, test=test)
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

    Args: those of :func:`csv`.

    Raises:
        InvalidData: as :func:`csv`.
    """
    keys = SourceKeys(path, label, targets, client=client, split=split, metadata=metadata, classes=classes, test=test)
    return _samples(keys, schema, ".parquet")


def _samples(keys: SourceKeys, schema: TableSection | None, suffix: str) -> Samples:
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
        is_test = keys.test_rows(sheet.column(keys.split), sheet.wrong)
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


def _read(keys: SourceKeys, schema: TableSection | None, suffix: str) -> tuple[Sheet, NamedColumns]:
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


def _as_it_stands(keys: SourceKeys, files: list[Path]) -> tuple[Sheet, NamedColumns]:
    """A table whose columns are all features but those that the keys name."""
    assert keys.path is not None
    path = keys.path
    aims = keys.aims()
    named = dict.fromkeys(aims, "data.label" if keys.targets is None else "data.targets") | keys.named()
    sheet = Sheet.read(files, named)
    reals = {name: sheet.reals(name) for name in sheet.names if name not in named}
    if not reals:
        raise InvalidData(f"{path}: must have a column beside {', '.join(named)} to be a feature, got none: add one")
    aimed_at: dict[str, NDArray[Any]]
    if keys.targets is None:
        aimed_at = {aims[0]: keys.class_labels(sheet.integers(aims[0]))}
    else:
        aimed_at = {name: sheet.reals(name, of_texts=_TARGETS) for name in aims}
    targets_E = np.stack(list(aimed_at.values()), axis=1) if isinstance(keys.targets, list) else aimed_at[aims[0]]
    inputs_EF = np.stack(list(reals.values()), axis=1)
    return sheet, NamedColumns(inputs_EF, targets_E, {**reals, **aimed_at}, Names((*reals, *aims)))


def _by_name(keys: SourceKeys, schema: TableSection, files: list[Path]) -> tuple[Sheet, NamedColumns]:
    """A table whose columns are found by the names of a schema, wherever they stand."""
    sheet = Sheet.read(files, names_by_key(schema) | keys.named(), are_found_by_name=True)
    return sheet, by_schema(sheet, schema)


def _columns(sheet: Sheet, keys: SourceKeys, read: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    """Columns that partitions may name: those that are read, and those that the keys name."""
    columns: dict[str, NDArray[np.generic]] = {**{name: sheet.values(name) for name in keys.metadata or []}, **read}
    if keys.client:
        columns[keys.client] = sheet.identities(keys.client)
    return keys.with_holders(columns, sheet.stems)
