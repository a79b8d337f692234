"""Ray cluster: joined, or started on this machine, and left again, with Ray's own lines kept off the terminal."""

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fed.errors import InvalidInput, RunFailed, first_line, in_one_sentence
from fed.processes.machine import usable_cores
from fed.vectors.tensors import torch

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["RayCluster", "check_ray", "take_surroundings"]

_log = logging.getLogger(__name__)


def check_ray() -> None:
    """Refuse what needs Ray where it is not installed.

    Raises:
        InvalidInput: if it is missing.
    """
    if find_spec("ray") is None:
        raise InvalidInput(
            'executor ray needs the package ray, which is not installed: pip install "fed[ray]", or choose executor '
            "workers"
        )


def take_surroundings(paths: Sequence[str], folder: str) -> None:
    """Find modules and files as another process does, and compute with one thread.

    Args:
        paths: folders in which that process looks for modules.
        folder: folder in which it works; where this machine has none of this name, the folder stays.
    """
    sys.path.extend(path for path in paths if path not in sys.path)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    torch.set_num_threads(1)  # the last bits of a sum depend on how many threads share it
    with contextlib.suppress(RuntimeError):  # something has computed already
        torch.set_num_interop_threads(1)


class RayCluster:
    """Connection of this process to a cluster, until :meth:`leave`.

    A program that is connected already keeps its connection, whatever the address says.

    Args:
        address: address of a running cluster, such as 10.0.0.1:6379, or auto for that of ``RAY_ADDRESS`` or of this
            machine; None: one is started on this machine, with the cores and GPUs that this process may use, and ends
            with the connection.

    Attributes:
        ray: the package.

    Raises:
        InvalidInput: if Ray is not installed.
        RunFailed: if the cluster cannot be reached or started.
    """

    def __init__(self, address: str | None) -> None:
        check_ray()
        # Before the package is loaded, which reads them then.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # by 15, beside other programs workers would hardly run
        self.ray: ModuleType = importlib.import_module("ray")
        self._lines = _Lines()
        self._lines.silence()
        self._connects = not self.ray.is_initialized()
        if self._connects:
            self._connect(address)

    def _connect(self, address: str | None) -> None:
        options: dict[str, Any] = {"address": address or "local"}
        if address is None:
            options |= {"num_cpus": usable_cores(), "num_gpus": torch.cuda.device_count(), "include_dashboard": False}
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except BaseException as error:
            self.leave()  # of a start that was interrupted, processes may be there
            if not isinstance(error, Exception):
                raise
            where = f"the Ray cluster at {address} cannot be joined" if address else "Ray cannot be started here"
            remedy = "start one with ray start --head, or leave address out" if address else "see ray's own message"
            raise in_one_sentence(RunFailed(f"{where} ({first_line(error)}): {remedy}")) from error
        finally:
            if is_main and handler is not None:  # Ray has set one that ends the program with another exit code
                signal.signal(signal.SIGTERM, handler)

    def room(self, needs: Mapping[str, float]) -> int:
        """Number of workers that all nodes together have room for, whoever else uses them.

        Args:
            needs: name of a resource of Ray → what a worker takes of it.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        asked = {name: amount for name, amount in needs.items() if amount}
        # A share such as a third of a GPU is rounded, and three of them fit all the same.
        return sum(min(int(node.get(name, 0) / amount + 1e-6) for name, amount in asked.items()) for node in nodes)

    def leave(self) -> None:
        """End the connection, and with it a cluster that was started for it."""
        if self._connects:
            self._connects = False
            self.ray.shutdown()
        self._lines.restore()


class _Lines:
    """Lines of a cluster about the deaths of its processes, which Ray prints and has no option against."""

    def __init__(self) -> None:
        self._holder: Any = None

    def silence(self) -> None:
        """Write them to the log instead, at its lowest level."""
        holder: Any = importlib.import_module("ray._private.worker")
        # Its own name, which a later version may drop: it then prints them.
        if hasattr(holder, "print_to_stdstream"):
            self._holder = holder
            self._printing = holder.print_to_stdstream
            holder.print_to_stdstream = _logged

    def restore(self) -> None:
        """Have Ray print them again."""
        if self._holder is not None:
            self._holder.print_to_stdstream = self._printing
            self._holder = None


def _logged(data: Mapping[str, Any], *options: object, **named: object) -> None:
    _log.debug("%s", "\n".join(map(str, data["lines"])))
