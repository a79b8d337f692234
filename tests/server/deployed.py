"""Servers and nodes as real processes, and the ways in which tests make them suffer."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fed.config import yaml
from fed.config.experiment import Experiment
from fed.identity.authority import Authority
from tests.programs import Process, started

__all__ = ["Deployment", "Program", "Relay", "free_port", "relayed", "wait_for"]

_Found = TypeVar("_Found")
_LIMIT_S = 120.0
_CLIENTS = 3
_IMPATIENT_SERVER = {"heartbeat_s": 0.3, "silence_s": 3.0, "lease_s": 60.0, "stall_s": 5.0, "session_s": 5.0}
_IMPATIENT_NODE = {"silence_s": 3.0, "call_s": 20.0, "most_backoff_s": 0.5}


def wait_for(condition: Callable[[], _Found], what: str, within_s: float = _LIMIT_S) -> _Found:
    """Its first value that is true.

    Raises:
        AssertionError: if there is none in time.
    """
    limit_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < limit_s, f"waited {within_s:g} s for {what}"
        time.sleep(0.02)
    return found


@dataclass
class Program:
    """A ``fed`` command that runs, with all that it says in a file."""

    process: Process
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_to_say(self, words: str, within_s: float = _LIMIT_S) -> str:
        """Wait for a line that the regular expression is found in."""

        def found() -> "re.Match[str] | None":
            match = re.search(words, self.said)
            assert match or self.process.poll() is None, f"it ended with {self.process.returncode}: {self.said}"
            return match

        try:
            match = wait_for(found, words, within_s)
            assert match is not None
            return match.group(0)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said: {self.said}") from None

    def end(self, within_s: float = _LIMIT_S) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {within_s:g} s; it said: {self.said}") from None

    def kill(self) -> None:
        """As a loss of power would."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """As a service manager would; the exit code."""
        self.process.terminate()
        return self.end(30)

    def interrupt(self) -> int:
        """As Ctrl-C in its terminal would, which goes to its children too; the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.end(30)

    def freeze(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def children(self) -> list[int]:
        """The processes that train."""
        return [pid for loader in _children(self.process.pid) for pid in _children(loader)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Deployment:
    """One experiment over nodes 0, 1, … of one machine.

    Args:
        folder: for everything.
        keys: the experiment's keys.
        clients: how many there are in its data.
        insecure: whether it goes without certificates.
        secure: the nodes take part under secure aggregation alone, in sums of at least three.
        patience: of the server, where it is another than a test's usual one.
        node_patience: of nodes.
    """

    folder: Path
    keys: Mapping[str, Any]
    clients: int = _CLIENTS
    insecure: bool = True
    secure: bool = False
    patience: Mapping[str, float] = field(default_factory=dict)
    node_patience: Mapping[str, float] = field(default_factory=dict)
    host = "127.0.0.1"
    programs: list[Program] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.output = self.folder / "run"
        self.experiment = Experiment(**self.keys)
        (self.folder / "experiment.yaml").write_text(yaml.dump(self.experiment.dump()))
        for client in range(self.clients):
            data = {"data": self.experiment.dump()["data"], "client": client, "seed": self.experiment.seed}
            (self.folder / f"{client}.yaml").write_text(yaml.dump(data))
        if not self.insecure:
            authority = Authority.create(self.folder / "keys", hosts=[self.host])
            for client in range(self.clients):
                authority.issue(str(client))

    def server(self, *, resume: bool = False, min_nodes: int | None = None, prefix: Sequence[str] = ()) -> Program:
        """A server that runs, whether it listens already or not."""
        what = ["--resume", str(self.output)] if resume else [str(self.folder / "experiment.yaml"), "--output"]
        what += [] if resume else [str(self.output)]
        secret = ["--insecure"] if self.insecure else ["--credentials", str(self.folder / "keys")]
        listen = ["--listen", f"{self.host}:{self.port}", "--min-nodes", str(min_nodes or self.clients)]
        settings = {**_IMPATIENT_SERVER, **self.patience}
        return self._start(["server", *what, *listen, *secret], settings, prefix)

    def client(self, client: int, *, port: int | None = None, dies_at: str = "") -> Program:
        """A node that runs, whether it has joined already or not."""
        secret = ["--insecure", "--name", str(client)]
        if not self.insecure:
            secret = ["--credentials", str(self.folder / "keys" / "nodes" / str(client))]
        where = ["--server", f"{self.host}:{port or self.port}", "--data", str(self.folder / f"{client}.yaml")]
        where += ["--state", str(self.folder / f"state-{client}")]
        model = self.experiment.model
        where += ["--allow", model.kind] if model is not None and model.kind.startswith("python:") else []
        where += ["--secure", "--new-record", "--minimum-cohort", "3"] if self.secure else []
        settings = {**_IMPATIENT_NODE, **self.node_patience, **({"dies_at": dies_at} if dies_at else {})}
        return self._start(["client", *where, *secret], settings)

    def all_clients(self) -> list[Program]:
        return [self.client(client) for client in range(self.clients)]

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of the rounds until now."""
        with contextlib.suppress(FileNotFoundError):
            return [
                json.loads(line)
                for line in (self.output / "metrics.jsonl").read_text().splitlines(True)
                if line[-1] == "\n"
            ]
        return []

    def wait_for_round(self, number: int) -> None:
        """Wait until so many rounds are over."""
        wait_for(lambda: len(self.metrics()) >= number, f"round {number}")

    def model(self) -> bytes:
        """What the run has trained."""
        return (self.output / "model.safetensors").read_bytes()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return found

    def spool(self) -> Path:
        """Where the server keeps files on their way, while it runs."""
        return self.output.with_name(f".{self.output.name}.spool")

    def close(self) -> None:
        """Leave no process behind, frozen ones among them."""
        for program in self.programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.process.pid, signal.SIGKILL)
            program.process.wait()

    def _start(self, arguments: Sequence[str], settings: Mapping[str, Any], prefix: Sequence[str] = ()) -> Program:
        log = self.folder / f"{len(self.programs)}.log"
        self.programs.append(Program(started(arguments, log, settings, prefix), log))
        return self.programs[-1]


class Relay:
    """Everything between nodes and a server goes through it, as slowly as it likes, until it does not.

    Args:
        target: (host, port) of the server.
        bytes_per_s: of what goes to the server; without bound unless given.
    """

    def __init__(self, target: tuple[str, int], bytes_per_s: float | None = None) -> None:
        self._target = target
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Let nothing through, and say nothing, as a cable that is cut."""
        self._flows.clear()

    def drop(self) -> None:
        """End all connections, and take no others."""
        self._refuses = True
        self._end_all()

    def heal(self) -> None:
        """As before; what stalled is gone."""
        self._end_all()
        self._refuses = False
        self._flows.set()

    def close(self) -> None:
        self._listener.close()
        self._end_all()
        self._flows.set()

    def _end_all(self) -> None:
        connections, self._open = self._open, []
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses:
                incoming.close()
                continue
            try:
                outgoing = socket.create_connection(self._target, 5.0)
            except OSError:
                incoming.close()
                continue
            outgoing.settimeout(None)
            self._open += [incoming, outgoing]
            threading.Thread(target=self._pump, args=(incoming, outgoing, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(outgoing, incoming, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                self._flows.wait()
                if is_up:
                    self.sent_bytes += len(data)
                    if self.bytes_per_s:
                        time.sleep(len(data) / self.bytes_per_s)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relayed(target: tuple[str, int], bytes_per_s: float | None = None) -> Iterator[Relay]:
    """A relay while the block lasts."""
    relay = Relay(target, bytes_per_s)
    try:
        yield relay
    finally:
        relay.close()


def free_port() -> int:
    """A port of this machine that nobody listens on, of those that no connection of another test is given."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
