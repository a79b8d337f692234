"""Estimate of a run's time and bytes, made from a few steps before the run begins.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from fed.clients.data import ClientId, ClientsOnDemand, FederatedData, Held
from fed.clients.data.describe import looked_at
from fed.clients.training.executor import InProcess, Item
from fed.clients.training.parallel.parallel_trainer import ParallelTrainers
from fed.clients.training.work_items import EvaluateByClients
from fed.clients.training.worker import Work
from fed.server.evaluation import CLIENTS_AT_ONCE
from fed.server.mixing.message_sizes import exchanged_bytes
from fed.server.observer import Expectation
from fed.server.rounds.synchronous import Synchronous
from fed.server.training_loop import Scores
from fed.simulations.executors.sending import sending_s
from fed.simulations.ring import ring_bytes
from fed.simulations.scoring import begin_scoring_by_coordinator
from fed.simulations.simulation import Simulation
from fed.simulations.speed_up import RunTimes
from fed.vectors.reduction import WeightedMean
from fed.vectors.tensors import Tensor, torch

__all__ = ["Estimate", "expect"]

_PROBE_STEPS = 3
_SUMMED = 4  # messages of one sum
_TIMES = 3
_CLIENT_S = 3e-5
"""Seconds that the main process takes for a client's task, time, availability and answer (docs/benchmarks.md)."""


class Estimate:
    """Estimate of a run: a few steps and an evaluation are timed, messages counted. The run is not touched.

    Nothing is timed before it is asked for, nor twice.

    Args:
        simulation: simulation of the run.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    @cached_property
    def expectation(self) -> Expectation:
        """Expected time, in one process, and bytes."""
        simulation = self._simulation
        sent, answered = _tasks(simulation)
        wall_s = self._trained * self._trial.task_s + self._evaluations.run_s
        bytes_up, bytes_down = _bytes(simulation, sent, answered)
        return Expectation(simulation.policy.count, wall_s, bytes_up, bytes_down, _proviso(simulation))

    @cached_property
    def times(self) -> RunTimes:
        """Seconds of the run's parts, by which workers pay or do not."""
        trial = self._trial
        trainees = self._simulation.trainees
        items = -(-trainees // self._simulation.groups.size)  # rounded up
        in_an_item = trainees / items
        sums = 1 if self._simulation.adds_in_groups else in_an_item
        return RunTimes(
            rounds=self._trained / trainees,
            items=items,
            item_s=in_an_item * trial.task_s,
            main_s=in_an_item * _CLIENT_S + sums * _sum_s(self._simulation),
            sending_s=sending_s(trial.item, trial.result),
            evaluation_s=self._evaluations.run_s,
            evaluation_items=self._evaluations.items,
        )

    @property
    def _trained(self) -> int:
        """Number of tasks of the run that are trained."""
        sent, answered = _tasks(self._simulation)
        return sent if self._simulation.policy.keeps_late else answered

    @cached_property
    def _trial(self) -> "_Trial":
        return _tried(self._simulation)

    @cached_property
    def _evaluations(self) -> "_Evaluations":
        return _evaluated(self._simulation)


def expect(simulation: Simulation) -> Expectation:
    """Expected time and bytes of a run, in one process."""
    return Estimate(simulation).expectation


class _Trial(NamedTuple):
    """Training of one group, timed.

    Args:
        task_s: seconds of a client's task, its share of a group's.
        item: content and tensors of the group's work item.
        result: content and tensors of its result.
    """

    task_s: float
    item: tuple[Any, Sequence[Tensor]]
    result: tuple[Any, Sequence[Tensor]]


class _Evaluations(NamedTuple):
    """Evaluations of a run.

    Args:
        run_s: seconds of all of them.
        items: number of work items of one of them.
    """

    run_s: float
    items: int


class _Counting(InProcess):
    """Executor in this process that counts its items.

    Attributes:
        count: number of items until now.
    """

    count = 0

    def submit(self, item: Item) -> int:
        self.count += 1
        return super().submit(item)


def _bytes(simulation: Simulation, sent: int, answered: int) -> tuple[int, int]:
    """Bytes from clients, and bytes to clients, of so many tasks sent and answered."""
    message = simulation.message
    algorithm = simulation.algorithm
    if message is None:
        rounds = simulation.policy.count
        moved = exchanged_bytes(algorithm, simulation.layout, simulation.topology, rounds, simulation.peer_codec)
        return moved, moved
    if algorithm.pools_data:
        return 0, 0
    if simulation.is_replicated:
        moved = simulation.policy.count * ring_bytes(message, simulation.population)
        return moved, moved
    up = answered * message.uplink_bytes
    if not message.sends_differences:
        first = simulation.trainees
        return up, first * message.downlink_bytes + (sent - first) * message.later_downlink_bytes
    newcomers = min(sent, simulation.population)
    # Mean number of versions from one task of a client to its next.
    behind = math.ceil(simulation.population * simulation.policy.count / sent)
    factors = algorithm.factor_count(simulation.policy.cohort_of(simulation.population))
    later_bytes = message.later_task_bytes(behind, factors)
    return up, newcomers * message.downlink_bytes + (sent - newcomers) * later_bytes


def _tasks(simulation: Simulation) -> tuple[int, int]:
    """Numbers of tasks dispatched and answered in a run without failures."""
    policy = simulation.policy
    trainees = simulation.trainees
    moving = trainees if simulation.has_peers else policy.cohort_of(simulation.population)
    # Tasks whose answers do not count: those in flight at the end, or those beyond the cohort in every round.
    beyond = (trainees - moving) * (1 if policy.keeps_late else policy.count)
    answered = policy.count * moving
    return answered + beyond, answered


def _proviso(simulation: Simulation) -> str:
    """Condition under which the expected bytes are sent; empty if there is none."""
    policy = simulation.policy
    experiment = simulation.experiment
    if simulation.algorithm.pools_data:
        return ""
    devices = experiment.devices.make()
    if simulation.has_peers:
        return "" if devices.failure == 0 and devices.are_always_there else "if nobody fails or is away"
    waits = isinstance(policy, Synchronous) and policy.deadline_s is None and policy.backup_after_s is None
    drops = isinstance(policy, Synchronous) and policy.partial_work == "drop" and devices.interruption > 0
    answer = waits and not drops and devices.failure == 0 and devices.are_always_there
    is_sure = answer and policy.asked_of(simulation.population) == policy.cohort_of(simulation.population)
    sends_differences = simulation.message is not None and simulation.message.sends_differences
    in_turn = sends_differences and policy.asked_of(simulation.population) < simulation.population
    clauses = {
        "if nobody fails or is late": not is_sure,
        "if clients come in turn": in_turn,
        "without edges": experiment.hierarchy,
    }
    return " and ".join(text for text, holds in clauses.items() if holds)


def _tried(simulation: Simulation) -> _Trial:
    """Train one group for a few steps: a client's task takes its share of them, times the mean number of steps."""
    groups = simulation.groups
    count = min(groups.size, simulation.trainees)
    sizes = _sizes(simulation.data)
    # The largest clients, whose batches are full in all steps of the trial.
    largest = sorted(sizes, key=lambda client: -sizes[client])[:count]
    if simulation.data.is_on_demand:  # reading another client here could raise an error that belongs to the run
        largest = [simulation.data.clients[0]] * count
    local = simulation.experiment.local.model_copy(update={"epochs": None, "steps": _PROBE_STEPS})
    held = {client: simulation.data.read(client) for client in set(largest)}
    phases = tuple(replace(phase, epochs=None) for phase in simulation.recipe.phases)
    recipe = replace(simulation.recipe, local=local, phases=phases, read=held.__getitem__)
    if isinstance(recipe.make_trainer, ParallelTrainers):
        recipe = replace(recipe, make_trainer=replace(recipe.make_trainer, local=local))
    work = Work(recipe, simulation.device)
    task, tensors = simulation.first_task(largest)
    times_s = []
    for _ in range(2):  # the first also pays for what happens once
        began = time.perf_counter()
        answer, results = work(task, tensors)
        times_s.append(time.perf_counter() - began)
    steps = statistics.fmean(groups.steps(size) for size in sizes.values())
    step_s = times_s[-1] / (_PROBE_STEPS * len(phases)) / len(largest)
    return _Trial(step_s * steps, item=(task, tensors), result=(answer, results))


def _sum_s(simulation: Simulation) -> float:
    """Seconds in which the main process adds a message to the sum of others."""
    size = simulation.message.numbers if simulation.message else simulation.layout.size
    vector_M = torch.full((size,), 0.1, dtype=torch.float64)
    times_s = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        mean = WeightedMean(size)
        for _ in range(_SUMMED):
            mean.add(vector_M, 1)
        mean.finish()
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s) / _SUMMED


def _sizes(data: FederatedData) -> dict[ClientId, int]:
    """Number of samples by client, if it is known without reading them; else that of the first client alone."""
    first = data.clients[0]
    says_sizes = isinstance(data.train, ClientsOnDemand) and data.train.size_of(first) is not None
    if data.is_on_demand and not says_sizes:
        return {first: data.size_of(first)}
    return {client: data.size_of(client) for client in looked_at(data)}


def _evaluated(simulation: Simulation) -> _Evaluations:
    """Evaluate once: all evaluations take as long, but for the last one, which may be of more samples."""
    policy = simulation.policy
    evaluations = sum(policy.evaluates(number) for number in range(1, policy.count + 1))
    by_clients_s = 0.0
    items = 0
    if simulation.held_out is not None:
        by_clients_s = _evaluation_by_clients_s(simulation, simulation.held_out)
        items = -(-len(simulation.held_out) // CLIENTS_AT_ONCE)
        if simulation.recipe.test is None:
            return _Evaluations(evaluations * by_clients_s, items)
    executor = _Counting(partial(Work, simulation.recipe), [simulation.device])
    federation = simulation.federation(executor)
    began = time.perf_counter()
    scores = begin_scoring_by_coordinator(simulation, federation, executor)()
    once_s = time.perf_counter() - began
    last_s = once_s * _times_longer(scores, simulation)
    run_s = evaluations * by_clients_s + (evaluations - 1) * once_s + last_s
    return _Evaluations(run_s, max(items + executor.count, 1))


def _times_longer(scores: Scores, simulation: Simulation) -> float:
    """Ratio of the samples that the last evaluation scores, over all models, to those that this one has scored."""
    if "client_test_samples" not in scores.line or simulation.recipe.test is None:
        return 1.0
    own = len(scores.clients)
    others = 0 if simulation.algorithm.primitive is None else 1  # the federation's own model
    once = own * scores.line["client_test_samples"] + others * scores.line["test_samples"]
    return (own + others) * simulation.recipe.test_size / float(once)


def _evaluation_by_clients_s(simulation: Simulation, held_out: Mapping[ClientId, Held]) -> float:
    """Seconds of evaluation by clients: the mean over some (over one, if data are on demand), times their number."""
    some = tuple(itertools.islice(held_out, CLIENTS_AT_ONCE if isinstance(held_out, dict) else 1))
    work = Work(simulation.recipe, simulation.device)
    began = time.perf_counter()
    work(EvaluateByClients(some), simulation.layout.pack(simulation.recipe.module))
    return (time.perf_counter() - began) * len(held_out) / len(some)
