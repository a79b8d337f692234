"""``fed simulate --resume``: what it says of whole, damaged, edited and foreign folders, and of a disk that is full."""

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.cli.main import main
from fed.server.observer import Event, RoundEnded
from fed.server.recording import RunFiles
from fed.storage.atomic_files import held
from fed.storage.checkpoint_files import file_name
from fed.storage.checkpoints import Checkpoints
from tests.fed.cli.commands import Result, Run, runner
from tests.simulations.durable_runs import DAMAGES, left_in
from tests.thinned import thinned

EXPERIMENT = """
name: tiny
data: {kind: digits, clients: 10}
model: {kind: logistic}
rounds: {kind: buffered, buffer: 2, concurrency: 4, count: 6}
devices: {kind: lognormal, failure: 0.1}
checkpoints: {every: 2, keep: 2}
simulation: {workers: 0}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT, encoding="utf-8")
    return runner(tmp_path, monkeypatch, capsys, "simulate")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was interrupted after round 5, and with the same run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("tiny.yaml").write_text(EXPERIMENT, encoding="utf-8")
        assert main(["simulate", "tiny.yaml", "--output", "whole"]) == 0
        patch.setattr("fed.server.recording.RunFiles.observe", write_then_interrupt_after(5))
        assert main(["simulate", "tiny.yaml", "--output", "run"]) == 130
    return folder


@pytest.fixture
def interrupted(run: Run, made: Path) -> Path:
    """The folder of a run that was interrupted after round 5."""
    shutil.copytree(made / "run", "run")
    return Path("run")


@pytest.fixture
def whole(run: Run, made: Path) -> dict[str, Any]:
    """What the same run leaves that nothing interrupts."""
    shutil.copytree(made / "whole", "whole")
    return left_in(Path("whole"))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def write_then_interrupt_after(number: int) -> Callable[[RunFiles, Event], None]:
    write = RunFiles.observe

    def told(files: RunFiles, event: Event) -> None:
        write(files, event)
        if isinstance(event, RoundEnded) and event.round == number:
            raise KeyboardInterrupt

    return told


def refused(result: Result, message: str, code: int = 2) -> None:
    assert result.code == code, result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert message in errors[0]
    assert "Traceback" not in result.err


def test_an_interrupted_run_goes_on(run: Run, interrupted: Path, whole: dict[str, Any]) -> None:
    result = run("--resume", "run")
    assert result.code == 0
    assert result.out.splitlines()[-1] == "run"
    assert left_in(interrupted) == whole


def test_resumed_run_that_is_stopped_reports_earlier_rounds(
    run: Run, interrupted: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fed.server.training_loop.TrainingLoop._round", interrupt)
        result = run("--resume", "run")
    assert result.code == 130
    assert result.err.splitlines() == [
        "stopped after 4 rounds; what was done is kept in run",
        "go on with: fed simulate --resume run",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("fed.simulations.simulate.Estimate", interrupt)
        assert run("--resume", "run").err == "stopped before another round; run is as it was\n"
        assert run("tiny.yaml", "--output", "new").err == "stopped before the first round\n"
    assert run("--resume", "run").code == 0
    assert left_in(interrupted) == whole


def test_a_running_run_cannot_be_resumed_by_another_process(run: Run, interrupted: Path, whole: dict[str, Any]) -> None:
    files = {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()}
    with held(interrupted, "wait"):
        refused(run("--resume", "run"), "run is in use by another process")
        refused(run("tiny.yaml", "--output", "run", "--overwrite"), "run is in use by another process")
    assert {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()} == files
    assert run("--resume", "run").code == 0
    assert left_in(interrupted) == whole


def test_a_run_goes_on_where_it_was_begun(run: Run, interrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "--resume", "run", "--insecure", "--listen", "127.0.0.1:0"]) == 2
    assert "run is a simulation: resume it by fed simulate --resume run" in capsys.readouterr().err


def test_nodes_are_not_simulated(run: Run, interrupted: Path) -> None:
    checkpoints = Checkpoints(interrupted / "checkpoints", 2)
    kept = checkpoints.newest()
    assert kept is not None
    shapes = {**kept[1]["fingerprint"]["shapes"], "clients": None}
    checkpoints.write(kept[0] + 1, {**kept[1], "fingerprint": {**kept[1]["fingerprint"], "shapes": shapes}})
    refused(run("--resume", "run"), "run is a run on real nodes: resume it by fed server --resume run")


def test_a_finished_run_prints_its_summary(run: Run, whole: dict[str, Any]) -> None:
    files = {path: path.read_bytes() for path in Path("whole").rglob("*") if path.is_file()}
    result = run("--resume", "whole")
    assert (result.code, result.out.splitlines()[-1]) == (0, "whole")
    assert result.out.startswith("6 rounds in ")
    result = run("--resume", "whole", "--json")
    assert json.loads(result.out)["status"] == "finished"
    assert {path: path.read_bytes() for path in Path("whole").rglob("*") if path.is_file()} == files


def test_a_run_that_its_budget_has_ended_says_so_again(run: Run) -> None:
    keys = {"data": {"kind": "digits", "clients": 10}, "rounds": {"count": 30, "cohort": 5}, "model": "logistic"}
    keys["privacy"] = {"noise_multiplier": 1.0, "budget_epsilon": 10}
    keys["checkpoints"] = {"every": 2}
    Path("private.yaml").write_text(json.dumps(keys), encoding="utf-8")
    first = run("private.yaml", "--output", "run")
    again = run("--resume", "run")
    assert again.code == first.code == 0
    assert again.out == first.out
    assert " at δ = 1e-05" in first.out
    reason = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))["reason"]
    assert "would pass privacy.budget_epsilon = 10" in reason
    larger = "; a larger budget lets it: --set privacy.budget_epsilon=…"
    assert again.err == f"this run has ended, and does not go on: {reason}{larger}\n"
    assert run("--resume", "run", "--set", "privacy.budget_epsilon=10").err == again.err
    assert run("--resume", "run", "--set", "rounds.count=40").code == 2
    whole = run("private.yaml", "--output", "whole", "--set", "privacy.budget_epsilon=20")
    later = run("--resume", "run", "--set", "privacy.budget_epsilon=20")
    assert later.code == 0
    assert outcome(later.out) == outcome(whole.out) != outcome(first.out)


def outcome(said: str) -> str:
    """Line on a run's outcome, without its time."""
    return re.sub(" in [^,]+,", ",", said.splitlines()[0])


def test_nodes_are_not_told_of_the_end_without_credentials(
    whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    spool = Path(".whole.spool")
    spool.mkdir()  # of a server that was killed before it had told its nodes
    capsys.readouterr()
    assert main(["server", "--resume", "whole"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("6 rounds in ")
    assert "--credentials" in said.err
    assert spool.exists()
    spool.rmdir()
    assert main(["server", "--resume", "whole"]) == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_named(damage: str, run: Run, interrupted: Path, whole: dict[str, Any]) -> None:
    newest, before = (interrupted / "checkpoints" / file_name(number) for number in (4, 2))
    DAMAGES[damage](before)
    kept = newest.read_bytes()
    DAMAGES[damage](newest)
    files = {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()}
    result = run("--resume", "run")
    refused(result, f"there must be a whole checkpoint to resume from, got {newest} ")
    assert str(before) in result.err
    assert {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()} == files
    newest.write_bytes(kept)
    assert run("--resume", "run").code == 0
    assert left_in(interrupted) == whole


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 6", "count: 9", "rounds.count is 6 in the checkpoint of round 4, got 9: take that back"),
        ("seed: 0", "seed: 1", "seed is 0 in the checkpoint of round 4, got 1: take that back"),
        ("buffer: 2", "buffer: two", "rounds.buffer"),
        ("seed: 0", "sed: 0", "sed: unknown key"),
        ("seed: 0", "[", "experiment.yaml"),
    ],
)
def test_an_experiment_that_was_edited_is_refused(
    old: str, new: str, message: str, run: Run, interrupted: Path
) -> None:
    file = interrupted / "experiment.yaml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    refused(run("--resume", "run"), message)
    assert json.loads((interrupted / "summary.json").read_text(encoding="utf-8"))["status"] == "interrupted"
    file.write_text(text, encoding="utf-8")
    assert run("--resume", "run").code == 0


@pytest.mark.parametrize(
    "arguments", [("tiny.yaml",), ("--set", "seed=1"), ("--output", "other"), ("--overwrite",), ("tiny.yaml", "--json")]
)
def test_it_goes_alone(arguments: tuple[str, ...], run: Run) -> None:
    refused(
        run("--resume", "run", *arguments),
        "--resume takes the experiment from the run's folder: give that folder and no other options",
    )


def test_what_is_no_run_is_refused(run: Run, interrupted: Path) -> None:
    refused(run(), "fed simulate needs an experiment, got none: give a file, or --resume DIR")
    for path in (".", "none", "tiny.yaml"):
        refused(run("--resume", path), "must be the folder of a run, got none there: fed runs lists what there is")
    (interrupted / "environment.json").write_text("[]")
    refused(run("--resume", "run"), "environment.json must be a run's, as it was written, got something else: restore")
    (interrupted / "experiment.yaml").unlink()
    refused(run("--resume", "run"), "experiment.yaml must hold the experiment to resume, got no such file: restore it")
    assert run("tiny.yaml", "--output", "run", "--overwrite").code == 0


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, target, label_smoothing=0.1)


@pytest.mark.parametrize("name", ["data", "model", "loss"])
def test_objects_given_in_python_are_unknown_to_the_command_line(name: str, run: Run) -> None:
    data = fed.FederatedData(train={client: (torch.randn(4, 64), torch.arange(4)) for client in range(10)})
    given = {"data": data, "model": torch.nn.Linear(64, 10), "loss": loss}[name]
    keys: Any = {name: given}
    fed.simulate(fed.Experiment.load("tiny.yaml").override({name: None}), output="mine", **keys)
    Path("mine/summary.json").unlink()
    refused(run("--resume", "mine"), f"call fed.simulate(experiment, {name}=…, output='mine', resume=True)")


# A full disk

WRITES = {
    "metrics": "metrics.jsonl",
    "checkpoint": "round-000004.safetensors",
    "model": "model.safetensors",
    "population": "population.json",
    "summary": "summary.json",
}


class FullDisk:
    """Has no room left for files of one name."""

    def __init__(self, name: str, after: int) -> None:
        self._name, self._left = name, after

    def __call__(self, path: Path, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        if self._name in path.name and mode in ("wb", "ab"):
            self._left -= 1
            if self._left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return OPEN(path, mode, *arguments, **more)


OPEN = Path.open


@pytest.mark.parametrize("what", WRITES)
def test_a_full_disk_stops_the_run_with_one_sentence(
    what: str, run: Run, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(WRITES[what], after=5 if what == "metrics" else 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *given, **more: disk(*given, **more))
        refused(run("tiny.yaml", "--output", "run"), "No space left on device", code=1)
    folder = Path("run")
    assert not any(folder.rglob(".*"))
    assert (folder / "summary.json").is_file() == (what in ("metrics", "checkpoint"))
    if (folder / "summary.json").is_file():
        assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["status"] == "failed"
    assert run("--resume", "run").code == 0
    assert left_in(folder) == whole


def test_full_disk_before_the_first_round_costs_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("environment.json", "experiment.yaml", "metrics.jsonl"):
        disk = FullDisk(name, after=0)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda *given, disk=disk, **more: disk(*given, **more))
            refused(run("tiny.yaml", "--output", name), "(No space left on device): choose another --output")
        again = ["--overwrite"] if (Path(name) / "environment.json").exists() else []
        assert run("tiny.yaml", "--output", name, *again).code == 0


def test_full_disk_at_a_resume_leaves_the_run_resumable(
    run: Run, interrupted: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk("metrics.jsonl", after=0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *given, **more: disk(*given, **more))
        refused(run("--resume", "run"), "make room there that this process may write to, then resume", code=1)
    assert run("--resume", "run").code == 0
    assert left_in(interrupted) == whole


@pytest.mark.parametrize("limit_bytes", thinned([300, 1, 900, 2900, 4000, 5500], quick=3))
def test_a_line_that_does_not_fit_is_left_out_whole(limit_bytes: int, run: Run, whole: dict[str, Any]) -> None:
    """A limit on the size of files cuts writes short as a disk does that is almost full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        result = run("tiny.yaml", "--output", "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.code in (1, 2), result
    assert "Traceback" not in result.err
    metrics = Path("run/metrics.jsonl")
    assert not metrics.exists() or metrics.read_bytes()[-1:] in (b"", b"\n")
    if result.code == 1:
        assert run("--resume", "run").code == 0
    else:
        assert run("tiny.yaml", "--output", "run", "--overwrite").code == 0
    assert left_in(Path("run")) == whole
