"""Way of a rank: the pieces of the model that it holds, and the gradients that it finds together with the others.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

from fed.clients.scoring.measures import Loss
from fed.clients.training.parallel.pieces import Piece
from fed.clients.training.parallel.setup import BatchPart, RankSetup
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Found", "Rank", "Way"]

Found = Sequence[tuple[Tensor, float]]
"""Losses that a rank has found, without a graph, each with its weight in the sum of losses over samples."""


@dataclass(frozen=True)
class Rank:
    """Place of a process among those that train one client.

    Args:
        number: number of the rank, from 0.
        count: number of ranks.
        device: device that it computes on.
        patience_s: seconds for which it waits in an exchange for another rank, > 0.
    """

    number: int
    count: int
    device: "torch.device"
    patience_s: float

    @property
    def patience(self) -> timedelta:
        """Time for which it waits, as PyTorch's groups take it."""
        return timedelta(seconds=self.patience_s)


class Way(ABC):
    """Gradients of one rank.

    Attributes:
        module: the model as this rank has it.
        pieces: pieces of all parameters that the rank holds.
        draws_alike: True if all ranks draw the same numbers, since each computes the same outputs.

    Args:
        setup: parts of the run; the way takes its module over.
        rank: place of this process.
        precision: context for forward passes.
    """

    draws_alike = False

    def __init__(self, setup: RankSetup, rank: Rank, precision: AbstractContextManager[object]) -> None:
        self.module: nn.Module = setup.module
        self.pieces: list[Piece] = []
        self.rank = rank
        self.precision = precision

    @abstractmethod
    def backward(self, part: BatchPart, loss: Loss, scale: float, *, is_last: bool) -> Found:
        """Add the gradient of a part's loss to the parameters' ``grad``.

        Args:
            part: part of this rank in a batch, on its device.
            loss: loss in force.
            scale: factor of the loss.
            is_last: True for the last batch of a step.
        """

    def gradient(self, piece: Piece) -> Tensor | None:
        """Gradient of a piece in a vector; None where the loss does not depend on it."""
        found = piece.parameter.grad
        if found is None:
            return None
        return (found.to_dense() if found.is_sparse else found).reshape(-1)

    @abstractmethod
    def check_buffers(self, before: Sequence[Tensor], after: Sequence[Tensor], names: Sequence[str]) -> None:
        """Check that the buffers that a task has moved are those that one process would have.

        Args:
            before: buffers with which the task began.
            after: the buffers now.
            names: names of the buffers.

        Raises:
            InvalidModel: if they are not.
        """
