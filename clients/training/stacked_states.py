"""Stacked states: the states of a group of clients as tensors with a row for each client.

Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fed.layout import Layout

__all__ = ["StackedStates"]

_ALIGNMENT_BYTES = 64


class StackedStates:
    """States of a group of clients: each of the model's tensors is one tensor with a row for every client.

    Args:
        layout: of one client's state.
        rows: how many clients.
        device: where they lie.
        in_rows: a client's trainable tensors stand side by side, for rules and optimizers that see them as one vector;
            each is as aligned as if it stood alone. Else each tensor lies by itself, which products prefer.

    Attributes:
        rows: how many clients.
        shared: how many numbers of a row of ``x_KQ``, the first, are those of parameters that clients share.
        x_KQ: those vectors where ``in_rows``, else of no width.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> stack = StackedStates(Layout.of(module), 3, torch.device("cpu"), in_rows=True)
        >>> stack.load(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([], dtype=torch.int64))
        >>> [tensor.shape for tensor in stack.tensors(2)]
        [torch.Size([2, 1, 2]), torch.Size([2, 1])]
        >>> stack.states()[0][2]
        tensor([1., 2., 3.])
    """

    def __init__(self, layout: Layout, rows: int, device: torch.device, in_rows: bool) -> None:
        self.rows = rows
        self._layout = layout
        dtype = layout.trained[0].dtype
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        widths = [-(-part.size // unit) * unit for part in layout.trained]
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
            sources += vectors.to(self.x_KQ.device).split_with_sizes(sizes, -1)
        for flat, source in zip(self._flat, sources, strict=True):
            flat.copy_(source)

    def states(self) -> tuple[Tensor, Tensor]:
        """The rows as (vectors [K, V], integers [K, I])."""
        for rows, kept in self._finished:
            for flat, part in zip(self._flat, kept, strict=True):
                flat[rows] = part
        floats = len(self._sizes[0])
        vectors_KV = torch.cat([flat.to(self._layout.dtype) for flat in self._flat[:floats]], 1)
        return vectors_KV, torch.cat([self._no_integers, *(flat.long() for flat in self._flat[floats:])], 1)

    def tensors(self, rows: int) -> list[Tensor]:
        """All tensors of the first rows' states: [rows, ...] each, those to be trained first."""
        if rows not in self._tensors:
            pairs = zip(self._flat, self._parts, strict=True)
            self._tensors[rows] = [flat[:rows].view(rows, *part.shape) for flat, part in pairs]
        return self._tensors[rows]

    def finish(self, rows: slice) -> None:
        """Freeze these rows: whatever is added to them is multiplied by 0, or replaced where it is no number."""
        self._finished.append((rows, [flat[rows].clone() for flat in self._flat]))

    def joined(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of the trainable tensors as they stand ``in_rows``: [K, Q]."""
        rows = len(gradients[0])
        pairs = zip(gradients, self._gaps, strict=False)  # or of the first ones
        return torch.cat([part for gradient, gap in pairs for part in (gradient.reshape(rows, -1), gap[:rows])], 1)

    def spread(self, vectors: Tensor) -> Tensor:
        """Vectors of the shared parameters, one or one a client, with a row's gaps; any other tensor as it is."""
        vectors = vectors.to(self.x_KQ.device, self.x_KQ.dtype)
        shared = self._layout.shared
        if vectors.shape[-1:] != (shared.parameters,):
            return vectors
        rows = vectors.reshape(-1, shared.parameters)
        spread_KQ = self.joined(rows.split_with_sizes([part.size for part in shared.trained], 1))
        return spread_KQ if vectors.ndim > 1 else spread_KQ[0]
