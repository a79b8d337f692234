"""Parts that all sides share: reading the problem, and one JSON object on the last line of standard output.

Needs PyTorch and NumPy alone, for the peers have an environment of their own.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformer import Transformer

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A workload as every side reads it.

    Args:
        cohort: clients a round.
        batch_size: samples of a step.
        epochs: passes over a client's samples in a round.
        lr: step size.
        clients: (inputs, targets) of each.
        test: (inputs, targets).
        weights: the first model's state.
        path: file of the workload.
    """

    cohort: int
    batch_size: int
    epochs: int
    lr: float
    clients: list[Pair]
    test: Pair
    weights: dict[str, Tensor]
    path: str

    @classmethod
    def read(cls, path: str) -> "Problem":
        """Read what ``Workload.write`` wrote."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        settings = json.loads(str(arrays.pop("settings")))
        inputs = torch.from_numpy(arrays["inputs"])
        targets = torch.from_numpy(arrays["targets"])
        holdings = torch.from_numpy(arrays["holdings"])
        return cls(
            **{key: settings[key] for key in ("cohort", "batch_size", "epochs", "lr")},
            clients=[(inputs[held], targets[held]) for held in holdings],
            test=(torch.from_numpy(arrays["test_inputs"]), torch.from_numpy(arrays["test_targets"])),
            weights={
                name.removeprefix("weight:"): torch.from_numpy(array)
                for name, array in arrays.items()
                if name.startswith("weight:")
            },
            path=path,
        )

    def module(self) -> nn.Module:
        """The first model, built from the shapes of its weights."""
        if "embedding.weight" in self.weights:
            transformer = Transformer.of(self.weights)
            transformer.load_state_dict(self.weights)
            return transformer
        shapes = [tuple(value.shape) for name, value in self.weights.items() if name.endswith(".weight")]
        module = _cnn(shapes) if any(len(shape) == 4 for shape in shapes) else _mlp(shapes)
        module.load_state_dict(self.weights)
        return module


@dataclass(frozen=True)
class Trained:
    """Result of a side's training.

    Args:
        ends_s: times at which the rounds ended, on any clock.
        module: the trained model, where there is one.
    """

    ends_s: list[float]
    module: nn.Module | None


def main(train: Callable[..., Trained], packages: tuple[str, ...] = (), **options: Any) -> None:
    """Train as the command line says, and print when each round ended and how accurate the model is.

    Args:
        train: (problem, rounds, options …) → what training leaves.
        packages: names of packages whose versions are reported, beside PyTorch's and NumPy's.
        options: name → default value, of the side's own command-line options.
    """
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("problem")
    parser.add_argument("--rounds", type=int, required=True)
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = vars(parser.parse_args())
    problem = Problem.read(given.pop("problem"))
    trained = train(problem, given.pop("rounds"), **given)
    versions = {package: version(package) for package in ("torch", "numpy", *packages)}
    score = accuracy(trained.module, problem.test) if trained.module is not None else None
    answer = {"ends_s": trained.ends_s, "accuracy": score, "versions": versions, "memory": _memory()}
    print(json.dumps(answer), flush=True)


def _memory() -> dict[str, float]:
    """The most memory of this process and on the GPU, in megabytes."""
    found: dict[str, float] = {}
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        found["peak_resident_mb"] = int(line.split()[1]) * 1024 / 1e6
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["allocated_mb"] = torch.cuda.max_memory_allocated() / 1e6
        found["reserved_mb"] = torch.cuda.max_memory_reserved() / 1e6
    return found


def accuracy(module: nn.Module, test: Pair) -> float:
    """The share of test samples whose label scores highest."""
    inputs, targets = test
    module.eval()
    with torch.no_grad():
        labels = torch.cat([module(batch).argmax(1) for batch in inputs.split(1000)])
    return float((labels == targets).double().mean())


def _mlp(shapes: list[tuple[int, ...]]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for outputs, inputs in shapes:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn(shapes: list[tuple[int, ...]]) -> nn.Module:
    layers: list[nn.Module] = []
    for shape in shapes:
        if len(shape) == 4:
            layers += [nn.Conv2d(shape[1], shape[0], 3, padding=1), nn.GroupNorm(shape[0] // 8, shape[0])]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
    hidden, scores = (shape for shape in shapes if len(shape) == 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(*hidden[::-1]), nn.ReLU(), nn.Linear(*scores[::-1]))
