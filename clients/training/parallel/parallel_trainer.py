"""Trainer of one client on several devices: the parent's side of a task, whose batches it hands to the ranks.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from fed.aggregators.base import Phase
from fed.aggregators.client_side import each_part
from fed.clients.data import Held
from fed.clients.data.collate import Collating
from fed.clients.data.held import size_of
from fed.clients.scoring.losses import counted_cross_entropy
from fed.clients.scoring.measures import Loss
from fed.clients.training.batches import Batches, normalises_batches
from fed.clients.training.devices import devices_of_ranks
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import LocalResult, LocalTrainer
from fed.clients.training.parallel.gang import Gang
from fed.clients.training.parallel.refusals import check_parallel
from fed.clients.training.parallel.setup import Begin, End, SharedSetup, TakeStep
from fed.clients.training.parallel.splits import each_share, whole_part
from fed.clients.training.reading import Batch, reading
from fed.clients.training.steps import loss_for, parts_of_measurement, steps_of
from fed.config.experiment import Local
from fed.config.parallel import DDP, Parallel
from fed.vectors.layout import Layout
from fed.vectors.shared_memory import packed
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.torch_settings import current_settings

__all__ = ["ParallelTrainer", "ParallelTrainers", "kind_of"]

_CPU = torch.device("cpu")


def kind_of(local: Local) -> Parallel:
    """Way in which the devices of a section share the work.

    Args:
        local: the experiment's section of that name, with several devices.
    """
    made: Parallel = DDP() if local.parallel is None else local.parallel.make()
    return made


@dataclass(frozen=True)
class ParallelTrainers:
    """Factory of the trainers of clients that several devices train.

    Args:
        module: the model, which is not changed.
        local: the experiment's section of that name, with several devices.
        private: names of the tensors that the model does not share.
        moved: names of the tensors that the coordinator alone moves.
        collate: function that makes batches of samples; None: they are stacked.
    """

    module: "nn.Module"
    local: Local
    private: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    collate: Collating | None = None

    def __call__(self, phase: Phase, loss: Loss, device: "torch.device") -> "ParallelTrainer":
        """The trainer of a phase."""
        return ParallelTrainer(self, phase, loss, device)


class ParallelTrainer(LocalTrainer):
    """Trains one client after another on several devices, each with a process of its own, a rank.

    This process holds the messages: the vector of the model's state lies in memory that it shares with the ranks. Each
    rank fills its pieces of the model from there, and writes them back, so that none has the whole vector beside them.
    This process makes the batches, too, and hands each rank its part of them. The ranks start with the first task, and
    wait for the next ones.

    Args:
        made_by: the factory, with the parts of the run.
        phase: trained parameters, rule and length of this phase.
        loss: (output, target) → scalar.
        device: device of this process, and of the first rank.

    Raises:
        InvalidInput: if model, loss or algorithm cannot be trained so.
    """

    def __init__(self, made_by: ParallelTrainers, phase: Phase, loss: Loss, device: "torch.device") -> None:
        self._made_by = made_by
        self._phase = phase
        self._loss = loss
        self._device = device
        self._kind = kind_of(made_by.local)
        check_parallel(self._kind, made_by.local.devices, made_by.module, loss, (phase,))
        self._local = phase.local(made_by.local)
        self._devices = devices_of_ranks(device, made_by.local.devices)
        self._gang: Gang | None = None
        self._room = -1
        never_single = normalises_batches(made_by.module)
        self._plan = cache(lambda samples, steps: Batches(self._local, samples, never_single, steps=phase.steps(steps)))

    @property
    def process_ids(self) -> list[int]:
        """Ids of the ranks' processes; none before the first task."""
        return [] if self._gang is None else self._gang.process_ids

    @cached_property
    def layout(self) -> Layout:
        """Layout of the model's state."""
        return Layout.of(self._made_by.module, self._made_by.private, self._made_by.moved)

    def steps(self, samples: int, steps: int | None) -> int:
        """Number of optimizer steps of a task.

        Args:
            samples: number of samples of the client.
            steps: the task's own number of steps; None: as many as the experiment says.
        """
        return self._plan(samples, steps).steps

    def train(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        samples: Held,
        *,
        order: np.random.Generator,
        seed: int,
        context: LocalContext,
    ) -> LocalResult:
        """Train from a state on a client's samples.

        Args:
            vector_V: the floating-point state to start with.
            integers_I: the integer buffers to start with.
            samples: the client's (inputs, targets).
            order: the stream that shuffles them.
            seed: seed of the ranks' draws, such as those of dropout, and of those that make batches.
            context: contents of the task beside the model.

        Raises:
            RunFailed: if a rank ends, with its last words.
        """
        batches = self._plan(size_of(samples), context.steps[0] if context.steps else None)
        its = reading(samples, self._made_by.collate, _CPU, seed)
        steps = steps_of(its, batches, order, self._local.accumulate)
        gang, loss = self._begun(vector_V, integers_I, samples, seed, context, measures=False)
        seen = 0
        for step in steps:
            gang.tell(self._divided(step, loss))
            seen += sum(batch.samples for batch in step)
        gang.tell([End()])
        loss_sum = sum(gang.losses())
        return LocalResult(gang.vector_V.clone(), gang.integers_I.clone(), loss_sum / seen)

    def measure(
        self, vector_V: Tensor, integers_I: Tensor, samples: Held, seed: int, *, gradient: bool
    ) -> tuple[float, Tensor]:
        """Mean loss over a client's samples in a state, and its gradient [P], which is found in any case.

        Args:
            vector_V: the floating-point state.
            integers_I: the integer buffers.
            samples: the client's (inputs, targets).
            seed: seed of the ranks' draws.
            gradient: True if the gradient is wanted.
        """
        step = parts_of_measurement(samples, reading(samples, self._made_by.collate, _CPU, seed))
        gang, loss = self._begun(vector_V, integers_I, samples, seed, LocalContext(), measures=True)
        gang.tell(self._divided(step, loss))
        gang.tell([End()])
        loss_sum = sum(gang.losses())
        return loss_sum / size_of(samples), gang.vector_V[: self.layout.parameters].clone()

    def load(self, vector_V: Tensor, integers_I: Tensor) -> "nn.Module":
        """A module in this process that computes outputs in a state: a whole model on one device, to evaluate with."""
        module, unsaved = self._evaluated
        with torch.no_grad():
            self.layout.unpack(vector_V, integers_I, module)
            for name, first in unsaved.items():
                buffer = module.get_buffer(name)
                if buffer.shape == first.shape:
                    buffer.copy_(first)
        return module

    @cached_property
    def _evaluated(self) -> tuple["nn.Module", dict[str, Tensor]]:
        """The module of :meth:`load`, made when it is first asked for; and its buffers that are not saved."""
        module = copy.deepcopy(self._made_by.module).to(self._device)
        saved = module.state_dict().keys()
        return module, {name: part.clone() for name, part in module.named_buffers() if name not in saved}

    def _begun(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        samples: Held,
        seed: int,
        context: LocalContext,
        *,
        measures: bool,
    ) -> tuple[Gang, Loss]:
        """Ranks that have begun a task, and the loss in force."""
        corrects = not measures and self._phase.rule is not None and self._phase.rule.corrects
        if corrects and context.anchor_P is not None and _is_beginning(context.anchor_P, vector_V):
            context = context._replace(anchor_P=None)  # the ranks take what they begin with
        if not corrects:
            context = context._replace(client_state=None, broadcast=(), anchor_P=None)
        anchors = () if context.anchor_P is None else (context.anchor_P,)
        tensors = [part.detach() for part in (*(context.client_state or ()), *context.broadcast, *anchors)]
        gang = self._gang_with(packed(tensors)[1], samples)
        gang.vector_V.copy_(vector_V)
        gang.integers_I.copy_(integers_I)
        places = iter(gang.context_places(tensors))

        def next_place(part: Any) -> Any:
            return next(places)

        loss = loss_for(self._loss, samples, collate=self._made_by.collate, may_ignore=True)
        begin = Begin(
            lr=self._local.lr if context.lr is None else context.lr,
            seed=seed,
            context=LocalContext(
                client_state=each_part(context.client_state, next_place),
                broadcast=tuple(map(next_place, context.broadcast)),
                anchor_P=None if context.anchor_P is None else next_place(context.anchor_P),
            ),
            counts=loss is counted_cross_entropy,
            measures=measures,
        )
        gang.tell([begin])
        return gang, loss

    def _gang_with(self, context_bytes: int, samples: Held) -> Gang:
        """Ranks with room for a task's context; they are started where there are none, and again for a larger one."""
        if self._gang is not None and self._gang.is_alive and context_bytes <= self._room:
            return self._gang
        if self._gang is not None:
            self._gang.close()
            self._gang = None
        its = reading(samples, self._made_by.collate, _CPU)
        example = its.batch(its.places(np.arange(min(2, size_of(samples)))), 0)
        setup = SharedSetup(
            self._made_by.module,
            loss=self._loss,
            local=self._local,
            phase=self._phase,
            layout=self.layout,
            kind=self._kind,
            settings=current_settings(),
            example=example.inputs,
        )
        self._gang = Gang(setup, self.layout, self._devices, context_bytes)
        self._room = context_bytes
        return self._gang

    def _divided(self, step: Sequence[Batch], loss: Loss) -> list[TakeStep]:
        """A step's message for each rank, or the only one for all."""
        samples = sum(batch.samples for batch in step)
        weights = [batch.samples / samples for batch in step]
        if self._kind.shares_batches:
            ranks = len(self._devices)
            parts = [each_share(batch, loss, ranks, weight) for batch, weight in zip(step, weights, strict=True)]
            return [TakeStep(tuple(of_rank)) for of_rank in zip(*parts, strict=True)]
        micro = self._kind.parts_of_batch
        whole = [whole_part(batch, loss, micro, weight) for batch, weight in zip(step, weights, strict=True)]
        return [TakeStep(tuple(whole))]


def _is_beginning(anchor_P: Tensor, vector_V: Tensor) -> bool:
    """True if the anchor is the beginning of the state itself."""
    return anchor_P.data_ptr() == vector_V.data_ptr()
