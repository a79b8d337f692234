"""Strangers without a certificate: a server and a peer say how many have come, in few lines of their own."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fed.identity.authority import Authority
from fed.wire.newcomers import HANDSHAKE_MS
from tests.server.deployed import Program

STRANGERS = Path(__file__).parents[3] / "benchmarks" / "sides" / "strangers.py"
KINDS = ("garbage", "http", "bare", "foreign")
SECONDS = 1.0
OURS = re.compile(r"\d+ connections came to nothing: |\d+ of \d+ (nodes|peers) are there|stopped; ")


def a_server(folder: Path) -> list[str]:
    """The command of a server that waits for its nodes."""
    keys = Authority.create(folder / "keys").folder
    (folder / "experiment.yaml").write_text("{data: {kind: digits, clients: 2}, model: {kind: logistic}}")
    return ["server", str(folder / "experiment.yaml"), "--credentials", str(keys), "--min-nodes", "2"]


def a_peer(folder: Path) -> list[str]:
    """The command of a peer that waits for another."""
    keys = Authority.create(folder / "keys").issue("ann", is_peer=True)
    rule = "algorithm: {kind: dpsgd}, topology: {kind: ring}"
    (folder / "experiment.yaml").write_text(f"{{model: {{kind: logistic}}, {rule}}}")
    (folder / "data.yaml").write_text("{data: {kind: digits, clients: 2}, client: 0}")
    own = ["--data", str(folder / "data.yaml"), "--credentials", str(keys)]
    return ["peer", str(folder / "experiment.yaml"), *own]


@contextmanager
def running(folder: Path, command: Sequence[str]) -> Iterator[Program]:
    """The command as a user starts it: gRPC must not be loaded before it begins."""
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "fed", *command, "--listen", "127.0.0.1:0", "--output", str(folder / "run")],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    program = Program(process, log)
    try:
        yield program
    finally:
        program.kill()


@pytest.mark.long
@pytest.mark.parametrize("begun", [a_server, a_peer])
def test_strangers_are_counted_in_few_lines_of_ours(begun: Callable[[Path], list[str]], tmp_path: Path) -> None:
    foreign = Authority.create(tmp_path / "other").issue("mallory")
    with running(tmp_path, begun(tmp_path)) as program:
        port = program.wait_to_say(r"listening on 127.0.0.1:\d+").rpartition(":")[2]
        before, visits = len(program.said), 0
        for kind in KINDS:
            command = [sys.executable, str(STRANGERS), "--kind", kind, "--port", port, "--seconds", str(SECONDS)]
            found = subprocess.run(
                [*command, "--certificate", str(foreign)], capture_output=True, text=True, check=True, timeout=60
            )
            visits += int(found.stdout)
        during = program.said[before:].splitlines()
        program.terminate()
    said = program.said[before:].splitlines()
    assert [line for line in said if not OURS.match(line)] == []
    assert len(during) <= len(KINDS) * SECONDS
    counts = [int(told.group(1)) for line in said if (told := re.search(r"\((\d+) in all", line))]
    assert counts[-1] == visits > len(KINDS)


@pytest.mark.long
@pytest.mark.parametrize("begun", [a_server, a_peer])
def test_connections_that_say_nothing_are_ended(begun: Callable[[Path], list[str]], tmp_path: Path) -> None:
    with running(tmp_path, begun(tmp_path)) as program, ExitStack() as connections:
        port = int(program.wait_to_say(r"listening on 127.0.0.1:\d+").rpartition(":")[2])
        opened = [socket.create_connection(("127.0.0.1", port), 60.0) for _ in range(20)]
        silent = [connections.enter_context(one) for one in opened]
        began_s = time.monotonic()
        assert [connection.recv(1) for connection in silent] == [b""] * 20
        assert time.monotonic() - began_s < 1.5 * HANDSHAKE_MS / 1000
