"""A server and a peer that have run for long hold no more than those that have just begun."""

import gc
import json
import resource
import statistics
import threading
import tracemalloc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.identity.authority import Authority
from fed.identity.credentials import PeerCredentials, ServerCredentials
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2 as pb
from fed.server.grpc.deploy import serve
from fed.server.grpc.deployment import Deployment
from fed.server.peer.deploy import PeerSetup, take_part
from fed.server.real_fleet import RealFleet
from fed.server.registry import TaskOutcome
from fed.server.telling import Observers
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder
from fed.wire.format import Format
from fed.wire.messages import Task
from tests.observing import after_round
from tests.server.deployed import Deployment as Deployed
from tests.server.deployed import free_port, wait_for
from tests.server.grpc.hostile_wire import Wire, honest, work
from tests.server.peer.processes import processes

SAMPLES = 10
EXPERIMENT: dict[str, Any] = {
    "data": {"kind": "digits", "clients": 2},
    "model": {"kind": "logistic"},
    "local": {"lr": 0.1},
    "simulation": {"batching": "off"},
}
GOSSIP: dict[str, Any] = {
    **EXPERIMENT,
    "algorithm": {"kind": "dpsgd"},
    "topology": {"kind": "ring"},
    "checkpoints": {"every": None},
}
# A round's line of the metrics took 700 bytes and more; what a garbage collector has yet to find varies by far less.
MOST_BYTES_A_ROUND = 100.0
MOST_WITH_CALLS = 300.0  # messages and timers under way vary more
# Of a process, whose allocator takes pages for some thousand rounds more.
MOST_RESIDENT_A_ROUND = 450.0


class AtOnce(RealFleet):
    """A fleet of two nodes in this thread, that answer at once."""

    def __init__(self) -> None:
        super().__init__(SYSTEM_CLOCK)
        for client in (0, 1):
            self._members.come(client, SAMPLES)

    def dispatch(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._open[task.id] = task
            self._assignment(task, self.registered(), pb.Payload())
            header = pb.Answer(samples=SAMPLES, weight=SAMPLES, train_loss=1.0)
            trained = [task.model.params_V * 0.9, task.model.integers_I]
            self._outcomes.append(TaskOutcome(task.id, header, partial(list, trained)))

    def cancel(self, tasks: Iterable[int]) -> None:
        for task in tasks:
            self._miss(task)

    def _examine(self, model: tuple[torch.Tensor, torch.Tensor], limit_s: float, round_number: int) -> None:
        raise AssertionError("the coordinator scores the model itself")

    def _make_known(self, plan: pb.Plan, message: Format, fixed_part: Sequence[Tensor]) -> None:
        pass

    def _attending(self) -> Collection[int | str]:
        return self._members

    _free = _attending

    def _poll(self) -> None:
        pass

    def pass_time(self, until: float) -> None:
        raise AssertionError("nodes that answer at once are waited for")


def served(folder: Path, rounds: int, then: Callable[[Mapping[str, Any]], None] | None = None, **changed: Any) -> Run:
    keys = {**EXPERIMENT, "rounds": {"count": rounds}, **changed}
    where = RunFolder(folder)
    observers = Observers([after_round(then)] if then else [])
    return Deployment(Experiment(**keys)).run(AtOnce(), 2, where, resume=False, observers=observers)


class Held:
    """Bytes that Python's objects take after some rounds."""

    def __init__(self, *rounds: int) -> None:
        self._rounds = rounds
        self.bytes: list[int] = []

    def __call__(self, line: Mapping[str, Any]) -> None:
        if line["round"] in self._rounds:
            gc.collect()
            self.bytes.append(tracemalloc.get_traced_memory()[0])


@pytest.mark.long
@pytest.mark.parametrize("every", [None, 20])
def test_a_servers_memory_is_flat_in_rounds(tmp_path: Path, every: int | None) -> None:
    first = 200
    last = 800
    held = Held(first, last)
    tracemalloc.start()
    try:
        served(tmp_path / "run", last, held, checkpoints={"every": every, "keep": 1})
    finally:
        tracemalloc.stop()
    before, after = held.bytes
    assert (after - before) / (last - first) < MOST_BYTES_A_ROUND


def test_a_served_run_reads_its_metrics_from_its_folder(tmp_path: Path) -> None:
    lines: list[Mapping[str, Any]] = []
    run = served(tmp_path / "run", 5, lambda line: lines.append({**line}))
    assert run.metrics == lines == fed_lines(tmp_path / "run")
    assert run.summary["rounds"] == 5
    assert run.summary["bytes_up"] == sum(line["bytes_up"] for line in lines)


def fed_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_servers_calls_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes over real connections, in this process, which counts what the nodes hold too."""
    monkeypatch.setattr("fed.server.grpc.leases._MOST_DELIVERED", 100)
    authority = Authority.create(tmp_path / "keys", hosts=["127.0.0.1"])
    first, middle, last = 200, 600, 1000
    held = Held(first, middle, last)

    def begin(port: int) -> None:
        for name in ("0", "1"):
            wire = Wire(port, name, authority.issue(name))
            threading.Thread(target=partial(work, wire, honest, comes_back=True), daemon=True).start()

    tracemalloc.start()
    try:
        serve(
            Experiment(**EXPERIMENT, rounds={"count": last + 20}, checkpoints={"every": None}),
            listen="127.0.0.1:0",
            output=tmp_path / "run",
            credentials=ServerCredentials.load(authority.folder),
            min_nodes=2,
            on_listen=begin,
            observers=[after_round(held)],
        )
    finally:
        tracemalloc.stop()
    # A table of Python's own, as of interned strings, may double once: what stays behind shows in both halves.
    before, between, after = held.bytes
    assert min((between - before) / (middle - first), (after - between) / (last - middle)) < MOST_WITH_CALLS


@pytest.mark.long
def test_a_peers_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    """Two peers over real connections, in this process, which counts what both hold."""
    first, last = 200, 1000
    # modules that the end of a run loads are not counted
    keys = {**GOSSIP, "rounds": {"count": last + 20}}
    authority = Authority.create(tmp_path / "keys")
    ports = [free_port(), free_port()]
    held = Held(first, last)

    def take(peer: int) -> None:
        setup = PeerSetup(
            name=str(peer),
            listen=f"127.0.0.1:{ports[peer]}",
            join=[f"127.0.0.1:{port}" for port in ports],
            credentials=PeerCredentials.load(authority.issue(str(peer), is_peer=True)),
        )
        own = NodeData.model_validate({"data": EXPERIMENT["data"], "client": peer})
        observers = [after_round(held)] if peer == 0 else []
        take_part(Experiment(**keys), own, setup, output=tmp_path / f"run-{peer}", observers=observers)

    tracemalloc.start()
    try:
        other = threading.Thread(target=take, args=(1,))
        other.start()
        take(0)
        other.join()
    finally:
        tracemalloc.stop()
    before, after = held.bytes
    assert (after - before) / (last - first) < MOST_WITH_CALLS


class Resident:
    """Resident memory of a process by round, and its slope by a line through all rounds but the first."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last
        self._bytes: dict[int, int] = {}

    def watch(self, pid: int, metrics: Path) -> None:
        """Look at it until the last round.

        Args:
            pid: the process's id.
            metrics: the file to which it adds a line a round.
        """
        wait_for(metrics.exists, "the run's folder")
        number = 0
        with metrics.open("rb") as file:

            def is_over() -> bool:
                nonlocal number
                number += file.read().count(b"\n")
                if number >= self._first:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    self._bytes[number] = pages * resource.getpagesize()
                return number >= self._last

            wait_for(is_over, f"round {self._last}", within_s=1200)

    @property
    def bytes_a_round(self) -> float:
        return statistics.linear_regression([*self._bytes], [*self._bytes.values()]).slope


@pytest.mark.long
def test_a_server_process_stays_as_large_as_it_was(tmp_path: Path) -> None:
    """Nodes answer by arithmetic, over real connections."""
    keys = {**EXPERIMENT, "rounds": {"count": 100_000}, "checkpoints": {"every": None}}
    deployment = Deployed(tmp_path, keys, clients=2)
    resident = Resident(6000, 12_000)  # a server remembers the last 10,000 answers
    try:
        server = deployment.server()
        for client in (0, 1):
            server.wait_to_say("listening on")
            node = partial(work, Wire(deployment.port, str(client)), honest, comes_back=True)
            threading.Thread(target=node, daemon=True).start()
        resident.watch(server.process.pid, deployment.output / "metrics.jsonl")
    finally:
        deployment.close()
    assert resident.bytes_a_round < MOST_RESIDENT_A_ROUND


@pytest.mark.long
def test_a_peer_process_stays_as_large_as_it_was(tmp_path: Path) -> None:
    keys = {**GOSSIP, "rounds": {"count": 100_000}}
    resident = Resident(1000, 3000)
    with processes(tmp_path, keys, 2) as peers:
        peers.start(0, 1)
        resident.watch(peers.running[0].pid, peers.output(0) / "metrics.jsonl")
    assert resident.bytes_a_round < MOST_RESIDENT_A_ROUND
