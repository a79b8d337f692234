"""Estimate of a run's time and bytes, made from a few steps before the run begins."""

import itertools
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fed.clients.data import ClientId, ClientsOnDemand, FederatedData, Pair
from fed.clients.data.describe import looked_at
from fed.clients.training.devices import device_of, devices_of
from fed.clients.training.executor import InProcess
from fed.clients.training.work_items import EvaluateByClients
from fed.clients.training.worker import Work
from fed.server.evaluation import CLIENTS_AT_ONCE
from fed.server.mixing.message_sizes import exchanged_bytes
from fed.server.observer import Expectation
from fed.server.rounds.synchronous import Synchronous
from fed.server.training_loop import Scores
from fed.simulations.ring import ring_bytes
from fed.simulations.simulation import Simulation, begin_scoring_by_coordinator

__all__ = ["expect"]

_PROBE_STEPS = 3


def expect(simulation: Simulation) -> Expectation:
    """Time a few steps and an evaluation, and count the models that will travel; the run itself is not touched."""
    policy = simulation.policy
    sent, answered = _tasks(simulation)
    trained = sent if policy.keeps_late else answered
    evaluations = sum(policy.evaluates(number) for number in range(1, policy.count + 1))
    once_s, last_s = _evaluation_s(simulation)
    wall_s = trained * _task_s(simulation) + (evaluations - 1) * once_s + last_s
    return Expectation(policy.count, wall_s, *_bytes(simulation, sent, answered), _proviso(simulation))


def _bytes(simulation: Simulation, sent: int, answered: int) -> tuple[int, int]:
    """The bytes from clients and to clients of so many tasks."""
    message, algorithm = simulation.message, simulation.algorithm
    if message is None:
        rounds, codec = simulation.policy.count, simulation.peer_codec
        moved = exchanged_bytes(algorithm, simulation.layout, simulation.topology, rounds, codec)
        return moved, moved
    if algorithm.pools_data:
        return 0, 0
    if simulation.is_replicated:
        moved = simulation.policy.count * ring_bytes(message, simulation.population)
        return moved, moved
    up, first = answered * message.uplink_bytes, simulation.trainees
    if message.downlink_encoder is None:
        return up, first * message.downlink_bytes + (sent - first) * message.later_downlink_bytes
    newcomers = min(sent, simulation.population)
    behind = math.ceil(simulation.population * simulation.policy.count / sent)  # versions, of a client that comes again
    return up, newcomers * message.downlink_bytes + (sent - newcomers) * message.later_task_bytes(behind)


def _tasks(simulation: Simulation) -> tuple[int, int]:
    """Numbers of tasks dispatched and answered in a run without failures."""
    policy, trainees = simulation.policy, simulation.trainees
    moving = trainees if simulation.has_peers else policy.cohort_of(simulation.population)
    beyond = (trainees - moving) * (1 if policy.keeps_late else policy.count)
    return policy.count * moving + beyond, policy.count * moving


def _proviso(simulation: Simulation) -> str:
    """Condition under which the expected bytes are sent."""
    policy, experiment = simulation.policy, simulation.experiment
    if simulation.algorithm.pools_data:
        return ""
    devices = experiment.devices.make()
    if simulation.has_peers:
        return "" if devices.failure == 0 and devices.are_always_there else "if nobody fails or is away"
    waits = isinstance(policy, Synchronous) and policy.deadline_s is None and policy.backup_after_s is None
    drops = isinstance(policy, Synchronous) and policy.partial_work == "drop" and devices.interruption > 0
    answer = waits and not drops and devices.failure == 0 and devices.are_always_there
    is_sure = answer and policy.asked_of(simulation.population) == policy.cohort_of(simulation.population)
    in_turn = experiment.downlink and policy.asked_of(simulation.population) < simulation.population
    clauses = {"if nobody fails or is late": not is_sure, "if clients come in turn": in_turn}
    return " and ".join(text for text, holds in {**clauses, "without edges": experiment.hierarchy}.items() if holds)


def _task_s(simulation: Simulation) -> float:
    """Seconds of a client's task: a few steps of a group's, times the mean number of steps."""
    groups, count = simulation.groups, min(simulation.groups.size, simulation.trainees)
    sizes = _sizes(simulation.data)
    largest = sorted(sizes, key=lambda client: -sizes[client])[:count]
    if simulation.data.is_on_demand:  # another client's flaw is found when it is read
        largest = [simulation.data.clients[0]] * count
    local = simulation.experiment.local.model_copy(update={"epochs": None, "steps": _PROBE_STEPS})
    held = {client: simulation.data.read(client) for client in set(largest)}
    phases = tuple(replace(phase, epochs=None) for phase in simulation.recipe.phases)
    work = Work(replace(simulation.recipe, local=local, phases=phases, read=held.__getitem__), device_of())
    task, tensors = simulation.first_task(largest)
    times_s = []
    for _ in range(2):  # the first also pays for what happens once
        began = time.perf_counter()
        work(task, tensors)
        times_s.append(time.perf_counter() - began)
    steps = statistics.fmean(groups.steps(size) for size in sizes.values())
    return times_s[-1] / (_PROBE_STEPS * len(phases)) / len(largest) * steps


def _sizes(data: FederatedData) -> dict[ClientId, int]:
    """Numbers of samples that clients hold, where they are known without reading; of the first client in any case."""
    first = data.clients[0]
    says_sizes = isinstance(data.train, ClientsOnDemand) and data.train.size_of(first) is not None
    return {
        client: data.size_of(client) for client in (looked_at(data) if says_sizes or not data.is_on_demand else [first])
    }


def _evaluation_s(simulation: Simulation) -> tuple[float, float]:
    """Seconds of an evaluation, and of the last one, which may be of more samples."""
    by_clients_s = 0.0
    if simulation.held_out is not None:
        by_clients_s = _evaluation_by_clients_s(simulation, simulation.held_out)
        if simulation.recipe.test is None:
            return by_clients_s, by_clients_s
    executor = InProcess(partial(Work, simulation.recipe), devices_of(1))
    federation = simulation.federation(executor)
    began = time.perf_counter()
    scores = begin_scoring_by_coordinator(simulation, federation, executor)()
    once_s = time.perf_counter() - began
    return by_clients_s + once_s, by_clients_s + once_s * _times_longer(scores, simulation)


def _times_longer(scores: Scores, simulation: Simulation) -> float:
    """The samples that the last evaluation scores, over all models, in units of those that this one has scored."""
    if "client_test_samples" not in scores.line or simulation.recipe.test is None:
        return 1.0
    own, others = len(scores.clients), simulation.algorithm.primitive is not None
    once = own * scores.line["client_test_samples"] + others * scores.line["test_samples"]
    return (own + others) * len(tuple(simulation.recipe.test)[1]) / float(once)


def _evaluation_by_clients_s(simulation: Simulation, held_out: Mapping[ClientId, Pair]) -> float:
    """Seconds of evaluation by clients: that of some, times the number of all; on demand of the first."""
    some = tuple(itertools.islice(held_out, CLIENTS_AT_ONCE if isinstance(held_out, dict) else 1))
    work = Work(simulation.recipe, device_of())
    began = time.perf_counter()
    work(EvaluateByClients(some), simulation.layout.pack(simulation.recipe.module))
    return (time.perf_counter() - began) * len(held_out) / len(some)
