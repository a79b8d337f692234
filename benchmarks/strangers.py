"""Rounds of honest nodes and peers while a stranger without their authority's certificate comes again and again.

A ``fed server`` with three nodes that answer at once, and three ``fed peer``, run rounds with a tiny model on this
machine, with certificates. One process of each kind of ``sides/strangers.py`` comes for some seconds, with as many
seconds without strangers before and after it. The rate of rounds is given as a share of that without strangers. A
stranger that touches no port, and keeps one core busy, says how much of what is lost is the stranger's own work on the
same cores. Without options all is measured, written into ``strangers.json`` beside this file, and put into
docs/benchmarks.md.

    python benchmarks/strangers.py --sides server --kinds http,bare --seconds 10
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from deployment import FED, HERE, Part, commands_of_nodes, port_of
from machine import machine
from processes import ONE_THREAD, CommandFailed, started
from report import Table, conclude, measured_on
from rich.console import Console
from sides.strangers import KINDS

from fed.identity.authority import Authority

SIDES = ("server", "peers")
STRANGERS = "<!-- strangers: begin -->", "<!-- strangers: end -->"
MOST_ROUNDS = 10_000_000
BEGUN_ROUNDS = 20
PATIENCE_S = 120.0
PEERS = 3


class Visit(NamedTuple):
    """A stranger's visits in one measurement.

    Args:
        visits_per_s: connections that it made.
        alone_per_s: rounds before and after it.
        with_it_per_s: rounds meanwhile.
        lines: written to standard error beside the rounds'.
    """

    visits_per_s: float
    alone_per_s: float
    with_it_per_s: float
    lines: int


@contextlib.contextmanager
def serving(folder: Path, authority: Authority) -> Iterator[tuple[int, Path, Path]]:
    """A server and its nodes: its port, its log and the run's metrics.

    Args:
        folder: the folder for all files.
        authority: the authority that signs the certificates.
    """
    part = Part(1, 2, processes=1, rounds=MOST_ROUNDS)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(part.experiment))
    log = folder / "server.log"
    run = folder / "run"
    command = [*FED, "server", str(folder / "experiment.yaml"), "--listen", "127.0.0.1:0", "--output", str(run)]
    command += ["--credentials", str(authority.folder), "--min-nodes", str(part.nodes)]
    with contextlib.ExitStack() as processes:
        server = processes.enter_context(started(log, *command, environment=ONE_THREAD))
        port = port_of(server, log)
        for arguments in commands_of_nodes(part, [str(number) for number in range(part.nodes)], folder):
            command = [*arguments, "--server", f"127.0.0.1:{port}"]
            processes.enter_context(started(folder / "nodes.log", *command, environment=ONE_THREAD))
        yield port, log, run / "metrics.jsonl"


@contextlib.contextmanager
def meeting(folder: Path, authority: Authority) -> Iterator[tuple[int, Path, Path]]:
    """Peers in a ring: the port, the log and the metrics of the first.

    Args:
        folder: the folder for all files.
        authority: the authority that signs the certificates.
    """
    experiment = {
        "data": None,
        "model": {"kind": "logistic"},
        "algorithm": {"kind": "dpsgd"},
        "topology": {"kind": "ring"},
        "local": {"lr": 0.1},
        "rounds": {"count": MOST_ROUNDS},
        "checkpoints": {"every": None},
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    first = ""
    with contextlib.ExitStack() as processes:
        for number in range(PEERS):
            data = {"data": {"kind": "digits", "clients": PEERS}, "client": number}
            (folder / f"{number}.yaml").write_text(yaml.safe_dump(data))
            log = folder / f"peer-{number}.log"
            command = [*FED, "peer", str(folder / "experiment.yaml"), "--data", str(folder / f"{number}.yaml")]
            command += ["--credentials", str(authority.folder / "nodes" / f"peer-{number}"), "--min-peers", str(PEERS)]
            command += ["--listen", "127.0.0.1:0", "--output", str(folder / f"run-{number}")]
            command += ["--join", first] if first else []
            peer = processes.enter_context(started(log, *command, environment=ONE_THREAD))
            first = first or f"127.0.0.1:{port_of(peer, log)}"
        yield int(first.rpartition(":")[2]), folder / "peer-0.log", folder / "run-0" / "metrics.jsonl"


def measure(side: str, kinds: Sequence[str], seconds: float, repeats: int, folder: Path) -> dict[str, Any]:
    """The rate of rounds without and with each kind of stranger.

    Args:
        side: "server" or "peers".
        kinds: the kinds of strangers.
        seconds: the length of each measurement.
        repeats: visits of each kind, in turns.
        folder: the folder for all files.
    """
    authority = Authority.create(folder / "keys", hosts=["127.0.0.1"])
    for number in range(3):
        authority.issue(str(number))
        authority.issue(f"peer-{number}", is_peer=True)
    foreign = Authority.create(folder / "other", hosts=["127.0.0.1"]).issue("mallory")
    runs = serving if side == "server" else meeting
    found: dict[str, list[Visit]] = {kind: [] for kind in kinds}
    with runs(folder, authority) as (port, log, metrics):
        await_rounds(metrics, log)
        alone_per_s = rate(metrics, seconds)
        for _ in range(repeats):
            for kind in kinds:
                before = lines_beside_rounds(log)
                count, with_it_per_s = visited(kind, port, foreign, metrics, seconds)
                after_per_s = rate(metrics, seconds)
                mean_per_s = (alone_per_s + after_per_s) / 2
                lines = lines_beside_rounds(log) - before
                found[kind].append(Visit(count / (seconds + 1), mean_per_s, with_it_per_s, lines))
                alone_per_s = after_per_s
    return {kind: summarised(visits) for kind, visits in found.items()}


def visited(kind: str, port: int, foreign: Path, metrics: Path, seconds: float) -> tuple[int, float]:
    """Number of a stranger's visits, and the rate of rounds meanwhile.

    Args:
        kind: the kind of stranger.
        port: the port that it comes to.
        foreign: the folder of another authority's certificate.
        metrics: the file of the run's metrics.
        seconds: the length of the measurement.
    """
    command = [sys.executable, str(HERE / "sides" / "strangers.py"), "--kind", kind, "--port", str(port)]
    command += ["--certificate", str(foreign), "--seconds", str(seconds + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        time.sleep(0.5)  # until it has begun
        with_it_per_s = rate(metrics, seconds)
        return int(stranger.communicate(timeout=PATIENCE_S)[0]), with_it_per_s


def summarised(visits: Sequence[Visit]) -> dict[str, Any]:
    """Medians over all visits of a kind, and the lines of all of them."""
    return {
        "visits_per_s": statistics.median(one.visits_per_s for one in visits),
        "alone_per_s": statistics.median(one.alone_per_s for one in visits),
        "with_it_per_s": statistics.median(one.with_it_per_s for one in visits),
        "share": statistics.median(one.with_it_per_s / one.alone_per_s for one in visits),
        "lines": sum(one.lines for one in visits),
    }


def await_rounds(metrics: Path, log: Path) -> None:
    """Wait until rounds are under way."""
    until_s = time.monotonic() + PATIENCE_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < BEGUN_ROUNDS:
        if time.monotonic() > until_s:
            raise CommandFailed(f"no rounds begin:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def lines_beside_rounds(log: Path) -> int:
    """Lines of a log that do not tell of a round."""
    content = log.read_bytes()
    return content.count(b"\n") - content.count(b"\nround ")


def rate(metrics: Path, seconds: float) -> float:
    """Rounds a second from now on."""
    before = metrics.read_bytes().count(b"\n")
    began_s = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - began_s
    return (metrics.read_bytes().count(b"\n") - before) / elapsed_s


def table(report: dict[str, Any]) -> Table:
    """Table of all that was measured."""
    head = ["strangers", "visits a second", "rounds a second without", "with them", "share", "lines said"]
    rows = [
        [
            f"{side}: {kind}",
            f"{one['visits_per_s']:,.0f}",
            f"{one['alone_per_s']:.0f}",
            f"{one['with_it_per_s']:.0f}",
            f"{one['share']:.0%}",
            str(one["lines"]),
        ]
        for side, kinds in report["results"].items()
        for kind, one in kinds.items()
    ]
    return Table("Strangers", head, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join(SIDES), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5, help="of each kind; medians count")
    parser.add_argument("--output", type=Path, help="where to write the results")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    report: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0]}
    report |= {"versions": {"grpcio": version("grpcio")}, "results": {}}
    for side in given.sides.split(","):
        with tempfile.TemporaryDirectory() as folder:
            report["results"][side] = measure(side, given.kinds.split(","), given.seconds, given.repeats, Path(folder))
    is_all = given.sides.split(",") == list(SIDES) and given.kinds.split(",") == list(KINDS) and given.output is None
    output = given.output or (HERE / "strangers.json" if is_all else None)
    text = f"{measured_on(report)}\n\n{table(report).markdown()}"
    conclude(Console(highlight=False), report, [table(report)], output, STRANGERS if is_all else None, text)


if __name__ == "__main__":
    try:
        main()
    except CommandFailed as error:
        sys.exit(f"error: {error}")
