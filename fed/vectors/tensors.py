"""PyTorch, loaded when it is first used: an experiment is read and shown without it.

Annotations and :func:`isinstance` take :class:`Tensor` as they take PyTorch's own.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or "torch" in sys.modules:
    import torch
    from torch import Tensor, nn
else:
    import importlib
    from types import ModuleType
    from typing import Any

    class _Later(ModuleType):
        """Module whose first use imports it."""

        def __getattr__(self, name: str) -> Any:
            module = importlib.import_module(self.__name__)
            self.__dict__.update(vars(module))
            return getattr(module, name)

    torch = _Later("torch")
    nn = _Later("torch.nn")

    class _Tensors(type):
        """Class of PyTorch's tensors."""

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torch.Tensor)

    class Tensor(metaclass=_Tensors):
        """Tensor of PyTorch."""


__all__ = ["Tensor", "nn", "torch"]
