"""Flat parameters: trainable parameters as one vector to compute with, of one client or stacked of a group.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from fed.clients.training.devices import uploaded
from fed.vectors.layout import Layout, Part
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["FlatParameters", "StackedStates", "gradients_of"]

_ALIGNMENT_BYTES = 64

# What torch.autograd.grad calls after checks of its arguments, which take a sixth of a small model's step.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


def gradients_of(
    loss: Tensor, one: Tensor, parameters: Sequence[Tensor], *, keep_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of a scalar on the CPU, None for parameters that it does not depend on.

    Args:
        loss: the scalar.
        one: 1 in the loss's type, its gradient with respect to itself.
        parameters: leaves of its graph.
        keep_graph: True if the graph is used again.
    """
    # In this order: outputs, their gradients, keep_graph, create_graph, inputs, allow_unreachable.
    found: tuple[Tensor | None, ...] = _run_backward(
        (loss,), (one,), keep_graph, False, tuple(parameters), True, accumulate_grad=False
    )
    return found


class FlatParameters:
    """Makes a module's trainable parameters views of one flat vector, ``x_Q``.

    Each parameter begins at a multiple of 64 bytes, as if it had been allocated by itself: kernels may round otherwise
    where memory is not aligned, and training must have the bits of a plain loop. The gaps hold zeros, which elementwise
    rules leave zero.

    Args:
        module: model; its parameters' data are replaced.
        layout: layout of the module.

    Attributes:
        x_Q: the vector.
        names: names of the parameters.
        views: the parameters' values, views of the vector.
        shared: length of the part of ``x_Q`` that clients share; it comes first.
        has_convolutions: True if there are weights of 2-D convolutions.
        has_channels_last: True if they are stored as [out, height, width, in].

    Example:
        >>> module = nn.Linear(3, 1)
        >>> flat = FlatParameters(module, Layout.of(module))
        >>> _ = flat.x_Q.fill_(7.0)
        >>> module.bias.item(), len(flat.x_Q)
        (7.0, 17)
    """

    def __init__(self, module: "nn.Module", layout: Layout) -> None:
        named = dict(module.named_parameters())
        self._parameters = tuple(named[part.name] for part in layout.trained)
        offsets = accumulate(_aligned_widths(layout.trained), initial=0)
        self._parts = [replace(part, offset=offset) for part, offset in zip(layout.trained, offsets, strict=False)]
        ends = [0, *(part.offset + part.size for part in self._parts)]
        self._shared_size = layout.shared.parameters
        self.shared = ends[len(layout.shared.trained)]
        gaps = [part.offset - end for part, end in zip(self._parts, ends, strict=False)]
        self._gaps = [self._parameters[0].new_zeros(gap) if gap else None for gap in gaps]
        convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
        weights = {id(weight) for part in convolutions for weight in part.parameters(recurse=False)}
        self._convolves = [parameter.ndim == 4 and id(parameter) in weights for parameter in self._parameters]
        self.has_convolutions = any(self._convolves)
        self._channels_last = [False] * len(self._parts)
        self.has_channels_last = False
        self.names = [part.name for part in self._parts]
        self.x_Q = self._joined([parameter.detach() for parameter in self._parameters])
        self._gradient_Q = torch.zeros_like(self.x_Q)  # the gaps stay zero
        self._one = torch.ones((), dtype=self.x_Q.dtype)  # gradient of a loss on the CPU, with respect to itself
        self._bind()

    def arrange(self, *, channels_last: bool) -> None:
        """Store the weights of 2-D convolutions as [out, height, width, in], or in their own order; values stay.

        With channels last, such a convolution also returns channels last.
        """
        arranged = [channels_last and convolves for convolves in self._convolves]
        if arranged != self._channels_last:
            # Copies, since x_Q, which they view, is overwritten.
            values = [parameter.detach().clone() for parameter in self._parameters]
            self._channels_last = arranged
            self.has_channels_last = any(arranged)
            self.x_Q.copy_(self._joined(values))
            self._bind()

    def bind_again(self) -> None:
        """Copy in parameters whose ``data`` a forward pass moved elsewhere, as max-norm layers and cuDNN's RNNs do."""
        if not self._have_moved():
            return
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

    def fill(self, pieces: Sequence[Tensor]) -> None:
        """Give all parameters values, and have the module hold them as views of ``x_Q``.

        Args:
            pieces: values of each parameter, flat, in its own order.
        """
        if self.has_channels_last:
            shaped = [piece.view(part.shape) for piece, part in zip(pieces, self._parts, strict=True)]
            torch._foreach_copy_(self.views, shaped)
        else:
            torch._foreach_copy_(self._flat_views, list(pieces))
        if self._have_moved():
            for parameter, view in zip(self._parameters, self.views, strict=True):
                parameter.data = view

    def pieces(self) -> list[Tensor]:
        """Values of each parameter in ``x_Q``, flat, in its own order; views where they lie in that order."""
        return [view.reshape(-1) for view in self.views] if self.has_channels_last else self._flat_views

    def gradients(self, loss: Tensor, *, keep_graph: bool = False) -> list[Tensor | None]:
        """Gradients of a scalar in the shapes of the parameters; None for those that it does not depend on.

        Parameters that the forward pass has moved elsewhere are copied in afterwards.
        """
        parts: tuple[Tensor | None, ...]
        if loss.ndim or not loss.is_cpu:
            parts = torch.autograd.grad(loss, self._parameters, retain_graph=keep_graph, allow_unused=True)
        else:
            one = self._one if loss.dtype is self._one.dtype else self._one.to(loss.dtype)
            parts = gradients_of(loss, one, self._parameters, keep_graph=keep_graph)
        self.bind_again()
        # Embeddings may be sparse.
        return [part.to_dense() if part is not None and part.is_sparse else part for part in parts]

    def joined(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradients of all parameters as one vector [Q], zero where one is None, until the next ones are joined."""
        torch._foreach_copy_(
            self._gradient_views,
            [
                torch.zeros_like(view) if part is None else part
                for view, part in zip(self.views, gradients, strict=True)
            ],
        )
        return self._gradient_Q

    def descend(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """Step of plain gradient descent, x ← x − η g with η = ``lr``, which stores no gradient [Q]."""
        reached = [part for part in gradients if part is not None]
        views = self.views
        if len(reached) < len(views):
            views = [view for view, part in zip(views, gradients, strict=True) if part is not None]
        if reached and self.x_Q.is_cpu:
            torch._foreach_add_(views, reached, alpha=-lr)  # on the CPU the additions of the loop, in one call
            return
        for view, part in zip(views, reached, strict=True):
            view.add_(part, alpha=-lr)

    def spread(self, vector_P: Tensor) -> Tensor:
        """Vector of the shared parameters with alignment gaps; other tensors stay as they are."""
        vector_P = vector_P.to(self.x_Q.device, self.x_Q.dtype, non_blocking=True)
        if vector_P.shape != (self._shared_size,):
            return vector_P
        parts = [part for part in self._parts if part.offset < self.shared]
        pieces = vector_P.split_with_sizes([part.size for part in parts])
        return self._joined([piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])

    def gathered(self, vector_Q: Tensor) -> Tensor:
        """Vector [Q] without alignment gaps: [P]."""
        return torch.cat([view.reshape(-1) for view in self.named(vector_Q).values()])

    def named(self, vector_Q: Tensor) -> dict[str, Tensor]:
        """Trainable parameters by name, as views of another vector [Q]; of a shorter vector the first parameters."""
        places = zip(self._parts, self._channels_last, strict=True)
        held = [(part, channels_last) for part, channels_last in places if part.offset < len(vector_Q)]
        return {part.name: _view(part, vector_Q, channels_last) for part, channels_last in held}

    def _have_moved(self) -> bool:
        return [parameter.data_ptr() for parameter in self._parameters] != self._addresses

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Tensors in the parameters' shapes as one vector [Q]."""
        pieces = []
        # Not strict: the tensors may be of the first parameters alone.
        for gap, channels_last, part in zip(self._gaps, self._channels_last, parts, strict=False):
            if gap is not None:
                pieces.append(gap.to(part.dtype))
            pieces.append((part.permute(0, 2, 3, 1) if channels_last else part).reshape(-1))
        return torch.cat(pieces)

    def _bind(self) -> None:
        self.views = [*self.named(self.x_Q).values()]
        self._gradient_views = [*self.named(self._gradient_Q).values()]
        self._flat_views = [self.x_Q[part.offset : part.offset + part.size] for part in self._parts]
        self._addresses = [view.data_ptr() for view in self.views]
        for parameter, view in zip(self._parameters, self.views, strict=True):
            parameter.data = view


class StackedStates:
    """States of a group of clients: each of the model's tensors is one tensor with a row for every client.

    Args:
        layout: layout of one client's state.
        rows: number of clients.
        device: device of the states.
        in_rows: True if a client's trainable tensors are to stand side by side, for rules and optimizers that see them
            as one vector; each is as aligned as if it stood alone. Otherwise each tensor has memory of its own, with
            which matrix products are faster.

    Attributes:
        rows: number of clients.
        shared: length of the part of a row of ``x_KQ`` that clients share; it comes first.
        x_KQ: trainable tensors of each client as one vector where ``in_rows``, else of width 0.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> stack = StackedStates(Layout.of(module), 3, torch.device("cpu"), in_rows=True)
        >>> stack.load(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([], dtype=torch.int64))
        >>> [tensor.shape for tensor in stack.tensors(2)]
        [torch.Size([2, 1, 2]), torch.Size([2, 1])]
        >>> stack.states(torch.float32)[0][2]
        tensor([1., 2., 3.])
    """

    def __init__(self, layout: Layout, rows: int, device: "torch.device", in_rows: bool) -> None:
        self.rows = rows
        self._layout = layout
        dtype = layout.trained[0].dtype
        widths = _aligned_widths(layout.trained)
        self.shared = sum(widths[: len(layout.shared.trained)])
        self.x_KQ = torch.zeros(rows, sum(widths) if in_rows else 0, dtype=dtype, device=device)
        pieces = self.x_KQ.split_with_sizes(widths, 1) if in_rows else ()
        self._gaps = [piece[:, part.size :].clone() for piece, part in zip(pieces, layout.trained, strict=False)]
        self._flat = [piece[:, : part.size] for piece, part in zip(pieces, layout.trained, strict=False)]
        self._parts = layout.parts
        for part in self._parts[len(self._flat) :]:
            self._flat.append(torch.empty(rows, part.size, dtype=part.dtype, device=device))  # load() writes all of it
        self._no_integers = torch.empty(rows, 0, dtype=torch.int64, device=device)
        floats = (*layout.trained, *layout.averaged)
        self._sizes = [part.size for part in floats], [part.size for part in layout.integers]
        self._tensors: dict[int, list[Tensor]] = {}
        self._finished: list[tuple[slice, list[Tensor]]] = []

    def load(self, start_V: Tensor, integers_I: Tensor) -> None:
        """Start all rows from one state, or each from its own row [K, V] and [K, I]."""
        self._finished = []
        sources: list[Tensor] = []
        for vectors, sizes in zip((start_V, integers_I), self._sizes, strict=True):
            sources += uploaded(vectors, self.x_KQ.device).split_with_sizes(sizes, -1)
        for flat, source in zip(self._flat, sources, strict=True):
            flat.copy_(source)

    def states(self, dtype: "torch.dtype") -> tuple[Tensor, Tensor]:
        """The rows as (vectors [K, V], integers [K, I]); the vectors in a type of floating-point numbers."""
        for rows, kept in self._finished:
            for flat, part in zip(self._flat, kept, strict=True):
                flat[rows] = part
        floats = len(self._sizes[0])
        vectors_KV = torch.empty(self.rows, self._layout.size, dtype=dtype, device=self.x_KQ.device)
        pieces = vectors_KV.split_with_sizes(self._sizes[0], 1)
        for piece, flat in zip(pieces, self._flat, strict=False):
            piece.copy_(flat)
        return vectors_KV, torch.cat([self._no_integers, *(flat.long() for flat in self._flat[floats:])], 1)

    def tensors(self, rows: int) -> list[Tensor]:
        """All tensors of the first rows' states: [rows, ...] each, those to be trained first."""
        if rows not in self._tensors:
            pairs = zip(self._flat, self._parts, strict=True)
            self._tensors[rows] = [flat[:rows].view(rows, *part.shape) for flat, part in pairs]
        return self._tensors[rows]

    def rows_for(self, active: int) -> int:
        """Fewest rows that hold all active ones, among all, half, a quarter and so on: few shapes to record."""
        rows = self.rows
        while active <= (half := -(-rows // 2)) < rows:
            rows = half
        return rows

    def finish(self, rows: slice) -> None:
        """Freeze these rows: later steps leave them as they are, even where they would add NaN."""
        self._finished.append((rows, [flat[rows].clone() for flat in self._flat]))

    def joined(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of the trainable tensors as they stand ``in_rows``: [K, Q]."""
        rows = len(gradients[0])
        pairs = zip(gradients, self._gaps, strict=False)  # gradients may be of the first tensors alone
        return torch.cat([part for gradient, gap in pairs for part in (gradient.reshape(rows, -1), gap[:rows])], 1)

    def spread(self, vectors: Tensor) -> Tensor:
        """Vectors of the shared parameters, one or one a client, with a row's gaps; other tensors stay as they are."""
        vectors = vectors.to(self.x_KQ.device, self.x_KQ.dtype, non_blocking=True)
        shared = self._layout.shared
        if vectors.shape[-1:] != (shared.parameters,):
            return vectors
        rows = vectors.reshape(-1, shared.parameters)
        spread_KQ = self.joined(rows.split_with_sizes([part.size for part in shared.trained], 1))
        return spread_KQ if vectors.ndim > 1 else spread_KQ[0]


def _view(part: Part, x_Q: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return part.view(x_Q)
    o, i, h, w = part.shape
    return replace(part, shape=torch.Size((o, h, w, i))).view(x_Q).permute(0, 3, 1, 2)


def _aligned_widths(parts: tuple[Part, ...]) -> list[int]:
    """Distances from the beginning of each part to the next, counted in numbers: multiples of 64 bytes."""
    unit = _ALIGNMENT_BYTES // parts[0].dtype.itemsize
    return [-(-part.size // unit) * unit for part in parts]
