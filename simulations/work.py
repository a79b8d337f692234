"""What simulated clients do, as a process does it: train in groups, and evaluate models.

Shapes: K, clients of a group; V, a model's floating-point state; I, its integers; P, trainable parameters.
"""

import copy
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fed.aggregators.contracts import Aggregator, ContrastiveRule, LocalRule
from fed.aggregators.reporting import began, messages, sends_updates
from fed.clients.batched import BatchedTrainer, TrainedGroup
from fed.clients.data import ClientId, Pair
from fed.clients.evaluation import BatchedEvaluator, Metric, Score, evaluate
from fed.clients.losses import Loss
from fed.clients.training import Trainer
from fed.experiment import Local
from fed.machine import keep_freed_memory
from fed.randomness import Streams, seeded_torch

__all__ = [
    "Begin",
    "Evaluate",
    "EvaluateByClients",
    "Evaluated",
    "Recipe",
    "Train",
    "Trained",
    "Work",
    "device_of",
    "label_of",
    "on_device",
]

_Reader: TypeAlias = Callable[[ClientId], Pair]
_Given: TypeAlias = tuple[Any, tuple[Tensor, ...], Tensor | None]
"""What clients keep, what came with the task beside the model, and that model where steps do not begin there."""


@dataclass(frozen=True)
class Begin:
    """Nothing: whoever gives it back has begun."""


@dataclass(frozen=True)
class Train:
    """Train a group from (start [V] or [K, V], integers [I] or [K, I], broadcast …, clients' state [K, ·] …).

    Answered by :class:`Trained`, with what is wanted of the group in float64, its integers, and the clients' new state
    [K, ·] …: of "models" the trained vectors [K, V], in the model's type, and integers [K, I]; of "messages" each
    client's parts and its float buffers' update [K, M], and integers [K, I]; of the "mean" that of the messages [M],
    and the largest integers [I].

    Args:
        clients: the group.
        round: with the client it names the random streams.
        wants: what is to be sent back.
        lr: the step size; None: the experiment's.
        steps: how many optimizer steps; None: as many as the experiment says.
        broadcasts: how many tensors the algorithm sends beside the model.
        population: how many clients there are.
        places: each client's number among them, where the algorithm asks for it.
    """

    clients: tuple[ClientId, ...]
    round: int
    wants: Literal["models", "messages", "mean"]
    lr: float | None = None
    steps: int | None = None
    broadcasts: int = 0
    population: int = 1
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trained:
    """What became of a group.

    Args:
        samples: how many each client holds.
        seen: how many each was trained on, as often as it was.
        train_losses: each client's mean over those.
        weights: of each client in the mean.
        diverged: which client's loss or model is not finite any more, with a sentence; nobody's where None.
    """

    samples: tuple[int, ...]
    seen: tuple[int, ...]
    train_losses: tuple[float, ...]
    weights: tuple[float, ...] = ()
    diverged: tuple[ClientId, str] | None = None


@dataclass(frozen=True)
class Evaluate:
    """Evaluate models (vectors [K, V], integers [K, I]) on the test samples ``first`` … ``last`` − 1."""

    first: int
    last: int


@dataclass(frozen=True)
class EvaluateByClients:
    """Evaluate one model (vector [V], integers [I]), or each client's ([K, V], [K, I]), on what these hold out."""

    clients: tuple[ClientId, ...]


@dataclass(frozen=True)
class Evaluated:
    """Each model's mean loss and mean metric (None without one) over so many samples.

    By clients there is a score for each that holds samples out, in their order.
    """

    losses: tuple[float, ...]
    metrics: tuple[float | None, ...]
    samples: tuple[int, ...]

    @classmethod
    def of(cls, scores: Sequence[Score], samples: Sequence[int]) -> "Evaluated":
        """These scores, in order."""
        return cls(tuple(score.loss for score in scores), tuple(score.accuracy for score in scores), tuple(samples))


@dataclass(frozen=True)
class Recipe:
    """Everything that a process needs to do its part of the work; it can be pickled if the user's parts can.

    Args:
        module: the model.
        loss: (output, target) → scalar.
        metric: (output, target) → number, or None.
        local: the experiment's section of that name.
        aggregator: what clients report to; None where there is no coordinator.
        rule: a correction of the gradient or a term of the loss, or None.
        is_batched: whether groups train as one computation.
        read: a client's samples.
        test: (inputs, targets) of the test set, or None.
        streams: the run's random streams; a client's are named by client and round.
        held_out: the samples that a client scores models on, where clients do.
    """

    module: nn.Module
    loss: Loss
    metric: Metric | None
    local: Local
    aggregator: Aggregator | None
    rule: LocalRule | ContrastiveRule | None
    is_batched: bool
    read: _Reader
    test: Iterable[Tensor] | None
    streams: Streams
    held_out: _Reader | None = None

    def __call__(self, worker: int) -> "Work":
        """The work of one process, on its share of the GPUs."""
        if multiprocessing.parent_process() is not None:
            keep_freed_memory()
        return Work(self, device_of(worker))


def label_of(task: Train) -> str:
    """What people call a group in a round."""
    names = [repr(client) for client in task.clients[:8]]
    names += [f"{len(task.clients) - 8} others"] if len(task.clients) > 8 else []
    who = f"client {names[0]}" if len(names) == 1 else f"clients {', '.join(names[:-1])} and {names[-1]}"
    return f"{who} of round {task.round}"


def device_of(worker: int) -> torch.device:
    """Where a worker computes: GPUs are dealt to workers in turn."""
    return (
        torch.device("cuda", worker % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )


def on_device(measure: Any, device: torch.device) -> Any:
    """A loss or metric that is a module, such as one with weights of classes, where the model's output will be."""
    return copy.deepcopy(measure).to(device) if isinstance(measure, nn.Module) else measure


class Work:
    """Does one thing after another, with one module.

    Args:
        recipe: what there is to work with.
        device: where to compute.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._loss, self._metric = (on_device(measure, device) for measure in (recipe.loss, recipe.metric))
        parts = self._loss, recipe.local, recipe.rule, device
        self.trainer = Trainer(copy.deepcopy(recipe.module), *parts)
        self._recipe = recipe
        self._device = device
        self._batched: BatchedTrainer | None = None
        if recipe.is_batched and not isinstance(recipe.rule, ContrastiveRule):
            batched = self._loss, recipe.local, recipe.rule, device
            self._batched = BatchedTrainer(copy.deepcopy(recipe.module), *batched)
        self._evaluator = BatchedEvaluator(recipe.module, self._loss, self._metric, device)

    def __call__(
        self, task: Begin | Train | Evaluate | EvaluateByClients, tensors: Sequence[Tensor]
    ) -> tuple[Begin | Trained | Evaluated, Sequence[Tensor]]:
        """Do it; the answer's tensors are on the CPU."""
        if isinstance(task, Begin):
            return task, ()
        if isinstance(task, Train):
            return self._train(task, *tensors)
        if isinstance(task, Evaluate):
            return self._evaluate(task, *tensors), ()
        return self._evaluate_by_clients(task, *tensors), ()

    def _train(self, task: Train, start: Tensor, integers: Tensor, *others: Tensor) -> tuple[Trained, Sequence[Tensor]]:
        pairs = [_dense(self._recipe.read(client)) for client in task.clients]
        try:
            return self._answer(task, pairs, start, integers, others)
        except Exception as error:
            error.add_note(f"while {label_of(task)} trained")
            raise

    def _answer(
        self, task: Train, pairs: list[Pair], start: Tensor, integers: Tensor, others: tuple[Tensor, ...]
    ) -> tuple[Trained, Sequence[Tensor]]:
        aggregator, broadcast, state, begin = self._recipe.aggregator, others[: task.broadcasts], None, start
        if aggregator is not None:
            if parts := others[task.broadcasts :]:
                state = type(aggregator.init_client(start[: self.trainer.layout.parameters]))(*parts)
            begin = began(aggregator, self.trainer.layout, start, state)
        anchor_P = None if begin is start else start[: self.trainer.layout.parameters]
        train = self._one_by_one if self._batched is None else self._at_once
        group = train(task, begin, integers, pairs, (state, broadcast, anchor_P))
        samples = tuple(targets.shape[0] for _, targets in pairs)
        weights: tuple[float, ...] = ()
        results: tuple[Tensor, ...] = (group.vectors_KV, group.integers_KI)
        if aggregator is not None and task.wants != "models":
            if sends_updates(aggregator):  # as its report would say, in a tenth of the time
                messages_KM, weights = group.vectors_KV.double().sub_(begin), tuple(map(float, samples))
            else:
                given = state, broadcast, self._measured(task, start, integers, pairs)
                messages_KM, weights, state = self._report(aggregator, task, group, start, begin, samples, given)
            results = messages_KM, group.integers_KI
            if task.wants == "mean":
                results = _mean(messages_KM, weights), group.integers_KI.amax(0) if integers.numel() else integers
        diverged = None if _are_finite(group.train_losses, results[0]) else _diverged(task, group)
        trained = Trained(samples, tuple(group.samples_seen), tuple(group.train_losses), weights, diverged)
        return trained, () if diverged else (*results, *(state or ()))

    def _report(
        self,
        aggregator: Aggregator,
        task: Train,
        group: TrainedGroup,
        start: Tensor,
        begin: Tensor,
        samples: Sequence[int],
        given: tuple[Any, tuple[Tensor, ...], dict[str, Any]],
    ) -> tuple[Tensor, tuple[float, ...], Any]:
        """Messages [K, M], weights, and what the clients keep."""
        local, (state, broadcast, measured) = self._recipe.local, given
        steps = [self.trainer.steps_of(count, task.steps) for count in samples]
        samples_K1, steps_K1, losses_K1 = _columns(samples, steps, group.train_losses)
        messages_KM, weights_K, state = messages(
            aggregator,
            self.trainer.layout,
            start,
            begin,
            group.vectors_KV,
            samples_K1=samples_K1,
            steps_K1=steps_K1,
            lr=local.lr if task.lr is None else task.lr,
            momentum=local.momentum,
            nesterov=local.nesterov,
            train_loss_K1=losses_K1,
            client_state=state,
            broadcast=broadcast,
            population=task.population,
            places_K=torch.tensor(task.places, dtype=torch.int64) if task.places else None,
            **measured,
        )
        return messages_KM, tuple(weights_K.tolist()), state

    def _measured(self, task: Train, start: Tensor, integers: Tensor, pairs: list[Pair]) -> dict[str, Tensor]:
        """What the algorithm asks for of the task's model, on each client's own data."""
        asks = self._recipe.aggregator.asks if self._recipe.aggregator else frozenset()
        if asks.isdisjoint({"loss", "gradient"}):
            return {}
        seeds = [self._recipe.streams.torch_seed("measure", client, task.round) for client in task.clients]
        wants = "gradient" in asks
        measured = [
            self.trainer.measure(start, integers, *given, gradient=wants) for given in zip(pairs, seeds, strict=True)
        ]
        losses, gradients = zip(*measured, strict=True)
        loss_K1 = dict(zip(["start_loss_K1"], _columns(losses), strict=True))
        return {**loss_K1, "start_gradient_KP": torch.stack(gradients)} if wants else loss_K1

    def _at_once(self, task: Train, start: Tensor, integers: Tensor, pairs: list[Pair], given: _Given) -> TrainedGroup:
        assert self._batched is not None
        orders = [partial(self._order, client, task.round) for client in task.clients]
        return self._batched.train(start, integers, pairs, orders, *given, task.lr, task.steps)

    def _one_by_one(
        self, task: Train, start: Tensor, integers: Tensor, pairs: list[Pair], given: _Given
    ) -> TrainedGroup:
        rows = [part.expand(len(pairs), -1) for part in (start, integers)]
        state, broadcast, anchor_P = given
        trained = [
            self.trainer.train(
                start_V,
                integers_I,
                pair,
                order=self._order(client, task.round),
                seed=self._recipe.streams.torch_seed("module", client, task.round),
                client_state=state and type(state)(*(part[row] for part in state)),
                broadcast=broadcast,
                anchor_P=anchor_P,
                lr=task.lr,
                steps=task.steps,
            )
            for row, (client, pair, start_V, integers_I) in enumerate(zip(task.clients, pairs, *rows, strict=True))
        ]
        return TrainedGroup(
            torch.stack([one.vector_V for one in trained]),
            torch.stack([one.integers_I for one in trained]),
            [one.train_loss for one in trained],
            [one.samples_seen for one in trained],
        )

    def _order(self, client: ClientId, number: int) -> np.random.Generator:
        return self._recipe.streams.generator("order", client, number)

    def _evaluate(self, task: Evaluate, vectors_KV: Tensor, integers_KI: Tensor) -> Evaluated:
        assert self._recipe.test is not None
        inputs, targets = (part[task.first : task.last].contiguous() for part in self._recipe.test)
        with seeded_torch(self._recipe.streams.torch_seed("evaluation", task.first), self._device):
            if self._recipe.is_batched and len(vectors_KV) > 1:
                scores = self._evaluator.scores(vectors_KV, integers_KI, (inputs, targets))
            else:
                scores = [self._score(*state, (inputs, targets)) for state in zip(vectors_KV, integers_KI, strict=True)]
        return Evaluated.of(scores, [len(targets)] * len(scores))

    def _evaluate_by_clients(self, task: EvaluateByClients, vectors: Tensor, integers: Tensor) -> Evaluated:
        assert self._recipe.held_out is not None
        rows = [part.expand(len(task.clients), -1) for part in (vectors, integers)]
        scores, samples = [], []
        for client, vector_V, integers_I in zip(task.clients, *rows, strict=True):
            pair = _dense(self._recipe.held_out(client))
            if count := len(pair[1]):
                with seeded_torch(self._recipe.streams.torch_seed("evaluation", client), self._device):
                    scores.append(self._score(vector_V, integers_I, pair))
                samples.append(count)
        return Evaluated.of(scores, samples)

    def _score(self, vector_V: Tensor, integers_I: Tensor, samples: Pair) -> Score:
        module = self.trainer.load(vector_V, integers_I)
        return evaluate(module, self._loss, self._metric, samples, self._device)


def _dense(pair: Pair) -> Pair:
    """As it lies in memory that processes share: kernels may round otherwise where strides are others."""
    inputs_N, targets_N = pair
    return inputs_N.contiguous(), targets_N.contiguous()


def _columns(*numbers: Sequence[float]) -> tuple[Tensor, ...]:
    """Numbers of a group's clients, [K, 1] each."""
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(2).unbind()


def _mean(messages_KM: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted mean; of a single message that one, to the bit."""
    if len(weights) == 1:
        return messages_KM[0]
    return (torch.tensor(weights, dtype=torch.float64) / sum(weights)) @ messages_KM


def _are_finite(losses: Sequence[float], vectors: Tensor) -> bool:
    """Whether a sum says so: that of finite numbers may be none."""
    return all(map(math.isfinite, losses)) and math.isfinite(vectors.sum())


def _diverged(task: Train, group: TrainedGroup) -> tuple[ClientId, str] | None:
    """The first client of a group whose numbers are not finite, if there is one."""
    for client, loss, vector_V in zip(task.clients, group.train_losses, group.vectors_KV, strict=True):
        if not math.isfinite(loss):
            return client, f"the training loss became {loss}"
        if not bool(torch.isfinite(vector_V).all()):
            return client, "the trained model is not finite"
    return None
