"""What stale updates count: each rule against its formula, and what all of them promise."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed.config.registry import STALENESSES
from fed.errors import ValueRange
from fed.server.rounds.staleness import ConstantStaleness, Hinge, Polynomial, Staleness

# Where float64 tells every factor from 0: (10^6 + 1)^-20 is about 1e-120.
stalenesses = st.integers(0, 10**6)
exponents = st.floats(0, 20)
slopes = st.floats(1e-9, 1e9)
graces = st.integers(0, 10**4)
rules: st.SearchStrategy[Staleness] = st.one_of(
    st.just(ConstantStaleness()),
    st.builds(Polynomial, exponent=exponents),
    st.builds(Hinge, slope=slopes, grace=graces),
)


@given(rules, stalenesses, stalenesses)
def test_fresh_updates_count_fully_and_staler_ones_never_more(rule: Staleness, one: int, other: int) -> None:
    assert rule.weight(0) == 1.0
    fresher, staler = sorted([one, other])
    assert 0 < rule.weight(staler) <= rule.weight(fresher) <= 1


class Halving(Staleness):
    """A user's own rule, whose factors no float holds at the largest counts."""

    def weight(self, staleness: int) -> float:
        return float(1 / 2**staleness)


def test_a_rule_is_asked_for_no_staleness_that_never_comes() -> None:
    assert Halving().discounts
    assert [rule.discounts for rule in (ConstantStaleness(), Polynomial(exponent=0), Polynomial())] == [
        False,
        False,
        True,
    ]


@given(stalenesses)
def test_constant_takes_no_notice(staleness: int) -> None:
    assert ConstantStaleness().weight(staleness) == 1.0


@given(stalenesses, exponents)
def test_polynomial_is_its_formula(staleness: int, exponent: float) -> None:
    # By way of the logarithm, whose error the exponent multiplies: 20 ln(10^6) 2^-52 is about 6e-14.
    expected = math.exp(-exponent * math.log1p(staleness))
    assert Polynomial(exponent=exponent).weight(staleness) == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 10**4), slopes, graces)
def test_hinge_is_its_formula(staleness: int, slope: float, grace: int) -> None:
    rule = Hinge(slope=slope, grace=grace)
    expected = 1.0 if staleness <= grace else 1 / (slope * (staleness - grace) + 1)
    assert rule.weight(staleness) == expected


def test_defaults_are_those_of_the_paper() -> None:
    assert [Hinge().weight(staleness) for staleness in (4, 5, 14)] == [1.0, 1 / 11, 1 / 101]
    assert Polynomial().weight(3) == 0.5


@pytest.mark.parametrize(
    ("kind", "keys", "sentence"),
    [
        (Polynomial, {"exponent": -0.5}, r"Polynomial: exponent must be greater than or equal to 0, got -0\.5"),
        (Polynomial, {"exponent": math.inf}, r"Polynomial: exponent must be a finite number, got inf"),
        (Hinge, {"slope": 0.0}, r"Hinge: slope must be greater than 0, got 0\.0"),
        (Hinge, {"grace": -1}, r"Hinge: grace must be greater than or equal to 0, got -1"),
        (Hinge, {"grace": 0.5}, r"Hinge: grace must be an integer, got 0\.5"),
    ],
)
def test_what_would_grow_with_staleness_is_refused(
    kind: type[Staleness], keys: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ValueRange, match=sentence):
        kind(**keys)


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("constant", ConstantStaleness()),
        ("hinge", Hinge()),
        ({"kind": "hinge", "slope": 2.0, "grace": 1}, Hinge(slope=2.0, grace=1)),
        ({"exponent": 1.0}, Polynomial(exponent=1.0)),
        ({}, Polynomial()),
    ],
)
def test_an_experiment_names_a_rule(written: object, rule: Staleness) -> None:
    assert STALENESSES.validate(written).make() == rule
