"""Tests of what DP-SGD refuses."""

from typing import Any

import pytest

from fed.aggregators.fedavg import FedAvg
from fed.aggregators.mimelite import MimeLite
from fed.aggregators.moon import MOON
from fed.aggregators.post_local_sgd import PostLocalSGD
from fed.aggregators.qfedavg import QFedAvg
from fed.aggregators.scaffold import Scaffold
from fed.clients.models import mlp
from fed.clients.scoring.losses import cox, cross_entropy, model_loss
from fed.clients.training.private_refusals import check_private
from fed.config.experiment import Local
from fed.errors import InvalidExperiment, InvalidModel
from fed.vectors.tensors import nn


def _check(**changed: Any) -> None:
    algorithm = changed.pop("algorithm", FedAvg())
    parts: dict[str, Any] = {"module": mlp((6,), 3), "loss": cross_entropy, "local": Local(), "is_collated": False}
    check_private(**{**parts, **changed}, algorithm=algorithm, phases=algorithm.phases())


@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold()])
def test_algorithms_of_models_and_states_alone_are_taken(algorithm: Any) -> None:
    _check(algorithm=algorithm)
    with pytest.raises(InvalidExperiment, match="got a collate"):  # an algorithm would be refused before it
        _check(algorithm=algorithm, is_collated=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"algorithm": MOON()}, "compares models"),
        ({"algorithm": QFedAvg(q=1.0)}, "asks each for its loss"),
        ({"algorithm": MimeLite()}, "asks each for its gradient"),
        ({"loss": cox}, "got cox"),
        ({"loss": model_loss}, "got model_loss"),
        ({"loss": nn.MSELoss()}, "got MSELoss"),
        ({"is_collated": True}, "got a collate"),
        ({"algorithm": PostLocalSGD(switch=2)}, "which changes it"),
        ({"local": Local(precision="bfloat16")}, "got bfloat16"),
        ({"local": Local(devices=2)}, "float32 and 2"),
    ],
)
def test_what_looks_at_samples_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidExperiment, match=words):
        _check(**changed)


def test_batch_normalisation_is_refused() -> None:
    with pytest.raises(InvalidModel, match="got batch normalisation"):
        _check(module=mlp((6,), 3, batch_norm=True))
