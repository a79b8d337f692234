"""The checker itself: it concludes no more than linear algebra does, and sees bytes that its model does not explain."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed.secure_aggregation import shamir
from tests.fed.secure_aggregation.hostile import algebra, spec
from tests.fed.secure_aggregation.hostile.checker import Checker, Unexplained
from tests.fed.secure_aggregation.hostile.play import Transcript, play

_MESSAGES = ("A/1", "B/1", "C/1", "D/1", "A/2")
_MASKS = ("mask 1", "mask 2", "mask 3")
_EQUATIONS = st.lists(st.fixed_dictionaries(dict.fromkeys(_MESSAGES + _MASKS, st.integers(-1, 1))), max_size=7)
_SETTINGS = {
    "clients": 5,
    "colluders": 0,
    "listed": 5,
    "graph": "complete",
    "corrupt": 0.0,
    "minimum_cohort": 3,
    "threshold": "auto",
}


def _is_message(name: str) -> bool:
    return not name.startswith("mask")


def _rank(rows: Sequence[Sequence[int]]) -> int:
    return int(np.linalg.matrix_rank(np.array(rows, float))) if rows else 0


def _follows(equations: Sequence[Mapping[str, int]], name: str) -> bool:
    """Ranks in floating point, exact enough for a few rows of −1, 0 and 1."""
    rows = [[equation[one] for one in _MESSAGES + _MASKS] for equation in equations]
    return _rank(rows) == _rank([*rows, [int(one == name) for one in _MESSAGES + _MASKS]])


@given(_EQUATIONS)
def test_a_message_is_determined_where_its_row_adds_no_rank(equations: list[dict[str, int]]) -> None:
    sums = algebra.sums_of_messages(equations, _is_message)
    assert sorted(algebra.determined(sums)) == sorted(name for name in _MESSAGES if _follows(equations, name))


@given(_EQUATIONS, st.integers(1, 5))
def test_few_clients_are_found_where_their_columns_hold_rank(equations: list[dict[str, int]], below: int) -> None:
    rows = [[equation[one] for one in _MASKS + _MESSAGES] for equation in equations]

    def holds(some: Sequence[str]) -> bool:
        rest = [place for place, one in enumerate(_MASKS + _MESSAGES) if one.split("/")[0] not in some]
        return _rank([[row[place] for place in rest] for row in rows]) < _rank(rows)

    sizes = [size for size in range(1, below) for some in combinations("ABCD", size) if holds(some)]
    found = algebra.smallest_support(
        algebra.sums_of_messages(equations, _is_message), lambda name: name.split("/")[0], below
    )
    assert (None if found is None else len(found)) == (min(sizes) if sizes else None)


def _honest_round() -> Transcript:
    return play(0, strategies=["honest_round"], settings=_SETTINGS)


@pytest.mark.usefixtures("cheap")
def test_an_honest_round_gives_the_sum_of_all_alone() -> None:
    transcript = _honest_round()
    (total,) = Checker(transcript.world.record, 3).sums
    assert {name.split("/")[0] for name in total} == {*transcript.world.names}
    assert {*total.values()} == {1}
    assert not transcript.findings


@pytest.mark.usefixtures("cheap")
def test_who_opens_all_boxes_learns_every_message() -> None:
    record = _honest_round().world.record
    record.adversary |= {spec.public_of(one): one for drawn in record.drawn.values() for one in drawn}
    found = Checker(record, 3).findings()
    assert sum("is determined" in one for one in found) == 5
    assert sum("both secrets" in one for one in found) == 5


@pytest.mark.usefixtures("cheap")
def test_one_bit_of_a_masked_vector_is_seen() -> None:
    record = _honest_round().world.record
    record.masked[2].lanes[1] ^= 1
    with pytest.raises(Unexplained):
        Checker(record, 3).findings()


@given(st.binary(min_size=32, max_size=32), st.integers(2, 6))
def test_a_threshold_of_shares_leads_to_the_secret(secret: bytes, threshold: int) -> None:
    made = shamir.share(secret, threshold, 6, np.random.default_rng(threshold).bytes)
    values = {point: int.from_bytes(one, "big") for point, one in enumerate(made, 1)}
    for some in combinations(values, threshold):
        assert spec.value_at_zero({point: values[point] for point in some}) == int.from_bytes(secret, "big")
    for some in combinations(values, threshold - 1):
        assert spec.value_at_zero({point: values[point] for point in some}) != int.from_bytes(secret, "big")
