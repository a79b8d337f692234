"""How many worker processes a simulation gets, and what they are given."""

import contextlib
import logging
import multiprocessing
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fed.clients.data import ClientId, FederatedData, Pair
from fed.errors import InvalidExperiment
from fed.machine import usable_cores
from fed.simulations.expectation import Expectation
from fed.simulations.shared_memory import SharedTensor
from fed.simulations.simulation import Simulation
from fed.simulations.work import Recipe
from fed.simulations.workers import Executor, InProcess, Workers

__all__ = ["hired"]

_log = logging.getLogger(__name__)

_WORTH_WORKERS_S = 20.0
"""Workers take seconds to start: a run must take this long in one process to be worth it."""


@contextlib.contextmanager
def hired(simulation: Simulation, expectation: Expectation | None) -> Iterator[Executor]:
    """Whoever does a simulation's work, for as long as the context lasts.

    Args:
        simulation: what is to be done.
        expectation: how long it would take in one process; for ``workers: auto``.

    Raises:
        InvalidExperiment: if workers are asked for and the user's parts cannot go to another process.
    """
    count = _count(simulation, expectation)
    if count == 0:
        yield InProcess(simulation.recipe)
        return
    item_bytes = (simulation.groups.size + 4) * (simulation.layout.size + simulation.layout.integer_count) * 8
    with Workers(_shared(simulation), count, item_bytes + 4096) as workers:
        yield workers


def _count(simulation: Simulation, expectation: Expectation | None) -> int:
    """So many workers as are asked for; of ``auto``, as many as there is work for in a round, if the run is long."""
    asked = simulation.experiment.simulation.workers
    if asked == "auto":
        if multiprocessing.parent_process() is not None:  # one of several runs side by side
            return 0
        processors = max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else usable_cores()
        at_once = -(-simulation.trainees // simulation.groups.size)
        is_long = expectation is not None and expectation.wall_s >= _WORTH_WORKERS_S
        if min(processors, at_once) < 2 or not is_long:
            return 0
        if problem := _stays_here(simulation.recipe, simulation.data):
            _log.warning("training in this process alone, for %s", problem)
            return 0
        return min(processors, at_once)
    if asked and (problem := _stays_here(simulation.recipe, simulation.data)):
        raise InvalidExperiment(f"simulation.workers must be 0 here, got {asked}: {problem}")
    return asked


def _stays_here(recipe: Recipe, data: FederatedData) -> str | None:
    """What cannot go to another process, and why; None where all can."""
    parts: dict[str, Any] = {"model": recipe.module, "loss": recipe.loss, "metric": recipe.metric}
    parts |= {"algorithm": recipe.rule, "data": data.train if data.is_on_demand else None}
    for name, part in parts.items():
        try:
            pickle.dumps(part)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return f"the {name} cannot be pickled ({reason}): define it at the top of a module"
    return None


def _shared(simulation: Simulation) -> Recipe:
    """The recipe with data in shared memory; data on demand are made or read by whoever needs them."""
    data, test = simulation.data, simulation.data.test
    read = data.read if data.is_on_demand else _Arena.of(data.train).read
    return replace(simulation.recipe, read=read, test=test)


@dataclass(frozen=True)
class _Arena:
    """All clients' samples, one client's after the other's, in memory that several processes see."""

    inputs_N: SharedTensor
    targets_N: SharedTensor
    places: Mapping[ClientId, tuple[int, int]]

    @classmethod
    def of(cls, train: Mapping[ClientId, Pair]) -> "_Arena":
        inputs, targets = zip(*train.values(), strict=True)
        places, end = {}, 0
        for client, labels in zip(train, targets, strict=True):
            places[client] = end, end + len(labels)
            end += len(labels)
        return cls(SharedTensor.joined(inputs), SharedTensor.joined(targets), places)

    def read(self, client: ClientId) -> Pair:
        begin, end = self.places[client]
        return self.inputs_N.tensor[begin:end], self.targets_N.tensor[begin:end]
