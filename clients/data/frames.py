"""Frames: tables with names of columns, of pandas, polars or Arrow, and the values of their columns.

No library is imported for it: an object of a library is known by its class's module.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed.config.validation import nearest
from fed.errors import InvalidData

__all__ = [
    "FrameColumn",
    "aligned",
    "categories_of",
    "columns_of",
    "is_column",
    "is_frame",
    "names_of",
    "parted_by_name",
]

_FRAMES = {("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table")}
_COLUMNS = {
    *(("pandas", "Series"), ("pandas", "Index"), ("polars", "Series")),
    *(("pyarrow", "ChunkedArray"), ("pyarrow", "Array")),
}


@dataclass(frozen=True)
class FrameColumn:
    """Values of a column of some library's, as NumPy's.

    Args:
        values: [E]; a value that is missing means nothing.
        is_missing: [E], true where there is no value; None: none is missing.
        categories: values that the codes in ``values`` stand for; None where values are no codes.
        index: labels of the rows; None where they have none.
        name: name of the column, or None.
    """

    values: NDArray[Any]
    is_missing: NDArray[np.bool_] | None = None
    categories: Sequence[object] | None = None
    index: Any = None
    name: object = None

    @classmethod
    def of(cls, column: Any) -> "FrameColumn":
        """Read a column of pandas', polars' or Arrow's.

        Example:
            >>> import pandas
            >>> FrameColumn.of(pandas.Series(["b", "a"], dtype="category")).values.tolist()
            [1, 0]
        """
        match _library(column):
            case "pandas":
                return cls._of_pandas(column)
            case "polars":
                return cls(column.to_numpy(), _or_none(column.is_null().to_numpy()), name=column.name)
            case _:
                return cls(_plain_values(column), _or_none(_plain_values(column.is_null())))

    @classmethod
    def _of_pandas(cls, column: Any) -> "FrameColumn":
        kind = column.dtype
        labels = {"index": getattr(column, "index", None), "name": column.name}
        if hasattr(kind, "categories"):
            codes = np.asarray(column.cat.codes if hasattr(column, "cat") else column.codes)
            return cls(codes.astype(np.int64), _or_none(codes < 0), [*kind.categories], **labels)
        # NaN is a number of NumPy's own types: who checks that values are finite finds it.
        may_miss = not isinstance(kind, np.dtype) or kind.kind == "O"
        is_missing = _or_none(np.asarray(column.isna())) if may_miss else None
        # A nullable type says which of NumPy's types holds it, where no value is missing.
        plain = getattr(kind, "numpy_dtype", None)
        if plain is None or is_missing is not None:
            return cls(np.asarray(column), is_missing, **labels)
        return cls(column.to_numpy(dtype=plain), **labels)


def is_frame(brought: object) -> bool:
    """True for a table with names of columns: a pandas or polars frame, or a table of Arrow's."""
    return _library(brought, _FRAMES) != ""


def is_column(brought: object) -> bool:
    """True for a single column of such a table."""
    return _library(brought, _COLUMNS) != ""


def columns_of(frame: Any) -> dict[Any, Any]:
    """Columns of a frame by their names, in their order.

    Raises:
        InvalidData: if a name stands for two.
    """
    names = [*(frame.column_names if _library(frame) == "pyarrow" else frame.columns)]
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise InvalidData(f"a frame must name each column once, got {twice[0]!r} again: rename one")
    return {name: frame[name] for name in names}


def names_of(brought: object) -> tuple[str, ...]:
    """Names of the columns of a frame, or of a column that has one; empty for all else.

    Example:
        >>> import pandas
        >>> names_of(pandas.DataFrame({"a": [1], "b": [2]})), names_of(pandas.Series([1], name="a")), names_of([1])
        (('a', 'b'), ('a',), ())
    """
    if is_frame(brought):
        return tuple(map(str, columns_of(brought)))
    name = getattr(brought, "name", None) if is_column(brought) else None
    return () if name is None else (str(name),)


def categories_of(brought: object) -> tuple[str, ...]:
    """Names of the classes that a column of categories, or a frame's only column, holds; empty for all else.

    Example:
        >>> import pandas
        >>> categories_of(pandas.Series(["b", "a"], dtype="category"))
        ('a', 'b')
    """
    if is_frame(brought):
        columns = columns_of(brought)
        brought = next(iter(columns.values())) if len(columns) == 1 else None
    if not is_column(brought):
        return ()
    return tuple(map(str, FrameColumn.of(brought).categories or ()))


def parted_by_name(frame: Any, targets: str | Sequence[str], owner: str) -> tuple[Any, Any]:
    """Part a frame in the columns that are inputs, and the column or the columns of targets.

    Args:
        frame: a pandas or polars frame, or a table of Arrow's.
        targets: name of the column of targets, or a list of several; all other columns are inputs, in their order.
        owner: name of the holder in errors, such as "client 3".

    Returns:
        A frame of the inputs, and a column, or a frame where ``targets`` is a list.

    Raises:
        InvalidData: if there is no such column, or none is left for the inputs.
    """
    names = [*columns_of(frame)]
    aims = [targets] if isinstance(targets, str) else [*targets]
    for name in aims:
        if name not in names:
            raise InvalidData(f"targets must name a column of {owner}, got {name!r}{nearest(name, [*map(str, names)])}")
    left = [name for name in names if name not in aims]
    if not left:
        raise InvalidData(f"{owner} must have a column beside its targets to be an input, got {aims} alone: add one")
    return _chosen(frame, left), frame[targets] if isinstance(targets, str) else _chosen(frame, aims)


def aligned(frame: Any, names: Sequence[str], owner: str) -> Any:
    """The frame with its columns in the order of these names.

    Args:
        frame: a pandas or polars frame, or a table of Arrow's.
        names: names of the columns, in their order.
        owner: name of the values in errors, such as "inputs of client 3".

    Raises:
        InvalidData: if a column is missing, or there is another one.
    """
    held = {str(name): name for name in columns_of(frame)}
    for name in names:
        if name not in held:
            raise InvalidData(f"{owner} must have the column {name!r}, as the first client has{nearest(name, [*held])}")
    others = [name for name in held if name not in names]
    if others:
        raise InvalidData(f"{owner} must have the columns of the first client, got {others[0]!r} beside them: drop it")
    return frame if [*held] == [*names] else _chosen(frame, [held[name] for name in names])


def _chosen(frame: Any, names: list[Any]) -> Any:
    return frame.select(names) if _library(frame) == "pyarrow" else frame[names]


def _plain_values(column: Any) -> NDArray[Any]:
    # An array of Arrow's copies only when it is told to; one in chunks always does.
    is_in_chunks = hasattr(column, "chunks")
    return np.asarray(column.to_numpy() if is_in_chunks else column.to_numpy(zero_copy_only=False))


def _or_none(is_missing: NDArray[Any]) -> NDArray[np.bool_] | None:
    return is_missing if is_missing.any() else None


def _library(brought: object, kinds: set[tuple[str, str]] = _FRAMES | _COLUMNS) -> str:
    """Name of the library whose frame or column it is; empty for all else."""
    # By every class that it derives from: frames of other libraries are often frames of pandas'.
    for kind in type(brought).__mro__:
        library = kind.__module__.partition(".")[0]
        if (library, kind.__name__) in kinds:
            return library
    return ""
