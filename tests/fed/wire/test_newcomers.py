"""Connections that come too fast wait at the door, and those that show no certificate are counted."""

import asyncio
import contextlib
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from fed.processes.clock import SYSTEM_CLOCK
from fed.wire.door import Door
from fed.wire.newcomers import Newcomers

LIMIT_S = 10.0

has_doors = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has socket filters")


def connects(port: int, within_s: float) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), within_s).close()
    except TimeoutError:
        return False
    return True


@has_doors
def test_a_shut_door_keeps_new_connections_out_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as another:
        port = listener.getsockname()[1]
        door = Door(port)
        with socket.create_connection(("127.0.0.1", port)) as before, listener.accept()[0] as accepted:
            door.shut()
            door.shut()
            assert door.is_shut
            assert not connects(port, 0.2)
            assert connects(another.getsockname()[1], LIMIT_S)
            before.sendall(b"still")
            assert accepted.recv(5) == b"still"
        door.open()
        assert connects(port, LIMIT_S)
        door.close()


@has_doors
def test_a_closed_door_leaves_the_port_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        door = Door(port)
        door.shut()
        door.close()
        assert connects(port, LIMIT_S)
    socket.create_server(("127.0.0.1", port)).close()


@has_doors
def test_doors_leave_no_file_open() -> None:
    files = Path("/proc/self/fd")
    with socket.create_server(("127.0.0.1", 0)) as listener, Path(__file__).open():
        before = len([*files.iterdir()])
        for _ in range(3):
            Door(listener.getsockname()[1]).close()
        assert len([*files.iterdir()]) == before


@has_doors
def test_connections_come_no_faster_than_their_rate() -> None:
    at_once, per_s, seconds = 20, 40.0, 2.0

    async def run(port: int) -> None:
        watching = asyncio.create_task(newcomers.watch(port))
        await asyncio.to_thread(visit_until, port, time.monotonic() + seconds)
        watching.cancel()
        await asyncio.wait([watching])

    newcomers = Newcomers(SYSTEM_CLOCK, at_once, per_s)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=take, args=(listener, newcomers), daemon=True).start()
        began_s = time.monotonic()
        asyncio.run(run(listener.getsockname()[1]))
        # the one that shuts the door has come already, and it is opened once a quarter of a second at most
        most = at_once + (per_s + 4) * (time.monotonic() - began_s)
        assert at_once + 10 <= newcomers.begun <= most
        listener.shutdown(socket.SHUT_RDWR)


def take(listener: socket.socket, newcomers: Newcomers) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()
            newcomers.arrived()


def visit_until(port: int, until_s: float) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError), socket.create_connection(("127.0.0.1", port), left_s) as connection:
            connection.recv(1)  # until it is ended, so that none waits unseen


def test_all_but_those_with_a_certificate_are_strangers(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        newcomers = Newcomers(SYSTEM_CLOCK)
        for _ in range(12):
            newcomers.arrived()
        for address in ("ipv4:10.0.0.1:5", "ipv4:10.0.0.1:6", "ipv4:10.0.0.1:5"):
            newcomers.identify(address)
        watching = asyncio.create_task(newcomers.watch(1))
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait([watching])

    asyncio.run(run())
    (said,) = caplog.messages
    assert said.startswith("10 connections came to nothing: they showed no certificate of this authority")


def test_connections_with_a_certificate_take_bounded_memory() -> None:
    newcomers = Newcomers(SYSTEM_CLOCK)
    for number in range(30_000):
        newcomers.identify(f"ipv4:10.0.0.1:{number}")
    assert newcomers.identified == 30_000
    assert len(newcomers._known) == 10_000
