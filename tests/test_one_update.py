"""One update's way through the code stays short; see :mod:`tests.one_update` for what is counted."""

from pathlib import Path

from tests.one_update import at_node, at_peer, in_simulation


def test_an_update_has_one_name_in_the_simulator() -> None:
    """A trained model is ``params``, its change ``update``, what carries them ``tensors``, any group's ``rows``."""
    way = in_simulation()
    assert {*way.names} == {"update", "param", "tensor", "row", "mean"}, way.report()
    assert {*way.containers} == {"LocalResult", "TrainedClients", "Result", "Answer", "Update", "Reduced"}
    assert len(way.files) == 9, way.report()


def test_an_update_enters_14_files_at_a_node(tmp_path: Path) -> None:
    """Beside the simulator's names it is the ``data`` of a chunk, and a file's ``path``."""
    way = at_node(tmp_path)
    assert len(way.files) <= 14, way.report()
    assert {*way.names} <= {"update", "param", "tensor", "row", "mean", "data", "path"}, way.report()
    trained = {"LocalResult", "TrainedClients"}
    sent = {"_Held", "Part", "Chunk"}
    received = {"Answer", "TrainedModel", "Reduced"}
    assert {*way.containers} <= trained | sent | received, way.report()
    assert {"clients/way_out.py", "server/way_in.py"} < {*way.files}


def test_an_update_enters_11_files_at_a_peer(tmp_path: Path) -> None:
    """It is a file at the sender, too, for a neighbour may need it again."""
    way = at_peer(tmp_path)
    assert len(way.files) <= 11, way.report()
    assert {*way.names} <= {"param", "tensor", "row", "data", "path"}, way.report()
    trained = {"LocalResult", "TrainedClients", "Result"}
    exchanged = {"PeerMessage", "Chunk", "_Arrival"}
    assert {*way.containers} <= trained | exchanged, way.report()
    assert {"server/mixing/primitives.py", "fed/vectors/mixing.py"} < {*way.files}
