"""Group timing: what is measured, what is made of it, and that a measurement stays."""

import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.clients.training.trainer import Trainer
from fed.simulations import batching, group_timing
from fed.simulations.batching import Batching, _fastest
from fed.simulations.group_timing import step_seconds
from fed.simulations.kept_timings import kept_or_measured
from fed.simulations.simulation import Simulation
from tests.simulations import users_parts as parts

SECONDS = {1: 4.0, 2: 3.0, 3: 2.0, 5: 2.01, 8: 3.0}


def prepared(own: Any = parts.small, **keys: Any) -> Simulation:
    return Simulation(fed.Experiment(**{"simulation": {"batching": "off"}, **keys}), parts.unequal(), own)


def timed(readings: Iterator[float], sizes: Sequence[int]) -> dict[int, float]:
    """What a clock that reads these seconds finds."""
    made = prepared()
    context = made.prepared.first_context()
    return step_seconds(made.recipe, context, made.data.read("c0"), sizes, clock=lambda: next(readings))


def test_seconds_are_those_of_a_clients_step() -> None:
    """Each turn takes one second of this clock, so that a client is the cheaper, the more there are in its group."""
    found = timed(map(float, itertools.count()), [2, 3, 5])
    assert found == pytest.approx({size: 1 / (size * group_timing._FEWEST_STEPS) for size in (1, 2, 3, 5)})


def test_larger_groups_are_left_out_where_one_is_slower() -> None:
    """Beside a client alone, of three readings of its own, every turn of a group takes a hundred times as long."""

    def readings() -> Iterator[float]:
        now_s = 0.0
        for reading in itertools.count():
            yield now_s
            now_s += 1.0 if reading < 6 else 100.0

    assert [*timed(readings(), [2, 3, 5])] == [1, 2]


def test_a_client_alone_is_timed_with_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    monkeypatch.setattr(Trainer, "record_at_once", lambda trainer: recorded.append(trainer))
    timed(map(float, itertools.count()), [2])
    assert len(recorded) == 1


def test_timing_leaves_model_samples_and_generators_alone() -> None:
    made = prepared(lambda: nn.Sequential(parts.small(), nn.Dropout(0.5)))
    before = [part.clone() for part in made.recipe.module.state_dict().values()]
    samples = made.data.read("c0")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    batching._timed(batching._Counter(), made.recipe, made.prepared.first_context(), samples, [2])
    assert torch.equal(torch.rand(4), expected)
    assert all(map(torch.equal, before, made.recipe.module.state_dict().values()))
    assert all(map(torch.equal, samples, prepared().data.read("c0")))


@pytest.mark.parametrize(
    ("seconds", "alone", "in_groups"),
    [
        (SECONDS, 3, 3),  # five are as good as equal
        ({**SECONDS, 5: 1.9}, 5, 5),
        ({**SECONDS, 1: 2.05}, 1, 3),  # within five per cent
        ({**SECONDS, 1: 2.15}, 3, 3),
        ({1: 1.0, 2: 3.0}, 1, 2),
    ],
)
def test_the_fastest_group_is_taken(seconds: Mapping[int, float], alone: int, in_groups: int) -> None:
    assert _fastest(seconds, least=1) == alone
    assert _fastest(seconds, least=2) == in_groups


# What a simulation makes of it.


class Timing:
    """A machine of these speeds.

    Attributes:
        sizes: what was asked for.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds = seconds
        self.sizes: list[list[int]] = []

    def __call__(self, recipe: object, context: object, samples: object, sizes: Sequence[int]) -> dict[int, float]:
        self.sizes.append([*sizes])
        return {size: self._seconds[size] for size in (1, *sizes)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Timing:
    """A machine of two cores and its own folder of caches, on which groups of three are the fastest."""
    timing = Timing({**SECONDS, 4: 2.5, 6: 2.5})
    monkeypatch.setattr(batching, "step_seconds", timing)
    monkeypatch.setattr(batching, "usable_cores", lambda: 2)
    monkeypatch.setattr("fed.simulations.kept_timings.user_cache_path", lambda name: tmp_path / name)
    return timing


def wide() -> nn.Module:
    """A model of which one client's parameters do not fit into the cache."""
    return nn.Sequential(nn.Linear(4, 80_000), nn.Tanh(), nn.Linear(80_000, 3))


def chosen(rounds: int = 2_000, model: Any = wide, **simulation: Any) -> Batching:
    """How 12 clients of 13 to 24 samples train."""
    data = fed.FederatedData({number: parts.samples(13 + number, number) for number in range(12)})
    keys = fed.Experiment(rounds={"count": rounds}, simulation=simulation)
    return Simulation(keys, data, model).batching


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU memory decides")
def test_what_is_in_doubt_is_measured_once(machine: Timing) -> None:
    for _ in range(2):
        found = chosen()
        assert (found.is_batched, found.group) == (True, 3)
        assert found.reason.endswith("for a client's step takes 2e+03 ms in a group of 3 and 4e+03 ms alone")
    assert machine.sizes == [[2, 3, 5, 6]], "half of 12 clients, so that two cores have work"
    assert chosen(group=2).group == 2
    assert machine.sizes[1:] == [[2]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU memory decides")
def test_where_groups_are_slower_clients_train_alone(machine: Timing) -> None:
    machine._seconds = dict.fromkeys((1, 2, 3, 5, 6), 1.0)
    assert chosen() == Batching(
        False, 1, "on this machine a client's step takes 1e+03 ms in a group of 2 and 1e+03 ms alone"
    )
    assert chosen(batching="on").group == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU memory decides")
def test_nothing_is_measured_where_nothing_is_in_doubt(machine: Timing) -> None:
    assert chosen(rounds=2).reason == "two clients' parameters do not fit into 2 MiB of cache"
    assert chosen(model=parts.small).group == 32
    assert chosen(group=1).reason == "simulation.group is 1"
    assert chosen(batching="off").reason == "simulation.batching is off"
    settled = chosen(batching="on", group=7)
    assert (settled.is_batched, settled.group) == (True, 7)
    assert machine.sizes == []


# What is kept.


def kept(folder: Path, seconds: float, **what: Any) -> float:
    """Seconds of a client alone as they are kept, where this machine measures these."""
    found = kept_or_measured(what, lambda: {1: seconds, 2: 0.5}, folder)
    assert found[2] == 0.5
    return found[1]


def test_the_first_measurement_stays(tmp_path: Path) -> None:
    assert [kept(tmp_path, seconds) for seconds in (0.25, 0.75)] == [0.25, 0.25]
    assert kept(tmp_path, 9.0, what="another step") == 9.0


def test_another_processor_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, 1.0)
    monkeypatch.setattr("fed.simulations.kept_timings._processor", lambda: "another")
    assert kept(tmp_path, 2.0) == 2.0


@pytest.mark.parametrize(
    "damage",
    [
        *("", "[]", '{"seconds": 3}', '{"seconds": {"one": 1}}', '{"seconds": {}}', '{"seconds": {"1": 1}}'),
        *('{"seconds": {"2": 1}}', '{"seconds": {"1": NaN, "2": 1}}', '{"seconds": {"1": 1, "2": 0}}', "\xff"),
    ],
)
def test_a_damaged_file_is_replaced(damage: str, tmp_path: Path) -> None:
    kept(tmp_path, 1.0)
    (path,) = (tmp_path / "timings").glob("*.json")
    path.write_bytes(damage.encode("latin-1"))
    assert kept(tmp_path, 2.0) == 2.0
    assert json.loads(path.read_bytes())["seconds"] == {"1": 2.0, "2": 0.5}


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file", 1.0) == 1.0


def test_of_many_that_ask_at_once_one_measures(tmp_path: Path) -> None:
    answers: list[float] = []
    threads = [
        threading.Thread(target=lambda now_s=seconds: answers.append(kept(tmp_path, now_s))) for seconds in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [answers[0]] * 8
