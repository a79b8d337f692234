"""A module's trainable parameters as one flat vector to compute with.

Shapes: P, trainable parameters; Q ≥ P, the same with gaps between them.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fed.layout import Layout, Part

__all__ = ["FlatParameters"]

_ALIGNMENT_BYTES = 64


class FlatParameters:
    """Makes a module's trainable parameters views of one flat vector, ``x_Q``.

    Each parameter begins at a multiple of 64 bytes, as if it had been allocated by itself: kernels may round otherwise
    where memory is not aligned, and training is to be a plain loop's, to the bit. The gaps hold zeros, which
    elementwise rules leave zero.

    Args:
        module: whose parameters' data are replaced.
        layout: the module's.

    Example:
        >>> module = nn.Linear(3, 1)
        >>> flat = FlatParameters(module, Layout.of(module))
        >>> _ = flat.x_Q.fill_(7.0)
        >>> module.bias.item(), len(flat.x_Q)
        (7.0, 17)
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        named = dict(module.named_parameters())
        self._parameters = [named[part.name] for part in layout.trained]
        self._parts = _aligned(layout.trained, self._parameters[0].itemsize)
        self.x_Q = self.spread(torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters]))
        self._views = [part.view(self.x_Q) for part in self._parts]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view

    def bind_again(self) -> None:
        """Take in parameters whose ``data`` a forward pass put elsewhere, as max-norm layers and cuDNN's RNNs do."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

    def gradient(self, loss: Tensor, *, keep_graph: bool = False) -> Tensor:
        """The gradient [Q] of a scalar; zero for parameters that it does not depend on."""
        parts = torch.autograd.grad(
            loss, self._parameters, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
        )
        return self._joined([(part.to_dense() if part.is_sparse else part).reshape(-1) for part in parts])

    def spread(self, vector_P: Tensor) -> Tensor:
        """A vector [P] with the gaps between parameters, [Q]."""
        return self._joined(list(vector_P.split_with_sizes([part.size for part in self._parts])))

    def _joined(self, parts: list[Tensor]) -> Tensor:
        with_gaps, end = [], 0
        for part, flat in zip(self._parts, parts, strict=True):
            if part.offset > end:
                with_gaps.append(flat.new_zeros(part.offset - end))
            with_gaps.append(flat)
            end = part.offset + part.size
        return torch.cat(with_gaps)


def _aligned(parts: tuple[Part, ...], itemsize: int) -> list[Part]:
    unit = _ALIGNMENT_BYTES // itemsize
    placed, end = [], 0
    for part in parts:
        placed.append(replace(part, offset=-(-end // unit) * unit))
        end = placed[-1].offset + part.size
    return placed
