"""Linear algebra over the rationals: what follows from sums of messages and masks, of which some are known."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import TypeAlias

Equation: TypeAlias = Mapping[str, int]
"""A known vector: the sum of unknown ones, each by its name with its coefficient."""

Row: TypeAlias = dict[str, Fraction]
"""An equation whose factors are scaled."""


def sums_of_messages(equations: Iterable[Equation], is_message: Callable[[str], bool]) -> list[Row]:
    """A basis, in reduced echelon form, of all sums of messages that follow: in it no mask is left.

    Args:
        equations: each with messages and masks that are unknown.
        is_message: tells an unknown message from an unknown mask.
    """
    pivots: list[tuple[str, Row]] = []
    free: list[tuple[str, Row]] = []
    for equation in _worth_it(list(equations), is_message):
        row = {name: Fraction(factor) for name, factor in equation.items() if factor}
        for column, pivot in pivots:
            _reduce(row, column, pivot)
        if masks := [name for name in row if not is_message(name)]:
            pivots.append((masks[0], _scaled(row, masks[0])))
            continue
        for column, pivot in free:
            _reduce(row, column, pivot)
        if row:
            column = min(row)
            row = _scaled(row, column)
            for _, other in free:
                _reduce(other, column, row)
            free.append((column, row))
    return [row for _, row in free]


def determined(sums: Iterable[Row]) -> list[str]:
    """Messages that follow: those that a reduced row has alone."""
    return [name for row in sums if len(row) == 1 for name in row]


def smallest_support(sums: Sequence[Row], client_of: Callable[[str], str], below: int) -> Sequence[str] | None:
    """Fewer clients than a bound, of whose messages alone some combination follows; None if there are none.

    Args:
        sums: a basis.
        client_of: name of a message → its client.
        below: the bound.
    """
    clients = sorted({client_of(name) for row in sums for name in row})
    if not sums or below <= 1:
        return None
    if len(sums) == 1:
        return clients if len(clients) < below else None
    rank = len(sums)
    for size in range(1, min(below, len(clients) + 1)):
        for some in combinations(clients, size):
            rest = [{name: factor for name, factor in row.items() if client_of(name) not in some} for row in sums]
            if _rank(rest) < rank:
                return some
    return None


def _worth_it(equations: list[Equation], is_message: Callable[[str], bool]) -> list[Equation]:
    """Without equations that have a mask which no other one has."""
    while True:
        counts = Counter(name for equation in equations for name, factor in equation.items() if factor)
        left = [
            one
            for one in equations
            if all(counts[name] > 1 or is_message(name) for name, factor in one.items() if factor)
        ]
        if len(left) == len(equations):
            return left
        equations = left


def _rank(rows: Iterable[Row]) -> int:
    pivots: list[tuple[str, Row]] = []
    for given in rows:
        row = dict(given)
        for column, pivot in pivots:
            _reduce(row, column, pivot)
        if row:
            column = min(row)
            pivots.append((column, _scaled(row, column)))
    return len(pivots)


def _reduce(row: Row, column: str, pivot: Row) -> None:
    """Take away, in place, as much of a pivot's row as leaves nothing at its column."""
    factor = row.get(column)
    if not factor:
        return
    for name, value in pivot.items():
        left = row.get(name, Fraction(0)) - factor * value
        if left:
            row[name] = left
        else:
            row.pop(name, None)


def _scaled(row: Row, column: str) -> Row:
    by = row[column]
    return {name: value / by for name, value in row.items()}
