"""Measures of simulated peers: their mean, consensus distance and scores, and the rounds that they refuse."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import fed
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.metrics import accuracy
from fed.clients.training.evaluation import evaluate
from fed.config.evaluation import ByCoordinator
from fed.errors import InvalidExperiment
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams

pytestmark = pytest.mark.usefixtures("device")

PEERS = 6
ROOT = Path(__file__).resolve().parents[2]


def experiment(algorithm: str = "dpsgd", /, **keys: Any) -> fed.Experiment:
    base: dict[str, Any] = {
        "algorithm": algorithm,
        "data": {"clients": PEERS, "partition": {"kind": "dirichlet", "alpha": 0.3}},
        "model": "logistic",
        "local": {"steps": 2},
        "rounds": {"count": 3, "evaluate_every": 2},
        "evaluation": "coordinator",
    }
    return fed.Experiment(**base).override(keys)


class Widened(nn.Module):
    """Inputs in float64, in which a model's state is what its rule has."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.double()


def normalised() -> nn.Module:
    return nn.Sequential(Widened(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 10)).double()


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([part.detach().flatten() for part in module.parameters()])


@pytest.mark.parametrize("algorithm", ["dpsgd", "local"])
def test_consensus_distance_is_that_of_the_parameters(algorithm: str) -> None:
    run = fed.simulate(experiment(algorithm, model=None), model=normalised)
    x_NP = torch.stack([parameters(module) for module in run.models.values()])
    expected = float((x_NP - x_NP.mean(0)).norm() / PEERS**0.5)
    assert [line["consensus_distance"] > 0 for line in run.metrics] == [True] * 3  # evaluated or not
    assert run.metrics[-1]["consensus_distance"] == pytest.approx(expected, rel=1e-12)
    assert run.summary["final_consensus_distance"] == run.metrics[-1]["consensus_distance"]


def test_the_model_is_the_mean_of_its_peers() -> None:
    run = fed.simulate(experiment(model=None), model=normalised)
    assert list(run.models) == list(range(PEERS))
    states = [module.state_dict() for module in run.models.values()]
    for name, mean in run.model.state_dict().items():
        of_peers = torch.stack([state[name] for state in states])
        # integers, such as numbers of batches, are the largest
        expected = of_peers.mean(0) if mean.is_floating_point() else of_peers.amax(0)
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-15)


def test_equal_peers_are_at_no_distance() -> None:
    # a round of mixing with all others is the mean, and differs by the order of its sums
    run = fed.simulate(experiment(model=None, topology="complete"), model=normalised)
    assert all(line["consensus_distance"] < 1e-14 for line in run.metrics)


def test_one_model_has_no_consensus_distance() -> None:
    run = fed.simulate(experiment("fedavg"))
    assert not any("consensus_distance" in line for line in run.metrics)
    assert not any("consensus_distance" in key for key in run.summary)


@pytest.mark.parametrize("peers", [2, 5, "all", 16])
def test_scores_are_those_of_the_peers_that_are_drawn(peers: int | str) -> None:
    one = experiment(**{"evaluation.peers": peers})
    run = fed.simulate(one)
    clients = list(range(PEERS))
    drawn = ByCoordinator(peers=peers).scored(clients, Streams(0))  # type: ignore[arg-type]
    assert len(drawn) == min(PEERS, peers if isinstance(peers, int) else PEERS)
    test = fed.clients.data.load(one.data, Streams(0)).test
    assert test is not None
    mean, *scores = (
        evaluate(module, cross_entropy, {"accuracy": accuracy}, test, torch.device("cpu"))
        for module in (run.model, *(run.models[peer] for peer in drawn))
    )
    accuracies = [score.metrics[0] for score in scores]
    line = run.metrics[-1]
    assert line["client_accuracy_mean"] == pytest.approx(statistics.fmean(accuracies), abs=1e-12)
    assert line["client_accuracy_std"] == pytest.approx(statistics.pstdev(accuracies), abs=1e-12)
    assert line["test_accuracy"] == mean.metrics[0]
    assert line["test_loss"] == pytest.approx(mean.loss, rel=1e-6)


def test_the_peers_that_are_scored_are_a_part_in_order() -> None:
    names = [f"p{number}" for number in range(100)]
    drawn = list(ByCoordinator().scored(names, Streams(3)))
    assert len(drawn) == len(set(drawn)) == 16
    assert drawn == [name for name in names if name in drawn]


@pytest.mark.parametrize("cohort", ["all", PEERS])
def test_a_cohort_of_all_peers_is_none(cohort: object) -> None:
    one, other = (fed.simulate(experiment(**keys)) for keys in ({}, {"rounds.cohort": cohort}))
    assert torch.equal(parameters(one.model), parameters(other.model))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"cohort": 3}, f"rounds.cohort must be {PEERS}, the number of peers, .* got 3: leave it out"),
        ({"sampling": "round_robin"}, "rounds.sampling needs a coordinator that asks clients, got round_robin"),
        ({"over_selection": 1.5}, "rounds.over_selection needs a coordinator that asks clients, got 1.5"),
        ({"quorum": 0.5}, "rounds.quorum needs a coordinator"),
        ({"backup_after_s": 3.0}, "rounds.backup_after_s needs a coordinator"),
        ({"partial_work": "drop"}, "rounds.partial_work needs a coordinator that asks clients, got drop"),
    ],
)
def test_what_a_coordinator_does_is_refused_of_peers(keys: dict[str, Any], sentence: str) -> None:
    one = experiment(**{f"rounds.{key}": value for key, value in keys.items()})
    with pytest.raises(InvalidExperiment, match=sentence) as caught:
        fed.simulate(one)
    assert "\n" not in str(caught.value)


def test_a_cohort_of_clients_that_never_meet_has_no_effect() -> None:
    run = fed.simulate(experiment("local", **{"rounds.cohort": 2}))
    assert run.metrics[0]["replied"] == PEERS


@pytest.mark.long
def test_dpsgd_on_a_ring_is_within_two_points_of_fedavg() -> None:
    """In equal steps, as examples/peers.yaml compares them."""
    keys = yaml.safe_load((ROOT / "examples" / "peers.yaml").read_text())
    keys["compare"] = [variant for variant in keys["compare"] if variant["name"] in ("FedAvg", "D-PSGD")]
    result = fed.compare(fed.Comparison(**keys))
    fedavg, dpsgd = result.rows
    assert [row["seeds"] for row in result.rows] == [[0, 1, 2]] * 2
    assert dpsgd["final_test_accuracy"] > fedavg["final_test_accuracy"] - 0.02
    assert fedavg["final_test_accuracy"] > 0.9


@pytest.mark.parametrize("name", ["digits", "peers"])
def test_comparisons_with_peers_can_be_prepared(name: str) -> None:
    variants = fed.Comparison.load(ROOT / "examples" / f"{name}.yaml").variants()
    prepared = [Simulation(one.override({"simulation.batching": "off"})) for one in variants.values()]
    assert any(simulation.has_peers for simulation in prepared)
