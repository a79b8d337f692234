"""How fast a deployment is: ``fed server`` and nodes on this machine, over gRPC with mutual TLS on loopback.

- ``empty``: a round with a model of four numbers and 3 nodes, that answer at once, and
- ``whole``: the same with 3 ``fed client``, training processes and all;
- ``large``: 100 MB down to and up from 3 nodes, and the server's memory beyond that of ``empty``, in models' sizes;
- ``many``: 200 nodes with a model of 1 MB, 50 rounds: none failed, memory flat.

The server is the command as users start it. Nodes that answer at once are ``sides/light_nodes.py``: all of a node but
its training. A round's time is from one line of the metrics to the next; medians count, without the first round.
Without options all is measured and written into ``deployment.json`` beside this file.

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from processes import ONE_THREAD
from rich.console import Console
from rich.table import Table
from simulation import machine

from fed.keys import Authority

HERE = Path(__file__).resolve().parent
FED = (sys.executable, "-m", "fed")
BYTES_OF_A_NUMBER = 4
PATIENCE_S = 3600.0
LOOKS_EVERY_S = 0.05


@dataclass(frozen=True)
class Part:
    """What is measured.

    Args:
        inputs: of a logistic regression, which with ``classes`` is the model's size.
        classes: of its labels.
        nodes: how many.
        processes: that nodes are spread over.
        rounds: how many.
        are_whole: whether nodes are ``fed client``.
    """

    inputs: int
    classes: int
    nodes: int = 3
    processes: int = 3
    rounds: int = 50
    are_whole: bool = False

    @property
    def model_mb(self) -> float:
        """Megabytes of the model as it travels."""
        return (self.inputs + 1) * self.classes * BYTES_OF_A_NUMBER / 1e6


PARTS = {
    "empty": Part(1, 2),
    "whole": Part(1, 2, are_whole=True),
    "large": Part(4999, 5000, rounds=6),
    "many": Part(499, 500, nodes=200, processes=4),
}


@contextlib.contextmanager
def started(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command under way, whose processes are gone in the end."""
    environment = {**os.environ, **ONE_THREAD}
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def memory_mb(process: subprocess.Popen[bytes]) -> tuple[float, float] | None:
    """Resident now, and the most that ever was; None where the system does not say, or it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.endswith(" kB")}
    return (sizes["VmRSS"], sizes["VmHWM"]) if "VmRSS" in sizes else None


def measure(part: Part, folder: Path) -> dict[str, Any]:
    """One deployment, from its keys to its end."""
    authority = Authority.create(folder / "keys", hosts=["127.0.0.1"])
    names = [str(number) for number in range(part.nodes)]
    for name in names:
        authority.issue(name)
    experiment = {
        "data": None,
        "model": {"kind": "logistic"},
        "rounds": {"count": part.rounds},
        "checkpoints": {"every": None},
        "simulation": {"batching": "off"},
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    log, run = folder / "server.log", folder / "run"
    options = ["--listen", "127.0.0.1:0", "--credentials", str(authority.folder), "--output", str(run)]
    command = [*FED, "server", str(folder / "experiment.yaml"), *options, "--min-nodes", str(part.nodes)]
    with contextlib.ExitStack() as processes:
        server = processes.enter_context(started(log, *command))
        address = f"127.0.0.1:{port_of(server, log)}"
        nodes = {}
        for number, arguments in enumerate(commands_of_nodes(part, names, folder)):
            its_log = folder / f"nodes-{number}.log"
            nodes[its_log] = processes.enter_context(started(its_log, *arguments, "--server", address))
        resident, peak_mb = watched(server, nodes, run / "metrics.jsonl")
        if server.returncode:
            sys.exit(f"the server ended with status {server.returncode}:\n{log.read_text()[-2000:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times_s = [later["wall_s"] - line["wall_s"] for line, later in pairwise(lines)]
    settled = [resident[number] for number in sorted(resident) if number > part.rounds // 5]
    return {
        "nodes": part.nodes,
        "model_mb": part.model_mb,
        "rounds": len(lines),
        "failed": sum(line["failed"] + line["late"] for line in lines),
        "round_s": statistics.median(times_s),
        "least_s": min(times_s),
        "most_s": max(times_s),
        "peak_mb": peak_mb,
        "growth_mb": settled[-1] - settled[0] if settled else None,
    }


def port_of(server: subprocess.Popen[bytes], log: Path) -> int:
    """Where the server listens, once it does."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("listening on "):
                return int(line.split()[2].rpartition(":")[2])
        time.sleep(LOOKS_EVERY_S)
    sys.exit(f"the server does not listen:\n{log.read_text()[-2000:]}")


def commands_of_nodes(part: Part, names: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Each process of nodes."""
    keys = folder / "keys" / "nodes"
    if not part.are_whole:
        program = [sys.executable, str(HERE / "sides" / "light_nodes.py"), "--credentials", str(keys)]
        size = ["--inputs", str(part.inputs), "--classes", str(part.classes), "--folder", str(folder / "files")]
        for first in range(min(part.processes, len(names))):
            yield [*program, *size, "--names", ",".join(names[first :: part.processes])]
        return
    import numpy as np

    x, y = np.linspace(-1, 1, 20, dtype=np.float32).reshape(-1, part.inputs), np.arange(20) % part.classes
    np.savez(folder / "samples.npz", x=x, label=y)
    for name in names:
        data = folder / f"data-{name}.yaml"
        data.write_text(yaml.safe_dump({"data": {"kind": "npz", "path": str(folder / "samples.npz")}}))
        own = ["--credentials", str(keys / name), "--data", str(data), "--state", str(folder / name)]
        yield [*FED, "client", *own]


def watched(
    server: subprocess.Popen[bytes], nodes: Mapping[Path, subprocess.Popen[bytes]], metrics: Path
) -> tuple[dict[int, float], float | None]:
    """By round what was resident when it ended, and the most that ever was, in MB; until the server ends."""
    resident: dict[int, float] = {}
    peak_mb, until_s = None, time.monotonic() + PATIENCE_S
    while server.poll() is None:
        if time.monotonic() > until_s:
            sys.exit("the server does not come to an end")
        for log, node in nodes.items():
            if node.poll():
                sys.exit(f"a node ended with status {node.returncode}:\n{log.read_text()[-2000:]}")
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
    parser.add_argument("--output", type=Path, default=HERE / "deployment.json")
    given = parser.parse_args()
    names = given.parts.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    console, results = Console(highlight=False), {}
    for name in names:
        own = {"rounds": given.rounds, "nodes": given.nodes}
        part = Part(**{**vars(PARTS[name]), **{key: value for key, value in own.items() if value}})
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(part, Path(folder))
        base_mb = results.get("empty", {}).get("peak_mb")
        if name == "large" and base_mb and results[name]["peak_mb"]:
            results[name]["models_beyond_base"] = (results[name]["peak_mb"] - base_mb) / part.model_mb
    table = Table("", "nodes", "model, MB", "rounds", "failed", "s a round", "peak, MB", title="Deployments, over gRPC")
    for name, one in results.items():
        peak = "" if one["peak_mb"] is None else f"{one['peak_mb']:.0f}"
        sizes = [f"{one['model_mb']:.6g}", str(one["rounds"]), str(one["failed"]), f"{one['round_s']:.4f}", peak]
        table.add_row(name, str(one["nodes"]), *sizes)
    console.print(table)
    report = {"machine": machine(), "load": os.getloadavg(), "results": results}
    given.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
