"""Time in the simulator: rounds that end when they should, against event queues by hand."""

import heapq
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fed
from fed.errors import InvalidExperiment, RunFailed
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.in_flight import Occupation
from fed.simulations.simulate import simulate
from fed.vectors.randomness import Streams
from tests.thinned import thinned

from .conftest import Point, mean_output

CLIENTS, LR = 8, 0.1
SPEEDS = [1.0, 2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0]
"""Samples a second; with one sample and one step a task takes the reciprocal, and nothing else costs time."""

SECOND_A_SAMPLE = {
    "kind": "uniform",
    "samples_per_s": 1,
    "latency_s": 0,
    "down_bytes_per_s": 1e300,
    "up_bytes_per_s": 1e300,
}


def data(samples: Sequence[int] = (1,) * CLIENTS) -> fed.FederatedData:
    """f_i(x) = ½ |x − i|², in two dimensions."""
    one = [torch.tensor([[1.0, 0.0], [0.0, 1.0], [client, -client]], dtype=torch.float64) for client in range(CLIENTS)]
    return fed.FederatedData(
        {
            client: (one[client].expand(count, -1, -1).clone(), torch.zeros(count, dtype=torch.float64))
            for client, count in enumerate(samples)
        }
    )


@pytest.fixture
def devices(tmp_path: Path) -> dict[str, Any]:
    rows = [f"{client},{speed},1e300,1e300,0" for client, speed in enumerate(SPEEDS)]
    path = tmp_path / "devices.csv"
    path.write_text("client,samples_per_s,down_bytes_per_s,up_bytes_per_s,latency_s\n" + "\n".join(rows) + "\n")
    return {"kind": "trace", "path": str(path)}


def run(rounds: dict[str, Any], devices: Any, *, samples: Sequence[int] = (1,) * CLIENTS, **keys: Any) -> fed.Run:
    model = Point(torch.zeros(2, dtype=torch.float64))
    local = {"lr": LR, "steps": 1, "batch_size": 100, **keys.pop("local", {})}
    experiment = fed.Experiment(rounds=rounds, devices=devices, local=local, **keys)
    return simulate(experiment, data=data(samples), model=lambda: model, loss=mean_output)


def lines(run: fed.Run, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in run.metrics]


def cohort(number: int, count: int, again: int = 0, among: Sequence[int] = range(CLIENTS)) -> list[int]:
    stream: tuple[str, *tuple[int, ...]] = ("cohort", number, again) if again else ("cohort", number)
    if count == 1:
        return [among[int(Streams(0).uniforms(*stream)[0] * len(among))]]
    generator = Streams(0).generator(*stream)
    return [among[place] for place in sorted(generator.choice(len(among), count, replace=False).tolist())]


def test_a_round_ends_with_its_slowest_client(devices: dict[str, Any]) -> None:
    finished = run({"count": 5, "cohort": 3}, devices)
    ends = np.cumsum([max(1 / SPEEDS[client] for client in cohort(number, 3)) for number in range(1, 6)])
    assert [line["virtual_s"] for line in finished.metrics] == pytest.approx(ends.tolist())


@pytest.mark.parametrize("backups", [{}, {"backup_after_s": 0.9}, {"backup_after_s": 10.0}], ids=str)
def test_over_selection_ends_at_the_cohorts_last_reply(backups: dict[str, Any], devices: dict[str, Any]) -> None:
    finished = run({"count": 1, "cohort": 4, "over_selection": 1.5, **backups}, devices)
    fastest = sorted(1 / SPEEDS[client] for client in cohort(1, 6))
    assert lines(finished, "selected", "replied", "late", "failed") == [(6, 4, 2, 0)]
    assert finished.metrics[0]["virtual_s"] == pytest.approx(fastest[3])
    chosen = [client for client in cohort(1, 6) if 1 / SPEEDS[client] <= fastest[3]]
    np.testing.assert_allclose(point(finished), LR * np.mean(chosen) * np.array([1, -1]), rtol=1e-12)


def point(run: fed.Run) -> NDArray[np.float64]:
    assert isinstance(run.model, Point)
    x_D: NDArray[np.float64] = run.model.x_D.detach().numpy()
    return x_D


def test_who_is_late_is_busy_until_it_has_finished(devices: dict[str, Any]) -> None:
    """Rounds of at most a tenth of a second, of all who are free."""
    finished = run({"count": 12, "deadline_s": 0.1, "partial_work": "drop"}, devices)
    free_at, now, expected, ends = [0.0] * CLIENTS, 0.0, [], []
    for _ in range(12):
        asked = [client for client in range(CLIENTS) if free_at[client] <= now]
        for client in asked:
            free_at[client] = now + 1 / SPEEDS[client]
        in_time = sum(1 / SPEEDS[client] <= 0.1 for client in asked)
        expected.append((len(asked), in_time, len(asked) - in_time))
        now += min(0.1, max(1 / SPEEDS[client] for client in asked))
        ends.append(now)
    assert lines(finished, "selected", "replied", "late") == expected
    assert [line["virtual_s"] for line in finished.metrics] == pytest.approx(ends)
    assert expected[1] != expected[0]


def test_idle_time_and_late_clients_are_told(devices: dict[str, Any]) -> None:
    """Rounds of at most 0.3 s, of all who are free; what a late client does after the last one counts for nothing."""
    finished = run({"count": 3, "deadline_s": 0.3, "partial_work": "drop"}, devices)
    *begins_s, ends_s = (0.0, *(line["virtual_s"] for line in finished.metrics))
    free_at, busy_s, late = [0.0] * CLIENTS, 0.0, dict.fromkeys(range(CLIENTS), 0)
    for now in begins_s:
        for client in range(CLIENTS):
            if free_at[client] <= now:
                free_at[client] = now + 1 / SPEEDS[client]
                busy_s += min(free_at[client], ends_s) - now
                late[client] += 1 / SPEEDS[client] > 0.3
    assert finished.summary["idle_share"] == pytest.approx(1 - busy_s / (CLIENTS * ends_s))
    assert late[1] == 2
    told = {one["client"]: one["late"] for one in finished.summary["most_late"]}
    assert told == {client: count for client, count in late.items() if count}


def test_nobody_is_idle_for_less_than_no_time() -> None:
    """0.1 + 0.1 + 0.1 is more than 0.3."""
    occupation = Occupation()
    for _ in range(3):
        occupation.begin("a", 0.1)
    assert occupation.summary(clients=1, clock=0.3, to_come_s=0.0) == {"idle_share": 0.0}


def test_deadline_ends_a_round_unless_a_quorum_is_missing(devices: dict[str, Any]) -> None:
    by_deadline = run({"count": 1, "deadline_s": 0.3, "partial_work": "drop"}, devices)
    assert lines(by_deadline, "virtual_s", "replied", "late") == [(pytest.approx(0.3), 5, 3)]
    for quorum in (0.75, 0.7):  # 6 of 8, and more than 5
        by_quorum = run({"count": 1, "deadline_s": 0.3, "partial_work": "drop", "quorum": quorum}, devices)
        assert lines(by_quorum, "virtual_s", "replied", "late") == [(pytest.approx(1 / 3), 6, 2)]
    just = run({"count": 1, "deadline_s": 1.0, "partial_work": "drop"}, devices)
    assert lines(just, "virtual_s", "replied", "late") == [(1.0, CLIENTS, 0)]
    early = run({"count": 1, "deadline_s": 10.0}, devices)
    assert lines(early, "virtual_s", "replied", "late") == [(pytest.approx(1.0), CLIENTS, 0)]


def test_backups_are_asked_for_those_that_are_slow(devices: dict[str, Any]) -> None:
    finished = run({"count": 1, "cohort": 4, "backup_after_s": 0.15}, devices)
    first = cohort(1, 4)
    slow = [client for client in first if 1 / SPEEDS[client] > 0.15]
    free = [client for client in range(CLIENTS) if client not in slow]
    backups = cohort(1, len(slow), again=4, among=free)
    arrivals = sorted([1 / SPEEDS[client] for client in first] + [0.15 + 1 / SPEEDS[client] for client in backups])
    assert lines(finished, "selected", "replied", "late") == [(4 + len(slow), 4, len(slow))]
    assert finished.metrics[0]["virtual_s"] == pytest.approx(arrivals[3])


def test_client_leaving_while_a_quorum_waits_has_failed(tmp_path: Path) -> None:
    """A second a task, of three clients: two go away in it, the second of them while nobody else can be asked."""
    path = tmp_path / "spells.csv"
    spells = ["0,0,1000", "1,0,0.75", "1,20,1000", "2,0,0.25", "2,10,1000"]
    never = [f"{client},1e6,2e6" for client in range(3, CLIENTS)]
    path.write_text("\n".join(["client,begins_s,ends_s", *spells, *never]) + "\n")
    section = {**SECOND_A_SAMPLE, "availability": {"kind": "trace", "path": str(path)}}
    finished = run({"count": 1, "cohort": 3, "quorum": 1.0, "deadline_s": 0.5, "partial_work": "drop"}, section)
    assert lines(finished, "selected", "replied", "failed", "late", "virtual_s") == [(5, 3, 2, 0, 11.0)]


def test_a_quorum_is_reached_with_parts_of_the_work() -> None:
    """Of those who are asked in place of others, too, where everybody is cut off."""
    section = {**SECOND_A_SAMPLE, "interruption": 1.0, "failure": 0.5}
    finished = run({"count": 3, "cohort": 4, "quorum": 1.0}, section, local={"steps": 8})
    for selected, replied, failed in lines(finished, "selected", "replied", "failed"):
        assert replied == 4
        assert selected == replied + failed > 4


def test_failing_task_ends_after_part_of_its_time() -> None:
    finished = run({"count": 12, "cohort": 1}, {**SECOND_A_SAMPLE, "failure": 0.6})
    fates = [Streams(0).uniforms("fate", task)[:2] for task in range(12)]
    ends = np.cumsum([at if fails < 0.6 else 1.0 for fails, at in fates])
    assert [line["virtual_s"] for line in finished.metrics] == pytest.approx(ends.tolist())
    assert [line["failed"] for line in finished.metrics] == [int(fails < 0.6) for fails, _ in fates]


def test_grouped_clients_keep_the_step_sizes_of_their_rounds() -> None:
    """Some are asked in earlier rounds than others of a schedule, and train in one group or each alone."""
    rounds = {"kind": "buffered", "count": 8, "buffer": 2, "concurrency": 6}
    section = {**SECOND_A_SAMPLE, "kind": "lognormal"}
    local = {"schedule": "cosine"}
    grouped, alone = (run(rounds, section, local=local, simulation={"group": size}) for size in (6, 1))
    np.testing.assert_allclose(point(grouped), point(alone), rtol=1e-12)


def test_a_quorum_is_one_of_those_who_can_be_asked(tmp_path: Path) -> None:
    """Three are ever there; a day is waited for five."""
    path = tmp_path / "spells.csv"
    spells = [f"{client},0,1e6" if client < 3 else f"{client},1e6,2e6" for client in range(CLIENTS)]
    path.write_text("\n".join(["client,begins_s,ends_s", *spells]) + "\n")
    section = {**SECOND_A_SAMPLE, "availability": {"kind": "trace", "path": str(path)}}
    finished = run({"count": 1, "cohort": 5, "quorum": 1.0}, section)
    assert lines(finished, "selected", "replied", "virtual_s") == [(3, 3, 86401.0)]


def test_a_quorum_that_clients_with_states_cannot_fill_ends(tmp_path: Path) -> None:
    """Of five, two leave for good at 0.5 s; three wait for the verdict, and are the cohort of the next round."""
    path = tmp_path / "spells.csv"
    spells = [f"{client},0,{0.5 if client < 2 else 1e6}" for client in range(5)]
    path.write_text("\n".join(["client,begins_s,ends_s", *spells]) + "\n")
    section = {**SECOND_A_SAMPLE, "availability": {"kind": "trace", "path": str(path)}}
    finished = run({"count": 2, "cohort": 5, "quorum": 0.8}, section, samples=(1,) * 5, algorithm="scaffold")
    assert lines(finished, "selected", "replied", "failed") == [(5, 3, 2), (3, 3, 0)]
    still = run({"count": 1, "cohort": 5, "quorum": 0.8}, section, samples=(1,) * 5, algorithm="scaffold")
    assert not point(still).any()
    assert point(finished).any()


class Watched(SimulatedFleet):
    """Keeps what is sent."""

    sent: ClassVar[list[tuple[float, list[Any], list[int]]]] = []

    def dispatch(self, tasks: Any) -> None:
        tasks = [*tasks]
        if tasks:
            self.sent.append((self.clock, tasks, [int(client) for client in self.available()]))
        super().dispatch(tasks)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    """The tasks of each instant, with the clock and who was free."""
    monkeypatch.setattr(Watched, "sent", [])
    monkeypatch.setattr("fed.simulations.simulation.SimulatedFleet", Watched)
    return Watched


def test_backups_have_what_is_left_of_a_rounds_time(devices: dict[str, Any], watched: type[Watched]) -> None:
    run({"count": 1, "cohort": 6, "backup_after_s": 0.15, "deadline_s": 0.4}, devices)
    assert [{task.deadline_s for task in tasks} for _, tasks, _ in watched.sent] == [{0.4}, {0.4 - 0.15}]


def test_each_draw_of_a_round_has_its_own_stream(watched: type[Watched]) -> None:
    run({"count": 4, "cohort": 3, "quorum": 1.0}, {**SECOND_A_SAMPLE, "failure": 0.7})
    drawn = dict.fromkeys(range(1, 5), 0)
    for _, tasks, free in watched.sent:
        number, clients = tasks[0].round, [task.client for task in tasks]
        assert clients == cohort(number, len(clients), again=drawn[number], among=free)
        drawn[number] += len(clients)
    assert len(watched.sent) > 8


@pytest.mark.parametrize(
    "rounds",
    [
        {"kind": "buffered", "buffer": 4, "concurrency": 7},
        {"cohort": 4, "over_selection": 1.5, "quorum": 1.0, "backup_after_s": 0.1},
    ],
    ids=str,
)
def test_step_size_is_scaled_by_the_number_of_updates(
    rounds: dict[str, Any], devices: dict[str, Any], watched: type[Watched]
) -> None:
    run({"count": 3, **rounds}, {**devices, "failure": 0.3}, local={"scaling": "linear"})
    step_sizes = {task.lr for _, tasks, _ in watched.sent for task in tasks}
    assert step_sizes == {fed.Experiment(local={"lr": LR, "scaling": "linear"}).local.lr_in(1, 3, 4)}
    assert {len(tasks) for _, tasks, _ in watched.sent} > {1}


def unsynchronised(
    count: int, updates: int, concurrency: int, weight: Any, mixes: bool, samples: Sequence[int]
) -> tuple[NDArray[np.float64], list[float], list[float]]:
    """FedBuff and FedAsync with an event queue: the model, the clock and the mean staleness at each move."""
    x, now = np.zeros(2), 0.0
    queue: list[tuple[float, int, int, int, NDArray[np.float64]]] = []
    clocks, ages, task = [], [], 0
    for version, number in enumerate(range(1, count + 1)):
        gathered: list[tuple[int, int, NDArray[np.float64], NDArray[np.float64]]] = []
        drawn = 0
        while len(gathered) < updates:
            busy = {client for _, _, client, _, _ in queue}
            free = [client for client in range(CLIENTS) if client not in busy]
            asked = min(concurrency - len(queue), len(free))
            if asked:
                for client in cohort(number, asked, again=drawn, among=free):
                    heapq.heappush(queue, (now + samples[client] / SPEEDS[client], task, client, version, x))
                    task += 1
                drawn += asked
            now = queue[0][0]
            while queue and queue[0][0] == now:
                _, _, client, started, x0 = heapq.heappop(queue)
                gathered.append((client, version - started, x0 + LR * (np.array([client, -client]) - x0), x0))
        total = sum(samples[client] for client, *_ in gathered)
        x = (
            x
            + sum(samples[client] * weight(age) * (y - (x if mixes else x0)) for client, age, y, x0 in gathered) / total
        )
        clocks.append(now)
        ages.append(float(np.mean([age for _, age, _, _ in gathered])))
    return x, clocks, ages


@pytest.mark.parametrize("samples", [(1,) * CLIENTS, (3, 1, 2, 1, 4, 1, 2, 5)], ids=str)
@pytest.mark.parametrize(
    ("buffer", "concurrency", "mixing"),
    [(1, 1, None), (2, 5, None), (3, 8, None), (4, 4, None), (1, 1, 0.7), (1, 4, 0.7), (1, 8, 0.7)],
)
@pytest.mark.parametrize("staleness", thinned(["polynomial", "constant", {"kind": "hinge", "grace": 1}], quick=1))
def test_unsynchronised_rounds_are_an_event_queue_by_hand(
    buffer: int, concurrency: int, mixing: float | None, staleness: Any, samples: Sequence[int], devices: dict[str, Any]
) -> None:
    """Buffered rounds, and asynchronous ones where models are mixed."""
    own = {"kind": "asynchronous", "mixing": mixing} if mixing else {"kind": "buffered", "buffer": buffer}
    finished = run({**own, "count": 25, "concurrency": concurrency, "staleness": staleness}, devices, samples=samples)
    s = weight_of(staleness)
    x, clocks, ages = unsynchronised(
        25, buffer, concurrency, lambda age: (mixing or 1.0) * s(age), bool(mixing), samples
    )
    np.testing.assert_allclose(point(finished), x, rtol=1e-10)
    assert [line["virtual_s"] for line in finished.metrics] == pytest.approx(clocks)
    assert [line["staleness_mean"] for line in finished.metrics] == pytest.approx(ages)
    if concurrency > buffer:
        assert max(ages) > 1


def weight_of(staleness: Any) -> Any:
    if staleness == "polynomial":
        return lambda age: 1 / math.sqrt(1 + age)
    if staleness == "constant":
        return lambda age: 1.0
    return lambda age: 1.0 if age <= 1 else 1 / (10 * (age - 1) + 1)


def test_too_stale_an_update_is_dropped_and_counted_late(devices: dict[str, Any]) -> None:
    rounds = {"kind": "buffered", "count": 30, "buffer": 2, "concurrency": 8}
    ages = lines(run(rounds, devices), "staleness_mean", "late")
    assert max(age for age, _ in ages) > 2
    bounded = lines(run({**rounds, "most_stale": 1}, devices), "staleness_mean", "late", "replied")
    assert max(age for age, _, _ in bounded) <= 1
    assert sum(late for _, late, _ in bounded) > 0
    assert all(replied >= 2 for _, _, replied in bounded)


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def equal_data() -> fed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(20, 8, generator=generator), torch.arange(20) % 3) for _ in range(40)]
    return fed.FederatedData(dict(enumerate(pairs)), test=pairs[0])


@pytest.mark.parametrize("algorithm", thinned(["fedavg", "fedadam", "scaffold", "median"], quick=2))
@pytest.mark.parametrize(
    "rounds",
    [
        {"deadline_s": 1e9, "quorum": 1.0},
        {"backup_after_s": 1e6},
        {"kind": "buffered", "buffer": 10, "concurrency": 10},
    ],
    ids=str,
)
def test_equal_devices_and_samples_reduce_to_synchronous_rounds(algorithm: str, rounds: dict[str, Any]) -> None:
    def finished(rounds: dict[str, Any]) -> fed.Run:
        described = fed.Experiment(
            algorithm={"kind": algorithm}, rounds=rounds, local={"batch_size": 8}, simulation={"group": 4}
        )
        return simulate(described, data=equal_data(), model=Classifier)

    plain = finished({"count": 5, "cohort": 10})
    other = finished({"count": 5, **({} if "kind" in rounds else {"cohort": 10}), **rounds})
    for part, its in zip(plain.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(part, its)
    assert [{**line, "wall_s": 0} for line in plain.metrics] == [{**line, "wall_s": 0} for line in other.metrics]


def test_unsynchronised_rounds_have_the_same_bits_whoever_trains() -> None:
    described = fed.Experiment(
        rounds={"kind": "buffered", "count": 12, "buffer": 3, "concurrency": 9},
        devices={"kind": "lognormal", "sigma": 1.5, "failure": 0.1},
        simulation={"workers": 0, "group": 3},
        local={"batch_size": 8},
    )
    runs = [described, described.override({"simulation.workers": 2})]
    here, there = (
        [line["test_loss"] for line in simulate(run, data=equal_data(), model=Classifier).metrics] for run in runs
    )
    assert here == there
    assert len(set(here)) == 12


def test_worker_slots_fit_groups_with_individual_start_models() -> None:
    """Of models larger than all else that travels; a group's answers come singly then."""
    run = fed.simulate(
        fed.Experiment(
            data={"kind": "digits", "clients": 12},
            model="logistic",
            rounds={"kind": "bounded_staleness", "count": 3},
            devices="lognormal",
            simulation={"workers": 1, "group": 6},
        )
    )
    assert run.summary["status"] == "finished"


def test_a_buffer_larger_than_who_has_tasks_is_refused(devices: dict[str, Any]) -> None:
    with pytest.raises(InvalidExperiment, match=r"rounds.buffer must be at most 5.*got 6"):
        run({"kind": "buffered", "buffer": 6, "concurrency": 5}, devices)


@pytest.mark.parametrize(
    "rounds",
    [
        {"count": 12},
        {"count": 14, "cohort": 4, "quorum": 1.0},
        {"kind": "buffered", "count": 12, "buffer": 2, "concurrency": 4},
        {"kind": "bounded_staleness", "count": 6, "bound": 1},
    ],
    ids=str,
)
def test_clients_participate_between_registering_and_leaving(rounds: dict[str, Any], watched: type[Watched]) -> None:
    """In a sample and a second each: who is asked is a member then, and who leaves in a task has failed it."""
    section = {**SECOND_A_SAMPLE, "joining_s": 4, "staying_s": 12}
    finished = run(rounds, section)
    asked: dict[int, list[float]] = {}
    for clock_s, tasks, _ in watched.sent:
        for task in tasks:
            asked.setdefault(task.client, []).append(clock_s)
    devices = fed.Experiment(devices=section).devices.make()
    failed = 0
    for client, times in asked.items():
        joins_s, leaves_s = devices.membership(client, Streams(0))
        assert all(joins_s <= time_s < leaves_s for time_s in times)
        end_s = finished.metrics[-1]["virtual_s"]
        failed += sum(time_s + 1 > leaves_s and leaves_s <= end_s for time_s in times)
    assert len(asked) > 4
    assert failed > 0
    assert sum(line["failed"] for line in finished.metrics) == failed


def test_rounds_that_ask_nobody_are_counted() -> None:
    rounds = {"count": 20, "cohort": 1, "sampling": "poisson"}
    run = fed.simulate(fed.Experiment(data={"clients": 6}, model="logistic", rounds=rounds))
    empty = sum(line["selected"] == 0 for line in run.metrics)
    assert 0 < empty < 20
    assert (run.summary["empty_rounds"], run.summary["unanswered_rounds"]) == (empty, 0)


def test_quorum_ends_where_the_sampling_draws_nobody() -> None:
    """Drawn again without a moment between, nobody would be drawn for ever."""
    rounds = {"count": 30, "cohort": 2, "sampling": "poisson", "deadline_s": 30.0, "quorum": 1.0}
    finished = run(rounds, {**SECOND_A_SAMPLE, "failure": 0.5})
    assert finished.summary["status"] == "finished"
    assert any(line["failed"] and line["replied"] < 2 for line in finished.metrics)


def test_secure_round_waits_a_week_for_clients_at_once() -> None:
    devices = {"kind": "uniform", "availability": {"kind": "on_off", "on_s": 1.0, "off_s": 5400.0}}
    secure = {"max_weight": 10, "max_drop_out": 0.0}
    with pytest.raises(RunFailed, match="round 1 has waited for a week of the clients' time") as refused:
        run({"count": 2}, devices, secure_aggregation=secure)
    assert str(refused.value).endswith("or lower secure_aggregation.minimum_cohort where there is one")


def test_a_run_whose_clients_never_answer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rounds = {"count": 2, "cohort": 3, "deadline_s": 1e-3, "partial_work": "drop"}
    run = fed.simulate(fed.Experiment(data={"clients": 6}, model="logistic", rounds=rounds))
    assert run.summary["bytes_up"] == 0
    assert run.summary["unanswered_rounds"] == 2
    assert caplog.text.count("no answer counts, of 3 clients that were asked (3 were late, 0 failed)") == 1
    assert "no client has ever answered" in caplog.text


def stale_synchronous(
    count: int, bound: float, samples: Sequence[int]
) -> tuple[NDArray[np.float64], list[float], list[int]]:
    """SSP with an event queue: the model, the clock at which the slowest ends each task, and all leads when asked."""
    x, now, clocks, leads = np.zeros(2), 0.0, [0] * CLIENTS, []
    queue: list[tuple[float, int, NDArray[np.float64]]] = []
    ends = []
    for number in range(1, count + 1):
        while min(clocks) < number:
            busy = {client for _, client, _ in queue}
            for client in range(CLIENTS):
                if client not in busy and clocks[client] <= min(clocks) + bound:
                    leads.append(clocks[client] - min(clocks))
                    queue.append((now + samples[client] / SPEEDS[client], client, x))
            now = min(queue)[0]
            done = [(client, x0) for time_s, client, x0 in queue if time_s == now]
            queue = [flight for flight in queue if flight[0] != now]
            moved = sum(samples[client] * LR * (np.array([client, -client]) - x0) for client, x0 in done)
            x = x + moved / sum(samples)
            for client, _ in done:
                clocks[client] += 1
        ends.append(now)
    return x, ends, leads


@pytest.mark.parametrize("samples", thinned([[3, 1, 2, 1, 4, 1, 2, 5], [1] * CLIENTS], quick=1), ids=str)
@pytest.mark.parametrize("bound", [0, 1, 4, "none"])
def test_rounds_of_bounded_staleness_are_an_event_queue_by_hand(
    bound: Any, samples: Sequence[int], devices: dict[str, Any]
) -> None:
    finished = run({"kind": "bounded_staleness", "count": 6, "bound": bound}, devices, samples=samples)
    most = math.inf if bound == "none" else bound
    x, ends, leads = stale_synchronous(6, most, samples)
    np.testing.assert_allclose(point(finished), x, rtol=1e-10)
    assert [line["virtual_s"] for line in finished.metrics] == pytest.approx(ends)
    assert max(leads) == most or bound == "none"


def test_one_client_with_all_data_needs_no_cohort(devices: dict[str, Any]) -> None:
    """Centralized: three rounds of one step on all eight samples, a thousand a second, whatever the cohort."""
    for rounds in ({"count": 3}, {"count": 3, "cohort": 4}):
        finished = run(rounds, devices, algorithm={"kind": "centralized"})
        assert [line["virtual_s"] for line in finished.metrics] == pytest.approx([0.008, 0.016, 0.024])


@pytest.mark.parametrize(
    "rounds",
    [
        {"kind": "buffered", "buffer": 3, "concurrency": 5},
        {"kind": "synchronous", "cohort": 5, "quorum": 1.0},
        {"kind": "bounded_staleness"},
    ],
)
def test_endless_round_without_available_clients_ends_with_a_reason(
    rounds: dict[str, Any], watched: type[Watched]
) -> None:
    away = {"kind": "on_off", "on_s": 20.0, "off_s": 20_000.0}
    devices = {"kind": "uniform", "samples_per_s": 0.01, "availability": away}
    experiment = fed.Experiment(
        data={"kind": "digits", "clients": 6}, model="logistic", rounds={**rounds, "count": 2}, devices=devices
    )
    with pytest.raises(RunFailed, match=r"round 1 has not ended within a week of the clients' time; .*: give tasks"):
        fed.simulate(experiment)
    assert 6 < watched.sent[-1][0] / 86400 < 9


def test_a_round_waits_for_as_many_clients_as_are_members() -> None:
    """One client registers long before the others; rounds of two do not wait for a second."""
    section = {"kind": "uniform", "joining_s": 3600}
    joins_s = sorted(
        fed.Experiment(devices=section).devices.make().membership(client, Streams(0))[0] for client in range(CLIENTS)
    )
    finished = run({"count": 2, "cohort": 2}, section)
    assert finished.metrics[0]["selected"] == 1
    assert joins_s[0] < finished.metrics[0]["virtual_s"] < finished.metrics[1]["virtual_s"] < joins_s[1]


@pytest.mark.parametrize("kind", ["synchronous", "buffered", "asynchronous", "bounded_staleness"])
def test_run_without_future_clients_stops_with_the_remedy(kind: str) -> None:
    rounds = {"kind": kind, **({"buffer": 2} if kind == "buffered" else {})}
    with pytest.raises(RunFailed, match=r"never be there again|will ever be there again") as refused:
        run(rounds, {"kind": "uniform", "staying_s": 1e-6})
    assert str(refused.value).endswith("as devices.staying_s and devices.availability say in a simulation")
