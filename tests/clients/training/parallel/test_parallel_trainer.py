"""Several devices train one client as one does, and say why they cannot."""

import copy
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fed
from fed.aggregators.base import Phase
from fed.aggregators.fedprox import FedProx
from fed.aggregators.moon import MOON
from fed.aggregators.scaffold import Scaffold
from fed.clients.models import char_gru, logistic, mlp
from fed.clients.node.training_process import TrainingProcess
from fed.clients.scoring.losses import cox, cross_entropy, model_loss
from fed.clients.training.devices import devices_of_ranks
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import LocalResult, LocalTrainer
from fed.clients.training.parallel import gang, parallel_trainer
from fed.clients.training.parallel.parallel_trainer import ParallelTrainer, ParallelTrainers
from fed.clients.training.steps import steps_of
from fed.clients.training.trainer import Trainer
from fed.config.experiment import Local
from fed.config.node_data import NodeData
from fed.errors import DeviceFailed, InvalidExperiment, InvalidInput, InvalidModel, RunFailed
from fed.protocol.protocol_pb2 import Answer, Assignment, Plan, Signature, TaskId
from fed.server.grpc.deploy import serve
from fed.simulations.estimate import expect
from fed.simulations.simulation import Simulation
from fed.vectors.layout import Layout
from fed.vectors.randomness import seeded_torch
from fed.wire.payloads import written
from tests.clients.training.parallel.models import (
    CLASSES,
    MODELS,
    Blocks,
    Counting,
    Deadly,
    Drawing,
    Raising,
    Residual,
    Scaled,
    Unreached,
    samples_of,
)
from tests.clients.training.parallel.models import __name__ as home
from tests.server.deployed import wait_for
from tests.server.grpc.threaded import ThreadedNode, nodes_of

CPU = torch.device("cpu")
ROUNDING = 1e-12
"""Bound on the difference to one process in float64: sums are of other parts in another order, and no more."""

KINDS: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "tensor": "tensor",
    "pipeline": {"kind": "pipeline", "micro_batches": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    # A key's bias in attention has a gradient of rounding alone, which a smaller eps would blow up to a step.
    "adam": {"optimizer": "adam", "lr": 0.01, "eps": 0.01},
    "accumulation": {"momentum": 0.9, "accumulate": 2},
}


def made(name: str) -> nn.Module:
    with seeded_torch(0, CPU):
        return MODELS[name]()


def alone(module: nn.Module, phase: Phase, private: tuple[str, ...] = (), **local: Any) -> Trainer:
    return Trainer(copy.deepcopy(module), cross_entropy, Local(**local), phase, CPU, private)


def together(module: nn.Module, phase: Phase, private: tuple[str, ...] = (), **local: Any) -> ParallelTrainer:
    section = Local(**{"devices": 2, **local})
    return ParallelTrainers(module, section, frozenset(private))(phase, cross_entropy, CPU)


def trained(
    trainer: LocalTrainer, module: nn.Module, samples: Any, state: Any = None, broadcast: Any = ()
) -> LocalResult:
    vector_V, integers_I = trainer.layout.pack(module)
    anchor_P = vector_V[: trainer.layout.shared.parameters] * 0.9
    context = LocalContext(client_state=state, broadcast=broadcast, anchor_P=anchor_P)
    order = np.random.default_rng(3)
    return trainer.train(vector_V, integers_I, samples, order=order, seed=1, context=context)


def assert_alike(ours: LocalResult, theirs: LocalResult) -> None:
    torch.testing.assert_close(ours.params_V, theirs.params_V, rtol=0, atol=ROUNDING)
    assert torch.equal(ours.integers_I, theirs.integers_I)
    assert ours.train_loss == pytest.approx(theirs.train_loss, abs=ROUNDING)


def cases() -> Iterator[Any]:
    """The quickest one of each kind; all others take long."""
    for kind in KINDS:
        for model in MODELS:
            for option in OPTIONS:
                is_quick = (model, option) == ("transformer", "accumulation")
                yield pytest.param(kind, model, option, marks=() if is_quick else pytest.mark.long)


@pytest.mark.parametrize(("kind", "model", "option"), [*cases()])
def test_several_devices_train_as_one_does(kind: str, model: str, option: str) -> None:
    """With FedProx's term; the last batch of 17 samples has a single one, so that a device or a stage has none."""
    local = {"batch_size": 4, "epochs": 2, **OPTIONS[option]}
    module = made(model)
    samples = samples_of(model, 17)
    phase = Phase(rule=FedProx(mu=0.1))
    one = alone(module, phase, **local)
    several = together(module, phase, **local, parallel=KINDS[kind])
    expected = trained(one, module, samples)
    assert_alike(trained(several, module, samples), expected)
    assert_alike(trained(several, module, samples), expected)  # the ranks are left as they were
    vector_V, integers_I = one.layout.pack(module)
    losses = [trainer.measure(vector_V, integers_I, samples, 5, gradient=True) for trainer in (one, several)]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=ROUNDING)
    torch.testing.assert_close(losses[1][1], losses[0][1], rtol=0, atol=ROUNDING)
    loaded = several.load(expected.params_V, expected.integers_I)
    assert torch.equal(Layout.of(loaded).pack(loaded)[0], expected.params_V)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("tensor", "pipeline") else pytest.mark.long) for kind in KINDS]
)
def test_state_of_every_kind_goes_to_its_devices(kind: str) -> None:
    """Parameters that are fixed, tied, private or not reached, and Scaffold's vectors."""
    with seeded_torch(0, CPU):
        module = Unreached().double()
    samples = samples_of("mlp", 9)
    private = ("layer.bias",)
    local = {"batch_size": 4, "momentum": 0.5, "weight_decay": 0.01}
    phase = Phase(rule=Scaffold())
    one = alone(module, phase, private, **local)
    parallel = {"kind": "pipeline", "stages": ["second"]} if kind == "pipeline" else kind
    several = together(module, phase, private, **local, parallel=parallel)
    shared = one.layout.shared.parameters
    state = Scaffold().init_client(torch.zeros(shared))._replace(control_P=torch.linspace(0, 1, shared).double())
    broadcast = (torch.linspace(1, 2, shared).double(),)
    expected = trained(one, module, samples, state, broadcast)
    assert_alike(trained(several, module, samples, state, broadcast), expected)


@pytest.mark.long
def test_one_phase_may_train_private_parameters_alone() -> None:
    module = made("mlp")
    phase = Phase(trains="private", epochs=2)
    private = ("5.weight", "5.bias")
    expected = trained(alone(module, phase, private), module, samples_of("mlp", 9))
    assert_alike(trained(together(module, phase, private), module, samples_of("mlp", 9)), expected)


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.long)])
def test_both_schedules_agree_with_named_stages(schedule: str) -> None:
    """More micro-batches than some batches have samples; attention's mask is of the model, not of a stage."""
    module = made("transformer")
    samples = samples_of("transformer", 9)
    parallel = {"kind": "pipeline", "micro_batches": 5, "schedule": schedule, "stages": ["blocks.layers.2"]}
    local: dict[str, Any] = {"batch_size": 7, "momentum": 0.9}
    expected = trained(alone(module, Phase(), **local), module, samples)
    assert_alike(trained(together(module, Phase(), **local, parallel=parallel), module, samples), expected)


PLAN = {"norm": "sequence", "up": "column", "scale": "partial", "down": "row", "attention": "heads", "embed": "row"}


def test_each_style_of_a_plan_agrees() -> None:
    """With three heads, 7 places, 11 rows and 5 columns for two devices, padding, a causal mask, and batch norm."""
    with seeded_torch(0, CPU):
        module = Blocks().double()
    samples = samples_of("transformer", 7)
    phase = Phase(rule=FedProx(mu=0.1))
    expected = trained(alone(module, phase, batch_size=4), module, samples)
    parallel = {"kind": "tensor", "plan": PLAN}
    several = together(module, phase, batch_size=4, parallel=parallel)
    assert_alike(trained(several, module, samples), expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_three_devices_train_as_one_does(kind: str) -> None:
    module = made("transformer")
    samples = samples_of("transformer", 11)
    local: dict[str, Any] = {"batch_size": 4, "momentum": 0.9}
    expected = trained(alone(module, Phase(), **local), module, samples)
    several = together(module, Phase(), **local, devices=3, parallel=KINDS[kind])
    assert_alike(trained(several, module, samples), expected)


@pytest.mark.long
def test_a_pipeline_refuses_moving_buffers_and_state_beside_a_cut() -> None:
    cases = (
        (Counting(), ["layer"], "buffer must not change in training with local.parallel: pipeline.*got batches"),
        (Residual(), ["second"], "a stage must need nothing of earlier ones but .*, got more at second"),
        (Residual(), ["first"], r"stages must begin at modules that the model calls .*, got first .* calls of none"),
    )
    for module, stages, words in cases:
        several = together(module.double(), Phase(), parallel={"kind": "pipeline", "stages": stages})
        with pytest.raises(InvalidModel, match=words):
            trained(several, module, samples_of("mlp", 6))


def test_counts_of_batches_move_and_shares_of_batches_are_refused() -> None:
    phase = Phase()
    module = Counting().double()
    expected = trained(alone(module, phase), module, samples_of("mlp", 20))
    assert_alike(trained(together(module, phase), module, samples_of("mlp", 20)), expected)
    keeping = Counting(keeps=True).double()
    with pytest.raises(InvalidModel, match=r"got seen, which differs between devices: use local.parallel: tensor"):
        trained(together(keeping, phase), keeping, samples_of("mlp", 20))


@pytest.mark.long
def test_each_device_draws_from_a_stream_of_its_own() -> None:
    module = Drawing().double()
    several = together(module, Phase(), batch_size=4)
    same = torch.ones(4, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    results = [trained(several, module, same).params_V for _ in range(2)]
    assert torch.equal(*results)


def precisions() -> list[Any]:
    """A quick case; all others take long."""
    pairs = [(kind, precision) for kind in KINDS for precision in ("bfloat16", "float16")]
    return [pytest.param(*pair, marks=() if pair == ("fsdp", "float16") else pytest.mark.long) for pair in pairs]


@pytest.mark.parametrize(("kind", "precision"), precisions())
def test_half_precision_agrees_to_its_rounding(kind: str, precision: str) -> None:
    """float16 begins with a loss scale that overflows for the first sample, which one device alone may see."""
    module = made("transformer").float()
    characters, targets = samples_of("transformer", 8)
    with torch.no_grad():
        module.get_parameter("embed.weight")[characters[0]] *= 30
    local: dict[str, Any] = {"batch_size": 4, "accumulate": 2, "epochs": 2, "lr": 0.01, "precision": precision}
    expected = trained(alone(module, Phase(), **local), module, (characters, targets))
    several = together(module, Phase(), **local, parallel=KINDS[kind])
    ours = trained(several, module, (characters, targets))
    # A step moves by lr times gradients, and these are rounded to 8 or 11 bits.
    moved_by = (expected.params_V - one_vector(module)).abs().max()
    torch.testing.assert_close(ours.params_V, expected.params_V, rtol=0, atol=0.05 * float(moved_by))
    assert ours.train_loss == pytest.approx(expected.train_loss, rel=0.01)


def one_vector(module: nn.Module) -> torch.Tensor:
    return Layout.of(module).pack(module)[0]


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [
        ("ddp", Deadly, r"device 1 of 2 failed: killed by signal 9 \(SIGKILL\): the system may have run out of memory"),
        ("ddp", Raising, r"device 1 of 2 failed: ZeroDivisionError: thirteen \(.*models\.py:\d+ in forward\)"),
        *(
            pytest.param(kind, module, r"device \d of 2 failed: (killed by signal 9|ZeroDiv)", marks=pytest.mark.long)
            for kind in ("fsdp", "tensor", "pipeline")
            for module in (Deadly, Raising)
        ),
    ],
)
def test_a_dying_device_fails_the_task_with_its_last_words(
    kind: str, module: Callable[[], nn.Module], words: str
) -> None:
    model = module().double()
    parallel = {"kind": "pipeline", "stages": ["layer"]} if kind == "pipeline" else kind
    several = together(model, Phase(), batch_size=4, parallel=parallel)
    good = samples_of("mlp", 8)
    expected = trained(several, model, good)
    bad = good[0].clone()
    bad[7, 0] = 13  # seen by the second device
    state = several.layout.pack(model)
    began_s = time.monotonic()
    with pytest.raises(RunFailed, match=words):
        several.train(*state, (bad, good[1]), order=_InOrder(), seed=1, context=LocalContext())
    assert time.monotonic() - began_s < 20  # on a machine with much else to do; a second on an idle one
    assert_alike(trained(several, model, good), expected)  # others are started for the next task


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_device_fails_the_task_while_others_wait(kind: str) -> None:
    """A signal from outside, as of the system where memory runs out."""
    error = _failure_of(kind, signal.SIGKILL)
    assert re.match(r"device 1 of 2 failed: killed by signal 9 .*; lower local.batch_size, or share the model", error)


def _failure_of(kind: str, number: signal.Signals) -> str:
    """Words of a task that ends within seconds after the second of its devices has got a signal."""
    module = made("transformer")
    several = together(module, Phase(), batch_size=4, epochs=100_000, parallel=KINDS[kind])
    samples = samples_of("transformer", 16)
    trained(together(module, Phase()), module, samples)  # what all load is loaded
    failed: list[BaseException] = []

    def train() -> None:
        try:
            trained(several, module, samples)
        except RunFailed as error:
            failed.append(error)

    training = threading.Thread(target=train)
    training.start()
    wait_for(lambda: several._gang is not None and several._gang._is_ready, "the ranks to start")
    os.kill(several.process_ids[1], number)
    training.join(20)
    assert not training.is_alive()
    return str(failed[0])


def test_a_failure_of_a_device_names_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **named: Any) -> LocalResult:
        raise DeviceFailed("device 1 of 2 failed: killed")

    monkeypatch.setattr(ParallelTrainer, "train", fail)
    data = fed.FederatedData({7: samples_of("mlp", 9)}, classes=3)
    with pytest.raises(RunFailed, match=r"^client 7 of round 1: device 1 of 2 failed: killed$"):
        fed.simulate(experiment("mlp", "momentum", devices=2), data=data)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_device_fails_the_task_in_bounded_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "_STOPPED_S", 2)
    error = _failure_of(kind, signal.SIGSTOP)
    assert re.match(
        r"device 1 of 2 failed: a signal had stopped its process for 2 s, so that .*: let it run, or", error
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_hangs_fails_the_task(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, and takes part in no exchange: here it is stopped, which is not looked at."""
    monkeypatch.setattr(gang, "_STOPPED_S", 3600)
    monkeypatch.setattr(gang, "_SILENT_S", 5.0)
    error = _failure_of(kind, signal.SIGSTOP)
    assert re.match(r"device 1 of 2 failed: the others waited 5 s for it, which hangs: set local.devices to 1", error)


@pytest.mark.long
def test_idle_devices_are_started_again_and_given_more_room() -> None:
    module = made("mlp")
    several = together(module, Phase(rule=Scaffold()))
    samples = samples_of("mlp", 6)
    plain = several.train(
        *several.layout.pack(module),
        samples,
        order=np.random.default_rng(0),
        seed=0,
        context=scaffolds(several.layout.parameters, anchored=False),
    )
    first = several.process_ids
    several.train(
        *several.layout.pack(module),
        samples,
        order=np.random.default_rng(0),
        seed=0,
        context=scaffolds(several.layout.parameters, anchored=True),
    )
    second = several.process_ids
    assert first != second  # for an anchor of its own there was no room
    os.kill(second[1], signal.SIGKILL)
    wait_for(lambda: several._gang is not None and not several._gang.is_alive, "the end of both")
    again = several.train(
        *several.layout.pack(module),
        samples,
        order=np.random.default_rng(0),
        seed=0,
        context=scaffolds(several.layout.parameters, anchored=False),
    )
    assert_alike(again, plain)


def scaffolds(size: int, *, anchored: bool) -> LocalContext:
    zeros_P = torch.zeros(size, dtype=torch.float64)
    state = Scaffold().init_client(torch.zeros(size))._replace(control_P=zeros_P)
    return LocalContext(client_state=state, broadcast=(zeros_P,), anchor_P=zeros_P if anchored else None)


class _InOrder(np.random.Generator):
    """A generator that leaves samples in their order."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def permutation(self, count: Any, axis: int = 0) -> Any:
        return np.arange(count)


@pytest.mark.long
def test_a_program_without_a_main_guard_is_told_of_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import fed, torch\n"
        "data = fed.FederatedData({0: (torch.randn(9, 5), torch.arange(9) % 3)}, classes=3)\n"
        "keys = {'data': None, 'evaluation': 'clients', 'local': {'devices': 2}, 'simulation': {'workers': 0}}\n"
        "fed.simulate(fed.Experiment(**keys), data=data, model=torch.nn.Linear(5, 3))\n"
    )
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    *_, last = ended.stderr.splitlines()
    assert re.match(
        r".*program\.py:4: a process of local.devices could not start .*: a program that uses several", last
    )
    assert "RunFailed" not in ended.stderr, "no traceback of its own"


def test_ranks_end_with_their_trainer() -> None:
    several = together(made("mlp"), Phase())
    trained(several, made("mlp"), samples_of("mlp", 4))
    pids = several.process_ids
    del several
    gc.collect()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("fsdp", {"module": nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))}, "with local.parallel: fsdp, for each"),
        ({"kind": "fsdp", "units": ["9"]}, {}, r"units must be names of the model's modules, got '9'; known: 0, 1, 2"),
        (
            {"kind": "fsdp", "units": ["blocks.layers.0", "read"]},
            {"module": made("transformer")},
            "units must share no parameter with the rest of the model, got read: leave it out",
        ),
        ({"kind": "pipeline", "stages": []}, {}, r"each stage behind the first begins, 1 for local.devices=2, got 0"),
        ({"kind": "pipeline", "stages": ["9"]}, {}, r"stages must be names of the model's modules, got '9'; known: 0"),
        ("pipeline", {"module": Drawing()}, "must have 2 layers in lists or sequences of modules to be cut .*, got 0"),
        (
            {"kind": "tensor", "plan": {"9.*": "row"}},
            {},
            r"patterns that fit .*, got '9\.\*', which fits none",
        ),
        (
            {"kind": "tensor", "plan": {"2": "row"}},
            {},
            "a linear layer or an embedding for row, got 2, a ReLU",
        ),
        (
            {"kind": "tensor", "plan": {"embed": "row"}},
            {"module": made("transformer")},
            "must share no parameter with one that is not, got embed: leave it out",
        ),
        ("tensor", {"module": nn.Conv2d(1, 1, 1)}, "must have linear layers, embeddings or attention of PyTorch"),
        ("fsdp", {"module": Scaled()}, "got the single number scale: give it the shape"),
        ("fsdp", {"module": nn.Embedding(5, 3, sparse=True)}, "sums no sparse gradients, got Embedding: make it with"),
        (
            "ddp",
            {"module": weight_norm(nn.Linear(5, 3))},
            "parametrised layers, .*, got ParametrizedLinear: set",
        ),
        ("ddp", {"phase": Phase(rule=MOON())}, "MOON compares the representations of three whole models"),
        ("ddp", {"module": nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))}, "batch normalisation cannot be"),
        ("ddp", {"loss": cox}, "must be a mean over samples, got cox, which does not say so"),
        ("ddp", {"loss": model_loss}, "loss: model cannot be trained with local.parallel: ddp"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(kind: Any, change: dict[str, Any], words: str) -> None:
    given = {"module": made("mlp"), "phase": Phase(), "loss": cross_entropy, **change}
    section = Local(devices=2, parallel=kind)
    with pytest.raises(InvalidInput, match=words):
        ParallelTrainers(given["module"], section)(given["phase"], given["loss"], CPU)


def test_keys_of_several_devices_hold_each_other() -> None:
    with pytest.raises(InvalidExperiment, match="parallel needs devices of 2 or more, got devices=1 and parallel=ddp"):
        fed.Experiment(local={"parallel": "ddp"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what a machine without GPUs has")
def test_there_must_be_as_many_gpus_as_devices() -> None:
    with pytest.raises(InvalidExperiment, match=r"local.devices must be at most 0, the number of this machine's"):
        devices_of_ranks(torch.device("cuda", 0), 2)
    with pytest.raises(InvalidExperiment, match=r"local.devices must be at most \d+ on the CPU .*, got 100000"):
        devices_of_ranks(CPU, 100_000)


@pytest.mark.long
def test_each_worker_has_devices_of_its_own() -> None:
    data = fed.FederatedData({client: samples_of("mlp", 9 + client) for client in range(3)}, classes=3)
    given = experiment("mlp", "momentum", devices=2, parallel="fsdp")
    alone, beside = (fed.simulate(given.override({"simulation.workers": workers}), data=data) for workers in (0, 2))
    for ours, theirs in zip(beside.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def experiment(model: str, option: str, **local: Any) -> fed.Experiment:
    return fed.Experiment(
        data=None,
        model=f"python:{home}:double_{model}",
        local={"batch_size": 4, **OPTIONS[option], **local},
        algorithm={"kind": "fedprox", "mu": 0.1},
        rounds={"count": 2},
        evaluation="clients",
        simulation={"workers": 0},
    )


def test_an_estimate_takes_a_few_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def noted(*given: Any) -> Iterator[Any]:
        for step in steps_of(*given):
            taken.append(step)
            yield step

    monkeypatch.setattr(parallel_trainer, "steps_of", noted)
    data = fed.FederatedData({client: samples_of("mlp", 50) for client in range(2)}, classes=3)
    expect(Simulation(experiment("mlp", "momentum", devices=2), data))
    assert len(taken) == 2 * 3, "three steps, twice"


ALGORITHMS = ("dpsgd", "fedrep", "ditto", "mimelite", "qfedavg", "fedper", "scaffold", "feddyn", "fednova", "cyclic")


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_go_with_several_devices(algorithm: str) -> None:
    """With phases, personal models, measured gradients, and peers."""
    data = fed.FederatedData({client: samples_of("mlp", 9 + client) for client in range(4)}, classes=3)
    changed = {"algorithm": algorithm, "local.momentum": 0.0}
    one = fed.simulate(experiment("mlp", "momentum").override(changed), data=data)
    given = experiment("mlp", "momentum", devices=2, parallel="tensor")
    several = fed.simulate(given.override(changed), data=data)
    for ours, theirs in zip(several.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)
    assert several.metrics[-1]["test_loss"] == pytest.approx(one.metrics[-1]["test_loss"], abs=ROUNDING)


BUILT_IN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "logistic": (lambda: logistic((5,), 3), "mlp"),
    "mlp with batch norm": (lambda: mlp((5,), 3, hidden=(6,), batch_norm=True), "mlp"),
    "char_gru": (lambda: char_gru(11, embedding=5, hidden=6, layers=2), "transformer"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("logistic", "fsdp"),
        ("logistic", "tensor"),
        ("mlp with batch norm", "tensor"),
        ("char_gru", "fsdp"),
        ("char_gru", "tensor"),
        ("char_gru", {"kind": "pipeline", "stages": ["recurrent"]}),
    ],
)
def test_other_built_in_models_go_with_several_devices(name: str, kind: Any) -> None:
    make, kind_of_samples = BUILT_IN[name]
    with seeded_torch(0, CPU):
        module = make().double()
    samples = samples_of(kind_of_samples, 10)
    local: dict[str, Any] = {"batch_size": 4, "momentum": 0.9}
    expected = trained(alone(module, Phase(), **local), module, samples)
    assert_alike(trained(together(module, Phase(), **local, parallel=kind), module, samples), expected)


def simulated(data: fed.FederatedData, given: fed.Experiment, folder: Path) -> fed.Run:
    return fed.simulate(given, data=data)


def deployed(data: fed.FederatedData, given: fed.Experiment, folder: Path) -> fed.Run:
    """A server and two nodes, each of which trains in a process of its own, as nodes do."""
    kinds = [given.model.kind] if given.model else []
    nodes: list[ThreadedNode] = []
    begin = lambda port: nodes.extend(nodes_of(data, port, folder, kinds))  # noqa: E731
    run = serve(given, listen="127.0.0.1:0", output=folder / "run", min_nodes=2, on_listen=begin)
    for node in nodes:
        node.end()
    return run


def whole_runs() -> list[Any]:
    """A quick one of each engine; all others take long."""
    found = []
    for engine in (simulated, deployed):
        for kind in KINDS:
            for model in MODELS:
                for option in OPTIONS:
                    is_quick = (kind, model, option) == ("ddp", "mlp", "momentum")
                    found.append(pytest.param(engine, kind, model, option, marks=() if is_quick else pytest.mark.long))
    return found


@pytest.mark.parametrize(("engine", "kind", "model", "option"), whole_runs())
def test_runs_on_several_devices_end_as_on_one(engine: Any, kind: str, model: str, option: str, tmp_path: Path) -> None:
    """With two clients, simulated and at nodes."""
    data = fed.FederatedData({client: samples_of(model, 9 + client) for client in range(2)}, classes=CLASSES[model])
    one = fed.simulate(experiment(model, option), data=data)
    several = engine(data, experiment(model, option, devices=2, parallel=KINDS[kind]), tmp_path)
    for ours, theirs in zip(several.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)
    assert several.metrics[-1]["test_loss"] == pytest.approx(one.metrics[-1]["test_loss"], abs=ROUNDING)


def test_devices_of_a_node_end_with_its_training_process(tmp_path: Path) -> None:
    keys = {"model": "logistic", "local": {"devices": 2}}
    description = NodeData.model_validate({"data": {"kind": "digits", "clients": 50}, "client": 0})
    process = TrainingProcess(0, description, tmp_path / "kept")
    process.prepare(
        fed.Experiment(**keys), Plan(signature=Signature(input_shape=[64], input_dtype="float32", classes=10))
    )
    tensors = [torch.ones(part.numbers, dtype=part.dtype) for part in process.spec.model]
    payload = written(tmp_path / "task", tensors)
    task = Assignment(task=TaskId(start=1, number=1), round=1, population=1, payload=payload)
    assert isinstance(process.train(task, tmp_path / "task"), Answer)
    started = _descendants(process._process.pid)
    assert len(started) >= 3  # two ranks, and the process that forks them
    process.close()
    wait_for(lambda: not any(map(_is_alive, started)), "the ranks to end", within_s=10)


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(below for child in children for below in _descendants(child))]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
