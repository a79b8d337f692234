"""Choice of executor: its kind, the number and devices of its workers, and the data that they share.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
import multiprocessing
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeGuard

from fed.clients.data import ClientId, Pair, SamplesOnDemand
from fed.clients.data.held import size_of
from fed.clients.training.devices import devices_named, devices_of
from fed.clients.training.executor import Demand, Executor
from fed.clients.training.work_items import Recipe
from fed.clients.training.worker import Work
from fed.config.components import Component
from fed.config.registry import EXECUTORS
from fed.errors import InvalidExperiment, InvalidInput, RunFailed, first_line
from fed.processes.machine import usable_cores
from fed.server.evaluation import MODELS_AT_ONCE
from fed.simulations.estimate import Estimate
from fed.simulations.simulation import Simulation
from fed.vectors import trees
from fed.vectors.arrays import ArrayTensor
from fed.vectors.shared_memory import SharedTensor
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Ragged, Tree

__all__ = ["hired", "leave_rerun"]

_log = logging.getLogger(__name__)

_SMALL_BYTES = 2**18
"""Size of an item below which its work takes less time than sending it to a worker and back."""

_MOST_WORKERS = 64


def hired(simulation: Simulation, estimate: Estimate | None = None) -> Executor:
    """Executor of a simulation's work, to be entered as a context: this process, or workers that end with it.

    Args:
        simulation: simulation whose work the executor does.
        estimate: estimate of the run, for ``workers: auto``, by what is timed there if it is needed; None: one is made.

    Raises:
        InvalidExperiment: if workers are asked for and the user's parts cannot go to another process.
        RunFailed: if there is no room for workers that are asked for.
    """
    execution = simulation.experiment.simulation
    asked = execution.workers
    if execution.executor is not None:
        return _started(simulation, execution.executor, _count_for(execution.executor, simulation))
    is_free = asked == "auto"
    count = _worthwhile(simulation, estimate) if asked == "auto" else asked
    if count:
        try:
            # With auto this process does the work where no worker can start; to wait for one is the only way to know.
            return _started(simulation, EXECUTORS.make("workers"), count, awaits=is_free)
        except (InvalidInput, RunFailed) as error:
            if not is_free:
                raise
            _log.warning("training in this process alone: %s", error)
    return _started(simulation, EXECUTORS.make("in_process"), 1)


def leave_rerun() -> None:
    """End a worker that runs the user's program again, because that lacks ``if __name__ == "__main__":``.

    It prints the reason; its parent, which waits for it, prints the remedy.
    """
    process = multiprocessing.current_process()
    if process.name.startswith("worker ") and getattr(process, "_inheriting", False):  # multiprocessing tests the same
        raise SystemExit(1)


def _count_for(section: Component, simulation: Simulation) -> int:
    """Number of workers of an executor that the experiment names."""
    asked = simulation.experiment.simulation.workers
    if not _class_of(section).is_parallel:
        return 1
    return _useful(simulation) if asked == "auto" else asked


def _worthwhile(simulation: Simulation, estimate: Estimate | None) -> int:
    """Number of workers with which the run ends soonest, or 0: as :class:`fed.simulations.speed_up.RunTimes` says."""
    most = _useful(simulation)
    if most < 2:
        return 0
    try:
        times = (estimate or Estimate(simulation)).times
    except Exception:  # an error of a user's code will be raised again by the first round, which names its client
        return 0
    return times.workers(most, usable_cores())


def _useful(simulation: Simulation) -> int:
    """Number of workers that a round has work for on this machine; one where several runs share it."""
    # The runs themselves fill the cores.
    if multiprocessing.parent_process() is not None:  # one of several runs side by side
        return 1
    name = simulation.experiment.simulation.device
    # A worker on a GPU keeps a core busy with starting its kernels.
    processors = usable_cores() if simulation.device.type == "cpu" else min(len(devices_named(name)), usable_cores())
    # Each worker starts a process for each of local.devices.
    return min(max(processors // simulation.recipe.local.devices, 1), _groups(simulation))


def _groups(simulation: Simulation) -> int:
    """Number of groups of a round."""
    return -(-simulation.trainees // simulation.groups.size)  # rounded up


def _demand(simulation: Simulation) -> Demand:
    asked = simulation.experiment.simulation.workers
    is_one_of_several = multiprocessing.parent_process() is not None  # which would wait for each other's cores
    most = 1 if is_one_of_several else None
    return Demand(
        workers=most if asked == "auto" else asked,
        groups=_groups(simulation),
        device=simulation.device.type,
        processes=simulation.recipe.local.devices,
    )


def _started(simulation: Simulation, section: Component, workers: int, *, awaits: bool = False) -> Executor:
    """Executor of a kind, with each worker on its device.

    Args:
        simulation: simulation whose work the executor does.
        section: section of the experiment that names the executor.
        workers: number of workers, at least 1.
        awaits: True if a kind with workers waits until one has begun.

    Raises:
        InvalidExperiment: if this machine is too small for so many, or the user's parts cannot go to another process.
    """
    kind = _class_of(section)
    # A slip such as 10000 would exhaust the machine before any error could be shown.
    most = max(_MOST_WORKERS, 4 * usable_cores())
    if kind.shares_memory and workers > most:
        raise InvalidExperiment(
            f"simulation.workers must be at most {most} on this machine of {usable_cores()} cores, got {workers}: more "
            "processes would only wait for each other"
        )
    given: dict[str, Any] = {"small_bytes": _SMALL_BYTES, "awaits": awaits, "demand": _demand(simulation)}
    recipe = simulation.recipe
    if kind.pickles_work:
        given["capacity_bytes"] = _capacity_bytes(simulation)
        _check_portable(simulation)
        if kind.shares_memory or kind.copies_arrays:
            recipe = _shared(simulation, SharedTensor if kind.shares_memory else ArrayTensor)
    name = simulation.experiment.simulation.device
    executor: Executor = section.make(make=partial(Work, recipe), devices=devices_of(workers, name), **given)
    return executor


def _class_of(section: Component) -> type[Executor]:
    """Class that an executor's kind names.

    Raises:
        InvalidExperiment: if it is no executor.
    """
    target = section.target
    if not (isinstance(target, type) and issubclass(target, Executor)):
        raise InvalidExperiment(
            f"simulation.executor {section.kind} must be a {Executor.__module__}.Executor: derive it from that"
        )
    return target


def _capacity_bytes(simulation: Simulation) -> int:
    """Bytes that the tensors of an item, or of its result, take at most."""
    codec = simulation.message.codec_state() if simulation.message else {}
    # Clients that were cancelled train all the same for what their codecs keep, and each gives its own.
    reduces = not simulation.has_peers and simulation.adds_in_groups and not simulation.policy.keeps_late and not codec
    trained = 1 if reduces else simulation.groups.size
    # Clients' whole models, of which some travel together to be scored.
    scored = MODELS_AT_ONCE if simulation.has_peers or simulation.algorithm.personal else 1
    travelling = max(trained, scored)
    _, tensors = simulation.first_task([simulation.data.clients[0]] * simulation.groups.size)
    layout = simulation.layout
    numbers = simulation.message.numbers if simulation.message else 0
    model_size = max(numbers, layout.size) + layout.integer_count
    lost = simulation.groups.size * sum(part.numel() for part in codec.values())
    numbers_in_all = sum(part.numel() for part in tensors) + lost + travelling * model_size
    # A number takes at most 8 bytes; 4096 more are for rounding each tensor up to 64 bytes.
    return 8 * numbers_in_all + 4096


def _check_portable(simulation: Simulation) -> None:
    """Check that work can go to another process.

    Raises:
        InvalidExperiment: if it cannot; the message names the part that cannot be pickled.
    """
    recipe = simulation.recipe
    # A dict of samples goes through shared memory instead.
    data = [part for part in (simulation.data.train, simulation.held_out) if not _are_in_memory(part)]
    parts: dict[str, Any] = {
        "model": recipe.module,
        "loss": recipe.loss,
        "metric": recipe.metrics,
        "algorithm": (recipe.aggregator, recipe.phases),
        "section local": recipe.local,
        "uplink": simulation.message,
        "stages": simulation.prepared.stages,
        "data": data,
        "collate": recipe.collate,
    }
    for name, part in parts.items():
        try:
            pickle.dumps(part)  # tried here, where the part can be named
        except Exception as error:
            raise InvalidExperiment(
                f"the {name} cannot be pickled ({first_line(error)}), so simulation.workers must be 0: write that, or "
                "define it at the top of a module"
            ) from None


_Copying: TypeAlias = type[SharedTensor] | type[ArrayTensor]
"""Class whose objects hold a copy of tensors, joined, in a way that other processes need not copy."""


def _shared(simulation: Simulation, copying: _Copying = SharedTensor) -> Recipe:
    """Recipe with data that processes share; data on demand are made or read by the process that needs them."""
    recipe = simulation.recipe
    train = simulation.data.train
    held_out = simulation.held_out
    test = None if recipe.test is None else simulation.data.test
    return replace(
        recipe,
        read=_Arena.of(train, copying).read if _are_in_memory(train) else recipe.read,
        test=test if test is None or isinstance(test, SamplesOnDemand) else _Arena.of({"test": test}, copying),
        held_out=_Arena.of(held_out, copying).read if _are_in_memory(held_out) else recipe.held_out,
    )


def _are_in_memory(held: object) -> TypeGuard[dict[ClientId, Pair]]:
    return isinstance(held, dict) and not any(isinstance(one, SamplesOnDemand) for one in held.values())


@dataclass(frozen=True)
class _Arena:
    """Samples of all clients, one client's after the other's, in memory that several processes see."""

    inputs: Tree  # of SharedTensor or ArrayTensor, and _SharedRagged, as are the targets
    targets: Tree
    places: Mapping[ClientId, tuple[int, int]]

    @classmethod
    def of(cls, train: Mapping[ClientId, Pair], copying: _Copying) -> "_Arena":
        inputs, targets = zip(*train.values(), strict=True)
        places = {}
        end = 0
        for client, pair in train.items():
            begin = end
            end += size_of(pair)
            places[client] = (begin, end)
        # One memory for all clients: each memory takes a file descriptor.
        return cls(_shared_tree(inputs, copying), _shared_tree(targets, copying), places)

    def __iter__(self) -> Iterator[Tree]:
        """Iterate over the inputs and the targets of all samples."""
        return iter((trees.mapped(_in_this_process, self.inputs), trees.mapped(_in_this_process, self.targets)))

    def read(self, client: ClientId) -> Pair:
        inputs, targets = self
        its = slice(*self.places[client])
        return trees.take(inputs, its), trees.take(targets, its)


@dataclass(frozen=True)
class _SharedRagged:
    """Samples of several lengths in memory that several processes see."""

    values_T: SharedTensor | ArrayTensor
    begins_E: SharedTensor | ArrayTensor


def _shared_tree(parts: Sequence[Tree], copying: _Copying) -> Tree:
    """Trees of one form, one after another, with their leaves in memory that processes share."""
    if parts[0] is None:
        return None
    columns = zip(*map(trees.leaves, parts), strict=True)
    return trees.with_leaves(parts[0], [_shared_leaf(column, copying) for column in columns])


def _shared_leaf(parts: Sequence[Any], copying: _Copying) -> SharedTensor | ArrayTensor | _SharedRagged:
    if isinstance(parts[0], Tensor):
        return copying(*parts)
    begins_E = torch.cat([part.lengths() for part in parts]).cumsum(0)
    begins_E = torch.cat([begins_E.new_zeros(1), begins_E])
    return _SharedRagged(copying(*(part.values_T for part in parts)), copying(begins_E))


def _in_this_process(leaf: Any) -> trees.Leaf:
    if isinstance(leaf, SharedTensor | ArrayTensor):
        return leaf.tensor
    return Ragged(leaf.values_T.tensor, leaf.begins_E.tensor)
