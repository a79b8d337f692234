"""MOON's term of the loss: against its formula, and through training against a loop by hand."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

import fed
from fed.aggregators.base import Phase
from fed.aggregators.moon import MOON, ClientState
from fed.clients.training.local_context import LocalContext
from fed.clients.training.trainer import Trainer
from fed.config.experiment import Local
from fed.errors import InvalidModel
from tests.devices import Current

pytestmark = pytest.mark.usefixtures("device")


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def moved(of: nn.Module, by: float) -> nn.Module:
    other = copy.deepcopy(of)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            shift = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) + number)
            parameter.add_(shift.view_as(parameter), alpha=by)
    return other


def flat(of: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in of.parameters()])


def test_the_term_is_its_formula() -> None:
    generator = np.random.default_rng(0)
    z, server, previous = (generator.standard_normal((5, 7)) for _ in range(3))

    def cosine(a: Any, b: Any) -> Any:
        return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    near, far = np.exp(cosine(z, server) / 0.4), np.exp(cosine(z, previous) / 0.4)
    expected = 2.5 * np.mean(-np.log(near / (near + far)))
    got = MOON(mu=2.5, temperature=0.4).penalty(*map(torch.from_numpy, (z, server, previous)))
    assert float(got) == pytest.approx(expected, rel=1e-12)


def test_training_is_a_loop_by_hand_over_three_models() -> None:
    first, inputs, labels = module(), torch.linspace(-1, 1, 20).double().view(5, 4), torch.tensor([0, 1, 2, 1, 0])
    rule, previous = MOON(mu=2.0), moved(first, 0.3)
    local = Local(lr=0.2, batch_size=5, steps=4)
    trainer = Trainer(copy.deepcopy(first), cross_entropy, local, Phase(rule=rule), Current.device)
    state = trainer.layout.pack(first)
    kept = ClientState(flat(previous))
    order = np.random.default_rng(0)
    trained = trainer.train(*state, (inputs, labels), order=order, seed=0, context=LocalContext(client_state=kept))
    mine, losses = copy.deepcopy(first), []
    for _ in range(4):
        z, anchor, past = (part[1](part[0](inputs)) for part in (mine, first, previous))  # type: ignore[index]
        near, far = (cosine_similarity(z, other.detach()) / 0.5 for other in (anchor, past))
        data_loss = cross_entropy(mine(inputs), labels)
        loss = data_loss - 2.0 * (near - torch.logaddexp(near, far)).mean()
        losses.append(float(data_loss.detach()))
        for parameter, gradient in zip(
            mine.parameters(), torch.autograd.grad(loss, list(mine.parameters())), strict=True
        ):
            parameter.data -= 0.2 * gradient
    torch.testing.assert_close(trained.params_V, flat(mine), rtol=1e-12, atol=1e-13)
    assert trained.train_loss == pytest.approx(sum(losses) / 4), "without the term"
    assert not math.isclose(float((trained.params_V - flat(first)).norm()), 0.0)


def test_training_leaves_the_other_models_running_statistics() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    inputs, labels = torch.linspace(-1, 1, 20).double().view(5, 4), torch.tensor([0, 1, 2, 1, 0])
    seen: list[tuple[Tensor, Tensor]] = []

    class Watching(MOON):
        def penalty(self, features_BF: Tensor, server_BF: Tensor, previous_BF: Tensor) -> Tensor:
            seen.append((server_BF, previous_BF))
            return super().penalty(features_BF, server_BF, previous_BF)

    previous = moved(first, 0.3)
    trainer = Trainer(
        copy.deepcopy(first),
        cross_entropy,
        Local(lr=0.2, batch_size=5, steps=3),
        Phase(rule=Watching()),
        Current.device,
    )
    given = LocalContext(client_state=ClientState(flat(previous)))
    trainer.train(*trainer.layout.pack(first), (inputs, labels), order=np.random.default_rng(0), seed=0, context=given)
    assert len(seen) == 3
    expected = [other.eval()[:3](inputs).detach() for other in (first, previous)]  # type: ignore[index]
    for others in seen:
        torch.testing.assert_close(tuple(part.cpu() for part in others), tuple(expected), rtol=1e-12, atol=1e-13)


def blobs() -> fed.FederatedData:
    def pair(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        return inputs, (inputs.sum(1) > 0).long()

    return fed.FederatedData({number: pair(number) for number in range(4)}, pair(9))


def run(algorithm: dict[str, Any], workers: int = 0) -> list[float]:
    keys = fed.Experiment(algorithm=algorithm, rounds={"count": 3, "cohort": 3}, simulation={"workers": workers})
    done = fed.simulate(keys.override({"simulation.batching": "off"}), data=blobs(), model=module)
    numbers: list[float] = flat(done.model).tolist()
    return numbers


def test_moon_without_its_term_is_fedavg() -> None:
    assert run({"kind": "moon", "mu": 0.0}) == pytest.approx(run({"kind": "fedavg"}), rel=1e-12)
    assert run({"kind": "moon", "mu": 1.0}) != pytest.approx(run({"kind": "fedavg"}), rel=1e-6)


def test_a_model_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"must have a torch\.nn\.Linear for MOON"):
        Trainer(nn.Sequential(nn.Conv1d(1, 1, 1)), cross_entropy, Local(), Phase(rule=MOON()), Current.device)
