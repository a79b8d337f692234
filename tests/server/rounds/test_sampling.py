"""Who takes part: each rule against the probabilities that it states."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
from scipy.stats import chisquare

from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.server.rounds.sampling import (
    CohortDraw,
    Poisson,
    PowerOfChoice,
    RoundRobin,
    Sampling,
    UniformSampling,
    Weighted,
)
from fed.vectors.randomness import Streams
from fed.wire.messages import Answer, Task
from tests.scripted_fleet import ScriptedFleet

ROUNDS = 2000


class Crowd(ScriptedFleet):
    """Clients a, b, c … that hold so many samples and never answer."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = dict(zip("abcdefghijklmnop", samples, strict=False))
        super().__init__(list(self._samples))

    def size_of(self, client: int | str) -> int:
        return self._samples[str(client)]

    def dispatch(self, tasks: Iterable[Task]) -> None:
        raise AssertionError("nobody is asked")

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        raise AssertionError("nobody answers")


def cohorts(rule: Sampling, crowd: Crowd, cohort: int, rounds: int = ROUNDS) -> list[list[int | str]]:
    return [rule.sample(CohortDraw(crowd, number, cohort, Streams(0), {})) for number in range(1, rounds + 1)]


def shares(drawn: list[list[int | str]], crowd: Crowd) -> np.ndarray:
    return np.array([sum(client in cohort for cohort in drawn) for client in crowd.available()]) / len(drawn)


class Leaving(Crowd):
    """Clients of whom one is gone, or is back, whenever somebody looks."""

    _looks = 0

    def available(self) -> Sequence[int | str]:
        self._looks += 1
        return [*super().available()][: 5 - self._looks % 2]


@pytest.mark.parametrize("rule", [UniformSampling(), Weighted(), RoundRobin(), Poisson(), PowerOfChoice()])
def test_clients_that_leave_meanwhile_end_no_draw(rule: Sampling) -> None:
    crowd = Leaving([3, 1, 2, 9, 5])
    for cohort in cohorts(rule, crowd, 5, 20):
        assert set(cohort) <= set("abcde")


@pytest.mark.parametrize("rule", [UniformSampling(), Weighted(), RoundRobin(), PowerOfChoice()])
def test_cohort_has_its_size_and_the_fleets_order(rule: Sampling) -> None:
    for cohort in cohorts(rule, Crowd([3, 1, 2, 9, 5]), 3, 100):
        assert len(cohort) == 3
        assert cohort == sorted(set(map(str, cohort)))


@pytest.mark.parametrize("rule", [UniformSampling(), Weighted(), RoundRobin(), Poisson(), PowerOfChoice()])
def test_a_cohort_is_a_function_of_seed_and_round(rule: Sampling) -> None:
    crowd = Crowd([3, 1, 2, 9, 5])
    assert cohorts(rule, crowd, 2, 30) == cohorts(rule, crowd, 2, 30)
    others = [rule.sample(CohortDraw(crowd, number, 2, Streams(1), {})) for number in range(1, 31)]
    assert others != cohorts(rule, crowd, 2, 30)


def test_uniform_cohorts_are_all_as_likely() -> None:
    crowd = Crowd([1] * 10)
    drawn = cohorts(UniformSampling(), crowd, 3)
    # Each client is in a cohort with p = 0.3; five standard deviations of 2,000 such draws.
    assert np.abs(shares(drawn, crowd) - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 / ROUNDS)
    assert len(set(map(tuple, drawn))) > 100


def test_weighted_draws_follow_the_samples() -> None:
    crowd = Crowd([1, 2, 3, 4])
    expected = np.array([1, 2, 3, 4]) / 10
    got = shares(cohorts(Weighted(), crowd, 1), crowd)
    assert np.abs(got - expected).max() < 5 * math.sqrt(0.25 / ROUNDS)
    pair = np.zeros(4)  # without replacement: p_i + Σ_j p_j p_i / (1 − p_j)
    for i in range(4):
        pair[i] = expected[i] + sum(expected[j] * expected[i] / (1 - expected[j]) for j in range(4) if j != i)
    assert np.abs(shares(cohorts(Weighted(), crowd, 2), crowd) - pair).max() < 5 * math.sqrt(0.25 / ROUNDS)


def test_round_robin_asks_everybody_equally_often() -> None:
    crowd = Crowd([1] * 7)
    drawn = cohorts(RoundRobin(), crowd, 3, 7)
    assert [sum(client in cohort for cohort in drawn) for client in crowd.available()] == [3] * 7
    assert {client for cohort in drawn[:3] for client in cohort} == set(crowd.available())


def test_poisson_takes_each_client_by_itself() -> None:
    crowd = Crowd([1] * 10)
    drawn = cohorts(Poisson(), crowd, 3)
    sizes = np.array([len(cohort) for cohort in drawn])
    assert abs(sizes.mean() - 3) < 5 * math.sqrt(10 * 0.3 * 0.7 / ROUNDS)
    assert sizes.var() == pytest.approx(10 * 0.3 * 0.7, rel=0.2)  # binomial; a fixed size would have none
    assert 0 in sizes
    both = np.mean(["a" in cohort and "b" in cohort for cohort in drawn])
    assert both == pytest.approx(0.09, abs=5 * math.sqrt(0.09 * 0.91 / ROUNDS))  # independent of each other


def test_poisson_takes_members_as_likely_however_many_are_there() -> None:
    members = list(range(100))
    present = members[::5]
    fleet = Absentees(members, present)
    drawn = [Poisson().sample(CohortDraw(fleet, number, 10, Streams(0), {})) for number in range(1, ROUNDS + 1)]
    assert set().union(*drawn) == set(present)
    share = np.array([sum(client in cohort for cohort in drawn) for client in present]) / ROUNDS
    # Each client is drawn with p = 10/100, present or not; five standard deviations of 2,000 such draws.
    assert np.abs(share - 0.1).max() < 5 * math.sqrt(0.1 * 0.9 / ROUNDS)


class Absentees(ScriptedFleet):
    """Members of whom only some are there."""

    def __init__(self, members: Sequence[int | str], present: Sequence[int | str]) -> None:
        super().__init__(members)
        self._present = present

    def available(self) -> Sequence[int | str]:
        return self._present


def test_poisson_is_refused_where_no_cohort_is_waited_for() -> None:
    with pytest.raises(InvalidExperiment, match=r"^rounds.sampling poisson needs rounds that wait for a cohort"):
        Experiment(rounds={"kind": "buffered", "sampling": "poisson"})


def test_power_of_choice_takes_the_largest_losses_of_the_candidates() -> None:
    crowd = Crowd([1] * 6)
    losses: dict[int | str, float] = {client: float(place) for place, client in enumerate("abcdef")}
    every = PowerOfChoice(candidates=6)
    assert every.sample(CohortDraw(crowd, 1, 2, Streams(0), losses)) == ["e", "f"]
    del losses["b"]  # who never had a loss comes first
    assert every.sample(CohortDraw(crowd, 1, 2, Streams(0), losses)) == ["b", "f"]
    as_drawn = PowerOfChoice(candidates=2)
    assert as_drawn.sample(CohortDraw(crowd, 5, 2, Streams(0), losses)) == Weighted().sample(
        CohortDraw(crowd, 5, 2, Streams(0), losses)
    )


def test_power_of_choice_breaks_ties_by_draw_order() -> None:
    crowd = ScriptedFleet([f"{client:02}" for client in range(90)])
    for number in range(1, 6):
        draw = CohortDraw(crowd, number, 20, Streams(0), {})
        first = [crowd.available()[place] for place in draw.by_samples(60)[:20]]
        assert PowerOfChoice(candidates=60).sample(draw) == sorted(first, key=str)


def test_power_of_choice_draws_twice_the_cohort_by_default() -> None:
    crowd = Crowd([1] * 12)
    losses: dict[int | str, float] = {client: float(place) for place, client in enumerate("abcdefghijkl")}
    for number in range(1, 21):
        draw = CohortDraw(crowd, number, 3, Streams(0), losses)
        assert PowerOfChoice().sample(draw) == PowerOfChoice(candidates=6).sample(draw)
        candidates = sorted(
            map(str, PowerOfChoice(candidates=6).sample(CohortDraw(crowd, number, 6, Streams(0), losses)))
        )
        assert PowerOfChoice().sample(draw) == candidates[-3:]


def test_fewer_candidates_than_the_cohort_are_refused() -> None:
    with pytest.raises(InvalidExperiment, match="candidates must be at least the cohort of 3, got 2"):
        PowerOfChoice(candidates=2).sample(CohortDraw(Crowd([1] * 6), 1, 3, Streams(0), {}))


class Many(Crowd):
    """So many clients, by number."""

    def __init__(self, population: int) -> None:
        self._population = population

    def available(self) -> list[int | str]:
        return list(range(self._population))


@pytest.mark.parametrize("again", [0, 1])
def test_a_single_client_may_be_any_as_likely_as_another(again: int) -> None:
    rule = UniformSampling()
    drawn = [rule.sample(CohortDraw(Many(7), number, 1, Streams(3), {}, again))[0] for number in range(1, 7001)]
    assert chisquare(np.bincount(drawn, minlength=7)).pvalue > 0.001
    assert drawn != [
        UniformSampling().sample(CohortDraw(Many(7), number, 1, Streams(3), {}, 2))[0] for number in range(1, 7001)
    ]
