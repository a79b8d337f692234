"""Differential privacy of clients, simulated and on nodes: what is released is the clipped sum with noise."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fed
from fed.aggregators.base import Reduced
from fed.aggregators.fedavg import FedAvg
from fed.cli.main import main
from fed.clients.data import load
from fed.clients.node.plans import part_of_nodes
from fed.clients.setup import Preparation
from fed.clients.training.executor import InProcess
from fed.clients.training.work_items import TrainedClients
from fed.clients.training.worker import Work
from fed.clients.way_out import WayOut
from fed.errors import InvalidExperiment
from fed.privacy.accounting import epsilon
from fed.privacy.clipping import clipped
from fed.privacy.kinds import privacy_of
from fed.privacy.ledger import Ledger
from fed.privacy.noise import SeededNoise, SystemNoise
from fed.privacy.releases import Release
from fed.protocol.protocol_pb2 import Answer
from fed.quantities import epsilon_text
from fed.secure_aggregation.settings import SecureAggregation
from fed.server.grpc import deployment
from fed.server.grpc.deploy import serve
from fed.server.observer import Essential
from fed.server.rounds.synchronous import Rounds
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from fed.wire.messages import Task
from tests.fed.privacy.test_noise import hold_to_normal
from tests.server.flower.test_app import assert_same
from tests.server.grpc.threaded import ThreadedNode, nodes_of
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

CENTRAL = {"kind": "central", "clip": 0.3, "noise_multiplier": 1.0}
LOCAL = {"kind": "local", "clip": 0.3, "noise_multiplier": 1.0}
DISTRIBUTED = {"kind": "distributed", "clip": 0.3, "noise_multiplier": 1.0}
HUSHED = 1e-6
"""A noise multiplier of which nothing is seen, so that what is released is the sum."""


def experiment(**changed: Any) -> fed.Experiment:
    """Six clients with unequal parts of the digits."""
    keys: dict[str, Any] = {
        "data": {"kind": "digits", "clients": 6, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"kind": "mlp", "hidden": [8]},
        "local": {"lr": 0.1, "batch_size": 16},
        "rounds": {"count": 2},
        "privacy": CENTRAL,
        "evaluation": "coordinator",
        "simulation": {"batching": "off", "workers": 0},
    }
    return fed.Experiment(**{**keys, **changed})


def moved(given: fed.Experiment, **parts_given: Any) -> Tensor:
    """Movement of the model, in float64."""
    simulation = Simulation(given, **parts_given)
    first_V, _ = simulation.layout.pack(simulation.recipe.module)
    last_V, _ = simulation.layout.pack(simulate(given, **parts_given).model)
    return last_V.double() - first_V.double()


def of_one_client(given: fed.Experiment, client: int) -> Tensor:
    """Update of a client in the first round without privacy."""
    assert given.data is not None
    data = load(given.data, given.data_streams)
    return moved(given.override({"privacy": None, "data": None, "rounds.count": 1}), data=data.only(client, client))


@pytest.mark.parametrize("kind", ["central", "local"])
@pytest.mark.parametrize("batching", ["off", "on"])
def test_the_model_moves_by_the_mean_of_clipped_updates(kind: str, batching: str) -> None:
    """Each client weighs 1, whatever its samples are, and none counts with more than the clip."""
    privacy = {"kind": kind, "clip": 0.5, "noise_multiplier": HUSHED}
    given = experiment(privacy=privacy, rounds={"count": 1}, simulation={"batching": batching, "group": 4})
    rows = torch.stack([of_one_client(experiment(), client) for client in range(6)])
    assert 0 < (rows.norm(dim=1) > 0.5).sum() <= 6
    expected_M = clipped(rows, 0.5).mean(0)
    torch.testing.assert_close(moved(given), expected_M, atol=2e-5, rtol=0)


def released(given: fed.Experiment) -> Tensor:
    """What noise has added to the sum of the first round, in units of the clip."""
    settings = privacy_of(given)
    assert settings is not None
    quiet = given.override({"privacy.noise_multiplier": 0.01 * settings.multiplier})
    difference_M: Tensor = (moved(given) - moved(quiet)) / settings.sent_clip
    return difference_M


@pytest.mark.parametrize(
    ("changed", "divisor", "deviation"),
    [
        ({}, 6, 2.0),
        ({"rounds": {"count": 1, "cohort": 4}}, 4, 2.0),
        ({"rounds": {"count": 1, "cohort": 4, "sampling": "poisson"}}, 4, 2.0),
        ({"devices": {"kind": "uniform", "failure": 0.5}}, 6, 2.0),
        ({"devices": {"kind": "uniform", "failure": 0.999}}, 6, 2.0),
        ({"simulation": {"batching": "on", "group": 4}}, 6, 2.0),
        pytest.param({"simulation": {"workers": 2}}, 6, 2.0, marks=pytest.mark.processes),
        ({"algorithm": "fedavgm"}, 6, 2.0),
        ({"hierarchy": {"kind": "edges", "fan_out": 2}}, 6, 2.0),
        ({"privacy": {**LOCAL, "noise_multiplier": 2.0}}, 6, 2.0 * math.sqrt(6)),
        pytest.param(
            {"privacy": {**LOCAL, "noise_multiplier": 2.0}, "simulation": {"workers": 2}},
            6,
            2.0 * math.sqrt(6),
            marks=pytest.mark.processes,
        ),
    ],
    ids=["all", "cohort", "poisson", "half fail", "nobody", "groups", "workers", "momentum", "edges", "local", "both"],
)
def test_what_is_released_has_the_noise_it_claims(changed: dict[str, Any], divisor: int, deviation: float) -> None:
    """Over the expected cohort, whoever replies."""
    privacy = {**CENTRAL, "noise_multiplier": 2.0}
    keys = {"rounds": {"count": 1}, "model": {"kind": "mlp", "hidden": [64]}, "privacy": privacy, **changed}
    # The model is of float32, whose rounding is far below the noise.
    hold_to_normal(released(experiment(**keys)) * divisor, deviation)


@pytest.mark.parametrize("mode", ["emulated", "real"])
@pytest.mark.parametrize("uplink", [[], ["rotation"]], ids=["plain", "rotated"])
def test_clients_together_add_the_noise_that_is_claimed(mode: str, uplink: list[str]) -> None:
    """Of six, one may collude; with the fewest survivors the other four of five add all of it."""
    given = experiment(
        privacy={**DISTRIBUTED, "noise_multiplier": 2.0},
        model={"kind": "mlp", "hidden": [64]},
        rounds={"count": 1},
        secure_aggregation={"mode": mode},
        uplink=uplink,
    )
    hold_to_normal(released(given) * 6, 2.0 * math.sqrt(6 / 4))


def test_those_that_are_left_add_enough_noise() -> None:
    given = experiment(
        data={"kind": "digits", "clients": 20},
        privacy={**DISTRIBUTED, "noise_multiplier": 2.0},
        model={"kind": "mlp", "hidden": [64]},
        rounds={"count": 1},
        devices={"kind": "uniform", "failure": 0.2},
        secure_aggregation={"max_drop_out": 0.3},
    )
    survivors = simulate(given).metrics[0]["replied"]
    assert survivors < 20
    deviation = 2.0 * math.sqrt(survivors / SecureAggregation(max_drop_out=0.3).least_honest())
    assert deviation > 2.0
    hold_to_normal(released(given) * survivors, deviation)


@pytest.mark.parametrize("mode", ["emulated", "real"])
def test_a_coordinator_adds_noise_to_a_masked_sum(mode: str) -> None:
    given = experiment(
        privacy={**CENTRAL, "noise_multiplier": 2.0},
        model={"kind": "mlp", "hidden": [64]},
        rounds={"count": 1},
        secure_aggregation={"mode": mode},
    )
    hold_to_normal(released(given) * 6, 2.0)
    quiet = given.override({"privacy.noise_multiplier": HUSHED, "model.hidden": [8], "privacy.clip": 0.5})
    rows = torch.stack([of_one_client(experiment(), client) for client in range(6)])
    torch.testing.assert_close(moved(quiet), clipped(rows, 0.5).mean(0), atol=2e-5, rtol=0)


def test_apps_are_private_too() -> None:
    """They score nothing then, since noise does not cover their scores."""
    app = {"kind": None, "clients": 4}
    given = fed.Experiment(app=app, rounds={"count": 2}, privacy={**CENTRAL, "noise_multiplier": HUSHED})
    run = simulate(given, app=Steady)
    assert [line["train_loss"] for line in run.metrics] == [None, None]
    (moved_N,) = run.model.state_dict().values()
    assert moved_N.norm() == pytest.approx(2 * 0.3, rel=1e-4)


def test_each_message_counts_alike_however_many_were_drawn() -> None:
    """All point one way, and are as long as the clip: in a cohort of one, none may count for those that are missing."""
    rounds = {"count": 6, "cohort": 2, "sampling": "poisson"}
    app = {"kind": None, "clients": 4}
    run = simulate(fed.Experiment(app=app, rounds=rounds, privacy={**CENTRAL, "noise_multiplier": HUSHED}), app=Steady)
    replied = [line["replied"] for line in run.metrics]
    assert len({*replied}) > 1
    (moved_N,) = run.model.state_dict().values()
    assert moved_N.norm() == pytest.approx(sum(replied) / 2 * 0.3, rel=1e-4)


class Steady:
    """A client whose update is far beyond the clip."""

    def __init__(self, client: int) -> None:
        self.client = client

    def initial(self) -> list[Any]:
        return [np.zeros(3, np.float32)]

    def fit(self, arrays: list[Any], config: Any) -> Any:
        return [array + 100.0 for array in arrays], 5 + self.client, {"train_loss": 1.0}


def test_protocol_and_arithmetic_have_the_same_noise() -> None:
    given = experiment(privacy=DISTRIBUTED, secure_aggregation={})
    one, two = (simulate(given.override({"secure_aggregation.mode": mode})).metrics for mode in ("emulated", "real"))
    assert [line["test_loss"] for line in one] == [line["test_loss"] for line in two]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_the_sum_of_private_lanes_is_the_clipped_mean(bits: int) -> None:
    given = experiment(
        privacy={"kind": "distributed", "clip": 0.5, "noise_multiplier": 1e-5},
        rounds={"count": 1},
        secure_aggregation={"bits": bits},
    )
    rows = torch.stack([of_one_client(experiment(), client) for client in range(6)])
    units = min(2.0**16, (2 ** (bits - 1) - 1) // 6)
    torch.testing.assert_close(moved(given), clipped(rows, 0.5).mean(0), atol=1.1 * 0.5 / units + 1e-6, rtol=0)


ADAPTIVE = {"kind": "central", "clip": "adaptive", "noise_multiplier": 0.1, "first_clip": 0.3}
ADAPTIVE_KINDS: dict[str, dict[str, Any]] = {
    "central": {"privacy": ADAPTIVE},
    "masked": {"privacy": ADAPTIVE, "secure_aggregation": {}},
    "distributed": {"privacy": {**ADAPTIVE, "kind": "distributed"}, "secure_aggregation": {}},
    "rotated": {"privacy": {**ADAPTIVE, "kind": "distributed"}, "secure_aggregation": {}, "uplink": ["rotation"]},
    "local": {"privacy": {**ADAPTIVE, "kind": "local"}},
    "coded": {"privacy": {**ADAPTIVE, "kind": "local"}, "uplink": ["int8"]},
}
of_each_kind = pytest.mark.parametrize("kind", ADAPTIVE_KINDS)


def adaptive(kind: str, **changed: Any) -> fed.Experiment:
    """The experiment with a clip that moves, and other keys of privacy."""
    rest: dict[str, Any] = {
        key: changed.pop(key) for key in ("rounds", "local", "simulation", "checkpoints") if key in changed
    }
    keys: dict[str, Any] = ADAPTIVE_KINDS[kind]
    return experiment(**{**keys, **rest, "privacy": {**keys["privacy"], **changed}})


def norms_of(given: fed.Experiment) -> list[float]:
    return [float(of_one_client(given, client).norm()) for client in range(6)]


@pytest.mark.parametrize(
    ("first_clip", "kind", "batching"),
    thinned(itertools.product([1e-3, 0.4, 100.0], ADAPTIVE_KINDS, ["off", "on"]), quick=9),
)
def test_an_adaptive_clip_moves_by_the_share_it_leaves(first_clip: float, kind: str, batching: str) -> None:
    """Next to no noise is on the share."""
    given = adaptive(
        kind,
        first_clip=first_clip,
        noise_multiplier=1e-4,
        rounds={"count": 1},
        simulation={"batching": batching, "group": 4, "workers": 0},
    )
    share = sum(norm <= first_clip for norm in norms_of(experiment())) / 6
    found = simulate(given).metrics[0]["clip"]
    assert math.log(found / first_clip) == pytest.approx(-0.2 * (share - 0.5), abs=0.2 * 0.05)


@of_each_kind
def test_an_adaptive_clip_bounds_the_sum(kind: str) -> None:
    """But for the noise, for a unit of the lanes, and for the codec."""
    given = adaptive(kind, noise_multiplier=HUSHED, first_clip=0.5, rounds={"count": 1})
    rows = torch.stack([of_one_client(experiment(), client) for client in range(6)])
    step = 0.5 / 127 if kind == "coded" else 2 * 0.5 * 2**-16
    torch.testing.assert_close(moved(given), clipped(rows, 0.5).mean(0), atol=step, rtol=0)


@pytest.mark.parametrize("kind", ["masked", "distributed"])
def test_masks_change_nothing_of_an_adaptive_clip(kind: str) -> None:
    """The protocol gives the bits of the arithmetic alone."""
    given = adaptive(kind)
    one, two = (simulate(given.override({"secure_aggregation.mode": mode})).metrics for mode in ("emulated", "real"))
    for key in ("test_loss", "clip"):
        assert [line[key] for line in one] == [line[key] for line in two]


@of_each_kind
def test_an_adaptive_clip_costs_what_z_says(kind: str) -> None:
    given = adaptive(kind, noise_multiplier=0.5, rounds={"count": 2})
    of_kind = {"local": 0.25, "coded": 0.25}
    release = Release(noise_multiplier=of_kind.get(kind, 0.5))
    if kind in ("distributed", "rotated"):
        message = Simulation(given).message
        assert message is not None
        fixed = message.fixed
        assert fixed is not None
        assert fixed.l2_units == 2.0**16
        release = replace(release, skellam_l2=fixed.l2_units, skellam_l1=2.0**16 * math.sqrt(fixed.numbers))
    assert costs(given)[-1] == pytest.approx(epsilon({release: 2}, 1e-5), rel=3e-3)


@of_each_kind
def test_noise_grows_with_an_adaptive_clip(kind: str) -> None:
    """z S C: the bit's weight is 2 here, so that S is the root of 2."""
    given = adaptive(kind, noise_multiplier=0.6, bit_weight=2.0, first_clip=0.5, rounds={"count": 1}).override(
        {"model.hidden": [64]}
    )
    noises = {"local": 6.0, "coded": 6.0, "distributed": 6 / 4, "rotated": 6 / 4}
    deviation = 0.6 * math.sqrt(2 * noises.get(kind, 1.0))
    quiet = given.override({"privacy.noise_multiplier": 0.006})
    difference_M = (moved(given) - moved(quiet)) / 0.5 * 6
    assert float(difference_M.square().mean().sqrt()) == pytest.approx(deviation, rel=0.05)


def test_the_second_round_has_the_clip_of_the_first() -> None:
    """Deep below all norms: each round's sum is of unit vectors times its clip."""
    given = experiment(privacy={**ADAPTIVE, "noise_multiplier": HUSHED, "first_clip": 1e-6}, local={"lr": 1e-4})
    one = moved(given.override({"rounds.count": 1})).norm()
    two = moved(given).norm()
    clip = simulate(given).metrics[0]["clip"]
    assert two / one == pytest.approx(1 + clip / 1e-6, rel=0.02)


@pytest.mark.parametrize("kind", ["central", "masked", "distributed", "local"])
def test_a_resumed_run_has_the_clip(kind: str, tmp_path: Path) -> None:
    given = adaptive(kind, rounds={"count": 4}, checkpoints={"every": 2})
    whole = simulate(given)
    with pytest.raises(KeyboardInterrupt):
        simulate(given, output=tmp_path, observers=[Essential(parts.Watcher(interrupt))])
    assert parts.outcome(simulate(given, output=tmp_path, resume=True)) == parts.outcome(whole)


def test_rounds_without_replies_move_the_model_by_noise_alone() -> None:
    given = experiment(devices={"kind": "uniform", "failure": 0.999}, rounds={"count": 3})
    run = simulate(given)
    assert [line["replied"] for line in run.metrics] == [0, 0, 0]
    hold_to_normal(moved(given) * 6 / 0.3, math.sqrt(3))


@pytest.mark.processes
@pytest.mark.parametrize("privacy", [CENTRAL, LOCAL], ids=["central", "local"])
def test_workers_have_the_bits_of_one_process(privacy: dict[str, Any]) -> None:
    given = experiment(privacy=privacy, simulation={"batching": "on", "group": 2, "workers": 0})
    in_workers = given.override({"simulation.workers": 2})
    assert parts.outcome(simulate(given)) == parts.outcome(simulate(in_workers))


@pytest.mark.parametrize("privacy", [CENTRAL, LOCAL], ids=["central", "local"])
@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_a_resumed_run_has_the_bits_and_the_cost(privacy: dict[str, Any], sampling: str, tmp_path: Path) -> None:
    rounds = {"count": 4, "cohort": 3, "sampling": sampling}
    given = experiment(privacy=privacy, rounds=rounds, checkpoints={"every": 2})
    whole = simulate(given)
    with pytest.raises(KeyboardInterrupt):
        simulate(given, output=tmp_path, observers=[Essential(parts.Watcher(interrupt))])
    assert parts.outcome(simulate(given, output=tmp_path, resume=True)) == parts.outcome(whole)


def interrupt(number: int) -> None:
    """Interrupt the third round."""
    if number == 3:
        raise KeyboardInterrupt


def costs(given: fed.Experiment) -> list[float]:
    return [line["epsilon"] for line in simulate(given).metrics]


@pytest.mark.parametrize(
    ("changed", "release", "counts"),
    [
        ({}, Release(noise_multiplier=1.0), [1, 2, 3]),
        ({"rounds.cohort": 3, "rounds.sampling": "poisson"}, Release(noise_multiplier=1.0, sampling=0.5), [1, 2, 3]),
        ({"rounds.cohort": 2, "rounds.sampling": "round_robin"}, Release(noise_multiplier=1.0), [1, 1, 1]),
        ({"privacy": LOCAL}, Release(noise_multiplier=0.5), [1, 2, 3]),
        (
            {"privacy": DISTRIBUTED, "secure_aggregation": {}},
            Release(noise_multiplier=1.0, skellam_l2=2.0**16, skellam_l1=2.0**16 * math.sqrt(610)),
            [1, 2, 3],
        ),
        ({"privacy": LOCAL, "devices.failure": 0.999}, Release(noise_multiplier=0.5), [1, 2, 3]),
    ],
    ids=["all", "poisson", "in turn", "local", "distributed", "asked in vain"],
)
def test_each_round_says_what_was_spent(changed: dict[str, Any], release: Release, counts: list[int]) -> None:
    found = costs(experiment(rounds={"count": 3}).override(changed))
    assert found == pytest.approx([epsilon({release: count}, 1e-5) for count in counts], rel=3e-3)


def test_summary_has_the_computed_epsilon_and_its_releases() -> None:
    rounds = {"count": 6, "cohort": 2, "sampling": "poisson"}
    summary = simulate(experiment(rounds=rounds, privacy={**CENTRAL, "delta": 1e-6})).summary
    release = Release(noise_multiplier=1.0, sampling=2 / 6)
    assert summary["delta"] == 1e-6
    assert summary["epsilon"] == epsilon({release: 6}, 1e-6)
    assert summary["releases"] == [[release.keys(), 6]]
    assert not {"epsilon", "delta", "releases"} & simulate(experiment(privacy=None)).summary.keys()


def test_compare_says_what_private_runs_cost_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        simulate(experiment(seed=seed), output=tmp_path / f"runs/{seed}")
    assert main(["compare", "runs/0", "runs/1", "--output", "both"]) == 0
    union = epsilon({Release(noise_multiplier=1.0): 4}, 1e-5)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"Privacy: ε = {epsilon_text(union)} at δ = 1e-05 for those whose data are in all of the 2 private runs" in said
    )
    assert "all their releases as one" in said
    assert main(["runs", "runs"]) == 0
    assert "ε" in capsys.readouterr().out


def test_a_run_ends_before_it_passes_its_budget() -> None:
    budget = (epsilon({Release(noise_multiplier=1.0): 3}, 1e-5) + epsilon({Release(noise_multiplier=1.0): 4}, 1e-5)) / 2
    run = simulate(experiment(rounds={"count": 9}, privacy={**CENTRAL, "budget_epsilon": budget}))
    assert len(run.metrics) == 3
    assert run.metrics[-1]["epsilon"] <= budget
    assert run.summary["status"] == "finished"
    assert "round 4 would pass privacy.budget_epsilon" in run.summary["reason"]
    assert_no_later_round(run)


@pytest.mark.parametrize(
    ("privacy", "budgets"),
    [
        (CENTRAL, (9.0, 13.0)),
        (LOCAL, (25.0, None)),
        (
            {"kind": "dp_ftrl", "clip": 0.3, "noise_multiplier": 2.0, "min_separation": 1, "max_participations": 5},
            (4.0, 90.0),
        ),
    ],
    ids=["central", "local", "dp_ftrl"],
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_goes_on_with_a_larger_budget(
    privacy: dict[str, Any], budgets: tuple[float, float | None], resume: bool, tmp_path: Path
) -> None:
    """It has the bits and the ε of a run that had the larger one from the beginning, and each round counts once."""
    first, then = (
        experiment(rounds={"count": 5}, checkpoints={"every": 2}, privacy={**privacy, "budget_epsilon": budget})
        for budget in budgets
    )
    folder = tmp_path / "run"
    halted = simulate(first, output=folder)
    gone_on = simulate(then, output=folder if resume else tmp_path / "again", resume=resume)
    whole = simulate(then.override({"name": "whole"}))
    assert 0 < len(halted.metrics) < len(whole.metrics)
    assert halted.summary["epsilon"] < gone_on.summary["epsilon"] == whole.summary["epsilon"]
    assert gone_on.summary["releases"] == whole.summary["releases"]
    assert gone_on.directory is not None
    assert_same(gone_on.directory, whole)
    entries = Ledger.read(gone_on.directory / "ledger.jsonl").entries
    assert [entry.round for entry in entries] == [line["round"] for line in whole.metrics]
    if resume:
        kept = fed.Experiment.load(folder / "experiment.yaml")
        assert kept.dump()["privacy"]["budget_epsilon"] == budgets[1]


def test_a_smaller_budget_ends_a_run_at_once(tmp_path: Path) -> None:
    given = experiment(checkpoints={"every": 1}, privacy={**CENTRAL, "budget_epsilon": 9.0})
    begun = simulate(given, output=tmp_path / "run")
    ended = simulate(given.override({"privacy.budget_epsilon": 1.0}), output=tmp_path / "run", resume=True)
    assert ended.summary["epsilon"] == begun.summary["epsilon"] > 1
    assert len(ended.metrics) == len(begun.metrics)


def test_another_budget_for_samples_is_another_experiment(tmp_path: Path) -> None:
    """It decides which clients are asked, and so what is released."""
    keys = {**LOCAL, "unit": "sample", "noise_multiplier": 2.0, "budget_epsilon": 100.0}
    given = experiment(privacy=keys, checkpoints={"every": 1}, rounds={"count": 1})
    simulate(given, output=tmp_path / "run")
    larger = given.override({"privacy.budget_epsilon": 200.0})
    with pytest.raises(InvalidExperiment, match="budget_epsilon is 100"):
        simulate(larger, output=tmp_path / "run", resume=True)


def assert_no_later_round(run: fed.Run) -> None:
    """Fail if the model has moved after its last line."""
    shorter = simulate(run.experiment.override({"rounds.count": len(run.metrics)}))
    assert run.metrics[-1]["test_loss"] != shorter.metrics[0]["test_loss"]
    assert math.isfinite(run.metrics[-1]["test_loss"])


@pytest.mark.parametrize("kind", ["central", "local"])
@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_the_noise_found_spends_the_epsilon_of_the_run(kind: str, sampling: str) -> None:
    rounds = {"count": 7, "cohort": 3, "sampling": sampling}
    given = experiment(rounds=rounds, privacy={"kind": kind, "clip": 0.3, "epsilon": 3.0})
    resolved = Simulation(given).experiment
    assert resolved.privacy is not None
    settings = resolved.privacy.make()
    spent = epsilon(settings.plan(resolved.rounds.make(), 6).releases(), 1e-5)
    assert 3.0 * 0.999 <= spent <= 3.0


def test_neither_losses_nor_samples_are_told() -> None:
    run = simulate(experiment())
    assert all(line["train_loss"] is None for line in run.metrics)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"evaluation": "clients"}, "evaluation clients needs each client's loss"),
        ({"algorithm": "median"}, "needs each client's own message"),
        ({"algorithm": "sign_majority"}, "messages that arrive as they were clipped"),
        ({"algorithm": "dpsgd"}, "needs a coordinator that asks clients"),
        ({"algorithm": "centralized"}, "privacy needs clients that report"),
        ({"rounds": {"kind": "buffered", "count": 2}}, "needs rounds that wait for a cohort"),
        ({"rounds": {"kind": "asynchronous", "count": 2}}, "needs rounds that wait for a cohort"),
        ({"rounds": {"count": 2, "quorum": 0.5}}, "needs rounds that ask their clients once"),
        ({"rounds": {"count": 2, "cohort": 2, "over_selection": 1.5}}, "count all whom they ask"),
        ({"rounds": {"count": 2, "cohort": 2, "sampling": "weighted"}}, "neither losses nor numbers of samples"),
        ({"privacy": DISTRIBUTED}, "needs secure_aggregation"),
        (
            {
                "rounds": {"count": 2, "cohort": 5, "sampling": "poisson"},
                "data": {"kind": "digits", "clients": 12},
                "secure_aggregation": {},
            },
            "reveals none of few",
        ),
        ({"privacy": {**LOCAL, "unit": "sample"}, "secure_aggregation": {}}, "which secure_aggregation hides"),
        ({"privacy": {**LOCAL, "clip": "adaptive", "unit": "sample"}}, "the gradient of each sample is clipped"),
        ({"privacy": {**CENTRAL, "kind": "dp_ftrl", "clip": "adaptive"}}, "take back noise of earlier ones"),
        (
            {"privacy": {**LOCAL, "clip": "adaptive"}, "uplink": ["int8"], "error_feedback": "ef"},
            "errors of earlier rounds are in units of other clips",
        ),
        ({"privacy": {**LOCAL, "clip": "adaptive"}, "algorithm": "median"}, "each client's own message"),
        (
            {"privacy": DISTRIBUTED, "secure_aggregation": {}, "uplink": ["rotation"], "error_feedback": "ef"},
            "take the noise of one round back",
        ),
        ({"privacy": {**DISTRIBUTED, "unit": "sample"}, "secure_aggregation": {}}, "write kind: local"),
        ({"uplink": ["int8"]}, "needs messages that arrive as they were clipped"),
        ({"privacy": {"kind": "central"}}, "needs one of noise_multiplier and epsilon, got neither"),
        ({"privacy": {**CENTRAL, "epsilon": 1.0}}, "needs one of noise_multiplier and epsilon, got both"),
        ({"privacy": {**CENTRAL, "unit": "sample"}}, "write kind: local"),
    ],
)
def test_what_noise_does_not_cover_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        experiment(**changed)


def test_a_cohort_too_small_for_an_adaptive_clip_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"at most 0\.2, got 0\.236 with 6 clients a round"):
        Simulation(experiment(privacy={**ADAPTIVE, "noise_multiplier": 2.0}))


def test_buffers_are_refused() -> None:
    data = fed.FederatedData({number: parts.samples(9, number) for number in range(3)}, classes=3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(InvalidExperiment, match="does not cover a model's buffers"):
        simulate(experiment(data=None, model=None), data=data, model=model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["central", "dp_ftrl"])
def test_messages_of_16_bits_are_refused(dtype: torch.dtype, kind: str) -> None:
    """Rounding makes some of them longer than the clip."""
    given = experiment(data=None, model=None, privacy={**CENTRAL, "kind": kind}, rounds={"count": 1})
    with pytest.raises(InvalidExperiment, match=f"privacy {kind} needs a model of float32 or float64"):
        simulate(given, data=parts.unequal(dtype), model=torch.nn.Linear(4, 3).to(dtype))


def test_the_number_that_was_drawn_changes_nobodys_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step size that grows with the cohort grows with the expected one."""
    told: list[list[float | None]] = []
    dispatch = SimulatedFleet.dispatch

    def noted(self: SimulatedFleet, tasks: Sequence[Task]) -> None:
        told.append([task.lr for task in tasks])
        dispatch(self, tasks)

    monkeypatch.setattr(SimulatedFleet, "dispatch", noted)
    rounds = {"count": 8, "cohort": 3, "sampling": "poisson"}
    simulate(experiment(rounds=rounds, local={"lr": 0.01, "scaling": "linear"}))
    assert len({len(rates) for rates in told}) > 1
    assert {rate for rates in told for rate in rates} == {0.03}


def test_numbers_of_tasks_tell_nothing_of_the_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that compares its own would learn how many were asked, and two neighbours on the roster who was."""
    told: list[dict[tuple[int, int | str], int]] = []
    dispatch = SimulatedFleet.dispatch

    def noted(self: SimulatedFleet, tasks: Sequence[Task]) -> None:
        told[-1] |= {(task.round, task.client): task.id for task in tasks}
        dispatch(self, tasks)

    monkeypatch.setattr(SimulatedFleet, "dispatch", noted)
    rounds = {"count": 8, "cohort": 3, "sampling": "poisson"}
    for seed in (0, 1):
        told.append({})
        simulate(experiment(rounds=rounds, seed=seed, local={"steps": 1}))
    one, other = told
    assert one.keys() != other.keys()
    assert len(both := one.keys() & other.keys()) > 3
    assert {key: one[key] for key in both} == {key: other[key] for key in both}
    assert len({*one.values()}) == len(one)


def test_nodes_are_told_no_weight_of_a_fixed_clip() -> None:
    """Nodes of an older version do not know the weight of a bit."""
    assert "bit_weight" not in part_of_nodes(experiment())["privacy"]
    assert part_of_nodes(Simulation(adaptive("central")).experiment)["privacy"]["bit_weight"] > 0


@pytest.mark.parametrize("privacy", [CENTRAL, ADAPTIVE], ids=["fixed", "adaptive"])
def test_the_shortcut_of_a_group_is_the_long_way(privacy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rounding of messages to the type on the wire."""
    given = experiment(privacy=privacy, rounds={"count": 1}, simulation={"batching": "on", "group": 6})
    taken: list[TrainedClients] = []
    shortcut = WayOut._mean_of_clipped

    def noted(self: WayOut, trained: TrainedClients) -> tuple[Tensor, Tensor]:
        taken.append(trained)
        return shortcut(self, trained)

    monkeypatch.setattr(WayOut, "_mean_of_clipped", noted)
    short = moved(given)
    assert len(taken) == 1
    monkeypatch.setattr(WayOut, "_is_clipped_alone", False)
    long = moved(given)
    assert len(taken) == 1
    # A unit of the grid, or the rounding of the model.
    torch.testing.assert_close(short, long, rtol=0, atol=1e-7)


def test_a_client_that_diverges_is_no_end_of_the_run() -> None:
    """That the run goes on or not would tell something of one client."""
    torch.manual_seed(0)  # with other weights the huge samples may all be right, and their loss 0
    data = parts.unequal()
    bad = {**data.train, "c1": (torch.full((4, 4), 3e38), torch.zeros(4, dtype=torch.int64))}
    given = experiment(data=None, model=None, rounds={"count": 1}, local={"steps": 3})
    run = simulate(given, data=fed.FederatedData(bad, data.test, classes=3), model=torch.nn.Linear(4, 3))
    assert run.metrics[0]["failed"] == 1


def over_grpc(given: fed.Experiment, folder: Path) -> list[ThreadedNode]:
    assert given.data is not None
    data, nodes = load(given.data, Streams(given.seed)), list[ThreadedNode]()
    serve(
        given,
        listen="127.0.0.1:0",
        output=folder / "run",
        min_nodes=6,
        on_listen=lambda port: nodes.extend(nodes_of(data, port, folder)),
    )
    for node in nodes:
        node.end()
    return nodes


@pytest.mark.processes
@pytest.mark.parametrize(
    "privacy",
    [CENTRAL, ADAPTIVE, {**ADAPTIVE, "kind": "local", "noise_multiplier": 1e-12}],  # below a unit of the grid
    ids=["fixed", "adaptive", "local"],
)
def test_nodes_send_what_the_simulation_sends(
    privacy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the simulation's noise the bits are the same; and messages tell nothing beside."""
    given = Simulation(experiment(privacy=privacy)).experiment  # with all keys that follow from the clients
    monkeypatch.setattr(deployment, "SystemNoise", lambda: SeededNoise.of(Streams(given.seed), given.dump()))
    nodes = over_grpc(given, tmp_path)
    simulated = simulate(given)
    assert_same(tmp_path / "run", simulated)
    summary = fed.Run.load(tmp_path / "run").summary
    assert {key: summary[key] for key in ("epsilon", "delta")} == {
        "epsilon": simulated.summary["epsilon"],
        "delta": 1e-5,
    }
    for node in nodes:
        for answer, _ in node.training.answers:
            assert isinstance(answer, Answer)
            assert (answer.samples, answer.weight, answer.train_loss) == (1, 1.0, 0.0)


@pytest.mark.processes
def test_real_noise_is_repeated_by_nobody(tmp_path: Path) -> None:
    given = experiment(rounds={"count": 1})
    for name in ("a", "b"):
        over_grpc(given, tmp_path / name)
    one, two = (fed.Run.load(tmp_path / name / "run") for name in ("a", "b"))
    assert not torch.equal(*[torch.cat([part.flatten() for part in run.model.parameters()]) for run in (one, two)])


def test_cohorts_of_a_real_server_are_secret() -> None:
    given = experiment(rounds={"count": 2, "cohort": 3, "sampling": "poisson"})
    assert given.data is not None
    data = load(given.data, Streams(given.seed))
    real = [Preparation(given, data, noise=SystemNoise()).cohort_streams.seed for _ in range(2)]
    assert len({*real, given.seed}) == 3
    assert Preparation(given, data).cohort_streams.seed == given.seed


def test_plans_without_privacy_are_those_of_older_versions() -> None:
    assert "privacy" not in part_of_nodes(experiment(privacy=None))
    assert part_of_nodes(experiment())["privacy"]["clip"] == 0.3


@pytest.mark.parametrize("algorithm", thinned(["fedavg", "scaffold", "fedadam", "feddyn", "fednova"], quick=2))
@pytest.mark.parametrize("batching", ["off", "on"])
def test_no_client_changes_the_sum_by_more_than_the_clip(algorithm: str, batching: str) -> None:
    """Of whatever a client reports, before the noise, beside the same round without it."""
    given = experiment(
        data=None,
        model=None,
        algorithm=algorithm,
        rounds={"count": 1},
        privacy={"kind": "central", "clip": 0.2, "noise_multiplier": HUSHED},
        simulation={"batching": batching, "workers": 0},
    )
    data = parts.unequal()
    huge = {**data.train, "c3": (1e4 * data.train["c3"][0], data.train["c3"][1])}
    without = {name: pair for name, pair in data.train.items() if name != "c3"}
    whole_M, changed_M, without_M = (
        _sum(given, fed.FederatedData(train, data.test, classes=3)) for train in (data.train, huge, without)
    )
    assert (whole_M - without_M).norm() <= 0.2 * (1 + 1e-5)
    assert (changed_M - without_M).norm() <= 0.2 * (1 + 1e-5)
    assert (whole_M - without_M).norm() > 0.01


def _sum(given: fed.Experiment, data: fed.FederatedData) -> Tensor:
    """Sum of the first round's messages."""
    released_M: list[Tensor] = []
    simulation = Simulation(given, data, parts.small)
    federation: Any = simulation.federation(InProcess(partial(Work, simulation.recipe), [torch.device("cpu")]))
    noisy = federation.coordinator._way_in.noisy_sum

    def noted(mean_M: Tensor, clients: int, expected: float, number: int, attempt: int) -> Tensor:
        released_M.append(mean_M * clients)
        return mean_M

    federation.coordinator._way_in.noisy_sum = noted
    federation.round(1)
    assert noisy is not None
    return released_M[0]


@pytest.mark.parametrize(("sampling", "expected"), [("uniform", 1.0), ("round_robin", 1.0), ("poisson", 0.5)])
@pytest.mark.parametrize("privacy", [CENTRAL, LOCAL], ids=["central", "local"])
def test_amplification_is_claimed_under_poisson_sampling_alone(
    sampling: str, expected: float, privacy: dict[str, Any]
) -> None:
    given = experiment(privacy=privacy, rounds={"count": 2, "cohort": 3, "sampling": sampling})
    settings = privacy_of(given)
    assert settings is not None
    # A coordinator that is not trusted knows who takes part.
    claimed = expected if privacy is CENTRAL else 1.0
    plan = settings.plan(given.rounds.make(), 6)
    assert any("publishes neither its metrics" in said for said in plan.trust) is (claimed < 1)
    assert settings.amplified(given.rounds.make(), 6) == claimed
    assert settings.plan(given.rounds.make(), 6).sampling == claimed


def test_the_chance_is_the_one_that_was_drawn_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that registers in the middle of a draw lowers it for the rounds that follow."""
    draw = Rounds.draw

    def drawn(self: Rounds, coordinator: Any, *given: Any, **named: Any) -> list[int | str]:
        members = list(coordinator.fleet.registered())
        found = draw(self, coordinator, *given, **named)
        monkeypatch.setattr(coordinator.fleet, "registered", lambda: [*members, "late"])
        return found

    monkeypatch.setattr(Rounds, "draw", drawn)
    summary = simulate(experiment(rounds={"count": 1, "cohort": 3, "sampling": "poisson"})).summary
    assert summary["releases"] == [[Release(noise_multiplier=1.0, sampling=0.5).keys(), 1]]


def test_algorithms_are_not_told_how_many_replied(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    apply = FedAvg.apply

    def noted(self: FedAvg, state: Any, reduced: Reduced) -> Any:
        told.append(reduced.clients)
        return apply(self, state, reduced)

    monkeypatch.setattr(FedAvg, "apply", noted)
    run = simulate(experiment(devices={"kind": "uniform", "failure": 0.5}, rounds={"count": 3}))
    assert {line["replied"] for line in run.metrics} != {6}
    assert told == [6, 6, 6]
