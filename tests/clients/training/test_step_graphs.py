"""Steps that are captured once and replayed: the same bits, whatever changes between the steps."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.aggregators.base import Phase
from fed.aggregators.fedprox import FedProx
from fed.clients.models import cnn, mlp
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training import batched_trainer, step_graphs
from fed.clients.training.batched_trainer import BatchedTrainer
from fed.clients.training.devices import read_back
from fed.clients.training.local_context import LocalContext
from fed.clients.training.step_graphs import CudaGraphs, StepGraphs
from fed.config.experiment import Local
from fed.vectors.layout import Layout
from tests.clients.training.pretended_cuda import PretendedCuda
from tests.clients.training.pretended_graphs import PretendedGraphs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
REFUSAL = "operation not permitted when stream is capturing"


def perceptron() -> nn.Module:
    return mlp((1, 8, 8), 3, hidden=(4,))


def convolutional() -> nn.Module:
    return cnn((1, 8, 8), 3)


class Groups:
    """Groups of clients that one trainer trains, one after another."""

    def __init__(
        self, keys: dict[str, Any], backend: Any, make: Callable[[], nn.Module] = perceptron, device: torch.device = CPU
    ) -> None:
        torch.manual_seed(0)
        self.module = make()
        rule = FedProx(mu=0.5) if keys.pop("rule", None) else None
        local = Local(**{"batch_size": 4, "epochs": 2, **keys})
        self.trainer = BatchedTrainer(copy.deepcopy(self.module), cross_entropy, local, Phase(rule=rule), device)
        self.trainer._graphs = None if backend is None else StepGraphs(backend)

    def train(self, sizes: Sequence[int], seed: int, lr: float | None = None) -> tuple[Tensor, list[float]]:
        generator = torch.Generator().manual_seed(seed)
        pairs = [(torch.randn(size, 1, 8, 8, generator=generator), torch.arange(size) % 3) for size in sizes]
        orders = [partial(np.random.default_rng, [seed, number]) for number in range(len(sizes))]
        start_V, integers_I = Layout.of(self.module).pack(self.module)
        (params_KV, _), losses = self.trainer.train(
            start_V + seed / 100, integers_I, pairs, orders, LocalContext(lr=lr)
        )
        return params_KV, losses


def of_all(groups: Groups) -> list[tuple[Tensor, list[float]]]:
    """Results of groups that differ in their samples, then in the number of clients, and then in their step size."""
    unequal = (15, 11, 5)
    return [
        groups.train(unequal, 1),
        groups.train(unequal, 2),
        groups.train(unequal[:2], 3),
        groups.train(unequal, 4, lr=0.03),
        groups.train(unequal, 5, lr=0.03),
    ]


def assert_equal(ours: Sequence[tuple[Tensor, list[float]]], theirs: Sequence[tuple[Tensor, list[float]]]) -> None:
    for (params_KV, losses), (expected_KV, expected_losses) in zip(ours, theirs, strict=True):
        assert torch.equal(params_KV, expected_KV)
        assert losses == expected_losses


KEYS: list[dict[str, Any]] = [{}, {"momentum": 0.9}, {"momentum": 0.9, "accumulate": 2}, {"rule": True}]
each_keys = pytest.mark.parametrize("keys", KEYS, ids=str)


@pytest.mark.parametrize(
    ("make", "keys"), [*((perceptron, keys) for keys in KEYS), (convolutional, {})], ids=lambda part: str(part)[:24]
)
def test_graphs_change_no_bit(make: Callable[[], nn.Module], keys: dict[str, Any]) -> None:
    backend = PretendedGraphs()
    assert_equal(of_all(Groups(dict(keys), backend, make)), of_all(Groups(dict(keys), None, make)))
    assert backend.done.count("capture") >= 3
    assert backend.done.count("replay") > 2 * backend.done.count("capture")


def test_a_step_is_done_three_times_before_it_is_captured() -> None:
    backend = PretendedGraphs()
    groups = Groups({"steps": 6, "epochs": None}, backend)
    groups.train((8, 8), 1)
    assert backend.done == ["warm up"] * 3 + ["capture"] + ["replay"] * 3
    backend.done.clear()
    groups.train((8, 8), 2)
    assert backend.done == ["replay"] * 6
    backend.done.clear()
    groups.train((8, 8), 3, lr=0.5)
    assert backend.done == ["finish", "capture"] + ["replay"] * 6


def stale_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: set[int] = set()
    call = step_graphs._StepGraph.__call__

    def filled_once(self: Any, inputs: Sequence[Tensor], lasting: int) -> tuple[Tensor, ...]:
        given = self._inputs if id(self) in filled else inputs
        filled.add(id(self))
        return call(self, given, lasting)

    monkeypatch.setattr(step_graphs._StepGraph, "__call__", filled_once)


def results_in_the_graphs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    call = step_graphs._StepGraph.__call__
    monkeypatch.setattr(step_graphs._StepGraph, "__call__", lambda self, inputs, lasting: call(self, inputs, 0))


def another_states_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "id", lambda _: 0, raising=False)


def step_size_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepGraphs.run

    def without_numbers(self: StepGraphs, key: Any, step: Any, *, numbers: Any, **rest: Any) -> tuple[Tensor, ...]:
        first = self.__dict__.setdefault("first", numbers)
        return run(self, key, step, numbers=first, **rest)

    monkeypatch.setattr(StepGraphs, "run", without_numbers)


@pytest.mark.parametrize(
    ("plant", "keys"),
    [
        (stale_inputs, {}),
        (stale_inputs, {"momentum": 0.9}),
        (results_in_the_graphs_memory, {}),
        (results_in_the_graphs_memory, {"accumulate": 2}),
        (another_states_graph, {}),
        (step_size_of_before, {}),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_a_planted_fault_of_graphs_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal(of_all(Groups(dict(keys), PretendedGraphs())), of_all(Groups(dict(keys), None)))


def test_a_step_that_cannot_be_captured_goes_on_without() -> None:
    backend = PretendedGraphs([RuntimeError(f"CUDA error: {REFUSAL}\nCompile with TORCH_USE_CUDA_DSA")])
    groups = Groups({}, backend)
    assert_equal(of_all(groups), of_all(Groups({}, None)))
    assert groups.trainer.uncaptured == f"CUDA error: {REFUSAL}"
    assert "replay" in backend.done  # steps of other shapes are captured


def behind_another_error() -> RuntimeError:
    error = RuntimeError("the capture was invalidated")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


@pytest.mark.parametrize("make_error", [lambda: torch.OutOfMemoryError("CUDA out of memory"), behind_another_error])
def test_graphs_are_dropped_where_memory_runs_out(make_error: Callable[[], Exception]) -> None:
    backend = PretendedGraphs()
    keys = {"steps": 6, "epochs": None}
    groups = Groups(keys, backend)
    groups.train((12, 12), 1)
    (graph,) = (weakref.ref(one) for one in groups.trainer._graphs._graphs.values())  # type: ignore[union-attr]
    backend._errors.append(make_error())
    params_KV, _ = groups.train((2, 2), 2)
    gc.collect()
    assert graph() is None
    assert groups.trainer.most_together == 1
    expected_KV, _ = Groups(keys, None).train((2, 2), 2)
    torch.testing.assert_close(params_KV, expected_KV)
    assert not groups.trainer.uncaptured


def test_a_run_says_once_that_it_goes_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [RuntimeError(REFUSAL) for _ in range(9)]
    monkeypatch.setattr(batched_trainer, "graphs_on", lambda device: PretendedGraphs(errors))
    experiment = fed.Experiment(
        data={"clients": 4}, rounds={"count": 2}, simulation={"workers": 0, "batching": "on", "group": 2}
    )
    run = fed.simulate(experiment)
    assert run.summary["training"].endswith(f"; steps without CUDA graphs, for {REFUSAL}")
    said = [record.message for record in caplog.records if "CUDA graph" in record.message]
    assert said == [f"a step goes on without a CUDA graph, which is slower: {REFUSAL}"]


def doubled(x: Tensor) -> tuple[Tensor, ...]:
    return (2 * x,)


def test_cuda_is_asked_for_graphs_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    graphs = StepGraphs(CudaGraphs(torch.device("cuda:0")))
    state: list[Tensor] = []
    seen = []
    for _ in range(5):
        graphs.run("step", doubled, state=state, inputs=[torch.ones(2)], numbers=(), lasting=1)
        seen.append(list(cuda.done))
        cuda.done.clear()
    assert seen[:3] == 3 * [["beside waits for computing", "computing waits for beside", "memory kept for computing"]]
    assert seen[3] == [
        "cache emptied",
        "begin of a capture on beside, thread_local",
        "end of a capture",
        "replay on computing",
    ]
    assert seen[4] == ["replay on computing"]
    graphs.clear()
    assert cuda.done == ["program waits for computing"]


def test_a_capture_that_fails_leaves_cuda_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    cuda.is_invalid = True
    graphs = StepGraphs(CudaGraphs(torch.device("cuda:0")))

    def reading(x: Tensor) -> tuple[Tensor, ...]:
        if cuda.is_capturing:
            raise RuntimeError(REFUSAL)
        return doubled(x)

    for _ in range(5):
        (found,) = graphs.run("step", reading, state=[], inputs=[torch.ones(2)], numbers=(), lasting=1)
        assert found.tolist() == [2, 2]
    assert cuda.done[-2:] == ["end of a capture", "pool (0, 1) closed on 0"]
    assert cuda.current.name == "computing"
    assert graphs.problem == REFUSAL


@needs_gpu
@each_keys
@pytest.mark.parametrize("make", [perceptron, convolutional], ids=lambda make: make.__name__)
def test_graphs_of_a_gpu_change_no_bit(make: Callable[[], nn.Module], keys: dict[str, Any]) -> None:
    gpu = torch.device("cuda")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        groups = Groups(dict(keys), step_graphs.graphs_on(gpu), make, gpu)
        assert_equal(of_all(groups), of_all(Groups(dict(keys), None, make, gpu)))
    assert groups.trainer.uncaptured == ""


@needs_gpu
@pytest.mark.parametrize("room_bytes", [1e9, 0.0], ids=["samples on the GPU", "copied ahead"])
@each_keys
def test_a_group_on_a_gpu_is_read_back_once(
    keys: dict[str, Any], room_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda")
    groups = Groups(dict(keys), step_graphs.graphs_on(gpu), device=gpu)
    groups.trainer._room_bytes = room_bytes
    expected = [groups.train((15, 11, 5), seed) for seed in (1, 2, 3)]  # records and captures all steps
    run = BatchedTrainer._run

    def watched(self: BatchedTrainer, *arguments: Any) -> Tensor:
        torch.cuda.set_sync_debug_mode("error")
        return run(self, *arguments)

    def read(tensors: Sequence[Tensor]) -> list[Tensor]:
        torch.cuda.set_sync_debug_mode("default")
        return read_back(tensors)

    monkeypatch.setattr(BatchedTrainer, "_run", watched)
    monkeypatch.setattr(batched_trainer, "read_back", read)
    try:
        assert_equal([groups.train((15, 11, 5), 3)], expected[2:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
