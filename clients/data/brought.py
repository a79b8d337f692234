"""Samples that people bring as what a client holds: trees of tensors, or samples that are read as they are needed.

Tensors are taken as they are. Arrays, frames, columns and lists become tensors (:mod:`fed.clients.data.arrays`), and
data sets become samples that are read as they are needed (:mod:`fed.clients.data.datasets`).

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, TypeAlias

from fed.clients.data.arrays import brings_tensors, tree_of
from fed.clients.data.by_schema import NamedColumns, by_schema, names_by_key
from fed.clients.data.datasets import is_dataset, samples_of_dataset
from fed.clients.data.frames import aligned, categories_of, is_frame, names_of, parted_by_name
from fed.clients.data.held import Held, Pair, SamplesOnDemand, as_pair
from fed.clients.data.samples import Names, names_of_pair
from fed.clients.data.sheets import Sheet
from fed.config.table import TableSection
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Ragged

__all__ = ["TargetNames", "are_from_arrays", "common_types", "held_of", "in_types", "matched", "names_of_samples"]

TargetNames: TypeAlias = str | Sequence[str] | None
"""Name of the column or key of the targets, or a list of several; None where inputs and targets are apart."""


def held_of(
    given: Any,
    owner: str,
    targets: TargetNames = None,
    names: Names | None = None,
    table: TableSection | None = None,
) -> Held:
    """Samples as a user gives them.

    Args:
        given: pair (inputs, targets) of trees of tensors, arrays, frames, columns or lists; inputs alone; a frame or a
            data set with its targets in it.
        owner: name of the holder in errors, such as "client 3".
        targets: name of the targets of a frame, or of a data set whose samples are dictionaries.
        names: names of columns and classes that frames are held to, as :func:`names_of_samples` finds them; None: the
            samples' own.
        table: schema by which columns of frames are found, in place of ``targets``; None: every column is taken.

    Returns:
        A pair of trees of tensors, or samples on demand. What is neither comes back as it is, for
        :func:`fed.clients.data.samples.check_pair` to refuse.

    Raises:
        InvalidData: if values are no numbers, or targets are not found by their name.

    Example:
        >>> import numpy as np
        >>> held_of((np.eye(2), [0, 1]), "client 3")[1]
        tensor([0, 1])
    """
    if isinstance(given, SamplesOnDemand):
        return given
    if is_frame(given):
        if table is not None:
            columns = matched(given, owner, table)
            return torch.from_numpy(columns.inputs), torch.from_numpy(columns.targets)
        if targets is None:
            raise InvalidData(
                f"{owner} must hold a pair (inputs, targets), or a frame whose targets are named, got a frame alone: "
                'name its column of targets, FederatedData(…, targets="label"), or give the schema of an experiment, '
                "FederatedData(…, table=experiment.table)"
            )
        given = parted_by_name(given, targets, owner)
    elif is_dataset(given):
        return samples_of_dataset(given, owner, targets)
    pair = as_pair(given)
    if not isinstance(pair, tuple) or len(pair) != 2:
        return pair
    inputs, its_targets = pair
    if isinstance(inputs, Tensor) and isinstance(its_targets, Tensor):
        return pair
    if names is not None and is_frame(inputs):
        inputs = aligned(inputs, names.columns[: len(names.columns) - len(names_of(its_targets))], f"inputs of {owner}")
    if names is not None and (found := categories_of(its_targets)) != names.labels:
        raise InvalidData(
            f"targets of {owner} must have the first client's categories, {names.labels or 'none'}, got "
            f"{found or 'none'}: make the column categorical in the table of all clients, then part it into clients"
        )
    return tree_of(inputs, f"inputs of {owner}"), tree_of(its_targets, f"targets of {owner}", are_targets=True)


def matched(frame: Any, owner: str, table: TableSection) -> NamedColumns:
    """Columns of a frame by a schema, as those of a file; rows that it drops are gone.

    Args:
        frame: frame of pandas or polars, or a table of Arrow's.
        owner: name of the holder in errors, such as "client 3".
        table: schema of tables.

    Raises:
        InvalidData: if the frame does not fit; the message names the row, from 1, and the column.
    """
    found = by_schema(Sheet.of_frame(frame, owner, names_by_key(table)), table)
    if found.is_kept is None:
        return found
    columns = {name: values[found.is_kept] for name, values in found.columns.items()}
    return NamedColumns(found.inputs[found.is_kept], found.targets[found.is_kept], columns, found.names)


def common_types(pairs: Iterable[Pair]) -> "list[torch.dtype] | None":
    """Types that hold the numbers of several pairs, leaf by leaf, in order; None where pairs differ in their form."""
    columns = [[leaf.dtype for tree in pair for leaf in trees.leaves(tree)] for pair in pairs]
    if len({len(types) for types in columns}) != 1:
        return None
    return [reduce(torch.promote_types, types) for types in zip(*columns, strict=True)]


def in_types(pair: Pair, types: "Sequence[torch.dtype]") -> Pair:
    """The same pair, whose leaves are of these types where they do not lose what is behind the point.

    Args:
        pair: (inputs, targets).
        types: types of the leaves of both, in order.
    """
    leaves = [leaf for tree in pair for leaf in trees.leaves(tree)]
    if len(leaves) != len(types) or [leaf.dtype for leaf in leaves] == [*types]:
        return pair
    cast = [_as_type(leaf, dtype) for leaf, dtype in zip(leaves, types, strict=True)]
    inputs, targets = pair
    count = len(trees.leaves(inputs))
    return trees.with_leaves(inputs, cast[:count]), trees.with_leaves(targets, cast[count:])


def _as_type(leaf: Any, dtype: "torch.dtype") -> Any:
    if isinstance(leaf, Ragged):
        return Ragged(_as_type(leaf.values_T, dtype), leaf.begins_E)
    return leaf if leaf.dtype.is_floating_point and not dtype.is_floating_point else leaf.to(dtype)


def are_from_arrays(given: Any) -> bool:
    """True if no floating number of a client's samples is PyTorch's own: arrays are of float64 unless somebody chose.

    Example:
        >>> import numpy as np, torch
        >>> are_from_arrays((np.eye(2), np.arange(2))), are_from_arrays((torch.eye(2), np.arange(2)))
        (True, False)
    """
    if isinstance(given, SamplesOnDemand):
        return not brings_tensors(given.read(0))
    return not brings_tensors(given[0] if is_dataset(given) and len(given) else given)


def names_of_samples(given: Any, targets: TargetNames = None) -> Names:
    """Names of columns and classes that frames bring; empty for all else."""
    if is_frame(given) and targets is not None:
        given = parted_by_name(given, targets, "the data")
    if is_frame(given) or not isinstance(given, tuple | list) or len(given) != 2:
        return Names()
    return names_of_pair(*given)
