"""Batches that are copied ahead: the same bits, two on their way, and no step before its batch is there."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fed.aggregators.base import Phase
from fed.clients.data.collate import Collating
from fed.clients.models import mlp
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training.batched_trainer import BatchedTrainer
from fed.clients.training.copies_ahead import CudaLane, lane_to
from fed.config.experiment import Local
from fed.vectors.layout import Layout
from tests.clients.training.pretended_cuda import PretendedCuda
from tests.clients.training.pretended_lane import PretendedLane

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
SIZES = (11, 8, 5)


def plain(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*batch, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def trained(
    keys: dict[str, Any], lane: Any, *, collates: bool = False, device: torch.device = CPU, room_bytes: float = 0.0
) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    module: nn.Module = mlp((5,), 3, hidden=(4,))
    pairs = [(torch.randn(size, 5), torch.arange(size) % 3) for size in SIZES]
    local = Local(**{"batch_size": 4, "epochs": 2, **keys})
    collate = Collating(plain) if collates else None
    by = BatchedTrainer(copy.deepcopy(module), cross_entropy, local, Phase(), device, collate=collate)
    by._lane = lane
    by._room_bytes = room_bytes
    orders = [partial(np.random.default_rng, number) for number in range(len(SIZES))]
    (params_KV, _), losses = by.train(*Layout.of(module).pack(module), pairs, orders)
    return params_KV, losses


@pytest.mark.parametrize("collates", [False, True])
@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9, "accumulate": 2}], ids=str)
def test_batches_copied_ahead_have_the_same_bits(keys: dict[str, Any], collates: bool) -> None:
    expected_KV, expected_losses = trained(keys, None, collates=collates)
    params_KV, losses = trained(keys, PretendedLane(), collates=collates)
    assert torch.equal(params_KV, expected_KV)
    assert losses == expected_losses


def test_two_batches_are_on_their_way_beside_each_step() -> None:
    lane = PretendedLane()
    trained({"steps": 6, "epochs": None}, lane)
    assert lane.done == [
        "send 1",
        "send 2",
        "send 3",
        "take 1",
        "send 4",
        "take 2",
        "send 5",
        "take 3",
        "wait 1",
        "send 6",
        "take 4",
        "wait 2",
        "take 5",
        "take 6",
    ]


def test_samples_that_have_room_are_not_copied_again() -> None:
    lane = PretendedLane()
    trained({}, lane, room_bytes=1e6)
    assert lane.done == []


def test_a_step_before_its_batch_is_there_shows() -> None:
    _, losses = trained({}, PretendedLane(arrives=False))
    assert np.isnan(losses).all()


def test_cuda_is_asked_for_copies_beside_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    expected_KV, expected_losses = trained({"steps": 4, "epochs": None}, None)
    cuda = PretendedCuda(monkeypatch)
    lane = CudaLane(CPU)
    params_KV, losses = trained({"steps": 4, "epochs": None}, lane)
    assert torch.equal(params_KV, expected_KV)
    assert losses == expected_losses
    step = ["computing waits for an event of beside", *2 * ["memory kept for computing"]]
    assert cuda.done == 4 * step


@needs_gpu
def test_a_gpu_has_the_same_bits_with_copies_ahead() -> None:
    gpu = torch.device("cuda")
    expected_KV, expected_losses = trained({"momentum": 0.9}, lane_to(gpu), device=gpu, room_bytes=1e9)
    params_KV, losses = trained({"momentum": 0.9}, lane_to(gpu), device=gpu)
    assert torch.equal(params_KV, expected_KV)
    assert losses == expected_losses
