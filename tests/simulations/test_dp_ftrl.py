"""Privacy by correlated noise: what sums over rounds carry, and who is asked how often."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import fed
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.errors import InvalidCheckpoint, InvalidExperiment, RunFailed
from fed.privacy.accounting import epsilon
from fed.privacy.clipping import grid_step
from fed.privacy.correlated_sum import CorrelatedSum
from fed.privacy.dp_ftrl import FollowTheLeaderPrivacy
from fed.privacy.kinds import privacy_of
from fed.privacy.ledger import Ledger
from fed.privacy.noise import SeededNoise
from fed.privacy.releases import Release
from fed.server.observer import Essential, Event, Kinds, TaskSent
from fed.server.privacy_account import PrivacyAccount
from fed.server.rounds.sampling import CohortDraw, Sampling
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from tests.fed.privacy.test_noise import hold_to_normal
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")

BANDED = {"kind": "banded", "bands": 3}
BLT = {"kind": "blt", "buffers": 2}
PRIVACY = {"kind": "dp_ftrl", "clip": 0.3, "noise_multiplier": 2.0, "mechanism": BANDED}


@dataclass(frozen=True, kw_only=True)
class SameClients(Sampling):
    """Sampling that asks the first clients of all, whether they are available or not, and one of them twice."""

    def sample(self, draw: CohortDraw) -> list[int | str]:
        everybody = getattr(draw.fleet, "fleet", draw.fleet)
        return [0, *everybody.registered()[: draw.cohort]]

    def places(self, draw: CohortDraw) -> Sequence[int]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FirstClients(Sampling):
    """Sampling that asks the first of the clients that may be asked."""

    def places(self, draw: CohortDraw) -> Sequence[int]:
        return range(draw.size)


class Asked:
    """Observer that notes the rounds in which each client is asked."""

    kinds: Kinds = (TaskSent,)

    def __init__(self) -> None:
        self.rounds: dict[int | str, list[int]] = defaultdict(list)

    def observe(self, event: Event) -> None:
        assert isinstance(event, TaskSent)
        self.rounds[event.client].append(event.round)


def experiment(**changed: Any) -> fed.Experiment:
    """Twelve clients, three of whom take part in a round."""
    keys: dict[str, Any] = {
        "data": {"kind": "digits", "clients": 12},
        "model": {"kind": "mlp", "hidden": [8]},
        "local": {"lr": 0.1, "batch_size": 16, "steps": 1},
        "rounds": {"count": 6, "cohort": 3},
        "privacy": PRIVACY,
        "evaluation": "coordinator",
        "simulation": {"batching": "off", "workers": 0},
    }
    return fed.Experiment(**{**keys, **changed})


def federation_of(given: fed.Experiment) -> Any:
    simulation = Simulation(given)
    return simulation.federation(InProcess(partial(Work, simulation.recipe), [torch.device("cpu")]))


def settings_of(given: fed.Experiment) -> FollowTheLeaderPrivacy:
    return cast(FollowTheLeaderPrivacy, privacy_of(Simulation(given).experiment))


@pytest.mark.parametrize("mechanism", [BANDED, BLT], ids=["banded", "blt"])
def test_the_model_carries_the_noise_of_the_closed_form(mechanism: dict[str, Any]) -> None:
    """In each round, with nobody replying, so that the model is what noise has made of it."""
    given = experiment(
        privacy={**PRIVACY, "mechanism": mechanism},
        model={"kind": "mlp", "hidden": [64]},
        devices={"kind": "uniform", "failure": 0.9999},
    )
    errors_T = settings_of(given).matrix(6).errors(6)
    federation = federation_of(given)
    first_P = federation.coordinator._state.model_P.clone()
    for number in range(1, 7):
        federation.round(number)
        noise_P = (federation.coordinator._state.model_P - first_P) * 3  # over the cohort, though nobody replies
        hold_to_normal(noise_P, 2.0 * 0.3 * errors_T[number - 1])


def test_noise_of_each_round_lies_on_the_grid() -> None:
    federation = federation_of(experiment())
    noisy = federation.coordinator._noisy_sum
    for number in range(1, 7):
        units_M = noisy(torch.zeros(50, dtype=torch.float64), 0, 1.0, number) / grid_step(0.3)
        assert torch.equal(units_M, units_M.round())
        assert units_M.abs().max() > 2.0**20


def test_clients_are_clipped_and_their_sum_is_over_the_cohort() -> None:
    privacy = {**PRIVACY, "clip": 0.05, "noise_multiplier": 1e-6}
    local = {"lr": 0.5, "batch_size": 16, "steps": 4}
    quiet = experiment(privacy=privacy, rounds={"count": 1, "cohort": 3}, local=local)
    central = quiet.override({"privacy": {"kind": "central", "clip": 0.05, "noise_multiplier": 1e-6}})
    unclipped = quiet.override({"privacy.clip": 10.0})
    ours, theirs, longer = (
        torch.nn.utils.parameters_to_vector(simulate(one).model.parameters()) for one in (quiet, central, unclipped)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (ours - longer).norm() > 0.01


@pytest.mark.parametrize("mechanism", [BANDED, BLT], ids=["banded", "blt"])
@pytest.mark.parametrize("changed", [{}, {"rounds.sampling": "poisson"}], ids=["uniform", "poisson"])
def test_rounds_cost_the_sensitivity_of_all_before(mechanism: dict[str, Any], changed: dict[str, Any]) -> None:
    """No amplification is claimed, whatever draws cohorts."""
    given = experiment(privacy={**PRIVACY, "mechanism": mechanism}).override(changed)
    settings = settings_of(given)
    assert settings.amplified(given.rounds.make(), 12) == 1.0
    sensitivities_T = settings.matrix(6).sensitivities(settings.participation_rule(6))
    expected = [epsilon({Release(noise_multiplier=2.0 / s): 1}, 1e-5) for s in sensitivities_T]
    assert [line["epsilon"] for line in simulate(given).metrics] == pytest.approx(expected, rel=3e-3)


def test_the_noise_found_spends_the_epsilon() -> None:
    given = experiment(privacy={"kind": "dp_ftrl", "clip": 0.3, "epsilon": 4.0, "mechanism": BANDED})
    run = simulate(given)
    assert 4.0 * 0.998 <= run.metrics[-1]["epsilon"] <= 4.0 * 1.001


def test_a_run_ends_before_it_passes_its_budget() -> None:
    whole = [line["epsilon"] for line in simulate(experiment()).metrics]
    budget = (whole[4] + whole[3]) / 2
    run = simulate(experiment(privacy={**PRIVACY, "budget_epsilon": budget}))
    assert len(run.metrics) == 4
    assert "round 5 would pass privacy.budget_epsilon" in run.summary["reason"]


@pytest.mark.parametrize("sampling", [SameClients(), FirstClients(), "uniform", "poisson", "round_robin"], ids=str)
@pytest.mark.parametrize(("separation", "times"), [(4, None), (2, 2)])
def test_no_client_is_asked_against_the_rule(sampling: Any, separation: int, times: int | None) -> None:
    asked = Asked()
    privacy = {**PRIVACY, "min_separation": separation, "max_participations": times}
    given = experiment(rounds={"count": 8, "cohort": 3, "sampling": sampling}, privacy=privacy)
    simulate(given, observers=[asked])
    assert asked.rounds
    for rounds in asked.rounds.values():
        assert np.diff(rounds).min(initial=separation) >= separation
        assert len(rounds) <= (times or 2)


def test_rounds_ask_whom_they_may_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """Over the expected cohort, that the divisor tells nobody how many were asked."""
    with caplog.at_level(logging.WARNING):
        run = simulate(experiment(rounds={"count": 5, "cohort": 3, "sampling": SameClients()}))
    assert [line["selected"] for line in run.metrics] == [3, 0, 0, 0, 3]
    given = experiment(rounds={"count": 4, "cohort": 3}, devices={"kind": "uniform"})
    federation = federation_of(given)
    federation.coordinator.participations.note(range(10), 1)
    with caplog.at_level(logging.WARNING):
        assert federation.round(1).selected == 2
    assert "round 1 asks 2 of the 3 clients that it wants, for no other may take part" in caplog.text


def test_backups_and_top_ups_keep_to_the_rule() -> None:
    """Which privacy refuses today: they draw once more in the same round."""
    federation = federation_of(experiment(rounds={"count": 6, "cohort": 3, "sampling": FirstClients()}))
    coordinator = federation.coordinator
    coordinator.participations.note([0, 1, 2], 1)
    assert federation.policy.draw(coordinator, 1, 3, again=3) == [3, 4, 5]
    assert federation.policy.draw(coordinator, 4, 3) == [3, 4, 5]
    assert federation.policy.draw(coordinator, 5, 3) == [0, 1, 2]


def test_tasks_against_the_rule_are_not_sent() -> None:
    coordinator = federation_of(experiment()).coordinator
    accumulator = coordinator.new_accumulator()
    coordinator.participations.note([5], 1)
    with pytest.raises(RunFailed, match="round 3 would ask client 5 against"):
        coordinator.dispatch(accumulator, 3, [5])


@pytest.mark.parametrize("mechanism", [BANDED, BLT], ids=["banded", "blt"])
def test_a_resumed_run_has_the_bits_and_the_rule(mechanism: dict[str, Any], tmp_path: Path) -> None:
    """The sampling asks the first that may be asked: without the record it would ask the same again."""
    given = experiment(
        privacy={**PRIVACY, "mechanism": mechanism},
        rounds={"count": 6, "cohort": 3, "sampling": {"kind": "python:tests.simulations.test_dp_ftrl:FirstClients"}},
        checkpoints={"every": 2},
    )
    whole, resumed = Asked(), Asked()
    expected = parts.outcome(simulate(given, observers=[whole]))
    with pytest.raises(KeyboardInterrupt):
        simulate(given, output=tmp_path, observers=[Essential(parts.Watcher(interrupt))])
    run = simulate(given, output=tmp_path, resume=True, observers=[resumed])
    assert parts.outcome(run) == expected
    assert resumed.rounds == {
        client: [number for number in rounds if number > 2] for client, rounds in whole.rounds.items() if rounds[-1] > 2
    }


def interrupt(number: int) -> None:
    """Interrupt the third round."""
    if number == 3:
        raise KeyboardInterrupt


def noisy_sum(mechanism: dict[str, Any] = BANDED, rounds: int = 6) -> CorrelatedSum:
    given = experiment(privacy={**PRIVACY, "mechanism": mechanism, "min_separation": 3})
    settings = cast(FollowTheLeaderPrivacy, privacy_of(given))
    return settings.noisy_sum(SeededNoise(Streams(0), ""), rounds)


def test_noise_is_drawn_once_a_round() -> None:
    noisy = noisy_sum()
    noisy.noise_units(5, 1)
    for number in (1, 3):
        with pytest.raises(RunFailed, match=f"got round {number} after round 1"):
            noisy.noise_units(5, number)
    short = noisy_sum(rounds=1)
    short.noise_units(5, 1)
    with pytest.raises(RunFailed, match="for each of its 1 rounds"):
        short.noise_units(5, 2)


@pytest.mark.parametrize("mechanism", [BANDED, BLT, {"kind": "banded", "bands": 1}], ids=["banded", "blt", "one band"])
def test_another_attempt_of_a_round_follows_the_rounds_before(mechanism: dict[str, Any]) -> None:
    first, second = noisy_sum(mechanism), noisy_sum(mechanism)
    for number in (1, 2, 3):
        first.noise_units(5, number)
        second.noise_units(5, number)
        again = first.noise_units(5, number, 1)
        assert not torch.equal(again, first.noise_units(5, number, 2))
        assert torch.equal(again, first.noise_units(5, number, 1))
        second.noise_units(5, number, 1)
    assert torch.equal(first.noise_units(5, 4), second.noise_units(5, 4))


def test_rounds_done_again_cost_what_any_pattern_moves() -> None:
    settings = settings_of(experiment())
    account = PrivacyAccount(settings, Ledger.in_memory("a run", repeats_noise=False), rounds=6)
    rule = settings.participation_rule(6)
    cost = 0.0
    for number, is_repeated in ((1, False), (2, False), (2, True), (3, False)):
        account.begin(number, [0], sampling=1.0, expected=3.0)
        release = settings.matrix(6).release(2.0, rule, number, is_repeated=is_repeated)
        cost += 0.0 if release is None else release.noise_multiplier**-2
    assert account.epsilon() == pytest.approx(epsilon({Release(noise_multiplier=cost**-0.5): 1}, 1e-5), rel=1e-6)


def test_noise_of_another_mechanism_is_not_continued() -> None:
    noisy = noisy_sum()
    noisy.noise_units(5, 1)
    state = noisy.state()
    same = noisy_sum()
    same.restore(state)
    assert torch.equal(same.noise_units(5, 2), noisy.noise_units(5, 2))
    with pytest.raises(InvalidCheckpoint, match="correlated by another mechanism"):
        noisy_sum(BLT).restore(state)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"privacy": {**PRIVACY, "min_separation": 5}}, "of 5 rounds needs 15 clients, .* got 12"),
        (
            {"privacy": {**PRIVACY, "max_participations": 1}},
            "allows 12 participations of 12 clients, got 6 rounds of 3",
        ),
        ({"rounds": {"kind": "buffered", "count": 6}}, "needs rounds that wait for a cohort"),
        ({"rounds": {"kind": "asynchronous", "count": 6}}, "needs rounds that wait for a cohort"),
        ({"rounds": {"count": 6, "cohort": 3, "over_selection": 1.5}}, "count all whom they ask"),
        ({"rounds": {"count": 6, "cohort": 3, "quorum": 0.5}}, "needs rounds that ask their clients once"),
        ({"rounds": {"count": 6, "cohort": 3, "backup_after_s": 5.0}}, "needs rounds that ask their clients once"),
        ({"uplink": ["int8"]}, "privacy dp_ftrl needs messages that arrive as they were clipped"),
        ({"privacy": {**PRIVACY, "unit": "sample"}}, "got kind dp_ftrl: write kind: local"),
    ],
)
def test_plans_that_cannot_work_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        Simulation(experiment(**changed))


def test_the_widest_separation_is_found_and_shown() -> None:
    assert Simulation(experiment()).experiment.dump()["privacy"]["min_separation"] == 4


SECURE = {"minimum_cohort": 3, "max_drop_out": 0.0, "corrupt": 0.0}


@pytest.mark.parametrize("mode", ["emulated", "real"])
@pytest.mark.parametrize("mechanism", [BANDED, BLT], ids=["banded", "blt"])
def test_a_masked_sum_gets_the_correlated_noise_once(mode: str, mechanism: dict[str, Any]) -> None:
    """And is the sum that is not masked, but for whole units of each client's message."""
    rounds = {"count": 3, "cohort": 4}
    masked = experiment(
        privacy={**PRIVACY, "mechanism": mechanism},
        model={"kind": "mlp", "hidden": [64]},
        rounds=rounds,
        secure_aggregation={**SECURE, "mode": mode},
    )
    errors_T = settings_of(masked).matrix(3).errors(3)
    quiet = masked.override({"privacy.noise_multiplier": 1e-6})
    loud_P, quiet_P, open_P = (
        model_of(one).double() for one in (masked, quiet, quiet.override({"secure_aggregation": None}))
    )
    hold_to_normal((loud_P - quiet_P) * 4 / 0.3, 2.0 * errors_T[2])
    torch.testing.assert_close(quiet_P, open_P, atol=3 * 4 * 0.3 / 2**16, rtol=0)


def model_of(given: fed.Experiment) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(simulate(given).model.parameters()).detach()


@pytest.mark.parametrize("mode", ["emulated", "real"])
def test_masked_rounds_keep_to_the_rule_and_cost_the_same(mode: str) -> None:
    asked = Asked()
    given = experiment(rounds={"count": 6, "cohort": 4}, devices={"kind": "uniform", "failure": 0.2})
    masked = given.override({"secure_aggregation": {**SECURE, "max_drop_out": 0.25, "mode": mode}})
    run = simulate(masked, observers=[asked])
    for rounds in asked.rounds.values():
        assert np.diff(rounds).min(initial=3) >= 3
    assert sum(map(len, asked.rounds.values())) == 6 * 4
    assert [line["epsilon"] for line in run.metrics] == [line["epsilon"] for line in simulate(given).metrics]
