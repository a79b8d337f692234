"""Local training in one rank: the steps of a task on the pieces of the model that the rank holds.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from fed.aggregators.client_side import each_part
from fed.clients.scoring.losses import counted_cross_entropy
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import HALF
from fed.clients.training.optimizers import Optimizer, optimizer_for
from fed.clients.training.parallel.collectives import is_true_of_any
from fed.clients.training.parallel.pieces import Piece, trained_of
from fed.clients.training.parallel.setup import BatchPart, Begin, RankSetup
from fed.clients.training.parallel.way import Rank, Way
from fed.clients.training.reading import moved
from fed.clients.training.steps import MeanLoss
from fed.errors import InvalidModel
from fed.vectors.fixed_part import TrainingModes
from fed.vectors.randomness import seeded_torch
from fed.vectors.shared_memory import Place
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from fed.clients.scoring.measures import Loss

__all__ = ["MakeWay", "RankTraining"]

MakeWay = Callable[[RankSetup, Rank, AbstractContextManager[object]], Way]

_SEED_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio's: seeds of ranks lie far apart


class RankTraining:
    """Does one task after another, each told in three kinds of messages: begin, steps, end.

    Args:
        setup: parts of the run.
        rank: place of this process.
        make_way: factory of the way in which gradients are found.
        state: memory that all ranks see, the vector [V] and the integers [I].
        context_bytes: memory that all ranks see, with the tensors of a task's context.
        fixed: place → fixed parameter.
    """

    def __init__(
        self,
        setup: RankSetup,
        rank: Rank,
        make_way: MakeWay,
        *,
        state: tuple[Tensor, Tensor],
        context_bytes: Tensor,
        fixed: Callable[[Place], Tensor],
    ) -> None:
        self._setup = setup
        self._rank = rank
        self._vector_V, self._integers_I = state
        self._context_bytes = context_bytes
        half = HALF.get(setup.local.precision)
        self._is_scaled = half is torch.float16
        precision = torch.autocast(rank.device.type, dtype=half) if half else nullcontext()
        saved = setup.module.state_dict().keys()
        unsaved = {name: part for name, part in setup.module.named_buffers() if name not in saved}
        self._first = {name: part.clone() for name, part in unsaved.items()}
        self._way = make_way(setup, rank, precision)
        self._modes = TrainingModes(self._way.module)
        layout = setup.layout
        self._trained = trained_of(self._way.pieces, layout)
        moves = {part.name for part in layout.trained}
        shared = {part.name for part in layout.shared.trained}
        if setup.phase.trains != "all":
            moves = shared if setup.phase.trains == "shared" else moves - shared
        self._moves = [one.piece.name in moves for one in self._trained]
        held = {piece.name: piece for piece in self._way.pieces}
        self._beside = [(held[part.name], part) for part in layout.averaged if part.name in held]
        self._buffers = [part for part in layout.averaged if part.name not in dict(setup.module.named_parameters())]
        self._integers = list(layout.integers)
        self._fixed = [
            (piece, fixed(setup.fixed[piece.name])) for piece in self._way.pieces if piece.name in setup.fixed
        ]
        with torch.no_grad():
            for piece, whole in self._fixed:
                piece.read(whole)
        self._is_first_task = True

    def begin(self, task: Begin, block: ExitStack) -> None:
        """Fill the rank's pieces, and set its draws.

        Args:
            task: the task.
            block: block that ends with the task.
        """
        rank = self._rank.number
        seed = task.seed if self._way.draws_alike else (task.seed + rank * _SEED_STRIDE) % 2**63
        block.enter_context(seeded_torch(seed, self._rank.device))
        self._task = task
        self._loss: Loss = counted_cross_entropy if task.counts else self._setup.loss
        self._losses = MeanLoss()
        self._scale = 2.0**16 if self._is_scaled else 1.0  # a power of two scales without rounding
        self._measured: list[Tensor] = []
        with torch.no_grad():
            self._load()
            self._before = [part.clone() for part in self._moving_buffers()]
            context = self._context(task.context)
            parameters = self._setup.layout.shared.parameters
            self._contexts: list[LocalContext | None] = [
                context.spread(one.spread(parameters), one.numbers) if self._corrects and one.is_shared else None
                for one in self._trained
            ]
        self._optimizers: list[Optimizer] = [optimizer_for(self._setup.local, task.lr) for _ in self._trained]
        self._modes.set()

    def step(self, parts: Sequence[BatchPart]) -> None:
        """Take a step, or where the gradient is to be measured, keep it."""
        gradients = self._gradients([self._on_device(part) for part in parts])
        if self._task.measures:
            self._measured = gradients
            return
        rule = self._setup.phase.rule
        with torch.no_grad():
            for place, (one, gradient) in enumerate(zip(self._trained, gradients, strict=True)):
                if not self._moves[place]:
                    continue
                context = self._contexts[place]
                if context is not None:
                    assert rule is not None
                    gradient = context.corrected(rule, gradient, one.numbers, len(one.numbers))
                self._optimizers[place].step(one.numbers, gradient)

    def end(self) -> float:
        """Write the trained pieces, or the measured gradient; the rank's part of the sum of losses."""
        with torch.no_grad():
            results = self._measured if self._task.measures else [one.numbers for one in self._trained]
            for one, numbers in zip(self._trained, results, strict=True):
                if one.piece.is_written:
                    one.piece.write(one.part.view(self._vector_V), numbers)
            if not self._task.measures:
                self._check()
                self._write_others()
        return self._losses.sum()

    @property
    def _corrects(self) -> bool:
        rule = self._setup.phase.rule
        return rule is not None and rule.corrects

    def _on_device(self, part: BatchPart) -> BatchPart:
        inputs = moved(part.inputs, self._rank.device)
        targets = moved(part.targets, self._rank.device)
        return BatchPart(
            inputs=inputs,
            targets=targets,
            shares=part.shares,
            sizes=part.sizes,
            weight=part.weight,
            samples=part.samples,
        )

    def _load(self) -> None:
        for one in self._trained:
            one.piece.read(one.part.view(self._vector_V))
        for piece, part in self._beside:
            piece.read(part.view(self._vector_V))
        for part in self._buffers:
            self._way.module.get_buffer(part.name).copy_(part.view(self._vector_V))
        for part in self._integers:
            self._way.module.get_buffer(part.name).copy_(part.view(self._integers_I))
        for name, first in self._first.items():
            buffer = self._way.module.get_buffer(name)
            if buffer.shape == first.shape:
                buffer.copy_(first)

    def _moving_buffers(self) -> list[Tensor]:
        return [self._way.module.get_buffer(part.name) for part in (*self._buffers, *self._integers)]

    def _context(self, context: LocalContext) -> LocalContext:
        """Context with tensors in the places of their places in memory."""

        def there(place: Place) -> Tensor:
            return place.in_(self._context_bytes)

        anchor = context.anchor_P
        return context._replace(
            client_state=each_part(context.client_state, there),  # type: ignore[arg-type]  # places, not yet tensors
            broadcast=tuple(map(there, context.broadcast)),  # type: ignore[arg-type]
            anchor_P=None if anchor is None else there(anchor),  # type: ignore[arg-type]
        )

    def _gradients(self, parts: Sequence[BatchPart]) -> list[Tensor]:
        """Gradients of the step's mean loss, a vector of each trained piece."""
        while True:
            state = self._noted() if self._is_scaled else None
            self._way.module.zero_grad(set_to_none=True)
            found: list[tuple[Tensor, float]] = []
            for number, part in enumerate(parts, 1):
                found += self._way.backward(part, self._loss, self._scale, is_last=number == len(parts))
            gradients = []
            for one in self._trained:
                gradient = self._way.gradient(one.piece)
                gradients.append(torch.zeros_like(one.numbers) if gradient is None else gradient.to(one.numbers.dtype))
            if state is None or self._is_settled(gradients, found):
                break
            self._scale /= 2
            self._restore(state)
        for loss, weight in found:
            self._losses.add(loss.double(), weight)
        return [gradient.div_(self._scale) for gradient in gradients] if self._is_scaled else gradients

    def _is_settled(self, gradients: Sequence[Tensor], found: Sequence[tuple[Tensor, float]]) -> bool:
        """True if a scaled step counts: on no rank a gradient has overflown, or a smaller scale would not help."""
        overflows = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        diverged = not all(bool(torch.isfinite(loss)) for loss, _ in found)
        device = self._rank.device
        if not is_true_of_any(overflows, device):
            return True
        return is_true_of_any(diverged, device) or self._scale <= 1

    def _noted(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Buffers and the states of the generators, which a forward pass moves."""
        of_device = torch.cuda.get_rng_state(self._rank.device) if self._rank.device.type == "cuda" else None
        return [part.clone() for part in self._way.module.buffers()], torch.get_rng_state(), of_device

    def _restore(self, state: tuple[list[Tensor], Tensor, Tensor | None]) -> None:
        buffers, generator, of_device = state
        for part, before in zip(self._way.module.buffers(), buffers, strict=True):
            part.copy_(before)
        torch.set_rng_state(generator)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, self._rank.device)

    def _check(self) -> None:
        """Check the buffers of each task, and after the first one the fixed part."""
        names = [part.name for part in (*self._buffers, *self._integers)]
        self._way.check_buffers(self._before, self._moving_buffers(), names)
        if self._is_first_task:
            for piece, whole in self._fixed:
                _check_fixed(piece, whole)
        self._is_first_task = False

    def _write_others(self) -> None:
        """Write state that is not trained."""
        if self._rank.number == 0:
            for part in self._buffers:
                part.view(self._vector_V).copy_(self._way.module.get_buffer(part.name))
            for part in self._integers:
                part.view(self._integers_I).copy_(self._way.module.get_buffer(part.name))


def _check_fixed(piece: Piece, whole: Tensor) -> None:
    cut = piece.cut(whole)
    if not torch.equal(piece.local.view(cut.shape).to(cut.device), cut):
        raise InvalidModel(
            f"a model's forward pass must leave what is not trained as it is, for it is the same on all clients, got a "
            f"change of {piece.name}: make it a buffer of a layer that is trained, which is averaged"
        )
