"""Embeddings with a padding index, as ``vmap`` can compute their gradients for many clients at once.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fed.vectors.tensors import Tensor

__all__ = ["PaddedEmbeddings"]


class PaddedEmbeddings(TorchFunctionMode):
    """Mode in which the vector of a padding index gets no gradient by an operation of its own.

    PyTorch's own rule for ``vmap`` numbers all clients' vectors in one row, in which it knows the padding index of the
    first client alone. Other options of embeddings stay as they are.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation, in this way if it is such an embedding."""
        kwargs = kwargs or {}
        if function is functional.embedding:
            return _embedded(*args, **kwargs)
        return function(*args, **kwargs)


def _embedded(places: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    vectors = functional.embedding(places, weight, None, *args, **kwargs)
    if padding_idx is None:
        return vectors
    padding = padding_idx % weight.shape[0]  # it may count from the end
    return vectors.where((places != padding).unsqueeze(-1), vectors.detach())
