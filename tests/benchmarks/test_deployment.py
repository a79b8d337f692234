"""The measurement of deployments runs, and 200 nodes find their server."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def measured(output: Path, *options: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    command = [sys.executable, "benchmarks/deployment.py", "--output", str(output), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads(output.read_text())["results"]
    return results


@pytest.mark.long
def test_rounds_over_grpc_are_timed_and_none_fails(tmp_path: Path) -> None:
    found = measured(tmp_path / "deployment.json", "--parts", "empty", "--rounds", "5", "--nodes", "2")["empty"]
    assert (found["rounds"], found["nodes"], found["failed"]) == (5, 2, 0)
    assert 0 < found["least_s"] <= found["round_s"] <= found["most_s"]


@pytest.mark.long
def test_server_memory_does_not_grow_with_200_nodes(tmp_path: Path) -> None:
    found = measured(tmp_path / "deployment.json", "--parts", "many", "--rounds", "100")["many"]
    assert (found["rounds"], found["nodes"], found["failed"]) == (100, 200, 0)
    assert found["growth_mb"] < 40  # a model of 1 MB kept from each round would be 80


@pytest.mark.long
def test_server_memory_is_independent_of_the_number_of_nodes(tmp_path: Path) -> None:
    """Beyond a base that is another run's; the algorithm's state is a model in float64, two of float32."""
    options = "--parts", "empty,large", "--rounds", "2", "--nodes", "10"
    found = measured(tmp_path / "deployment.json", *options)["large"]
    assert (found["rounds"], found["nodes"], found["failed"]) == (2, 10, 0)
    assert 0 < found["models_beyond_state"] <= 8


@pytest.mark.long
def test_without_flower_only_our_engine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    deployment, on_flower = importlib.import_module("deployment"), importlib.import_module("on_flower")
    monkeypatch.setattr(on_flower, "is_installed", lambda: False)
    output = tmp_path / "deployment.json"
    options = ["--parts", "empty,flower,flower-whole", "--rounds", "2", "--nodes", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["deployment.py", *options])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        deployment.main()
    assert "flower, flower-whole are left out: Flower is not there, which make benchmark installs" in said.getvalue()
    assert list(json.loads(output.read_text())["results"]) == ["empty"]


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / "benchmarks/.venv/installed").exists(), reason="make benchmark installs Flower")
def test_both_engines_are_measured_and_leave_no_processes(tmp_path: Path) -> None:
    options = "--parts", "empty,flower,flower-whole", "--rounds", "2", "--nodes", "2"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    found = measured(tmp_path / "deployment.json", *options, environment=environment)
    assert [(found[name]["rounds"], found[name]["engine"]) for name in found] == [
        (2, "grpc"),
        (2, "flower"),
        (2, "flower"),
    ]
    assert found["flower-whole"]["failed"] == 0
    assert 0 < found["empty"]["round_s"] < found["flower"]["round_s"]
    assert processes_of(tmp_path) == []


def processes_of(folder: Path) -> list[str]:
    """Living processes that were told of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if f"{folder}/".encode() in told and int(process.name) != os.getpid():
                found.append(told.decode(errors="replace"))
    return found
