"""Data parallelism: each rank holds the whole model and takes a share of each batch.

Shapes: see :mod:`fed.vectors.layout`.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from fed.clients.scoring.measures import Loss
from fed.clients.training.parallel.collectives import check_alike
from fed.clients.training.parallel.pieces import filled, whole_pieces
from fed.clients.training.parallel.setup import BatchPart, RankSetup
from fed.clients.training.parallel.way import Found, Rank, Way
from fed.clients.training.parallel.with_loss import WithLoss
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["DataParallel"]


class _ReachingLoss(WithLoss):
    """The loss of a model, which depends on all of its parameters.

    Args:
        module: the model.
    """

    def __init__(self, module: "nn.Module") -> None:
        super().__init__(module)
        self._trained = [part for part in module.parameters() if part.requires_grad]

    def forward(self, loss: Loss, inputs: Tree, targets: Tree) -> Tensor:
        """The loss of a batch."""
        found = super().forward(loss, inputs, targets)
        reached: Tensor = _Reaches.apply(found, *self._trained)  # type: ignore[no-untyped-call]
        return reached


class _Reaches(torch.autograd.Function):
    """The loss as it is, which depends on all parameters, on those that it does not reach with no gradient.

    DistributedDataParallel waits for the gradients of all parameters.
    """

    @staticmethod
    def forward(context: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        """The loss."""
        context.parameters = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """The gradient of the loss alone."""
        return (gradient, *[None] * context.parameters)


class DataParallel(Way):
    """Way of ``ddp``. Gradients are summed as they are found, by PyTorch's own DistributedDataParallel."""

    def __init__(self, setup: RankSetup, rank: Rank, precision: AbstractContextManager[object]) -> None:
        super().__init__(setup, rank, precision)
        filled(self.module, rank.device)
        self.module.to(rank.device)
        self.pieces = whole_pieces(self.module, is_written=rank.number == 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # what follows it has no such choice
            self._summed = DistributedDataParallel(
                _ReachingLoss(self.module),
                broadcast_buffers=False,
                init_sync=False,  # each rank fills its own before every task
                gradient_as_bucket_view=True,
            )

    def backward(self, part: BatchPart, loss: Loss, scale: float, *, is_last: bool) -> Found:  # noqa: D102
        summed: Any = self._summed
        with nullcontext() if is_last else summed.no_sync():
            with self.precision:
                found: Tensor = summed(loss, part.inputs, part.targets)
            (share,) = part.shares
            # DistributedDataParallel takes the mean over ranks, and what is wanted is a sum.
            (found * (scale * share * part.weight * self.rank.count)).backward()  # type: ignore[no-untyped-call]
        return [(found.detach(), share * part.samples)]

    def check_buffers(self, before: Sequence[Tensor], after: Sequence[Tensor], names: Sequence[str]) -> None:  # noqa: D102
        check_alike(after, names)
