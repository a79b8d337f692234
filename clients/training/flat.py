"""Flat parameters: a module's trainable parameters as one vector to compute with.

Shapes: see :mod:`fed.layout`.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fed.layout import Layout, Part

__all__ = ["FlatParameters"]

_ALIGNMENT_BYTES = 64

# What torch.autograd.grad calls after checks of its arguments, which take a sixth of a small model's step.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


class FlatParameters:
    """Makes a module's trainable parameters views of one flat vector, ``x_Q``.

    Each parameter begins at a multiple of 64 bytes, as if it had been allocated by itself: kernels may round otherwise
    where memory is not aligned, and training is to be a plain loop's, to the bit. The gaps hold zeros, which
    elementwise rules leave zero.

    Args:
        module: whose parameters' data are replaced.
        layout: the module's.

    Attributes:
        x_Q: the vector.
        shared: how many of its numbers, the first, are those of parameters that clients share.

    Example:
        >>> module = nn.Linear(3, 1)
        >>> flat = FlatParameters(module, Layout.of(module))
        >>> _ = flat.x_Q.fill_(7.0)
        >>> module.bias.item(), len(flat.x_Q)
        (7.0, 17)
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        named = dict(module.named_parameters())
        self._parameters = tuple(named[part.name] for part in layout.trained)
        self._parts = _aligned(layout.trained, self._parameters[0].itemsize)
        ends = [0, *(part.offset + part.size for part in self._parts)]
        self._shared_size = layout.shared.parameters
        self.shared = ends[len(layout.shared.trained)]
        gaps = [part.offset - end for part, end in zip(self._parts, ends, strict=False)]
        self._gaps = [self._parameters[0].new_zeros(gap) if gap else None for gap in gaps]
        convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
        weights = {id(weight) for part in convolutions for weight in part.parameters(recurse=False)}
        self._convolves = [parameter.ndim == 4 and id(parameter) in weights for parameter in self._parameters]
        self._channels_last = [False] * len(self._parts)
        self.x_Q = self._joined([parameter.detach() for parameter in self._parameters])
        self._bind()

    @property
    def has_convolutions(self) -> bool:
        """True if there are weights of 2-D convolutions."""
        return any(self._convolves)

    def arrange(self, *, channels_last: bool) -> None:
        """Store the weights of 2-D convolutions as [out, height, width, in], or in their own order; values stay.

        With channels last, such a convolution also returns channels last.
        """
        arranged = [channels_last and convolves for convolves in self._convolves]
        if arranged != self._channels_last:
            # copies, since x_Q, which they view, is overwritten
            values = [parameter.detach().clone() for parameter in self._parameters]
            self._channels_last = arranged
            self.x_Q.copy_(self._joined(values))
            self._bind()

    def bind_again(self) -> None:
        """Copy in parameters whose ``data`` a forward pass moved elsewhere, as max-norm layers and cuDNN's RNNs do."""
        if [parameter.data_ptr() for parameter in self._parameters] == self._addresses:
            return
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

    def gradient(self, loss: Tensor, *, keep_graph: bool = False) -> Tensor:
        """Gradient [Q] of a scalar; zero for parameters that it does not depend on."""
        return self._joined(
            [
                torch.zeros_like(view) if part is None else part
                for view, part in zip(self._views, self._gradients(loss, keep_graph), strict=True)
            ]
        )

    def descend(self, loss: Tensor, lr: float) -> None:
        """Step of plain gradient descent, x ← x − η ∇loss with η = ``lr``, which stores no gradient [Q]."""
        gradients = self._gradients(loss, keep_graph=False)
        self.bind_again()
        for view, part in zip(self._views, gradients, strict=True):
            if part is not None:
                view.add_(part, alpha=-lr)

    def spread(self, vector_P: Tensor) -> Tensor:
        """Vector of the shared parameters with alignment gaps; any other tensor as it is."""
        vector_P = vector_P.to(self.x_Q.device, self.x_Q.dtype)
        if vector_P.shape != (self._shared_size,):
            return vector_P
        parts = [part for part in self._parts if part.offset < self.shared]
        pieces = vector_P.split_with_sizes([part.size for part in parts])
        return self._joined([piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])

    def gathered(self, vector_Q: Tensor) -> Tensor:
        """Vector [Q] without alignment gaps: [P]."""
        return torch.cat([view.reshape(-1) for view in self.named(vector_Q).values()])

    def named(self, vector_Q: Tensor) -> dict[str, Tensor]:
        """Trainable parameters, by name, that another vector [Q] holds, or its first numbers."""
        places = zip(self._parts, self._channels_last, strict=True)
        held = [(part, channels_last) for part, channels_last in places if part.offset < len(vector_Q)]
        return {part.name: _view(part, vector_Q, channels_last) for part, channels_last in held}

    def _gradients(self, loss: Tensor, keep_graph: bool) -> list[Tensor | None]:
        if loss.ndim or not loss.is_cpu:
            parts = torch.autograd.grad(loss, self._parameters, retain_graph=keep_graph, allow_unused=True)
        else:
            parts = _run_backward(
                (loss,), (torch.ones_like(loss),), keep_graph, False, self._parameters, True, accumulate_grad=False
            )
        # embeddings may be sparse
        return [part.to_dense() if part is not None and part.is_sparse else part for part in parts]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Tensors in the parameters' shapes as one vector [Q]."""
        pieces = []
        for gap, channels_last, part in zip(self._gaps, self._channels_last, parts, strict=False):  # or the first ones
            if gap is not None:
                pieces.append(gap.to(part.dtype))
            pieces.append((part.permute(0, 2, 3, 1) if channels_last else part).reshape(-1))
        return torch.cat(pieces)

    def _bind(self) -> None:
        self._views = [*self.named(self.x_Q).values()]
        self._addresses = [view.data_ptr() for view in self._views]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view


def _view(part: Part, x_Q: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return part.view(x_Q)
    o, i, h, w = part.shape
    return replace(part, shape=torch.Size((o, h, w, i))).view(x_Q).permute(0, 3, 1, 2)


def _aligned(parts: tuple[Part, ...], itemsize: int) -> list[Part]:
    unit = _ALIGNMENT_BYTES // itemsize
    placed, end = [], 0
    for part in parts:
        placed.append(replace(part, offset=-(-end // unit) * unit))
        end = placed[-1].offset + part.size
    return placed
