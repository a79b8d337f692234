"""A comparison's runs and figures: the same however they are run, whole however they end."""

import csv
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from torch import nn

import fed
from fed.cli.main import main
from fed.config.comparison import Repetition
from fed.errors import InvalidData, InvalidInput, OutputExists
from fed.reports.summary import ComparisonResult, row_of
from fed.reports.tables import columns, table
from fed.storage.comparison_reader import slugs
from fed.storage.run_folder import to_json

pytestmark = pytest.mark.xdist_group("compare")  # so that the fixture of many runs is made once
ROOT = Path(__file__).resolve().parents[2]
BASE = {
    "data": {"kind": "digits", "clients": 10},
    "model": {"kind": "logistic"},
    "rounds": {"count": 3, "cohort": 4},
}
SEVERAL = [
    {"name": "FedAvg"},
    {"name": "D-PSGD", "algorithm": {"kind": "dpsgd"}, "rounds.cohort": "all"},
    {"name": "Local", "algorithm": {"kind": "local"}},
    {"name": "Centralized", "algorithm": {"kind": "centralized"}},
]
DIVERGES = {"name": "too fast", "local.lr": 1e38}  # float32 ends at 3.4e38


def comparison(**keys: Any) -> fed.Comparison:
    return fed.Comparison(**{"base": BASE, "compare": SEVERAL[:2], **keys})


OWN_MODEL = {**BASE, "model": None}  # one is given in Python


def without_wall_time(result: ComparisonResult) -> Any:
    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(inner) for key, inner in value.items() if key != "wall_s"}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return clean([result.rows, result.runs])


class Watching:
    """Notes what it is told, and does something in the first round of a named variant."""

    def __init__(self, at: str | None = None, do: Any = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._at, self._do = at, do

    def begin(self, runs: Sequence[tuple[str, Repetition]]) -> None:
        self.events.append(("begin", list(runs)))

    def start(self, name: str, repetition: Repetition) -> None:
        self.events.append(("start", name, repetition))

    def round(self, name: str, repetition: Repetition, line: Mapping[str, Any]) -> None:
        self.events.append(("round", name, repetition, line["round"]))
        if name == self._at and line["round"] == 1:
            self._do()

    def end(self, name: str, repetition: Repetition, summary: Mapping[str, Any]) -> None:
        self.events.append(("end", name, repetition, summary["status"]))


def interrupt() -> None:
    raise KeyboardInterrupt


# The figures of a row, from lines that can be added by hand.


def line(number: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    return {
        "round": number,
        "virtual_s": 10.0 * number,
        "bytes_up": 3,
        "bytes_down": 4,
        "test_accuracy": accuracy,
        **more,
    }


def record(*accuracies: float | None, **more: Any) -> dict[str, Any]:
    metrics = [line(number, accuracy, **more) for number, accuracy in enumerate(accuracies, 1)]
    measured = [accuracy for accuracy in accuracies if accuracy is not None]
    totals = {"bytes_up": 3 * len(metrics), "bytes_down": 4 * len(metrics), "wall_s": 2.0, "virtual_s": 50.0}
    summary = {"status": "finished", "final_test_accuracy": measured[-1] if measured else None, "final_test_loss": 0.5}
    return {"metrics": metrics, "summary": summary | totals}


def test_row_holds_the_mean_and_the_sample_deviation_over_seeds() -> None:
    row = row_of("A", "fedavg", {0: record(0.1, 0.8), 1: record(0.2, 0.9), 2: record(0.3, 1.0)}, [0, 1, 2], None)
    assert row["final_test_accuracy"] == pytest.approx(0.9, abs=1e-15)
    assert row["final_test_accuracy_std"] == pytest.approx(0.1, abs=1e-15)  # sqrt((0.01 + 0 + 0.01) / 2)
    assert (row["final_test_loss"], row["final_test_loss_std"]) == (0.5, 0.0)
    assert (row["bytes_up"], row["bytes_down"], row["wall_s"], row["virtual_s"]) == (6, 8, 2.0, 50.0)
    assert (row["seeds"], row["status"], row["reason"]) == ([0, 1, 2], "finished", None)


def test_one_seed_has_no_deviation() -> None:
    assert row_of("A", "fedavg", {5: record(0.5)}, [5], None)["final_test_accuracy_std"] is None


def test_target_is_reached_in_the_first_round_at_it() -> None:
    runs = {0: record(None, 0.5, None, 0.9, 0.7), 1: record(None, 0.95), 2: record(0.1, 0.2)}
    row = row_of("A", "fedavg", runs, [0, 1, 2], 0.9)
    assert row["reached"] == 2
    assert row["rounds_to_target"] == 3.0  # rounds 4 and 2
    assert row["bytes_to_target"] == (4 * 7 + 2 * 7) / 2  # of rounds that were not evaluated too
    assert row["virtual_s_to_target"] == 30.0


def test_unreached_or_absent_target_gives_none() -> None:
    keys = ("rounds_to_target", "bytes_to_target", "virtual_s_to_target")
    missed = row_of("A", "fedavg", {0: record(0.1, 0.2)}, [0], 0.9)
    assert [missed[key] for key in keys] == [None] * 3
    assert missed["reached"] == 0
    assert row_of("A", "fedavg", {0: record(0.1, 0.2)}, [0], None)["reached"] is None


def test_row_takes_the_last_measured_accuracy_of_clients() -> None:
    first, second = record(0.1, 0.2), record(0.1, 0.2)
    first["metrics"][1] |= {"client_accuracy_mean": 0.6, "client_accuracy_std": 0.1}
    second["metrics"][0] |= {"client_accuracy_mean": 0.8, "client_accuracy_std": 0.3}
    row = row_of("A", "local", {0: first, 1: second}, [0, 1], None)
    assert row["client_accuracy_mean"] == pytest.approx(0.7, abs=1e-15)
    assert row["client_accuracy_std"] == pytest.approx(0.2, abs=1e-15)


def test_failed_run_counts_in_no_mean_and_is_named() -> None:
    failed = {"metrics": [line(1, 0.1)], "summary": {"status": "failed", "reason": "loss is NaN"}}
    row = row_of("A", "fedavg", {0: record(0.5), 3: failed}, [0, 3], None)
    assert (row["final_test_accuracy"], row["seeds"]) == (0.5, [0])
    assert (row["status"], row["reason"]) == ("failed", "seed 3: loss is NaN")


def test_missing_run_makes_a_row_interrupted() -> None:
    assert row_of("A", "fedavg", {0: record(0.5)}, [0, 1], None)["status"] == "interrupted"
    assert row_of("A", "fedavg", {}, [0, 1], 0.9)["final_test_accuracy"] is None


# Runs.


class Both(NamedTuple):
    """The same comparison, a failing variant among its own, run one by one and side by side."""

    one_by_one: ComparisonResult
    side_by_side: ComparisonResult
    watching: tuple[Watching, Watching]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    many = comparison(compare=[*SEVERAL, DIVERGES], seeds=[1, 0], target=0.3)
    first, second = Watching(), Watching()
    output = tmp_path_factory.mktemp("side-by-side")
    return Both(
        fed.compare(many, observer=first), fed.compare(many, jobs=2, output=output, observer=second), (first, second)
    )


def test_number_of_jobs_changes_no_bit(both: Both) -> None:
    assert without_wall_time(both.one_by_one) == without_wall_time(both.side_by_side)
    assert list(both.one_by_one.runs) == list(both.side_by_side.runs)


def test_printed_result_is_one_line_without_curves(both: Both) -> None:
    printed = str(both.one_by_one)
    assert printed.startswith("<ComparisonResult ")
    assert len(printed) < 500
    assert all(row["name"] in printed for row in both.one_by_one.rows)
    assert f"{DIVERGES['name']} (failed)" in printed


def test_run_is_what_simulate_gives_with_that_seed(both: Both) -> None:
    result = both.side_by_side
    run = fed.simulate(result.comparison.variants()["D-PSGD"].override({"seed": 1}))
    theirs = result.runs["D-PSGD"][1]["metrics"]
    assert [{**ours, "wall_s": 0} for ours in run.metrics] == [{**their, "wall_s": 0} for their in theirs]


def test_failed_run_is_a_row_and_others_continue(both: Both) -> None:
    for result in both[:2]:
        *others, failed = result.rows
        assert {row["status"] for row in others} == {"finished"}
        assert failed["status"] == "failed"
        assert failed["reason"].startswith("seed 0: ")
        assert "seed 1: " in failed["reason"]
        assert failed["final_test_accuracy"] is None


def test_clients_that_keep_models_have_accuracies_of_their_own(both: Both) -> None:
    rows = {row["name"]: row for row in both.one_by_one.rows}
    assert rows["Local"]["client_accuracy_mean"] == pytest.approx(rows["Local"]["final_test_accuracy"], abs=1e-12)
    assert rows["D-PSGD"]["client_accuracy_std"] > 0
    assert rows["FedAvg"]["client_accuracy_mean"] is None


def test_no_process_is_left(both: Both) -> None:
    assert multiprocessing.active_children() == []


def test_folder_holds_tables_picture_report_and_runs(both: Both) -> None:
    result = both.side_by_side
    assert result.directory is not None
    contents = json.loads((result.directory / "comparison.json").read_text(encoding="utf-8"))
    assert contents["status"] == "finished"
    assert contents["rows"] == result.rows
    assert contents["runs"]["FedAvg"]["1"] == result.runs["FedAvg"][1]["summary"]
    assert fed.Comparison(**contents["comparison"]).in_force() == result.comparison.in_force()
    with (result.directory / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [row["name"] for row in result.rows]
    assert [float(row["final_test_accuracy"]) for row in rows[:4]] == [
        row["final_test_accuracy"] for row in result.rows[:4]
    ]
    assert (rows[0]["seeds"], rows[4]["final_test_accuracy"]) == ("0 1", "")
    summary = json.loads((result.directory / "runs/d-psgd/seed-1/summary.json").read_text(encoding="utf-8"))
    assert summary == result.runs["D-PSGD"][1]["summary"]
    assert {path.name for path in result.directory.iterdir()} == {
        "comparison.json", "comparison.csv", "comparison.md", "comparison.tex", "comparison.svg", "report.html", "runs",
        "comparison.yaml",
    }  # fmt: skip


def test_without_output_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fed.compare(comparison()).directory is None
    assert list(tmp_path.iterdir()) == []


def test_comparison_comes_back_from_its_folder_with_curves(both: Both, tmp_path: Path) -> None:
    result = both.side_by_side
    assert result.directory is not None
    again = fed.ComparisonResult.load(result.directory)
    assert again.comparison.in_force() == result.comparison.in_force()
    assert (again.status, again.directory) == (result.status, result.directory)
    assert again.rows == json.loads(to_json(result.rows)), "NaN is None"
    assert {name: [*runs] for name, runs in again.runs.items()} == {name: [*runs] for name, runs in result.runs.items()}
    for name, runs in result.runs.items():
        for seed, run in runs.items():
            assert again.runs[name][seed] == json.loads(to_json(run))
    with pytest.raises(
        InvalidInput, match=r"must hold a comparison that has ended, got no comparison\.json: fed compare"
    ):
        fed.ComparisonResult.load(tmp_path)


def test_exported_comparison_has_each_runs_rows_by_variant_and_seed(both: Both, tmp_path: Path) -> None:
    assert both.side_by_side.directory is not None
    for what in ("metrics", "participation"):
        file = tmp_path / f"{what}.csv"
        assert main(["export", str(both.side_by_side.directory), "--to", str(file), "--what", what]) == 0
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [*csv.DictReader(lines)]
        assert list(rows[0])[:3] == ["variant", "seed", "round"]
        for name, runs in both.side_by_side.runs.items():
            for seed, run in runs.items():
                own = [row for row in rows if (row["variant"], row["seed"]) == (name, str(seed))]
                if what == "metrics":
                    assert [int(row["bytes_up"]) for row in own] == [line["bytes_up"] for line in run["metrics"]]
                else:
                    replied = [row for row in own if row["event"] == "replied"]
                    assert len(replied) == sum(line["replied"] for line in run["metrics"])


def test_folder_that_holds_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OutputExists, match="not an empty folder"):
        fed.compare(comparison(), output=tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_overwriting_removes_an_earlier_comparison_and_nothing_else(tmp_path: Path) -> None:
    fed.compare(comparison(compare=SEVERAL, seeds=[0]), output=tmp_path)
    mine = [tmp_path / "mine.txt", tmp_path / "runs" / "local" / "mine.txt"]
    for path in mine:
        path.write_text("mine")
    fed.compare(comparison(compare=[{"name": "other"}], seeds=[2]), output=tmp_path, overwrite=True)
    runs = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").rglob("*") if path.is_dir())
    assert runs == ["runs/local", "runs/other", "runs/other/seed-2"]
    assert all(path.read_text() == "mine" for path in mine)


def test_python_objects_replace_what_the_experiments_name() -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    pair = (inputs, inputs.sum(1, keepdim=True))
    data = fed.FederatedData(train={"a": pair, "b": pair}, test=pair)
    result = fed.compare(
        comparison(base={"rounds": {"count": 2}}),
        data=data,
        model=lambda: nn.Linear(3, 1),
        loss=nn.functional.mse_loss,
    )
    assert [row["final_test_accuracy"] for row in result.rows] == [None, None]
    assert all(row["final_test_loss"] < 5 for row in result.rows)


def test_a_loss_of_python_leaves_the_metrics_of_simulate() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)

    compared = fed.compare(comparison(compare=SEVERAL[:1]), loss=loss)
    alone = fed.simulate(fed.Experiment(**BASE), loss=loss)
    (run,) = compared.runs["FedAvg"].values()
    assert run["summary"]["metrics"] == alone.summary["metrics"] == {}
    assert run["summary"]["final_test_loss"] == alone.summary["final_test_loss"]
    assert compared.rows[0]["metric"] == "loss"


def test_objects_that_no_file_names_are_refused_before_any_run(tmp_path: Path) -> None:
    base = fed.Experiment(**BASE, loss=nn.CrossEntropyLoss(weight=torch.ones(10)))
    with pytest.raises(
        InvalidInput, match="ones that a file can hold, got loss of FedAvg given in Python as objects: name"
    ):
        fed.compare(comparison(base=base), output=tmp_path / "result")
    assert not (tmp_path / "result").exists()


@pytest.mark.usefixtures("undrawn")
def test_folds_have_folders_and_test_sets_of_their_own(tmp_path: Path) -> None:
    base = {**BASE, "rounds": {"count": 1, "cohort": 2}, "data": {"kind": "digits", "clients": 3}}
    result = fed.compare(comparison(base=base, folds=2, seeds=[4]), output=tmp_path)
    assert list(result.runs["FedAvg"]) == [(4, 1), (4, 2)]
    assert (tmp_path / "runs/fedavg/seed-4-fold-2/summary.json").is_file()
    contents = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert list(contents["runs"]["FedAvg"]) == ["4-fold-1", "4-fold-2"]
    (difference,) = result.differences
    found = contents["differences"]["to_the_baseline"]["D-PSGD"]
    assert contents["differences"]["baseline"] == "FedAvg"
    assert (found["difference"], found["difference_pairs"]) == (difference.mean, 2)
    with (tmp_path / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["difference"], float(rows[1]["difference"])) == ("", difference.mean)


def test_folds_of_data_given_in_python_are_refused() -> None:
    pair = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(InvalidInput, match="folds need data that the experiment names, got folds=2 and data given"):
        fed.compare(comparison(folds=2), data=fed.FederatedData({0: pair}))


def test_a_part_of_a_variant_is_not_given_twice() -> None:
    variant = {"name": "A", "model": {"kind": "logistic"}}
    with pytest.raises(InvalidInput, match=r"^A: model must be given once, got logistic in the experiment"):
        fed.compare(comparison(base=OWN_MODEL, compare=[variant]), model=lambda: nn.Linear(64, 10))


def test_objects_that_no_pickle_holds_stay_in_this_process() -> None:
    with pytest.raises(InvalidInput, match=r"the model given .* cannot be pickled \(.*\), so jobs must be 1, got 2"):
        fed.compare(
            comparison(base=OWN_MODEL), model=lambda: nn.Linear(64, 10), loss=nn.functional.cross_entropy, jobs=2
        )


def test_the_files_jobs_hold_unless_others_are_given() -> None:
    class Refused(Exception):
        pass

    def refused() -> nn.Module:
        raise Refused

    with pytest.raises(InvalidInput, match=r"cannot be pickled .* so jobs must be 1, got 2"):
        fed.compare(comparison(base=OWN_MODEL, jobs=2), model=refused, loss=nn.functional.cross_entropy)
    with pytest.raises(InvalidInput, match="the model"):
        fed.compare(comparison(base=OWN_MODEL, jobs=2), model=refused, loss=nn.functional.cross_entropy, jobs=1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_bad_input_found_in_a_run_leaves_no_folder(jobs: int, tmp_path: Path) -> None:
    crowd = {"name": "crowd", "data.clients": 100_000}
    with pytest.raises(InvalidData, match=r"data\.clients must be at most"):
        fed.compare(comparison(compare=[crowd, {"name": "B", "rounds.count": 10**5}]), jobs=jobs, output=tmp_path)
    assert multiprocessing.active_children() == []
    assert not (tmp_path / "comparison.json").exists()


def test_observer_sees_every_run_from_its_beginning_to_its_end(both: Both) -> None:
    runs = [(row["name"], seed) for row in both.one_by_one.rows for seed in (1, 0)]
    for watching in both.watching:
        assert watching.events[0] == ("begin", runs)
        for run in runs[:-2]:
            assert [event for event in watching.events if event[1:3] == run] == [
                ("start", *run), *(("round", *run, number) for number in (1, 2, 3)), ("end", *run, "finished"),
            ]  # fmt: skip
        assert all(("end", *run, "failed") in watching.events for run in runs[-2:])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("jobs", [1, 2])
def test_interruption_keeps_what_was_done_and_leaves_no_process(jobs: int, tmp_path: Path) -> None:
    # Side by side those with most work begin first, and the second run is never over before the first has begun.
    order = [{"name": "first", "rounds.count": 4}, {"name": "second", "rounds.count": 100_000}]
    order = order if jobs == 1 else order[::-1]
    with pytest.raises(KeyboardInterrupt):
        fed.compare(comparison(compare=order), output=tmp_path, jobs=jobs, observer=Watching("second", interrupt))
    assert multiprocessing.active_children() == []
    contents = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert contents["status"] == "interrupted"
    statuses = {row["name"]: row["status"] for row in contents["rows"]}
    assert statuses["second"] == "interrupted"
    assert jobs == 2 or statuses["first"] == "finished"
    assert "Interrupted" in (tmp_path / "report.html").read_text(encoding="utf-8")
    cut_short = json.loads((tmp_path / "runs/second/seed-0/summary.json").read_text(encoding="utf-8"))
    assert cut_short["status"] == "interrupted"
    assert cut_short["rounds"] >= 1


def test_process_that_dies_fails_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, signal\ndef model():\n    os.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    dies = {"name": "dies", "model": {"kind": "python:deadly:model"}, "rounds.count": 9}
    result = fed.compare(comparison(compare=[dies, {"name": "after"}, {"name": "last"}]), jobs=2)
    rows = {row["name"]: row for row in result.rows}
    assert rows["dies"]["status"] == "failed"
    assert "its process died with exit code -9" in rows["dies"]["reason"]
    assert [rows[name]["status"] for name in ("after", "last")] == ["finished", "finished"]
    assert multiprocessing.active_children() == []


def test_comparison_without_main_guard_ends_silently_in_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rerun = SimpleNamespace(name="worker of a comparison", _inheriting=True)
    monkeypatch.setattr("multiprocessing.current_process", lambda: rerun)
    with pytest.raises(SystemExit, match="1"):
        fed.compare(comparison(), jobs=2)


def test_slugs_are_distinct_and_stay_in_their_folder() -> None:
    names = ["../../etc", "..", "a/b", "a b", "A-B", "", "x" * 300, "local.lr=0.1, mu=2"]
    made = slugs(names)
    assert len(set(made.values())) == len(names)
    assert all("/" not in slug and slug.strip(".") and len(slug) < 70 for slug in made.values())
    assert made["local.lr=0.1, mu=2"] == "local.lr=0.1-mu=2"


def test_table_shows_names_as_they_stand(both: Both) -> None:
    result = both.one_by_one
    rows = [row | {"name": f"[red]{row['name']}[/red] :smile:"} for row in result.rows]
    console = Console(width=250, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(table(columns(ComparisonResult(result.comparison, rows, result.runs)), width=250))
    text = console.export_text()
    assert "[red]FedAvg[/red] :smile:" in text
    assert f"{result.rows[0]['final_test_accuracy']:.3f} ± " in text
    assert "rounds to 0.3" in text
    assert "failed" in text


@pytest.mark.long
def test_digits_example_is_in_the_order_that_theory_expects() -> None:
    result = fed.compare(fed.Comparison.load(ROOT / "examples" / "digits.yaml"), jobs=2)
    accuracy = {row["name"]: row["final_test_accuracy"] for row in result.rows}
    assert {row["status"] for row in result.rows} == {"finished"}
    assert all(accuracy["Local"] <= each <= accuracy["Centralized"] for each in accuracy.values())
    assert min(accuracy[name] for name in ("FedAvg", "FedProx", "FedAvgM", "BMUF")) > 0.9
