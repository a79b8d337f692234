"""A comparison that is broken off and resumed has the table of an undisturbed one, but for wall time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.config import yaml
from fed.errors import InvalidInput, OutputExists, RunFailed
from fed.reports.summary import ComparisonResult
from fed.simulations.comparison_folder import kept_comparison
from fed.simulations.existing_runs import compare_runs, found
from fed.storage.atomic_files import held
from tests.simulations.test_compare import DIVERGES, SEVERAL, Watching, interrupt, without_wall_time

pytestmark = pytest.mark.xdist_group("compare")
BASE = {
    "data": {"kind": "digits", "clients": 10},
    "model": {"kind": "logistic"},
    "rounds": {"count": 3, "cohort": 4},
    "checkpoints": {"every": 1},
}


@pytest.fixture(autouse=True)
def plain_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take longer to draw than these runs; the tests of reports draw them."""
    monkeypatch.setattr("fed.simulations.comparison_folder.comparison_report", lambda *_: "drawn")
    monkeypatch.setattr("fed.simulations.comparison_folder.comparison_svg", lambda *_: None)


def comparison(**keys: Any) -> fed.Comparison:
    return fed.Comparison(**{"base": BASE, "compare": [*SEVERAL[:2], DIVERGES], "seeds": [0, 1], "target": 0.3, **keys})


class Broken(Watching):
    """Breaks a comparison off at the end of one of its rounds."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds

    def round(self, *of_it: Any) -> None:
        self._rounds -= 1
        if not self._rounds:
            interrupt()


def in_words(folder: Path) -> Any:
    """All that a comparison's folder tells, but for times, versions and the command."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if key not in ("wall_s", "environment")}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return clean(json.loads((folder / "comparison.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ComparisonResult:
    return fed.compare(comparison(), output=tmp_path_factory.mktemp("undisturbed") / "whole")


@pytest.fixture
def copied(undisturbed: ComparisonResult, tmp_path: Path) -> Path:
    assert undisturbed.directory is not None
    return Path(shutil.copytree(undisturbed.directory, tmp_path / "copy"))


def test_half_written_folder_goes_on_to_the_same_table(undisturbed: ComparisonResult, copied: Path) -> None:
    runs = copied / "runs"
    (runs / "fedavg/seed-0/summary.json").unlink()  # under way when the process was killed
    (runs / "fedavg/seed-0/.summary.json.77").write_bytes(b'{"sta')
    shutil.rmtree(runs / "fedavg/seed-1")  # not begun
    torn = runs / "d-psgd/seed-0/summary.json"
    torn.write_bytes(torn.read_bytes()[:20])
    lines = runs / "d-psgd/seed-1/metrics.jsonl"
    lines.write_bytes(lines.read_bytes()[:-30])  # a summary that outlived the end of its metrics
    for path in (runs / "d-psgd/seed-1/checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    (runs / "too-fast/seed-0/experiment.yaml").unlink()  # killed as it began
    for name in ("comparison.json", "report.html"):
        (copied / name).unlink()
    watch = Watching()
    again = fed.compare(comparison(), output=copied, resume=True, observer=watch)
    assert without_wall_time(again) == without_wall_time(undisturbed)
    assert undisturbed.directory is not None
    assert in_words(copied) == in_words(undisturbed.directory)
    assert (copied / "report.html").is_file()
    assert watch.events[0] == ("begin", [(name, seed) for name in ("FedAvg", "D-PSGD", "too fast") for seed in (0, 1)])


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_interrupted_comparison_goes_on_where_it_stopped(
    jobs: int, undisturbed: ComparisonResult, tmp_path: Path
) -> None:
    for earlier in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            fed.compare(comparison(), output=tmp_path, jobs=jobs, resume=earlier > 0, observer=Broken(2 + 3 * earlier))
    watch = Watching()
    again = fed.compare(comparison(), output=tmp_path, jobs=jobs, resume=True, observer=watch)
    assert without_wall_time(again) == without_wall_time(undisturbed)
    assert jobs == 2 or watch.events[0][1][0] == ("FedAvg", 1), "one run was whole"


def test_a_comparison_resumed_from_its_folder_keeps_its_settings(undisturbed: ComparisonResult, copied: Path) -> None:
    again = fed.compare(kept_comparison(copied), output=copied, resume=True)
    assert undisturbed.directory is not None
    assert in_words(copied) == in_words(undisturbed.directory)
    bases = [fed.Experiment(**{**one.comparison.base, "seed": 0}).dump() for one in (again, undisturbed)]
    assert bases[0] == bases[1], "a report says by what each variant differs from it"


def test_finished_comparison_is_read_and_not_run_again(undisturbed: ComparisonResult, copied: Path) -> None:
    for name in ("too-fast",):  # whose runs had failed, and would be tried again
        shutil.rmtree(copied / "runs" / name)
    two = comparison(compare=SEVERAL[:2])
    plan = yaml.load(copied / "comparison.yaml")
    plan["compare"] = [variant for variant in plan["compare"] if variant["name"] != "too fast"]
    (copied / "comparison.yaml").write_text(yaml.dump(plan), encoding="utf-8")
    watch = Watching()
    again = fed.compare(two, output=copied, resume=True, observer=watch)
    assert watch.events == [("begin", [])]
    assert again.rows == undisturbed.rows[:2], "wall time too"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base": {**BASE, "rounds": {"count": 4, "cohort": 4}}}, r"rounds.count is 3 in .*comparison.yaml for FedAvg"),
        ({"seeds": [0, 2]}, r"seeds are \[0, 1\] in .*comparison.yaml, got \[0, 2\]"),
        ({"compare": SEVERAL[:2]}, r"variants are \['FedAvg', 'D-PSGD', 'too fast'\] in .*, got"),
        ({"vary": "data"}, "vary are both in"),
    ],
)
def test_changed_comparison_is_refused_with_what_differs(
    changed: dict[str, Any], message: str, undisturbed: ComparisonResult
) -> None:
    with pytest.raises(InvalidInput, match=message):
        fed.compare(comparison(**changed), output=undisturbed.directory, resume=True)


def test_changed_run_or_other_parts_are_refused(copied: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nothing given in Python, got loss: call fed.compare\(comparison, out"):
        fed.compare(comparison(), output=copied, resume=True, loss=nn.functional.cross_entropy)
    file = copied / "runs/fedavg/seed-0/environment.json"
    kept = json.loads(file.read_bytes())
    kept["sha256"]["data"] = "0" * 64
    file.write_text(json.dumps(kept))
    with pytest.raises(InvalidInput, match="FedAvg: a run is resumed with the data that it began with"):
        fed.compare(comparison(), output=copied, resume=True)
    file = copied / "runs/fedavg/seed-0/experiment.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("lr: 0.1", "lr: 0.2"), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"local.lr is 0.2 in .*seed-0/experiment.yaml, got 0.1"):
        fed.compare(comparison(), output=copied, resume=True)


def test_resume_needs_a_folder_with_a_comparison(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"must hold a comparison to resume, got no comparison\.yaml"):
        fed.compare(comparison(), output=tmp_path / "none", resume=True)
    with pytest.raises(InvalidInput, match="resume needs the folder of a comparison, got none"):
        fed.compare(comparison(), resume=True)
    assert not (tmp_path / "none").exists()


def test_second_comparison_in_one_folder_ends_at_once(copied: Path, tmp_path: Path) -> None:
    before = in_words(copied)
    with held(copied, ""):
        for resume in (True, False):
            with pytest.raises(InvalidInput, match="is in use by another process"):
                fed.compare(comparison(), output=copied, resume=resume, overwrite=not resume)
    assert in_words(copied) == before

    class Meanwhile(Watching):
        """Has another comparison end in the folder after this one has found it empty."""

        def begin(self, runs: Any) -> None:
            shutil.copy(copied / "comparison.json", tmp_path / "new")

    (tmp_path / "new").mkdir()
    with pytest.raises(OutputExists):
        fed.compare(comparison(), output=tmp_path / "new", observer=Meanwhile())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["comparison.json"]


def test_full_disk_at_the_end_is_told_with_the_remedy(
    undisturbed: ComparisonResult, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    shutil.rmtree(copied / "runs/too-fast")
    with monkeypatch.context() as patched:
        patched.setattr("fed.simulations.comparison_folder.ComparisonFolder._write", full)
        with pytest.raises(RunFailed, match=r"No space left.*go on with fed compare --resume"):
            fed.compare(comparison(), output=copied, resume=True)
    assert (copied / "runs/too-fast/seed-1/metrics.jsonl").is_file()


# Parts given in Python.

PAIR = (torch.arange(60.0).reshape(20, 3) / 60, torch.arange(20.0).reshape(20, 1) / 20)


def linear() -> nn.Module:
    return nn.Linear(3, 1)


def never_finite(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric that is undefined on these samples, as AUROC is on one class."""
    return (output - target).mean() * float("nan")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_parts_of_python_are_resumed_and_go_to_other_processes(jobs: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "data": fed.FederatedData(train=dict.fromkeys("abcd", PAIR), test=PAIR),
        "model": linear,
        "loss": nn.functional.mse_loss,
        "metric": {"undefined": never_finite},
    }
    base = {"rounds": {"count": 2}, "checkpoints": {"every": 1}}
    two = comparison(base=base, compare=[{"name": "FedAvg"}, {"name": "BMUF", "algorithm": "bmuf"}], seeds=[0])
    alone = fed.compare(two, **given)
    with pytest.raises(KeyboardInterrupt):
        fed.compare(two, output=tmp_path, **given, observer=Watching("BMUF", interrupt))
    with pytest.raises(InvalidInput, match=r"call fed.compare\(comparison, data=…, model=…, loss=…, metric=…, output"):
        fed.compare(two, output=tmp_path, resume=True)
    again = fed.compare(two, output=tmp_path, resume=True, jobs=jobs, **given)
    assert str(without_wall_time(again)) == str(without_wall_time(alone)), "NaN is NaN again"
    assert "nan" in str(again.rows[0]["final_test_undefined"])


# Runs that exist.


def test_runs_that_exist_have_the_table_of_their_comparison(undisturbed: ComparisonResult, tmp_path: Path) -> None:
    assert undisturbed.directory is not None
    runs = undisturbed.directory / "runs"
    result = fed.compare_runs([str(runs / "fedavg"), runs / "d-psgd/seed-0", runs / "d-psgd/seed-1"], output=tmp_path)
    untargeted = [
        {key: value for key, value in row.items() if not key.endswith("_to_target") and key != "reached"}
        for row in undisturbed.rows[:2]
    ]
    assert [{key: row[key] for key in of} for row, of in zip(result.rows, untargeted, strict=True)] == untargeted
    assert [one.flat() for one in result.differences] == [
        one.flat() for one in fed.ComparisonResult.load(tmp_path).differences
    ]
    again = fed.ComparisonResult.load(tmp_path)
    assert len(again.runs["D-PSGD"][1]["metrics"]) == 3, "curves are found where the runs are"
    assert not (tmp_path / "comparison.yaml").exists()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (lambda runs, copy: [runs / "fedavg/seed-0"], "needs two of them, got one"),
        (lambda runs, copy: [runs / "fedavg", copy / "runs/fedavg"], "are runs of one experiment with one seed"),
        (lambda runs, copy: [runs / "fedavg", copy / "empty"], "must hold runs, got none"),
        (lambda runs, copy: [runs / "too-fast"], "needs a run that has finished, got none"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    places: Callable[[Path, Path], list[Path]], message: str, undisturbed: ComparisonResult, copied: Path
) -> None:
    assert undisturbed.directory is not None
    (copied / "empty").mkdir()
    with pytest.raises(InvalidInput, match=message):
        compare_runs(found(places(undisturbed.directory / "runs", copied)), output=copied.parent / "result")
    assert not (copied.parent / "result").exists()


def test_runs_of_other_data_are_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, clients, lr in (("a", 5, 0.1), ("b", 5, 0.2), ("c", 6, 0.1)):
        keys: dict[str, Any] = {"name": name, "data": {"clients": clients}, "local": {"lr": lr}, "rounds": {"count": 1}}
        fed.simulate(fed.Experiment(**keys), output=tmp_path / name)
    fed.compare_runs([tmp_path / name for name in "abc"], output=tmp_path / "compared")
    told = [record.getMessage() for record in caplog.records if "other data" in record.getMessage()]
    assert told == ["c has other data than a: their difference is that of the data, too"]


def test_folder_of_the_runs_themselves_is_no_output(copied: Path) -> None:
    with pytest.raises(InvalidInput, match="must be another folder than those of the runs"):
        compare_runs(found([copied]), output=copied, overwrite=True)
    assert (copied / "runs/fedavg/seed-0/summary.json").is_file()


def test_variants_of_one_name_have_their_folders(tmp_path: Path) -> None:
    base: dict[str, Any] = {"data": {"clients": 5}, "rounds": {"count": 1}}
    for place, lr in (("a", 0.1), ("b", 0.2)):
        for seed in (0, 1):
            experiment = fed.Experiment(**base, name="one", seed=seed, local={"lr": lr})
            fed.simulate(experiment, output=tmp_path / place / "fedavg" / f"seed-{seed}")
    result = fed.compare_runs([tmp_path / "a", tmp_path / "b"], output=tmp_path / "compared")
    assert [row["name"] for row in result.rows] == [str(tmp_path / place / "fedavg") for place in "ab"]
