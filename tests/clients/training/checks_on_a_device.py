"""Checks on the pretended device, each a test: run in a process of their own by test_placement.py."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.aggregators.base import Phase
from fed.aggregators.robust.centres import Median, TrimmedMean
from fed.aggregators.robust.distances import Bulyan, GeometricMedian, Krum, MultiKrum
from fed.aggregators.transforms import Messages, Reducer
from fed.clients.data import FederatedData
from fed.clients.data.collate import Collating
from fed.clients.models import char_gru, mlp
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.measures import Metric
from fed.clients.scoring.metrics import accuracy, log_loss
from fed.clients.training import batched_trainer, devices, group_reading, worker
from fed.clients.training.batched_trainer import BatchedTrainer
from fed.clients.training.batches import Block
from fed.clients.training.evaluation import BatchedEvaluator, evaluate
from fed.clients.training.local_context import LocalContext
from fed.clients.training.optimizers import SGD
from fed.clients.training.private_trainer import ClientDraws, PrivateTrainer
from fed.clients.training.trainer import Trainer
from fed.clients.training.work_items import Train, Trained
from fed.clients.training.worker import Work
from fed.config.experiment import Local
from fed.errors import InvalidModel
from fed.privacy.dp_sgd import SamplePrivacy
from fed.simulations.simulation import Simulation
from fed.vectors import computing_device
from fed.vectors.layout import Layout
from tests.clients.training.client_groups import of_a_small_device
from tests.clients.training.pretended_graphs import PretendedGraphs
from tests.clients.training.pretended_lane import PretendedLane
from tests.pretended_device import Misplaced, PretendedDevice, pretended, register
from tests.simulations import users_parts
from tests.simulations.executors import trial

register()  # before the first gradient of this process
CPU = torch.device("cpu")
MEMORY_BYTES = 2**36
SIZES = (11, 8, 5)  # with a batch size of 4: unequal numbers of steps, and last batches that are short
Model = Callable[[], nn.Module]
Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the pretended device, of which PyTorch knows nothing."""
    monkeypatch.setattr(devices, "memory_bytes", lambda _: MEMORY_BYTES)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def convolutional() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.AvgPool2d(2))
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(18, 3)).double()


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def recurrent() -> nn.Module:
    return char_gru(7, embedding=3, hidden=4).double()


def perceptron() -> nn.Module:
    return mlp((5,), 3, hidden=(4,)).double()


INPUTS: dict[Model, Callable[[int], Tensor]] = {
    perceptron: lambda count: torch.randn(count, 5, dtype=torch.float64),
    dropout: lambda count: torch.randn(count, 5, dtype=torch.float64),
    with_batch_norm: lambda count: torch.randn(count, 5, dtype=torch.float64),
    convolutional: lambda count: torch.randn(count, 1, 8, 8, dtype=torch.float64),
    recurrent: lambda count: torch.randint(7, (count, 6)),
}
LOCALS = [{}, {"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "accumulate": 2}]
each_model = pytest.mark.parametrize("model", INPUTS, ids=lambda model: model.__name__)
each_local = pytest.mark.parametrize("keys", LOCALS, ids=str)


def made(model: Model) -> tuple[nn.Module, Pair]:
    torch.manual_seed(0)
    inputs = INPUTS[model](SIZES[0])
    shape = inputs.shape if model is recurrent else inputs.shape[:1]
    return model(), (inputs, torch.randint(3, shape))


def local(**keys: Any) -> Local:
    return Local(batch_size=4, epochs=2, **keys)


def of_one(module: nn.Module, samples: Pair, device: torch.device, keys: dict[str, Any]) -> tuple[Tensor, float]:
    trainer = Trainer(copy.deepcopy(module), cross_entropy, local(**keys), Phase(), device)
    start = Layout.of(module).pack(module)
    done = trainer.train(*start, samples, order=np.random.default_rng(0), seed=0)
    return done.params_V, done.train_loss


class Group:
    """Clients that train together, again and again."""

    def __init__(
        self,
        module: nn.Module,
        samples: Pair,
        device: torch.device,
        keys: dict[str, Any],
        collate: Collating | None = None,
    ) -> None:
        self._trainer = BatchedTrainer(
            copy.deepcopy(module), cross_entropy, local(**keys), Phase(), device, collate=collate
        )
        self._start = Layout.of(module).pack(module)
        self._pairs = [(samples[0][:size], samples[1][:size]) for size in SIZES]

    def train(self) -> tuple[Tensor, Sequence[float]]:
        orders = [partial(np.random.default_rng, number) for number in range(len(SIZES))]
        seeds = [partial(int, number) for number in range(len(SIZES))]
        (params_KV, integers_KI), losses = self._trainer.train(*self._start, self._pairs, orders, LocalContext(), seeds)
        assert params_KV.device == integers_KI.device == CPU
        return params_KV, losses


@each_model
@each_local
def test_one_client_has_the_numbers_of_the_cpu(model: Model, keys: dict[str, Any]) -> None:
    module, samples = made(model)
    expected_V, expected_loss = of_one(module, samples, CPU, keys)
    with pretended() as device:
        params_V, loss = of_one(module, samples, device.device, keys)
    assert device.done.count("aten::addmm") + device.done.count("aten::mm") > 0
    assert params_V.device == CPU
    torch.testing.assert_close(params_V, expected_V, rtol=0, atol=1e-12)
    assert loss == pytest.approx(expected_loss, abs=1e-12)


def stacked(samples: Sequence[Pair]) -> Pair:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


@pytest.mark.parametrize("collate", [None, Collating(stacked)], ids=["in memory", "by a collate"])
@pytest.mark.parametrize("model", [perceptron, convolutional, recurrent], ids=lambda model: model.__name__)
@each_local
def test_a_group_waits_once_and_agrees_with_the_cpu(
    model: Model, keys: dict[str, Any], collate: Collating | None
) -> None:
    module, samples = made(model)
    expected_KV, expected_losses = Group(module, samples, CPU, keys).train()
    with pretended() as device:
        group = Group(module, samples, device.device, keys, collate)
        group.train()  # records the step, and looks at what it computes
        device.waits.clear()
        params_KV, losses = group.train()
        assert device.waits == [len(device.done)]
    torch.testing.assert_close(params_KV, expected_KV, rtol=0, atol=1e-12)
    assert losses == pytest.approx(expected_losses, abs=1e-12)


@each_local
def test_graphs_and_copies_ahead_wait_for_nothing(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module, samples = made(perceptron)
    expected_KV, expected_losses = Group(module, samples, CPU, keys).train()
    backend = PretendedGraphs()
    lane = PretendedLane()
    monkeypatch.setattr(batched_trainer, "graphs_on", lambda device: backend)
    monkeypatch.setattr(batched_trainer, "lane_to", lambda device: lane)
    monkeypatch.setattr(batched_trainer, "room_for_samples", lambda device: 0.0)
    with pretended() as device:
        lane.device = device.device
        group = Group(module, samples, device.device, keys)
        group.train()
        group.train()  # steps are captured
        device.waits.clear()
        params_KV, losses = group.train()
        assert device.waits == [len(device.done)]
    assert {"replay"} <= set(backend.done)
    assert "send 1" in lane.done
    torch.testing.assert_close(params_KV, expected_KV, rtol=0, atol=1e-12)
    assert losses == pytest.approx(expected_losses, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, math.inf], ids=["finite", "infinite"])
@pytest.mark.parametrize("model", [perceptron, convolutional, recurrent], ids=lambda model: model.__name__)
def test_private_steps_wait_once_and_agree_with_the_cpu(model: Model, value: float) -> None:
    """Of clients one of whose samples has a gradient that is not finite, too: it counts as zero."""
    module, (inputs, targets) = made(model)
    if inputs.is_floating_point():
        inputs[1] += value
    held = [(inputs[:size], targets[:size]) for size in SIZES]

    def privately(device: torch.device) -> Callable[[], Tensor]:
        privacy = SamplePrivacy(clip=0.5, noise_multiplier=0.3)
        keys: dict[str, Any] = {"module": copy.deepcopy(module), "loss": cross_entropy, "local": local(momentum=0.9)}
        trainer = PrivateTrainer(**keys, phase=Phase(), device=device, privacy=privacy)

        def train() -> Tensor:
            draws = [ClientDraws(np.random.default_rng(row), np.random.default_rng(9 + row)) for row in range(3)]
            return trainer.train(*Layout.of(module).pack(module), held, draws)[0]

        return train

    expected_KV = privately(CPU)()
    assert expected_KV.isfinite().all()
    with pretended() as device:
        train = privately(device.device)
        train()  # records the steps, and looks at what they compute
        device.waits.clear()
        found_KV = train()
        assert device.waits == [len(device.done)]
    torch.testing.assert_close(found_KV, expected_KV, rtol=0, atol=1e-12)


@each_model
def test_scores_are_those_of_the_cpu(model: Model) -> None:
    module, samples = made(model)
    metrics = {"accuracy": accuracy}
    samples = (torch.cat(30 * [samples[0]]), torch.cat(30 * [samples[1]]))  # three batches
    expected = evaluate(copy.deepcopy(module), cross_entropy, metrics, samples, CPU)
    with pretended() as device:
        moved = copy.deepcopy(module).to(device.device)
        device.waits.clear()
        assert evaluate(moved, cross_entropy, metrics, samples, device.device) == pytest.approx(expected, abs=1e-12)
        assert device.waits == [len(device.done)]
        rows = [part.repeat(3, 1) for part in Layout.of(module).pack(module)]
        evaluator = BatchedEvaluator(module, cross_entropy, metrics, device.device)
        evaluator.scores(rows[0], rows[1], samples)  # records the forward pass
        device.waits.clear()
        scores = evaluator.scores(rows[0], rows[1], samples)
        assert device.waits == [len(device.done)]
        for score in scores:
            assert score.loss == pytest.approx(expected.loss, abs=1e-12)
            assert score.metrics == pytest.approx(expected.metrics, abs=1e-12)


def linear() -> nn.Module:
    return nn.Linear(5, 3, bias=False)


def work_of(
    data: FederatedData, model: Model, keys: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> tuple[Work, tuple[Tensor, Tensor]]:
    monkeypatch.setattr(devices, "devices_named", lambda name: [device])
    execution = {"batching": "on", "device": "cuda:0"}
    simulation = Simulation(fed.Experiment(simulation=execution, local={"batch_size": 4, **keys}), data, model)
    return Work(simulation.recipe, device), simulation.layout.pack(simulation.recipe.module)


@pytest.mark.parametrize("room", [4, 2], ids=["together", "in halves"])
def test_one_vector_of_a_groups_mean_leaves_the_device(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    clients = {client: (torch.randn(9 + client, 5).double(), torch.arange(9 + client) % 3) for client in range(4)}
    data = FederatedData(clients)
    task = Train((2, 0, 3, 1), 1, wants="mean")
    work, state = work_of(data, perceptron, {}, CPU, monkeypatch)
    expected, (expected_V, _) = work(task, state)
    with pretended() as device:
        work, state = work_of(data, perceptron, {}, device.device, monkeypatch)
        of_a_small_device(monkeypatch, room)
        work(task, state)  # records the steps
        device.waits.clear()
        device.read.clear()
        trained, (mean_V, _) = work(task, state)
    assert isinstance(trained, Trained)
    assert isinstance(expected, Trained)
    assert trained.train_losses == pytest.approx(expected.train_losses, abs=1e-12)
    torch.testing.assert_close(mean_V, expected_V, rtol=0, atol=1e-12)
    assert len(device.waits) == 4 // room
    assert max(device.read) == len(mean_V)


def test_a_mean_on_the_device_names_clients_that_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    nines = torch.full((9, 5), 9.0)
    inputs = {"still": torch.zeros(3, 5), "far": nines[:3], "near": torch.zeros(5, 5), "away": nines}
    data = FederatedData({client: (held, torch.zeros(len(held)).long()) for client, held in inputs.items()})
    task = Train(tuple(inputs), 1, wants="mean")
    keys = {"lr": 1e38, "batch_size": 9}  # the loss is finite, and the step is not
    work, state = work_of(data, linear, keys, CPU, monkeypatch)
    expected = work(task, state)
    with pretended() as device:
        work, _ = work_of(data, linear, keys, device.device, monkeypatch)
        found = work(task, state)
    assert isinstance(expected[0], Trained)
    assert [client for client, _ in expected[0].diverged] == ["far", "away"]
    assert found == expected


RUNS: list[dict[str, Any]] = [
    {"algorithm": "fedavg"},
    {"algorithm": "scaffold"},
    {"algorithm": {"kind": "fedprox", "mu": 0.1}, "local": {"lr": 0.1, "batch_size": 4, "momentum": 0.9}},
    {"algorithm": "ditto", "evaluation": {"kind": "clients", "fraction": 0.3}},
    {"algorithm": "fedavg", "uplink": ["int8"], "error_feedback": "ef"},
    {"algorithm": "dpsgd", "topology": "ring"},
    {"algorithm": {"kind": "median"}},
]


@pytest.mark.parametrize("keys", RUNS, ids=lambda keys: str(keys["algorithm"]))
@pytest.mark.parametrize("batching", ["on", "off"])
def test_a_run_has_the_numbers_of_the_cpu(keys: dict[str, Any], batching: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    clients = {client: (torch.randn(9 + client, 5).double(), torch.arange(9 + client) % 3) for client in range(4)}
    data = FederatedData(clients, test=(torch.randn(30, 5).double(), torch.arange(30) % 3))
    experiment = fed.Experiment(
        **{"local": {"lr": 0.1, "batch_size": 4}} | keys,
        rounds={"count": 2},
        simulation={"workers": 0, "batching": batching, "device": "cuda:0"},
    )
    expected = fed.simulate(experiment.override({"simulation.device": "cpu"}), data=data, model=perceptron)
    with pretended() as device:
        monkeypatch.setattr(devices, "devices_named", lambda name: [device.device])
        run = fed.simulate(experiment, data=data, model=perceptron)
    assert device.done
    assert "aten::sort" in device.done or keys["algorithm"] != {"kind": "median"}
    for name, value in expected.summary.items():
        if name.startswith("final_"):
            assert run.summary[name] == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(("precision", "in_training"), [("float32", "ieee"), ("tf32", "tf32")])
def test_products_have_the_precision_that_is_asked_for(
    precision: str, in_training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bool, set[str]] = {True: set(), False: set()}

    def noted(output: Tensor, target: Tensor) -> Tensor:
        if output.device != CPU:  # what is tried before the run is on the processor
            seen[torch.is_grad_enabled()] |= {cudnn.conv.fp32_precision, matmul.fp32_precision}
        return cross_entropy(output, target)

    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    torch.manual_seed(0)
    data = FederatedData({0: (torch.randn(9, 5), torch.arange(9) % 3)}, test=(torch.randn(3, 5), torch.arange(3)))
    simulation = {"workers": 0, "batching": "off", "device": "cuda:0"}
    experiment = fed.Experiment(local={"precision": precision}, rounds={"count": 1}, simulation=simulation)
    with pretended() as device:
        monkeypatch.setattr(devices, "devices_named", lambda name: [device.device])
        fed.simulate(experiment, data=data, model=lambda: mlp((5,), 3, hidden=(4,)), loss=noted)
    assert seen == {True: {in_training}, False: {"ieee"}}
    assert matmul.fp32_precision == before


class Putting(nn.Linear):
    """Calls an operation that is deterministic on no device."""

    def forward(self, inputs_BF: Tensor) -> Tensor:
        output_BC: Tensor = super().forward(inputs_BF)
        bias_1 = output_BC.new_zeros(1)
        bias_1.put_(torch.zeros(1, dtype=torch.int64, device=bias_1.device), output_BC.new_ones(1))
        return output_BC + bias_1


def simulate_putting(device: PretendedDevice, *, deterministic: bool = True, **keys: Any) -> fed.Run:
    torch.manual_seed(0)
    data = FederatedData({client: (torch.randn(9, 5), torch.arange(9) % 3) for client in range(3)})
    simulation = {"workers": 0, "device": "cuda", "deterministic": deterministic}
    experiment = fed.Experiment(rounds={"count": 1}, simulation=simulation, **keys)
    return fed.simulate(experiment, data=data, model=lambda: Putting(5, 3))


@pytest.mark.parametrize("evaluation", ["coordinator", {"kind": "clients", "fraction": 0.3}], ids=str)
def test_what_is_not_deterministic_is_refused_in_one_sentence(evaluation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended() as device:
        monkeypatch.setattr(devices, "devices_named", lambda name: [device.device])
        with pytest.raises(InvalidModel, match=r"^put_ has no deterministic algorithm on the device pretended:0, at "):
            simulate_putting(device, evaluation=evaluation)
        assert simulate_putting(device, deterministic=False, evaluation=evaluation).summary["status"] == "finished"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_workers_and_devices_change_no_bit(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = [3, 17, 8, 1, 30, 12, 5]
    data = FederatedData({size: (torch.randn(size, 5), torch.arange(size) % 3) for size in sizes})
    simulation = {"device": "cuda", "batching": "on", "group": 2, "executor": f"python:{trial.__name__}:Pickled"}
    experiment = fed.Experiment(
        algorithm=algorithm,
        rounds={"count": 2},
        local={"batch_size": 4},
        evaluation={"kind": "clients", "fraction": 0.3},
        simulation={**simulation, "workers": 1},
    )
    found = []
    with pretended() as device:
        for workers, gpus in ((1, 1), (1, 2), (2, 2), (3, 2), (4, 2)):
            monkeypatch.setattr(devices, "devices_named", lambda name, gpus=gpus: [device.device] * gpus)
            given = experiment.override({"simulation.workers": workers})
            run = fed.simulate(given, data=data, model=lambda: mlp((5,), 3, hidden=(4,)))
            found.append(users_parts.outcome(run))
    assert device.done
    assert all(other == found[0] for other in found)


def test_a_runs_group_is_by_memory_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = FederatedData({client: (torch.randn(9, 5).double(), torch.arange(9) % 3) for client in range(4)})
    keys: dict[str, Any] = {"evaluation": {"kind": "clients", "fraction": 0.3}, "loss": "cross_entropy"}
    experiment = fed.Experiment(**keys, rounds={"count": 2}, simulation={"workers": 0, "device": "cuda"})
    model_bytes = sum(part.nbytes for part in perceptron().parameters())
    # Three clients with the moments of Adam: the pretended device counts nothing else.
    memories_bytes = [MEMORY_BYTES, 5 * 3 * 2 * model_bytes]
    with pretended() as device:
        both = [torch.device(device.device.type, place) for place in range(2)]
        monkeypatch.setattr(devices, "devices_named", lambda name: both)
        monkeypatch.setattr(devices, "memory_bytes", lambda one: memories_bytes[one.index])
        run = fed.simulate(experiment, data=data, model=perceptron, output=tmp_path)
        assert "smallest GPU's memory" in run.summary["training"]
        (tmp_path / "summary.json").unlink()
        memories_bytes[1] = MEMORY_BYTES
        fed.simulate(experiment, data=data, model=perceptron, output=tmp_path, resume=True)
        anew = fed.simulate(experiment, data=data, model=perceptron)
    kept = fed.Experiment.load(tmp_path / "experiment.yaml").simulation
    assert (kept.batching, kept.group) == ("on", 3)
    assert anew.experiment.simulation.group == 128


@pytest.mark.parametrize("labels", [[0, 2, 1, 0], [0, -100, 1, -100], [-100] * 4], ids=str)
@pytest.mark.parametrize("metric", [accuracy, log_loss], ids=lambda metric: metric.__name__)
def test_streamed_metrics_leave_labels_out_without_a_look(metric: Metric, labels: list[int]) -> None:
    scores = torch.eye(3)[[0, 2, 0, 1]]
    expected = torch.as_tensor(metric(scores, torch.tensor(labels)))
    with pretended() as device:
        found = metric(scores.to(device.device), torch.tensor(labels).to(device.device))
        assert isinstance(found, Tensor)
        assert device.waits == [0, 0]  # for the copies alone
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


RULES: list[Reducer] = [
    Median(),
    TrimmedMean(attackers=2),
    Krum(attackers=2),
    MultiKrum(attackers=2),
    Bulyan(attackers=2),
    GeometricMedian(attackers=2),
]


@pytest.mark.parametrize("weights", ["equal", "unequal"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_robust_rules_compute_on_the_device(rule: Reducer, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing_device, "_NUMBERS_AT_ONCE", 11 * 7)  # several parts
    generator = torch.Generator().manual_seed(1)
    messages_SM = torch.randn(11, 40, generator=generator, dtype=torch.float64)
    weights_S = torch.ones(11, dtype=torch.float64)
    if weights == "unequal" and isinstance(rule, Median | TrimmedMean | GeometricMedian):
        weights_S += torch.arange(11) / 7
    messages = Messages(messages_SM, weights_S)
    _, expected = rule.reduce(None, messages, np.random.default_rng(0))
    with pretended() as device, computing_device.computing_on(device.device):
        _, found = rule.reduce(None, messages, np.random.default_rng(0))
    assert "aten::sort" in device.done or "aten::addmm_" in device.done
    assert found.vectors_SM.device == CPU
    torch.testing.assert_close(found.vectors_SM, expected.vectors_SM, rtol=0, atol=1e-12)
    assert torch.equal(found.weights_S, expected.weights_S)


def train_and_score(device: PretendedDevice) -> None:
    """A group's training, and the score of a model by a loss with weights."""
    module, samples = made(perceptron)
    group = Group(module, samples, device.device, {"momentum": 0.9})
    group.train()
    device.waits.clear()
    group.train()
    if device.waits != [len(device.done)]:
        raise Misplaced("the device is waited for between steps")
    loss = worker.on_device(nn.CrossEntropyLoss(torch.ones(3).double()), device.device)
    evaluate(module.to(device.device), loss, {}, samples, device.device)


def forgotten_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_reading.GroupInMemory, "_to_device", lambda self, leaf: leaf.contiguous())


def forgotten_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "on_device", lambda measure, device: measure)


def forgotten_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_trainer, "read_back", list)


def read_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SGD.step

    def reading(self: SGD, x_P: Tensor, gradient_P: Tensor) -> None:
        assert float(gradient_P.sum()) < 1e9
        step(self, x_P, gradient_P)

    monkeypatch.setattr(SGD, "step", reading)


def copy_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Block.batches

    def waiting(self: Block, step: int, rows: int) -> Any:
        torch.zeros(3).to(register())
        return batches(self, step, rows)

    monkeypatch.setattr(Block, "batches", waiting)


def draw_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SGD.step

    def drawing(self: SGD, x_P: Tensor, gradient_P: Tensor) -> None:
        noise_P = torch.randn(x_P.shape, generator=torch.Generator(), device=x_P.device)
        step(self, x_P, gradient_P + 0 * noise_P)

    monkeypatch.setattr(SGD, "step", drawing)


FAULTS = [
    forgotten_inputs,
    forgotten_weights,
    forgotten_answer,
    read_between_steps,
    copy_that_waits,
    draw_of_the_processor,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended() as device:
        train_and_score(device)
    plant(monkeypatch)
    # An error of a loss is told as the loss's.
    with pretended() as device, pytest.raises((AssertionError, InvalidModel)):
        train_and_score(device)
