"""Clients that were written for Flower: taken as they are, with the bits of the same client without Flower."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fed
from fed.clients.apps.arrays import AppModel
from fed.server.grpc.deploy import serve
from fed.wire.engines import FLOWER
from tests.clients.apps.torch_client import CLIENTS, DigitsClient, net, samples

HERE = "tests.clients.apps"
with_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason=f'Flower is not installed: pip install "{FLOWER}"'
)


def experiment(kind: str | None = None, **section: Any) -> fed.Experiment:
    told = {"kind": kind, "clients": CLIENTS, "metrics": ["accuracy", "told_round"], **section}
    return fed.Experiment(app=told, local={"lr": 0.5, "epochs": 2}, rounds={"count": 3}, simulation={"workers": 0})


def arrays_of(run: fed.Run) -> dict[str, Any]:
    assert isinstance(run.model, AppModel)
    return run.model.arrays()


def test_fedavg_over_a_torch_client_is_the_built_in_path() -> None:
    run = fed.simulate(experiment(), app=DigitsClient)
    one_batch = {"lr": 0.5, "epochs": 2, "batch_size": 1000}
    ours = fed.simulate(
        fed.Experiment(local=one_batch, rounds={"count": 3}, simulation={"workers": 0}),
        data=fed.FederatedData(train={client: samples(client) for client in range(CLIENTS)}, test=samples(0)),
        model=net(),
    )
    # Gradients sum samples in another order, which rounds float32 otherwise.
    for mine, other in zip(arrays_of(run).values(), ours.model.state_dict().values(), strict=True):
        np.testing.assert_allclose(mine, other.numpy(), atol=1e-6, rtol=0)
    # Each round's own number comes with its evaluation, and the mean of equal numbers is that number.
    assert [line["test_told_round"] for line in run.metrics] == [1, 2, 3]


@with_flower
@pytest.mark.long
@pytest.mark.parametrize("name", ["app", "of_client_fn", "of_parameters", "ParametersClient"])
@pytest.mark.parametrize("workers", [0, 2])
def test_flowers_own_kinds_of_clients_have_the_same_bits(name: str, workers: int) -> None:
    plain = fed.simulate(experiment(), app=DigitsClient)
    kind = f"python:{HERE}.flower_apps:{name}"
    first = {"initial": f"python:{HERE}.torch_client:net"} if name == "app" else {}
    run = fed.simulate(experiment(kind, **first).override({"simulation.workers": workers}))
    for mine, other in zip(arrays_of(run).values(), arrays_of(plain).values(), strict=True):
        assert np.array_equal(mine, other)
    drop = {"wall_s": 0, "test_loss": 0, "client_accuracy_std": 0}
    assert [{**line, **drop} for line in run.metrics] == [{**line, **drop} for line in plain.metrics]


@with_flower
@pytest.mark.long
@pytest.mark.parametrize("name", ["app", "of_client_fn"])
def test_flowers_clients_at_nodes_have_the_simulations_bits(name: str, tmp_path: Path) -> None:
    first = {"initial": f"python:{HERE}.torch_client:net"} if name == "app" else {}
    described = experiment(f"python:{HERE}.flower_apps:{name}", **first)
    simulated = fed.simulate(described, output=tmp_path / "simulated")
    nodes = []

    def begin(port: int) -> None:
        for client in range(CLIENTS):
            where = ["--server", f"127.0.0.1:{port}", "--insecure", "--name", str(client)]
            command = [sys.executable, "-m", "fed", "client", *where, "--app", f"{HERE}.flower_apps:{name}"]
            nodes.append(subprocess.Popen([*command, "--state", str(tmp_path / f"node-{client}")]))

    deployed = serve(described, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=CLIENTS, on_listen=begin)
    assert [node.wait(60) for node in nodes] == [0] * CLIENTS
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("run", "simulated"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for mine, other in zip(deployed.metrics, simulated.metrics, strict=True):
        assert {**mine, "virtual_s": 0, "wall_s": 0} == {**other, "virtual_s": 0, "wall_s": 0}


@with_flower
@pytest.mark.long
def test_the_pages_quickstart_has_the_bits_of_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "from-flower.md").read_text(encoding="utf-8")
    for text, name in re.findall(r"^```\w+\n(# ([\w/]+\.(?:py|yaml))\n.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    port = importlib.import_module("numpy_client")
    flower = fed.Experiment.load("from_flower.yaml").override({"simulation.workers": 0})
    first = {"app.initial": f"python:{HERE}.torch_client:first_of_the_page", "simulation.workers": 0}
    runs = [fed.simulate(flower.override(first)), fed.simulate(port.EXPERIMENT.override(first), app=port.Client)]
    ours, theirs = (arrays_of(run) for run in runs)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert fed.simulate(flower).metrics[-1]["test_eval_acc"] > 0.5
