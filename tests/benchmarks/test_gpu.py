"""The benchmark of GPUs runs from end to end where there is none, and says so where it is asked for one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def measure(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = measure()
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "error: this benchmark needs a GPU of NVIDIA, and PyTorch finds none here\n"


def test_a_name_that_it_does_not_know_is_refused() -> None:
    done = measure("--sides", "ours,mine")
    assert done.returncode == 2
    assert "--sides knows ours, ours-free, ours-tf32, ours-2, pfl, pfl-tf32, got mine" in done.stderr


@pytest.mark.long
def test_it_runs_on_a_processor_with_tiny_sizes(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    options = ("--repetitions", "1", "--seconds", "0.1", "--output", str(output))
    done = measure("--device", "cpu", "--sides", "ours,ours-free,ours-tf32,pfl", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["gpu"] == {"device": "cpu", "torch": torch.__version__}
    assert list(found["workloads"]) == ["mlp", "cnn", "transformer"]
    for measured in found["workloads"].values():
        sides = measured["sides"]
        assert {"ours", "ours-free", "ours-tf32"} <= sides.keys()
        for side in sides.values():
            assert side["accuracy"] == pytest.approx(sides["ours"]["accuracy"], abs=0.05)
            assert side["share_of_limit"] == pytest.approx(side["least_s"] * side["median"])
            assert side["memory"]["peak_resident_mb"] > 50
    # Three products of 2·D·D' operations a layer and sample, but for the first layer's two.
    steps = 4 * 20 / 10
    work = found["workloads"]["mlp"]["work"]
    assert work["operations"] == steps * 10 * (2 * 2 * 64 * 16 + 3 * 2 * 16 * 10)
    assert work["bytes"] == steps * (2 * 4 * (64 * 16 + 16 + 16 * 10 + 10) + 10 * (4 * 64 + 8))
