"""Audits of private runs: an honest run does not pass its claim, and one with a fault does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fed
from fed.errors import InvalidExperiment
from fed.privacy import noisy_sum, protection
from fed.privacy.accounting import epsilon
from fed.privacy.clipping import grid_step
from fed.privacy.correlated_sum import CorrelatedSum
from fed.privacy.dp_ftrl import FollowTheLeaderPrivacy
from fed.privacy.kinds import privacy_of
from fed.privacy.noise import gaussian_units
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.one_run_audit import Guesses, best_guesses
from fed.privacy.releases import Release
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.server.rounds.sampling import CohortDraw, Poisson
from fed.simulations.audit import Audit, audit
from tests.fed.cli.commands import runner
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")

CENTRAL = {"kind": "central", "clip": 0.3, "noise_multiplier": 6.0}
LOCAL = {"kind": "local", "clip": 0.3, "noise_multiplier": 12.0}
DISTRIBUTED = {"privacy": {**CENTRAL, "kind": "distributed"}, "secure_aggregation": {}}
FTRL: dict[str, Any] = {
    "privacy": {"kind": "dp_ftrl", "clip": 0.3, "noise_multiplier": 8.0},
    "rounds": {"count": 6, "cohort": 3, "sampling": "round_robin"},
}
CLAIMED = epsilon({Release(noise_multiplier=6.0): 2}, 1e-5)
"""ε that central and local claim for two rounds: 0.87."""


def model() -> nn.Module:
    """A model of 1,027 parameters."""
    return nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 3))


def experiment(**changed: Any) -> fed.Experiment:
    keys: dict[str, Any] = {
        "data": None,
        "model": None,
        "local": {"lr": 0.1, "batch_size": 16},
        "rounds": {"count": 2},
        "privacy": CENTRAL,
        "simulation": {"workers": 0},
    }
    return fed.Experiment(**{**keys, **changed})


def audited(canaries: int = 500, confidence: float = 0.95, **changed: Any) -> Audit:
    return audit(experiment(**changed), parts.unequal(), model, canaries=canaries, confidence=confidence)


def with_noise_times(factor: float, patch: pytest.MonkeyPatch) -> None:
    """Noise that is weaker than what is claimed."""

    def weakened(
        generator: np.random.Generator, numbers: int, deviation: float, bit_deviation: float | None = None
    ) -> Tensor:
        return gaussian_units(generator, numbers, factor * deviation, bit_deviation)

    patch.setattr(noisy_sum, "gaussian_units", weakened)
    patch.setattr(protection, "gaussian_units", weakened)
    units = LaneNoise.units

    def weakened_units(noise: LaneNoise, *given: Any) -> Any:
        return units(replace(noise, noise_multiplier=factor * noise.noise_multiplier), *given)

    patch.setattr(LaneNoise, "units", weakened_units)
    deviation = factor * 8.0 * 0.3 / grid_step(0.3)
    patch.setattr(CorrelatedSum, "deviation", property(lambda noise: deviation))


_KINDS: dict[str, dict[str, Any]] = {
    "central": {},
    "local": {"privacy": LOCAL},
    "distributed": DISTRIBUTED,
    "dp_ftrl": FTRL,
}


@pytest.mark.parametrize("changed", _KINDS.values(), ids=_KINDS)
def test_runs_without_their_noise_pass_the_claim(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with_noise_times(0.0, monkeypatch)
    found = audited(**changed)
    # Of Skellam noise the claim is an upper bound.
    claimed = of_the_plan(FTRL) if changed is FTRL else CLAIMED
    assert claimed * 0.999 < found.claimed_epsilon < claimed * 1.1
    assert found.guesses.right == found.guesses.made == 250
    assert found.guesses.epsilon == found.guesses.largest_epsilon > 4
    assert found.passes_claim


@pytest.mark.parametrize("changed", [{}, {"privacy": LOCAL}, FTRL], ids=["central", "local", "dp_ftrl"])
def test_a_quarter_of_the_noise_is_found(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And half of it is not, at this ε and number of canaries: the bound is below the claim, and nearer to it."""
    bounds = []
    for factor in (1.0, 0.5, 0.25):
        with_noise_times(factor, monkeypatch)
        found = audited(1000, **changed)
        bounds.append(found.guesses.epsilon)
    assert bounds[0] < bounds[1] < found.claimed_epsilon < bounds[2]
    assert 0.7 < found.claimed_epsilon < 0.9


def of_the_plan(changed: dict[str, Any]) -> float:
    """ε of an experiment's plan over the clients of its own."""
    planned = experiment(**changed)
    privacy = privacy_of(planned)
    assert privacy is not None
    return epsilon(privacy.plan(planned.rounds.make(), len(parts.UNEQUAL)).releases(), privacy.delta)


@pytest.mark.parametrize("separation", [3, None])
def test_cohorts_with_canaries_keep_the_rule_of_participation(separation: int | None) -> None:
    """3 of 9 clients are 170 of 509, rounded to the nearest, which leave no room for a separation of 3 rounds."""
    changed = {**FTRL, "privacy": {**FTRL["privacy"], "min_separation": separation}}
    assert audited(**changed).claimed_epsilon == pytest.approx(of_the_plan(FTRL), rel=1e-9)


def test_scores_tell_all_that_correlated_noise_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    r"""Canaries that are in lie root-mean-square ‖C p‖ deviations from those that are out, p their rounds.

    With 250 on each side that has an error of √(2/250) for the difference and of 1/√500 of it for the deviation.
    """
    told: list[float] = []

    def guessed(scores_m: np.ndarray, included_m: np.ndarray, **named: Any) -> Guesses:
        outside_m = scores_m[~included_m]
        told.append(float((scores_m[included_m].mean() - outside_m.mean()) / outside_m.std()))
        return best_guesses(scores_m, included_m, **named)

    monkeypatch.setattr("fed.simulations.audit.best_guesses", guessed)
    keys = {**FTRL["privacy"], "noise_multiplier": 1.0, "min_separation": 3, "mechanism": {"kind": "banded"}}
    changed: dict[str, Any] = {"privacy": keys, "rounds": {**FTRL["rounds"], "count": 12}}
    audited(**changed)
    privacy = privacy_of(experiment(**changed))
    assert isinstance(privacy, FollowTheLeaderPrivacy)
    column_T = privacy.matrix(12).column(12)
    squares = []
    for first in range(3):
        present_T = np.zeros(12)
        present_T[first::3] = 1
        squares.append((np.convolve(column_T, present_T)[:12] ** 2).sum())
    expected = np.sqrt(np.mean(squares))
    assert told[0] == pytest.approx(expected, abs=4 * np.hypot(np.sqrt(2 / 250), expected / np.sqrt(500)))


def test_messages_that_nobody_clips_pass_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection, "clipped", lambda update_KM, clip, unit: update_KM.clone())
    monkeypatch.setattr("fed.server.way_in.is_within", lambda update_M, clip: True)
    assert audited().passes_claim


def test_cohorts_that_are_no_lottery_pass_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Amplification is claimed, and everybody takes part."""
    rounds = {"count": 2, "cohort": 1, "sampling": "poisson"}
    privacy = {**CENTRAL, "noise_multiplier": 1.5}
    honest = audited(1000, rounds=rounds, privacy=privacy)
    assert honest.claimed_epsilon < 0.9
    assert not honest.passes_claim

    def all_of_them(self: Poisson, draw: CohortDraw) -> list[int]:
        return list(range(draw.population))

    monkeypatch.setattr(Poisson, "places", all_of_them)
    assert audited(1000, rounds=rounds, privacy=privacy).passes_claim


def test_another_divisor_changes_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same for signal and noise: ε does not depend on it."""
    honest = audited(rounds={"count": 1})
    add = NoisySum.__call__

    def divided(self: NoisySum, mean_M: Tensor, clients: int, expected: float, **named: Any) -> Tensor:
        return add(self, mean_M, clients, 3 * expected, **named)

    monkeypatch.setattr(NoisySum, "__call__", divided)
    assert audited(rounds={"count": 1}) == honest


_HONEST = {
    "central": {},
    "local": {"privacy": LOCAL},
    "distributed": DISTRIBUTED,
    "adaptive": {"privacy": {**CENTRAL, "clip": "adaptive"}},
    "adaptive local": {"privacy": {**LOCAL, "clip": "adaptive", "noise_multiplier": 6.0}},
    "adaptive distributed": {**DISTRIBUTED, "privacy": {**DISTRIBUTED["privacy"], "clip": "adaptive"}},
    "poisson": {"rounds": {"count": 2, "cohort": 4, "sampling": "poisson"}},
    "dp_ftrl": FTRL,
    "banded": {**FTRL, "privacy": {**FTRL["privacy"], "mechanism": {"kind": "banded"}}},
    "in turn": {"rounds": {"count": 4, "cohort": 4, "sampling": "round_robin"}},
    "momentum": {"algorithm": "fedavgm"},
    "two parts": {"algorithm": "scaffold"},
    "failures": {"devices": {"kind": "uniform", "failure": 0.3}},
}


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(changed, id=name, marks=[pytest.mark.long] if name == "adaptive distributed" else [])
        for name, changed in _HONEST.items()
    ],
)
def test_an_honest_run_does_not_pass_its_claim(changed: dict[str, Any]) -> None:
    """At 99.9 %, so that all of these are right with 99 %."""
    found = audited(confidence=0.999, **changed)
    assert not found.passes_claim
    assert found.verdict == "No fault was found: the bound does not pass the claim."


@pytest.mark.long
@pytest.mark.parametrize("changed", _HONEST.values(), ids=_HONEST)
def test_no_seed_of_honest_runs_passes_its_claim(changed: dict[str, Any]) -> None:
    for seed in range(10):
        assert not audited(confidence=0.9999, seed=seed, canaries=1000, **changed).passes_claim


@pytest.mark.processes
def test_canaries_are_seen_in_sums_of_the_workers() -> None:
    in_workers = audited(simulation={"workers": 2, "batching": "on", "group": 64})
    alone = audited(simulation={"workers": 0, "batching": "on", "group": 64})
    assert in_workers == alone


def test_clients_on_demand_and_by_number_have_canaries_beside_them() -> None:
    found = audit(experiment(rounds={"count": 1, "cohort": 6}), parts.on_demand(), model, canaries=20)
    assert (found.guesses.canaries, found.rounds) == (20, 1)


def test_the_audit_ends_where_the_budget_does() -> None:
    budget = (epsilon({Release(noise_multiplier=6.0): 1}, 1e-5) + CLAIMED) / 2
    found = audited(canaries=20, privacy={**CENTRAL, "budget_epsilon": budget})
    assert found.rounds == 1
    assert found.claimed_epsilon <= budget


def test_a_claim_beyond_the_canaries_is_said_to_be_so() -> None:
    found = audited(canaries=20, privacy={**CENTRAL, "noise_multiplier": 0.5})
    assert "20 canaries refute no claim of ε above" in found.verdict


@pytest.mark.parametrize(
    ("changed", "canaries", "reason"),
    [
        ({"privacy": None}, 20, "needs the section privacy, got null"),
        ({}, 1100, "got 1027 parameters and 1100 canaries: give fewer canaries"),
        ({}, 10, "at least 20 canaries, got 10"),
    ],
)
def test_what_cannot_be_audited_is_refused(changed: dict[str, Any], canaries: int, reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        audited(canaries=canaries, **changed)


EXPERIMENT = """
data: {kind: digits, clients: 6}
model: {kind: mlp, hidden: [8]}
rounds: {count: 1}
privacy: {kind: central, clip: 0.3, noise_multiplier: 6.0}
simulation: {workers: 0}
"""


@pytest.mark.parametrize(("factor", "code", "said"), [(1.0, 0, "No fault was found"), (0.0, 1, "tells more than it")])
def test_the_command_says_what_was_found(
    factor: float,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_noise_times(factor, monkeypatch)
    (tmp_path / "private.yaml").write_text(EXPERIMENT)
    result = runner(tmp_path, monkeypatch, capsys, "audit")("private.yaml", "--canaries", "100", "--confidence", "0.99")
    assert result.code == code
    lines = [line.rstrip() for line in result.out.splitlines()]
    assert lines[0].split()[:2] == ["canaries", "100,"]
    assert "right" in lines[1]
    assert lines[2].endswith("at 99 %")
    assert lines[3].split()[-1] == "1e-05"
    assert said in result.out


def test_a_confidence_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "private.yaml").write_text(EXPERIMENT)
    result = runner(tmp_path, monkeypatch, capsys, "audit")("private.yaml", "--confidence", "1")
    assert result.code == 2
    assert "must be between 0 and 1" in result.err
