"""Tests that ask for a device run once on each one that there is, or that is named."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import devices

ROOT = Path(__file__).resolve().parent.parent
MODULE = "tests/simulations/test_groups.py"


def run(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_suite_for_two_devices_runs_on_both() -> None:
    """In a process of its own, as the pretended device must be."""
    options = ("--device", "cpu", "--device", "pretended", MODULE, "-k", "single_client")
    collected = run(*options, "--collect-only")
    assert "test_update_of_a_single_client_has_its_own_bits[cpu]" in collected
    assert "test_update_of_a_single_client_has_its_own_bits[pretended]" in collected
    assert "2 passed" in run(*options)


def test_a_gpu_that_is_found_is_a_device_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.found() == ["cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.found() == ["cpu"]
