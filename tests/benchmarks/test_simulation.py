"""The benchmark measures what it says, and puts it where it belongs."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.ratios import Ratio

ROOT = Path(__file__).resolve().parent.parent.parent
BEGIN, END = MARKERS = "<!-- figures: begin -->", "<!-- figures: end -->"


def measure(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/simulation.py", "--repetitions", "1", "--output", str(output), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def guard(other: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/guard.py", str(other), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_sides_do_the_same_work_and_are_compared(tmp_path: Path) -> None:
    sides = "ours-0,plain,lean,products"
    options = ("--parts", "rounds", "--workloads", "digits", "--sides", sides, "--seconds", "0.1")
    done = measure(tmp_path / "results.json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    digits = json.loads((tmp_path / "results.json").read_text())["workloads"]["digits"]
    medians = {name: side["median"] for name, side in digits["sides"].items()}
    assert list(medians) == sides.split(",")
    ratios = {other: ratio[0] for other, ratio in digits["ratios"]["ours-0"].items()}
    assert ratios == pytest.approx({other: medians["ours-0"] / medians[other] for other in ("plain", "lean")})
    assert digits["sides"]["ours-0"]["share_of_products"] == medians["ours-0"] / medians["products"] < 1
    assert all(side["accuracy"] > 0.85 for name, side in digits["sides"].items() if name != "products")


def test_intervals_hold_the_true_ratio_95_times_of_100() -> None:
    # Of 2000 intervals 1900 should hold it, with a standard deviation of 10.
    draws = np.random.default_rng(0).lognormal(0.5, 0.1, size=(2000, 2, 5))
    ratios = [Ratio.of(*pair) for pair in draws.tolist()]
    assert abs(sum(ratio.low <= 1 <= ratio.high for ratio in ratios) - 1900) < 50
    assert all(ratio.low < ratio.middle < ratio.high for ratio in ratios)


def test_of_one_pair_no_interval_is_known() -> None:
    assert list(Ratio.of([3.0], [2.0])) == pytest.approx([1.5, 0.0, np.inf])


@pytest.mark.long
def test_the_guard_sees_what_a_change_costs(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(slow)], check=True)
    module, step = slow / "server" / "coordinator.py", "        self._tasks += len(tasks)\n"
    module.write_text(module.read_text().replace(step, f"        __import__('time').sleep(0.01)\n{step}"))
    done = guard(slow, "--workloads", "digits", "--repetitions", "3", "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if "fed, in one process" in line)
    assert float(row.split("│")[3].split()[0]) > 3


@pytest.mark.long
def test_the_guard_wants_a_checkout(tmp_path: Path) -> None:
    said = f"error: {tmp_path} must be a checkout of this project, and has no fed\n"
    assert guard(tmp_path, "--workloads", "digits").stderr == said


@pytest.mark.long
def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    done = measure(tmp_path / "results.json", "--sides", "theirs")
    assert done.returncode == 2
    assert "no such name: theirs; known: ours-0" in done.stderr


def test_table_replaces_text_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert report.put_into(page, "new", MARKERS)
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", BEGIN, f"{END} {BEGIN}"])
def test_a_page_without_markers_stays_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(text)
    assert not report.put_into(page, "new", MARKERS)
    assert page.read_text() == text


def test_a_benchmark_ends_with_table_results_page_and_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, page, said = tmp_path / "results.json", tmp_path / "benchmarks.md", io.StringIO()
    page.write_text("\n".join(MARKERS))
    monkeypatch.setattr(report, "PAGE", page)
    found = {"machine": {"processor": "CPU", "cores": 2, "date": "2026-01-01"}, "versions": {"torch": "2"}, "load": 0.5}
    table = report.Table("Rounds", ["", "a second"], [["fed", "12.3"]])
    assert report.conclude(Console(file=said), found, [table], output, MARKERS, failures=["too slow"]) == 1
    assert json.loads(output.read_text()) == found
    where = "CPU, 2 cores, 2026-01-01; torch 2; load when it began: 0.5."
    text = f"{where}\n\nRounds\n\n|  | a second |\n| --- | ---: |\n| fed | 12.3 |"
    assert page.read_text() == f"{BEGIN}\n{text}\n{END}"
    assert "error: too slow" in said.getvalue()
