"""What this machine lets a process use."""

import os

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """How many cores this process may compute on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
