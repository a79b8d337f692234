"""Nodes are held to the names that the model's data have."""

import re
from pathlib import Path
from typing import Any

from fed.clients.node.own_data import described, samples_of
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.protocol.protocol_pb2 import Joining
from fed.server.grpc.deployment import Deployment


def joining(folder: Path, name: str, content: str, **source: Any) -> Joining:
    """What a node says of this file."""
    kind = "text" if name.endswith(".txt") else "csv"
    (folder / name).write_text(content)
    data: Any = {"kind": kind, "path": str(folder / name), **source}
    joining = described(samples_of(NodeData(data=data), 0))
    joining.name = name
    return joining


def without_data() -> Deployment:
    """A server that takes the first node's word for what the data are."""
    return Deployment(Experiment(model={"kind": "logistic"}, data=None, evaluation="clients"))


def test_the_first_column_that_differs_is_named(tmp_path: Path) -> None:
    ours = tmp_path / "ours.csv"
    ours.write_text("age,weight,height,label\n1,2,3,0\n4,5,6,1\n7,8,9,0\n")
    data = {"kind": "csv", "path": str(ours), "clients": 1}
    with_data = Deployment(Experiment(model={"kind": "logistic"}, data=data))
    nodes = {
        "same.csv": ("age,label,weight,height\n1,0,2,3\n4,1,5,6\n", None),
        "permuted.csv": ("age,height,weight,label\n1,3,2,0\n4,6,5,1\n", "column 2 must be 'weight', .* got 'height'"),
        "fewer.csv": ("age,weight,label\n1,2,0\n4,5,1\n", "inputs of shape"),
        "others.csv": ("age,weight,length,label\n1,2,3,0\n4,5,6,1\n", "column 3 must be 'height', .* got 'length'"),
    }
    first = without_data()
    for name, (content, reason) in nodes.items():
        said = joining(tmp_path, name, content)
        for deployment in (with_data, first):
            refusal = deployment.accepts(said)
            assert refusal is None if reason is None else re.search(reason, refusal or ""), (name, refusal)


def test_names_of_a_hostile_node_are_shown_as_letters(tmp_path: Path) -> None:
    deployment = without_data()
    content = "age,weight,height,label\n1,2,3,0\n4,5,6,1\n"
    assert deployment.accepts(joining(tmp_path, "a.csv", content)) is None
    said = joining(tmp_path, "b.csv", content)
    said.signature.columns[2] = "\x1b[31m"
    assert re.search(r"column 3 must be 'height', .* got '\?\[31m'", deployment.accepts(said) or "")


def test_another_column_of_labels_is_refused(tmp_path: Path) -> None:
    deployment = without_data()
    content = "a,sick,old\n1,0,1\n2,1,0\n"
    assert deployment.accepts(joining(tmp_path, "a.csv", content, label="sick", metadata=["old"])) is None
    other = joining(tmp_path, "b.csv", content, label="old", metadata=["sick"])
    assert "column 2 must be 'sick', which the model is made for, got 'old'" in (deployment.accepts(other) or "")


def test_other_class_labels_are_refused(tmp_path: Path) -> None:
    deployment = without_data()
    assert deployment.accepts(joining(tmp_path, "a.txt", "ANN: abcd\n", sequence_length=2)) is None
    assert deployment.accepts(joining(tmp_path, "b.txt", "BOB: dcba\n", sequence_length=2)) is None
    other = deployment.accepts(joining(tmp_path, "c.txt", "CAT: abxd\n", sequence_length=2))
    assert "class 4 must be 'c', which the model is made for, got 'd'" in (other or "")


def test_names_beyond_a_message_are_compared_by_their_hash(tmp_path: Path) -> None:
    deployment = without_data()
    names = [f"column-of-some-length-{number}" for number in range(2000)]
    row = ",".join(["1"] * 2000)

    def of(names: list[str], file: str) -> Joining:
        return joining(tmp_path, file, f"{','.join(names)},label\n{row},0\n{row},1\n")

    said = of(names, "a.csv")
    assert said.ByteSize() < 1 << 16
    assert deployment.accepts(said) is None
    assert deployment.accepts(of(names, "b.csv")) is None
    names[-1], names[-2] = names[-2], names[-1]
    assert "differ from the model's" in (deployment.accepts(of(names, "c.csv")) or "")


def test_nothing_is_asked_of_a_source_without_names(tmp_path: Path) -> None:
    deployment = without_data()
    said = joining(tmp_path, "a.csv", "a,b,label\n1,2,0\n2,3,1\n")
    assert deployment.accepts(said) is None
    del said.signature.columns[:]
    assert deployment.accepts(said) is None
