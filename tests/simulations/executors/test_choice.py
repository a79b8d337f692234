"""How many workers a run gets: as many as are asked for, or as pay, and none where they cannot be."""

import logging
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.aggregators.base import LocalRule, Phase
from fed.aggregators.fedavg import FedAvg
from fed.clients.training import devices
from fed.clients.training.executor import InProcess, Make, Work
from fed.config.registry import EXECUTORS
from fed.errors import FedError, InvalidExperiment, InvalidInput, RunFailed
from fed.server.observer import Essential
from fed.simulations import choice as hiring
from fed.simulations.estimate import Estimate
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.simulations.speed_up import RunTimes
from fed.vectors.shared_memory import packed
from tests.simulations import users_parts as parts
from tests.simulations.executors import trial
from tests.thinned import thinned

LONG = 3600.0
SHORT = 1.0


def lasting(seconds: float) -> Estimate:
    """Estimate of a run of so many seconds in one process, nearly all of them in ten items a round."""
    times = RunTimes(rounds=seconds, items=10, item_s=0.1, main_s=1e-5, sending_s=1e-4)
    made = Estimate(simulation("auto"))
    made.__dict__["times"] = times  # in place of the cached property's own
    return made


class Crew(InProcess):
    """Stands in for worker processes, and notes what it was asked for."""

    is_parallel = True
    pickles_work = True
    shares_memory = True
    hired: list[tuple[int, int]]
    fails: FedError | None = None

    def __init__(self, make: Make, devices: Sequence[torch.device], capacity_bytes: int) -> None:
        def fits(device: torch.device) -> Work:
            work = make(device)

            def measured(content: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
                answer = work(content, tensors)
                assert max(packed(tensors)[1], packed(answer[1])[1]) <= capacity_bytes
                return answer

            return measured

        super().__init__(fits, devices[:1])
        self.hired.append((len(devices), capacity_bytes))
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def hired(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (count, bytes) of workers that were hired; eight cores are there."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(Crew, "hired", found, raising=False)
    monkeypatch.setattr(EXECUTORS.section("workers"), "target", Crew)
    monkeypatch.setattr(hiring, "usable_cores", lambda: 8)
    return found


def simulation(
    workers: int | str, data: fed.FederatedData | None = None, model: Any = parts.small, **execution: Any
) -> Simulation:
    """Five groups a round."""
    given = {"batching": "on", "group": 2, "workers": workers, **execution}
    return Simulation(fed.Experiment(simulation=given), data or parts.unequal(), model)


@pytest.mark.parametrize(
    ("workers", "run_s", "execution", "count"),
    [
        (0, LONG, {}, None),
        (1, SHORT, {}, 1),
        (7, SHORT, {}, 7),
        ("auto", SHORT, {}, None),
        ("auto", LONG, {}, 5),
        ("auto", LONG, {"group": 1}, 8),
        ("auto", LONG, {"batching": "off"}, 8),
        ("auto", LONG, {"group": 9}, None),
    ],
)
def test_number_of_workers_is_requested_or_fits_the_work(
    workers: int | str, run_s: float, execution: Any, count: int | None, hired: list[tuple[int, int]]
) -> None:
    with hiring.hired(simulation(workers, **execution), lasting(run_s)) as executor:
        assert isinstance(executor, Crew) == (count is not None)
    assert [asked for asked, _ in hired] == ([count] if count is not None else [])


@pytest.mark.parametrize(
    ("executor", "workers", "run_s", "count"),
    [
        ("in_process", "auto", LONG, None),
        ("in_process", 0, LONG, None),
        ("workers", "auto", SHORT, 5),
        ("workers", 3, SHORT, 3),
    ],
)
def test_named_executor_is_taken_however_long_the_run(
    executor: str, workers: int | str, run_s: float, count: int | None, hired: list[tuple[int, int]]
) -> None:
    with hiring.hired(simulation(workers, executor=executor), lasting(run_s)) as made:
        assert type(made) is (InProcess if count is None else Crew)
    assert [asked for asked, _ in hired] == ([count] if count is not None else [])


@pytest.mark.parametrize(
    ("execution", "reason"),
    [
        ({"executor": "in_process", "workers": 2}, "workers must be 0 with executor in_process, .*, got 2: lower it"),
        ({"executor": "workers", "workers": 0}, "workers must be at least 1 with executor workers, got 0: raise it"),
        ({"executor": "threads"}, r"executor\.kind: no such executor"),
    ],
)
def test_executor_that_contradicts_its_workers_is_refused(execution: Any, reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=rf"simulation.*{reason}"):
        fed.Experiment(simulation=execution)


def test_kind_that_is_no_executor_is_refused() -> None:
    kind = "python:fed.config.lr_schedules:ConstantSchedule"
    made = simulation("auto", executor=kind)
    with pytest.raises(
        InvalidExperiment, match=rf"^simulation\.executor {kind} must be a fed\..*: derive it from that$"
    ):
        hiring.hired(made)


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_trial_executor_of_one_class_gives_the_same_bits(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS.builtin, "pickled", "tests.simulations.executors.trial:Pickled")
    keys = fed.Experiment(algorithm=algorithm, simulation={"group": 2, "workers": 0}, rounds={"count": 3})
    apart = keys.override({"simulation": {"group": 2, "workers": 3, "executor": "pickled"}})
    runs = [simulate(run, data=parts.unequal(torch.float64), model=parts.double) for run in (keys, apart)]
    executor = runs[1].experiment.simulation.executor
    assert executor is not None
    assert executor.target is trial.Pickled
    assert parts.outcome(runs[0]) == parts.outcome(runs[1])


BUFFERED = {"kind": "buffered", "buffer": 3, "concurrency": 6}


@pytest.mark.parametrize(
    ("algorithm", "rounds"), [("fedavg", {"cohort": 9}), ("dpsgd", {}), ("fedavg", BUFFERED)], ids=str
)
def test_the_costliest_groups_are_handed_out_first(
    algorithm: str, rounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all take as many steps, of as many samples as each client has."""
    monkeypatch.setattr(trial.Noted, "costs", [], raising=False)
    keys = fed.Experiment(
        algorithm=algorithm,
        local={"batch_size": 30, "steps": 2},
        rounds={"count": 3, **rounds},
        devices={"kind": "lognormal"},
        simulation={"group": 1, "workers": 0, "executor": f"python:{trial.__name__}:Noted"},
    )
    noted = simulate(keys, data=parts.unequal(), model=parts.small)
    plain = simulate(keys.override({"simulation.executor": None}), data=parts.unequal(), model=parts.small)
    assert parts.outcome(noted) == parts.outcome(plain)
    assert max(map(len, trial.Noted.costs)) > 3
    assert all(costs == sorted(costs, reverse=True) for costs in trial.Noted.costs)


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "count"),
    [("cuda", 4, 8, 4), ("cuda", 1, 8, None), ("cuda:1", 4, 8, None), ("cuda", 4, 2, 2), ("cuda", 8, 16, 5)],
)
def test_auto_takes_at_most_a_worker_for_each_gpu(
    device: str, gpus: int, cores: int, count: int | None, hired: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulation("auto")
    made.device = torch.device("cuda", 0)
    made.experiment = made.experiment.override({"simulation.device": device})
    estimate = lasting(LONG)
    dealt: list[str] = []

    def started(simulation: Simulation, section: Any, workers: int, *, awaits: bool = False) -> InProcess:
        dealt.extend(map(str, devices.devices_of(workers, device)))
        return InProcess(lambda device: lambda content, tensors: (content, tensors), [torch.device("cpu")])

    monkeypatch.setattr(hiring, "_started", started)
    monkeypatch.setattr(hiring, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    hiring.hired(made, estimate)
    first = device if device.endswith("1") else "cuda:0"
    assert dealt == ([first] if count is None else [f"cuda:{place}" for place in range(count)])


def test_run_resumes_with_another_executor(tmp_path: Path) -> None:
    """Its folder may be from before there was a choice of executor."""
    keys = fed.Experiment(simulation={"group": 2, "workers": 0}, rounds={"count": 4}, checkpoints={"every": 1})
    whole = simulate(keys, data=parts.unequal(), model=parts.small)

    def stop(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(
            keys,
            data=parts.unequal(),
            model=parts.small,
            output=tmp_path / "run",
            observers=[Essential(parts.Watcher(stop))],
        )
    file = tmp_path / "run" / "experiment.yaml"
    text = file.read_text()
    assert ", executor: null" in text
    file.write_text(text.replace(", executor: null", ""))
    other = keys.override({"simulation.executor": f"python:{trial.__name__}:Pickled", "simulation.workers": 2})
    resumed = simulate(other, data=parts.unequal(), model=parts.small, output=tmp_path / "run", resume=True)
    assert parts.outcome(resumed) == parts.outcome(whole)


def test_an_untimed_run_is_timed_where_it_matters(
    hired: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Simulation] = []

    def noted(simulation: Simulation) -> Estimate:
        timed.append(simulation)
        return lasting(LONG)

    monkeypatch.setattr(hiring, "Estimate", noted)
    for workers, group, expected in ((0, 2, 0), (3, 2, 0), ("auto", 9, 0), ("auto", 2, 1)):
        with hiring.hired(simulation(workers, group=group)):
            assert len(timed) == expected
    assert [count for count, _ in hired] == [3, 5]


def test_auto_takes_none_within_one_of_several_processes(
    hired: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    with hiring.hired(simulation("auto"), lasting(LONG)) as executor:
        assert isinstance(executor, InProcess)
    assert not hired
    hiring.hired(simulation("auto", executor="workers")).close()
    assert [count for count, _ in hired] == [1]


class Unportable(nn.Module):
    """Holds something that pickle does not take."""

    scale: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.layers = parts.small()
        self.scale = lambda x: 2 * x

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale(self.layers(inputs))


@dataclass(frozen=True, kw_only=True)
class OwnRule(FedAvg):
    """Its class can be pickled, the rule that it gives clients cannot."""

    def phases(self) -> tuple[Phase, ...]:
        class Rule(LocalRule):
            """Plain steps."""

        return (Phase(rule=Rule()),)


def without_pickle(part: str) -> dict[str, Any]:
    given: dict[str, Any] = {"data": parts.unequal(), "model": parts.small}
    match part:
        case "model":
            given["model"] = Unportable
        case "loss":
            given["loss"] = lambda output, target: parts.brier(output, target)
        case "metric":
            given["metric"] = lambda output, target: parts.second_guess(output, target)
        case "data":
            train = fed.ClientsOnDemand(range(9), lambda client: parts.samples(9, client))
            given["data"] = fed.FederatedData(train, classes=3)
    return given


@pytest.mark.parametrize("part", ["model", "loss", "metric", "algorithm", "data"])
def test_unpicklable_parts_give_one_sentence_and_keep_auto_here(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = OwnRule() if part == "algorithm" else FedAvg()
    keys = fed.Experiment(algorithm=algorithm, simulation={"group": 2, "workers": 2}, rounds={"count": 1, "cohort": 6})
    with pytest.raises(InvalidExperiment, match=rf"^the {part} .* simulation\.workers must be 0: ") as caught:
        simulate(keys, output=tmp_path / "run", **without_pickle(part))
    assert not (tmp_path / "run").exists()
    assert str(caught.value).endswith("define it at the top of a module")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(RunTimes, "workers", lambda times, most, cores: most)
    with caplog.at_level(logging.WARNING):
        run = simulate(keys.override({"simulation.workers": "auto"}), **without_pickle(part))
    assert f"training in this process alone: the {part} cannot be pickled" in caplog.text
    alone = simulate(keys.override({"simulation.workers": 0}), **without_pickle(part))
    assert parts.outcome(run) == parts.outcome(alone)


@pytest.mark.parametrize("error", [RunFailed("no room"), InvalidInput("not here")])
def test_workers_that_cannot_start_are_an_error_if_requested(
    error: FedError, hired: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Crew, "fails", error)
    monkeypatch.setattr(RunTimes, "workers", lambda times, most, cores: most)
    keys = fed.Experiment(simulation={"group": 2}, rounds={"count": 1, "cohort": 6})
    with caplog.at_level(logging.WARNING):
        run = simulate(keys, data=parts.unequal(), model=parts.small)
    assert run.summary["status"] == "finished"
    assert f"training in this process alone: {error}" in caplog.text
    with pytest.raises(type(error), match=str(error)):
        simulate(keys.override({"simulation.workers": 2}), data=parts.unequal(), model=parts.small)
    assert len(hired) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [1, 3, 32])
@pytest.mark.parametrize("algorithm", thinned(["fedavg", "local", "dpsgd"], quick=1))
def test_every_item_and_answer_has_room_between_processes(
    algorithm: str, group: int, dtype: torch.dtype, hired: list[tuple[int, int]]
) -> None:
    """A model of 40 kB or more, so that neither fits by what slots have to spare."""
    keys = fed.Experiment(
        simulation={"group": group, "workers": 1, "batching": "on"},
        algorithm={"kind": algorithm},
        model={"kind": "mlp", "hidden": [1500]},
        rounds={"count": 1},
    )
    run = simulate(keys, data=parts.unequal(dtype))
    assert run.summary["parameters"] * dtype.itemsize > 40_000
    assert len(hired) == 1


def test_data_in_memory_that_processes_share_are_the_same() -> None:
    train = dict(parts.unequal().train)
    inputs, labels = train["c6"]
    train["c6"] = inputs.t().contiguous().t(), labels.repeat_interleave(2)[::2]
    data = fed.FederatedData(train)
    shared = hiring._shared(simulation(2, data))
    for client in data.clients:
        assert all(map(torch.equal, shared.read(client), data.train[client]))
    apart = hiring._shared(simulation(2, parts.on_demand()))
    assert all(map(torch.equal, apart.read(3), parts.on_demand().read(3)))


def test_strides_of_data_do_not_change_a_bit(hired: list[tuple[int, int]]) -> None:
    """In shared memory samples lie one after the other, in this process as the user has laid them."""
    unequal = parts.unequal()
    train = {client: (inputs.t().contiguous().t(), labels) for client, (inputs, labels) in unequal.train.items()}
    assert unequal.test is not None
    test = unequal.test[0].t().contiguous().t(), unequal.test[1]
    data = fed.FederatedData(train, test)
    keys = fed.Experiment(rounds={"count": 2}, local={"batch_size": 64}, simulation={"batching": "off", "workers": 0})
    runs = [simulate(run, data=data, model=SumsColumns) for run in (keys, keys.override({"simulation.workers": 1}))]
    assert parts.outcome(runs[0]) == parts.outcome(runs[1])
    assert len(hired) == 1


def test_more_workers_than_a_machine_could_use_are_refused(hired: list[tuple[int, int]]) -> None:
    keys = fed.Experiment(rounds={"count": 1}, simulation={"workers": 100_000})
    with pytest.raises(
        InvalidExperiment, match=r"simulation\.workers must be at most \d+ on this machine of \d+ cores"
    ):
        simulate(keys, data=parts.unequal(), model=parts.small)
    assert hired == []


def test_workers_elsewhere_may_be_more_than_fit_here() -> None:
    with hiring.hired(simulation(65, executor=f"python:{trial.__name__}:Pickled")) as executor:
        assert isinstance(executor, trial.Pickled)
        assert len(executor.works) == 65


class SumsColumns(nn.Module):
    """Rounds as the strides of its inputs tell it to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = parts.small()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sums = inputs.repeat(1, 50).sum(1, keepdim=True) if inputs.is_contiguous() else inputs.sum(1, keepdim=True) * 50
        outputs: torch.Tensor = self.layers(inputs + 1e-3 * sums)
        return outputs
