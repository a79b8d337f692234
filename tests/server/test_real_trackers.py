"""Built-in trackers, read back by the tools' own readers: a run that was resumed is one run, with each round once."""

import importlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fed
from fed.clients.data import load
from fed.server.grpc.deploy import serve
from fed.server.observer import Essential, Event, RoundEnded
from fed.vectors.randomness import Streams
from tests.server.grpc.threaded import nodes_of
from tests.server.test_observer import PATIENCE
from tests.server.test_tracking import HERE, Fake, experiment

pytestmark = pytest.mark.long


class Stops:
    """Breaks a run off in its second round, whose line is written and whose checkpoint is not."""

    kinds = (RoundEnded,)

    def observe(self, event: Event) -> None:
        assert isinstance(event, RoundEnded)
        if event.round == 2:
            raise KeyboardInterrupt


def resumed(folder: Path, **section: Any) -> fed.Run:
    """A run with a tracker, broken off and resumed."""
    one = experiment({"report": True, **section}, name="mine")
    with pytest.raises(KeyboardInterrupt):
        fed.simulate(one, output=folder, observers=[Essential(Stops())])
    return fed.simulate(one, output=folder, resume=True)


def test_tensorboard_reads_each_round_once(tmp_path: Path) -> None:
    run = resumed(tmp_path / "run", kind="tensorboard")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path / "run/tensorboard"), purge_orphaned_data=True).Reload()
    for name in ("test_accuracy", "bytes_up", "train_loss", "replied"):
        values = [(event.step, event.value) for event in found.Scalars(name)]
        assert values == [(line["round"], pytest.approx(line[name], rel=1e-6)) for line in run.metrics], "float32"


def test_mlflow_reads_metrics_parameters_tags_and_the_report(tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    run = resumed(tmp_path / "run", kind="mlflow", uri=uri)
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("fed").experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("mine", "FINISHED")
    assert (kept.data.params["local.lr"], kept.data.tags["algorithm"], kept.data.tags["seed"]) == ("0.1", "fedavg", "0")
    assert kept.data.metrics["summary/final_test_loss"] == run.summary["final_test_loss"]
    for name in ("test_accuracy", "bytes_up", "train_loss", "virtual_s"):
        values = {metric.step: metric.value for metric in client.get_metric_history(kept.info.run_id, name)}
        assert values == {line["round"]: line[name] for line in run.metrics}
    assert [file.path for file in client.list_artifacts(kept.info.run_id)] == ["report.html"]


def records_of(file: Path) -> Iterator[bytes]:
    """Records of a log as LevelDB writes it, with 7 bytes before it: wandb itself reads it only to send it."""
    content = file.read_bytes()
    place = 7
    parts: list[bytes] = []
    while place + 7 <= len(content):
        if (room := 32768 - place % 32768) < 7:  # the rest of a block holds no header
            place += room
            continue
        _, size_bytes, kind = struct.unpack_from("<IHB", content, place)
        parts.append(content[place + 7 : place + 7 + size_bytes])
        place += 7 + size_bytes
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_wandb_keeps_the_run_offline_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [*os.environ]:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    run = fed.simulate(experiment({"kind": "wandb", "report": True}, name="mine"), output=tmp_path / "run")
    assert "tracking with wandb is offline, for there is no API key" in caplog.text
    (folder,) = (tmp_path / "run/wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert (folder / "files/report.html").is_file()
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rounds = {}
    for content in records_of(file):
        record = messages.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(item.nested_key) or item.key: float(item.value_json) for item in record.history.item}
            rounds[int(values["_step"])] = values
    assert {number: values["test_accuracy"] for number, values in rounds.items()} == {
        line["round"]: line["test_accuracy"] for line in run.metrics
    }


def test_a_server_tells_trackers_what_a_simulation_tells(tmp_path: Path) -> None:
    alone = {"workers": 0, "batching": "off"}
    data_of_three = {"kind": "digits", "clients": 3}
    one = experiment({"kind": f"{HERE}Fake"}, data=data_of_three, rounds={"count": 3}, simulation=alone)
    fed.simulate(one, output=tmp_path / "simulated")
    (simulated,) = Fake.made
    Fake.made.clear()
    assert one.data is not None
    data = load(one.data, Streams(one.seed))

    def begin(port: int) -> None:
        nodes_of(data, port, tmp_path)

    serve(
        one,
        listen="127.0.0.1:0",
        output=tmp_path / "served/run",
        min_nodes=3,
        patience=PATIENCE,
        on_listen=begin,
    )
    (served,) = Fake.made
    assert [*served.rounds] == [*simulated.rounds] == [1, 2, 3]
    for number, values in served.rounds.items():
        for name in ("test_accuracy", "train_loss", "bytes_up", "selected", "replied"):
            assert values[name] == simulated.rounds[number][name]
    assert served.ended is not None
    assert served.ended[0] == "finished"
