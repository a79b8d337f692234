"""GPUs compute by deterministic algorithms unless that is turned off, and PyTorch's settings stay the user's."""

import os
from typing import Any

import pytest
import torch
from torch import utils

import fed
from fed.clients.setup import Preparation
from fed.clients.training import devices
from fed.clients.training.determinism import deterministic
from fed.config.node_data import NodeData
from fed.errors import InvalidModel
from tests.simulations import users_parts as parts

GPU = torch.device("cuda:1")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> list[Any]:
    cudnn = torch.backends.cudnn
    memory: Any = utils.deterministic
    fills = memory.fill_uninitialized_memory
    return [torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark, fills]


@pytest.fixture
def _of_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a user who wants speed."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv(CUBLAS, raising=False)


@pytest.mark.usefixtures("_of_user")
def test_a_block_on_a_gpu_sets_all_that_matters() -> None:
    before = settings()
    with deterministic(GPU):
        assert settings() == [2, True, False, False]
        assert os.environ[CUBLAS] == ":4096:8"
    assert settings() == before


@pytest.mark.usefixtures("_of_user")
@pytest.mark.parametrize(("device", "on"), [(torch.device("cpu"), True), (GPU, False)], ids=str)
def test_nothing_is_set_on_a_cpu_or_if_off(device: torch.device, on: bool) -> None:
    before = settings()
    with deterministic(device, on=on):
        assert settings() == before
        assert CUBLAS not in os.environ


def test_the_users_workspaces_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    with deterministic(GPU):
        assert os.environ[CUBLAS] == ":16:8"


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("CUDA error: out of memory")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    before = settings()
    with pytest.raises(type(error)) as caught, deterministic(GPU):
        raise error
    assert caught.value is error
    assert settings() == before


def test_an_operation_without_deterministic_algorithm_is_named() -> None:
    said = r"^put_ has no deterministic algorithm on the device cuda:1, at .*test_determinism\.py:\d+: compute it"
    with pytest.raises(InvalidModel, match=said), deterministic(GPU):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


def test_workspaces_that_come_too_late_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":4096:2")
    text = "but this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2"
    with pytest.raises(InvalidModel, match=f"^{CUBLAS} must be :4096:8 or :16:8 .* got ':4096:2'"), deterministic(GPU):
        raise RuntimeError(text)


@pytest.mark.parametrize("on", [True, False])
def test_a_simulation_and_a_node_say_it_for_themselves(on: bool) -> None:
    experiment = fed.Experiment(simulation={"deterministic": on}, fixed=None)
    assert Preparation(experiment, parts.unequal(), parts.small).recipe.is_deterministic == on
    npz: Any = {"kind": "npz", "path": "scans.npz"}
    of_node = NodeData(data=npz, deterministic=not on).experiment_of_node(experiment)
    assert Preparation(of_node, parts.unequal(), parts.small).recipe.is_deterministic == (not on)


def test_a_worker_is_settled_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", settled.append)
    devices.settle_on(torch.device("cpu"))
    devices.settle_on(GPU)
    assert settled == [GPU]
