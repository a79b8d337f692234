"""The machine and this process's memory, for reports."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from processes import ROOT


def memory_mb(name: str) -> float:
    """Megabytes of this process.

    Args:
        name: VmRSS, what is resident now; VmHWM, the most that ever was, which a child does not take over from its
            parent.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def machine() -> dict[str, Any]:
    """Description of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "git_commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }
