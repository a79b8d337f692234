"""Sheets: tables of CSV and Parquet files that share their columns, and errors that name the wrong cell.

PyArrow reads both. A CSV's cells are texts until a column is asked for as something else; Parquet's columns have types.

Shapes: see :mod:`fed.vectors.layout`.
"""

import csv
import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed.config.validation import nearest
from fed.errors import InvalidCell, InvalidData

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Sheet"]

_log = logging.getLogger(__name__)

# PyArrow takes about 9 kB a column: a header of a million names would take 9 GB.
_MOST_COLUMNS = 1 << 16
_MOST_LETTERS = 256  # of a column's name
_SHOWN_LETTERS = 60  # of a cell, in an error
_SHOWN_NAMES = 20  # columns that an error lists
_INDEX = "which is how pandas saves an index: save the table with index=False, or give the column a name"

_CORRECT = "correct the cell, or remove the row"
_FILL = "fill the cell, remove the row, or say with missing in the experiment's section table what stands for it"
_FEATURES = (
    "a column of texts is no feature; name it in data.metadata or as data.client, or give its categories in the "
    "experiment's section table"
)


@dataclass(frozen=True)
class Sheet:
    """Rows of one or more files that share their columns.

    Args:
        table: columns of all files, one file after the other.
        files: each file with its number of rows, in order.
    """

    table: "pa.Table"
    files: Sequence[tuple[Path, int]]

    @classmethod
    def of_frame(cls, frame: Any, owner: str, required: Mapping[str, str]) -> "Sheet":
        """Columns of a frame that a program holds, by their names; an index has none, and is left out.

        Args:
            frame: frame of pandas or polars, or a table of Arrow's.
            owner: name of its holder in errors, such as "client 3".
            required: columns that must be there → the key that named them.

        Raises:
            InvalidData: if a column is missing, lacks a name or has another's, or holds what no file could.
        """
        import pyarrow as pa

        place = Path(owner)  # errors name it as they name a file
        try:
            table = _as_arrow(frame)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidData(
                f"{owner}: the frame's columns must hold numbers or texts, one kind each ({_one_line(error)}): convert "
                "them with astype"
            ) from None
        table = _plain(place, table)
        if not table.num_rows:
            raise InvalidData(f"{owner}: the frame must have rows, got none: give it data")
        return cls(_chosen(place, table, required), [(place, table.num_rows)])

    @classmethod
    def read(
        cls,
        files: Sequence[Path],
        required: Mapping[str, str] = MappingProxyType({}),
        *,
        are_found_by_name: bool = False,
    ) -> "Sheet":
        """Read files that share their columns.

        Args:
            files: paths of the files, at least one; those that end in .parquet are Parquet, others CSV in UTF-8.
            required: columns that must be there → the key that named them, such as ``data.label``.
            are_found_by_name: True if files may have their columns in any order, and others beside those required.

        Raises:
            InvalidData: if a file cannot be read, a column is missing, lacks a name or has another's, or a row has too
                many or too few cells.
        """
        import pyarrow as pa

        tables = [_parquet(file) if file.suffix == ".parquet" else _csv(file) for file in files]
        if are_found_by_name:
            tables = [_chosen(file, table, required) for file, table in zip(files, tables, strict=True)]
        first = tables[0].column_names
        _check_required(files[0], first, required)
        for file, table in zip(files, tables, strict=True):
            if table.column_names != first:
                raise InvalidData(
                    f"{file}: must have the header of {files[0]}, {_listed(first)}, got "
                    f"{_listed(table.column_names)}: make them alike"
                )
        if not any(table.num_rows for table in tables):
            raise InvalidData(f"{files[0]}: must have rows below the header, got none: give it data")
        try:
            joined = pa.concat_tables(tables)
        except pa.ArrowInvalid:
            # A column of Parquet may have another type in each file.
            joined = pa.concat_tables([_as_texts(table) for table in tables])
        return cls(joined, [(file, table.num_rows) for file, table in zip(files, tables, strict=True)])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def names(self) -> list[str]:
        """Names of the columns, in the order of the file."""
        names: list[str] = self.table.column_names
        return names

    @cached_property
    def stems(self) -> NDArray[np.generic]:
        """Name of each row's file, without its ending."""
        return np.repeat(np.array([file.stem for file, _ in self.files]), [rows for _, rows in self.files])

    def texts(self, name: str) -> NDArray[np.object_]:
        """The cells of a column as they stand, empty ones among them; those of Parquet as pandas would write them."""
        column = self.table.column(name)
        texts: NDArray[np.object_] = _texts(column).to_numpy()
        return texts

    def is_missing(self, name: str) -> NDArray[np.bool_]:
        """Rows whose cell of a column is empty: a blank one in CSV, null or NaN in Parquet."""
        import pyarrow as pa
        from pyarrow import compute

        column = self.table.column(name)
        if _is_text(column.type):
            empty = compute.equal(compute.utf8_trim_whitespace(_texts(column)), "")
        elif pa.types.is_floating(column.type):
            empty = compute.is_null(column, nan_is_null=True)
        else:
            empty = compute.is_null(column)
        missing: NDArray[np.bool_] = empty.to_numpy().astype(bool)
        return missing

    def column(self, name: str, remedy: str = _CORRECT) -> NDArray[np.object_]:
        """The text of a column, no cell of it empty.

        Args:
            name: name of the column.
            remedy: end of the error on an empty cell.
        """
        empty = np.flatnonzero(self.is_missing(name))
        if len(empty):
            raise self.wrong(name, int(empty[0]), "not be empty", remedy)
        return self.texts(name)

    def integers(self, name: str) -> NDArray[np.int64]:
        """A column of integers, no cell of it empty."""
        command = f"fed data {shlex.quote(str(self.files[0][0]))} --schema --target {shlex.quote(name)}"
        of_texts = f"list the classes in the experiment's section table, which {command} writes, or number them from 0"
        return self._numbers(name, np.int64, "be an integer", of_texts)

    def reals(self, name: str, missing: float | None = None, of_texts: str = _FEATURES) -> NDArray[np.float32]:
        """A column of numbers in float32.

        Args:
            name: name of the column.
            missing: number that an empty cell stands for; None: no cell may be empty.
            of_texts: end of the error where no cell is a number.
        """
        return self.numbers(name, missing, of_texts).astype(np.float32)

    def numbers(self, name: str, missing: float | None = None, of_texts: str = _FEATURES) -> NDArray[np.float64]:
        """A column of numbers that float32 can hold, in float64.

        Args:
            name: name of the column.
            missing: number that an empty cell stands for; None: no cell may be empty.
            of_texts: end of the error where no cell is a number.
        """
        if missing is not None and self.is_missing(name).any():
            return self._filled(name, missing).numbers(name, of_texts=of_texts)
        values: NDArray[np.float64] = self._numbers(name, np.float64, "be a number", of_texts)
        with np.errstate(over="ignore"):
            # An overflow becomes infinite, and is refused with its place.
            is_finite = np.isfinite(values.astype(np.float32))
        if not is_finite.all():
            raise self.wrong(name, int(np.flatnonzero(~is_finite)[0]), "be finite in float32")
        return values

    def identities(self, name: str) -> NDArray[np.generic]:
        """A column of integers where every cell is one as Python would write it, else of texts."""
        cells = self.column(name)
        numbers = _converted(cells, np.int64)
        if numbers is None or list(map(str, numbers.tolist())) != cells.tolist():  # 7 and 007 may be two clients
            return np.array(cells.tolist())
        return numbers

    def values(self, name: str) -> NDArray[np.generic]:
        """A column of numbers where every cell is one, else of texts."""
        cells = self.column(name)
        numbers = _converted(cells, np.float64)
        return np.array(cells.tolist()) if numbers is None else numbers

    def categories(self, name: str, allowed: Sequence[str], missing: str | None = None) -> NDArray[np.int64]:
        """A column of categories as their numbers, from 0; blanks around a cell do not count.

        Args:
            name: name of the column.
            allowed: names of the categories.
            missing: category that an empty cell stands for; None: no cell may be empty, unless "" is a category.
        """
        number = {category: at for at, category in enumerate(allowed)}
        if missing is not None:
            number.setdefault("", number[missing])
        cells = self.texts(name) if "" in number else self.column(name, _FILL)
        found = np.array([number.get(cell.strip(), -1) for cell in cells.tolist()], dtype=np.int64)
        unknown = np.flatnonzero(found < 0)
        if len(unknown):
            raise self.wrong(name, int(unknown[0]), f"be one of {_listed(allowed)}")
        return found

    def wrong(self, name: str, row: int, allowed: str, remedy: str = _CORRECT) -> InvalidCell:
        """Error on a cell.

        Args:
            name: name of the column.
            row: number of the row, from 0.
            allowed: rule for the cell, as the error says it behind "must", such as "be a number".
            remedy: end of the error, which says what to do.
        """
        cell = str(self.texts(name)[row])
        shown = repr(cell if len(cell) <= _SHOWN_LETTERS else f"{cell[:_SHOWN_LETTERS]}…")
        rule = f"{self._place(row)}, column {name} must {allowed}"
        return InvalidCell(f"{rule}, got {shown}: {remedy}", f"{rule}: {remedy}")

    def _place(self, row: int) -> str:
        for file, rows in self.files:
            if row < rows:
                return f"{file}: row {row + 1}"
            row -= rows
        raise IndexError(row)

    def _filled(self, name: str, missing: float) -> "Sheet":
        """The same rows with a number in place of a column's empty cells."""
        import pyarrow as pa

        texts = np.where(self.is_missing(name), repr(missing), self.texts(name))
        at = self.names.index(name)
        return Sheet(self.table.set_column(at, name, pa.array(texts.tolist(), pa.string())), self.files)

    def _numbers(self, name: str, kind: type[Any], allowed: str, of_texts: str) -> NDArray[Any]:
        """A column of numbers of one of NumPy's types.

        Args:
            name: name of the column.
            kind: type of NumPy's, such as ``numpy.int64``.
            allowed: rule for each cell, as the error says it behind "must", such as "be a number".
            of_texts: end of the error where no cell is a number.
        """
        column = self.table.column(name)
        empty = np.flatnonzero(self.is_missing(name))
        if len(empty) and not _is_text(column.type):
            raise self.wrong(name, int(empty[0]), "not be empty", _FILL)
        if (values := _cast(column, kind)) is not None:
            return values
        cells = self.column(name, _FILL)
        if (values := _converted(cells, kind)) is not None:
            return values
        wrong = [row for row, cell in enumerate(cells) if _converted([cell], kind) is None]
        are_texts = not any(_converted([cell], np.float64) is not None for cell in cells)
        raise self.wrong(name, wrong[0], allowed, of_texts if are_texts else _CORRECT)


def _check_required(file: Path, names: Sequence[str], required: Mapping[str, str]) -> None:
    for name, key in required.items():
        if name not in names:
            why = "the run's table needs" if key.startswith("table.") else f"{key} names"
            raise InvalidData(f"{file} has no column {name!r}, which {why}{_nearest(name, names)}")


def _chosen(file: Path, table: "pa.Table", required: Mapping[str, str]) -> "pa.Table":
    """Required columns in the order that is asked for; the log names those that are left out."""
    _check_required(file, table.column_names, required)
    extra = [name for name in table.column_names if name not in required]
    if extra:
        _log.warning("%s: columns that the experiment's table does not name are left out: %s", file, _listed(extra))
    return table.select(list(required))


def _csv(file: Path) -> "pa.Table":
    """Columns of texts, by their stripped names.

    Raises:
        InvalidData: if it cannot be read.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow

    header = _header(file)
    invalid: list[arrow.InvalidRow] = []

    def stop(row: arrow.InvalidRow) -> str:
        invalid.append(row)
        return "error"

    size_bytes = file.stat().st_size
    try:
        table = arrow.read_csv(
            file,
            # In one block: no row may be longer than a block. Without threads rows have numbers.
            read_options=arrow.ReadOptions(use_threads=False, block_size=min(max(size_bytes + 1, 1 << 20), 2**31 - 1)),
            parse_options=arrow.ParseOptions(newlines_in_values=True, invalid_row_handler=stop),
            convert_options=arrow.ConvertOptions(column_types=dict.fromkeys(header, pa.string())),
        )
    except (OSError, pa.ArrowException) as error:
        if "Empty CSV file or block" in str(error):  # a header without an end of its line
            table = pa.table({name: pa.array([], pa.string()) for name in header})
        elif invalid:
            row = invalid[0]
            raise InvalidData(
                f"{file}: row {row.number - 1} must have {row.expected_columns} cells like the header, got "
                f"{row.actual_columns}: correct it"
            ) from None
        else:
            raise _unreadable(file, error) from None
    if table.column_names != header:
        raise _unreadable(file, "its header reads in two ways")
    return table.rename_columns([name.strip() for name in header])


def _header(file: Path) -> list[str]:
    """Names of a CSV's columns as they stand, after a check of what cannot be a header."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
            header = next((row for row in csv.reader(lines) if row), None)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(file, error) from None
    if header is None:
        raise InvalidData(f"{file}: must begin with a header, got an empty file: give it data")
    for separator, its_name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and separator in header[0]:
            raise InvalidData(
                f"{file}: cells must be separated by commas, got {its_name} in the header: save the table anew, as "
                f"pandas.read_csv({str(file)!r}, sep={separator!r}).to_csv({str(file)!r}, index=False) does; with "
                "decimal=',' beside sep where numbers have commas"
            )
    _check_names(file, [name.strip() for name in header])
    return header


def _parquet(file: Path) -> "pa.Table":
    """Columns of a Parquet file by name.

    Raises:
        InvalidData: if it cannot be read.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as content:
            names = content.schema_arrow.names
            _check_names(file, [name.strip() for name in names])
            table = content.read()
    except (OSError, pa.ArrowException) as error:
        raise InvalidData(f"{file}: cannot be read as Parquet ({_one_line(error)}): write it anew") from None
    return _plain(file, table)


def _plain(file: Path, table: "pa.Table") -> "pa.Table":
    """A table of one value a row, by its stripped names, categories as what they stand for.

    Raises:
        InvalidData: if a cell holds several values, or a name is none.
    """
    import pyarrow as pa

    names = [name.strip() for name in table.column_names]
    _check_names(file, names)
    nested = [field.name for field in table.schema if pa.types.is_nested(field.type)]
    if nested:
        raise InvalidData(f"{file}: column {nested[0]} must hold one value a row, got lists: split it into columns")
    return pa.table([_decoded(table.column(number)) for number in range(len(names))], names=names)


def _decoded(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """A column of categories as what its numbers stand for; any other as it is."""
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _as_arrow(frame: Any) -> "pa.Table":
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        return frame
    # polars gives its own; pandas' index has no name among the columns.
    return frame.to_arrow() if hasattr(frame, "to_arrow") else pa.Table.from_pandas(frame, preserve_index=False)


def _check_names(file: Path, header: Sequence[str]) -> None:
    if len(header) > _MOST_COLUMNS:
        raise InvalidData(
            f"{file}: must have at most {_MOST_COLUMNS} columns, got {len(header)}: give so many as an array (npz)"
        )
    seen = set()
    for number, name in enumerate(header, start=1):
        # pandas gives an index without a name these, in CSV, read again, and in Parquet.
        if not name or name.startswith(("Unnamed: ", "__index_level_")):
            raise InvalidData(f"{file}: column {number} must have a name, got {name!r}, {_INDEX}")
        if not name.isprintable() or len(name) > _MOST_LETTERS:
            raise InvalidData(
                f"{file}: column {number} must have a name of at most {_MOST_LETTERS} printable letters, got "
                f"{name[:_SHOWN_LETTERS]!r}: rename it"
            )
        if name in seen:
            raise InvalidData(f"{file}: the header must name each column once, got {name!r} again: rename one")
        seen.add(name)


def _unreadable(file: Path, error: object) -> InvalidData:
    return InvalidData(f"{file}: cannot be read as comma-separated text in UTF-8 ({_one_line(error)}): convert it")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _texts(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """A column as texts, empty where a cell is null."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_boolean(column.type):
        # As Python, and so pandas, writes them into a CSV.
        column = compute.if_else(column, "True", "False")
    texts = column if column.type == pa.string() else column.cast(pa.string())
    return compute.fill_null(texts, "") if texts.null_count else texts


def _as_texts(table: "pa.Table") -> "pa.Table":
    import pyarrow as pa

    return pa.table({name: _texts(table.column(name)) for name in table.column_names})


def _cast(column: "pa.ChunkedArray", kind: type[Any]) -> NDArray[Any] | None:
    """A column as numbers by PyArrow, which is fast; None where Python is to say what a cell is.

    Both round a decimal number to the nearest float64, so that they give the same bits.
    """
    import pyarrow as pa

    # PyArrow would take 0x10 for an integer.
    if _is_text(column.type) and kind is not np.float64:
        return None
    try:
        cast = column.cast(pa.from_numpy_dtype(np.dtype(kind)))
    except pa.ArrowException:
        return None
    return np.array(cast.to_numpy())  # a copy: PyArrow's own memory cannot be written to


def _converted(cells: Sequence[str] | NDArray[np.object_], kind: type[Any]) -> NDArray[Any] | None:
    """Cells as numbers of one of NumPy's types; None where one is no such number."""
    try:
        # A type of texts would give every cell the longest one's room.
        return np.array(cells, dtype=object).astype(kind)
    except (ValueError, OverflowError):
        return None


def _nearest(name: str, known: Sequence[str]) -> str:
    """End of a message on a missing column, as :func:`nearest`, which lists some of very many columns."""
    said = nearest(name, list(known))
    return said if len(known) <= _SHOWN_NAMES else f"{said.partition('known:')[0]}known: {_listed(known)}"


def _listed(names: Collection[str]) -> str:
    """Names in one line, some of very many."""
    shown = list(names)[:_SHOWN_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
