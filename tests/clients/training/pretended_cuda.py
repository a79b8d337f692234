"""Pretended CUDA: PyTorch's streams, events and graphs, which note what is asked of them and compute at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["PretendedCuda"]


class _Stream:
    def __init__(self, cuda: "PretendedCuda", name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: "_Stream") -> None:
        self._cuda.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "_Event") -> None:
        self._cuda.done.append(f"{self.name} waits for an event of {event.of}")

    def synchronize(self) -> None:
        self._cuda.done.append(f"program waits for {self.name}")


class _Event:
    def __init__(self, cuda: "PretendedCuda") -> None:
        self._cuda = cuda
        self.of = ""

    def record(self, stream: _Stream) -> None:
        self.of = stream.name

    def synchronize(self) -> None:
        self._cuda.done.append(f"program waits for an event of {self.of}")


class _Graph:
    def __init__(self, cuda: "PretendedCuda") -> None:
        self._cuda = cuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self._cuda.done.append(f"begin of a capture on {self._cuda.current.name}, {capture_error_mode}")
        self._cuda.is_capturing = True

    def capture_end(self) -> None:
        self._cuda.is_capturing = False
        self._cuda.done.append("end of a capture")
        if self._cuda.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self._cuda.done.append(f"replay on {self._cuda.current.name}")


class PretendedCuda:
    """PyTorch's functions of CUDA that streams and graphs need, on the processor.

    Attributes:
        done: what was asked of streams and graphs, in turn.
        current: stream that work goes to.
        is_capturing: True between the begin and the end of a capture.
        is_invalid: True if captures fail at their end.

    Args:
        monkeypatch: pytest's, which takes PyTorch's own functions back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.current = _Stream(self, "computing")
        self.is_capturing = False
        self.is_invalid = False
        empty: Callable[..., Tensor] = torch.empty
        stand_ins: dict[str, Any] = {
            "Stream": lambda device: _Stream(self, "beside"),
            "Event": lambda: _Event(self),
            "CUDAGraph": lambda: _Graph(self),
            "graph_pool_handle": lambda: (0, 1),
            "current_stream": lambda device: self.current,
            "current_device": lambda: 0,
            "empty_cache": lambda: self.done.append("cache emptied"),
            "stream": self._on_stream,
            "device": self._on_device,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(
            torch._C,
            "_cuda_endAllocateToPool",
            lambda device, pool: self.done.append(f"pool {pool} closed on {device}"),
            raising=False,
        )
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: False)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self._keep(stream))
        monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **keys: empty(*shape, **keys))

    def _keep(self, stream: _Stream) -> None:
        self.done.append(f"memory kept for {stream.name}")

    @contextmanager
    def _on_stream(self, stream: _Stream) -> Iterator[None]:
        before = self.current
        self.current = stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        yield
