"""Choice between batched and single training: tries a few steps both ways, and sets the size of groups.

Shapes: see :mod:`fed.vectors.layout`.
"""

import contextlib
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.utils.flop_counter import flop_registry

from fed.aggregators.base import Phase
from fed.aggregators.client_side import each_part
from fed.clients.data import Held, Pair
from fed.clients.data.collate import batch_of
from fed.clients.data.held import size_of, taken
from fed.clients.scoring.losses import cross_entropy, model_loss, of_each_sample
from fed.clients.scoring.measures import Loss
from fed.clients.training.batched_trainer import BatchedTrainer
from fed.clients.training.batches import normalises_batches
from fed.clients.training.determinism import deterministic
from fed.clients.training.devices import device_of, least_memory_bytes
from fed.clients.training.dispatch_mode import DispatchMode
from fed.clients.training.draws import UnlikeDraws
from fed.clients.training.evaluation import BatchedEvaluator, evaluate
from fed.clients.training.float32_products import float32_products
from fed.clients.training.group_reading import UnequalBatches
from fed.clients.training.local_context import LocalContext
from fed.clients.training.reading import called
from fed.clients.training.recurrent_layers import RecurrentLayers
from fed.clients.training.trainer import Trainer
from fed.clients.training.work_items import Recipe
from fed.clients.training.worker import on_device
from fed.config.experiment import Execution, Local
from fed.errors import InvalidExperiment, RunFailed, first_line, users_line
from fed.processes.machine import usable_cores
from fed.simulations.group_timing import step_seconds
from fed.simulations.kept_timings import kept_or_measured
from fed.simulations.side_effects import changed_by_forward
from fed.vectors import trees
from fed.vectors.fixed_part import in_training
from fed.vectors.layout import Layout
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Batching", "choose", "room_in"]

_State: TypeAlias = tuple[Tensor, Tensor]

_CACHE_BYTES = 2**21
"""Size of a core's level-2 cache. Every step reads and writes a group's parameters, three times as slowly beyond it."""


class _Limits(NamedTuple):
    """Numbers of operations in a client's step on a CPU by which batching pays or does not.

    The more operations, the less overhead batching saves, and the more its kernels lose.

    Args:
        certain: number up to which it pays for certain, if a group's parameters stay in the cache.
        usual: number up to which it usually pays.
        possible: number beyond which it pays on no machine that was tried.
    """

    certain: int
    usual: int
    possible: int


_OF_PRODUCTS = _Limits(certain=20_000_000, usual=48_000_000, possible=250_000_000)
_OF_CONVOLUTIONS = _Limits(certain=100_000_000, usual=800_000_000, possible=2_000_000_000)  # they lose less in groups
_TOO_MANY = "a step takes {:.0f} million operations a client, and batching pays up to {:.0f} million"
_TIMED_FROM_STEPS = 3_000
"""Number of clients' steps in a run from which timing pays: it takes as long as a few hundred of them."""
_TIMED_SIZES = 2, 3, 5, 8, 12, 20, 32
_ALIKE = 1.03
"""Factor by which a group may be slower than the fastest before that one is preferred."""
_GAIN = 1.05
"""Factor by which a group must be faster than its clients alone."""
_MOST_ON_CPU = 32
"""Largest group of ``simulation.group: auto`` on a CPU."""
_MOST_ON_GPU = 128
"""The same on a GPU, which takes as long for many small models as for a few. Beyond, a round makes too few groups."""
_SHARE_OF_GPU = 0.2
"""Part of a GPU's whole memory for a group, so that four workers of one GPU have room beside each other."""
_SIZES_ON_GPU = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
"""Sizes of groups that a GPU's memory bounds: coarse, for the measured memory of a client is not quite repeatable."""
_PROBE_SAMPLES = 24
_PROBE_SCORES = 2**20
_PROBE_SCALES = 0.1, 1.0, 5.0  # an untrained model's scores are all alike


@dataclass(frozen=True)
class Batching:
    """Choice of how clients train.

    Args:
        is_batched: True if clients train in groups, each as one computation; False if they train one by one.
        group: largest number of clients of a group; 1 if clients train one by one.
        reason: reason of the choice, as a clause.
        note: further clause on how clients train; empty for none.
    """

    is_batched: bool
    group: int
    reason: str
    note: str = ""

    def __str__(self) -> str:
        """Say how clients train, and the reason."""
        note = f"; {self.note}" if self.note else ""
        return f"{'batched' if self.is_batched else 'one client at a time'}: {self.reason}{note}"


def choose(
    execution: Execution,
    recipe: Recipe,
    context: LocalContext,
    samples: Held,
    *,
    trainees: int,
    client_steps: float,
    may_ignore: bool,
) -> Batching:
    """Choose by the experiment, the model and the kind of device, and in doubt by this machine's speed.

    Batching saves the overhead of operations, and costs speed where they are large. On a CPU it pays where a step takes
    few floating-point operations and the parameters of a group fit into the cache, and does not where it takes many. In
    between, steps of a few groups of several sizes and of a client alone are timed, if the run is long enough. What
    was measured first is kept, so that every run of the same steps on this machine chooses alike; on another machine
    the choice may differ. On GPUs a group has room in the smallest of them. Where the experiment asks for batching and
    names the group, as that of a run does, both stay.

    A trial decides whether a model can be batched: a few steps of a few clients, in a group and one by one, must agree.

    Args:
        execution: section ``simulation`` of the experiment.
        recipe: local training of the run, but for this choice.
        context: tensors that come with a client's first task beside the model, and the client's state before that.
        samples: samples of one client, for the trial.
        trainees: number of clients that train in a round.
        client_steps: number of optimizer steps of all clients in the run.
        may_ignore: True if clients may hold labels below 0, which a loss other than cross_entropy may ignore.

    Raises:
        InvalidExperiment: if batching is asked for and cannot be.
    """
    if recipe.local.devices > 1:
        if execution.batching == "on":
            raise InvalidExperiment(
                f"simulation.batching must be auto or off with local.devices={recipe.local.devices}, got on: set it to "
                "auto"
            )
        return Batching(False, 1, f"{recipe.local.devices} devices train one client together")
    if recipe.make_trainer is not None:
        if execution.batching == "on":
            raise InvalidExperiment(
                "simulation.batching must be auto or off where an app trains, got on: set it to auto"
            )
        return Batching(False, 1, "an app trains its clients")
    device = device_of(execution.device)
    if device.type == "mps":
        if execution.batching == "on":
            raise InvalidExperiment(f"simulation.batching must be auto or off here, got on: {_NO_FLOAT64}")
        return Batching(False, 1, _NO_FLOAT64)
    if execution.batching == "off":
        return Batching(False, 1, "simulation.batching is off")
    asked = execution.group
    is_settled = execution.batching == "on" and asked != "auto"
    if asked == "auto":
        asked = _MOST_ON_CPU if device.type == "cpu" else _MOST_ON_GPU
        limit = "the most that simulation.group=auto takes"
    else:
        limit = f"as simulation.group={asked} says"
    group = asked
    work = _Counter.of_a_step(recipe, samples) if device.type == "cpu" and not is_settled else None
    sizes: list[int] = []
    model_bytes = sum(part.nbytes for part in recipe.module.parameters() if part.requires_grad)
    if work is not None:
        room = work.room(model_bytes)
        if client_steps >= _TIMED_FROM_STEPS:
            sizes = work.sizes_in_doubt(room, most=min(group, -(-trainees // usable_cores())))
        if group > room:
            group = room
            limit = f"to keep {work.what_moves} within {_CACHE_BYTES >> 20} MiB of cache"
    if execution.batching == "auto" and (reason := _no_gain(work, group, asked, trainees, in_doubt=sizes)):
        return Batching(False, 1, reason)
    problem, client_bytes = (_IGNORES, 0.0) if may_ignore else _obstacle(recipe, context, samples, device)
    if problem is not None:
        if execution.batching == "on":
            raise InvalidExperiment(f"simulation.batching must be auto or off here, got on: {problem}")
        return Batching(False, 1, problem)
    if work is not None and sizes:
        seconds = _timed(work, recipe, context, samples, sizes)
        group = _fastest(seconds, least=1 if execution.batching == "auto" else 2)
        if group == 1:
            return Batching(False, 1, f"on this machine {_compared(seconds, min(sizes))}")
        limit = f"for {_compared(seconds, group)}"
    if device.type != "cpu" and not is_settled:
        client_bytes += 2 * model_bytes  # for the moments of Adam, which the trial does not keep
        room = room_in(least_memory_bytes(execution.device), client_bytes)
        if group > room:
            group = room
            limit = "to keep them within the smallest GPU's memory"
    group = max(group, 1)
    clients_train = "clients train" if group > 1 else "client trains"
    return Batching(True, group, f"up to {group} {clients_train} as one computation, {limit}")


def room_in(memory_bytes: int, client_bytes: float) -> int:
    """Largest group that every GPU has room for, at least 1.

    It follows from their whole memory, not from what others leave free of it: a run chooses alike whoever computes
    beside it.

    Args:
        memory_bytes: whole memory of the smallest GPU of those that workers may get, in bytes.
        client_bytes: memory that a client takes in a group, in bytes, > 0.

    Example:
        >>> room_in(memory_bytes=8 * 2**30, client_bytes=50 * 2**20)
        32
    """
    room_bytes = _SHARE_OF_GPU * memory_bytes
    fitting = [size for size in (*_SIZES_ON_GPU, _MOST_ON_GPU) if size * client_bytes <= room_bytes]
    return max(fitting, default=1)


def _no_gain(work: "_Counter | None", group: int, asked: int, trainees: int, *, in_doubt: Sequence[int]) -> str | None:
    """Reason why batching in groups of ``group`` saves no time; None where it does, or where that is in doubt.

    Args:
        work: operations of a client's step; None on a GPU, or where the experiment has settled it.
        group: largest group that the cache has room for.
        asked: largest group that the experiment asks for.
        trainees: number of clients that train in a round.
        in_doubt: sizes of groups that are to be timed.
    """
    # A group of one is the loop, with more overhead.
    if trainees == 1:
        return "a round trains one client"
    if work is None:
        return None
    if asked == 1:
        return "simulation.group is 1"
    if in_doubt:
        return None
    if group < 2:
        return f"two clients' parameters do not fit into {_CACHE_BYTES >> 20} MiB of cache"
    if work.operations > work.limits.usual:
        return _TOO_MANY.format(work.operations / 1e6, work.limits.usual / 1e6)
    return None


def _timed(
    work: "_Counter", recipe: Recipe, context: LocalContext, samples: Held, sizes: Sequence[int]
) -> Mapping[int, float]:
    """Seconds of a client's step by the size of its group, as this machine has measured them first."""

    def measure() -> dict[int, float]:
        # PyTorch's own generators belong to the user, and stay as they are.
        with seeded_torch(0, torch.device("cpu")):
            return step_seconds(recipe, context, samples, sizes)

    return kept_or_measured({**work.described(recipe), "sizes": [*sizes], "samples": size_of(samples)}, measure)


def _fastest(seconds: Mapping[int, float], least: int) -> int:
    """Size of the fastest groups, the smallest of those that are as good as equal; 1 where no group is fast enough.

    Args:
        seconds: seconds of a client's step, by the size of its group; 1: alone.
        least: smallest size that is allowed, 1 or 2.
    """
    best_s = min(value for size, value in seconds.items() if size > 1)
    if least == 1 and seconds[1] < _GAIN * best_s:
        return 1
    return min(size for size, value in seconds.items() if size > 1 and value <= _ALIKE * best_s)


def _compared(seconds: Mapping[int, float], size: int) -> str:
    """Clause on the speed of groups of a size beside that of clients alone."""
    in_a_group = f"a client's step takes {1e3 * seconds[size]:.3g} ms in a group of {size}"
    return f"{in_a_group} and {1e3 * seconds[1]:.3g} ms alone"


def _obstacle(recipe: Recipe, context: LocalContext, samples: Held, device: "torch.device") -> tuple[str | None, float]:
    """Reason why clients cannot be batched, None where they can; and the bytes that one takes on a GPU."""
    if any(phase.rule is not None and phase.rule.contrasts for phase in recipe.phases):
        return "its algorithm compares three models' representations", 0.0
    # PyTorch's own generators belong to the user, and stay as they are.
    with deterministic(device, on=recipe.is_deterministic), float32_products(device), seeded_torch(0, device):
        tried = [_tried(recipe, phase, context, samples, device) for phase in recipe.phases]
    problem = next((problem for problem, _ in tried if problem is not None), None)
    return problem, max(client_bytes for _, client_bytes in tried)


class _Counter(DispatchMode):
    """Counts operations like PyTorch's own FlopCounterMode, which imports its compiler for that.

    Attributes:
        operations: floating-point operations of matrix products and convolutions.
        in_convolutions: part of these operations that convolutions do.
        image_bytes: size of the largest output of a convolution.
        products: names and shapes of these products and convolutions, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.in_convolutions = self.image_bytes = 0
        self.products: list[str] = []

    @classmethod
    def of_a_step(cls, recipe: Recipe, samples: Held) -> "_Counter":
        """Count the operations of a client's step."""
        inputs, targets = _first_batch(recipe, samples, recipe.local.batch_size)
        tried = in_training(copy.deepcopy(recipe.module))
        counter = cls()
        # Recurrent layers go step by step as in a group: PyTorch's single operation for an LSTM would not be counted.
        # An error is suppressed because the first step of the loop will raise it again.
        with seeded_torch(0, torch.device("cpu")), contextlib.suppress(Exception), RecurrentLayers(), counter:
            torch.autograd.backward(recipe.loss(called(tried, inputs), targets))
        return counter

    @property
    def mostly_convolves(self) -> bool:
        """True if most operations are of convolutions."""
        return 2 * self.in_convolutions > self.operations

    @property
    def limits(self) -> _Limits:
        """Numbers of operations by which batching pays."""
        return _OF_CONVOLUTIONS if self.mostly_convolves else _OF_PRODUCTS

    def sizes_in_doubt(self, room: int, most: int) -> list[int]:
        """Sizes of groups of which none is known to be faster than the others, or than clients alone.

        Args:
            room: largest group whose parameters and images stay in the cache.
            most: largest group that leaves work for every core.
        """
        is_certain = self.operations <= self.limits.certain and room >= most
        if is_certain or self.operations > self.limits.possible:
            return []
        return sorted(size for size in {*_TIMED_SIZES, room, most} if 2 <= size <= most)

    def described(self, recipe: Recipe) -> dict[str, Any]:
        """Description of a client's step, by which the time that it takes is known again."""
        shapes = [f"{tuple(part.shape)} {part.dtype}" for part in recipe.module.parameters()]
        local = recipe.local.model_dump(include={"optimizer", "momentum", "batch_size", "accumulate", "precision"})
        rules = [type(phase.rule).__name__ for phase in recipe.phases]
        return {"products": self.products, "parameters": shapes, "local": local, "rules": rules}

    @property
    def what_moves(self) -> str:
        """Name of the data that a group reads and writes most of in a step."""
        return "their images" if self.mostly_convolves else "their parameters"

    def room(self, model_bytes: int) -> int:
        """Largest group whose parameters and images stay in the cache; at least 2 if most operations convolve."""
        room = _CACHE_BYTES // max(model_bytes, 1)
        if not self.mostly_convolves:
            return room
        return max(min(room, _CACHE_BYTES // self.image_bytes), 2)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            operations = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            self.operations += operations
            self.products.append(f"{packet} {[tuple(part.shape) for part in args if isinstance(part, Tensor)]}")
            if packet in (torch.ops.aten.convolution, torch.ops.aten.convolution_backward):
                self.in_convolutions += operations
            if packet is torch.ops.aten.convolution:
                self.image_bytes = max(self.image_bytes, result.nbytes)
        return result


def _tried(
    recipe: Recipe, phase: Phase, context: LocalContext, samples: Held, device: "torch.device"
) -> tuple[str | None, float]:
    """Reason why clients cannot be batched in a phase, None where they can; and the bytes that one takes on a GPU."""
    module = recipe.module
    local = recipe.local
    loss = on_device(recipe.loss, device)
    if local.precision == "float16":
        return "float16 scales each client's loss by its own gradients", 0
    first = taken(samples, slice(0, _PROBE_SAMPLES))
    inputs, _ = _first_batch(recipe, first, _PROBE_SAMPLES)
    if changed := changed_by_forward(module, inputs):
        return f"its forward pass changes {changed}", 0
    if normalises_batches(module):  # its statistics have not changed: they are frozen, or the layer is unused
        return "it has BatchNorm, under which a last single sample joins the batch before it", 0
    if loss is model_loss:
        return (
            "the model finds its loss itself, over its whole batch: give targets and another loss to batch clients",
            0,
        )
    samples_tried = size_of(first)
    half = -(-samples_tried // 2)
    # Unequal numbers, so that places to fill and clients that finish early are tried too.
    pairs = [taken(first, slice(0, count)) for count in (samples_tried, half, 1)]
    probe = local.model_copy(update=_SGD | {"batch_size": min(local.batch_size, half)})
    state = Layout.of(module, recipe.private, recipe.moved).pack(module)
    tried = replace(phase, epochs=None)
    apart: dict[str, Any] = {"private": recipe.private, "moved": recipe.moved, "collate": recipe.collate}

    def in_a_group(steps: Local) -> tuple[Tensor, Tensor]:
        trainer = BatchedTrainer(copy.deepcopy(module), loss, steps, tried, device=device, **apart)
        return _probed(trainer, state, pairs, context)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)  # 0 without a GPU
    try:
        batched = in_a_group(probe)
        used_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
        if local.precision != "float32":  # rounding in half precision may be as large as the differences looked for
            probe = probe.model_copy(update={"precision": "float32"})
            batched = in_a_group(probe)
    except Exception as error:  # any error of a user's model: the loop will report it if it is raised there as well
        return _plainly(error), 0
    trainer = Trainer(copy.deepcopy(module), loss, probe, tried, device=device, **apart)
    single = _probed_one_by_one(trainer, state, pairs, context)
    if not _agree(batched, single):
        return "a group's gradients differ from those of its clients one by one", 0
    if _is_no_mean(module, loss, _first_batch(recipe, first, _PROBE_SAMPLES), device):
        return "its loss is no mean over samples", 0
    if problem := _not_scored(recipe, loss, first, device):
        return problem, 0
    return None, used_bytes / len(pairs) * local.batch_size / probe.batch_size


def _not_scored(recipe: Recipe, loss: Loss, samples: Held, device: "torch.device") -> str | None:
    """Reason why models cannot be evaluated together; None where they can."""
    module = recipe.module
    try:
        alone = evaluate(copy.deepcopy(module).to(device), loss, {}, samples, device, recipe.collate)
        # Twice the same model: a loss that mixes models would differ from that of one alone.
        rows = [part.repeat(2, 1) for part in Layout.of(module, recipe.private, recipe.moved).pack(module)]
        evaluator = BatchedEvaluator(module, loss, {}, device, recipe.private, recipe.moved, recipe.collate)
        together = evaluator.scores(rows[0], rows[1], samples)
    except Exception as error:
        return f"in evaluation {_plainly(error)}"
    losses = torch.tensor([[score.loss, alone.loss] for score in together])
    if not torch.allclose(losses[:, 0], losses[:, 1], rtol=1e-3, equal_nan=True):
        return "evaluation differs"
    return None


def _first_batch(recipe: Recipe, samples: Held, count: int) -> Pair:
    """Batch of the first samples, which nobody else holds."""
    places = torch.arange(min(count, size_of(samples)))
    return batch_of(samples, places, recipe.collate)


_SGD = {"optimizer": "sgd", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "epochs": None, "steps": 2}
_SGD |= {"lr": 0.1}  # with a tiny step size only rounding would be compared, and a huge one would overflow

_NO_FLOAT64 = "Apple's GPUs have no float64, in which a group's losses are summed"
_IGNORES = "labels may be below 0, and its loss may leave those out of its mean"


def _is_no_mean(module: "nn.Module", loss: Loss, samples: Pair, device: "torch.device") -> bool:
    """True if a batch's loss differs from the mean over its samples, for outputs of any size.

    Labels take every class in turn, because the labels of a client with one class would not show class weights.
    """
    if loss is cross_entropy:
        return False
    if getattr(loss, "mean_over_samples", None) is False:
        return True  # the trial might miss it, such as a survival loss on samples without events
    inputs, targets = (trees.mapped(lambda leaf: leaf.clone().to(device), part) for part in samples)
    with torch.no_grad(), contextlib.suppress(Exception):  # a loss that refuses these labels shows nothing
        output = called(copy.deepcopy(module).to(device).eval(), inputs)
        classes = output.shape[1] if output.ndim > 1 else 1
        # So many that every class occurs, if they fit: the weight of a class that does not occur is not seen.
        count = max(min(2 * classes, _PROBE_SCORES // output[0].numel()), 4)
        labels = targets[torch.arange(count, device=device) % len(targets)]
        if not (targets.is_floating_point() or targets.is_complex()):
            labels = (torch.arange(labels.numel(), device=device) % classes).to(targets.dtype).view_as(labels)
        for scale in _PROBE_SCALES:
            scores = scale * torch.randn(count, *output.shape[1:], dtype=output.dtype, device=device)
            of_batch = loss(scores, labels)
            of_samples = of_each_sample(loss, scores, labels).mean()
            if torch.isfinite(of_samples) and not torch.allclose(of_batch, of_samples, rtol=1e-4, atol=1e-6):
                return True
    return False


def _probed(trainer: BatchedTrainer, state: _State, pairs: list[Held], context: LocalContext) -> tuple[Tensor, Tensor]:
    """Movement [K, V] of some clients in one group, and their losses [K]."""
    orders = [partial(np.random.default_rng, number) for number in range(len(pairs))]
    kept = each_part(context.client_state, lambda part: part.expand(len(pairs), -1))
    contexts = context._replace(client_state=kept)
    seeds = [partial(int, number) for number in range(len(pairs))]
    (params_KV, _), losses = trainer.train(*state, pairs, orders, contexts, seeds)
    return params_KV - state[0], torch.tensor(losses)


def _probed_one_by_one(
    trainer: Trainer, state: _State, pairs: list[Held], context: LocalContext
) -> tuple[Tensor, Tensor]:
    trained = [
        trainer.train(*state, pair, order=np.random.default_rng(number), seed=number, context=context)
        for number, pair in enumerate(pairs)
    ]
    moved_KV = torch.stack([one.params_V for one in trained]) - state[0]
    return moved_KV, torch.tensor([one.train_loss for one in trained])


def _agree(ours: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> bool:
    """True if both are equal but for rounding."""
    for got, expected in zip(ours, others, strict=True):
        largest = float(expected.nan_to_num(0, 0, 0).abs().max())  # a NaN would make the tolerance one
        if not torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * largest, equal_nan=True):
            return False
    return True


def _plainly(error: Exception) -> str:
    """Obstacle to batching, in plain words, with the line of the user's model where there is one."""
    # What an algorithm of the user raised, without the remedy of a run that ends with it.
    if isinstance(error, RunFailed) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    line = users_line(error)
    return _in_plain_words(error) + (f", at {line}" if line else "")


def _in_plain_words(error: Exception) -> str:
    if isinstance(error, UnequalBatches):
        return "its collate gives clients' batches of several lengths: pad to one length"
    text = str(error)
    if isinstance(error, UnlikeDraws):
        return text
    for sign, meaning in _OBSTACLES.items():
        if sign in text:
            return meaning
    if missing := re.search(r"Batching rule not implemented for aten::(\w+)", text):
        return f"PyTorch cannot compute {missing[1]} for many models at once"
    if refused := re.fullmatch("where clients train in groups, (.*): train them one by one", text):
        return refused[1]
    return f"it does not run for many clients at once ({first_line(error)})"


_OBSTACLES = {
    "does not have a deterministic implementation": "PyTorch has no deterministic algorithm for it on this device",
    "called random operation": "it draws random numbers, which come from each client's own stream",
    "different inplace randomness on an unbatched tensor": "it draws into a tensor that all clients share",
    "data-dependent control flow": "what it does depends on the numbers it computes",
    "get value out of a tracing tensor": "what it does depends on the numbers it computes",
    ".item()": "what it does depends on the numbers it computes",
    "Batch norm got a batched tensor": "BatchNorm changes its running statistics as it trains",
}
