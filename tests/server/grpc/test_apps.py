"""Apps at nodes: three of them end with the bits of the simulation."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fed
from fed.cli.main import main
from fed.clients.node.said import disclosed
from fed.identity.authority import Authority
from fed.identity.credentials import ServerCredentials
from fed.protocol.protocol_pb2 import Answer, NamedNumber
from fed.server.grpc.deploy import serve
from fed.server.grpc.fleet import NodeFleet

APP = "tests.clients.apps.arrays_only"


@pytest.mark.long
@pytest.mark.parametrize("name", ["Regression", "client_fn"])
def test_an_app_at_three_nodes_has_the_simulations_bits(name: str, tmp_path: Path) -> None:
    section = {"kind": f"python:{APP}:{name}", "clients": 3, "metrics": ["accuracy", "told_round"]}
    experiment = fed.Experiment(app=section, rounds={"count": 2}, simulation={"workers": 0})
    simulated = fed.simulate(experiment, output=tmp_path / "simulated")
    nodes = []

    def begin(port: int) -> None:
        for client in range(3):
            where = ["--server", f"127.0.0.1:{port}", "--insecure", "--name", str(client)]
            command = [sys.executable, "-m", "fed", "client", *where, "--app", f"{APP}:{name}"]
            nodes.append(subprocess.Popen([*command, "--state", str(tmp_path / f"node-{client}")]))

    deployed = serve(experiment, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=3, on_listen=begin)
    assert [node.wait(60) for node in nodes] == [0, 0, 0]
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("run", "simulated"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for mine, other in zip(deployed.metrics, simulated.metrics, strict=True):
        assert {**mine, "virtual_s": 0, "wall_s": 0} == {**other, "virtual_s": 0, "wall_s": 0}


@pytest.mark.long
def test_an_app_that_fails_at_a_node_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kind = f"python:{APP}:Broken"
    experiment = fed.Experiment(app={"kind": kind, "config": {"how": "has negative samples"}}, rounds={"count": 2})
    nodes = []

    def begin(port: int) -> None:
        for client in range(3):
            where = ["--server", f"127.0.0.1:{port}", "--insecure", "--name", str(client)]
            command = [sys.executable, "-m", "fed", "client", *where, "--app", f"{APP}:Broken"]
            nodes.append(subprocess.Popen([*command, "--state", str(tmp_path / f"node-{client}")]))

    run = serve(experiment, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=3, on_listen=begin)
    assert [node.wait(60) for node in nodes] == [0, 0, 0]
    assert [(line["replied"], line["failed"]) for line in run.metrics] == [(2, 1), (2, 1)]
    assert (
        "fit of client 1 must return a whole number of samples, at least 1, got -3: return how many"
        in capfd.readouterr().err
    )


@pytest.mark.long
def test_a_metric_that_no_node_returns_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    experiment = fed.Experiment(app={"kind": f"python:{APP}:Reals", "metrics": ["auc"]}, rounds={"count": 2})
    nodes = []

    def begin(port: int) -> None:
        where = ["--server", f"127.0.0.1:{port}", "--insecure", "--name", "0"]
        command = [sys.executable, "-m", "fed", "client", *where, "--app", f"{APP}:Reals"]
        nodes.append(subprocess.Popen([*command, "--state", str(tmp_path / "node-0")]))

    run = serve(experiment, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=1, on_listen=begin)
    assert [node.wait(60) for node in nodes] == [0]
    assert all(math.isnan(line["test_auc"]) for line in run.metrics)
    said = capfd.readouterr().err
    assert said.count("names auc, and a client's evaluate returned accuracy, told_round in its place") == 1
    assert caplog.text.count("names auc, and no client's evaluate has returned it") == 1


@pytest.mark.long
def test_a_secure_node_tells_no_number_of_its_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"kind": f"python:{APP}:Reals", "clients": 3}
    secure = {"minimum_cohort": 3, "max_weight": 30, "max_drop_out": 0.0, "corrupt": 0.0}
    experiment = fed.Experiment(app=section, rounds={"count": 2}, secure_aggregation=secure, simulation={"workers": 0})
    authority = Authority.create(tmp_path / "keys")
    for client in range(3):
        authority.issue(str(client))
    received: list[Answer] = []
    seen = NodeFleet._received

    def noted(fleet: NodeFleet, task: Any, header: Answer, tensors: Any) -> Any:
        received.append(header)
        return seen(fleet, task, header, tensors)

    monkeypatch.setattr(NodeFleet, "_received", noted)
    nodes = []

    def begin(port: int) -> None:
        for client in range(3):
            where = ["--server", f"127.0.0.1:{port}", "--credentials", str(tmp_path / "keys" / "nodes" / str(client))]
            command = [sys.executable, "-m", "fed", "client", *where, "--app", f"{APP}:Reals"]
            limits = ["--secure", "--new-record", "--minimum-cohort", "3", "--corrupt", "0"]
            nodes.append(subprocess.Popen([*command, *limits, "--state", str(tmp_path / f"node-{client}")]))

    credentials = ServerCredentials.load(tmp_path / "keys" / "server")
    deployed = serve(
        experiment,
        listen="127.0.0.1:0",
        output=tmp_path / "run",
        credentials=credentials,
        min_nodes=3,
        on_listen=begin,
    )
    assert [node.wait(60) for node in nodes] == [0, 0, 0]
    assert len(received) == 6
    assert {(one.weight, one.samples, one.train_loss, len(one.metrics)) for one in received} == {(1.0, 1, 0.0, 0)}
    assert not [key for key in deployed.metrics[0] if key.startswith("fit_")]
    simulated = fed.simulate(experiment)
    ours, theirs = (run.model.state_dict() for run in (deployed, simulated))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_numbers_of_an_app_stay_at_a_secure_node() -> None:
    answer = Answer(samples=21, metrics=[NamedNumber(name="income", value=5.0)])
    assert disclosed(answer) == Answer(samples=1, weight=1.0)


def test_a_node_needs_either_data_or_an_app(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "--name", "0", "--insecure", "--dry-run"]) == 2
    assert "a node needs data or an app, got neither" in capsys.readouterr().err
