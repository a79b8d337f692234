"""Limits of a device, measured on it: arithmetic by a large matrix product, memory's bandwidth by a large copy.

From them follows the least time of a round (the roofline): its operations at the peak of arithmetic, or its bytes at
the bandwidth, whichever takes longer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from workloads import Workload

_WARM_UPS = 3


@dataclass(frozen=True)
class Limits:
    """Most that a device does.

    Args:
        operations_per_s: floating-point operations a second, by precision: float32 and tf32.
        bytes_per_s: bytes a second that are read and written.
    """

    operations_per_s: dict[str, float]
    bytes_per_s: float

    def least_s(self, work: "Work", precision: str) -> float:
        """Least seconds of work.

        Example:
            >>> limits = Limits({"float32": 1e12}, bytes_per_s=1e9)
            >>> limits.least_s(Work(operations=2e12, bytes=1e9), "float32")
            2.0
            >>> limits.least_s(Work(operations=2e12, bytes=3e9), "float32")
            3.0
        """
        return max(work.operations / self.operations_per_s[precision], work.bytes / self.bytes_per_s)


@dataclass(frozen=True)
class Work:
    """Least that a round does.

    Args:
        operations: floating-point operations of its matrix products and convolutions.
        bytes: bytes of what each step of each client reads and writes: the model, read and written once, and the batch.
            Where models stay in the device's cache, less goes to its memory, and a round may take less than the least.
    """

    operations: float
    bytes: float

    @classmethod
    def of_round(cls, workload: Workload) -> "Work":
        """Work of a round; nothing is computed for it."""
        (inputs, targets), _ = workload.source()
        module = workload.model(inputs.shape[1:]).to("meta")
        batch = torch.from_numpy(inputs[: workload.batch_size]).to("meta")
        labels = torch.from_numpy(targets[: workload.batch_size]).to("meta")
        with FlopCounterMode(display=False) as counter:
            nn.functional.cross_entropy(module(batch), labels).backward()
        model_bytes = sum(part.nbytes for part in module.parameters())
        steps = workload.cohort * workload.epochs * workload.samples / workload.batch_size
        moved_bytes = 2 * model_bytes + batch.nbytes + labels.nbytes
        return cls(operations=steps * counter.get_total_flops(), bytes=steps * moved_bytes)


def measured(device: torch.device, *, tiny: bool = False, seconds: float = 1.0) -> Limits:
    """Limits of a device.

    Args:
        device: device that computes.
        tiny: True for sizes that a processor computes in milliseconds.
        seconds: approximate time of each measurement.
    """
    size = 256 if tiny else 8192
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    operations: dict[str, float] = {}
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    for precision in ("float32", "tf32"):
        matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        operations[precision] = 2 * size**3 / _call_s(lambda: left @ right, device, seconds)
    matmul.fp32_precision = before
    source = torch.empty(2**20 if tiny else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_s = _call_s(lambda: target.copy_(source), device, seconds)
    return Limits(operations, bytes_per_s=2 * source.nbytes / copied_s)


def _call_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of a call, the mean of as many as take some time."""

    def times_s(count: int) -> float:
        _await(device)
        began_s = time.perf_counter()
        for _ in range(count):
            call()
        _await(device)
        return time.perf_counter() - began_s

    times_s(_WARM_UPS)
    count = max(1, round(seconds * _WARM_UPS / times_s(_WARM_UPS)))
    return times_s(count) / count


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
