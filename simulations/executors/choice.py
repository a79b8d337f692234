"""Choice of executor: the number of worker processes of a simulation, and the data that they share.

Shapes: see :mod:`fed.layout`.
"""

import logging
import multiprocessing
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fed.clients.data import ClientId, Pair
from fed.clients.training.executor import Executor, InProcess
from fed.clients.training.work_items import Recipe
from fed.clients.training.worker import Work
from fed.errors import InvalidExperiment, InvalidInput, RunFailed, first_line
from fed.machine import usable_cores
from fed.server.evaluation import MODELS_AT_ONCE
from fed.simulations.estimate import Expectation, expect
from fed.simulations.executors.pool import Workers
from fed.simulations.executors.shared_memory import SharedTensor
from fed.simulations.simulation import Simulation
from fed.tensors import Tensor, torch

__all__ = ["hired", "leave_rerun"]

_log = logging.getLogger(__name__)

_SMALL_BYTES = 2**18
"""A model of this size, and the steps of a few clients on it, take less time than sending them to a worker and back."""

_MOST_WORKERS = 64

_WORTH_WORKERS_S = 20.0
"""Workers take seconds to start: a run must take this long in one process to be worth it."""


def hired(simulation: Simulation, expectation: Expectation | None = None) -> Executor:
    """Executor of a simulation's work, to be entered as a context: this process, or workers that end with it.

    Args:
        simulation: what is to be done.
        expectation: how long it would take in one process, if that is known; for ``workers: auto``.

    Raises:
        InvalidExperiment: if workers are asked for and the user's parts cannot go to another process.
        RunFailed: if there is no room for workers that are asked for.
    """
    asked = simulation.experiment.simulation.workers
    if asked != "auto" and asked > (most := max(_MOST_WORKERS, 4 * usable_cores())):
        raise InvalidExperiment(
            f"simulation.workers must be at most {most} on this machine of {usable_cores()} cores, got {asked}: more "
            "processes would only wait for each other"
        )
    count = _worthwhile(simulation, expectation) if asked == "auto" else asked
    return _workers_if_possible(simulation, count) if count else InProcess(partial(Work, simulation.recipe))


def leave_rerun() -> None:
    """End a worker that runs the user's program again, for want of ``if __name__ == "__main__":``.

    It prints the reason; its parent, which waits for it, prints the remedy.
    """
    process = multiprocessing.current_process()
    if process.name.startswith("worker ") and getattr(process, "_inheriting", False):  # as multiprocessing asks, too
        raise SystemExit(1)


def _worthwhile(simulation: Simulation, expectation: Expectation | None) -> int:
    """Number of workers that a round has work for, if the run is long."""
    if multiprocessing.parent_process() is not None:  # one of several runs side by side
        return 0
    processors = max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else usable_cores()
    count = min(processors, -(-simulation.trainees // simulation.groups.size))
    if count < 2:
        return 0
    try:
        expectation = expectation or expect(simulation)
    except Exception:  # whatever a user's code raises, the first round will raise, and say whose it is
        return 0
    return count if expectation.wall_s >= _WORTH_WORKERS_S else 0


def _workers_if_possible(simulation: Simulation, count: int) -> Executor:
    """Pool of ``count`` workers; or this process, where none can be started and none was asked for."""
    codec = simulation.message.codec_state() if simulation.message else {}
    # clients that were cancelled train all the same for what their codecs keep, and each gives its own
    reduces = not simulation.has_peers and simulation.adds_in_groups and not simulation.policy.keeps_late and not codec
    # clients' whole models, of which some travel together to be scored
    scored = MODELS_AT_ONCE if simulation.has_peers or simulation.algorithm.personal else 1
    travelling = max(1 if reduces else simulation.groups.size, scored)
    _, tensors = simulation.first_task([simulation.data.clients[0]] * simulation.groups.size)
    layout, numbers = simulation.layout, simulation.message.numbers if simulation.message else 0
    model_size = max(numbers, layout.size) + layout.integer_count
    # 4096 for what rounding each tensor up to 64 bytes adds
    lost = simulation.groups.size * sum(part.numel() for part in codec.values())
    item_bytes = 8 * (sum(part.numel() for part in tensors) + lost + travelling * model_size) + 4096
    is_free = simulation.experiment.simulation.workers == "auto"
    try:
        _check_portable(simulation)
        # waited for where this process may do the work instead: only then is it known whether processes can start
        return Workers(partial(Work, _shared(simulation)), count, item_bytes, _SMALL_BYTES, awaits=is_free)
    except (InvalidInput, RunFailed) as error:
        if not is_free:
            raise
        _log.warning("training in this process alone: %s", error)
    return InProcess(partial(Work, simulation.recipe))


def _check_portable(simulation: Simulation) -> None:
    """Check that work can go to another process.

    Raises:
        InvalidExperiment: if it cannot, with the part that stands against it.
    """
    recipe, read = simulation.recipe, (simulation.data.train, simulation.held_out)
    parts: dict[str, Any] = {"model": recipe.module, "loss": recipe.loss, "metric": recipe.metrics}
    data = [part for part in read if not isinstance(part, dict)]
    parts |= {"algorithm": (recipe.aggregator, recipe.phases), "section local": recipe.local, "uplink": recipe.format}
    parts["data"] = data
    for name, part in parts.items():
        try:
            pickle.dumps(part)  # tried here, where the part can be named
        except Exception as error:
            raise InvalidExperiment(
                f"the {name} cannot be pickled ({first_line(error)}), so simulation.workers must be 0: write that, or "
                "define it at the top of a module"
            ) from None


def _shared(simulation: Simulation) -> Recipe:
    """Recipe with data in shared memory; data on demand are made or read by whichever process needs them."""
    recipe, train, held_out = simulation.recipe, simulation.data.train, simulation.held_out
    test = None if recipe.test is None else simulation.data.test
    return replace(
        recipe,
        read=_Arena.of(train).read if isinstance(train, dict) else recipe.read,
        test=None if test is None else _Arena.of({"test": test}),
        held_out=_Arena.of(held_out).read if isinstance(held_out, dict) else recipe.held_out,
    )


@dataclass(frozen=True)
class _Arena:
    """Samples of all clients, one client's after the other's, in memory that several processes see."""

    inputs_E: SharedTensor
    targets_E: SharedTensor
    places: Mapping[ClientId, tuple[int, int]]

    @classmethod
    def of(cls, train: Mapping[ClientId, Pair]) -> "_Arena":
        inputs, targets = zip(*train.values(), strict=True)
        places, end = {}, 0
        for client, labels in zip(train, targets, strict=True):
            places[client] = end, end + len(labels)
            end += len(labels)
        # one memory for all: each takes a file descriptor
        return cls(SharedTensor(*inputs), SharedTensor(*targets), places)

    def __iter__(self) -> Iterator[Tensor]:
        """The pair of inputs and targets of all."""
        return iter((self.inputs_E.tensor, self.targets_E.tensor))

    def read(self, client: ClientId) -> Pair:
        begin, end = self.places[client]
        return self.inputs_E.tensor[begin:end], self.targets_E.tensor[begin:end]
