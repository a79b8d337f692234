"""Speed of a deployment: ``fed server`` and nodes on this machine, over gRPC with mutual TLS; and Flower beside it.

- ``empty``: a round with a model of four numbers and 3 nodes, that answer at once, and
- ``whole``: the same with 3 ``fed client``, training processes and all;
- ``flower``: the same on Flower, with its stock nodes and its FedAvg, whose nodes answer at once, and
- ``flower-whole``: what ``fed flower-app`` writes, on Flower, which starts a process for each task;
- ``large``: 100 MB down to and up from 3 nodes, and the server's memory beyond that of ``empty``, in models' sizes;
- ``flower-large``: the same on Flower, as in ``flower``;
- ``many``: 200 nodes with a model of 1 MB, 50 rounds: none failed, memory flat.

The server is the command as users start it. Nodes that answer at once are ``sides/light_nodes.py``, all of a node but
its training, and on Flower ``sides/flower_app``. A round's time is from the end of one to the end of the next; medians
count, without the first round. Without options all is measured, written into ``deployment.json`` beside this file, and
put into docs/benchmarks.md.

    python benchmarks/deployment.py --parts empty,large
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import on_flower
import yaml
from deployment_report import DEPLOYMENTS, markdown, table
from machine import machine
from processes import ONE_THREAD, CommandFailed, started
from report import conclude
from rich.console import Console

from fed.identity.authority import Authority

HERE = Path(__file__).resolve().parent
FED = (sys.executable, "-m", "fed")
BYTES_OF_A_NUMBER = 4
STATE_IN_MODELS = 2
PATIENCE_S = 3600.0
LOOKS_EVERY_S = 0.05


@dataclass(frozen=True)
class Part:
    """One measurement: a model, nodes and an engine.

    Args:
        inputs: numbers of a sample; with ``classes`` they make the size of the model, a logistic regression.
        classes: number of different labels.
        nodes: number of nodes.
        processes: number that the nodes are spread over.
        rounds: number of rounds.
        are_whole: True if the nodes are those of ``fed client``, or on Flower those of ``fed flower-app``; else they
            are stand-ins that answer at once.
        engine: carrier of the messages.
    """

    inputs: int
    classes: int
    nodes: int = 3
    processes: int = 3
    rounds: int = 50
    are_whole: bool = False
    engine: Literal["grpc", "flower"] = "grpc"

    @property
    def numbers(self) -> int:
        """Number of the model's parameters."""
        return (self.inputs + 1) * self.classes

    @property
    def model_mb(self) -> float:
        """Megabytes of the model as it travels."""
        return self.numbers * BYTES_OF_A_NUMBER / 1e6

    @property
    def experiment(self) -> dict[str, Any]:
        """FedAvg over all nodes, which bring the data."""
        return {
            "data": None,
            "model": {"kind": "logistic"},
            "rounds": {"count": self.rounds},
            "checkpoints": {"every": None},
            "simulation": {"batching": "off"},
        }


PARTS = {
    "empty": Part(1, 2),
    "whole": Part(1, 2, are_whole=True),
    "flower": Part(1, 2, rounds=6, engine="flower"),
    "flower-whole": Part(1, 2, rounds=6, are_whole=True, engine="flower"),
    "large": Part(4999, 5000, rounds=6),
    "flower-large": Part(4999, 5000, rounds=3, engine="flower"),
    "many": Part(499, 500, nodes=200, processes=4),
}


def memory_mb(process: subprocess.Popen[bytes]) -> tuple[float, float] | None:
    """Resident now, and the most that ever was; None where the system does not say, or it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.endswith(" kB")}
    return (sizes["VmRSS"], sizes["VmHWM"]) if "VmRSS" in sizes else None


def measure(part: Part, folder: Path) -> dict[str, Any]:
    """One deployment, from its beginning to its end."""
    return measure_flower(part, folder) if part.engine == "flower" else measure_grpc(part, folder)


def measure_flower(part: Part, folder: Path) -> dict[str, Any]:
    """One on Flower's engine."""
    if not part.are_whole:
        return result(part, on_flower.stock(part.numbers, part.nodes, part.rounds, folder))
    names = [str(number) for number in range(part.nodes)]
    lines = on_flower.ours(part.experiment, data_of_nodes(part, names, folder), folder)
    return result(part, [line["wall_s"] for line in lines], failed=failures(lines))


def measure_grpc(part: Part, folder: Path) -> dict[str, Any]:
    """One over gRPC, from its keys on."""
    authority = Authority.create(folder / "keys", hosts=["127.0.0.1"])
    names = [str(number) for number in range(part.nodes)]
    for name in names:
        authority.issue(name)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(part.experiment))
    log = folder / "server.log"
    run = folder / "run"
    options = ["--listen", "127.0.0.1:0", "--credentials", str(authority.folder), "--output", str(run)]
    command = [*FED, "server", str(folder / "experiment.yaml"), *options, "--min-nodes", str(part.nodes)]
    with contextlib.ExitStack() as processes:
        server = processes.enter_context(started(log, *command, environment=ONE_THREAD))
        address = f"127.0.0.1:{port_of(server, log)}"
        nodes = {}
        for number, arguments in enumerate(commands_of_nodes(part, names, folder)):
            its_log = folder / f"nodes-{number}.log"
            node = started(its_log, *arguments, "--server", address, environment=ONE_THREAD)
            nodes[its_log] = processes.enter_context(node)
        resident, peak_mb = watched(server, nodes, run / "metrics.jsonl")
        if server.returncode:
            raise CommandFailed(f"the server ended with status {server.returncode}:\n{log.read_text()[-2000:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    settled = {number: found_mb for number, found_mb in resident.items() if number > part.rounds // 5}
    # by a line through all rounds, for what is resident at one of them is 50 MB more or less
    is_known = len(settled) > 1
    growth_mb = (
        statistics.linear_regression(list(settled), list(settled.values())).slope * len(settled) if is_known else None
    )
    return result(part, [line["wall_s"] for line in lines], failures(lines), peak_mb, growth_mb)


def result(
    part: Part,
    ends_s: Sequence[float],
    failed: int | None = None,
    peak_mb: float | None = None,
    growth_mb: float | None = None,
) -> dict[str, Any]:
    """Record of a part; None for what is not known."""
    times_s = [later - end for end, later in pairwise(ends_s)]
    return {
        "engine": part.engine,
        "nodes": part.nodes,
        "model_mb": part.model_mb,
        "rounds": len(ends_s),
        "failed": failed,
        "round_s": statistics.median(times_s),
        "least_s": min(times_s),
        "most_s": max(times_s),
        "peak_mb": peak_mb,
        "growth_mb": growth_mb,
    }


def failures(lines: Sequence[Mapping[str, Any]]) -> int:
    """Answers that were missing, in all rounds."""
    return sum(line["failed"] + line["late"] for line in lines)


def port_of(server: subprocess.Popen[bytes], log: Path) -> int:
    """Port on which the server listens, once it does."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("listening on "):
                return int(line.split()[2].rpartition(":")[2])
        time.sleep(LOOKS_EVERY_S)
    raise CommandFailed(f"the server does not listen:\n{log.read_text()[-2000:]}")


def commands_of_nodes(part: Part, names: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Each process of nodes."""
    keys = folder / "keys" / "nodes"
    if not part.are_whole:
        program = [sys.executable, str(HERE / "sides" / "light_nodes.py"), "--credentials", str(keys)]
        size = ["--inputs", str(part.inputs), "--classes", str(part.classes), "--folder", str(folder / "files")]
        for first in range(min(part.processes, len(names))):
            yield [*program, *size, "--names", ",".join(names[first :: part.processes])]
        return
    for name, data in zip(names, data_of_nodes(part, names, folder), strict=True):
        own = ["--credentials", str(keys / name), "--data", str(data), "--state", str(folder / name)]
        yield [*FED, "client", *own]


def data_of_nodes(part: Part, names: Sequence[str], folder: Path) -> list[Path]:
    """A data file for each node, of the same 20 samples."""
    x = np.linspace(-1, 1, 20, dtype=np.float32).reshape(-1, part.inputs)
    y = np.arange(20) % part.classes
    np.savez(folder / "samples.npz", x=x, label=y)
    files = [folder / f"data-{name}.yaml" for name in names]
    for file in files:
        file.write_text(yaml.safe_dump({"data": {"kind": "npz", "path": str(folder / "samples.npz")}}))
    return files


def watched(
    server: subprocess.Popen[bytes], nodes: Mapping[Path, subprocess.Popen[bytes]], metrics: Path
) -> tuple[dict[int, float], float | None]:
    """Resident memory at each round's end, and the most until then, in MB, until the server ends."""
    resident: dict[int, float] = {}
    peak_mb = None
    until_s = time.monotonic() + PATIENCE_S
    while server.poll() is None:
        if time.monotonic() > until_s:
            raise CommandFailed("the server does not come to an end")
        for log, node in nodes.items():
            if node.poll():
                raise CommandFailed(f"a node ended with status {node.returncode}:\n{log.read_text()[-2000:]}")
        if found := memory_mb(server):
            peak_mb = found[1]
            number = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            resident.setdefault(number, found[0])
        time.sleep(LOOKS_EVERY_S)
    return resident, peak_mb


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, help="in place of each part's")
    parser.add_argument("--nodes", type=int, help="in place of each part's")
    parser.add_argument("--output", type=Path, help="where to write the results; all of them go beside this program")
    given = parser.parse_args()
    names = given.parts.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    own = {key: value for key, value in (("rounds", given.rounds), ("nodes", given.nodes)) if value}
    is_all = not own and names == list(PARTS)
    console = Console(highlight=False)
    if not on_flower.is_installed() and (left := [name for name in names if PARTS[name].engine == "flower"]):
        said = f"{', '.join(left)} are left out: Flower is not there, which make benchmark installs"
        console.print(said, soft_wrap=True)
        names = [name for name in names if name not in left]
    report: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0], "versions": versions(names)}
    report["results"] = results = {}
    for name in names:
        part = Part(**{**vars(PARTS[name]), **own})
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(part, Path(folder))
        console.print(f"{name}: {results[name]['round_s']:.4g} s a round", style="dim")
    add_models_beyond_state(results)
    output = given.output or (HERE / "deployment.json" if is_all else None)
    markers = DEPLOYMENTS if is_all and given.output is None else None
    conclude(console, report, [table(report)], output, markers, markdown(report))


def versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that were measured."""
    found = {package: version(package) for package in ("torch", "grpcio")}
    return {**found, "flwr": on_flower.version()} if any(PARTS[name].engine == "flower" for name in names) else found


def add_models_beyond_state(results: dict[str, Any]) -> None:
    """The server's memory beyond the base and the algorithm's state, a model in float64, in sizes of the model."""
    base_mb = results.get("empty", {}).get("peak_mb")
    large = results.get("large")
    if large and base_mb and large["peak_mb"]:
        large["models_beyond_state"] = (large["peak_mb"] - base_mb) / large["model_mb"] - STATE_IN_MODELS


if __name__ == "__main__":
    try:
        main()
    except CommandFailed as error:
        sys.exit(f"error: {error}")
