"""Whatever computes does so on the device that it was given, and waits for that only where it says."""

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("checks_on_a_device.py")


def test_everything_is_computed_on_the_given_device() -> None:
    """In a process of its own, since PyTorch forgets no device, and asks for them before its first gradient."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
