"""Exchanges of activations between ranks, each with the exchange of its gradient (Shoeybi et al. 2019, 1909.08053).

Shapes: see :mod:`fed.vectors.layout`.
"""

from typing import Any

from torch import distributed

from fed.clients.training.parallel.splits import even_sizes
from fed.vectors.tensors import Tensor, torch

__all__ = ["copied", "gathered", "scattered", "share_of", "summed"]


def share_of(size: int) -> slice:
    """Share of this rank in a dimension.

    Args:
        size: number of entries of the dimension.
    """
    sizes = even_sizes(size, distributed.get_world_size())
    begin = sum(sizes[: distributed.get_rank()])
    return slice(begin, begin + sizes[distributed.get_rank()])


def copied(tensor: Tensor) -> Tensor:
    """A tensor that all ranks have, for each to use a part of it; its gradient is the sum of theirs."""
    return _apply(_Copied, tensor)


def summed(tensor: Tensor) -> Tensor:
    """Sum of the ranks' tensors; the gradient of each is the sum's."""
    return _apply(_Summed, tensor)


def gathered(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """Ranks' shares of a dimension, joined.

    Args:
        tensor: share of this rank.
        dimension: dimension of which it is a share.
        size: size of the whole dimension.
    """
    return _apply(_Gathered, tensor, dimension % tensor.ndim, size)


def scattered(tensor: Tensor, dimension: int) -> Tensor:
    """Share of this rank in a dimension of a tensor that all ranks have.

    Args:
        tensor: the whole tensor.
        dimension: dimension that is shared out.
    """
    return _apply(_Scattered, tensor, dimension % tensor.ndim)


def _apply(function: Any, *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)
    return found


def _sum(tensor: Tensor) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total


def _joined(tensor: Tensor, dimension: int, size: int) -> Tensor:
    shape = [*tensor.shape]
    shape[dimension] = size
    whole = tensor.new_zeros(shape)
    its = share_of(size)
    whole.narrow(dimension, its.start, its.stop - its.start).copy_(tensor)
    distributed.all_reduce(whole)  # shares may be of several sizes, which not all backends gather
    return whole


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _sum(gradient)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return _sum(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, dimension: int, size: int) -> Tensor:
        context.dimension = dimension
        context.size = size
        return _joined(tensor, dimension, size)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        its = share_of(context.size)
        return gradient.narrow(context.dimension, its.start, its.stop - its.start), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, dimension: int) -> Tensor:
        context.dimension = dimension
        context.size = tensor.shape[dimension]
        its = share_of(context.size)
        return tensor.narrow(dimension, its.start, its.stop - its.start).clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _joined(gradient, context.dimension, context.size), None
