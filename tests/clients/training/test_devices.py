"""Devices that are named: those that are there are taken and dealt, others are refused with what there is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.clients.data import FederatedData
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.metrics import accuracy
from fed.clients.training import devices, evaluation
from fed.clients.training.devices import (
    deal_from,
    device_of,
    devices_named,
    devices_of,
    found_devices,
    scoring_device,
)
from fed.config.node_data import NodeData
from fed.errors import InvalidExperiment, InvalidInput
from fed.simulations import processes
from fed.simulations.processes import jobs_of

CPU = torch.device("cpu")
NPZ: Any = {"kind": "npz", "path": "scans.npz"}


def have(monkeypatch: pytest.MonkeyPatch, gpus: int, *, apple: bool = False) -> None:
    """Pretend to be on a machine with so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)


@pytest.mark.parametrize(
    ("name", "gpus", "dealt"),
    [
        ("auto", 0, ["cpu", "cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1", "cuda:1"]),
        ("cpu", 2, ["cpu", "cpu", "cpu"]),
    ],
)
def test_a_name_deals_its_devices_to_workers(
    name: str, gpus: int, dealt: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpus)
    assert [str(device) for device in devices_of(3, name)] == dealt
    assert str(device_of(name)) == dealt[0]
    assert {*map(str, devices_named(name))} == {*dealt}


def test_processes_side_by_side_begin_with_their_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, gpus=3)
    monkeypatch.setattr(devices, "_first_place", 0)
    firsts = []
    for place in range(4):
        deal_from(place)
        firsts.append(str(device_of("auto")))
        assert {*map(str, devices_named("cuda"))} == {"cuda:0", "cuda:1", "cuda:2"}
        assert str(device_of("cuda:2")) == "cuda:2"
        assert device_of("cpu") == CPU
    assert firsts == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]


@pytest.mark.parametrize(
    ("names", "gpus", "jobs"), [({"auto"}, 0, 16), ({"auto"}, 2, 8), ({"cuda:1", "cpu"}, 2, 4), ({"cpu"}, 2, 16)]
)
def test_gpus_bound_runs_side_by_side(names: set[str], gpus: int, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, gpus)
    monkeypatch.setattr(processes, "usable_cores", lambda: 16)
    assert jobs_of("auto", {}, names) == jobs
    assert jobs_of(11, {}, names) == 11


def test_apples_gpu_is_taken_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, gpus=0, apple=True)
    assert device_of("auto") == CPU
    assert device_of("mps").type == "mps"
    assert scoring_device(torch.device("mps")) == CPU


@pytest.mark.parametrize(
    ("name", "gpus", "found"), [("cuda", 0, "cpu"), ("mps", 0, "cpu"), ("cuda:2", 2, "cpu and cuda:0 and cuda:1")]
)
def test_a_device_that_is_missing_is_refused(name: str, gpus: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, gpus)
    said = f"device {name} is not on this machine, which has {found}: choose one of them, or auto"
    with pytest.raises(InvalidInput, match=said):
        devices_of(1, name)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:01", "CPU", "cuda:1 ", ""])
def test_a_name_of_no_device_is_refused(name: str) -> None:
    with pytest.raises(InvalidExperiment, match=r"simulation\.device: must be auto, cpu, cuda"):
        fed.Experiment(simulation={"device": name})
    with pytest.raises(InvalidExperiment, match="device: must be auto, cpu, cuda"):
        NodeData(data=NPZ, device=name)


def test_a_nodes_option_comes_before_its_file() -> None:
    node = NodeData(data=NPZ, device="cuda:1", client="ann")
    assert (node.on("cpu").device, node.on(None).device, node.on("cpu").client) == ("cpu", "cuda:1", "ann")
    with pytest.raises(InvalidExperiment, match="device: must be auto"):
        node.on("gpu")


@pytest.mark.skipif(found_devices() != ["cpu"], reason="needs a machine without a GPU")
def test_a_run_writes_down_the_device_that_it_has(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "rounds": {"count": 1},
        "data": {"kind": "digits", "clients": 2},
        "model": {"kind": "logistic"},
    }
    run = fed.simulate(fed.Experiment(**keys), output=tmp_path / "run")
    assert run.experiment.simulation.device == "cpu"
    with pytest.raises(InvalidInput, match=r"device cuda:0 is not on this machine"):
        fed.simulate(fed.Experiment(**keys, simulation={"device": "cuda:0"}))


def test_scores_are_the_same_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and targets go where float64 is; here that is the same processor by another name."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    samples = torch.randn(300, 3), torch.arange(300) % 2
    measures = cross_entropy, {"accuracy": accuracy}
    expected = evaluation.evaluate(module, *measures, samples, CPU)
    asked: list[torch.device] = []

    def elsewhere(device: torch.device) -> torch.device:
        asked.append(device)
        return CPU

    monkeypatch.setattr(evaluation, "scoring_device", elsewhere)
    assert evaluation.evaluate(module, *measures, samples, torch.device("cpu", 0)) == expected
    assert asked == [torch.device("cpu", 0)]


def test_groups_are_not_trained_on_apples_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from fed.simulations.simulation import Simulation

    have(monkeypatch, gpus=0, apple=True)
    data = FederatedData({client: (torch.randn(8, 3), torch.arange(8) % 2) for client in range(3)})
    keys: dict[str, Any] = {"model": {"kind": "logistic"}, "simulation": {"device": "mps"}}
    simulation = Simulation(fed.Experiment(**keys), data)
    assert (simulation.batching.is_batched, simulation.experiment.simulation.device) == (False, "mps")
    assert "no float64" in simulation.batching.reason
    asked = fed.Experiment(**keys | {"simulation": {"device": "mps", "batching": "on"}})
    with pytest.raises(InvalidExperiment, match="no float64"):
        Simulation(asked, data)


@pytest.mark.skipif(found_devices() != ["cpu"], reason="needs a machine without a GPU")
def test_a_run_is_resumed_on_its_kind_of_device(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"data": {"kind": "digits", "clients": 2}, "model": {"kind": "logistic"}}
    fed.simulate(fed.Experiment(**keys, rounds={"count": 2}), output=tmp_path)
    file = tmp_path / "experiment.yaml"
    (tmp_path / "summary.json").unlink()
    file.write_text(file.read_text().replace("device: cpu", "device: cuda"))
    begun = fed.Experiment.load(file)
    assert begun.simulation.device == "cuda"
    with pytest.raises(InvalidInput, match="device cuda is not on this machine"):
        fed.simulate(begun, output=tmp_path, resume=True)
    with pytest.raises(InvalidInput, match=r"simulation\.device is cuda in .*, got cpu"):
        fed.simulate(begun.override({"simulation.device": "cpu"}), output=tmp_path, resume=True)
