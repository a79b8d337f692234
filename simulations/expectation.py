"""How long a run will take and how much it will send, found from a few steps before it begins."""

import copy
import statistics
import time
from dataclasses import dataclass

import numpy as np

from fed.clients.training import Trainer, steps_of
from fed.simulations.simulation import Simulation

__all__ = ["Expectation", "expect"]

_PROBE_STEPS = 3


@dataclass(frozen=True)
class Expectation:
    """What a run is expected to take.

    Args:
        rounds: how many there are.
        wall_s: seconds on this machine, from a few steps' time.
        bytes_up: from clients, over all rounds.
        bytes_down: to clients.
    """

    rounds: int
    wall_s: float
    bytes_up: int
    bytes_down: int


def expect(simulation: Simulation) -> Expectation:
    """Time a few steps and an evaluation, and count the models that will travel; the run itself is not touched."""
    policy, federation = simulation.policy, simulation.federation
    evaluations = sum(policy.evaluates(number) for number in range(1, policy.count + 1))
    wall_s = federation.trainees * policy.count * _task_s(simulation) + evaluations * _evaluation_s(simulation)
    each_way = policy.count * federation.bytes_each_way
    return Expectation(policy.count, wall_s, each_way, each_way)


def _task_s(simulation: Simulation) -> float:
    """Seconds of a client's task: a few steps of the first client's, times the mean number of steps."""
    local, clients = simulation.experiment.local, simulation.clients
    trainer = Trainer(
        copy.deepcopy(simulation.trainer.module),
        simulation.loss,
        local.model_copy(update={"epochs": None, "steps": _PROBE_STEPS}),
        simulation.rule,
        simulation.device,
    )
    state = trainer.layout.pack(trainer.module)
    largest = max(clients.data.sizes, key=lambda client: clients.data.sizes[client])
    times_s = []
    for _ in range(2):  # the first also pays for what happens once
        began = time.perf_counter()
        trainer.train(*state, clients.data.train[largest], order=np.random.default_rng(0), seed=0)
        times_s.append(time.perf_counter() - began)
    return times_s[-1] / _PROBE_STEPS * statistics.fmean(steps_of(local, size) for size in clients.data.sizes.values())


def _evaluation_s(simulation: Simulation) -> float:
    began = time.perf_counter()
    simulation.evaluate()
    return time.perf_counter() - began
