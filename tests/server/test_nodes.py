"""The fleet of real nodes, from the server's side alone."""

import threading
from pathlib import Path

from fed.server.nodes import NodeFleet

PATIENCE_S = 30.0


def test_a_fleet_that_is_closed_twice_is_closed_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    fleet = NodeFleet("127.0.0.1:0", tmp_path / "spool", credentials=None, admits=None, accepts=lambda joining: None)

    def close() -> None:
        fleet.close("the server stops", is_final=False)
        fleet.close("the run is over", is_final=True)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert "nodes" not in {thread.name for thread in set(threading.enumerate()) - before}
