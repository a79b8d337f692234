"""Description of the machine, for reports."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from processes import ROOT


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
