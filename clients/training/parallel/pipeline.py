"""Pipeline parallelism: each rank holds a stage of the model, and micro-batches pass through the stages.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import distributed

from fed.clients.scoring.measures import Loss
from fed.clients.training.parallel.pieces import filled, whole_pieces
from fed.clients.training.parallel.setup import BatchPart, RankSetup
from fed.clients.training.parallel.stage_run import StageRun
from fed.clients.training.parallel.stages import cut
from fed.clients.training.parallel.way import Found, Rank, Way
from fed.clients.training.reading import moved
from fed.config.parallel import Pipeline
from fed.errors import InvalidModel
from fed.vectors import trees
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["PipelineStage", "order_of"]

_HEADER = 128  # numbers that describe the tensors between two stages
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def order_of(schedule: str, stage: int, stages: int, micro_batches: int) -> Iterator[str]:
    """Order of a stage's forward and backward passes, each of the next micro-batch of its kind.

    Args:
        schedule: gpipe (Huang et al. 2019, 1811.06965) or 1f1b (Narayanan et al. 2019, 1806.03377).
        stage: number of the stage, from 0.
        stages: number of stages.
        micro_batches: number of micro-batches.

    Example:
        >>> "".join(order_of("1f1b", 0, 2, 3)), "".join(order_of("1f1b", 1, 2, 3)), "".join(order_of("gpipe", 0, 2, 3))
        ('FFBFBB', 'FBFBFB', 'FFFBBB')
    """
    first = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    yield from "F" * first
    yield from "FB" * (micro_batches - first)
    yield from "B" * first


class _Spec(NamedTuple):
    """Tensor that goes from a stage to the next."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"
    has_gradient: bool


class _Flight(NamedTuple):
    """Micro-batch between its forward and its backward pass: what came in, and what went out."""

    given: list[Tensor]
    left: list[Tensor]


class PipelineStage(Way):
    """Way of ``pipeline``. Parameters that several stages use have their gradients summed over these."""

    def __init__(self, setup: RankSetup, rank: Rank, precision: AbstractContextManager[object]) -> None:
        super().__init__(setup, rank, precision)
        assert isinstance(setup.kind, Pipeline)
        self._schedule = setup.kind.schedule
        for layer in self.module.modules():
            for name, buffer in [*layer.named_buffers(recurse=False)]:
                setattr(layer, name, buffer.to(rank.device))
        example = moved(setup.example, rank.device)
        stages = cut(self.module, example, rank.device, names=setup.kind.stages, count=rank.count)
        own = stages.held[rank.number]
        filled(self.module, rank.device, held=own)
        first = {name: min(number for number, held in enumerate(stages.held) if name in held) for name in own}
        self.pieces = [
            replace(piece, is_written=first[piece.name] == rank.number)
            for piece in whole_pieces(self.module, is_written=True)
            if piece.name in own
        ]
        bounds = [None, *stages.begins, None]
        self._run = StageRun(self.module, bounds[rank.number], bounds[rank.number + 1], rank.device)
        self._is_last = rank.number == rank.count - 1
        self._summed = _groups_of(stages.held, rank, dict(self.module.named_parameters()))
        # One for each direction, or NCCL's two queues could wait for each other.
        self._ahead = distributed.new_group(timeout=rank.patience)
        self._back = distributed.new_group(timeout=rank.patience)
        self._sending: list[tuple[Any, Tensor]] = []

    def backward(self, part: BatchPart, loss: Loss, scale: float, *, is_last: bool) -> Found:  # noqa: D102
        micro = iter(_micro_batches(part))
        flights: deque[_Flight] = deque()
        found: list[tuple[Tensor, float]] = []
        for kind in order_of(self._schedule, self.rank.number, self.rank.count, len(part.sizes)):
            if kind == "F":
                inputs, targets, share = next(micro)
                given, output = self._forward(inputs)
                if self._is_last:
                    with self.precision:
                        value = loss(output, targets)
                    found.append((value.detach(), share * part.samples))
                    output = [value * (scale * share * part.weight)]
                flights.append(_Flight(given, output))
            else:
                self._backward(flights.popleft())
        for work, _ in self._sending:
            work.wait()
        self._sending = []
        if is_last:
            self._sum_shared()
        return found

    def check_buffers(self, before: Sequence[Tensor], after: Sequence[Tensor], names: Sequence[str]) -> None:  # noqa: D102
        if not names:
            return
        have_moved = [float(not torch.equal(old, new)) for old, new in zip(before, after, strict=True)]
        moved_somewhere = torch.tensor(have_moved, device=self.rank.device)
        distributed.all_reduce(moved_somewhere, op=distributed.ReduceOp.MAX)
        for name, is_moved in zip(names, moved_somewhere.tolist(), strict=True):
            if is_moved:
                raise InvalidModel(
                    f"a buffer must not change in training with local.parallel: pipeline, for it would be changed by "
                    f"each micro-batch, got {name}: use another local.parallel, or one device"
                )

    def _forward(self, inputs: Tree) -> tuple[list[Tensor], Any]:
        """Tensors that came in; and those that go to the next stage, or of the last one the model's output."""
        given = self._received() if self.rank.number else []
        with self.precision:
            output = self._run(inputs, given)
        if not self._is_last:
            self._send_on(output)
        return given, output

    def _backward(self, flight: _Flight) -> None:
        outputs = [tensor for tensor in flight.left if tensor.requires_grad]
        if self._is_last:
            gradients: list[Tensor | None] = [None for _ in outputs]
        else:
            gradients = [self._receive(tensor.shape, tensor.dtype, 1, self._back) for tensor in outputs]
        if outputs:
            torch.autograd.backward(outputs, gradients)
        for tensor in flight.given:
            if tensor.requires_grad:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._send(gradient, -1, self._back)

    def _received(self) -> list[Tensor]:
        """Arguments of the stage's first module."""
        # Described each time: a model may leave a mask out where a batch needs none.
        header = self._receive((_HEADER,), torch.int64, -1, self._ahead)
        given = []
        for spec in _read_header(header.tolist()):
            tensor = self._receive(spec.shape, spec.dtype, -1, self._ahead)
            given.append(tensor.requires_grad_(spec.has_gradient))
        return given

    def _send_on(self, left: Sequence[Tensor]) -> None:
        specs = [_Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in left]
        self._send(torch.tensor(_header(specs), dtype=torch.int64, device=self.rank.device), 1, self._ahead)
        for tensor in left:
            self._send(tensor.detach(), 1, self._ahead)

    def _send(self, tensor: Tensor, step: int, group: Any) -> None:
        """Send a tensor to the rank that many places further."""
        numbers = tensor.contiguous().reshape(-1).view(torch.uint8)
        if len(numbers):
            self._sending.append((distributed.isend(numbers, self.rank.number + step, group=group), numbers))

    def _receive(self, shape: Sequence[int], dtype: "torch.dtype", step: int, group: Any) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.rank.device)
        numbers = tensor.reshape(-1).view(torch.uint8)
        if len(numbers):
            distributed.recv(numbers, self.rank.number + step, group=group)
        return tensor

    def _sum_shared(self) -> None:
        for parameter, group in self._summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad, group=group)


def _groups_of(
    held: Sequence[frozenset[str]], rank: Rank, parameters: dict[str, "nn.Parameter"]
) -> list[tuple["nn.Parameter", Any]]:
    """Parameters of this stage that others use too, each with the group of these stages."""
    holders = {
        name: tuple(number for number, names in enumerate(held) if name in names) for name in sorted(set().union(*held))
    }
    # All ranks make all groups, in one order.
    groups = {
        ranks: distributed.new_group(list(ranks), timeout=rank.patience)
        for ranks in sorted(set(holders.values()))
        if len(ranks) > 1
    }
    return [
        (parameters[name], groups[ranks])
        for name, ranks in holders.items()
        if rank.number in ranks and len(ranks) > 1 and parameters[name].requires_grad
    ]


def _micro_batches(part: BatchPart) -> Iterator[tuple[Tree, Tree, float]]:
    """Inputs, targets and share of each micro-batch."""
    begin = 0
    for size, share in zip(part.sizes, part.shares, strict=True):
        its = slice(begin, begin + size)
        if len(part.sizes) == 1:
            yield part.inputs, part.targets, share
        else:
            yield trees.take(part.inputs, its), trees.take(part.targets, its), share
        begin += size


def _header(specs: Sequence[_Spec]) -> list[int]:
    """Description of tensors as numbers: how many, and of each its type, gradient, dimensions and shape."""
    numbers = [len(specs)]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise InvalidModel(
                f"tensors of {spec.dtype} cannot go from one stage to the next: use another local.parallel"
            )
        numbers += [_DTYPES.index(spec.dtype), int(spec.has_gradient), len(spec.shape), *spec.shape]
    if len(numbers) > _HEADER:
        raise InvalidModel(
            f"at most {_HEADER // 8} tensors can go from one stage to the next, got {len(specs)}: begin stages at "
            "other modules"
        )
    return numbers + [0] * (_HEADER - len(numbers))


def _read_header(numbers: Sequence[int]) -> list[_Spec]:
    count, *rest = numbers
    specs = []
    for _ in range(count):
        dtype, has_gradient, dimensions, *rest = rest
        specs.append(_Spec(tuple(rest[:dimensions]), _DTYPES[dtype], bool(has_gradient)))
        rest = rest[dimensions:]
    return specs
