"""Groups: a function of the experiment and of who holds how much, so that nothing else can change a result."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fed
from fed.aggregators.base import Phase
from fed.clients.training.batches import Batches
from fed.clients.training.devices import device_of, devices_of
from fed.clients.training.executor import InProcess
from fed.clients.training.groups import Groups
from fed.clients.training.work_items import Train
from fed.clients.training.worker import Work
from fed.config.experiment import Local
from fed.simulations.devices import UniformDevices
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.simulated_clients import SimulatedClients
from fed.simulations.simulation import Simulation
from fed.wire.messages import GlobalModel, Task
from tests.simulations.users_parts import double, small, unequal
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

SIZES = st.lists(st.integers(1, 60), max_size=40)
LOCALS = st.builds(
    Local,
    batch_size=st.integers(1, 20),
    accumulate=st.integers(1, 3),
    epochs=st.integers(1, 3),
)


@given(SIZES, st.integers(1, 9), LOCALS)
def test_groups_partition_clients_longest_first_with_equal_sizes(samples: list[int], size: int, local: Local) -> None:
    groups = Groups(local, size)
    found = groups.of(samples)
    in_order = [place for group in found for place in group]
    assert sorted(in_order) == list(range(len(samples)))
    assert len(found) == -(-len(samples) // size)
    lengths = [len(group) for group in found]
    assert max(lengths, default=1) <= size
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    steps = [groups.steps(samples[place]) for place in in_order]
    assert steps == sorted(steps, reverse=True)
    assert in_order == sorted(in_order, key=lambda place: (-groups.steps(samples[place]), place))


@given(SIZES, st.integers(1, 9), LOCALS)
def test_groups_do_not_depend_on_what_was_grouped_before(samples: list[int], size: int, local: Local) -> None:
    used = Groups(local, size)
    for begin in range(3):
        used.of(samples[begin:])
    assert used.of(samples) == Groups(local, size).of(samples)


@given(SIZES, LOCALS, st.none() | st.integers(1, 5))
def test_task_work_is_the_sum_over_its_phases(samples: list[int], local: Local, steps: int | None) -> None:
    """A phase with epochs of its own takes those, whatever number of steps the task says."""
    alone, twice = Groups(local, 1), Groups(local, 1, phases=(Phase(), Phase(epochs=2)))
    for count in samples:
        of_epochs = Batches(local.model_copy(update={"epochs": 2}), count)
        assert twice.steps(count, steps) == alone.steps(count, steps) + of_epochs.steps
        assert twice.seen(count, steps) == alone.seen(count, steps) + 2 * count


def test_clients_of_a_group_take_similar_numbers_of_steps() -> None:
    assert Groups(Local(batch_size=10), size=2).of([10, 50, 20, 10, 30]) == [[1], [4, 2], [0, 3]]
    assert Groups(Local(steps=7), size=2).of([10, 50, 20, 10, 30]) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("group", thinned([4, 2, 9, 32], quick=2))
def test_mean_of_group_means_is_the_clients_weighted_mean(group: int) -> None:
    """In float64: within 1e-12, the rounding of nine terms with weights from 1 to 30."""
    updates = {reduces: _updates(group, reduces=reduces) for reduces in (True, False)}
    assert [len(found) for found in updates.values()] == [-(-9 // group), 9]
    means = [sum((weight * update for update, weight in found), torch.zeros(())) / 109 for found in updates.values()]
    assert torch.allclose(means[0], means[1], rtol=0, atol=1e-12)
    assert float(means[1].abs().max()) > 1e-3


def _updates(group: int, *, reduces: bool) -> list[tuple[Tensor, int]]:
    """What a fleet answers to a task for everybody, as (mean update, samples)."""
    experiment = fed.Experiment(simulation={"batching": "on", "group": group}, local={"batch_size": 4})
    simulation = Simulation(experiment, unequal(torch.float64), double)
    executor = InProcess(partial(Work, simulation.recipe), devices_of(1))
    clients = SimulatedClients(simulation.data, simulation.groups, executor, UniformDevices(), simulation.streams)
    assert simulation.way_out is not None
    states = simulation.prepared.client_states()
    fleet = SimulatedFleet(clients, states=states, way_out=simulation.way_out, reduces=reduces)
    model = GlobalModel(0, *simulation.layout.pack(simulation.recipe.module))
    fleet.dispatch(Task(number, 1, client, model) for number, client in enumerate(fleet.available()))
    found = []
    for answer in fleet.collect():
        assert not answer.problem
        assert answer.update.weight == sum(answer.samples)
        found.append((answer.update.update_M, sum(answer.samples)))
    return found


def test_update_of_a_single_client_has_its_own_bits() -> None:
    simulation = Simulation(fed.Experiment(simulation={"batching": "on", "group": 1}), unequal(), small)
    state = simulation.layout.pack(simulation.recipe.module)
    work = Work(simulation.recipe, device_of())
    _, (mean_V, _) = work(Train(("c1",), 1, wants="mean"), state)
    _, (trained_KV, _) = work(Train(("c1",), 1, wants="models"), state)
    assert torch.equal(mean_V, trained_KV[0].double() - state[0].double())
