"""Settings of PyTorch that change the bits of results, read in one process and set in another."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fed.vectors.tensors import torch

__all__ = ["current_settings", "one_thread", "take_over"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Block in which PyTorch computes on one thread.

    It gives the same bits however many processes share the machine, and is faster for small models.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def current_settings() -> list[Any]:
    """Settings of this process that change the bits of results, for another to take over."""
    return [current() for current, _ in _settings()]


def take_over(settings: Sequence[Any]) -> None:
    """Compute as another process does.

    Args:
        settings: settings of that process, from its :func:`current_settings`.
    """
    for (_, set_to), value in zip(_settings(), settings, strict=True):
        set_to(value)


def _flag(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


def _settings() -> tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]:
    """Settings: how each is read, and how it is set."""
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _flag(torch.backends.mkldnn, "enabled"),
        # TF32 is not among them: each piece of work sets it, as the experiment says.
        *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        *(_flag(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")),
    )
