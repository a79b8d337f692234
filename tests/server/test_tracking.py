"""Trackers: what they are told, and that none of them costs a run a bit, a line or a wait."""

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fed
from fed.errors import InvalidInput
from fed.server.observer import Essential, Event, RoundEnded, RunEnded
from fed.server.telling import Observers
from fed.server.tracking import RunLabel, Tracking
from fed.simulations.comparison_tracking import group_of
from fed.tracking.tracker import TrackedRun
from tests.clocks import HandClock

HERE = "python:tests.server.test_tracking:"


class Fake:
    """A tracker that notes what it is told, in the file of its run's folder, or in memory."""

    made: list["Fake"] = []  # noqa: RUF012  # of the test that runs

    def __init__(self, word: str = "") -> None:
        self.word = word
        self.run: TrackedRun | None = None
        self.rounds: dict[int, Mapping[str, float]] = {}
        self.files: list[Path] = []
        self.ended: tuple[str, Mapping[str, Any]] | None = None

    def begin(self, run: TrackedRun) -> str:
        Fake.made.append(self)  # one is made when an experiment is read, too
        self.run = run
        return run.kept_id or f"id-{len(Fake.made)}"

    def log(self, number: int, values: Mapping[str, float]) -> None:
        self.rounds[number] = values

    def keep(self, file: Path) -> None:
        self.files.append(file)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self.ended = (status, summary)


class Failing(Fake):
    """A tracker that fails at once, or in a round."""

    def begin(self, run: TrackedRun) -> str:
        if self.word == "begin":
            raise ConnectionError("no such server")
        return super().begin(run)

    def log(self, number: int, values: Mapping[str, float]) -> None:
        if self.word == "log":
            raise SystemExit("enough")


class Blocked(Fake):
    """A tracker that hangs in its first round until the run has ended."""

    may_go_on = threading.Event()

    def log(self, number: int, values: Mapping[str, float]) -> None:
        assert self.may_go_on.wait(60)
        super().log(number, values)


class Lets:
    """Lets blocked trackers go on once the run has ended: a run that waited for them would never end."""

    kinds = (RunEnded,)

    def observe(self, event: Event) -> None:
        Blocked.may_go_on.set()


@pytest.fixture(autouse=True)
def fresh() -> None:
    Fake.made.clear()
    Blocked.may_go_on.clear()


def experiment(*tracking: Any, **changed: Any) -> fed.Experiment:
    keys: dict[str, Any] = {
        "data": {"kind": "digits", "clients": 4},
        "model": {"kind": "logistic"},
        "rounds": {"count": 3, "cohort": 2},
        "simulation": {"workers": 0},
        "checkpoints": {"every": 1},
        "tracking": [{"report": False, **section} for section in tracking] or None,
    }
    return fed.Experiment(**{**keys, **changed})


def lines(folder: Path) -> list[dict[str, Any]]:
    texts = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(text).items() if key != "wall_s"} for text in texts]


def test_tracker_is_told_numbers_settings_report_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(folder: Path) -> Path:
        return folder / "report.html"

    monkeypatch.setattr("fed.reports.html.write_run_report", drawn)
    section = {"kind": f"{HERE}Fake", "word": "x"}
    run = fed.simulate(experiment({**section, "report": True}, section, name="mine", seed=4), output=tmp_path / "run")
    first, second = sorted(Fake.made, key=lambda made: -len(made.files))
    assert first.run is not None
    assert (first.run.name, first.run.group, first.run.folder) == ("mine", None, tmp_path / "run")
    assert first.run.tags == {"algorithm": "fedavg", "seed": "4"}
    assert (first.run.settings["local.lr"], first.run.settings["rounds.count"]) == (0.1, 3)
    for number, line in enumerate(run.metrics, 1):
        told = dict(first.rounds[number])
        assert told == {key: value for key, value in line.items() if key != "round" and value is not None}
        assert {"test_accuracy", "bytes_up", "bytes_down", "wall_s", "virtual_s", "selected", "replied"} <= told.keys()
    assert first.ended == ("finished", run.summary)
    assert (first.files, second.files) == ([tmp_path / "run/report.html"], [])
    kept = json.loads((tmp_path / "run/tracking.json").read_bytes())
    assert list(kept) == [f"{HERE}Fake", f"{HERE}Fake 2"]


@pytest.mark.parametrize(
    "section",
    [
        {"kind": f"{HERE}Failing", "word": "begin"},
        {"kind": f"{HERE}Failing", "word": "log"},
        {"kind": f"{HERE}Blocked"},
    ],
)
def test_failing_or_hanging_tracker_costs_no_bit_and_no_round(
    section: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"kind": f"{HERE}Fake"}
    run = fed.simulate(experiment(section, other), output=tmp_path / "with", observers=[Essential(Lets())])
    plain = fed.simulate(experiment(), output=tmp_path / "without")
    for name, tensor in plain.model.state_dict().items():
        assert tensor.equal(run.model.state_dict()[name])
    assert lines(tmp_path / "with") == lines(tmp_path / "without")
    (other_made,) = [made for made in Fake.made if type(made).__name__ == "Fake"]
    assert [*other_made.rounds] == [1, 2, 3], "the other tracker sees all"
    if "word" in section:
        assert ("check its keys in tracking" in caplog.text) is (section["word"] == "begin")
        assert f"observer {section['kind']} has failed, and is told nothing more" in caplog.text
        assert f", at {__file__}:" in caplog.text
    else:
        (hung,) = [made for made in Fake.made if made is not other_made]
        assert [*hung.rounds] == [1, 2, 3], "it has caught up at the end"


def test_run_waits_for_hanging_trackers_together_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    hang = threading.Event()

    class Hanging(Fake):
        def log(self, number: int, values: Mapping[str, float]) -> None:
            hang.wait(60)

    clock = HandClock()
    observers = Observers([Tracking(Hanging(), name, wait_s=30.0) for name in ("a", "b")], clock)
    observers.tell(RoundEnded(1, {"round": 1}, None))  # type: ignore[arg-type]  # which trackers are not told of
    closing = threading.Thread(target=observers.close)
    with caplog.at_level(logging.WARNING):
        closing.start()
        while closing.is_alive():
            clock.move(1.0)
            closing.join(0.005)
    hang.set()
    assert "the run has ended, and waits 25 s at most for observer a" in caplog.text
    assert "observer b has not ended in 30 s, and is not waited for any more" in caplog.text


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_report_that_cannot_be_drawn_costs_no_tracker_its_end(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang = threading.Event()

    def draw(folder: Path) -> Path:
        if fault == "fails":
            raise OSError("the disk is full")
        hang.wait(60)
        return folder

    monkeypatch.setattr("fed.reports.html.write_run_report", draw)
    tracker = Fake()
    experiment = fed.Experiment(data={"kind": "digits", "clients": 2}, rounds={"count": 1}, model="logistic")
    with caplog.at_level(logging.WARNING):
        fed.simulate(experiment, output=tmp_path / "run", observers=[Tracking(tracker, "mine", wait_s=2.0)])
    hang.set()
    assert tracker.ended is not None
    assert (tracker.ended[0], tracker.files) == ("finished", [])
    reason = {"hangs": "it was not drawn within 1 s", "fails": "the disk is full"}[fault]
    assert f"trackers do not get the report of {tmp_path / 'run'}: {reason}; fed report draws it" in caplog.text


def test_resumed_run_goes_on_in_the_same_tracker_run(tmp_path: Path) -> None:
    class Stops:
        kinds = (RoundEnded,)

        def observe(self, event: Event) -> None:
            assert isinstance(event, RoundEnded)
            if event.round == 2:
                raise KeyboardInterrupt

    one = experiment({"kind": f"{HERE}Fake"})
    with pytest.raises(KeyboardInterrupt):
        fed.simulate(one, output=tmp_path / "run", observers=[Essential(Stops())])
    fed.simulate(one, output=tmp_path / "run", resume=True)
    first, second = Fake.made
    assert first.run is not None
    assert second.run is not None
    assert first.ended is not None
    assert first.ended[0] == "interrupted"
    assert (first.run.kept_id, second.run.kept_id) == (None, "id-1")
    assert (second.run.rounds_done, [*second.rounds]) == (1, [2, 3])
    fed.simulate(one, output=tmp_path / "run", overwrite=True)
    assert Fake.made[-1].run is not None
    assert Fake.made[-1].run.kept_id is None, "another run"


def test_tracking_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    run = fed.simulate(experiment(), output=tmp_path / "run")
    again = fed.simulate(experiment({"kind": f"{HERE}Fake"}), output=tmp_path / "run", resume=True)
    assert again.summary["final_test_loss"] == run.summary["final_test_loss"]


def test_runs_of_a_comparison_are_a_group_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fed.simulations.comparison_folder.comparison_report", lambda *_: "drawn")
    monkeypatch.setattr("fed.simulations.comparison_folder.comparison_svg", lambda *_: None)
    failing = {"kind": f"{HERE}Failing", "word": "begin"}
    base = experiment({"kind": f"{HERE}Fake", "report": True}, failing).given_keys()
    monkeypatch.setattr("fed.reports.html.write_run_report", lambda folder: folder / "report.html")
    comparison = fed.Comparison(name="two", base=base, grid={"local.lr": [0.1, 0.2]})
    result = fed.compare(comparison, output=tmp_path / "out")
    *runs, table = Fake.made
    names = [run.run.name for run in runs if run.run is not None]
    assert names == ["local.lr=0.1 seed 0", "local.lr=0.2 seed 0"]
    assert {run.run.group for run in Fake.made if run.run is not None} == {"two (out)"}
    assert table.files == [tmp_path / "out/report.html"]
    assert table.ended is not None
    assert table.ended[1]["local.lr=0.2/final_test_loss"] == result.rows[1]["final_test_loss"]
    assert table.run is not None
    assert table.run.tags == {"algorithm": "all", "seed": "all", "variant": "all"}
    assert table.run.settings["grid.local.lr"] == [0.1, 0.2]
    for name in [*names, "two: the table"]:
        assert f"observer {HERE}Failing of {name} has failed, and is told nothing more: it cannot begin" in caplog.text
    assert group_of(comparison, None) == "two"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "tensorbord"}, "no such tracker; did you mean tensorboard"),
        ({"kind": f"{HERE}experiment"}, "a tracker must be an object with the methods begin, log, keep, end, got"),
        ({"kind": "trackio"}, "tracking with trackio needs that package, which is not installed: pip install trackio"),
    ],
)
def test_tracker_that_cannot_be_used_is_refused_at_once(
    section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed.tracking.tracker.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=message):
        fed.simulate(experiment(section))


def test_comparison_refuses_a_missing_tracker_before_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed.tracking.tracker.find_spec", lambda name: None)
    variants: list[Any] = [{"name": "plain"}, {"name": "watched", "tracking": [{"kind": "trackio"}]}]
    comparison = fed.Comparison(base=experiment().given_keys(), compare=variants)
    with pytest.raises(InvalidInput, match=r"^watched: tracking with trackio needs that package"):
        fed.compare(comparison, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_own_tracker_takes_the_place_of_the_experiments() -> None:
    own = Fake()
    fed.simulate(
        experiment({"kind": f"{HERE}Failing", "word": "begin"}),
        observers=[Tracking(own, part=RunLabel("named", "grouped"))],
    )
    assert own.run is not None
    assert (own.run.name, own.run.group) == ("named", "grouped")
    assert Fake.made == [own]
