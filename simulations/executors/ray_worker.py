"""Worker on a node of a Ray cluster: an actor that makes its work once, and then does item after item."""

import enum
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from fed.clients.training.executor import Make, Work
from fed.errors import FedError
from fed.processes.crash_report import portable, words_of_error
from fed.processes.machine import keep_freed_memory
from fed.simulations.executors.ray_cluster import take_surroundings
from fed.vectors.arrays import Bytes, bytes_of, tensor_of
from fed.vectors.tensors import torch
from fed.vectors.torch_settings import take_over

__all__ = ["Answer", "RayReply", "RayWorker"]

_ERROR_BYTES = 1 << 19


class RayReply(enum.IntEnum):
    """Reply of a worker. Each says what has happened, and what comes with it.

    Attributes:
        READY: worker waits for items. Nothing comes with it.
        DONE: item is done. Its content and the bytes of its tensors come with it.
        REFUSED: work raised a :class:`fed.errors.FedError`, which comes with it.
        RAISED: work raised another error. A description and the traceback come with it.
    """

    READY = 0
    DONE = 1
    REFUSED = 2
    RAISED = 3


Answer: TypeAlias = tuple[RayReply, Any, Sequence[Bytes]]


class RayWorker:
    """Worker of one simulation, with a process of its own.

    Args:
        surroundings: folders in which Python looks for modules, and working folder, of the process that runs the
            simulation.
        settings: settings of PyTorch from that process's :func:`fed.vectors.torch_settings.current_settings`.
    """

    def __init__(self, surroundings: tuple[Sequence[str], str], settings: Sequence[Any]) -> None:
        take_surroundings(*surroundings)
        keep_freed_memory()
        take_over(settings)
        self._work: Work | None = None

    def begin(self, make: Make, device: str) -> Answer:
        """Make the work.

        Args:
            make: factory of the work.
            device: type of the device, of which Ray shows this process its own.
        """
        try:
            self._work = make(torch.device(device))
        except FedError as error:
            return RayReply.REFUSED, portable(error, _ERROR_BYTES), ()
        except BaseException as error:
            return RayReply.RAISED, words_of_error(error), ()
        return RayReply.READY, os.getpid(), ()

    def do(self, content: Any, places: Sequence[tuple[Any, tuple[int, ...]]], *arrays: Any) -> Answer:
        """Do an item.

        Args:
            content: content of the item.
            places: type and shape of each of its tensors.
            arrays: bytes of each of its tensors.
        """
        assert self._work is not None
        try:
            tensors = [tensor_of(Bytes(array, *place)) for array, place in zip(arrays, places, strict=True)]
            answer, results = self._work(content, tensors)
            return RayReply.DONE, answer, [bytes_of(tensor) for tensor in results]
        except FedError as error:
            return RayReply.REFUSED, portable(error, _ERROR_BYTES), ()
        except BaseException as error:
            return RayReply.RAISED, words_of_error(error), ()
