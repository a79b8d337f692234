"""A run's folder: whole files, a line a round, nobody's files lost."""

import json
import math
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticSerializationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fed
from fed.config import yaml
from fed.config.experiment import Experiment
from fed.errors import InvalidInput, OutputExists, RunFailed
from fed.storage.checkpoints import Checkpoints
from fed.storage.run_folder import RunFolder, clear_run, environment, state_of, to_json

LINE: dict[str, Any] = {"round": 1, "test_accuracy": 0.5, "train_loss": math.nan, "bytes_up": 2**60}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.begin(Experiment())
    return folder


def lines(folder: RunFolder) -> list[Any]:
    with (folder.path / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_an_empty_or_missing_folder_is_used(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "deep" / "deeper"):
        RunFolder(path).begin(Experiment())
        assert (path / "experiment.yaml").is_file()
    RunFolder(tmp_path / "later")
    assert not (tmp_path / "later").exists(), "before it begins, nothing is touched"


def test_a_folder_with_content_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match="is not an empty folder: choose another --output, or pass --overwrite"):
        RunFolder(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "notes.txt").rename(tmp_path / ".hidden")
    with pytest.raises(OutputExists):
        RunFolder(tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_overwritten_by_a_folder(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    with pytest.raises(OutputExists):
        RunFolder(path, overwrite=overwrite)
    assert path.read_text() == "mine"


def test_overwriting_replaces_a_run_and_leaves_other_files(folder: RunFolder) -> None:
    folder.append(LINE)
    folder.keep(nn.Linear(1, 1))
    folder.finish({"status": "finished"}, {"partition": None})
    (folder.path / "report.html").write_text("<p>old</p>")
    assert names(folder.path) == set(RunFolder.FILES) - {"models.safetensors", "tracking.json", "ledger.jsonl"}
    (folder.path / "notes.txt").write_text("mine")
    (folder.path / "tracking.json").write_text("{}")
    (folder.path / "data").mkdir()
    folder.checkpoints.mkdir()
    (folder.checkpoints / "round-000003.safetensors").write_bytes(b"")
    again = RunFolder(folder.path, overwrite=True)
    assert len(lines(folder)) == 1, "until the new run begins, the old one stays"
    again.begin(Experiment())
    begun = {"experiment.yaml", "environment.json", *RunFolder.LINES}
    assert names(folder.path) == {*begun, "notes.txt", "data"}, "nothing old beside a new run"
    assert (folder.path / "notes.txt").read_text() == "mine"
    assert lines(again) == []


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput, match=r"cannot be written to \(.+\): choose another --output"):
        RunFolder(tmp_path / "file" / "run").begin(Experiment())
    (tmp_path / "run" / "summary.json").mkdir(parents=True)
    (tmp_path / "run" / "environment.json").write_text("{}")
    with pytest.raises(InvalidInput, match="cannot be written to"):
        RunFolder(tmp_path / "run", overwrite=True).begin(Experiment())


def test_experiment_and_environment_are_written_at_the_beginning(tmp_path: Path) -> None:
    experiment = Experiment(name="Überblick", rounds={"count": 3})
    folder = RunFolder(tmp_path)
    folder.begin(experiment)
    assert names(tmp_path) == {"experiment.yaml", "environment.json", *RunFolder.LINES}
    assert Experiment.load(tmp_path / "experiment.yaml") == experiment
    assert yaml.load(tmp_path / "experiment.yaml") == experiment.dump(), "every default resolved"
    held = json.loads((tmp_path / "environment.json").read_text())
    assert held.keys() == {*environment(), "given"}
    assert (held["fed"], held["versions"]["torch"]) == (fed.__version__, torch.__version__)


def test_metrics_are_readable_while_the_run_continues(folder: RunFolder) -> None:
    for number in range(1, 4):
        folder.append({**LINE, "round": number, "name": "zwei\nZeilen ü"})
        assert [line["round"] for line in lines(folder)] == list(range(1, number + 1))
        assert (folder.path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert lines(folder)[0] == {**LINE, "train_loss": None, "name": "zwei\nZeilen ü"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def nulled(value: Any) -> Any:
    """A value as any reader of JSON sees it."""
    if isinstance(value, float) and (value != value or abs(value) == math.inf):
        return None
    if isinstance(value, dict):
        return {key: nulled(inner) for key, inner in value.items()}
    return [nulled(inner) for inner in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), json_values, max_size=3))
def test_what_is_not_finite_is_null_at_any_depth(
    tmp_path_factory: pytest.TempPathFactory, line: dict[str, Any]
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run") / "run")
    folder.path.mkdir()
    folder.append(line)
    folder.append({"tuple": (1.5, math.inf, (math.nan,))})
    assert lines(folder) == [nulled(line), {"tuple": [1.5, None, [None]]}]


def test_the_model_is_tensors_and_no_metadata(folder: RunFolder) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    module[2].weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).T)  # not contiguous
    module.append(nn.Linear(3, 4))
    module[3].weight = module[0].weight  # tied
    folder.keep(module)
    path = folder.path / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() is None
    loaded = load_file(path)
    assert loaded.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_what_a_state_holds_beside_tensors_is_left_out(folder: RunFolder) -> None:
    class Remembering(nn.Linear):
        def get_extra_state(self) -> dict[str, str]:
            return {"notes": "mine"}

    folder.keep(Remembering(1, 1))
    assert load_file(folder.path / "model.safetensors").keys() == {"weight", "bias"}


def test_where_there_is_a_summary_all_else_is_there(folder: RunFolder) -> None:
    folder.keep(nn.Linear(1, 1))
    with pytest.raises(PydanticSerializationError):
        folder.finish({"status": "finished"}, {"graph": object()})
    assert "summary.json" not in names(folder.path)
    folder.finish({"status": "finished", "final_test_loss": math.inf}, {"graph": "ü"})
    assert json.loads((folder.path / "summary.json").read_text()) == {"status": "finished", "final_test_loss": None}
    assert json.loads((folder.path / "population.json").read_text(encoding="utf-8")) == {"graph": "ü"}
    assert names(folder.path) == set(RunFolder.FILES) - {
        *("models.safetensors", "tracking.json", "report.html", "ledger.jsonl")
    }


# Resuming


WHILE_IT_RUNS = {"experiment.yaml", "environment.json", *RunFolder.LINES, "model.safetensors"}


def run_of(folder: RunFolder, rounds: int) -> bytes:
    for number in range(1, rounds + 1):
        folder.append({"round": number, "asked": [7, "ann"]}, name="participation.jsonl")
        folder.append({**LINE, "round": number})
    return (folder.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("after", [0, 1, 3, 4])
def test_resumed_run_has_its_earlier_lines_and_no_summary(folder: RunFolder, after: int) -> None:
    whole = run_of(folder, 4)
    folder.keep(nn.Linear(1, 1))
    folder.finish({"status": "interrupted"}, {})
    (folder.path / "report.html").write_text("<p></p>")
    again = RunFolder.existing(folder.path)
    again.resume(after)
    assert [*again.lines()] == [{**LINE, "round": number, "train_loss": None} for number in range(1, after + 1)]
    assert (folder.path / "metrics.jsonl").read_bytes() == b"".join(whole.splitlines(keepends=True)[:after])
    asked = [f'{{"round":{number},"asked":[7,"ann"]}}\n' for number in range(1, after + 1)]
    assert (folder.path / "participation.jsonl").read_text() == "".join(asked)
    assert names(folder.path) == WHILE_IT_RUNS
    assert state_of(folder.path) == "unfinished"


def test_a_long_run_is_resumed_line_by_line(folder: RunFolder) -> None:
    rounds = 5000
    lines = b"".join(to_json({**LINE, "round": number}).encode() + b"\n" for number in range(1, rounds + 1))
    for name in RunFolder.LINES:
        (folder.path / name).write_bytes(lines)
    tracemalloc.start()
    try:
        assert folder.recorded_rounds() == rounds
        folder.resume(rounds - 1)
        assert sum(1 for _ in folder.lines()) == rounds - 1
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(lines) / 5


def test_torn_metrics_line_is_ignored_and_dropped_at_resume(folder: RunFolder) -> None:
    whole = run_of(folder, 3)
    lines = whole.splitlines(keepends=True)
    for length in range(len(lines[2])):
        (folder.path / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:length])
        assert folder.recorded_rounds() == 2
        RunFolder.existing(folder.path).resume(2)
        assert [line["round"] for line in folder.lines()] == [1, 2]
        folder.append({**LINE, "round": 3})
        assert (folder.path / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\0" * 100 + b"}\n", b"{}\n", b"null\n", b"\n", b"\xff\xfe\n"])
def test_torn_line_after_a_power_loss_is_ignored(folder: RunFolder, tail: bytes) -> None:
    whole = run_of(folder, 2)
    (folder.path / "metrics.jsonl").write_bytes(whole + tail)
    RunFolder.existing(folder.path).resume(2)
    assert len([*folder.lines()]) == 2
    assert (folder.path / "metrics.jsonl").read_bytes() == whole


def test_metrics_that_are_damaged_are_told_and_left_alone(folder: RunFolder) -> None:
    whole = run_of(folder, 3)
    folder.finish({"status": "interrupted"}, {})
    (folder.path / "metrics.jsonl").write_bytes(b"rubbish\n" + whole)
    with pytest.raises(InvalidInput, match=r"metrics.jsonl: line 1 must be a round's metrics, got b'rubbish': restore"):
        folder.resume(3)
    assert state_of(folder.path) == "interrupted"
    (folder.path / "metrics.jsonl").unlink()
    assert folder.recorded_rounds() == 0


def test_cutting_back_is_whole_or_not_at_all(folder: RunFolder) -> None:
    whole = run_of(folder, 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(RunFailed, match="File too large"):
            folder.resume(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder.path / "metrics.jsonl").read_bytes() == whole
    folder.sync()


def test_only_a_run_can_be_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        with pytest.raises(
            InvalidInput, match="must be the folder of a run, got none there: fed runs lists what there"
        ):
            RunFolder.existing(path)


def test_a_run_that_is_overwritten_takes_its_checkpoints_with_it(folder: RunFolder) -> None:
    Checkpoints(folder.checkpoints, 2).write(3, None)
    (folder.checkpoints / ".round-000004.safetensors.77").write_bytes(b"half")
    RunFolder(folder.path, overwrite=True).begin(Experiment())
    assert not folder.checkpoints.exists()
    Checkpoints(folder.checkpoints, 2).write(3, None)
    (folder.checkpoints / "notes.txt").write_text("mine")
    RunFolder(folder.path, overwrite=True).begin(Experiment())
    assert names(folder.checkpoints) == {"notes.txt"}


def test_interrupted_clearing_leaves_an_overwritable_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.finish({"status": "finished"}, {})
    for stop in range(1, 6):
        unlink, calls = Path.unlink, iter(range(stop))

        def stops(path: Path, missing_ok: bool = False, calls: Any = calls, unlink: Any = unlink) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            unlink(path, missing_ok)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", stops)
            with pytest.raises(KeyboardInterrupt):
                clear_run(folder.path)
        RunFolder(folder.path, overwrite=True)
