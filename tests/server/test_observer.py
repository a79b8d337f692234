"""Observers: the same events everywhere, and neither a slow nor a failing one costs a round or a bit."""

import logging
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fed
from fed.clients.data import load
from fed.config.experiment import Experiment
from fed.errors import InvalidInput
from fed.server.grpc.deploy import serve
from fed.server.grpc.service import Patience
from fed.server.observer import (
    Essential,
    Event,
    Expectation,
    Kinds,
    ModelScored,
    NodeCame,
    NodeWent,
    RoundBegan,
    RoundEnded,
    RunBegan,
    RunEnded,
    TaskAnswered,
    TaskEvent,
    TaskFailed,
    TaskLate,
    TaskSent,
    TaskSettled,
)
from fed.server.telling import Observers
from fed.storage.run_reader import summary_of
from fed.vectors.randomness import Streams
from tests.observing import Trial
from tests.server.grpc.threaded import nodes_of
from tests.simulations import users_parts as parts

PATIENCE = Patience(heartbeat_s=0.3, silence_s=10.0, lease_s=30.0, stall_s=10.0)


def experiment(**changed: Any) -> Experiment:
    keys: dict[str, Any] = {
        "data": {"kind": "digits", "clients": 3, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"kind": "logistic"},
        "local": {"lr": 0.1, "batch_size": 64},
        "rounds": {"count": 3, "evaluate_every": 2},
        "simulation": {"batching": "off", "workers": 0},
    }
    return Experiment(**{**keys, **changed})


def untimed(events: Sequence[Event]) -> list[Any]:
    """Events in words, without times; answers of one round, which may come in any order, by client."""
    said: list[Any] = []
    for event in events:
        match event:
            case RunBegan():
                said.append(("run began", event.rounds_done, event.clients, event.folder and event.folder.name))
            case RunEnded():
                said.append(("run ended", event.status, event.summary["rounds"]))
            case RoundEnded():
                line = {key: value for key, value in event.line.items() if key not in ("wall_s", "virtual_s")}
                said.append(("round ended", line, event.participation.line(event.round), event.clients))
            case TaskAnswered():
                answers = [("answered", event.round, event.client, event.task)]
                while isinstance(said[-1], tuple) and said[-1][0] == "answered":
                    answers.append(said.pop())
                said += sorted(answers)
            case _:
                said.append(event)
    return said


def test_a_simulation_and_a_deployment_tell_the_same_events(tmp_path: Path) -> None:
    simulated, deployed = Trial(), Trial()
    one = experiment()
    fed.simulate(one, output=tmp_path / "run", observers=[simulated])
    data = load(one.data, Streams(one.seed))  # type: ignore[arg-type]

    def begin(port: int) -> None:
        nodes_of(data, port, tmp_path)

    serve(
        one,
        listen="127.0.0.1:0",
        output=tmp_path / "served" / "run",
        min_nodes=3,
        patience=PATIENCE,
        on_listen=begin,
        observers=[deployed],
    )
    assert untimed(deployed.events) == untimed(simulated.events)
    assert [type(event) for event in simulated.events[:5]] == [RunBegan, RoundBegan, TaskSent, TaskSent, TaskSent]
    kinds = Counter(map(type, simulated.events))
    assert kinds[TaskSent] == kinds[TaskAnswered] == kinds[TaskSettled] == 9
    assert [event.round for event in simulated.events if isinstance(event, ModelScored)] == [2, 3]
    assert isinstance(simulated.events[-1], RunEnded)


class Raises:
    """A tracker that fails at its third event."""

    def __init__(self) -> None:
        self.told = 0

    def observe(self, event: Event) -> None:
        self.told += 1
        if self.told == 3:
            raise SystemExit("enough")


class Sleeps:
    """A tracker that is asleep from its first event on."""

    def __init__(self) -> None:
        self.wakes = threading.Event()

    def observe(self, event: Event) -> None:
        self.wakes.wait(60)


def test_failing_and_sleeping_observers_cost_no_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed.server.telling._CLOSING_S", 0.05)
    raises, sleeps = Raises(), Sleeps()
    one = experiment(checkpoints={"every": 1})
    plain = fed.simulate(one, output=tmp_path / "plain" / "run")
    watched = fed.simulate(one, output=tmp_path / "watched" / "run", observers=[raises, sleeps])
    sleeps.wakes.set()
    assert parts.outcome(watched) == parts.outcome(plain)
    for folder in (tmp_path / "watched" / "run", tmp_path / "plain" / "run"):
        shutil.rmtree(folder / "checkpoints")  # which hold wall times
    assert parts.kept(tmp_path / "watched" / "run") == parts.kept(tmp_path / "plain" / "run")
    assert raises.told == 3
    said = [line for line in caplog.messages if "observer" in line]
    failed = f"observer Raises has failed, and is told nothing more: SystemExit: enough, at {__file__}:"
    assert sum(failed in line for line in said) == 1
    assert sum(bool(re.search(r"observer Sleeps has not seen \d+ events", line)) for line in said) == 1
    assert len(said) == 2


def test_what_a_slow_observer_misses_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_MOST_WAITING", 5), ("_ROOM_FOR_ROUNDS", 2), ("_CLOSING_S", 60.0)):
        monkeypatch.setattr(f"fed.server.telling.{name}", value)
    seen: list[Event] = []
    begins, goes_on = threading.Event(), threading.Event()

    class Slow:
        def observe(self, event: Event) -> None:
            seen.append(event)
            begins.set()
            goes_on.wait(60)

    told = Observers([Slow()])
    told.tell(RoundBegan(1))
    assert begins.wait(60)
    for task in range(8):
        told.tell(TaskSent(1, 0, task))
    for number in range(2, 6):
        told.tell(RoundBegan(number))
    goes_on.set()
    told.close()
    tasks = [TaskSent(1, 0, task) for task in range(5)]
    assert seen == [RoundBegan(1), *tasks, RoundBegan(2), RoundBegan(3)], "rounds have room that tasks do not take"
    assert caplog.messages[-1] == "observer Slow has not seen 5 events: it is slower than the run"
    assert sum("is slower than the run: 5 events wait for it" in line for line in caplog.messages) == 1


def test_essential_observers_come_first_and_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    class Calls:
        kinds: Kinds = (RoundBegan,)

        def __init__(self, name: str) -> None:
            self._name = name

        def observe(self, event: Event) -> None:
            calls.append(self._name)
            if self._name == "last":
                raise OSError("the disk is full")

    tracker = Trial()
    told = Observers([tracker, Essential(Calls("last"))])
    told.put_first(Calls("first"), Calls("second"))
    told.tell(RunEnded("finished", {}))
    with pytest.raises(OSError, match="the disk is full"):
        told.tell(RoundBegan(1))
    told.close()
    assert calls == ["first", "second", "last"]
    assert tracker.events == [RunEnded("finished", {})]
    assert "observer" not in caplog.text


class Whole:
    """An observer of one kind, which is no tuple."""

    kinds = RoundEnded

    def observe(self, event: Event) -> None:
        pass


class Named:
    """An observer of an event's name."""

    kinds = ("RoundEnded",)

    def observe(self, event: Event) -> None:
        pass


class Logger:
    """A tracker's logger, which is no observer itself."""

    def begin(self, run: Any) -> None: ...

    def log(self, number: int, values: Any) -> None: ...

    def end(self, status: str, summary: Any) -> None: ...


@pytest.mark.parametrize(
    ("observers", "reason"),
    [
        (Trial(), r"observers must be a list of observers, got Trial: write \[observer\]"),
        ([Trial], "an observer must be an object with a method observe, got Trial"),
        ([None], "an observer must be an object with a method observe, got NoneType"),
        ([Essential(print)], "an observer must be an object with a method observe, got print"),  # type: ignore[arg-type]
        ([Essential(Essential(Trial()))], "an observer must be an object with a method observe, got Essential"),  # type: ignore[arg-type]
        ([Logger()], r"got Logger: write fed\.server\.tracking\.Tracking\(logger\) around a logger"),
        ([Whole()], r"kinds of observer Whole must be a tuple of events .* got <class"),
        ([Essential(Named())], r"kinds of observer Named must be a tuple of events .* got \('RoundEnded',\)"),
    ],
    ids=["no list", "class", "none", "function", "essential", "logger", "kind", "name"],
)
def test_what_is_no_observer_is_refused_in_a_sentence(observers: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        fed.simulate(experiment(), observers=observers)


class Spoils:
    """A tracker that empties all that it is given."""

    def observe(self, event: Event) -> None:
        for given in (getattr(event, name, None) for name in ("line", "scores", "summary")):
            if given is not None:
                given.clear()


def test_a_tracker_that_changes_what_it_gets_changes_no_result(tmp_path: Path) -> None:
    plain = fed.simulate(experiment(), output=tmp_path / "plain" / "run")
    spoiled = fed.simulate(experiment(), output=tmp_path / "spoiled" / "run", observers=[Spoils()])
    assert parts.outcome(spoiled) == parts.outcome(plain)


class FullDisk:
    """An audit log whose disk is full from the first round's end on."""

    kinds: Kinds = (RoundEnded, RunEnded)

    def observe(self, event: Event) -> None:
        raise OSError(f"no room for {type(event).__name__}")


def test_the_first_error_of_an_essential_observer_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="no room for RoundEnded"):
        fed.simulate(experiment(), output=tmp_path / "run", observers=[Essential(FullDisk())])
    assert "no room for RunEnded" in caplog.text
    summary = summary_of(tmp_path / "run")
    assert summary is not None
    assert summary["status"] == "failed"


def test_a_system_without_threads_costs_the_observer_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told = Observers([Trial()])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        told.tell(RoundBegan(1))
        told.tell(RoundBegan(2))
    told.close()
    (said,) = caplog.messages
    failed = "observer Trial has failed, and is told nothing more: RuntimeError: can't start new thread, at "
    assert said.startswith(failed)


def test_expectations_are_told_to_those_that_name_them() -> None:
    class Named:
        kinds: Kinds = (Expectation, TaskEvent)

        def observe(self, event: Event) -> None:
            pass

    everything, named = Observers([Trial()]), Observers([Named()])
    assert (everything.want(Expectation), named.want(Expectation)) == (False, True)
    assert (everything.want(TaskLate), named.want(TaskLate), named.want(RoundEnded)) == (True, True, False)
    assert not Observers().want(RoundEnded)
    everything.close()
    named.close()


def by_round(events: Sequence[Event]) -> Iterator[tuple[RoundEnded, Counter[type[Event]]]]:
    """Each round's end, and the number of events of each kind since its beginning."""
    counts: Counter[type[Event]] = Counter()
    for event in events:
        counts[type(event)] += 1
        if isinstance(event, RoundEnded):
            yield event, counts
            counts = Counter()


@pytest.mark.parametrize(
    "rounds",
    [
        {"count": 8, "cohort": 12, "over_selection": 1.5},
        {"count": 8, "cohort": 12, "deadline_s": 0.4, "partial_work": "drop"},
        {"kind": "buffered", "count": 12, "concurrency": 9, "buffer": 4, "most_stale": 1},
    ],
    ids=["over-selection", "deadline", "buffered"],
)
def test_events_of_tasks_add_up_to_the_metrics(rounds: dict[str, Any]) -> None:
    trial = Trial()
    one = fed.Experiment(
        data={"kind": "digits", "clients": 24},
        model={"kind": "logistic"},
        local={"steps": 2, "batch_size": 8},
        rounds=rounds,
        devices={"kind": "lognormal", "sigma": 1.0, "failure": 0.2, "interruption": 0.2},
    )
    run = fed.simulate(one, observers=[trial])
    of_rounds = list(by_round(trial.events))
    assert len(of_rounds) == len(run.metrics)
    for ended, counts in of_rounds:
        line = ended.line
        found = [counts[kind] for kind in (TaskSent, TaskAnswered, TaskLate, TaskFailed)]
        assert found == [line[name] for name in ("selected", "replied", "late", "failed")], ended.round
        assert counts[TaskSettled] == line["replied"]
    everything = Counter(map(type, trial.events))
    assert everything[TaskFailed] > 0


def test_clients_that_come_and_go_are_told_in_turn() -> None:
    trial = Trial()
    one = fed.Experiment(
        data={"kind": "digits", "clients": 12},
        model={"kind": "logistic"},
        rounds={"count": 20, "cohort": 3},
        devices={"availability": {"kind": "on_off", "on_s": 2.0, "off_s": 0.5}},
    )
    fed.simulate(one, observers=[trial])
    last: dict[object, type[Event]] = {}
    for event in trial.events:
        if isinstance(event, NodeCame | NodeWent):
            assert last.get(event.client) is not type(event), "never twice in a row"
            last[event.client] = type(event)
    assert {*last.values()} == {NodeCame, NodeWent}


def test_a_failed_task_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trial = Trial()
    one = fed.Experiment(
        data={"kind": "digits", "clients": 12}, rounds={"count": 2, "cohort": 12}, devices={"failure": 0.5}
    )
    fed.simulate(one, observers=[trial])
    failures = [event for event in trial.events if isinstance(event, TaskFailed)]
    assert failures
    for event in failures:
        assert f"round {event.round}: client {event.client} failed: {event.reason}" in caplog.text
