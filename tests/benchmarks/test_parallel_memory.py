"""Memory of a device among two is at most 0.6 of that of one alone, for a transformer of 100 million parameters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "parallel_memory.py"


@pytest.mark.long
def test_no_device_needs_most_of_what_one_needs_alone() -> None:
    found = {}
    for way in ("alone", "fsdp", "tensor", "pipeline"):
        command = [sys.executable, str(PROGRAM), "--way", way]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[way] = json.loads(said.splitlines()[-1])
    assert found["alone"]["parameters"] == pytest.approx(1e8, rel=0.01)
    for way, figures in found.items():
        assert figures["train_loss"] == pytest.approx(found["alone"]["train_loss"], abs=1e-4)
        assert way == "alone" or figures["device_mb"] <= 0.6 * found["alone"]["device_mb"], way
