"""Group training: one task of a group of clients, phase by phase, at once or one by one, from task to answer.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fed.aggregators.base import Aggregator
from fed.aggregators.client_side import starting_states
from fed.clients.data import ClientId, Held
from fed.clients.data.held import dense, size_of
from fed.clients.scoring.measures import Loss
from fed.clients.training.batched_trainer import BatchedTrainer, GroupMean
from fed.clients.training.client_states import ClientState, algorithm_state, client_state, codec_state
from fed.clients.training.determinism import deterministic
from fed.clients.training.draws import UnlikeDraws
from fed.clients.training.float32_products import float32_products
from fed.clients.training.group_reading import UnequalBatches
from fed.clients.training.local_context import LocalContext
from fed.clients.training.private_trainer import ClientDraws, PrivateTrainer
from fed.clients.training.trainer import Trainer
from fed.clients.training.work_items import Recipe, Train, Trained, TrainedClients, label_of
from fed.compression.codec import CodecState
from fed.errors import AppFailed, DeviceFailed
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from fed.clients.training.local_trainer import LocalResult, LocalTrainer

__all__ = ["GroupTraining", "completed", "rows_not_finite"]

_States: TypeAlias = tuple[Tensor, Tensor]
"""(vectors [V] or [K, V], integers [I] or [K, I])."""

_Diverged: TypeAlias = tuple[tuple[ClientId, str], ...]
"""Clients whose numbers are not finite, each with a sentence that says which."""


class _Sent(NamedTuple):
    """A task, and the samples and tensors that it needs."""

    task: Train
    pairs: list[Held]
    samples: tuple[int, ...]
    start: Tensor
    integers: Tensor
    state: ClientState
    context: LocalContext

    @property
    def own(self) -> _States | None:
        """The model, or the private parts, that each client keeps for itself."""
        return (self.state["model.params"], self.state["model.integers"]) if "model.params" in self.state else None


class GroupTraining:
    """Does one group's task after another.

    Args:
        recipe: parts of the run that training needs.
        loss: loss of the recipe, on the device.
        device: device that computes.
    """

    def __init__(self, recipe: Recipe, loss: Loss, device: "torch.device") -> None:
        self._recipe = recipe
        self._device = device
        # On the CPU the way out finds the same mean; Apple's GPUs have no float64.
        self._sums_on_device = device.type not in ("cpu", "mps") and not recipe.private
        self._phases = [
            _PhaseTraining(recipe, number, loss=loss, device=device) for number in range(len(recipe.phases))
        ]
        reporting = [phase.trainer for phase in self._phases if not phase.is_personal]
        self.trainer = reporting[-1]  # clients report the model that it leaves
        self._layout = self.trainer.layout
        self._params = self._layout.shared.parameters
        self._algorithm_state: type | None = None  # class to which records of clients are turned back
        if recipe.aggregator is not None:
            first = recipe.aggregator.init_client(torch.zeros(self._params))
            self._algorithm_state = None if first is None else type(first)

    def __call__(self, task: Train, tensors: Sequence[Tensor]) -> tuple[Trained, Sequence[Tensor]]:
        """Train, and answer as :class:`.work_items.Train` says; the answer's tensors are on the CPU."""
        pairs = [self._recipe.read(client) for client in task.clients]
        try:
            with self._block():
                trained, tensors = self._answer(self._sent(task, pairs, *tensors))
        except AppFailed as error:
            # Only apps raise it, whose clients train alone.
            return Trained((1,), (0.0,), failed=((task.clients[0], str(error)),)), ()
        except DeviceFailed as error:
            error.args = (f"{label_of(task)}: {error}",)
            raise
        except Exception as error:
            # The user's own error, with the clients on whose samples it arose.
            error.add_note(f"while {label_of(task)} trained")
            raise
        limits = [phase.most_together for phase in self._phases if phase.most_together is not None]
        reasons = [phase.uncaptured for phase in self._phases if phase.uncaptured]
        if limits or reasons:
            trained = replace(trained, most_together=min(limits, default=None), uncaptured="".join(reasons[:1]))
        return trained, tensors

    @contextmanager
    def _block(self) -> Iterator[None]:
        """Block with the settings of training."""
        recipe = self._recipe
        with (
            deterministic(self._device, on=recipe.is_deterministic),
            float32_products(self._device, tf32=recipe.local.precision == "tf32"),
        ):
            yield

    def _sent(self, task: Train, pairs: list[Held], start: Tensor, integers: Tensor, *beside: Tensor) -> _Sent:
        broadcast = beside[: task.broadcast_count]
        kept = beside[task.broadcast_count :]
        state = dict(zip(task.state_names, kept, strict=True))
        algorithm = algorithm_state(state, self._algorithm_state) if state else None
        anchor_P = None if self._recipe.aggregator is None else start[..., : self._params]
        context = LocalContext(
            client_state=algorithm, broadcast=broadcast, anchor_P=anchor_P, lr=task.lr, steps=task.steps
        )
        samples = tuple([size_of(pair) for pair in pairs])
        return _Sent(
            task=task, pairs=pairs, samples=samples, start=start, integers=integers, state=state, context=context
        )

    def _answer(self, sent: _Sent) -> tuple[Trained, Sequence[Tensor]]:
        begin = sent.start
        if self._recipe.aggregator is not None:
            begin = starting_states(
                self._recipe.aggregator,
                self._layout.shared,
                start_V=sent.start,
                client_state=sent.context.client_state,
                places=sent.task.places,
            )
        trained, diverged = self._train(sent, begin)
        if diverged:
            weights = tuple(map(float, trained.samples))
            return Trained(trained.samples, trained.train_losses, weights, diverged=diverged), ()
        if self._recipe.way_out is None or sent.task.wants == "models":
            return completed(trained, (trained.params_KV, trained.integers_KI))
        return self._recipe.way_out(trained)

    def _train(self, sent: _Sent, begin: Tensor) -> tuple[TrainedClients, _Diverged]:
        """Train in all phases, each from the state that the last phase of the same model left.

        Returns:
            The clients with the models to be reported, and those of them that have diverged.
        """
        own: Any = sent.own
        params, integers = self._whole(begin, sent)
        reasons: dict[int, str] = {}
        told: list[LocalResult] = []
        is_mean = False
        for phase in self._phases:
            if phase.is_personal:
                own, own_losses = phase(sent, own)
                _note_diverged(reasons, phase.not_finite(own[0]), own_losses)
            else:
                as_mean = self._is_mean_enough(sent, begin, phase)
                (params, integers), losses = phase(sent, (params, integers), as_mean=as_mean)
                told = phase.told
                is_mean = phase.mean is not None
                _note_diverged(reasons, phase.not_finite(params), losses)
        if self._layout.private:
            (params, integers), own = self._layout.split(params, integers)
        samples = _counted(sent, told)
        trained = TrainedClients(
            task=sent.task,
            start=sent.start,
            integers_I=sent.integers,
            begin=begin,
            params_KV=params,
            integers_KI=integers,
            own=own,
            samples=samples,
            train_losses=tuple(losses),
            client_state=sent.context.client_state,
            kept=codec_state(sent.state),
            facts=partial(self._facts, sent, losses, samples),
            metrics=tuple(one.metrics for one in told) if any(one.metrics for one in told) else (),
            is_mean=is_mean,
        )
        return trained, tuple((sent.task.clients[row], reasons[row]) for row in sorted(reasons))

    def _is_mean_enough(self, sent: _Sent, begin: Tensor, phase: "_PhaseTraining") -> bool:
        """True if nothing but the mean of the models that a phase leaves is wanted, which their device can find."""
        if sent.task.wants != "mean" or not self._sums_on_device or phase is not self._phases[-1]:
            return False
        way_out = self._recipe.way_out
        return begin.ndim == 1 and way_out is not None and way_out.averages_models

    def _facts(self, sent: _Sent, losses: Sequence[float], samples: Sequence[int]) -> dict[str, Any]:
        """Numbers that a report needs beside models and states, by :class:`fed.aggregators.base.ClientWork`'s names."""
        task = sent.task
        local = self._recipe.local
        assert self._recipe.aggregator is not None
        said = task.steps or (None,) * len(samples)
        steps = [self.trainer.steps(count, its_steps) for count, its_steps in zip(samples, said, strict=True)]
        samples_K1, steps_K1, losses_K1 = _columns(samples, steps, losses)
        return {
            "samples_K1": samples_K1,
            "steps_K1": steps_K1,
            "lr": local.lr if task.lr is None else task.lr,
            "momentum": local.momentum,
            "nesterov": local.nesterov,
            "train_loss_K1": losses_K1,
            "broadcast": sent.context.broadcast,
            "population": task.population,
            "places_K": torch.tensor(task.places, dtype=torch.int64) if task.places else None,
            **self._measured(self._recipe.aggregator, sent),
        }

    def _measured(self, aggregator: Aggregator, sent: _Sent) -> dict[str, Tensor]:
        """Measurements of the task's model that the algorithm asks for, on each client's own data."""
        if aggregator.asks.isdisjoint({"loss", "gradient"}):
            return {}
        task = sent.task
        wants = "gradient" in aggregator.asks
        streams = self._recipe.own_streams
        seeds = [streams.torch_seed("measure", *task.key_of(row)) for row in range(len(task.clients))]
        vectors_KV, integers_KI = _rows(self._whole(sent.start, sent), len(seeds))
        measured = [
            self.trainer.measure(vector_V, integers_I, dense(pair), seed, gradient=wants)
            for vector_V, integers_I, pair, seed in zip(vectors_KV, integers_KI, sent.pairs, seeds, strict=True)
        ]
        losses, gradients = zip(*measured, strict=True)
        found = {"start_loss_K1": _columns(losses)[0]}
        if wants:
            found["start_gradient_KP"] = torch.stack(gradients)[:, : self._params]
        return found

    def _whole(self, shared: Tensor, sent: _Sent) -> _States:
        """Shared states, joined with each client's private parts where there are some."""
        model = shared, sent.integers
        return self._layout.joined(model, sent.own) if self._layout.private and sent.own else model


class _PhaseTraining:
    """Trains groups in one phase of their tasks."""

    def __init__(self, recipe: Recipe, number: int, loss: Loss, device: "torch.device") -> None:
        phase = recipe.phases[number]
        options: dict[str, Any] = {
            "loss": loss,
            "local": recipe.local,
            "phase": phase,
            "device": device,
            "private": recipe.private,
            "moved": recipe.moved,
            "collate": recipe.collate,
            "may_ignore": recipe.may_ignore,
        }
        self.is_personal = phase.is_personal
        self.trainer: LocalTrainer
        if recipe.make_trainer is not None:
            self.trainer = recipe.make_trainer(phase, loss, device)
        else:
            # A copy, for the trainer makes its parameters views of one vector.
            self.trainer = Trainer(copy.deepcopy(recipe.module), **options)
        self._private: PrivateTrainer | None = None
        if recipe.sample_privacy is not None:
            make = recipe.make_private or PrivateTrainer
            self._private = make(copy.deepcopy(recipe.module), **options, privacy=recipe.sample_privacy)
        self._source = recipe.private_source or recipe.own_streams
        self._is_private_batched = recipe.is_batched
        is_batched = recipe.is_batched and recipe.make_trainer is None and not (phase.rule and phase.rule.contrasts)
        is_batched = is_batched and self._private is None
        self._batched = BatchedTrainer(copy.deepcopy(recipe.module), **options) if is_batched else None
        # A mean is computed in float64: models that nobody keeps need no copy in their own type.
        self._may_widen = not phase.is_personal and not recipe.private and device.type == "cpu"
        self.told: list[LocalResult] = []  # of the last group that trained one by one
        self.mean: GroupMean | None = None  # of the last group, where that alone has left the device
        self._streams = recipe.own_streams
        self._named = f" of phase {number}" if number else ""

    @property
    def most_together(self) -> int | None:
        """Largest number of clients that are computed together; None: a whole group."""
        return None if self._batched is None else self._batched.most_together

    @property
    def uncaptured(self) -> str:
        """Reason why steps are no CUDA graphs; empty where they are, or need not be."""
        return "" if self._batched is None else self._batched.uncaptured

    def __call__(self, sent: _Sent, states: _States, *, as_mean: bool = False) -> tuple[_States, list[float]]:
        """Trained states and mean losses of clients, from one state for all or from each client's own.

        Args:
            sent: task.
            states: states to start from.
            as_mean: True if nothing but the mean of the vectors is wanted, weighted by samples: it may come alone,
                [1, V], and is then :attr:`mean` too.
        """
        self.mean = None
        if self._private is not None:
            return self._privately(self._private, sent, states)
        if self._batched is None:
            return self._one_by_one(sent, states)
        orders = [partial(self._order, sent.task, row) for row in range(len(sent.pairs))]
        seeds = [partial(self._seed, sent.task, row) for row in range(len(sent.pairs))]
        dtype = torch.float64 if self._may_widen and sent.task.wants == "mean" else None
        try:
            if as_mean:
                weights = [float(count) for count in sent.samples]
                self.mean = self._batched.train_mean(*states, sent.pairs, orders, sent.context, seeds, weights)
                return (self.mean.mean_V[None], self.mean.integers_KI), self.mean.losses
            return self._batched.train(*states, sent.pairs, orders, sent.context, seeds, dtype=dtype)
        except (UnequalBatches, UnlikeDraws):  # the choice of batching has not seen such samples
            return self._one_by_one(sent, states)

    def not_finite(self, params_KV: Tensor) -> list[int]:
        """Rows of the clients of the last group whose vectors are not finite.

        Args:
            params_KV: vectors that :meth:`__call__` has returned.
        """
        return rows_not_finite(params_KV) if self.mean is None else self.mean.not_finite

    def _one_by_one(self, sent: _Sent, states: _States) -> tuple[_States, list[float]]:
        trained = []
        rows = zip(sent.pairs, *_rows(states, len(sent.pairs)), strict=True)
        for row, (pair, vector_V, integers_I) in enumerate(rows):
            seed = self._seed(sent.task, row)
            context = sent.context.of(row)._replace(
                steps=sent.task.steps[row : row + 1], client=sent.task.clients[row], round=sent.task.round
            )
            order = self._order(sent.task, row)
            samples = dense(pair)
            trained.append(self.trainer.train(vector_V, integers_I, samples, order=order, seed=seed, context=context))
        self.told = trained
        params = torch.stack([one.params_V for one in trained])
        integers = torch.stack([one.integers_I for one in trained])
        return (params, integers), [one.train_loss for one in trained]

    def _privately(self, private: PrivateTrainer, sent: _Sent, states: _States) -> tuple[_States, list[float]]:
        """Trained states of clients whose samples are private; their losses are kept to themselves: zeros."""
        count = len(sent.pairs)
        rows = [*range(count)]
        losses = [0.0] * count
        if self._is_private_batched and count > 1:
            try:
                return self._trained_privately(private, sent, states, rows), losses
            except (UnequalBatches, UnlikeDraws):
                pass
        vectors_KV, integers_KI = _rows(states, count)
        alone = [self._trained_privately(private, sent, (vectors_KV[row], integers_KI[row]), [row]) for row in rows]
        params, integers = zip(*alone, strict=True)
        return (torch.cat(params), torch.cat(integers)), losses

    def _trained_privately(self, private: PrivateTrainer, sent: _Sent, states: _States, rows: list[int]) -> _States:
        draws = [self._private_draws(sent.task, row) for row in rows]
        steps = tuple(sent.task.steps[row] for row in rows) if sent.task.steps else ()
        context = sent.context.of(rows)._replace(steps=steps)
        if len(rows) == 1:
            context = context._replace(client=sent.task.clients[rows[0]])
        return private.train(*states, [dense(sent.pairs[row]) for row in rows], draws, context)

    def _private_draws(self, task: Train, row: int) -> ClientDraws:
        key = task.key_of(row)
        return ClientDraws(
            inclusion=self._source.generator("inclusion" + self._named, *key),
            noise=self._source.generator("sample noise" + self._named, *key),
            seed=self._seed(task, row),
        )

    def _seed(self, task: Train, row: int) -> int:
        return self._streams.torch_seed("module" + self._named, *task.key_of(row))

    def _order(self, task: Train, row: int) -> np.random.Generator:
        return self._streams.generator("order" + self._named, *task.key_of(row))


def _counted(sent: _Sent, told: Sequence["LocalResult"]) -> tuple[int, ...]:
    """Number of samples of each client: as its trainer says, where that alone knows."""
    if not told:
        return sent.samples
    return tuple(count if one.samples is None else one.samples for count, one in zip(sent.samples, told, strict=True))


def _rows(states: _States, count: int) -> list[Sequence[Tensor]]:
    """Rows of states, ``count`` of them, from one state for all or each client's own."""
    return [[part] * count if part.ndim == 1 else part.unbind() for part in states]


def _columns(*numbers: Sequence[float]) -> tuple[Tensor, ...]:
    """Numbers of a group's clients, [K, 1] each."""
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(2).unbind()


def _note_diverged(reasons: dict[int, str], not_finite: Sequence[int], losses: Sequence[float]) -> None:
    """Note each row whose numbers are not finite after a phase, with the first reason."""
    for row, loss in enumerate(losses):
        if not math.isfinite(loss):
            reasons.setdefault(row, f"the training loss became {loss}")
    for row in not_finite:
        reasons.setdefault(row, "the trained model is not finite")


def completed(
    trained: TrainedClients,
    tensors: Sequence[Tensor],
    weights: tuple[float, ...] = (),
    *,
    sizes: tuple[int, ...] = (),
    counted: CodecState | None = None,
    lost: CodecState | None = None,
    overflown: Mapping[int, str] = MappingProxyType({}),
) -> tuple[Trained, Sequence[Tensor]]:
    """The answer to a task that has been trained.

    Args:
        trained: the clients, with the state that they keep for the algorithm from now on.
        tensors: tensors that the task wants, integers last.
        weights: weight of each client in the mean; empty: by samples.
        sizes: bytes of each client's message, where codecs decide on them; else empty.
        counted: states of the clients' codecs once their messages count, [K, ·] each; None: unchanged.
        lost: states of the clients' codecs if the messages are lost, [K, ·] each; None: unchanged.
        overflown: row → reason why its client's message cannot be sent. If there is one, no tensors come with the
            answer.
    """
    task = trained.task
    answer = Trained(
        samples=trained.samples,
        train_losses=trained.train_losses,
        weights=weights or tuple(map(float, trained.samples)),
        sizes=sizes,
        diverged=tuple((task.clients[row], overflown[row]) for row in sorted(overflown)),
        metrics=trained.metrics,
    )
    if overflown:
        return answer, ()
    if not task.state_names:
        return answer, tensors
    counted = trained.kept if counted is None else counted
    lost = trained.kept if lost is None else lost
    state = client_state(trained.client_state, trained.own or (), counted)
    return answer, (*tensors, *(state[name] for name in task.state_names), *(lost[name] for name in trained.kept))


def rows_not_finite(rows_K: Tensor) -> list[int]:
    """The rows of a tensor [K, ·] that are not finite."""
    # A finite sum proves every term finite; an infinite one proves nothing. It settles nearly all cases in one pass.
    if math.isfinite(rows_K.sum()):
        return []
    return [row for row, is_finite in enumerate(torch.isfinite(rows_K).all(1).tolist()) if not is_finite]
