"""Dispatch mode: sees every operation that PyTorch computes, without its compiler being loaded for that."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's class has no types
    """Base of modes whose ``__torch_dispatch__`` is given each operation."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # PyTorch's class has no types

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's class has no types

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise PyTorch imports its compiler, only to tell it not to compile this."""
        return False
