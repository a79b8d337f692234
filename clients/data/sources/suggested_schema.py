"""Schema of a table as its cells suggest it: what numbers, categories and classes a file seems to hold."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fed.clients.data.federated import FederatedData
from fed.clients.data.sheets import Sheet
from fed.config.table import ColumnSection, TableSection
from fed.errors import InvalidData

__all__ = ["note_on_inputs", "notes_on", "schema_of"]

_MOST_CATEGORIES = 100
_UNLIKE = 10.0  # ratio of two standard deviations from which training suffers
_LISTED = 5
_CLIENTS = 100  # whose numbers tell of their scale


def schema_of(path: Path, target: str | None = None) -> TableSection:
    """Schema of a table: a column of numbers is real, any other one has the categories that its cells hold.

    A target of texts or of integers has classes, a target of other numbers has none. Categories and classes that are
    all integers are in the order of numbers, others in that of letters.

    Args:
        path: CSV or Parquet file.
        target: column to predict; None: ``label``.

    Raises:
        InvalidData: if the file cannot be read, lacks the target, or a column of texts has more than 100 values.
    """
    aim = target or "label"
    sheet = Sheet.read([path], {aim: "--target" if target else "--target (label unless given)"})
    if len(sheet.names) < 2:
        raise InvalidData(f"{path}: must have a column beside {aim} to be a feature, got none: add one")
    features = {name: _column(sheet, name) for name in sheet.names if name != aim}
    return TableSection(features=features, target=aim, classes=_classes(sheet, aim))


def notes_on(path: Path, schema: TableSection) -> list[str]:
    """Sentences on what a suggested schema leaves to its user: empty cells, and numbers of unlike scale.

    Args:
        path: CSV or Parquet file that the schema was made of.
        schema: schema that was made of it.
    """
    sheet = Sheet.read([path], dict.fromkeys(schema.targets, "target"))
    notes = [_note_on_empty_cells(sheet, [*schema.targets, *schema.features]), _note_on_scale(sheet, schema.reals)]
    return [note for note in notes if note]


def _note_on_empty_cells(sheet: Sheet, names: Sequence[str]) -> str:
    is_empty = {name: cells for name in names if (cells := sheet.is_missing(name)).any()}
    if not is_empty:
        return ""
    rows = int(np.any([*is_empty.values()], axis=0).sum())
    listed = [f"{name} ({int(cells.sum())})" for name, cells in is_empty.items()]
    more = f" and {len(listed) - _LISTED} more columns" if len(listed) > _LISTED else ""
    return (
        f"{rows} of {len(sheet)} rows have empty cells, in {', '.join(listed[:_LISTED])}{more}; missing: refuse has "
        "such a table refused: write missing: drop to leave the rows out, or missing: VALUE at a feature"
    )


def _note_on_scale(sheet: Sheet, names: Sequence[str]) -> str:
    deviations = {}
    for name in names:
        deviation = float(sheet.numbers(name, missing=0.0)[~sheet.is_missing(name)].std())
        if deviation > 0:  # a constant column has no scale
            deviations[name] = deviation
    return _note_on(deviations)


def note_on_inputs(data: FederatedData, schema: TableSection) -> str:
    """Sentence on numbers of unlike scale that clients are about to train on; empty where there is nothing to say.

    Args:
        data: tables in memory, of which at most the first 100 clients count.
        schema: schema that they were read by.
    """
    if data.is_on_demand or schema.standardize is not None or not schema.reals:
        return ""
    places = [schema.inputs.index(name) for name in schema.reals]
    values = np.concatenate([np.asarray(data.read(client)[0])[:, places] for client in data.clients[:_CLIENTS]])
    deviations = values.astype(np.float64).std(axis=0).tolist()
    return _note_on({name: found for name, found in zip(schema.reals, deviations, strict=True) if found > 0})


def _note_on(deviations: Mapping[str, float]) -> str:
    """Sentence on the standard deviations of columns, each > 0, by name; empty where they are alike."""
    if not deviations:
        return ""
    least = min(deviations, key=deviations.__getitem__)
    most = max(deviations, key=deviations.__getitem__)
    ratio = deviations[most] / deviations[least]
    if ratio < _UNLIKE:
        return ""
    return (
        f"columns differ in scale by a factor of {ratio:.3g} ({most} and {least}), and most models train badly on "
        "such: write standardize: federated in the section table, or bring the columns to one scale"
    )


def _column(sheet: Sheet, name: str) -> ColumnSection:
    if _is_real(sheet, name):
        return ColumnSection()
    return ColumnSection(values=tuple(_values(sheet, name)))


def _classes(sheet: Sheet, aim: str) -> tuple[str, ...] | None:
    if _is_real(sheet, aim):
        texts = [text for text in sheet.texts(aim).tolist() if text.strip()]
        if not all(text.strip().lstrip("+-").isdigit() for text in texts) or len(set(texts)) > _MOST_CATEGORIES:
            return None
    classes = _values(sheet, aim)
    if len(classes) < 2:
        raise InvalidData(f"{sheet.files[0][0]}: column {aim} must hold two classes or more, got {classes}: add rows")
    return tuple(classes)


def _is_real(sheet: Sheet, name: str) -> bool:
    """True if every cell that is not empty is a finite number."""
    try:
        sheet.reals(name, missing=0.0)
    except InvalidData:
        return False
    return not sheet.is_missing(name).all()


def _values(sheet: Sheet, name: str) -> Sequence[str]:
    values = sorted(np.unique([text.strip() for text in sheet.texts(name).tolist() if text.strip()]).tolist())
    if not values:
        raise InvalidData(f"{sheet.files[0][0]}: column {name} must not be empty, got no cell with content: remove it")
    if len(values) > _MOST_CATEGORIES:
        raise InvalidData(
            f"{sheet.files[0][0]}: column {name} must hold numbers or at most {_MOST_CATEGORIES} categories, got "
            f"{len(values)} texts such as {values[0][:60]!r}: leave it out of the file that the schema is made of"
        )
    return sorted(values, key=int) if all(value.lstrip("+-").isdigit() for value in values) else values
