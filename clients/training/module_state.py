"""Module state: reads and writes the state of a module that trains, whose tensors are found once.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fed.clients.training.flat import FlatParameters
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["ModuleState"]


class ModuleState:
    """Does for one module what :meth:`fed.vectors.layout.Layout.pack` and its reverse do for any, without a walk.

    A forward pass may set a buffer anew, so that buffers are looked up by their names in the modules that hold them.

    Args:
        module: the model.
        layout: layout of the module.
        flat: trainable parameters of the module.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> layout = Layout.of(module)
        >>> state = ModuleState(module, layout, FlatParameters(module, layout))
        >>> state.write(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]), torch.tensor([9]))
        >>> module.running_mean.tolist(), module.num_batches_tracked.item(), state.read()[0].tolist()
        ([5.0, 6.0], 9, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    """

    def __init__(self, module: "nn.Module", layout: Layout, flat: FlatParameters) -> None:
        self._flat = flat
        self._trained = len(layout.trained)
        self._dtype = layout.dtype
        self._sizes = [part.size for part in (*layout.trained, *layout.averaged)]
        self._integer_sizes = [part.size for part in layout.integers]
        self._averaged = [_Place.of(module, part.name) for part in layout.averaged]
        self._integers = [_Place.of(module, part.name) for part in layout.integers]
        saved = module.state_dict().keys()
        unsaved = {name: part for name, part in module.named_buffers() if name not in saved}
        self._unsaved = [(_Place.of(module, name), part.clone()) for name, part in unsaved.items()]

    def write(self, vector_V: Tensor, integers_I: Tensor) -> None:
        """Write a state into the module; buffers that are not saved get their first values.

        Args:
            vector_V: floating-point state.
            integers_I: integers of the state.
        """
        pieces = vector_V.split_with_sizes(self._sizes)
        self._flat.fill(pieces[: self._trained])
        _write(self._averaged, pieces[self._trained :])
        if self._integers:
            _write(self._integers, integers_I.split_with_sizes(self._integer_sizes))
        for place, first in self._unsaved:
            part = getattr(place.holder, place.name, None)
            if part is not None and part.shape == first.shape:
                part.copy_(first)

    def read(self) -> tuple[Tensor, Tensor]:
        """The state as (vector [V], integers [I]), on the device of its parameters."""
        pieces = self._flat.pieces() + [place.held().reshape(-1) for place in self._averaged]
        vector_V = torch.cat(pieces).to(self._dtype)
        if not self._integers:
            return vector_V, torch.empty(0, dtype=torch.int64, device=vector_V.device)
        return vector_V, torch.cat([place.held().reshape(-1).long() for place in self._integers])


class _Place(NamedTuple):
    """Place of a buffer, or of a parameter that is not trained.

    Args:
        holder: the module that holds it.
        name: name of the tensor there.
    """

    holder: "nn.Module"
    name: str

    @classmethod
    def of(cls, module: "nn.Module", name: str) -> "_Place":
        path, _, own = name.rpartition(".")
        return cls(module.get_submodule(path), own)

    def held(self) -> Tensor:
        # Detached, since a leaf with a gradient refuses changes in place.
        tensor: Tensor = getattr(self.holder, self.name).detach()
        return tensor


def _write(places: Sequence[_Place], pieces: Sequence[Tensor]) -> None:
    for place, piece in zip(places, pieces, strict=True):
        held = place.held()
        held.copy_(piece.view(held.shape))
