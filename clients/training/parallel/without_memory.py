"""Parts of a model that have no memory: operations on them give shapes alone, at no cost.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

from fed.clients.training.dispatch_mode import DispatchMode
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Spreading", "spare_recurrent"]


class Spreading(DispatchMode):
    """Block in which the result of an operation has no memory if one of its arguments has none.

    What a model makes on the device of such a result, as for a mask, has memory on the rank's own device.

    Attributes:
        makes_here: False while what is made on the device of such a result has no memory either.

    Args:
        device: device of the rank.
        note: function of all tensors that operations take; None: nobody looks.

    Example:
        >>> shape_B = torch.empty(3, device="meta")
        >>> with Spreading(torch.device("cpu")):
        ...     sum_B = torch.ones(3) + shape_B
        ...     product_B = torch.ones(3, device=sum_B.device) * 2
        >>> sum_B.is_meta, product_B.is_meta
        (True, False)
    """

    def __init__(self, device: "torch.device", note: Callable[[list[Tensor]], None] | None = None) -> None:
        super().__init__()
        self.makes_here = True
        self._device = device
        self._note = note

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation's result."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._note is not None:
            self._note(tensors)
        if any(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map(_as_shape, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
        elif self.makes_here and kwargs.get("device") == torch.device("meta"):
            kwargs = {**kwargs, "device": self._device}
        return function(*args, **kwargs)


def spare_recurrent(module: "nn.Module", current: Callable[[], Spreading | None]) -> None:
    """Let recurrent layers make their first states where their inputs are: PyTorch holds these to one device.

    Args:
        module: the model.
        current: () → the block that has been entered, or None.
    """

    def makes_here(value: bool) -> Callable[..., None]:
        def change(*given: Any) -> None:
            spreading = current()
            if spreading is not None:
                spreading.makes_here = value

        return change

    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(makes_here(False))
            layer.register_forward_hook(makes_here(True))


def _as_shape(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
