"""Progress tells where a run is, in a bounded number of lines."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fed.cli.progress import Bar, ComparisonProgress, Lines, SimulationProgress
from fed.server.observer import Expectation


class Kept(Lines):
    """Keeps what would be printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def line(number: int, accuracy: float | None = None) -> dict[str, object]:
    return {"round": number, "bytes_up": 300, "bytes_down": 200, "test_accuracy": accuracy}


@pytest.mark.parametrize("rounds", [1, 3, 10, 11, 1_000])
def test_progress_has_about_ten_lines_and_a_last_one(rounds: int) -> None:
    kept = Kept()
    watch = SimulationProgress(kept)
    watch.begin(Expectation(rounds, 1.0, 0, 0), 0)
    for number in range(1, rounds + 1):
        watch.round(line(number))
    assert len(kept.lines) == min(rounds, 10)
    assert kept.lines[-1].startswith(f"round {rounds}/{rounds}")


def test_a_line_has_round_accuracy_bytes_and_time_left() -> None:
    kept = Kept()
    watch = SimulationProgress(kept)
    watch.begin(Expectation(2, 1.0, 0, 0), 0)
    watch.round(line(1, accuracy=0.5))
    watch.round(line(2))
    assert kept.lines[0].startswith("round 1/2, accuracy 0.500, 500 B, ")
    assert kept.lines[1] == "round 2/2, accuracy 0.500, 1 kB, 0.0 s left"


def test_an_accuracy_that_was_never_measured_is_not_made_up() -> None:
    kept = Kept()
    watch = SimulationProgress(kept)
    watch.begin(Expectation(1, 1.0, 0, 0), 0)
    watch.round(line(1))
    assert "accuracy" not in kept.lines[0]


@pytest.mark.parametrize(
    ("wall_s", "lines"), [(9.0, []), (200.0, ["about 3 min 20 s, 3 MB up and 4 MB down for 5 rounds"])]
)
def test_only_a_long_run_is_announced(wall_s: float, lines: list[str]) -> None:
    kept = Kept()
    SimulationProgress(kept).begin(Expectation(5, wall_s, 3_000_000, 4_000_000), 0)
    assert kept.lines == lines


@pytest.mark.parametrize(
    ("proviso", "end"), [("", "rounds"), ("if nobody fails or is late", "rounds, if nobody fails or is late")]
)
def test_what_an_announcement_takes_for_granted_is_said(proviso: str, end: str) -> None:
    kept = Kept()
    SimulationProgress(kept).begin(Expectation(5, 20.0, 1, 1, proviso), 0)
    assert kept.lines[0].endswith(f"for 5 {end}")
    watch = ComparisonProgress(kept, lambda name: Expectation(5, 20.0, 1, 1, proviso), total=2, jobs=1)
    watch.begin([("A", 0), ("B", 0)])
    assert kept.lines[1].endswith(f"for 2 runs{end.removeprefix('rounds')}")


def gone_on_with(kept: Kept, folder: Path, earlier: int, wall_s: float = 1.0) -> SimulationProgress:
    lines = (json.dumps(line(number, accuracy=number / 10)) + "\n" for number in range(1, earlier + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    watch = SimulationProgress(kept, folder)
    watch.begin(Expectation(5, wall_s, 5_000, 10_000), earlier)
    return watch


def test_a_run_that_goes_on_counts_the_rounds_before(tmp_path: Path) -> None:
    kept = Kept()
    watch = gone_on_with(kept, tmp_path, 3)
    assert watch.done() == "3 rounds"
    watch.round(line(4))
    assert kept.lines[0].startswith("round 4/5, accuracy 0.300, 2 kB, ")


def test_a_round_written_before_the_announcement_counts_once(tmp_path: Path) -> None:
    """Progress runs beside the run, which may be further than what it shows."""
    kept = Kept()
    lines = (json.dumps(line(number)) + "\n" for number in (1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    watch = SimulationProgress(kept, tmp_path)
    watch.begin(Expectation(5, 1.0, 0, 0), 2)
    watch.round(line(3))
    assert kept.lines[0].startswith("round 3/5, 1.5 kB, ")


def test_time_left_counts_rounds_since_the_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, clock = Kept(), iter([0.0, 100.0, 108.0])
    monkeypatch.setattr("fed.cli.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    gone_on_with(kept, tmp_path, 3).round(line(4))
    assert kept.lines[0].endswith(", 8.0 s left")


@pytest.mark.parametrize(
    ("earlier", "announced"),
    [
        (0, "about 3 min 20 s, 5 kB up and 10 kB down for 5 rounds"),
        (3, "about 1 min 20 s, 2 kB up and 4 kB down for 2 more rounds"),
        (4, "about 40 s, 1 kB up and 2 kB down for 1 more round"),
    ],
)
def test_what_is_still_to_do_is_announced(earlier: int, announced: str, tmp_path: Path) -> None:
    kept = Kept()
    gone_on_with(kept, tmp_path, earlier, wall_s=200.0)
    assert kept.lines == [announced]


def of_comparison(kept: Kept, **wall_s: float) -> ComparisonProgress:
    expected = {name: Expectation(2, each_s, 1_000, 1_000) for name, each_s in wall_s.items()}
    watch = ComparisonProgress(kept, expected.__getitem__, total=2 * len(wall_s), jobs=2)
    watch.begin([(name, seed) for name in wall_s for seed in (0, 1)])
    return watch


def test_a_comparison_counts_runs_and_names_the_last() -> None:
    kept = Kept()
    watch = of_comparison(kept, A=1.0, B=1.0)
    for name in ("A", "B"):
        for number in (1, 2):
            watch.round(name, 0, line(number))
        watch.end(name, 0, {"status": "finished", "final_test_accuracy": 0.75})
    watch.round("B", 1, line(1))
    assert kept.lines[-1].startswith("2 of 4 runs, B seed 0: accuracy 0.750, 2.5 kB, ")


def test_a_comparison_ends_at_its_end_also_if_runs_fail() -> None:
    kept = Kept()
    watch = of_comparison(kept, A=0.1, B=0.7)
    watch.round("A", 0, line(1))
    for name in ("A", "B"):
        for seed in (0, 1):
            watch.end(name, seed, {"status": "failed"})
    assert kept.lines[-1] == "4 of 4 runs, B seed 1: failed, 500 B, 0.0 s left"


def test_a_round_of_a_comparison_counts_by_its_time() -> None:
    kept = Kept()
    watch = of_comparison(kept, short=1.0, long=9.0)
    watch.round("short", 0, line(1))  # 0.5 s of 20 s
    assert kept.lines == []
    watch.round("long", 0, line(1))  # 5 s of 20 s
    assert len(kept.lines) == 1


@pytest.mark.parametrize(("wall_s", "lines"), [(9.0, []), (100.0, ["about 1 min 49 s, 8 kB for 4 runs"])])
def test_only_a_long_comparison_is_announced(wall_s: float, lines: list[str]) -> None:
    kept = Kept()
    of_comparison(kept, A=wall_s, B=wall_s / 11)
    assert kept.lines == lines


def test_lines_go_to_standard_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    with lines.running():
        lines.show(1, 1, "[bold]half[/] way")
    assert capsys.readouterr() == ("", "[bold]half[/] way\n")


def test_bar_goes_to_standard_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar()
    with bar.running():
        bar.say("about [an hour]")
        bar.show(1, 2, "half way")
    out, err = capsys.readouterr()
    assert out == ""
    assert "about [an hour]" in err
