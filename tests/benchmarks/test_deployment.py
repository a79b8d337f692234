"""The measurement of deployments runs, and 200 nodes find their server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def measured(output: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "benchmarks/deployment.py", "--output", str(output), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads(output.read_text())["results"]
    return results


def test_rounds_over_grpc_are_timed_and_none_fails(tmp_path: Path) -> None:
    found = measured(tmp_path / "deployment.json", "--parts", "empty", "--rounds", "5", "--nodes", "2")["empty"]
    assert (found["rounds"], found["nodes"], found["failed"]) == (5, 2, 0)
    assert 0 < found["least_s"] <= found["round_s"] <= found["most_s"]


@pytest.mark.long
def test_200_nodes_report_for_50_rounds_and_the_server_does_not_grow(tmp_path: Path) -> None:
    found = measured(tmp_path / "deployment.json", "--parts", "many")["many"]
    assert (found["rounds"], found["nodes"], found["failed"]) == (50, 200, 0)
    assert found["growth_mb"] < 50  # a model of 1 MB kept from each round would be that


@pytest.mark.long
def test_the_servers_memory_is_a_few_models_whatever_the_number_of_nodes(tmp_path: Path) -> None:
    """Beyond a base that is another run's; the algorithm's state is a model in float64, two of float32."""
    options = "--parts", "empty,large", "--rounds", "2", "--nodes", "10"
    found = measured(tmp_path / "deployment.json", *options)["large"]
    assert (found["rounds"], found["nodes"], found["failed"]) == (2, 10, 0)
    assert 0 < found["models_beyond_state"] <= 8
