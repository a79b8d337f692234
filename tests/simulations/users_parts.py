"""Models, losses, data and algorithms of a user's own. Here, for a spawned process imports them by name."""

import multiprocessing
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import fed
from fed.aggregators.fedavg import FedAvg
from fed.clients.data import Pair
from fed.clients.training.executor import Executor, Item, Make, Result, Work
from fed.server.observer import Event, Expectation, Kinds, RoundEnded
from fed.simulations.executors.pool import Workers

UNEQUAL = (3, 17, 8, 1, 30, 12, 5, 9, 24)


# Data, and what a run came to.


def samples(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Points in four dimensions, of three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), (inputs[:, :3] + 0.3 * inputs[:, 1:]).argmax(1)


def unequal(dtype: torch.dtype = torch.float32, test: int = 40) -> fed.FederatedData:
    """Nine clients, with from one to thirty samples each."""
    train = {f"c{number}": samples(count, number, dtype) for number, count in enumerate(UNEQUAL)}
    return fed.FederatedData(train, samples(test, 99, dtype) if test else None, classes=3)


def on_demand(bad: Sequence[int] = ()) -> fed.FederatedData:
    """Twelve clients; the data of some cannot be used, which is found where they are read to be trained on."""
    train = fed.ClientsOnDemand(range(12), partial(_made, bad=bad), _size)
    return fed.FederatedData(train, samples(20, 99), classes=3)


def _size(client: int) -> int:
    return 4 + 3 * client


def _made(client: int, bad: Sequence[int]) -> Pair:
    inputs, labels = samples(_size(client), client)
    return inputs, labels + 7 * (client in bad)


def outcome(run: fed.Run) -> tuple[Any, ...]:
    """All that must be the same, to the bit: models, metrics and summary, but for times and reasons of batching."""
    modules = [run.model, *run.models.values()]
    bits = [[part.numpy().tobytes() for part in module.state_dict().values()] for module in modules]
    summary = {key: value for key, value in _without_times(run.summary).items() if key != "training"}
    return bits, [_without_times(line) for line in run.metrics], summary, list(run.models)


def kept(folder: Path) -> dict[str, bytes]:
    """A run's files, but for the number of workers that some of them name, and for times."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in files.keys() & {"experiment.yaml"}:
        files[name] = re.sub(rb"workers: \w+", b"workers: any", files[name])
    for name in files.keys() & {"metrics.jsonl", "summary.json"}:
        files[name] = re.sub(rb'"wall_s": ?[\d.e-]+', b"", files[name])
    return files


def _without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "wall_s"}


class Watcher:
    """An observer that notes what it is told, and then does something."""

    kinds: Kinds = (Expectation, RoundEnded)

    def __init__(self, then: Callable[[int], None] = lambda number: None) -> None:
        self.expectations: list[Expectation] = []
        self.rounds: list[int] = []
        self._then = then

    def observe(self, event: Event) -> None:
        if isinstance(event, Expectation):
            self.expectations.append(event)
        elif isinstance(event, RoundEnded):
            self.round(event.line)

    def round(self, line: Mapping[str, Any]) -> None:
        self.rounds.append(line["round"])
        self._then(line["round"])


# Models and losses.


def small(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *between, nn.Tanh(), nn.Linear(6, 3))


def double() -> nn.Module:
    return small().double()


def with_dropout() -> nn.Module:
    return small(nn.Dropout(0.5))


def digits_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 10))


def with_batch_norm() -> nn.Module:
    return small(nn.BatchNorm1d(6))


def brier(output: Tensor, target: Tensor) -> Tensor:
    """A loss of a user's own: the mean over samples of the squared error of probabilities."""
    return (output.softmax(1) - nn.functional.one_hot(target, 3)).square().sum(1).mean()


def squared(output: Tensor, target: Tensor) -> Tensor:
    """A loss that grows with the output's square, so that large steps end in infinities."""
    return (output - target[:, None]).square().mean()


def second_guess(output: Tensor, target: Tensor) -> Tensor:
    """A metric of a user's own: how often the label is among the two that score highest."""
    return (output.topk(2, 1).indices == target[:, None]).any(1).double().mean()


def correlation(output: Tensor, target: Tensor) -> float:
    """A metric that is no mean over samples: the correlation of the first output with the target."""
    return float(torch.corrcoef(torch.stack([output.detach()[:, 0].double(), target.double()]))[0, 1])


def concordance(output: Tensor, target: Tensor) -> Tensor:
    """A metric over pairs of samples, the C-index: the share of those with unlike targets that are in order."""
    is_later = target[:, None] > target
    return (output[:, :1] > output[:, 0])[is_later].double().mean()


def cox(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose risk set is the batch: the mean of log(sum of exp(risk) over who is at risk) - risk."""
    order = target.argsort(descending=True, stable=True)
    risk = output[:, 0][order]
    return (risk.logcumsumexp(0) - risk).mean()


class Breaks(nn.Module):
    """Raises in training, in worker processes alone, for a client that has so many samples a step.

    Args:
        size: of the batch.
        marker: a file that is made as it raises, and keeps it from raising again; None: it always raises.
    """

    def __init__(self, size: int, marker: Path | None = None) -> None:
        super().__init__()
        self.layers = small()
        self._size, self._marker = size, marker

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) == self._size and multiprocessing.parent_process() is not None:
            self._break()
        outputs: Tensor = self.layers(inputs)
        return outputs

    def _break(self) -> None:
        if self._marker is not None:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        raise ArithmeticError("the sample is cursed")


# Algorithms.


@dataclass(frozen=True, kw_only=True)
class Median(FedAvg):
    """The median of the clients' messages, coordinate by coordinate."""

    linear: ClassVar[bool] = False
    counted: ClassVar[list[int]] = []

    def combine(
        self, state: Any, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[Any, Tensor]:
        self.counted.append(len(messages_SM))
        return state, messages_SM.median(0).values


@dataclass(frozen=True, kw_only=True)
class Personal(FedAvg):
    """FedAvg, whose model is to be good for each client on its own data."""

    personal: ClassVar[bool] = True


# Processes that several runs share, for to start one takes seconds.


class Borrowed(Executor):
    """Workers that have been there before, and stay."""

    is_parallel = True
    pickles_work = True
    pool: ClassVar[Workers]
    asked: ClassVar[list[int]]

    def __init__(self, make: Make, devices: Sequence[torch.device]) -> None:
        self.asked.append(len(devices))
        self._pool = self.pool
        self._pickled = pickle.dumps(make)

    def submit(self, item: Item) -> int:
        content = self._pickled, item.content
        return self._pool.submit(Item(content, item.tensors, item.label, item.cost, item.priority))

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:
        return self._pool.results(tickets)

    def close(self) -> None:
        """Nothing: the next run needs them."""


def lend(device: torch.device) -> Work:
    """What borrowed workers do: the work of whichever run asks for it."""
    works: dict[bytes, Work] = {}

    def work(content: Any, tensors: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        pickled, task = content
        if pickled not in works:
            works.clear()
            works[pickled] = pickle.loads(pickled)(device)
        return works[pickled](task, tensors)

    return work
