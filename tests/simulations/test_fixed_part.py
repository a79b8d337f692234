"""Models that are trained in part: what travels, and that it is the same in a simulation and on nodes."""

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fed
from fed.clients.setup import Preparation
from fed.errors import InvalidInput, InvalidModel
from fed.server.grpc.deploy import serve
from fed.server.peer.real_peer import _hash
from fed.server.resume import run_fingerprint
from fed.vectors.fixed_part import fixed_state
from tests.flower_stand_ins import install, run_app
from tests.observing import after_round
from tests.server.grpc.threaded import ThreadedNode, nodes_of
from tests.server.peer.processes import processes

pytestmark = pytest.mark.usefixtures("device")

CLIENTS, ROUNDS, HEAD = 3, 2, 6 * 10 + 10
NUMBERS: Iterator[int] = itertools.count()


class Body(nn.Module):
    """A convolution with statistics, and a head that alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(6, 10)
        self.body.requires_grad_(False)
        self.get_buffer("body.1.running_var").fill_(0.25)

    def features(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images.view(-1, 1, 8, 8)).flatten(1)
        return features

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.features(images))
        return outputs


def body(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model, with the same numbers wherever it is made."""
    return Body()


def another_body(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model, with other numbers in its fixed part each time that it is made."""
    made = Body()
    with torch.no_grad():
        made.get_parameter("body.0.weight").add_(next(NUMBERS))
    return made


class Residual(nn.Module):
    """Two convolutions with statistics beside a shorter way, as in a ResNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.long = nn.Sequential(convolution(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU())
        self.long.extend([convolution(outputs, outputs), nn.BatchNorm2d(outputs)])
        self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.long(images) + self.short(images))


def residual(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small ResNet, whose head alone is trained; with the same numbers wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        blocks = [Residual(1, 4), nn.MaxPool2d(2), Residual(4, 6), nn.AdaptiveAvgPool2d(1)]
        body = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *blocks, nn.Flatten()).requires_grad_(False)
        return nn.Sequential(body, nn.Linear(6, classes))


HERE = f"python:{__name__}"
KINDS = (f"{HERE}:body", f"{HERE}:another_body", f"{HERE}:residual")


def experiment(**keys: Any) -> fed.Experiment:
    given: dict[str, Any] = {
        "data": {"kind": "digits", "clients": CLIENTS},
        "model": KINDS[0],
        "local": {"lr": 0.1, "steps": 3, "batch_size": 8},
        "rounds": {"count": ROUNDS},
        "seed": 4,
    }
    return fed.Experiment(**(given | keys))


def state(run: fed.Run) -> dict[str, Tensor]:
    return run.model.state_dict()


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, part in one.items() if not torch.equal(part, other[name])] == []


@pytest.mark.parametrize("batching", ["on", "off"])
def test_a_head_trains_as_it_does_alone_on_features(batching: str) -> None:
    generator = torch.Generator().manual_seed(1)
    images = {
        client: (torch.randn(9 + client, 64, generator=generator, dtype=torch.float64), torch.arange(9 + client) % 10)
        for client in range(CLIENTS)
    }
    torch.manual_seed(7)
    whole = Body().double().eval()
    features = {client: (whole.features(pair[0]).detach(), pair[1]) for client, pair in images.items()}
    keys = experiment(data=None, model=None, local={"lr": 0.5, "epochs": 2, "batch_size": 4, "momentum": 0.5})
    keys = keys.override({"simulation.batching": batching, "evaluation": "clients"})
    of_whole = fed.simulate(keys, data=fed.FederatedData(images), model=whole)
    of_head = fed.simulate(keys, data=fed.FederatedData(features), model=whole.head)
    for name, part in of_head.model.named_parameters():
        torch.testing.assert_close(dict(of_whole.model.named_parameters())[f"head.{name}"], part, rtol=0, atol=1e-12)
    assert not torch.equal(of_whole.model.get_parameter("head.weight"), whole.head.weight)
    assert_same_state(fixed_state(of_whole.model), fixed_state(whole))


@pytest.mark.parametrize(
    ("keys", "bytes_of_a_message"),
    [
        ({}, 4 * HEAD),
        ({"uplink": ["int8"]}, None),
        ({"uplink": [{"kind": "topk", "fraction": 0.1}, "int8", "zstd"], "error_feedback": "ef"}, None),
        ({"algorithm": "dpsgd", "topology": "complete"}, 4 * HEAD * (CLIENTS - 1)),
        ({"secure_aggregation": {"minimum_cohort": 3, "max_drop_out": 0.0, "max_weight": 500}}, None),
    ],
    ids=["plain", "int8", "chain", "peers", "masked"],
)
def test_as_many_bytes_travel_as_of_the_head_alone(keys: dict[str, Any], bytes_of_a_message: int | None) -> None:
    run = fed.simulate(experiment(**keys))
    generator = torch.Generator().manual_seed(1)
    features = {client: (torch.randn(9, 6, generator=generator), torch.arange(9) % 10) for client in range(CLIENTS)}
    of_head = fed.simulate(
        experiment(**keys, data=None, model=None), data=fed.FederatedData(features), model=nn.Linear(6, 10)
    )
    sent = [(line["bytes_up"], line["bytes_down"]) for line in run.metrics]
    if "zstd" not in str(keys):
        assert sent == [(line["bytes_up"], line["bytes_down"]) for line in of_head.metrics]
    if bytes_of_a_message is not None:
        assert [up for up, _ in sent] == [CLIENTS * bytes_of_a_message] * ROUNDS
    assert run.summary["parameters"] == HEAD


def test_patterns_of_names_choose_what_is_trained() -> None:
    keys = experiment(model={"kind": "mlp", "hidden": [7], "train": ["3.*"]})
    run = fed.simulate(keys)
    assert [name for name, part in run.model.named_parameters() if part.requires_grad] == ["3.weight", "3.bias"]
    fixed = 64 * 7 + 7  # of the first layer
    assert (run.summary["parameters"], run.summary["fixed_parameters"]) == (7 * 10 + 10, fixed)
    assert run.metrics[-1]["bytes_up"] == CLIENTS * 4 * (7 * 10 + 10)
    first = fed.simulate(keys.override({"rounds.count": 1, "local.lr": 1e-30}))
    assert_same_state(fixed_state(run.model), fixed_state(first.model))
    assert not torch.equal(state(run)["3.weight"], state(first)["3.weight"])


def over_grpc(given: fed.Experiment, folder: Path) -> dict[str, Tensor]:
    simulation = fed.simulate(given.override({"rounds.count": 1}))
    nodes: list[ThreadedNode] = []
    data = fed.clients.data.load(given.data, given.data_streams)
    begin = lambda port: nodes.extend(nodes_of(data, port, folder, KINDS))  # noqa: E731
    run = serve(given, listen="127.0.0.1:0", output=folder / "run", min_nodes=CLIENTS, on_listen=begin)
    for node in nodes:
        node.end()
    assert simulation.metrics[0]["bytes_up"] == run.metrics[0]["bytes_up"] <= CLIENTS * 4 * HEAD
    return state(run)


def over_flower(given: fed.Experiment, folder: Path) -> dict[str, Tensor]:
    run_app(given, folder, CLIENTS)
    return state(fed.Run.load(folder / "run"))


engines = pytest.mark.parametrize("deployed", [over_grpc, over_flower], ids=["grpc", "flower"])


@pytest.mark.processes
@engines
def test_deployed_runs_have_the_bits_of_the_simulation(
    deployed: Callable[[fed.Experiment, Path], dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    given = experiment(simulation={"batching": "off"})
    assert_same_state(deployed(given, tmp_path), state(fed.simulate(given)))


@pytest.mark.processes
@pytest.mark.long
@engines
@pytest.mark.parametrize(
    "codecs",
    [
        {},
        {"uplink": ["int8"]},
        {"uplink": [{"kind": "topk", "fraction": 0.1}, "int8"], "error_feedback": "ef"},
        {"downlink": ["int8"]},
    ],
    ids=["plain", "int8", "sparse", "down"],
)
def test_a_frozen_residual_body_sends_the_bytes_of_its_head(
    codecs: dict[str, Any],
    deployed: Callable[[fed.Experiment, Path], dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    given = experiment(model=KINDS[2], simulation={"batching": "off"}, **codecs)
    simulated = fed.simulate(given)
    generator = torch.Generator().manual_seed(1)
    features = {client: (torch.randn(9, 6, generator=generator), torch.arange(9) % 10) for client in range(CLIENTS)}
    keys = experiment(data=None, model=None, **codecs)
    of_head = fed.simulate(keys, data=fed.FederatedData(features), model=nn.Linear(6, 10))
    assert_same_state(deployed(given, tmp_path), state(simulated))
    lines = [run.metrics for run in (simulated, fed.Run.load(tmp_path / "run"), of_head)]
    sent = [[(line["bytes_up"], line["bytes_down"]) for line in of_run] for of_run in lines]
    assert sent[0] == sent[1]
    if "topk" not in str(codecs):  # whose bytes depend on where the largest numbers are
        assert sent[0] == sent[2]
    assert sent[0][-1][0] <= CLIENTS * 4 * HEAD


@pytest.mark.processes
@engines
def test_nodes_with_another_fixed_part_are_sent_the_servers_once(
    deployed: Callable[[fed.Experiment, Path], dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(monkeypatch)
    given = experiment(model=KINDS[1], simulation={"batching": "off"})
    with caplog.at_level(logging.INFO, logger="fed"):
        found = deployed(given, tmp_path)
    if deployed is over_grpc:
        assert sum("bytes are downloaded" in line for line in caplog.messages) == CLIENTS
    save_file(found, tmp_path / "server.safetensors")
    with_the_servers = given.override({"fixed": {"path": str(tmp_path / "server.safetensors")}})
    assert_same_state(found, state(fed.simulate(with_the_servers)))


def test_a_file_gives_what_is_not_trained(tmp_path: Path) -> None:
    torch.manual_seed(3)
    pretrained = Body().state_dict()
    save_file(pretrained, tmp_path / "body.safetensors")
    run = fed.simulate(experiment(model=KINDS[1], fixed={"path": str(tmp_path / "body.safetensors")}))
    assert_same_state(fixed_state(run.model), {name: pretrained[name] for name in fixed_state(run.model)})
    assert not torch.equal(state(run)["head.weight"], pretrained["head.weight"])


@pytest.mark.parametrize(
    ("held", "model", "problem"),
    [
        (None, KINDS[0], "must hold a model's tensors .*: restore the file"),
        ({"body.0.weight": torch.zeros(1)}, KINDS[0], r"must hold body.0.weight as torch.float32 \[6, 1, 3, 3\], .*"),
        ({"body.0.bias": torch.zeros(6)}, KINDS[0], r"must hold body.0.weight .* got none: give a file"),
        ({"a": torch.zeros(6)}, "mlp", "all of the model is: name model.train, too"),
    ],
    ids=["no file", "another shape", "missing", "nothing is fixed"],
)
def test_a_file_without_what_is_not_trained_is_refused(
    held: dict[str, Tensor] | None, model: str, problem: str, tmp_path: Path
) -> None:
    if held is not None:
        save_file(held, tmp_path / "body.safetensors")
    with pytest.raises(InvalidInput, match=problem):
        fed.simulate(experiment(model=model, fixed={"path": str(tmp_path / "body.safetensors")}))


def test_a_run_is_resumed_with_its_fixed_part_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    for name in ("first", "second"):
        save_file(Body().state_dict(), tmp_path / f"{name}.safetensors")
    given = experiment(fixed={"path": str(tmp_path / "first.safetensors")}, rounds={"count": 4})
    whole = fed.simulate(given, output=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        fed.simulate(given, output=tmp_path / "broken", observers=[after_round(stop)])
    (tmp_path / "first.safetensors").rename(tmp_path / "moved.safetensors")
    another = given.override({"fixed.path": str(tmp_path / "second.safetensors")})
    with pytest.raises(InvalidInput, match="resumed with the fixed part that it began with"):
        fed.simulate(another, output=tmp_path / "broken", resume=True)
    moved = given.override({"fixed.path": str(tmp_path / "moved.safetensors")})
    assert_same_state(state(fed.simulate(moved, output=tmp_path / "broken", resume=True)), state(whole))


class Drifting(Body):
    """A body that follows what it sees, although it is not trained."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.get_parameter("body.0.bias").add_(0.1)
        return super().forward(images)


def test_a_forward_pass_that_moves_the_fixed_part_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"for it is the same on all clients, got a change of body\.0\.bias"):
        fed.simulate(experiment(model=None), model=Drifting)


class Unfreezing(Body):
    """A body that is trained from its first forward pass on."""

    def forward(self, images: Tensor) -> Tensor:
        self.body.requires_grad_(True)
        return super().forward(images)


def test_a_forward_pass_that_chooses_what_is_trained_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"change requires_grad, .* got body\.0\.weight, which is trained after one"):
        fed.simulate(experiment(model=None), model=Unfreezing)


@pytest.mark.processes
def test_workers_change_no_bit() -> None:
    given = experiment(simulation={"batching": "off"})
    with_workers = given.override({"simulation.workers": 2})
    assert_same_state(state(fed.simulate(given)), state(fed.simulate(with_workers)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [("dpsgd", "ring"), pytest.param("allreduce", None, marks=pytest.mark.long)],
    ids=["mix", "replicas"],
)
def test_peers_have_the_bits_of_the_simulation(algorithm: str, topology: str | None, tmp_path: Path) -> None:
    keys = experiment(
        model={"kind": "mlp", "hidden": [7], "train": ["3.*"]},
        algorithm=algorithm,
        topology=topology,
        rounds={"count": 2, "deadline_s": 60.0},
        simulation={"batching": "off"},
        seed=0,  # that of the peers' data
    ).given_keys()
    simulated = fed.simulate(fed.Experiment(**keys))
    with processes(tmp_path, keys, CLIENTS) as peers:
        peers.start(*range(CLIENTS))
        peers.await_end()
        for peer, found in peers.models().items():
            assert_same_state(found, (simulated.models[peer] if topology else simulated.model).state_dict())


def agreed(given: fed.Experiment) -> str:
    prepared = Preparation(given, fed.clients.data.load(given.data, given.data_streams))
    return _hash(run_fingerprint(given, prepared.layout, None), prepared.fixed_part())


def test_peers_agree_on_the_fixed_part_wherever_its_file_is(tmp_path: Path) -> None:
    torch.manual_seed(3)
    for name in ("first", "second"):
        save_file(Body().state_dict(), tmp_path / f"{name}.safetensors")
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "first.safetensors").read_bytes())
    first, second, copied = (
        agreed(experiment(fixed={"path": str(tmp_path / f"{name}.safetensors")}))
        for name in ("first", "second", "copy")
    )
    assert first == copied != second
    assert agreed(experiment(model="mlp")) != agreed(experiment(model={"kind": "mlp", "train": ["3.*"]}))
