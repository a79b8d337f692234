"""One update's way through the code stays short; see :mod:`tests.one_update` for what is counted."""

from pathlib import Path

from tests.one_update import at_node, at_peer, in_simulation


def test_an_update_has_one_name_in_the_simulator() -> None:
    """A trained model is ``params``, its change ``update``, what carries them ``tensors``, any group's ``rows``."""
    way = in_simulation()
    assert {*way.names} == {"update", "param", "tensor", "row", "mean"}, way.report()
    assert {*way.containers} == {"LocalResult", "TrainedClients", "Result", "Answer", "Update", "Reduced"}
    assert len(way.files) == 11, way.report()


def test_an_update_enters_21_files_at_a_node(tmp_path: Path) -> None:
    way = at_node(tmp_path)
    assert len(way.files) <= 21, way.report()
    assert len(way.names) <= 9, way.report()
    assert {"clients/way_out.py", "server/way_in.py"} < {*way.files}


def test_an_update_enters_17_files_at_a_peer(tmp_path: Path) -> None:
    way = at_peer(tmp_path)
    assert len(way.files) <= 17, way.report()
    assert {"server/mixing/neighbourhood.py", "fed/vectors/mixing.py"} < {*way.files}
