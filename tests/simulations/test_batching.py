"""Batched where that changes nothing but rounding, one by one elsewhere, and a reason for either."""

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.clients.models import mlp
from fed.errors import InvalidExperiment
from fed.simulations.batching import Batching, _Counter, room_in
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from tests.clients.training import readers
from tests.clients.training.client_groups import of_a_small_device
from tests.devices import Current
from tests.simulations import users_parts as parts
from tests.thinned import thinned


def chosen(data: fed.FederatedData | None = None, own: Any = parts.small, loss: Any = None, **keys: Any) -> Batching:
    """How clients train: with data, a model and a loss of one's own, and keys of the experiment."""
    return Simulation(fed.Experiment(**keys), data or parts.unequal(), own, loss).batching


# What stands against it.


class Own(nn.Module):
    """Two layers, and things that a user may keep beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = parts.small()
        self.calls, self.rate, self.seen, self.by_name = 0, 1.0, [0], {"calls": {"training": 0}}
        self.drawn, self.rolled = np.random.default_rng(0), random.Random(0)
        self.total = torch.zeros(1)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.change(inputs)
        outputs: Tensor = self.layers(inputs)
        return outputs

    def change(self, inputs: Tensor) -> None:
        """Nothing."""


def changing(change: Callable[[Any, Tensor], object]) -> Callable[[], nn.Module]:
    return type("Changing", (Own,), {"change": lambda self, inputs: change(self, inputs)})


class Branching(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


class Reading(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * float(inputs.abs().max()))


class Projecting(nn.LSTM):
    """Its state is projected, which no operations of its own compute."""

    def __init__(self) -> None:
        super().__init__(1, 4, proj_size=3, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        outputs: Tensor = super().forward(inputs[..., None])[0]
        return outputs[:, -1]


class Centring(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs - inputs.mean(0))


class Sampling(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + torch.randn_like(inputs))


class Permuting(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs[:, torch.randperm(4)])


class Seeded(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + torch.randn(4, generator=torch.Generator().manual_seed(1)))


class Skipping(nn.Linear):
    """Stochastic depth by a Python branch: clients that skip the layer take another step than those that do not."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if torch.rand(()) < 0.5 else 2 * outputs


class Filling(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * torch.zeros(4).bernoulli_(0.5))


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, weight=torch.tensor([1.0, 2.0, 5.0], device=output.device))


def steered(output: Tensor, target: Tensor) -> Tensor:
    """Is a mean over samples, and its gradient is not."""
    return nn.functional.cross_entropy(output, target) + (output.sum() - output.sum().detach())


def of_one_class(samples: int) -> fed.FederatedData:
    """The first client holds a single class, so that it shows nothing of what weighs others."""
    inputs, _ = parts.samples(samples, 0)
    first = (inputs, torch.zeros(samples, dtype=torch.int64))
    return fed.FederatedData({0: first, 1: parts.samples(9, 1)}, parts.samples(9, 2))


def pairs() -> fed.FederatedData:
    return fed.FederatedData({number: parts.samples(6, number) for number in range(2)})


def letters() -> fed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(20, (12, 8), generator=generator)
    return fed.FederatedData(dict.fromkeys((0, 1), (texts, (texts + 1) % 20)))


class FrozenBatchNorm(nn.BatchNorm1d):
    """Never in training mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


def partly_labelled() -> fed.FederatedData:
    """A client that is not the first has a label that a loss may be told to ignore."""
    inputs, labels = parts.samples(9, 1)
    return fed.FederatedData({0: parts.samples(9, 0), 1: (inputs, labels.where(torch.arange(9) != 7, -100))})


def flooded(output: Tensor, target: Tensor) -> Tensor:
    """Ishida et al. 2020: the mean over samples where scores are as an untrained model's, and no other's."""
    return (nn.functional.cross_entropy(output, target) - 0.5).abs() + 0.5


def prior(output: Tensor, target: Tensor) -> Tensor:
    shares = output.softmax(1).mean(0)
    return nn.functional.cross_entropy(output, target) + 0.1 * (shares * shares.log()).sum()


OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "noise in evaluation": ({"own": lambda: Sampling(4, 3)}, "in evaluation it draws random numbers"),
    "permutation": ({"own": lambda: Permuting(4, 3)}, "it draws by randperm, which clients in a group cannot"),
    "own stream": ({"own": lambda: Seeded(4, 3)}, "it draws from a generator of its own"),
    "chance": ({"own": lambda: Skipping(4, 3)}, "what it does depends on the numbers it computes"),
    "chance by a shared tensor": ({"own": lambda: Filling(4, 3)}, "it draws into a tensor that all clients share"),
    "batch norm": ({"own": parts.with_batch_norm, "data": pairs()}, r"changes 1\.running_mean"),
    "frozen batch norm": ({"own": lambda: parts.small(FrozenBatchNorm(6)), "data": pairs()}, "it has BatchNorm"),
    "ignored labels": ({"loss": nn.CrossEntropyLoss(), "data": partly_labelled()}, "labels may be below 0"),
    "branches": ({"own": lambda: Branching(4, 3)}, "what it does depends on the numbers it computes"),
    "numbers": ({"own": lambda: Reading(4, 3)}, "what it does depends on the numbers it computes"),
    "batch mean": ({"own": lambda: Centring(4, 3)}, "must not depend on others of its batch"),
    "buffer": ({"own": changing(lambda own, _: own.steps.add_(1))}, "changes steps"),
    "unsaved": ({"own": changing(lambda own, _: own.unsaved.add_(1))}, "changes unsaved"),
    "new buffer": ({"own": changing(lambda own, _: setattr(own, "steps", own.steps + 1))}, "changes steps"),
    "parameter": (
        {"own": changing(lambda own, _: own.layers[0].weight.data.clamp_(-0.01, 0.01))},
        r"changes layers\.0\.weight",
    ),
    "number": ({"own": changing(lambda own, _: setattr(own, "calls", own.calls + 1))}, "changes calls"),
    "rate": ({"own": changing(lambda own, _: setattr(own, "rate", own.rate * 0.9))}, "changes rate"),
    "list": ({"own": changing(lambda own, _: own.seen.append(1))}, "changes seen"),
    "mapping": ({"own": changing(lambda own, _: own.by_name["calls"].update(training=1))}, "changes by_name"),
    "tensor": ({"own": changing(lambda own, _: own.total.add_(1))}, "changes total"),
    "output": ({"own": changing(lambda own, inputs: setattr(own, "last", inputs))}, "changes last"),
    "own generator": ({"own": changing(lambda own, _: own.drawn.random())}, "changes drawn"),
    "own dice": ({"own": changing(lambda own, _: own.rolled.random())}, "changes rolled"),
    "numpy": ({"own": changing(lambda own, _: np.random.rand())}, "Python's or NumPy's random generator"),
    "python": ({"own": changing(lambda own, _: random.random())}, "Python's or NumPy's random generator"),
    "weights of classes": ({"loss": weighted}, "no mean over samples|mean of its samples' losses"),
    "weights of unseen classes": ({"loss": weighted, "data": of_one_class(12)}, "its loss is no mean over samples"),
    "weights, one sample": ({"loss": weighted, "data": of_one_class(1)}, "its loss is no mean over samples"),
    "flooding": ({"loss": flooded}, "its loss is no mean over samples"),
    "prior": ({"loss": prior}, "its loss is no mean over samples|a group.s gradients differ"),
    "sum": ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "mean of its samples' losses"),
    "sum, one sample": ({"loss": nn.CrossEntropyLoss(reduction="sum"), "data": of_one_class(1)}, "no mean"),
    "gradient": ({"loss": steered, "local": {"lr": 1e-12}}, "a group's gradients differ from those of its clients"),
    "projections": ({"own": Projecting}, "PyTorch cannot compute lstm for many models at once"),
    "float16": ({"local": {"precision": "float16"}}, "float16 scales each client's loss"),
}
DRAWING = {"noise in evaluation", "own stream", "chance by a shared tensor"}
"""Those that are refused on a GPU because they draw at all."""
ON_A_GPU = "it draws random numbers, which come from each client's own stream"


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("obstacle", thinned(OBSTACLES, quick=18))
def test_unbatchable_models_train_one_by_one_or_are_refused(obstacle: str) -> None:
    given, reason = OBSTACLES[obstacle]
    if obstacle in DRAWING and Current.device.type != "cpu":
        reason = ON_A_GPU
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = chosen(**given)
    assert (found.is_batched, found.group) == (False, 1)
    with pytest.raises(InvalidExperiment, match=r"simulation\.batching must be auto or off here, got on: ") as caught:
        chosen(**given, simulation={"batching": "on"})
    for said in (found.reason, str(caught.value)):
        assert re.search(reason, said)
        assert "\n" not in said
        assert not said.endswith(".")
    assert torch.equal(before, torch.get_rng_state()), "the user's generator"
    off = chosen(**given, simulation={"batching": "off"})
    assert off == Batching(False, 1, "simulation.batching is off")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"own": parts.with_dropout},
        {"own": lambda: changing(lambda own, inputs: None)()},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"loss": parts.brier},
        {"loss": parts.squared},
        {"data": of_one_class(1)},
        {"own": None, "data": letters(), "model": {"kind": "char_gru", "hidden": 8}},
        {"local": {"lr": 1e-9}},
        {"local": {"lr": 1e30}},
        {"local": {"optimizer": "adam", "accumulate": 3, "batch_size": 2}},
        {"local": {"precision": "bfloat16"}},
        {"algorithm": {"kind": "fedprox", "mu": 1.0}},
        {"data": fed.FederatedData({0: parts.samples(8, 0), 1: parts.samples(5, 1)})},
    ],
    ids=[
        "plain",
        "dropout",
        "model",
        "smoothing",
        "brier",
        "squared",
        "one-class",
        "recurrent",
        "tiny-steps",
        "huge-steps",
        "adam",
        "bfloat16",
        "fedprox",
        "few-samples",
    ],
)
def test_what_can_be_batched_is(given: dict[str, Any]) -> None:
    found = chosen(**given)
    most = 32 if Current.device.type == "cpu" else 128
    if given.get("own") is parts.with_dropout and Current.device.type != "cpu":
        assert found.reason.startswith(ON_A_GPU)
        return
    assert (found.is_batched, found.group) == (True, most), found.reason
    assert found.reason == f"up to {most} clients train as one computation, the most that simulation.group=auto takes"


@pytest.mark.usefixtures("device")
def test_rounding_in_half_precision_tells_nothing_against_batching() -> None:
    """A single sample's gradient is off by a quarter here, one by one."""
    generator = torch.Generator().manual_seed(0)

    def pictures(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 1, 14, 14, generator=generator), torch.randint(3, (count,), generator=generator)

    data = fed.FederatedData({number: pictures(7 + 5 * number) for number in range(3)})
    model = {"kind": "cnn", "channels": [4, 8], "hidden": 16}
    assert chosen(data, None, model=model, local={"batch_size": 8, "precision": "bfloat16"}).is_batched


@pytest.mark.usefixtures("device")
def test_overflow_on_every_route_does_not_prevent_batching() -> None:
    inputs, labels = parts.samples(8, 0)
    data = fed.FederatedData({0: (inputs * 1e30, labels), 1: (inputs, labels)})
    assert chosen(data, loss=parts.squared).is_batched


# What does not pay.


def wide(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def pictures() -> fed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(16, 1, 28, 28, generator=generator), torch.arange(16) % 3
    return fed.FederatedData({0: pair, 1: pair})


def convolving(channels: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 5), nn.ReLU(), nn.Conv2d(channels, 16, 5), nn.Flatten(), nn.Linear(6400, 3)
    )


def multiplying() -> nn.Module:
    rows = nn.Sequential(nn.Linear(28, 256), nn.ReLU(), nn.Linear(256, 256))
    return nn.Sequential(rows, nn.Flatten(), nn.Linear(28 * 256, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU memory decides")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"own": wide(200_000)}, "two clients' parameters do not fit into 2 MiB of cache"),
        ({"own": multiplying, "data": pictures()}, "million operations a client, and batching pays up to 48 million"),
        ({"own": convolving, "data": pictures()}, "million operations a client, and batching pays up to 800 million"),
        ({"simulation": {"group": 1}}, "simulation.group is 1"),
        ({"rounds": {"cohort": 1}}, "a round trains one client"),
        ({"algorithm": {"kind": "centralized"}}, "a round trains one client"),
    ],
    ids=["parameters", "products", "convolutions", "group", "cohort", "centralized"],
)
def test_unprofitable_batching_is_off_unless_requested(given: dict[str, Any], reason: str) -> None:
    found = chosen(**given)
    assert (found.is_batched, found.group) == (False, 1)
    assert reason in found.reason
    assert chosen(**{**given, "simulation": {**given.get("simulation", {}), "batching": "on"}}).is_batched


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU memory decides")
def test_group_size_is_requested_or_fits_the_cache() -> None:
    parameters = 8 * 1000 + 3
    room = 2**21 // (4 * parameters)
    assert room < 70
    for asked in (2, room, room + 1, 10_000):
        found = chosen(own=wide(1000), simulation={"group": asked})
        assert found.group == min(asked, room)
        assert ("simulation.group" in found.reason) == (asked <= room)
        assert chosen(own=wide(1000), simulation={"batching": "on", "group": asked}).group == asked
    assert chosen(own=wide(200_000), simulation={"batching": "on"}).reason.startswith("up to 1 client trains as one")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU memory decides")
@pytest.mark.parametrize(("channels", "group"), [(8, 5), (16, 3), (32, 2)])
def test_groups_that_convolve_fit_the_cache_by_their_images(channels: int, group: int) -> None:
    """Of 16 samples, the largest output of a convolution counts. Two clients are always worth it."""
    largest_bytes = 16 * 4 * max(24 * 24 * channels, 20 * 20 * 16)
    assert group == max(2**21 // largest_bytes, 2)
    found = chosen(own=lambda: convolving(channels), data=pictures(), local={"batch_size": 16})
    assert (found.is_batched, found.group) == (True, group)
    assert "to keep their images within 2 MiB of cache" in found.reason


# What comes of it.


LOCALS: dict[str, dict[str, Any]] = {
    "momentum": {"batch_size": 4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "steps": {"batch_size": 3, "accumulate": 2, "steps": 7},
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("local", thinned(LOCALS, quick=1))
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "fedavgm", "bmuf", "dpsgd", "local", "centralized"])
def test_whole_runs_agree_with_those_of_clients_one_by_one(algorithm: str, local: str) -> None:
    """In float64, so that nothing but rounding, 1e-16 a step, can tell them apart."""
    keys = fed.Experiment(
        algorithm={"kind": algorithm},
        local=LOCALS[local],
        rounds={"count": 4, "cohort": "all" if algorithm == "dpsgd" else 6},
        seed=1,
        simulation={"batching": "on", "group": 4, "workers": 0},
    )
    runs = [
        simulate(run, data=parts.unequal(torch.float64), model=parts.double)
        for run in (keys, keys.override({"simulation.batching": "off"}))
    ]
    assert [run.experiment.simulation.batching for run in runs] == ["on", "off"]
    for one, other in zip(*(states_of(run) for run in runs), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)
    for batched, alone in zip(runs[0].metrics, runs[1].metrics, strict=True):
        assert batched.keys() == alone.keys()
        for key in batched.keys() - {"wall_s"}:
            assert batched[key] == pytest.approx(alone[key], abs=1e-10), key


def states_of(run: fed.Run) -> list[Tensor]:
    return [part for module in (run.model, *run.models.values()) for part in module.state_dict().values()]


@pytest.mark.parametrize(
    ("memory_gb", "client_mb", "group"),
    [(80, 1, 128), (80, 200, 64), (8, 200, 8), (8, 1000, 1), (8, 5000, 1)],  # a fifth is 80, 8.2, 1.6 and 0.3 clients
)
def test_a_group_has_room_in_a_gpu(memory_gb: int, client_mb: int, group: int) -> None:
    assert room_in(memory_gb * 2**30, client_mb * 2**20) == group


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("batching", thinned(["auto", "on", "off"], quick=1))
def test_saved_experiment_repeats_the_run_to_the_bit(batching: str, tmp_path: Path) -> None:
    model = {"kind": "mlp", "hidden": [300]}  # of which 23 clients fit into the cache of a CPU
    keys = fed.Experiment(
        data={"clients": 30}, model=model, rounds={"count": 2}, simulation={"batching": batching, "group": 28}
    )
    first = simulate(keys, output=tmp_path / "run")
    kept = fed.Experiment.load(tmp_path / "run" / "experiment.yaml")
    assert kept == first.experiment
    assert kept.simulation.batching == ("off" if batching == "off" else "on")
    room = math.floor(2**21 / 4 / first.summary["parameters"])
    is_bounded = batching == "auto" and Current.device.type == "cpu"
    assert kept.simulation.group == (room if is_bounded else 28)
    assert parts.outcome(simulate(kept)) == parts.outcome(first)
    assert kept == simulate(kept).experiment
    other = simulate(kept.override({"simulation": {"batching": "off" if kept.simulation.batching == "on" else "on"}}))
    assert parts.outcome(other) != parts.outcome(first), "rounding"


@pytest.mark.usefixtures("device")
def test_what_falls_back_says_so_in_the_experiment_kept() -> None:
    run = simulate(fed.Experiment(rounds={"count": 1}), data=parts.unequal(), model=lambda: Skipping(4, 3))
    assert run.experiment.simulation.batching == "off"
    again = simulate(run.experiment, data=parts.unequal(), model=lambda: Skipping(4, 3))
    assert parts.outcome(run) == parts.outcome(again)


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_operations_of_recurrent_layers_are_counted(layer: Callable[..., nn.Module], gates: int) -> None:
    """Forward 2 B T G H (I + H), as many for gradients of the weights, and of the states those of the second part."""
    batch, steps, inputs, hidden = 10, 7, 5, 6

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = layer(inputs, hidden, batch_first=True)

        def forward(self, inputs_BTI: Tensor) -> Tensor:
            outputs_BTH: Tensor = self.recurrent(inputs_BTI)[0]
            return outputs_BTH[:, -1]

    data = fed.FederatedData({0: (torch.randn(batch, steps, inputs), torch.zeros(batch, dtype=torch.int64))}, classes=2)
    simulation = Simulation(fed.Experiment(simulation={"batching": "off"}, local={"batch_size": batch}), data, Last)
    found = _Counter.of_a_step(simulation.recipe, data.read(0)).operations
    of_inputs, of_states = (2 * batch * gates * hidden * size for size in (inputs, hidden))
    forward, weights, states = steps * (of_inputs + of_states), steps * of_inputs + steps * of_states, steps * of_states
    # of the first step's state, which is zero, a kernel may leave out one of the products
    assert forward + weights + states - 2 * of_states <= found <= forward + weights + states


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("model", "line"),
    [
        (lambda: Skipping(4, 3), "if torch.rand(()) < 0.5"),
        (lambda: Reading(4, 3), "float(inputs.abs().max())"),
        (Projecting, "super().forward("),
    ],
    ids=["branch on a draw", "numbers", "projections"],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_the_reason_names_the_line_in_the_model(model: Callable[[], nn.Module], line: str) -> None:
    reason = chosen(own=model).reason
    found = re.search(r", at (.*):(\d+)$", reason)
    assert found is not None, reason
    assert line in Path(found[1]).read_text(encoding="utf-8").splitlines()[int(found[2]) - 1]


@pytest.mark.usefixtures("device")
def test_draws_of_several_lengths_need_padding_to_one() -> None:
    data = fed.FederatedData({client: readers.classified(client) for client in range(2)})
    given: dict[str, Any] = {"own": lambda: readers.Reader(dropout=0.1), "data": data}
    pad = {"kind": "pad", "mask": "attention_mask"}
    found = chosen(**given, collate=pad)
    if Current.device.type != "cpu":
        assert found.reason.startswith(ON_A_GPU)
        return
    assert "it draws random numbers, and its collate gives clients' batches of several lengths: pad to" in found.reason
    assert chosen(**given, collate=pad | {"length": 16}).is_batched


@pytest.mark.usefixtures("device")
def test_a_model_that_looks_at_padding_is_not_batched() -> None:
    data = fed.FederatedData({client: readers.classified(client, 12) for client in range(2)})
    found = chosen(own=lambda: Unmasked(), data=data, collate="pad")
    assert found == Batching(False, 1, "a group's gradients differ from those of its clients one by one")


class Unmasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Sequential(nn.Embedding(readers.WORDS, 8), nn.Linear(8, 3))

    def forward(self, input_ids: Tensor) -> Tensor:
        scores: Tensor = self.read(input_ids).mean(1)
        return scores


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_groups_computed_in_parts_are_said_once(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    data = fed.FederatedData({client: (torch.randn(6, 3).double(), torch.arange(6) % 2) for client in range(5)})
    simulation = {"workers": 0, "batching": "on", "group": 5}
    keys: dict[str, Any] = {"algorithm": algorithm, "rounds": {"count": 3}, "simulation": simulation}
    whole = fed.simulate(fed.Experiment(**keys), data=data, model=lambda: mlp((3,), 2, hidden=(4,)).double())
    with monkeypatch.context() as small:
        of_a_small_device(small, room=2)
        run = fed.simulate(fed.Experiment(**keys), data=data, model=lambda: mlp((3,), 2, hidden=(4,)).double())
    (said,) = [record.message for record in caplog.records if "does not fit" in record.message]
    assert said == (
        "a group of 5 clients does not fit into the device's memory, and is computed in parts of 2 or fewer: this "
        "changes results by rounding; set simulation.group to 2 to compute all groups alike"
    )
    assert run.summary["training"] == f"{whole.summary['training']}; in parts of at most 2, for want of memory"
    for ours, theirs in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
