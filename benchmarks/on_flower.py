"""Deployments on Flower's engine, all of it on this machine: a superlink, stock nodes, and ``flwr run``.

Messages are kept in memory, the nodes are anonymous and nothing is encrypted, as where one tries Flower; each node
starts a process for each message. Flower lives in the environment that ``make benchmark`` installs.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import ONE_THREAD, CommandFailed, run, started

import fed
from fed.config.experiment import Experiment
from fed.server.flower.app import write_app

HERE = Path(__file__).resolve().parent
BIN = HERE / ".venv" / "bin"
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
PATIENCE_S = 1800.0
LISTENS_WITHIN_S = 120.0


def is_installed() -> bool:
    """True if Flower is installed."""
    return (HERE / ".venv" / "installed").exists()


def version() -> str:
    """Flower's."""
    command = "from importlib.metadata import version; print(version('flwr'))"
    return run([str(BIN / "python"), "-c", command]).stdout.strip()


def stock(numbers: int, nodes: int, rounds: int, folder: Path) -> list[float]:
    """Times at which rounds of Flower's own FedAvg ended, over nodes that answer at once.

    Args:
        numbers: number of the model's parameters.
        nodes: number of nodes.
        rounds: number of rounds.
        folder: place for all files.

    Raises:
        CommandFailed: if Flower does not come to an end.
    """
    shutil.copytree(HERE / "sides" / "flower_app", folder / "app")
    output = folder / "ends.json"
    config = f'numbers={numbers} nodes={nodes} rounds={rounds} output="{output}"'
    _run(folder, ["" for _ in range(nodes)], config, output)
    ends_s: list[float] = json.loads(output.read_text())
    return ends_s[1:]  # the first is when the strategy began


def ours(experiment: Mapping[str, Any], data: Sequence[Path], folder: Path) -> list[dict[str, Any]]:
    """The metrics of an experiment, as ``fed flower-app`` has it run.

    Args:
        experiment: keys of the experiment.
        data: each node's data file.
        folder: place for all files.

    Raises:
        CommandFailed: if Flower does not come to an end.
    """
    write_app(Experiment(**experiment), folder / "app")
    own = [f'data="{path}" client={client} folder="{folder / "kept"}"' for client, path in enumerate(data)]
    metrics = folder / "run" / "metrics.jsonl"
    _run(folder, own, f'min-nodes={len(data)} output="{folder / "run"}"', metrics)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _run(folder: Path, configurations: Sequence[str], run_config: str, output: Path) -> None:
    """The app in the folder, on a federation of its own with a node for each configuration."""
    (folder / "path").mkdir()
    (folder / "path" / "fed").symlink_to(Path(fed.__file__).parent)
    home = folder / "home"
    home.mkdir()
    link, *ports = _free_ports(1 + len(configurations))
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n')
    paths = {
        "FLWR_HOME": str(home),
        "PYTHONPATH": str(folder / "path"),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    environment = {**ONE_THREAD, **SETTINGS, **paths}
    with contextlib.ExitStack() as processes:

        def start(name: str, *command: str) -> None:
            program = str(BIN / command[0])
            processes.enter_context(started(folder / f"{name}.log", program, *command[1:], environment=environment))

        processes.callback(_end_all, home)
        start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(link))
        _await_port(link)
        for number, (port, own) in enumerate(zip(ports, configurations, strict=True)):
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}", "--port", str(port)]
            if own:
                command += ["--node-config", own]
            start(f"node-{number}", *command)
        command = [str(BIN / "flwr"), "run", str(folder / "app"), "here", "--stream", "--run-config", run_config]
        try:
            said = subprocess.run(
                command,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"Flower has not come to an end within {PATIENCE_S:g} s") from None
    if said.returncode or not output.exists():
        logs = "".join(f"\n{log.name}:\n{log.read_text()[-1000:]}" for log in sorted(folder.glob("*.log")))
        raise CommandFailed(
            f"flwr run ended with status {said.returncode}:\n{(said.stdout + said.stderr)[-2000:]}{logs}"
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


def _await_port(port: int) -> None:
    until_s = time.monotonic() + LISTENS_WITHIN_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise CommandFailed(f"Flower's superlink does not listen within {LISTENS_WITHIN_S:g} s")


def _end_all(home: Path) -> None:
    """End the processes that Flower started in sessions of their own, known by their home folder."""
    mark = f"FLWR_HOME={home}".encode()
    for process in _processes():
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), 9)


def _processes() -> Iterator[Path]:
    proc = Path("/proc")
    return (folder for folder in proc.iterdir() if folder.name.isdigit()) if proc.is_dir() else iter(())
