"""Models of ``transformers`` train on several devices by their own plans and layers, as on one."""

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch

from fed.aggregators.base import Phase
from fed.clients.scoring.losses import cross_entropy, model_loss
from fed.clients.training.local_context import LocalContext
from fed.clients.training.parallel.parallel_trainer import ParallelTrainers
from fed.clients.training.trainer import Trainer
from fed.config.experiment import Local
from fed.vectors.randomness import seeded_torch

pytestmark = pytest.mark.long  # transformers is installed for the long tests alone

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torchvision, which another library brings and transformers would import: it must fit the build of torch."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "loss"),
    [("tensor", model_loss), ("tensor", cross_entropy), ("fsdp", cross_entropy), ("pipeline", cross_entropy)],
)
def test_a_transformer_of_others_trains_as_on_one_device(kind: str, loss: Any) -> None:
    """With padding in one of the batches alone."""
    from tests.clients.training.parallel.language_model import LanguageModel

    with seeded_torch(0, CPU):
        model = LanguageModel().double()
        ids = torch.randint(32, (6, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :3] = 0
    samples = ({**inputs, "labels": ids}, None) if loss is model_loss else (inputs, ids)
    local: dict[str, Any] = {"batch_size": 4, "epochs": 2, "momentum": 0.9}
    one = Trainer(copy.deepcopy(model), loss, Local(**local), Phase(), CPU)
    section = Local(**{**local, "devices": 2, "parallel": kind})
    several = ParallelTrainers(model, section)(Phase(), loss, CPU)
    state = one.layout.pack(model)
    expected, found = (
        trainer.train(*state, samples, order=np.random.default_rng(3), seed=1, context=LocalContext())
        for trainer in (one, several)
    )
    torch.testing.assert_close(found.params_V, expected.params_V, rtol=0, atol=1e-12)
    assert found.train_loss == pytest.approx(expected.train_loss, abs=1e-12)
