"""Workloads: their settings, and data and first model in one file for all sides."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from processes import ROOT
from torch import nn

from fed.clients.data.sources.digits import digits
from fed.clients.data.sources.idx import idx
from fed.clients.models import cnn, mlp
from fed.vectors.randomness import seeded_torch

MNIST = ROOT.parent / "shared" / "data" / "mnist"

Arrays = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A federated problem, trained by FedAvg with plain SGD.

    Args:
        title: name in the table.
        clients: number of clients.
        samples: number that each client holds.
        cohort: clients a round.
        batch_size: samples of a step.
        epochs: passes over a client's samples in a round.
        lr: step size.
        agreement_rounds: number of rounds after which all sides must be as accurate as each other.
        tolerance: most that a side's accuracy may differ from the median of all then: at least five standard
            deviations over the seeds that draw cohorts and orders of samples (0.4, 0.1 and 0.3 percentage points with
            the lean loop), and less than what a side loses that trains half as much (4, 1 and 50).
        source: (training samples, test samples).
        model: the first model for one sample's shape.
    """

    title: str
    clients: int = 100
    samples: int
    cohort: int = 10
    batch_size: int
    epochs: int = 1
    lr: float = 0.1
    agreement_rounds: int
    tolerance: float
    source: Callable[[], tuple[Arrays, Arrays]]
    model: Callable[[tuple[int, ...]], nn.Module]

    def settings(self) -> dict[str, Any]:
        """All that can be written as JSON."""
        return {key: value for key, value in asdict(self).items() if key not in ("source", "model")}

    def write(self, path: Path) -> None:
        """Write settings, samples, who holds which, and the first model as one ``.npz``."""
        generator = np.random.default_rng(0)
        (inputs, targets), (test_inputs, test_targets) = self.source()
        with seeded_torch(0, torch.device("cpu")):
            module = self.model(inputs.shape[1:])
        weights = {f"weight:{name}": value.numpy() for name, value in module.state_dict().items()}
        np.savez(
            path,
            settings=np.array(json.dumps(self.settings())),
            inputs=inputs,
            targets=targets,
            holdings=_holdings(len(inputs), self.clients, self.samples, generator),
            test_inputs=test_inputs,
            test_targets=test_targets,
            **weights,
        )


def _holdings(samples: int, clients: int, each: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Indices [clients, each]: disjoint where there are enough samples, else drawn by each client from all."""
    if clients * each <= samples:
        return generator.permutation(samples)[: clients * each].reshape(clients, each)
    return np.stack([generator.permutation(samples)[:each] for _ in range(clients)])


def _digits() -> tuple[Arrays, Arrays]:
    samples = digits()
    order = np.random.default_rng(0).permutation(len(samples.targets))
    inputs = samples.inputs.numpy()[order]
    targets = samples.targets.numpy()[order]
    return (inputs[:1500], targets[:1500]), (inputs[1500:], targets[1500:])


def _mnist() -> tuple[Arrays, Arrays]:
    samples = idx(str(MNIST), test_fraction=0.2)
    if samples.test is None:
        count = len(samples) * 4 // 5
        pairs = (samples.inputs[:count], samples.targets[:count]), (samples.inputs[count:], samples.targets[count:])
    else:
        pairs = (samples.inputs, samples.targets), samples.test
    (inputs, targets), (test_inputs, test_targets) = pairs
    return (inputs.numpy(), targets.numpy()), (test_inputs.numpy(), test_targets.numpy())


def _prototypes(noise: float = 3.0) -> tuple[Arrays, Arrays]:
    """Images of FEMNIST's shape: one of 62 coarse random patterns each, in white noise."""
    generator = np.random.default_rng(0)
    patterns = np.kron(generator.normal(size=(62, 1, 7, 7)), np.ones((4, 4)))

    def draw(count: int) -> Arrays:
        labels = generator.integers(62, size=count)
        images = patterns[labels] + noise * generator.normal(size=(count, 1, 28, 28))
        return images.astype(np.float32), labels

    return draw(200 * 100), draw(4000)


WORKLOADS = {
    "digits": Workload(
        title="digits, MLP 64-128-10",
        samples=15,
        batch_size=16,
        agreement_rounds=200,
        tolerance=0.02,
        source=_digits,
        model=lambda shape: mlp(shape, 10, hidden=(128,)),
    ),
    "mnist_mlp": Workload(
        title="MNIST, MLP 784-200-10",
        samples=600,
        batch_size=10,
        epochs=5,
        agreement_rounds=4,
        tolerance=0.006,
        source=_mnist,
        model=lambda shape: mlp(shape, 10, hidden=(200,)),
    ),
    "femnist_cnn": Workload(
        title="FEMNIST's shape, CNN",
        clients=200,
        samples=100,
        cohort=20,
        batch_size=20,
        lr=0.05,
        agreement_rounds=30,
        tolerance=0.02,
        source=_prototypes,
        model=lambda shape: cnn(shape, 62, channels=(16, 32), hidden=128),
    ),
}
