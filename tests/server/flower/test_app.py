"""An experiment as a Flower app: what is written, and that it ends with the simulation's model."""

import itertools
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fed
from fed.cli.main import main
from fed.clients.data import FederatedData
from fed.clients.node.flower import client_app
from fed.clients.node.training import NodeTraining
from fed.config import yaml
from fed.config.experiment import Experiment
from fed.errors import InvalidData, InvalidExperiment, InvalidInput, OutputExists
from fed.protocol.protocol_pb2 import Failed, Request, Response
from fed.secure_aggregation.reasons import Reason
from fed.server.flower.app import server_app, write_app
from fed.storage.run import Run
from fed.wire.flower_records import packed, unpacked
from tests.flower_stand_ins import Federation, Message, ServerApp, install, partitions, run_app
from tests.server.test_tracking import HERE, Fake

CLIENTS = 3


def experiment(**changed: Any) -> Experiment:
    keys = {
        "name": "Three nodes",
        "data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"kind": "mlp", "hidden": [8]},
        "local": {"lr": 0.1, "batch_size": 16, "epochs": 1},
        "rounds": {"count": 3},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**keys, **changed})


@pytest.fixture
def _flower(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def deploy(path: Path, grid: Federation, output: Path, **config: Any) -> None:
    app = server_app(path)
    assert isinstance(app, ServerApp)
    context = SimpleNamespace(run_config={"min-nodes": CLIENTS, "output": str(output), **config}, run_id=7)
    app.run(grid, context)


def assert_same(output: Path, simulated: Run) -> None:
    state = simulated.model.state_dict()
    deployed = load_file(output / "model.safetensors")
    assert deployed.keys() == state.keys()
    assert all(torch.equal(deployed[name], part) for name, part in state.items())


def written(experiment: Experiment, folder: Path) -> Path:
    """The experiment's file in the app."""
    write_app(experiment, folder)
    (path,) = folder.glob("*/experiment.yaml")
    return path


def test_an_app_is_what_flower_takes(tmp_path: Path) -> None:
    path = written(experiment(rounds={"count": 3, "cohort": 2}), tmp_path / "app")
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "three-nodes"
    assert project["project"]["dependencies"] == []
    flower = project["tool"]["flwr"]["app"]
    assert flower["config"] == {"min-nodes": 2, "output": "", "resume": False}
    for component in flower["components"].values():
        module, _, name = component.partition(":")
        assert name == "app"
        compile((tmp_path / "app" / f"{module.replace('.', '/')}.py").read_text(), module, "exec")
    assert yaml.load(path) == experiment(rounds={"count": 3, "cohort": 2}).dump()


def test_the_command_line_writes_an_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment.yaml").write_text(yaml.dump(experiment().dump()))
    arguments = ["flower-app", str(tmp_path / "experiment.yaml"), "--output", str(tmp_path / "app")]
    assert main([*arguments, "--set", "rounds.count=7"]) == 0
    assert f"flwr run {tmp_path / 'app'} FEDERATION" in capsys.readouterr().out
    (path,) = (tmp_path / "app").glob("*/experiment.yaml")
    assert yaml.load(path)["rounds"]["count"] == 7
    assert main(arguments) == 2


def test_without_flower_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(experiment(), tmp_path / "app")
    for name in ("clientapp", "serverapp"):
        monkeypatch.setitem(sys.modules, f"flwr.{name}", None)
    for app in (client_app, server_app):
        with pytest.raises(InvalidInput, match=r"pip install \"flwr>=1.41,<1.43\""):
            app(path)


def test_an_app_takes_no_others_place(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    write_app(experiment(), tmp_path / "app")
    with pytest.raises(OutputExists, match="empty folder"):
        write_app(experiment(), tmp_path / "app")


def test_what_cannot_be_deployed_becomes_no_app(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="over mean"):
        write_app(experiment(algorithm={"kind": "centralized"}), tmp_path / "app")
    with pytest.raises(InvalidExperiment, match="write partial_work: drop"):
        write_app(experiment(rounds={"deadline_s": 60}), tmp_path / "app")
    with pytest.raises(InvalidExperiment, match=r"can hold a conversation.* not Flower's engine"):
        write_app(experiment(secure_aggregation={"max_weight": 400, "minimum_cohort": 2}), tmp_path / "app")
    assert not (tmp_path / "app").exists()


@pytest.mark.usefixtures("_flower")
@pytest.mark.parametrize(
    "rounds",
    [
        {"kind": "buffered", "count": 4, "concurrency": CLIENTS, "buffer": 2},
        {"kind": "asynchronous", "count": 4, "concurrency": CLIENTS},
        {"kind": "bounded_staleness", "count": 4, "bound": 1},
    ],
    ids=lambda rounds: rounds["kind"],
)
def test_rounds_may_be_asynchronous(rounds: Mapping[str, Any], tmp_path: Path) -> None:
    path = written(experiment(rounds=rounds), tmp_path / "app")
    grid = Federation(path, partitions(CLIENTS, tmp_path / "nodes"))
    deploy(path, grid, tmp_path / "run")
    summary = yaml.load(tmp_path / "run" / "summary.json")
    assert (summary["status"], summary["rounds"], summary["refused"]) == ("finished", 4, 0)
    assert len(grid.trained) >= 4


@pytest.mark.usefixtures("_flower")
def test_trackers_are_told_of_rounds_and_end(tmp_path: Path) -> None:
    Fake.made.clear()
    tracked = experiment(rounds={"count": 1}, tracking=[{"kind": f"{HERE}Fake", "report": False}])
    path = written(tracked, tmp_path / "app")
    deploy(path, Federation(path, partitions(3, tmp_path / "nodes")), tmp_path / "run")
    (told,) = [made for made in Fake.made if made.run is not None]
    assert [*told.rounds] == [1]
    assert told.ended is not None
    assert told.ended[0] == "finished"


@pytest.mark.usefixtures("_flower")
def test_a_message_is_one_array_and_one_record(tmp_path: Path) -> None:
    path = written(experiment(algorithm={"kind": "scaffold"}, evaluation={"kind": "clients"}), tmp_path / "app")
    contents: dict[str, list[Any]] = {"query": [], "train": [], "evaluate": []}

    class Overheard(Federation):
        def content_of_answer(self, message: Message) -> Any:
            answer = super().content_of_answer(message)
            contents[message.metadata.message_type] += [message.content, answer]
            return answer

    deploy(path, Overheard(path, partitions(CLIENTS, tmp_path / "nodes")), tmp_path / "run")
    assert all(contents.values())
    for content in itertools.chain.from_iterable(contents.values()):
        assert content.keys() <= {"config", "arrays"}
        assert content["config"].keys() == {"header"}
        assert content.get("arrays", {}).keys() <= {"flat"}
    assert all("arrays" in content for content in contents["train"])


@pytest.mark.usefixtures("_flower")
@pytest.mark.parametrize("algorithm", ["scaffold", "afl"])
def test_a_killed_run_resumes_to_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    given = experiment(algorithm={"kind": algorithm}, checkpoints={"every": 1})
    path = written(given, tmp_path / "app")
    with pytest.raises(KeyboardInterrupt):
        deploy(
            path,
            Federation(path, partitions(CLIENTS, tmp_path / "nodes"), dies_after=2 * CLIENTS + 1),
            tmp_path / "run",
        )
    again = Federation(path, partitions(CLIENTS, tmp_path / "nodes"))
    deploy(path, again, tmp_path / "run", resume=True)
    assert len(again.trained) == CLIENTS
    assert_same(tmp_path / "run", fed.simulate(given))


@dataclass
class Forgetful(Federation):
    """Nodes whose folder is removed after the second round."""

    def content_of_answer(self, message: Message) -> Any:
        if message.metadata.message_type == "train" and len(self.trained) == 2 * CLIENTS:
            shutil.rmtree(self.path.parents[2] / "nodes")
        return super().content_of_answer(message)


@pytest.mark.usefixtures("_flower")
def test_a_node_that_has_lost_what_it_kept_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(experiment(algorithm="scaffold"), tmp_path / "app")
    grid = Forgetful(path, partitions(CLIENTS, tmp_path / "nodes"))
    deploy(path, grid, tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if "kept between tasks" in record.getMessage()]
    assert sum("tells the server" in line for line in said) == CLIENTS
    for client in range(CLIENTS):
        assert sum(f"client {client} has lost what it kept between tasks" in line for line in said) == 1


@pytest.mark.usefixtures("_flower")
def test_nodes_with_data_of_their_own_need_none_here(tmp_path: Path) -> None:
    given = experiment(evaluation={"kind": "clients"})
    for client in range(CLIENTS):
        description = {"data": given.dump()["data"], "client": client, "seed": given.seed}
        (tmp_path / f"{client}.yaml").write_text(yaml.dump(description))
    configs = {90 + client: {"data": str(tmp_path / f"{client}.yaml")} for client in range(CLIENTS)}
    path = written(experiment(evaluation={"kind": "clients"}, data=None), tmp_path / "app")
    deploy(path, Federation(path, configs), tmp_path / "run")
    assert_same(tmp_path / "run", fed.simulate(given))


@pytest.mark.usefixtures("_flower")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "partition-id=0"),
        ({"partition-id": 3}, "deals its data to 3 clients"),
        ({"partition-id": -1}, "deals its data to 3 clients"),
        ({"partition-id": 0, "num-partitions": 4}, "set data.clients"),
        ({"partition-id": "first"}, "partition-id=first"),
        ({"data": "nowhere.yaml"}, "nowhere.yaml"),
        ({"data": "nameless.yaml"}, "names no client"),
        ({"data": "budget.yaml", "client": "ann"}, "keeps no ledger of privacy"),
    ],
)
def test_a_node_says_what_is_wrong_with_its_configuration(
    config: Mapping[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nameless.yaml").write_text("data: {kind: digits}\n")
    (tmp_path / "budget.yaml").write_text("data: {kind: digits}\nprivacy: {budget_epsilon: 1.0, delta: 1.0e-5}\n")
    path = written(experiment(), tmp_path / "app")
    content = Federation(path, {5: config}).content_of_answer(Message(packed(Request()), 5, "query"))
    assert words in unpacked(content, Response)[0].failed.reason


@pytest.mark.usefixtures("_flower")
def test_a_node_that_keeps_something_must_know_where(tmp_path: Path) -> None:
    path = written(experiment(algorithm={"kind": "scaffold"}), tmp_path / "app")
    grid = Federation(path, {5: {"partition-id": 0, "num-partitions": CLIENTS}})
    content = grid.content_of_answer(Message(packed(Request()), 5, "query"))
    assert "--node-config 'folder=" in unpacked(content, Response)[0].failed.reason


@pytest.mark.usefixtures("_flower")
def test_private_nodes_keep_to_themselves_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A number of the data in a sentence would be outside the noise."""

    def failed(self: NodeTraining, assignment: Any, path: Path) -> Failed:
        if self._client == 1:
            raise ValueError("label 7 of 59 samples is out of range")
        return Failed(task=assignment.task, reason="the training loss became 8.8e14", diverged=True)

    def begun(self: NodeTraining, data: FederatedData, *others: Any, **named: Any) -> None:
        begin(self, data, *others, **named)
        if self._client == 2:
            raise InvalidData("label 7 of 59 samples is out of range")

    begin = NodeTraining.__init__
    monkeypatch.setattr(NodeTraining, "train", failed)
    monkeypatch.setattr(NodeTraining, "__init__", begun)
    keys = {"data": {"kind": "digits", "clients": 3}, "rounds": {"count": 1}, "evaluation": "coordinator"}
    run_app(Experiment(**keys, privacy={"noise_multiplier": 1.0}), tmp_path, 3)
    heard = [record.getMessage() for record in caplog.records if record.name.startswith("fed.server")]
    assert any(Reason.NO_MESSAGE in said for said in heard)
    assert not any("8.8e14" in said or "label" in said for said in heard)
