"""Clients that evaluate: each on samples that it does not train on, with the figures that a reader would work out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fed
from fed.clients.data import ClientId, Pair
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.metrics import accuracy
from fed.clients.training.devices import devices_of
from fed.clients.training.evaluation import Score, evaluate
from fed.clients.training.work_items import EvaluateByClients
from fed.clients.training.worker import Work
from fed.config.evaluation import ByClients
from fed.errors import InvalidData, InvalidExperiment
from fed.reports.html import write_run_report
from fed.server.evaluation import CLIENTS_AT_ONCE, MODELS_AT_ONCE
from fed.simulations.estimate import expect
from fed.simulations.scoring import begin_scoring
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from tests.server.test_evaluation import Late
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")

CPU = torch.device("cpu")
FRACTION = 0.3
OWN = ["client_accuracy_mean", "client_accuracy_std", "client_accuracy_worst_decile"]


def experiment(algorithm: str = "fedavg", **keys: Any) -> fed.Experiment:
    rounds = {"count": 3, "cohort": "all" if algorithm == "dpsgd" else 6, **keys.pop("rounds", {})}
    evaluation = {"kind": "clients", "fraction": FRACTION}
    simulation = {"workers": 0, **keys.pop("simulation", {})}
    return fed.Experiment(
        **{
            "algorithm": {"kind": algorithm},
            "rounds": rounds,
            "evaluation": evaluation,
            "simulation": simulation,
            **keys,
        }
    )


def split(data: fed.FederatedData, client: Any, seed: int = 0, fraction: float = FRACTION) -> tuple[Pair, Pair]:
    """A client's samples to train on and those held out, each in the data's order, worked out anew."""
    inputs, targets = data.read(client)
    order = Streams(seed).generator("client test set", client).permutation(len(targets))
    count = min(math.floor(len(targets) * fraction + 0.5), len(targets) - 1)
    out, kept = (torch.from_numpy(np.sort(part)) for part in (order[:count], order[count:]))
    return (inputs[kept], targets[kept]), (inputs[out], targets[out])


def scores(run: fed.Run, data: fed.FederatedData) -> dict[ClientId, tuple[Score, int]]:
    """Client → what its model, or else the run's, scores on what it holds out, and over how many samples."""
    found = {}
    for client in data.clients:
        _, held_out = split(data, client)
        if len(held_out[1]):
            module = run.models.get(client, run.model)
            found[client] = evaluate(module, cross_entropy, {"accuracy": accuracy}, held_out, CPU), len(held_out[1])
    return found


def figures(scored: Sequence[tuple[Score, int]]) -> dict[str, float]:
    """With NumPy: weighted means, and how clients differ."""
    losses, accuracies = np.array([[score.loss, *score.metrics] for score, _ in scored], dtype=np.float64).T
    sizes = np.array([size for _, size in scored])
    return {
        "test_accuracy": float(np.average(accuracies, weights=sizes)),
        "test_loss": float(np.average(losses, weights=sizes)),
        "client_accuracy_mean": float(accuracies.mean()),
        "client_accuracy_std": float(accuracies.std()),
        "client_accuracy_worst_decile": float(np.sort(accuracies)[: int(np.ceil(len(accuracies) / 10))].mean()),
    }


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "dpsgd", "local", "centralized"])
def test_figures_are_those_worked_out_by_hand(algorithm: str) -> None:
    """In float64: within 1e-12, the rounding of sums of nine terms."""
    data = parts.unequal(torch.float64)
    run = simulate(experiment(algorithm), data=data, model=parts.double)
    scored = scores(run, data)
    assert set(scored) == set(data.clients) - {"c3"}, "who has one sample trains on it"
    assert bool(run.models) == (algorithm in ("dpsgd", "local"))
    for key, value in figures(list(scored.values())).items():
        assert run.metrics[-1][key] == pytest.approx(value, abs=1e-12), key
        if key.startswith("client_"):
            assert run.summary[f"final_{key}"] == run.metrics[-1][key]
    assert run.summary["final_test_accuracy"] == run.metrics[-1]["test_accuracy"]


def test_metric_other_than_a_mean_uses_all_held_out_samples() -> None:
    data = fed.FederatedData({"c": parts.samples(1000, 1, torch.float64)})
    run = simulate(experiment(rounds={"cohort": 1}), data=data, model=parts.double, metric=parts.correlation)
    _, (inputs, targets) = split(data, "c")
    assert len(targets) == 300
    assert run.metrics[-1]["test_accuracy"] == pytest.approx(parts.correlation(run.model(inputs), targets), abs=1e-12)


@pytest.mark.parametrize("clients", [1, 9, 10, 11, 45])
def test_worst_tenth_is_rounded_up_to_a_whole_client(clients: int) -> None:
    data = fed.FederatedData({number: parts.samples(200 + number, number) for number in range(clients)})
    run = simulate(experiment(rounds={"count": 1, "cohort": 1}), data=data, model=parts.small)
    scored = list(scores(run, data).values())
    worst = run.metrics[-1]["client_accuracy_worst_decile"]
    assert worst == pytest.approx(figures(scored)["client_accuracy_worst_decile"], abs=1e-12)
    count = {1: 1, 9: 1, 10: 1, 11: 2, 45: 5}[clients]
    lowest = np.sort([score.metrics[0] for score, _ in scored])
    assert worst == pytest.approx(lowest[:count].mean(), abs=1e-12)
    assert count == 1 or lowest[count - 1] != lowest[0], "one client less would be another mean"


class Noting(nn.Module):
    """Notes what it is trained on."""

    seen: ClassVar[set[float]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.layers = parts.small()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.update(inputs[:, 0].tolist())
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd", "centralized", "fednova"])
def test_clients_train_on_exactly_what_is_not_held_out(algorithm: str) -> None:
    data = parts.unequal()
    Noting.seen.clear()
    keys = experiment(algorithm, rounds={"cohort": "all"}, simulation={"batching": "off"})
    simulate(keys, data=data, model=Noting)
    kept, out = zip(*(split(data, client) for client in data.clients), strict=True)
    assert Noting.seen == {number for inputs, _ in kept for number in inputs[:, 0].tolist()}
    assert not Noting.seen & {number for inputs, _ in out for number in inputs[:, 0].tolist()}


def test_sizes_and_weights_are_those_of_what_is_trained_on() -> None:
    data = parts.unequal()
    simulation = Simulation(experiment(), data, parts.small)
    assert dict(simulation.data.sizes) == {client: len(split(data, client)[0][1]) for client in data.clients}
    by_hand = fed.FederatedData({client: split(data, client)[0] for client in data.clients}, data.test, data.classes)
    keys = experiment()
    ours = simulate(keys, data=data, model=parts.small)
    theirs = simulate(keys.override({"evaluation": "coordinator"}), data=by_hand, model=parts.small)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [line["train_loss"] for line in ours.metrics] == [line["train_loss"] for line in theirs.metrics]


def test_the_draw_depends_on_the_seed_alone() -> None:
    held = []
    for keys in (experiment(), experiment("dpsgd"), experiment("centralized"), experiment(seed=1)):
        held_out = Simulation(keys, parts.unequal(), parts.small).held_out
        assert held_out is not None
        held.append({client: inputs.tolist() for client, (inputs, _) in held_out.items()})
    assert held[0] == held[1] == held[2] != held[3]


def test_what_cannot_be_pickled_stays_here() -> None:
    train = fed.ClientsOnDemand(range(4), lambda client: parts.samples(9, client))
    keys = experiment("centralized", rounds={"cohort": 4}, simulation={"workers": 2})
    with pytest.raises(InvalidExperiment, match=r"the data cannot be pickled"):
        simulate(keys, data=fed.FederatedData(train, classes=3), model=parts.small)


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_each_client_scores_once_in_fixed_groups(algorithm: str) -> None:
    data = fed.FederatedData({number: parts.samples(8, number) for number in range(70)})
    simulation = Simulation(experiment(algorithm), data, parts.small)
    executor = Late(partial(Work, simulation.recipe), devices_of(1))
    begin_scoring(simulation, simulation.federation(executor), executor)()
    groups = [item.content.clients for item in executor.asked if isinstance(item.content, EvaluateByClients)]
    assert [client for group in groups for client in group] == list(range(70))
    size = MODELS_AT_ONCE if algorithm == "dpsgd" else CLIENTS_AT_ONCE
    assert [len(group) for group in groups[:-1]] == [size] * (69 // size)
    assert [item.cost for item in executor.asked] == [2 * len(group) for group in groups], "two of eight samples each"


def test_who_keeps_no_model_scores_the_coordinators(monkeypatch: pytest.MonkeyPatch) -> None:
    data = parts.unequal(torch.float64)
    simulation = Simulation(experiment(), data, parts.double)
    executor = Late(partial(Work, simulation.recipe), devices_of(1))
    federation = simulation.federation(executor)
    vector_V, integers_I = federation.model()
    own: dict[ClientId, Any] = {client: (vector_V + number, integers_I) for number, client in enumerate(("c1", "c4"))}
    monkeypatch.setattr(federation, "models", lambda: own)
    line = begin_scoring(simulation, federation, executor)().line
    models = {client: simulation.load_module(state) for client, state in own.items()}
    run = fed.Run(simulation.experiment, [], {}, simulation.load_module(federation.model()), models)
    assert line == pytest.approx(figures(list(scores(run, data).values())), abs=1e-12)


def test_attackers_score_on_their_true_labels() -> None:
    data = parts.unequal(torch.float64)
    keys = experiment(adversaries={"kind": "label_flip", "fraction": 0.5})
    run = simulate(keys, data=data, model=parts.double)
    for key, value in figures(list(scores(run, data).values())).items():
        assert run.metrics[-1][key] == pytest.approx(value, abs=1e-12), key
    simulation = Simulation(keys, data, parts.double)
    flipped = [
        client for client in data.clients if not torch.equal(simulation.data.read(client)[1], split(data, client)[0][1])
    ]
    assert len(flipped) == 4, "what they train on has wrong labels"


def test_on_demand_and_in_memory_are_one_run() -> None:
    train = fed.ClientsOnDemand(range(12), lambda client: parts.samples(1 + client, client))
    on_demand, in_memory = (
        simulate(experiment(), data=fed.FederatedData(clients, classes=3), model=parts.small)
        for clients in (train, dict(train))
    )
    assert parts.outcome(on_demand) == parts.outcome(in_memory)


def test_a_million_clients_are_not_read_before_they_evaluate() -> None:
    reads: list[int] = []

    def read(client: int) -> Pair:
        reads.append(client)
        return parts.samples(5, client)

    for size in (lambda client: 5, None):
        reads.clear()
        data = fed.FederatedData(fed.ClientsOnDemand(range(10**6), read, size), classes=3)
        keys = experiment(rounds={"count": 2, "cohort": 3})
        simulation = Simulation(keys, data, parts.small)
        assert expect(simulation).wall_s > 0
        assert set(reads) == {0}


@pytest.mark.parametrize("on_demand", [False, True])
def test_missing_held_out_samples_are_refused_with_the_remedy(on_demand: bool) -> None:
    train = fed.ClientsOnDemand(range(4), lambda client: parts.samples(1, client))
    data = fed.FederatedData(train if on_demand else dict(train), classes=3)
    with pytest.raises(InvalidData) as caught:
        simulate(experiment(rounds={"cohort": "all"}), data=data, model=parts.small)
    assert str(caught.value) == (
        "evaluation by clients needs a client with samples enough to hold one out, got none among 4: raise "
        "evaluation.fraction, deal the data to fewer clients, or write evaluation: coordinator"
    )


def test_held_out_labels_are_checked_against_the_model() -> None:
    inputs, labels = parts.samples(10, 0)
    (_, wrong), (_, held_out) = split(fed.FederatedData({"a": (inputs, torch.arange(10))}), "a")
    labels = labels.clone()
    labels[held_out[0]] = 7
    assert held_out[0] not in wrong
    with pytest.raises(InvalidData, match=r"targets of client 'a' must be in 0 … 2, .* got 7"):
        simulate(experiment(rounds={"cohort": 1}), data=fed.FederatedData({"a": (inputs, labels)}), model=parts.small)


def test_batch_norm_needs_two_samples_that_are_trained_on() -> None:
    data = fed.FederatedData({"a": parts.samples(9, 0), "b": parts.samples(2, 1)})
    keys = experiment(rounds={"cohort": 2})
    simulate(keys.override({"evaluation.fraction": 0.2}), data=data, model=parts.with_batch_norm)
    with pytest.raises(InvalidData, match="needs 2 samples or more on every client, got 1 on client 'b'"):
        simulate(keys.override({"evaluation.fraction": 0.5}), data=data, model=parts.with_batch_norm)


@pytest.mark.parametrize("algorithm", ["fedavg", "local"])
def test_without_a_metric_accuracies_are_none_and_losses_are_not(algorithm: str) -> None:
    run = simulate(experiment(algorithm), data=parts.unequal(), model=parts.small, loss=parts.brier)
    for line in run.metrics:
        assert line["test_accuracy"] is None
        assert not any(key in line for key in OWN)
        assert line["test_loss"] > 0


def test_evaluate_every_holds_for_clients() -> None:
    run = simulate(experiment(rounds={"count": 5, "evaluate_every": 2}), data=parts.unequal(), model=parts.small)
    assert [line["round"] for line in run.metrics if line["test_loss"] is not None] == [2, 4, 5]
    every = simulate(experiment(rounds={"count": 5}), data=parts.unequal(), model=parts.small)
    assert {key: run.metrics[1][key] for key in OWN} == {key: every.metrics[1][key] for key in OWN}


def test_the_test_set_is_not_used() -> None:
    with_it, without = (simulate(experiment(), data=parts.unequal(test=test), model=parts.small) for test in (40, 0))
    assert parts.outcome(with_it) == parts.outcome(without)


def test_a_personal_algorithm_is_evaluated_by_clients_unless_told_so() -> None:
    keys = fed.Experiment(
        algorithm={"kind": f"python:{parts.__name__}:Personal"}, rounds={"count": 1}, simulation={"workers": 0}
    )
    run = simulate(keys, data=parts.unequal(), model=parts.small)
    assert run.experiment.dump()["evaluation"] == {"kind": "clients", "fraction": 0.2}
    assert run.metrics[-1]["client_accuracy_worst_decile"] is not None


@dataclass(frozen=True, kw_only=True)
class Halves(ByClients):
    """Each client holds out half of its samples."""

    fraction: float = 0.5


def test_a_users_evaluation_kind_is_one_of_the_two() -> None:
    own, given = (
        simulate(experiment(evaluation=evaluation), data=parts.unequal(), model=parts.small)
        for evaluation in (f"python:{__name__}:Halves", {"kind": "clients", "fraction": 0.5})
    )
    assert parts.outcome(own) == parts.outcome(given)
    bases = r"fed\.config\.evaluation\.ByClients or fed\.config\.evaluation\.ByCoordinator"
    with pytest.raises(InvalidExperiment, match=f"must make a {bases}, got Personal"):
        simulate(experiment(evaluation=f"python:{parts.__name__}:Personal"), data=parts.unequal(), model=parts.small)


@pytest.mark.long
def test_a_comparison_shows_the_worst_tenth(tmp_path: Path) -> None:
    compare: list[Any] = [{"name": "A"}, {"name": "B", "algorithm": {"kind": "dpsgd"}}]
    base = {"rounds": {"count": 2}, "evaluation": "clients", "data": {"clients": 12}, "simulation": {"workers": 0}}
    result = fed.compare(fed.Comparison(base=base, compare=compare), output=tmp_path / "both")
    for row in result.rows:
        (run,) = result.runs[row["name"]].values()
        assert row["client_accuracy_worst_decile"] == run["metrics"][-1]["client_accuracy_worst_decile"]
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    for text in (
        "worst tenth of clients",
        "Worst tenth of clients",
        "mean of clients",
        "each does so on samples of its",
    ):
        assert text in page
    assert "own models" not in page
    assert "client_accuracy_worst_decile" in (tmp_path / "both" / "comparison.csv").read_text(encoding="utf-8")
    page = write_run_report(next((tmp_path / "both").glob("runs/*/seed-0"))).read_text(encoding="utf-8")
    assert "worst tenth of clients" in page
    assert "Clients' own models" not in page
