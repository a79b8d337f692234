"""Flower itself, with its own processes: the app that is written runs on a federation, and ends with the same bits."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fed
from fed.config import yaml
from fed.config.experiment import Experiment
from fed.server.flower.app import write_app
from fed.wire.engines import FLOWER

BIN = Path(sys.executable).parent
NODES = 3
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("flwr") is None, reason=f'Flower is not installed: pip install "{FLOWER}"'
    ),
]


@contextlib.contextmanager
def process(folder: Path, *command: str | int, environment: dict[str, str]) -> Iterator[None]:
    """Runs beside the test, and ends with it, whatever it started included."""
    with (folder / f"{command[0]}-{len(list(folder.iterdir()))}.log").open("wb") as log:
        started = subprocess.Popen(
            [BIN / str(command[0]), *map(str, command[1:])],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(started.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


def await_port(port: int) -> None:
    limit_s = time.monotonic() + 60
    while time.monotonic() < limit_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on {port}")


def test_flower_run_ends_with_the_bits_of_the_simulation(tmp_path: Path) -> None:
    experiment = Experiment(
        name="three nodes",
        data={"kind": "digits", "clients": NODES, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        model={"kind": "mlp", "hidden": [32]},
        local={"lr": 0.1, "batch_size": 16, "epochs": 1},
        algorithm={"kind": "scaffold"},
        rounds={"count": 2},
        simulation={"batching": "off"},
    )
    write_app(experiment, tmp_path / "app")
    link, *ports = free_ports(1 + NODES)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.lab]\naddress = "127.0.0.1:{link}"\ninsecure = true\n')
    settings = ("TELEMETRY_ENABLED=0", "DISABLE_UPDATE_CHECK=1", "DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1")
    environment = {
        **os.environ,
        **dict(f"FLWR_{setting}".split("=") for setting in settings),
        "FLWR_HOME": str(home),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    logs = tmp_path / "logs"
    logs.mkdir()
    with contextlib.ExitStack() as stack:
        superlink = ("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", link)
        stack.enter_context(process(logs, *superlink, environment=environment))
        await_port(link)
        for number, port in enumerate(ports):
            config = f'partition-id={number} num-partitions={NODES} folder="{tmp_path / "nodes"}"'
            dialling = ("--insecure", "--superlink", f"127.0.0.1:{link}", "--port", port, "--node-config", config)
            stack.enter_context(process(logs, "flower-supernode", *dialling, environment=environment))
        output = tmp_path / "run"
        run = [str(BIN / "flwr"), "run", str(tmp_path / "app"), "lab", "--stream", "--run-config", f'output="{output}"']
        said = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert (output / "model.safetensors").is_file(), said.stdout + said.stderr
    simulated = fed.simulate(experiment).model.state_dict()
    deployed = load_file(output / "model.safetensors")
    assert deployed.keys() == simulated.keys()
    assert all(torch.equal(deployed[name], part) for name, part in simulated.items())
    summary = yaml.load(output / "summary.json")
    assert (summary["status"], summary["clients"], summary["refused"]) == ("finished", NODES, 0)
