"""Tests that ask for a device run once on each one that there is, or that is named."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import devices

ROOT = Path(__file__).resolve().parent.parent
MODULE = "tests/simulations/test_groups.py"
TRAINING = "tests/clients/training/test_"
RUNS = "tests/simulations/test_"
QUICK = [
    f"{TRAINING}contrast.py::test_training_is_a_loop_by_hand_over_three_models[pretended]",
    f"{TRAINING}private_trainer.py::test_group_trains_as_its_clients_alone[pretended-gru-dtype1-1e-06]",
    f"{TRAINING}trainer.py::test_half_precision_trains_a_model_that_stays_in_its_own[pretended-bfloat16]",
    f"{TRAINING}worker.py::test_work_does_what_it_is_asked_and_says_who_asked[pretended]",
    f"{RUNS}adapters.py::test_with_one_client_the_residual_is_zero[pretended]",
    f"{RUNS}batching.py::test_what_can_be_batched_is[pretended-bfloat16]",
    f"{RUNS}batching.py::test_what_can_be_batched_is[pretended-recurrent]",
    f"{RUNS}downlink.py::test_an_exact_codec_changes_nothing[pretended-bmuf]",
    f"{RUNS}losses_and_metrics.py::test_survival_is_scored_on_the_whole_test_set[pretended-logistic]",
    f"{RUNS}peers.py::test_local_steps_in_float32_move_a_state_of_float64[pretended]",
    f"{RUNS}stages.py::test_half_updates_move_the_model_half_as_far[pretended-fedavg]",
    f"{RUNS}users_models.py::test_unsaved_buffers_do_not_leak_between_clients_or_evaluations[pretended]",
]
"""Tests that prove most for their time: one of each way that numbers take to a device and back."""


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


def test_some_of_each_kind_hold_on_a_pretended_device() -> None:
    """``make test-all`` runs all others too."""
    assert f"{len(QUICK)} passed" in run("--device", "pretended", *QUICK)


def test_a_gpu_that_is_found_is_a_device_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.found() == ["cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.found() == ["cpu"]
