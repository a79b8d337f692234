"""Encoded differences of models in simulated runs: each client can make the model that it trains from.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fed
from fed.errors import Diverged, InvalidExperiment
from fed.server import hierarchy
from fed.server.hierarchy import HierarchicalFleet
from fed.simulations.estimate import expect
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from fed.wire.messages import Answer, Difference, Task
from fed.wire.reference import Reference
from tests.lora_models import INPUTS, adapted
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

SLOW = {"kind": "lognormal", "samples_per_s": 10.0, "failure": 0.1}
ROUNDS: dict[str, dict[str, Any]] = {
    "synchronous": {"rounds": {"count": 12, "cohort": 4}},
    "deadline": {"rounds": {"count": 12, "cohort": 4, "over_selection": 1.5, "deadline_s": 1.0}, "devices": SLOW},
    "backups": {"rounds": {"count": 8, "cohort": 3, "backup_after_s": 0.5}, "devices": SLOW},
    "buffered": {"rounds": {"kind": "buffered", "count": 15, "buffer": 2, "concurrency": 5}, "devices": SLOW},
    "asynchronous": {"rounds": {"kind": "asynchronous", "count": 20, "concurrency": 4}, "devices": SLOW},
    "bounded": {"rounds": {"kind": "bounded_staleness", "count": 4, "bound": 1}, "devices": SLOW},
}
DATA = fed.FederatedData({client: parts.samples(6, client, torch.float64) for client in range(8)}, None, classes=3)


def experiment(**changed: Any) -> fed.Experiment:
    keys: dict[str, Any] = {"local": {"lr": 0.1, "batch_size": 4}, "simulation": {"workers": 0}}
    return fed.Experiment(**{**keys, **changed})


class Clients:
    """Clients that keep the reference of the last task that they answered, and make each task's model of it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        given: fed.Experiment,
        model: Callable[[], torch.nn.Module] = parts.double,
    ) -> None:
        simulation = Simulation(given, DATA, model)
        self.message = simulation.message
        self.movement = simulation.recipe.aggregator.movement if simulation.recipe.aggregator else None
        self.streams = Streams(given.seed)
        self.has: dict[Any, Reference] = {}
        self.bytes_down = self.wholes = self.longest = 0
        made: dict[int, Reference] = {}
        dispatch, collect = SimulatedFleet.dispatch, SimulatedFleet.collect

        def dispatched(fleet: SimulatedFleet, tasks: Iterable[Task]) -> None:
            tasks = [*tasks]
            for task in tasks:
                made[task.id] = self.made(task)
            dispatch(fleet, tasks)

        def collected(fleet: SimulatedFleet, *arguments: Any, **named: Any) -> Any:
            for answer in collect(fleet, *arguments, **named):
                if not answer.problem:
                    self.has |= {client: made[task] for client, task in zip(answer.clients, answer.tasks, strict=True)}
                yield answer

        monkeypatch.setattr(SimulatedFleet, "dispatch", dispatched)
        monkeypatch.setattr(SimulatedFleet, "collect", collected)

    def made(self, task: Task) -> Reference:
        assert self.message is not None
        encoder = self.message.downlink_encoder
        movement = self.movement if self.message.is_factored else None
        sent = [*task.tensors]
        self.bytes_down += sum(tensor.nbytes for tensor in sent)
        if task.differences is None:
            self.wholes += 1
            numbers_KP, moved_J, _ = self.message.split_model(sent)
            return Reference(task.model.reference, numbers_KP, moved_J)
        self.longest = max(self.longest, len(task.differences))
        held, count = self.has[task.client], len(self.message.difference)
        for one in task.differences:
            messages, sent = tuple(sent[:count]), sent[count:]
            difference = Difference(one.number, held.name, one.after, messages)
            held = held.moved(difference, encoder, self.streams, movement)
        assert held.name == task.model.reference
        model = self.message.join_model(held.numbers_KP, held.moved_J, sent)
        assert all(map(torch.equal, model, task.model.tensors))
        return held


@pytest.mark.parametrize("algorithm", thinned(["scaffold", "fedavg"], quick=1))
@pytest.mark.parametrize("rounds", ROUNDS)
def test_each_client_makes_the_model_of_what_it_has(
    rounds: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if algorithm == "scaffold" and rounds in ("asynchronous", "bounded"):
        algorithm = "fedprox"
    given = experiment(**ROUNDS[rounds], algorithm=algorithm, downlink=[{"kind": "topk", "fraction": 0.2}, "int8"])
    clients = Clients(monkeypatch, given)
    run = fed.simulate(given, data=DATA, model=parts.double)
    assert run.summary["bytes_down"] == clients.bytes_down
    assert clients.wholes >= len(clients.has)
    assert clients.longest > 1 or rounds == "bounded"


def with_adapters() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, INPUTS), adapted(classes=3, rank=1)).double()


@pytest.mark.parametrize("downlink", thinned([["int8"], []], quick=1), ids=str)
@pytest.mark.parametrize("algorithm", ["fedex_lora", "flora"])
def test_each_client_makes_adapted_matrices_of_factors(
    algorithm: str, downlink: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = experiment(rounds={"count": 8, "cohort": 4}, algorithm=algorithm, downlink=downlink)
    clients = Clients(monkeypatch, given, with_adapters)
    run = fed.simulate(given, data=DATA, model=with_adapters)
    assert run.summary["bytes_down"] == clients.bytes_down
    assert len(clients.has) <= clients.wholes < 20  # of 32 tasks
    assert clients.longest > 1


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "bmuf"])
def test_an_exact_codec_changes_nothing(algorithm: str) -> None:
    exact, plain = (
        fed.simulate(
            experiment(algorithm=algorithm, rounds={"count": 5, "cohort": 4}, downlink=downlink),
            data=DATA,
            model=parts.double,
        )
        for downlink in ([{"kind": "topk", "fraction": 1.0}], [])
    )
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(exact.model.state_dict()[name], tensor, rtol=0, atol=1e-12)


def test_differences_of_too_many_rounds_are_not_expected() -> None:
    """Of 70 clients one each round, a difference is 64 times as small as the model, and nobody gets one."""
    data = fed.FederatedData({client: parts.samples(6, client, torch.float64) for client in range(70)}, None, classes=3)
    given = experiment(
        rounds={"count": 140, "cohort": 1, "sampling": "round_robin", "evaluate_every": 140},
        downlink=[{"kind": "topk", "fraction": 0.02}, "sign"],
    )
    run = fed.simulate(given, data=data, model=lambda: torch.nn.Linear(4, 300).double())
    whole = fed.simulate(given.override({"downlink": []}), data=data, model=lambda: torch.nn.Linear(4, 300).double())
    assert run.summary["bytes_down"] == whole.summary["bytes_down"]
    expected = expect(Simulation(given, data, lambda: torch.nn.Linear(4, 300).double()))
    assert expected.bytes_down == run.summary["bytes_down"]


def test_who_is_far_behind_gets_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 clients one each round: 8-fold differences of float16 are longer than the model."""
    given = experiment(rounds={"count": 24, "cohort": 1, "sampling": "round_robin"}, downlink=["float16"])
    clients = Clients(monkeypatch, given)
    fed.simulate(given, data=DATA, model=parts.double)
    assert (clients.wholes, clients.longest) == (24, 0)


def test_an_estimate_counts_differences() -> None:
    given = experiment(rounds={"count": 6}, downlink=["int8"])
    run = fed.simulate(given, data=DATA, model=parts.double)
    assert expect(Simulation(given, DATA, parts.double)).bytes_down == run.summary["bytes_down"]


def test_an_edge_receives_each_content_once() -> None:
    """All clients of an edge lack the same difference: it comes once more than they are."""
    flat, tree = (
        fed.simulate(experiment(rounds={"count": 3}, downlink=["int8"], hierarchy=edges), data=DATA, model=parts.double)
        for edges in (None, {"fan_out": 4})
    )
    for one, other in zip(flat.metrics, tree.metrics, strict=True):
        assert other["bytes_down"] - one["bytes_down"] == 2 * one["bytes_down"] // 8


def test_an_edge_may_receive_the_model_and_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """For newcomers and for clients that were away: of the differences the most that one of them lacks."""
    sent: list[dict[int, dict[bool, int]]] = []
    dispatch = SimulatedFleet.dispatch

    def dispatched(fleet: SimulatedFleet, tasks: Iterable[Task]) -> None:
        tasks, of_edges = [*tasks], dict[int, dict[bool, int]]()
        for task in tasks:
            of_edge = of_edges.setdefault(int(task.client) // 4, {})
            is_whole = task.differences is None
            of_edge[is_whole] = max(of_edge.get(is_whole, 0), task.size_bytes())
        sent.append(of_edges)
        dispatch(fleet, tasks)

    monkeypatch.setattr(SimulatedFleet, "dispatch", dispatched)
    given = experiment(rounds={"count": 10, "cohort": 3}, downlink=[{"kind": "topk", "fraction": 0.2}, "int8"])
    clients = Clients(monkeypatch, given)
    tree = fed.simulate(given.override({"hierarchy": {"fan_out": 4}}), data=DATA, model=parts.double)
    assert any(len(of_edge) == 2 for of_edges in sent for of_edge in of_edges.values())
    to_edges = sum(sum(of_edge.values()) for of_edges in sent for of_edge in of_edges.values())
    assert tree.summary["bytes_down"] == clients.bytes_down + to_edges


def test_the_clock_takes_what_is_sent(tmp_path: Path) -> None:
    """Of one byte a second down, and no other time."""
    lines = [f"{client},1e300,1.0,1e300,0" for client in range(8)]
    (tmp_path / "d.csv").write_text(
        "\n".join(["client,samples_per_s,down_bytes_per_s,up_bytes_per_s,latency_s", *lines])
    )
    devices = {"kind": "trace", "path": str(tmp_path / "d.csv")}
    run = fed.simulate(
        experiment(rounds={"count": 4}, downlink=["int8"], devices=devices), data=DATA, model=parts.double
    )
    clocks = [0.0, *(line["virtual_s"] for line in run.metrics)]
    took_s = [later - earlier for earlier, later in itertools.pairwise(clocks)]
    assert took_s == pytest.approx([line["bytes_down"] / 8 for line in run.metrics])
    assert took_s[1] < took_s[0] / 4


def test_backups_reach_their_edges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What edges receive is counted, if they are sent something twice in a round."""
    sent, told = list[int](), list[int]()
    bytes_to_edges, summed = HierarchicalFleet._bytes_to_edges, hierarchy.summed

    def to_edges(fleet: HierarchicalFleet, tasks: Sequence[Task]) -> dict[int, int]:
        received = bytes_to_edges(fleet, tasks)
        sent.extend(received.values())
        return received

    def of_edge(answers: Sequence[Answer], numbers: int, **moved: int) -> Answer:
        told.append(moved["more_bytes_down"])
        return summed(answers, numbers, **moved)

    monkeypatch.setattr(HierarchicalFleet, "_bytes_to_edges", to_edges)
    monkeypatch.setattr(hierarchy, "summed", of_edge)
    given = experiment(
        rounds={"count": 8, "cohort": 3, "backup_after_s": 0.5},
        devices={"kind": "lognormal", "samples_per_s": 10.0},
        hierarchy={"fan_out": 4},
    )
    fed.simulate(given, data=DATA, model=parts.double)
    assert len(sent) > 16
    assert sum(told) == sum(sent)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"downlink": ["dgc"]}, "downlink cannot hold dgc, which keeps a residual of its own"),
        ({"downlink": ["sketch"]}, "downlink cannot hold sketch, whose sums alone are read"),
        ({"downlink": ["int8", "topk"]}, "downlink must be a chain .* TopK finds no values behind Int8"),
        ({"downlink": ["int8"], "algorithm": "dpsgd"}, "downlink int8 needs clients that report to a coordinator"),
        ({"downlink": ["int8"], "algorithm": "centralized"}, "downlink int8 needs clients that report"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        fed.Experiment(**changed)


@pytest.mark.parametrize("downlink", [[], ["int8"], ["float16"]], ids=str)
def test_a_model_beyond_its_type_is_not_kept(downlink: list[str], tmp_path: Path) -> None:
    given = experiment(algorithm={"kind": "fedavgm", "server_lr": 1e45}, rounds={"count": 3}, downlink=downlink)
    data = fed.FederatedData({client: parts.samples(6, client, torch.float32) for client in range(3)}, None, classes=3)
    with pytest.raises(Diverged, match=r"round 1: the model becomes \S+; the last good model is kept: lower the step"):
        fed.simulate(given, data=data, model=lambda: torch.nn.Linear(4, 3), output=tmp_path / "run")
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert all(bool(torch.isfinite(part).all()) for part in kept.values())
