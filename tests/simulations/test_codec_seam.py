"""The seam of codecs: one registered line, and simulation, gRPC and Flower end with the same bits and count the same.

Shapes: K, clients of a group; M, numbers of a message; P, parameters.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fed
from fed.clients.data import load
from fed.clients.node.reference import KeptReference
from fed.clients.training.devices import device_of
from fed.clients.training.work_items import Trained
from fed.clients.training.worker import Work
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.config import registry
from fed.errors import Diverged
from fed.server.grpc.deploy import serve
from fed.simulations.estimate import expect
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from tests.flower_stand_ins import Federation, Message, install, run_app
from tests.server.flower.test_app import assert_same
from tests.server.grpc.threaded import ThreadedNode, nodes_of
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

CODECS = [*registry.CODECS.builtin]
CLIENTS, ROUNDS = 3, 2
INPUTS, HIDDEN, CLASSES = 64, 8, 10
PARAMETERS = (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * CLASSES
SENT = {"fedavg": 1, "scaffold": 2, "fednova": 1, "median": 1}
"""How many parts of a client's message are as long as the parameters; FedNova's has two numbers beside."""


@dataclass(frozen=True, kw_only=True)
class EverySecond(Codec):
    """Keeps every second value; the others are zero."""

    gives: ClassVar = "values"

    def size_bytes(self, values: Values) -> int:
        return 0

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        return values._replace(numbers=(values.numbers + 1) // 2, layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        return Encoded(torch.empty(len(rows_KM), 0, dtype=torch.uint8), rows_KM[:, ::2])

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        rows_KM = torch.zeros(len(inner), values.numbers, dtype=values.dtype)
        rows_KM[:, ::2] = torch.stack([*inner])
        return rows_KM


@dataclass(frozen=True, kw_only=True)
class Overflowing(EverySecond):
    """Decodes numbers beyond the largest of float32."""

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        return super().decode(content, inner, values, draw) * 1e38 * 1e38


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.CODECS.builtin, "every_second", f"{__name__}:EverySecond")


def experiment(algorithm: str = "fedavg", **changed: Any) -> fed.Experiment:
    """Three clients with unequal parts of the digits, who train one by one."""
    keys: dict[str, Any] = {
        "data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"kind": "mlp", "hidden": [HIDDEN]},
        "local": {"lr": 0.1, "batch_size": 16},
        "algorithm": algorithm,
        "rounds": {"count": ROUNDS},
        "uplink": ["every_second"],
        "simulation": {"batching": "off", "workers": 0},
    }
    return fed.Experiment(**{**keys, **changed})


def bytes_of(algorithm: str) -> int:
    """A client's message: a version and a length before the values of each part."""
    return SENT[algorithm] * (5 + 4 * (PARAMETERS // 2)) + 8 * (algorithm == "fednova")


everywhere = pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fednova", "median"])


@everywhere
def test_half_of_each_update_counts_and_half_of_its_bytes(algorithm: str) -> None:
    run, plain = (fed.simulate(experiment(algorithm, uplink=uplink)) for uplink in (["every_second"], []))
    assert {line["bytes_up"] for line in run.metrics} == {CLIENTS * bytes_of(algorithm)}
    assert [line["bytes_down"] for line in run.metrics] == [line["bytes_down"] for line in plain.metrics]
    first_V, _ = Simulation(experiment(algorithm)).prepared.layout.pack(Simulation(experiment()).recipe.module)
    moved_V = Simulation(experiment()).layout.pack(run.model)[0] - first_V
    if algorithm == "median":  # of a coordinate that nobody sends
        assert not bool(moved_V[1::2].any())
    assert bool((moved_V[::2] != 0).any())


def test_an_estimate_counts_what_is_sent() -> None:
    run = fed.simulate(experiment("scaffold"))
    expectation = expect(Simulation(experiment("scaffold")))
    assert expectation.bytes_up == sum(line["bytes_up"] for line in run.metrics)
    assert expectation.bytes_down == sum(line["bytes_down"] for line in run.metrics)


@everywhere
@pytest.mark.parametrize("wants", ["reported", "updates"])
def test_a_group_answers_what_its_clients_do(algorithm: str, wants: Literal["reported", "updates"]) -> None:
    """To the bit, in float64 and one by one; a mean but for the rounding of three terms."""
    simulation = Simulation(
        fed.Experiment(algorithm=algorithm, uplink=["every_second"], simulation={"batching": "off"}),
        parts.unequal(torch.float64),
        parts.double,
    )
    work, clients = Work(simulation.recipe, device_of()), ("c1", "c3", "c4")

    def trained(of: Sequence[str], wanted: Any = wants) -> tuple[Trained, Sequence[Tensor]]:
        task, tensors = simulation.first_task(of)
        found, answer = work(replace(task, wants=wanted), tensors)
        assert isinstance(found, Trained)
        return found, answer

    said, together = trained(clients)
    alone = [trained([client])[1] for client in clients]
    for part, *rows in zip(together, *alone, strict=True):
        assert torch.equal(torch.cat(rows), part)
    (update_KM, *_), (mean_M, *_) = trained(clients, "updates")[1], trained(clients, "mean")[1]
    weights_K = torch.tensor(said.weights, dtype=torch.float64)
    torch.testing.assert_close(mean_M, weights_K @ update_KM / weights_K.sum(), rtol=1e-12, atol=1e-15)
    parameters = simulation.layout.parameters
    assert not bool(update_KM[:, 1:parameters:2].any())
    assert bool(update_KM[:, :parameters:2].any())


def over_grpc(given: fed.Experiment, folder: Path) -> tuple[list[int], list[Any]]:
    """Bytes of the answers as they were sent, and the server's metrics."""
    assert given.data is not None
    data, nodes = load(given.data, Streams(given.seed)), list[ThreadedNode]()

    def begin(port: int) -> None:
        nodes.extend(nodes_of(data, port, folder))

    run = serve(given, listen="127.0.0.1:0", output=folder / "run", min_nodes=CLIENTS, on_listen=begin)
    for node in nodes:
        node.end()
    return [len(content) for node in nodes for _, content in node.training.answers], run.metrics


class Overheard(Federation):
    """Notes the answers to tasks."""

    answers: list[Any]

    def content_of_answer(self, message: Message) -> Any:
        answer = super().content_of_answer(message)
        if message.metadata.message_type == "train" and "arrays" in answer:
            self.answers.append(answer)
        return answer


def over_flower(given: fed.Experiment, folder: Path) -> tuple[list[int], list[Any]]:
    """The same, on a stand-in of Flower's grid."""
    Overheard.answers = []
    grid = run_app(given, folder, CLIENTS, Overheard)
    metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [len(content["arrays"]["flat"].data) for content in grid.answers], [json.loads(line) for line in metrics]


DEPLOYED = [pytest.param(over_grpc, id="grpc"), pytest.param(over_flower, id="flower", marks=pytest.mark.long)]
"""Ways to deploy; codecs of every kind go over Flower in a test of their own."""


@pytest.mark.processes
@pytest.mark.parametrize("deployed", DEPLOYED)
@everywhere
def test_deployed_runs_match_the_simulation_in_bits_and_bytes(
    deployed: Callable[[fed.Experiment, Path], tuple[list[int], list[Any]]],
    algorithm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    given = experiment(algorithm)
    sent, metrics = deployed(given, tmp_path)
    simulated = fed.simulate(given)
    assert_same(tmp_path / "run", simulated)
    assert sent == [bytes_of(algorithm)] * (CLIENTS * ROUNDS)
    assert [line["bytes_up"] for line in metrics] == [CLIENTS * bytes_of(algorithm)] * ROUNDS
    assert [line["bytes_up"] for line in simulated.metrics] == [line["bytes_up"] for line in metrics]
    assert [line["bytes_down"] for line in simulated.metrics] == [line["bytes_down"] for line in metrics]


@pytest.mark.processes
@pytest.mark.parametrize("kind", thinned(CODECS, quick=3))
def test_nodes_send_the_bytes_of_the_simulation(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every codec, whose messages are as long as their numbers make them."""
    install(monkeypatch)
    given = experiment(uplink=[kind])
    sent, metrics = over_flower(given, tmp_path)
    simulated = fed.simulate(given)
    assert_same(tmp_path / "run", simulated)
    assert sum(sent) == simulated.summary["bytes_up"]
    assert [line["bytes_up"] for line in metrics] == [line["bytes_up"] for line in simulated.metrics]


@pytest.mark.processes
@pytest.mark.parametrize("deployed", DEPLOYED)
@pytest.mark.parametrize(
    ("uplink", "feedback"),
    [
        pytest.param(["topk", "two_level"], "ef", id="sparse"),
        pytest.param(["topk", "int8"], "ef21", id="ef21", marks=pytest.mark.long),
        pytest.param(["qsgd"], "ef", id="scaled", marks=pytest.mark.long),
        pytest.param(["dgc", "zstd"], "none", id="dgc"),
        pytest.param(["sketch"], "none", id="sketch", marks=pytest.mark.long),
    ],
)
def test_nodes_keep_what_codecs_keep_in_the_simulation(
    deployed: Callable[[fed.Experiment, Path], tuple[list[int], list[Any]]],
    uplink: list[str],
    feedback: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    algorithm = "fedavg" if feedback == "ef21" else "scaffold"
    given = experiment(algorithm, uplink=uplink, error_feedback=feedback, rounds={"count": 4})
    sent, metrics = deployed(given, tmp_path)
    simulated = fed.simulate(given)
    assert_same(tmp_path / "run", simulated)
    assert sum(sent) == sum(line["bytes_up"] for line in metrics)
    assert [line["bytes_up"] for line in simulated.metrics] == [line["bytes_up"] for line in metrics]


@pytest.mark.processes
@pytest.mark.parametrize("deployed", DEPLOYED)
@pytest.mark.parametrize("algorithm", thinned(["scaffold", "fedavg", "fednova"], quick=1))
def test_nodes_make_models_of_differences(
    deployed: Callable[[fed.Experiment, Path], tuple[list[int], list[Any]]],
    algorithm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two rounds of three each client takes part, so that some have missed a version."""
    install(monkeypatch)
    rounds = {"count": 5, "cohort": 2}
    given = experiment(algorithm, rounds=rounds, uplink=[], downlink=[{"kind": "topk", "fraction": 0.1}, "int8"])
    _, metrics = deployed(given, tmp_path)
    simulated = fed.simulate(given)
    assert_same(tmp_path / "run", simulated)
    assert [line["bytes_down"] for line in simulated.metrics] == [line["bytes_down"] for line in metrics]
    whole = fed.simulate(given.override({"downlink": []}))
    assert simulated.summary["bytes_down"] < 0.75 * whole.summary["bytes_down"]


@pytest.mark.processes
def test_a_sum_is_of_the_samples_that_clients_train_on(tmp_path: Path) -> None:
    """Where they hold some out, these are fewer than they joined with."""
    held_out = {"kind": "clients", "fraction": 0.25}
    given = experiment(uplink=["topk"], error_feedback="ef21", rounds={"count": 3}, evaluation=held_out)
    over_grpc(given, tmp_path)
    simulated, deployed = fed.simulate(given).model.state_dict(), load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(deployed[name], tensor) for name, tensor in simulated.items())


@pytest.mark.processes
@pytest.mark.parametrize("deployed", [over_grpc, over_flower], ids=["grpc", "flower"])
def test_a_node_that_lost_its_model_is_sent_all(
    deployed: Callable[[fed.Experiment, Path], tuple[list[int], list[Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, with the same task: the run goes on to the same bits, and counts these bytes too."""
    install(monkeypatch)
    taken, lost = KeptReference.model, list[bool]()

    def model(reference: KeptReference, assignment: Any, tensors: Any) -> Any:
        if assignment.round == 2 and not lost:
            lost.append(bool(assignment.since))
            shutil.rmtree(reference._folder.folder)
        return taken(reference, assignment, tensors)

    monkeypatch.setattr(KeptReference, "model", model)
    given = experiment(rounds={"count": 3}, uplink=[], downlink=["int8"])
    _, metrics = deployed(given, tmp_path)
    simulated = fed.simulate(given)
    assert lost == [True]
    assert_same(tmp_path / "run", simulated)
    more = [line["bytes_down"] - same["bytes_down"] for line, same in zip(metrics, simulated.metrics, strict=True)]
    assert more == [0, 4 * PARAMETERS, 0]


@pytest.mark.parametrize("algorithm", ["fedavg", "median"])
def test_a_payload_beyond_its_type_is_not_averaged(algorithm: str) -> None:
    given = experiment(algorithm, uplink=[f"python:{__name__}:Overflowing"])
    with pytest.raises(Diverged, match=r"round 1, client 0: what the codecs of uplink make .* is not finite"):
        fed.simulate(given)


def test_edges_send_sums_that_nothing_encodes() -> None:
    flat, tree = (fed.simulate(experiment(hierarchy=edges)) for edges in (None, {"fan_out": 2}))
    assert tree.summary["bytes_up"] - flat.summary["bytes_up"] == ROUNDS * 2 * 4 * PARAMETERS
