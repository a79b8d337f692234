r"""Columns of a sheet as a schema asks for them: found by name, texts as categories, numbers standardized.

Where clients have yet to find means or deviations, a table is read as the numbers whose mean over all clients they are
made of, in float64. First those of each feature, then, around the means μ, the squared ones:

.. math:: z = (x - c) / s, \qquad z = ((x - μ) / s)^2

Bounds [low, high] of a feature give c = low and s = high − low, so that z is in [0, 1], as sums in fixed point need
it. Elsewhere c = 0 and s = 2⁻¹²⁶, the smallest number of float32 that has all its digits: then exact sums, which drop
what is below 2⁻⁹⁷, drop none of them.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.samples import Names
from fed.clients.data.sheets import Sheet
from fed.config.table import TableSection
from fed.errors import InvalidData

__all__ = ["NamedColumns", "by_schema", "found", "names_by_key"]

_log = logging.getLogger(__name__)

_TARGETS = "list the classes of a target of texts in table.classes"
_SMALLEST = 2.0**-126
_LARGEST = float(np.finfo(np.float32).max)
_CONSTANT = 2.0**-48  # a deviation below so much of the mean is what float64 has rounded
_CONSTANT_IN_BOUNDS = 2.0**-16  # below so much of the bounds' distance it may be what fixed point has rounded


class NamedColumns(NamedTuple):
    """Columns of a table as a schema asks for them, E rows.

    Args:
        inputs: [E, F] in float32; in float64 where clients have yet to find what they are standardized by.
        targets: [E] or [E, T], int64 of classes, else float32.
        columns: single columns among them, by name.
        names: names of inputs, targets and classes.
        is_kept: [E], false for rows to drop; None: none is dropped.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]
    columns: Mapping[str, NDArray[np.generic]]
    names: Names
    is_kept: NDArray[np.bool_] | None = None


def names_by_key(schema: TableSection) -> dict[str, str]:
    """Columns that a schema needs → the key that names each."""
    return dict.fromkeys(schema.features, "table.features") | dict.fromkeys(schema.targets, "table.target")


def by_schema(sheet: Sheet, schema: TableSection) -> NamedColumns:
    """Read a sheet by a schema.

    Args:
        sheet: sheet with the columns that :func:`names_by_key` names.
        schema: schema of tables.

    Raises:
        InvalidData: if a cell does not fit; the message names its row and column.
    """
    is_kept = _kept(sheet, schema) if schema.missing == "drop" else None
    features = {name: _feature(sheet, name, schema) for name in schema.features}
    aimed_at: dict[str, NDArray[Any]]
    if schema.classes is not None:
        stand_in = schema.classes[0] if is_kept is not None else None
        aimed_at = {name: sheet.categories(name, schema.classes, stand_in) for name in schema.targets}
    else:
        stand_in_of_reals = None if is_kept is None else 0.0
        aimed_at = {name: sheet.reals(name, stand_in_of_reals, _TARGETS) for name in schema.targets}
    is_single = isinstance(schema.target, str)
    targets_E = aimed_at[schema.targets[0]] if is_single else np.stack(list(aimed_at.values()), axis=1)
    columns = {name: features[name][:, 0].astype(np.float32) for name in schema.reals}
    names = Names((*schema.inputs, *schema.targets), schema.classes or ())
    if schema.sought:
        inputs_EF = np.concatenate([_summand(name, features[name], schema) for name in schema.sought], axis=1)
    else:
        inputs_EF = np.concatenate([_standardized(name, features[name], schema) for name in features], axis=1)
    return NamedColumns(inputs_EF, targets_E, {**columns, **aimed_at}, names, is_kept)


def found(schema: TableSection, means_F: Sequence[float]) -> TableSection:
    """The schema with what clients have found: first the means, then the deviations around them.

    A deviation of 0 becomes 1: all numbers of such a feature are one, which becomes 0. So does one below 2⁻⁴⁸ of the
    mean, or, of a feature with bounds, below 2⁻¹⁶ of their distance.

    Args:
        schema: schema by which clients have read their tables.
        means_F: mean over all clients' samples of each number that the schema seeks, in float64.

    Example:
        >>> schema = TableSection(features={"age": "real"}, standardize="federated")
        >>> schema = found(schema, [31.0 * 2.0**126])
        >>> found(schema, [4.0 * 2.0**252]).standardize
        {'age': (31.0, 2.0)}
    """
    moments = schema.moments
    for name, z in zip(schema.sought, means_F, strict=True):
        begin, scale = _grid(name, schema)
        mean = moments[name][0]
        if mean is None:
            moments[name] = begin + scale * z, None
            continue
        deviation = scale * math.sqrt(max(z, 0.0))
        has_bounds = schema.features[name].bounds is not None
        least = _CONSTANT_IN_BOUNDS * scale if has_bounds else _CONSTANT * abs(mean)
        if deviation <= least:
            _log.warning("standardize: the numbers of %s do not differ, and become 0", name)
            deviation = 1.0
        moments[name] = mean, deviation
    return TableSection(**{**schema.model_dump(mode="json"), "standardize": moments})


def _grid(name: str, schema: TableSection) -> tuple[float, float]:
    """C and s of a feature."""
    bounds = schema.features[name].bounds
    return (0.0, _SMALLEST) if bounds is None else (bounds[0], bounds[1] - bounds[0])


def _summand(name: str, values_E1: NDArray[np.float64], schema: TableSection) -> NDArray[np.float64]:
    """z, of which clients find the mean."""
    begin, scale = _grid(name, schema)
    mean = schema.moments[name][0]
    if mean is None:
        return (values_E1 - begin) / scale
    # A mean that another has made up must not lead to a number that is not finite.
    ratio_E1 = np.clip((values_E1 - mean) / scale, -(2.0**255), 2.0**255)
    return np.square(ratio_E1)


def _standardized(name: str, values_EC: NDArray[Any], schema: TableSection) -> NDArray[np.float32]:
    """(x − mean) / deviation where the schema has both of a column, at most the largest number of float32."""
    mean, deviation = schema.moments.get(name, (None, None))
    if mean is None or deviation is None:
        return values_EC.astype(np.float32)
    # An error would tell a server that has made the numbers up which cells are equal to its mean.
    with np.errstate(over="ignore"):
        standardized_EC = np.clip((values_EC - mean) / deviation, -_LARGEST, _LARGEST)
    return standardized_EC.astype(np.float32)


def _feature(sheet: Sheet, name: str, schema: TableSection) -> NDArray[Any]:
    """A column as inputs, [E, 1] of numbers or [E, C] of categories; empty cells of rows to drop are anything."""
    column = schema.features[name]
    is_dropped = schema.missing == "drop"
    if column.values is not None:
        stand_in = column.values[0] if is_dropped else None
        categories_E = sheet.categories(
            name, column.values, stand_in if column.missing is None else str(column.missing)
        )
        return np.eye(len(column.values), dtype=np.float32)[categories_E]
    default = (column.bounds or (0.0,))[0] if is_dropped else None
    values_E = sheet.numbers(name, default if column.missing is None else float(column.missing))
    if column.bounds is not None:
        low, high = column.bounds
        # A number of float32 in a file of Parquet is not quite its bound.
        rounded_E = values_E.astype(np.float32)
        outside = np.flatnonzero((rounded_E < np.float32(low)) | (rounded_E > np.float32(high)))
        if len(outside):
            raise sheet.wrong(name, int(outside[0]), f"be from {low:g} to {high:g}, as table.features.{name} says")
    return values_E[:, None]


def _kept(sheet: Sheet, schema: TableSection) -> NDArray[np.bool_]:
    """Rows without an empty cell that nothing stands for."""
    is_kept = np.ones(len(sheet), dtype=bool)
    for name in (*schema.features, *schema.targets):
        column = schema.features.get(name)
        if column is None or (column.missing is None and "" not in (column.values or ())):
            is_kept &= ~sheet.is_missing(name)
    if not is_kept.any():
        raise InvalidData(f"{sheet.files[0][0]}: every row has an empty cell, got none to keep: say what stands for it")
    if not is_kept.all():
        _log.warning(
            "%s: %d of %d rows have an empty cell and are left out", sheet.files[0][0], (~is_kept).sum(), len(sheet)
        )
    return is_kept
