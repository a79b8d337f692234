"""Apps at nodes: three of them end with the bits of the simulation."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fed
from fed.cli.main import main
from fed.server.grpc.deploy import serve

APP = "tests.clients.apps.arrays_only"


@pytest.mark.parametrize("name", [pytest.param("Regression", marks=pytest.mark.long), "client_fn"])
def test_an_app_at_three_nodes_has_the_simulations_bits(name: str, tmp_path: Path) -> None:
    experiment = fed.Experiment(
        app={"kind": f"python:{APP}:{name}", "clients": 3}, rounds={"count": 2}, simulation={"workers": 0}
    )
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


def test_a_node_needs_either_data_or_an_app(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "--name", "0", "--insecure", "--dry-run"]) == 2
    assert "a node needs data or an app, got neither" in capsys.readouterr().err
