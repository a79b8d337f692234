"""A node with a table whose server asks by schemas for what the cells hold: it learns a constant sentence."""

import hashlib
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fed.clients.node.own_data import described, described_without_schema, samples_of
from fed.clients.node.plans import as_table
from fed.config.node_data import NodeData
from fed.config.registry import DATA
from fed.errors import FedError
from fed.protocol.protocol_pb2 import FromNode, Joining, Plan, Signature, Table, ToNode
from fed.secure_aggregation.reasons import Reason, reason_of
from tests.clients.node.test_hostile_server import BOUND_S, Server, Training, served

TABLE = "age,ward\n30,red\n31,white\n"
FITTING: dict[str, Any] = {"features": {"age": "real"}, "target": "ward", "classes": ["white", "red"]}


class TableTraining(Training):
    """What a node with a table of its own would train with."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        (folder / "own.csv").write_text(TABLE)
        self._description = NodeData(data=DATA.make("csv", path=f"{folder}/own.csv"))
        self.schemas: list[str] = []

    def describe(self) -> Joining:
        return described_without_schema(self._description, 0)[0]

    def describe_by(self, schema: str) -> Joining:
        self.schemas.append(schema)
        joining = described(samples_of(self._description, 0, as_table(schema)))
        joining.table_sha256 = hashlib.sha256(schema.encode()).digest()
        return joining


class Sessions:
    """Stand-in for a secure node's sessions, which no test here comes to."""

    def take(self, message: object) -> list[object]:
        return []


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fed.clients.node.edge_node._FAREWELL_S", 0.1)


def asked(folder: Path, *says: ToNode, is_secure: bool) -> tuple[str, list[FromNode], TableTraining]:
    """The node's last words, what it has told such a server, and what it has read its table by."""
    heard: list[FromNode] = []

    def told(server: Server) -> Iterator[ToNode]:
        for message in says:
            while not heard or not heard[-1].HasField("joining"):
                heard.append(server.heard.get(timeout=BOUND_S))
            heard.append(FromNode())  # a mark: the next message waits for another joining
            yield message
        while not heard[-1].HasField("farewell"):
            try:
                heard.append(server.heard.get(timeout=0.5))
            except queue.Empty:
                return
        threading.Event().wait(0.1)

    training = TableTraining(folder)
    (folder / "files").mkdir()
    words, _ = served(folder / "files", told, training=training, secure=Sessions() if is_secure else None)
    return words, heard, training


def by(schema: str | dict[str, Any]) -> ToNode:
    return ToNode(table=Table(schema=schema if isinstance(schema, str) else json.dumps(schema)))


def farewell(heard: list[FromNode]) -> str:
    return heard[-1].farewell.reason


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "[]",
        "null",
        '"features"',
        "[" * 200_000,
        '{"features": ' * 50_000,
        '{"features": {"age": {"bounds": [0, 9' + "9" * 5_000 + "]}}}",
        json.dumps({"features": {"age": "real"}, "target": "x" * 2_000_000}),
        json.dumps({**FITTING, "features": {"age": {"python": "python:antigravity:fly"}}}),
        json.dumps({**FITTING, "features": [["age", "real"]]}),
        json.dumps({**FITTING, "features": {f"column {number}": "real" for number in range(20_000)}}),
        json.dumps({**FITTING, "path": "/etc/passwd"}),
        json.dumps({**FITTING, "classes": ["white"] * 9}),
        json.dumps({**FITTING, "classes": ["white", "blue"]}),
        json.dumps({**FITTING, "features": {"age": {"bounds": [31, 99]}}}),
        json.dumps({**FITTING, "features": {"age": {"missing": 1.0, "values": ["30"]}}}),
        json.dumps({**FITTING, "target": ["age", "ward"], "classes": None, "features": {"ward": ["red", "white"]}}),
        json.dumps({**FITTING, "missing": "drop", "features": {"ward": ["red"]}, "target": "age", "classes": None}),
    ],
    ids=range(18),
)
def test_any_schema_that_does_not_fit_gets_one_constant_sentence(schema: str, tmp_path: Path) -> None:
    with pytest.raises(FedError) as caught:  # nothing else, and no other kind of end
        TableTraining(tmp_path).describe_by(schema)
    assert reason_of(caught.value, Reason.CANNOT_FOLLOW) == Reason.CANNOT_FOLLOW


@pytest.mark.parametrize("schema", ["[" * 200_000, json.dumps({**FITTING, "classes": ["white", "blue"]})])
def test_the_owner_alone_reads_what_is_wrong(schema: str, tmp_path: Path) -> None:
    words, heard, _ = asked(tmp_path, by(schema), is_secure=True)
    assert farewell(heard) == Reason.CANNOT_FOLLOW
    assert "schema of tables is none" in words or "got 'red'" in words


def test_a_cell_stays_at_the_node_without_secure_sums(tmp_path: Path) -> None:
    words, heard, _ = asked(tmp_path, by({**FITTING, "classes": ["white", "blue"]}), is_secure=False)
    place = f"{tmp_path}/own.csv: row 1, column ward must be one of white, blue"
    assert farewell(heard) == f"{place}: correct the cell, or remove the row"
    assert words == f"{place}, got 'red': correct the cell, or remove the row"


@pytest.mark.parametrize("is_secure", [True, False])
def test_a_node_reads_its_table_by_one_schema(is_secure: bool, tmp_path: Path) -> None:
    # Both fit: the second alone would tell that no age is above 31.
    narrower = {**FITTING, "features": {"age": {"bounds": [0, 31]}}}
    words, heard, training = asked(tmp_path, by(FITTING), by(narrower), is_secure=is_secure)
    assert "has a second schema of tables, and a node reads its table by one alone" in words
    assert len(training.schemas) == 1
    assert (farewell(heard) == Reason.CANNOT_FOLLOW) is is_secure


def test_a_plan_with_another_schema_is_refused(tmp_path: Path) -> None:
    narrower = {**FITTING, "features": {"age": {"bounds": [0, 31]}}}
    experiment = json.dumps({"model": {"kind": "logistic"}, "table": narrower})
    signature = Signature(
        input_shape=[1],
        input_dtype="float32",
        classes=2,
        columns=["age", "ward"],
        labels=["white", "red"],
        target_dtype="int64",
    )
    plan = ToNode(plan=Plan(experiment=experiment, signature=signature, heartbeat_s=0.5))
    words, heard, training = asked(tmp_path, by(FITTING), plan, is_secure=True)
    assert "must have the schema of tables by which this node has joined" in words
    assert farewell(heard) == Reason.CANNOT_FOLLOW
    assert training.prepared == []
