"""The fleet of real nodes, from the server's side alone."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fed.server.grpc.fleet import NodeFleet
from fed.server.grpc.service import Patience
from tests.server.grpc.hostile_wire import Wire

PATIENCE_S = 30.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[NodeFleet]:
    patience = Patience(heartbeat_s=0.05)
    fleet = NodeFleet(
        "127.0.0.1:0",
        tmp_path / "spool",
        credentials=None,
        admits=None,
        accepts=lambda joining: None,
        patience=patience,
    )
    yield fleet
    fleet.close("the run is over", is_final=True)


def test_a_fleet_that_is_closed_twice_is_closed(fleet: NodeFleet) -> None:
    def close() -> None:
        fleet.close("the server stops", is_final=False)
        fleet.close("the run is over", is_final=True)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert not fleet._thread.is_alive()


def test_a_fleet_is_closed_when_its_calls_have_ended(fleet: NodeFleet) -> None:
    call = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), fleet._loop)
    fleet.close("the run is over", is_final=True)
    assert call.done()


def test_node_gets_heartbeats_before_the_run_is_known(fleet: NodeFleet) -> None:
    wire = Wire(fleet.port, "ann")
    said = wire.attend()
    assert next(said).HasField("heartbeat")
    fleet.close("nobody else has come", is_final=True)
    last = [message for message in said if not message.HasField("heartbeat")]
    assert [message.farewell.reason for message in last] == ["nobody else has come"]
    wire.outbox.put(None)
