"""Devices of this machine that workers compute on."""

from fed.vectors.tensors import torch

__all__ = ["device_of", "devices_of"]


def device_of(worker: int = 0) -> "torch.device":
    """Device of one worker.

    Args:
        worker: number of the worker, from 0: GPUs are dealt to workers in turn.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", worker % torch.cuda.device_count())


def devices_of(workers: int) -> "list[torch.device]":
    """Device of each worker, for so many of them."""
    return [device_of(worker) for worker in range(workers)]
