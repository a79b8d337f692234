"""Copies ahead: the next steps' batches are on their way to a GPU while it computes.

A batch is copied from pinned memory on a stream of its own. The step that takes it waits on the GPU until it is there;
the program waits for a step of long ago alone, so that batches on their way never fill the memory.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from fed.clients.training.batches import GroupBatch
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch

__all__ = ["CudaLane", "Lane", "Mark", "copied_ahead", "lane_to"]

_AHEAD = 2
"""Number of batches that are on their way beside the one of the present step."""


class Mark(Protocol):
    """Point in what a device has been asked to do."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class Lane(Protocol):
    """Way to a device beside its computation."""

    def empty(self, shape: Sequence[int], dtype: "torch.dtype") -> Tensor:
        """Memory of the CPU for numbers that are sent next."""

    def send(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], Mark]:
        """Begin to copy.

        Args:
            leaves: tensors of the CPU.

        Returns:
            The tensors on the device, whose numbers are there once the mark is passed.
        """

    def take(self, copies: Sequence[Tensor], sent: Mark) -> None:
        """Have what is computed from now on wait for a mark, and keep the copies' memory until it has been computed.

        Args:
            copies: tensors that :meth:`send` gave.
            sent: mark that came with them.
        """

    def mark(self) -> Mark:
        """The end of all that the device has been asked to compute."""


class CudaLane:
    """Lane to a GPU: a stream of its own.

    Args:
        device: the GPU.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, shape: Sequence[int], dtype: "torch.dtype") -> Tensor:
        """Pinned memory, from which the GPU copies by itself."""
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def send(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], Mark]:
        """Begin to copy from pinned memory, which PyTorch keeps until the copy is done."""
        pinned = [leaf if leaf.is_pinned() else leaf.pin_memory() for leaf in leaves]
        with torch.cuda.stream(self._stream):
            copies = [leaf.to(self._device, non_blocking=True) for leaf in pinned]
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record(self._stream)
        return copies, sent

    def take(self, copies: Sequence[Tensor], sent: Any) -> None:
        """Have the present stream wait for an event of this lane's stream, from which the copies' memory comes."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(sent)
        for copy in copies:
            copy.record_stream(computing)

    def mark(self) -> Mark:
        """Event of the present stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def lane_to(device: "torch.device") -> Lane | None:
    """Lane to a device; None where there are no streams."""
    return CudaLane(device) if device.type == "cuda" else None


def copied_ahead(batches: Iterable[GroupBatch], lane: Lane) -> Iterator[GroupBatch]:
    """Batches on a device, of which two are on their way while one is computed with.

    Args:
        batches: batches on the CPU, but for their weights.
        lane: way to the device.
    """
    on_the_way: deque[_Sent] = deque()
    computed: deque[Mark] = deque()
    for batch in batches:
        leaves = [*trees.leaves(batch.inputs), *trees.leaves(batch.targets)]
        on_the_way.append(_Sent(batch, *lane.send(leaves)))
        if len(on_the_way) > _AHEAD:
            yield _arrived(on_the_way.popleft(), lane)
            # Whoever has taken the batch has asked for its step before it asks for another.
            computed.append(lane.mark())
            if len(computed) > _AHEAD:
                computed.popleft().synchronize()
    while on_the_way:
        yield _arrived(on_the_way.popleft(), lane)


class _Sent(NamedTuple):
    batch: GroupBatch
    copies: list[Tensor]
    mark: Mark


def _arrived(sent: _Sent, lane: Lane) -> GroupBatch:
    batch, copies, mark = sent
    lane.take(copies, mark)
    count = len(trees.leaves(batch.inputs))
    inputs = trees.with_leaves(batch.inputs, copies[:count])
    targets = trees.with_leaves(batch.targets, copies[count:])
    return batch._replace(inputs=inputs, targets=targets)
