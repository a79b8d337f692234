"""Trainers of another framework: one of NumPy alone beside PyTorch's."""

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fed
from fed.clients.data import Pair
from fed.clients.training.devices import device_of
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import LocalResult, MakeTrainer
from fed.clients.training.work_items import Trained
from fed.clients.training.worker import Work
from fed.simulations.simulation import Simulation
from fed.vectors.layout import Layout, Spec
from fed.vectors.tensors import Tensor, nn

FEATURES = 3
SAMPLES = (("a", 4), ("b", 7))
LR = 0.1
Array: TypeAlias = NDArray[np.float64]


class NumPyRegression:
    """Linear regression by full batches, of arrays: y = X w + b."""

    layout = Layout.of_specs({"weight": Spec((1, FEATURES), torch.float64), "bias": Spec((1,), torch.float64)})

    def steps(self, samples: int, steps: int | None) -> int:
        return steps or 2

    def train(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        samples: Pair,
        *,
        order: np.random.Generator,
        seed: int,
        context: LocalContext,
    ) -> LocalResult:
        state = vector_V.numpy().copy()
        losses = []
        for _ in range(self.steps(len(samples[0]), context.steps[0] if context.steps else None)):
            loss, gradient = self._loss_and_gradient(state, samples)
            losses.append(loss)
            state -= (LR if context.lr is None else context.lr) * gradient
        return LocalResult(torch.from_numpy(state), integers_I, float(np.mean(losses)))

    def measure(
        self, vector_V: Tensor, integers_I: Tensor, samples: Pair, seed: int, *, gradient: bool
    ) -> tuple[float, Tensor]:
        loss, found = self._loss_and_gradient(vector_V.numpy(), samples)
        return loss, torch.from_numpy(found)

    def load(self, vector_V: Tensor, integers_I: Tensor) -> nn.Module:
        module = regression()
        self.layout.unpack(vector_V, integers_I, module)
        return module

    def _loss_and_gradient(
        self, state: "np.ndarray[tuple[int], np.dtype[np.float64]]", samples: Pair
    ) -> tuple[float, "np.ndarray[tuple[int], np.dtype[np.float64]]"]:
        inputs, targets = (part.numpy() for part in samples)
        errors = inputs @ state[:FEATURES] + state[FEATURES] - targets
        gradient = 2 * np.append(errors @ inputs, errors.sum()) / len(errors)
        return float((errors**2).mean()), gradient


def regression() -> nn.Module:
    return nn.Linear(FEATURES, 1).double()


@pytest.mark.parametrize("algorithm", ["fedavg", "afl", "fednova"])
def test_trainer_of_arrays_takes_the_place_of_pytorchs(algorithm: str) -> None:
    torch.manual_seed(0)
    data = fed.FederatedData(
        {
            name: (torch.randn(count, FEATURES).double(), torch.randn(count).double())
            for name, count in zip("ab", (4, 7), strict=True)
        }
    )
    experiment = fed.Experiment(
        algorithm=algorithm,
        loss="mse",
        local={"lr": LR, "steps": 2, "batch_size": 10},
        evaluation={"kind": "clients", "fraction": 0.2},
    )
    simulation = Simulation(experiment, data, regression)
    task, tensors = simulation.first_task(simulation.data.clients)
    found = []
    make: MakeTrainer = lambda phase, loss, device: NumPyRegression()  # noqa: E731
    for recipe in (simulation.recipe, replace(simulation.recipe, make_trainer=make)):
        trained, (update, *_) = Work(recipe, device_of())(replace(task, wants="updates"), tensors)
        assert isinstance(trained, Trained)
        found.append((update, torch.tensor(trained.train_losses), trained.weights))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=0.0)
    assert found[0][2] == pytest.approx(found[1][2])
