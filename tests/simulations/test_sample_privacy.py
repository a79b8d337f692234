"""Differential privacy of clients' samples: DP-SGD in local steps, each client with an ε of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.clients.node import training
from fed.errors import BudgetSpent, InvalidExperiment, InvalidLedger
from fed.privacy.accounting import epsilon
from fed.privacy.entries import Cost
from fed.privacy.ledger import Ledger
from fed.privacy.local import LocalPrivacy
from fed.privacy.noise import SeededNoise
from fed.privacy.releases import Release
from fed.server.grpc import deployment
from fed.server.privacy_account import PrivacyAccount
from fed.server.sample_account import SampleAccount
from fed.simulations.simulate import simulate
from fed.vectors.randomness import Streams
from tests.server.flower.test_app import assert_same
from tests.simulations import users_parts as parts
from tests.simulations.test_privacy import experiment, over_grpc

pytestmark = pytest.mark.usefixtures("device")

PRIVACY = {"kind": "local", "unit": "sample", "clip": 0.5, "noise_multiplier": 1.0}


def data() -> fed.FederatedData:
    """Three clients of 20, 40 and 60 samples."""
    return fed.FederatedData({name: parts.samples(20 * size, size) for size, name in enumerate("abc", 1)})


def run(rounds: int | dict[str, Any] = 2, execution: dict[str, Any] | None = None, **privacy: Any) -> fed.Run:
    """A short run of them."""
    experiment = fed.Experiment(
        local={"lr": 0.1, "batch_size": 10, "epochs": 1},
        rounds={"count": rounds} if isinstance(rounds, int) else rounds,
        privacy={**PRIVACY, **privacy},
        evaluation="coordinator",
        simulation=execution or {"batching": "off", "workers": 0},
    )
    return simulate(experiment, data=data(), model=parts.small)


def cost(samples: int, rounds: int) -> float:
    """ε of a client after some rounds, by the releases of its steps."""
    release = Release(noise_multiplier=1.0, sampling=10 / samples)
    return epsilon({release: rounds * samples // 10}, 1e-5)


def test_epsilon_is_that_of_the_client_that_lost_most() -> None:
    found = run(rounds=3)
    most = max(cost(samples, 3) for samples in (20, 40, 60))
    assert found.metrics[-1]["epsilon"] == pytest.approx(most, rel=2e-3)
    assert found.summary["epsilon_by_client"] == {
        name: pytest.approx(cost(20 * size, 3), rel=2e-3) for size, name in enumerate("abc", 1)
    }
    assert [line["epsilon"] for line in found.metrics] == sorted(line["epsilon"] for line in found.metrics)


@pytest.mark.parametrize(
    ("execution", "tolerance"),
    [
        pytest.param({"batching": "on", "group": 3, "workers": 0}, 1e-6, id="groups"),
        pytest.param({"batching": "off", "workers": 1}, 0.0, id="workers", marks=pytest.mark.processes),
    ],
)
def test_clients_train_alike_in_groups_and_in_workers(execution: dict[str, Any], tolerance: float) -> None:
    """Noise and batches included: in workers to the bit, in groups but for rounding in float32."""
    alone, found = (
        torch.cat([part.flatten() for part in run(execution=one).model.state_dict().values()])
        for one in ({"batching": "off", "workers": 0}, execution)
    )
    torch.testing.assert_close(found, alone, rtol=0, atol=tolerance)


def test_clients_leave_and_the_run_ends_by_the_budget() -> None:
    """The client of 20 samples is done first, since each of its samples is in most batches."""
    budget = cost(20, 2) * 1.001
    found = run(rounds=30, budget_epsilon=budget)
    assert found.metrics[-1]["epsilon"] <= budget
    counts = [line["replied"] for line in found.metrics]
    assert counts[:2] == [3, 3]
    assert counts[2] == 2
    assert len(counts) < 30
    assert cost(60, len(counts) + 1) > budget


@pytest.mark.parametrize("rounds", [{"count": 2}, {"count": 4, "cohort": 2, "sampling": "round_robin"}])
def test_each_client_finds_noise_for_the_epsilon(rounds: dict[str, Any]) -> None:
    """In turn each of three clients is in two or three of four cohorts of two."""
    found = run(rounds=rounds, noise_multiplier=None, epsilon=4.0)
    spent = found.summary["epsilon_by_client"]
    assert set(spent) == {"a", "b", "c"}
    if "cohort" not in rounds:
        assert all(0.997 * 4 <= epsilon <= 4.0 for epsilon in spent.values())
    assert 0.997 * 4 <= max(spent.values()) <= 4.0


def test_no_client_is_asked_more_often_than_max_participations() -> None:
    found = run(rounds={"count": 6, "cohort": 2}, noise_multiplier=None, epsilon=4.0, max_participations=4)
    assert 0.997 * 4 <= max(found.summary["epsilon_by_client"].values()) <= 4.0
    with pytest.raises(InvalidExperiment, match="max_participations of 3 allows 9 participations of 3 clients"):
        run(rounds={"count": 6, "cohort": 2}, max_participations=3)


def test_losses_of_private_samples_are_not_told() -> None:
    assert all(line.get("train_loss") is None for line in run().metrics)


@pytest.mark.processes
@pytest.mark.parametrize("noise", [{"noise_multiplier": 1.0}, {"epsilon": 4.0}], ids=["noise", "epsilon"])
def test_nodes_train_as_the_simulation_does(
    noise: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the simulation's noise and batches the bits are the same; ε follows from the sizes that nodes have told."""
    privacy = {"kind": "local", "unit": "sample", "clip": 0.5, **noise}
    given = experiment(privacy=privacy, local={"lr": 0.1, "batch_size": 16})

    def seeded() -> SeededNoise:
        return SeededNoise.of(Streams(given.seed), given.dump())

    monkeypatch.setattr(deployment, "SystemNoise", seeded)
    monkeypatch.setattr(training, "SystemNoise", seeded)
    over_grpc(given, tmp_path)
    simulated = simulate(given)
    assert_same(tmp_path / "run", simulated)
    summary = fed.Run.load(tmp_path / "run").summary
    assert summary["epsilon"] == simulated.summary["epsilon"]
    assert sorted(summary["epsilon_by_client"].values()) == sorted(simulated.summary["epsilon_by_client"].values())


def test_plan_of_samples_has_no_cost_without_clients() -> None:
    with pytest.raises(InvalidExperiment, match="costs each client by its own number"):
        fed.Experiment(privacy=PRIVACY).privacy.make().plan(None, 3)  # type: ignore[union-attr]


def sample_account(ledger: Ledger, budget: float | None = None) -> SampleAccount:
    """Account of a run with clients of 40 samples."""
    settings = LocalPrivacy(unit="sample", clip=0.5, noise_multiplier=1.0, budget_epsilon=budget)
    return SampleAccount(settings, ledger, 3, size_of=lambda _: 40, releases_of=lambda _: TASK)


TASK = {Release(noise_multiplier=1.0, sampling=0.25): 4}


def test_releases_of_whole_clients_count_for_their_samples_too() -> None:
    ledger = Ledger.in_memory("a federation", run="earlier")
    before = {Release(noise_multiplier=1.0): 4}
    ledger.append(1, [Cost(releases=before)])
    account = sample_account(ledger)
    assert account.epsilon() == epsilon(before, 1e-5)
    account.begin(1, ["a"], sampling=1.0, expected=1.0)
    assert account.epsilon() == account.summary()["epsilon_by_client"]["a"] == epsilon(before | TASK, 1e-5)
    with pytest.raises(BudgetSpent, match="every client would pass"):
        sample_account(ledger, budget=epsilon(TASK, 1e-5) * 1.5).allowed(2, ["b"], ["a", "b"])


def test_whole_clients_are_not_covered_by_releases_of_samples(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, "a federation", run="earlier") as ledger:
        sample_account(ledger).begin(1, ["a"], sampling=1.0, expected=1.0)
    with Ledger.open(tmp_path, "a federation", run="later") as ledger:
        assert sample_account(ledger).epsilon() == epsilon(TASK, 1e-5)
        with pytest.raises(InvalidLedger, match="not what all data of a client show"):
            PrivacyAccount(LocalPrivacy(noise_multiplier=1.0), ledger, 3)
