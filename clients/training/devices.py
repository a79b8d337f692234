"""Devices of this machine that workers compute on."""

import math
from collections.abc import Callable, Iterable, Sequence

from fed.errors import InvalidExperiment, InvalidInput
from fed.processes.machine import usable_cores
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "deal_from",
    "device_of",
    "devices_named",
    "devices_of",
    "devices_of_ranks",
    "found_devices",
    "least_memory_bytes",
    "memory_bytes",
    "most_side_by_side",
    "read_back",
    "room_for_samples",
    "scoring_device",
    "settle_on",
    "uploaded",
]

_SHARE_OF_SAMPLES = 0.25
"""Share of a GPU's free memory for a group's samples: models, gradients and outputs need most of it."""

_MOST_ON_CPU = 8
"""Number of processes that may train one client on the CPU, however few its cores are."""

_RUNS_ON_A_GPU = 4
"""Number of runs side by side that share a GPU, unless the user says how many: a group takes a fifth of its memory."""

_first_place = 0


def found_devices() -> list[str]:
    """Names of this machine's devices."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apples = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{index}" for index in range(gpus)), *apples]


def devices_named(name: str) -> "list[torch.device]":
    """All devices that a name means, each once.

    Args:
        name: auto, cpu, cuda, a GPU such as cuda:1, or mps, as :data:`fed.config.device_names.DeviceName` says.

    Raises:
        InvalidInput: if this machine has none.

    Example:
        >>> devices_named("cpu")
        [device(type='cpu')]
    """
    found = found_devices()
    gpus = [one for one in found if one.startswith("cuda")]
    meant = {"auto": gpus or ["cpu"], "cuda": gpus}.get(name, [name])
    if not meant or meant[0] not in found:
        raise InvalidInput(
            f"device {name} is not on this machine, which has {' and '.join(found)}: choose one of them, or auto"
        )
    first = _first_place % len(meant)
    return [torch.device(one) for one in meant[first:] + meant[:first]]


def deal_from(place: int) -> None:
    """Let this process take GPUs from another one on than the first: of runs side by side each has its own.

    Args:
        place: number of the process among those side by side, from 0.
    """
    global _first_place
    _first_place = place


def most_side_by_side(names: Iterable[str]) -> int | None:
    """Largest number of runs that GPUs have room for at a time; None if no run computes on one.

    Args:
        names: names of the devices of the runs.

    Raises:
        InvalidInput: if one is not on this machine.
    """
    gpus = {device for name in names for device in devices_named(name) if device.type == "cuda"}
    return _RUNS_ON_A_GPU * len(gpus) or None


def devices_of(workers: int, name: str = "auto") -> "list[torch.device]":
    """Device of each worker: GPUs are dealt to workers in turn.

    Args:
        workers: number of workers.
        name: name of the device.

    Raises:
        InvalidInput: if it is not on this machine.
    """
    devices = devices_named(name)
    return [devices[worker % len(devices)] for worker in range(workers)]


def device_of(name: str = "auto") -> "torch.device":
    """Device of one worker alone: the first of those that the name means.

    Args:
        name: name of the device.

    Raises:
        InvalidInput: if it is not on this machine.
    """
    return devices_named(name)[0]


def devices_of_ranks(first: "torch.device", count: int) -> "list[torch.device]":
    """Device of each process that trains a client together with others: on GPUs one each, from the first on.

    Args:
        first: device of the worker that the processes belong to.
        count: number of processes, ``local.devices``.

    Raises:
        InvalidExperiment: if the machine has too few.

    Example:
        >>> devices_of_ranks(torch.device("cpu"), 2)
        [device(type='cpu'), device(type='cpu')]
    """
    if first.type == "cpu":
        most = max(_MOST_ON_CPU, usable_cores())
        if count > most:  # a node takes the number from its server
            raise InvalidExperiment(
                f"local.devices must be at most {most} on the CPU of this machine of {usable_cores()} cores, got "
                f"{count}: lower it"
            )
        return [first] * count
    gpus = torch.cuda.device_count() if first.type == "cuda" else 1
    if count > gpus:
        raise InvalidExperiment(
            f"local.devices must be at most {gpus}, the number of this machine's devices of the kind {first.type}, got "
            f"{count}: lower it, or compute on the CPU"
        )
    return [torch.device(first.type, ((first.index or 0) + rank) % gpus) for rank in range(count)]


def memory_bytes(device: "torch.device") -> int:
    """Whole memory of a GPU in bytes, used or free."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def settle_on(device: "torch.device") -> None:
    """Make a GPU this process's own: what names no device, such as pinned memory, would else take the first one's.

    Each process that touches a GPU has a context there, of some hundred megabytes.

    Args:
        device: device that the process computes on; nothing is done for others than GPUs of NVIDIA.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def least_memory_bytes(name: str, memory_of: "Callable[[torch.device], int] | None" = None) -> int:
    """Whole memory of the smallest GPU that a name means, in bytes.

    Args:
        name: name of the device, which means GPUs.
        memory_of: function that tells a GPU's whole memory in bytes; None: PyTorch's.

    Raises:
        InvalidInput: if it is not on this machine.
    """
    return min(map(memory_of or memory_bytes, devices_named(name)))


def scoring_device(device: "torch.device") -> "torch.device":
    """Device that sums losses and metrics in float64, which Apple's GPUs lack: for them the CPU, else the same.

    Args:
        device: device that computes outputs.
    """
    return torch.device("cpu") if device.type == "mps" else device


def uploaded(part: Tensor, device: "torch.device", *, copy: bool = False) -> Tensor:
    """The same tensor on a device; the program does not wait until it is there.

    Args:
        part: tensor of the CPU, or of that device.
        device: device of the result.
        copy: True for a tensor that shares no memory with the first.
    """
    if device.type == "cuda" and part.is_cpu:
        part = part.contiguous().pin_memory()  # from other memory the driver would copy it, while the program waits
    return part.to(device, non_blocking=True, copy=copy)


def room_for_samples(device: "torch.device") -> float:
    """Bytes of samples that may lie on a device: on a GPU a share of what is free now, elsewhere no limit.

    Args:
        device: device that computes.
    """
    if device.type != "cuda":
        return math.inf
    free_bytes: int = torch.cuda.mem_get_info(device)[0]
    return _SHARE_OF_SAMPLES * free_bytes


def read_back(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, for which the program waits once.

    Args:
        tensors: tensors of one device, the largest last.
    """
    device = tensors[0].device
    if device.type == "cpu":
        return [*tensors]
    is_pinned = device.type == "cuda"
    copies = [torch.empty_like(part, device="cpu", pin_memory=is_pinned) for part in tensors]
    last = len(copies) - 1
    for number, (copy, part) in enumerate(zip(copies, tensors, strict=True)):
        # A stream copies one after the other: when the last is there, so are all.
        copy.copy_(part, non_blocking=number < last)
    return copies
