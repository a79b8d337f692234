"""Tensors of what people have: NumPy arrays, pandas and polars frames, Arrow tables, lists of numbers.

No library is imported for it: an object of a library is known by its class's module. Values are not copied where
PyTorch can share them. :mod:`fed.clients.data.frames` reads the columns of tables.

Shapes: see :mod:`fed.vectors.layout`.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.frames import FrameColumn, columns_of, is_column, is_frame
from fed.clients.data.held import as_tree
from fed.errors import InvalidData, first_line
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Ragged, Tree

__all__ = ["brings_tensors", "tensor_of", "tree_of"]

_FILL = "drop the row with dropna(), or fill it with fillna()"
_ENCODE = "make columns of numbers with pandas.get_dummies, or leave the column out"


def tensor_of(brought: object, owner: str, *, are_targets: bool = False) -> Tensor:
    """The tensor [E, ...] of an array, a frame, a column or a list of numbers; a tensor is returned as it is.

    A frame becomes [E, F], its columns in their order, in the narrowest type that holds them all. Floating numbers of a
    list have PyTorch's own type, as ``torch.tensor`` gives it; all other numbers keep their type, but unsigned ones
    above 8 bits become int64, which PyTorch computes with.

    Args:
        brought: values to convert, the first axis the samples.
        owner: name of the values in errors, such as "inputs of client 3".
        are_targets: True if the codes of a column of categories may stand for it, as class labels.

    Raises:
        InvalidData: if values are texts, dates, missing or objects of other kinds; the message names the first of them,
            with its column and its row, counted from 1.

    Example:
        >>> tensor_of(np.array([[1.0, 2.0]]), "inputs of client 3")
        tensor([[1., 2.]], dtype=torch.float64)
        >>> tensor_of(np.array(["2026-01-01"], dtype="M8[D]"), "inputs")
        Traceback (most recent call last):
        fed.errors.InvalidData: inputs must be numbers, got a date in row 1: make numbers of dates, such as days
    """
    place = _Place(owner, are_targets=are_targets)
    if isinstance(brought, Tensor):
        return brought
    if is_frame(brought):
        return _of_frame(brought, place)
    if is_column(brought):
        return _shared(_numbers(FrameColumn.of(brought), place), place)
    if isinstance(brought, list | tuple) and brought and all(isinstance(part, Tensor) for part in brought):
        return _stacked(brought, place)
    if isinstance(brought, str | bytes | dict | set) or not _is_array_like(brought):
        raise InvalidData(
            f"{owner} must be a tensor, an array, a frame or a list of numbers, got {_said(brought)}: convert it, with "
            "torch.as_tensor for example"
        )
    array = _array_of(brought, place)
    is_list = isinstance(brought, list | tuple)
    if is_list and array.dtype == np.float64:
        array = array.astype(str(torch.get_default_dtype()).removeprefix("torch."))
    return _shared(_checked(array, place), place)


def tree_of(given: Any, owner: str, *, are_targets: bool = False) -> Tree:
    """A tree of tensors, of a tree whose leaves are what people have.

    Args:
        given: tree of tensors, arrays, frames, columns or lists.
        owner: name of the values in errors, such as "inputs of client 3".
        are_targets: True if the codes of a column of categories may stand for it.

    Raises:
        InvalidData: if a leaf is no numbers.
    """
    return trees.mapped(lambda leaf: _leaf(leaf, owner, are_targets=are_targets), as_tree(given))


def _leaf(leaf: Any, owner: str, *, are_targets: bool) -> Any:
    return leaf if isinstance(leaf, Tensor | Ragged) else tensor_of(leaf, owner, are_targets=are_targets)


def brings_tensors(given: Any) -> bool:
    """True if a tree holds floating numbers that are PyTorch's own, and so of a type that was meant.

    Example:
        >>> brings_tensors({"a": torch.zeros(3)}), brings_tensors(np.zeros(3)), brings_tensors([torch.zeros(3)])
        (True, False, True)
    """
    if isinstance(given, Mapping):
        return any(map(brings_tensors, given.values()))
    if isinstance(given, tuple | list):
        return any(map(brings_tensors, given[:1] if isinstance(given, list) else given))
    return isinstance(given, Tensor | Ragged) and given.dtype.is_floating_point


class _Place(NamedTuple):
    """The values that an error is about.

    Args:
        owner: name of the values, such as "inputs of client 3".
        column: name of the column; None where values have no columns.
        index: labels of the rows, where they have some beside their numbers.
        are_targets: True for targets.
        is_table: True if values are of a column of a table.
    """

    owner: str
    column: object = None
    index: Any = None
    are_targets: bool = False
    is_table: bool = False

    def wrong(self, must: str, got: str, row: int, remedy: str) -> InvalidData:
        """Error on one value; rows are counted from 1."""
        column = "" if self.column is None else f"column {self.column!r}, "
        label = ""
        if self.index is not None and self.index[row] != row:
            label = f" (index {self.index[row]})"
        return InvalidData(f"{self.owner} must {must}, got {got} in {column}row {row + 1}{label}: {remedy}")


def _of_frame(frame: Any, place: _Place) -> Tensor:
    columns = columns_of(frame)
    if not columns:
        raise InvalidData(f"{place.owner} must be a frame with columns, got one without: give it some")
    numbers = [_numbers(FrameColumn.of(column), place._replace(column=name)) for name, column in columns.items()]
    return _shared(np.stack(numbers, axis=1), place)


def _numbers(column: FrameColumn, place: _Place) -> NDArray[Any]:
    """A column's values as numbers, with none missing."""
    place = place._replace(is_table=True, index=column.index)
    if place.column is None and column.name is not None:
        place = place._replace(column=column.name)
    if column.is_missing is not None:
        raise place.wrong("hold no missing values", "none", int(np.flatnonzero(column.is_missing)[0]), _FILL)
    if column.categories is not None and not place.are_targets and len(column.values):
        value = column.categories[int(column.values[0])]
        raise place.wrong("be numbers", f"the category {value!r}", 0, _ENCODE)
    return _checked(column.values, place)


def _checked(array: NDArray[Any], place: _Place) -> NDArray[Any]:
    """An array of numbers that are finite where they come from a table.

    Raises:
        InvalidData: if it is of another kind; the message names the first value that is none.
    """
    kind = array.dtype.kind
    if kind not in "fiubc":
        raise _no_numbers(array, place)
    # Tables alone: there an error can name the column. All other numbers are checked with the client's samples.
    if place.is_table and kind == "f" and not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array))[0])
        raise place.wrong("be finite", str(array[row]), row, _FILL if np.isnan(array[row]) else "correct it")
    return array


def _no_numbers(array: NDArray[Any], place: _Place) -> InvalidData:
    """Error on an array of texts, dates, records or objects, with a remedy that works."""
    if array.dtype.names:
        return InvalidData(
            f"{place.owner} must be a plain array of numbers, got records with the fields "
            f"{', '.join(array.dtype.names)}: give numpy.stack of the fields' arrays, or a frame"
        )
    value = array.flat[0] if array.size else None
    row = 0
    for number, found in enumerate(array.flat):
        if not isinstance(found, int | float | np.number | np.bool_):
            value = found
            row = number // max(1, array.size // len(array))
            break
    else:
        return InvalidData(f"{place.owner} must be numbers, got objects that are numbers: write .astype(float)")
    if array.dtype.kind in "mM" or hasattr(value, "isoformat"):
        return place.wrong("be numbers", "a date", row, "make numbers of dates, such as days")
    if isinstance(value, str | bytes):
        remedy = _remedy_for_texts(place)
    elif value is None:
        remedy = "fill it, or drop the sample"
    elif isinstance(value, np.ndarray | list | tuple | Tensor):
        remedy = "make one array of samples of one shape with numpy.stack, or pad them to one length first"
    else:
        remedy = "convert the objects to numbers first"
    return place.wrong("be numbers", _said(value), row, remedy)


def _remedy_for_texts(place: _Place) -> str:
    if place.are_targets and place.is_table:
        return (
            "number the classes with .astype('category') on the whole table before clients are dealt, or "
            ".astype(pandas.CategoricalDtype([...])) with the same classes on the table of each client"
        )
    if place.are_targets:
        return (
            "number the classes, alike for all clients and the test set, as numpy.searchsorted(classes, targets) does, "
            "where classes is the sorted list of all of them"
        )
    if place.is_table:
        return _ENCODE
    return "convert texts to numbers first, such as the numbers of a tokenizer"


def _array_of(brought: Any, place: _Place) -> NDArray[Any]:
    if isinstance(brought, np.ma.MaskedArray) and np.ma.is_masked(brought):
        row = int(np.argwhere(np.ma.getmaskarray(brought))[0][0])
        raise place.wrong("hold no masked values", "one", row, "fill them with .filled(), or drop the samples")
    try:
        array = np.asarray(brought)
    except (ValueError, TypeError, RuntimeError) as error:
        if isinstance(brought, list | tuple):
            raise InvalidData(
                f"{place.owner} must be samples of one shape, got a list of samples of several: pad them to one length"
            ) from None
        raise InvalidData(f"{place.owner} cannot be made an array: {first_line(error)}: convert it first") from None
    if array.ndim == 0:
        # A matrix of SciPy's that is sparse, for one, is a single object to NumPy.
        remedy = "write .toarray()" if hasattr(brought, "toarray") else "give an array of all samples"
        raise InvalidData(f"{place.owner} must have one value a sample, got {_said(brought)}: {remedy}")
    return array


def _shared(array: NDArray[Any], place: _Place) -> Tensor:
    """The tensor of an array, which shares its memory where PyTorch can."""
    if array.dtype.kind == "u" and array.itemsize > 1:
        largest = int(array.max()) if array.size else 0
        if largest > np.iinfo(np.int64).max:
            raise InvalidData(f"{place.owner} must be at most 2^63 − 1, got {largest}: convert them to floats")
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.kind == "c" and array.itemsize > 16:
        array = array.astype(np.complex128)
    # Contiguous, because kernels may round otherwise for other strides; PyTorch knows the machine's own order of bytes.
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Training never writes into samples: what is read-only, such as a mapped file, need not be copied.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _stacked(parts: Sequence[Any], place: _Place) -> Tensor:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise InvalidData(
            f"{place.owner} must be samples of one shape, got {first} and {second}: pad them with "
            "torch.nn.utils.rnn.pad_sequence"
        )
    return torch.stack([*parts])


def _is_array_like(brought: object) -> bool:
    return isinstance(brought, list | tuple | np.ndarray | np.generic) or any(
        hasattr(brought, name) for name in ("__array__", "__array_interface__", "toarray")
    )


def _said(value: object) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:40] if isinstance(value, bytes) else str(value)[:40])
    return "None" if value is None else f"a value of type {type(value).__name__}"
