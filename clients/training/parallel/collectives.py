"""Collective operations among the ranks of one client's training."""

from collections.abc import Sequence

from torch import distributed

from fed.errors import InvalidModel
from fed.vectors.tensors import Tensor, torch

__all__ = ["check_alike", "is_true_of_any", "summed"]


def summed(tensor: Tensor) -> Tensor:
    """Sum over the ranks, in place."""
    distributed.all_reduce(tensor)
    return tensor


def is_true_of_any(flag: bool, device: "torch.device") -> bool:
    """True if a flag is true on some rank.

    Args:
        flag: flag of this rank.
        device: device that the ranks' messages lie on.
    """
    seen = torch.tensor([float(flag)], device=device)
    distributed.all_reduce(seen, op=distributed.ReduceOp.MAX)
    return bool(seen.item())


def check_alike(buffers: Sequence[Tensor], names: Sequence[str]) -> None:
    """Check that ranks, each of which has seen a share of each batch, have the same buffers.

    Args:
        buffers: buffers of this rank.
        names: names of the buffers.

    Raises:
        InvalidModel: if they differ.
    """
    for name, buffer in zip(names, buffers, strict=True):
        least = buffer.double()
        most = least.clone()
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
        distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise InvalidModel(
                f"a buffer must not depend on the samples of a batch where local.parallel splits batches, for each "
                f"device sees a share alone, got {name}, which differs between devices: use local.parallel: tensor, or "
                "one device"
            )
