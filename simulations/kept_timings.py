"""Kept timings: seconds that were measured on this machine, kept in the user's folder of caches for later runs."""

import hashlib
import json
import logging
import math
import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from fed.storage.atomic_files import write_atomically
from fed.vectors.tensors import torch
from fed.version import __version__

__all__ = ["kept_or_measured"]

_log = logging.getLogger(__name__)

_LOCK_WITHIN_S = 60.0


def kept_or_measured(
    what: Mapping[str, Any], measure: Callable[[], dict[int, float]], folder: Path | None = None
) -> dict[int, float]:
    """Seconds as they were measured first on this machine, so that a run and its repetition make the same choice.

    Of several processes that ask at once one measures, and the others wait for it. Where the folder cannot be read or
    written, or its file is damaged, they are measured anew.

    Args:
        what: description of what is measured, which can be written as JSON.
        measure: function that measures the seconds by the size of a group; 1: alone.
        folder: folder of the files; None: ``fed`` in the user's folder of caches.
    """
    about = {**what, "fed": __version__, "torch": torch.__version__, "processor": _processor()}
    name = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = (folder or user_cache_path("fed")) / "timings" / f"{name}.json"
    if (seconds := _read(path)) is not None:
        return seconds
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=_LOCK_WITHIN_S):
            seconds = _read(path) or measure()
            content = {"about": about, "seconds": {str(size): value for size, value in seconds.items()}}
            write_atomically(path, json.dumps(content, indent=1).encode())
    except (OSError, RuntimeError) as error:
        _log.debug("timings cannot be kept in %s: %s", path.parent, error)
    return measure() if seconds is None else seconds


def _read(path: Path) -> dict[int, float] | None:
    """Seconds of a client alone and in groups, or None where the file does not hold them."""
    try:
        written = json.loads(path.read_bytes())["seconds"]
        seconds = {int(size): float(value) for size, value in written.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_whole = {1} < {*seconds} and all(0 < value < math.inf for value in seconds.values())
    return seconds if is_whole else None


@cache
def _processor() -> str:
    """Name of this machine's processor."""
    information = Path("/proc/cpuinfo")  # on Linux, where the platform's own answer is often empty
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
