"""Runs as their folders show them: any end, any damage, any place."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fed.config.experiment import Experiment
from fed.errors import InvalidInput
from fed.storage.checkpoint_files import file_name
from fed.storage.checkpoints import Checkpoints
from fed.storage.run_folder import RunFolder
from fed.storage.run_reader import RunState, kept_run, runs_below, state_of
from tests.fed.cli.commands import Run, runner

EXPERIMENT = Experiment(name="tiny", algorithm={"kind": "bmuf"}, rounds={"count": 9})


def no_error(error: OSError) -> None:
    raise AssertionError(error)


def make(path: Path, status: str | None = None, rounds: int = 3, **more: Any) -> RunFolder:
    folder = RunFolder(path)
    folder.begin(EXPERIMENT)
    for number in range(1, rounds + 1):
        folder.append({"round": number, "test_accuracy": number / 10 if number < 3 else None})
    if status:
        folder.finish({"status": status, **more}, {})
    return folder


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed", None])
def test_a_run_is_as_its_folder_says(tmp_path: Path, status: str | None) -> None:
    folder = make(tmp_path / "run", status, reason="why")
    Checkpoints(folder.checkpoints, 3).write(2, None)
    run = kept_run(folder.path)
    assert run.state == state_of(folder.path) == (status or "unfinished")
    assert (run.name, run.algorithm, run.rounds, run.rounds_planned, run.score) == ("tiny", "bmuf", 3, 9, 0.2)
    assert (run.reason, run.checkpoint) == ("why" if status else None, None if status == "finished" else 2)


def test_a_run_that_has_done_nothing_yet_is_unfinished(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", rounds=0)
    for _ in range(2):
        run = kept_run(folder.path)
        assert (run.state, run.rounds, run.score, run.checkpoint) == (RunState.UNFINISHED, 0, None, None)
        (folder.path / "metrics.jsonl").unlink(missing_ok=True)


def test_a_checkpoint_that_is_damaged_is_none_to_resume_from(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    kept = Checkpoints(folder.checkpoints, 3)
    for number in (1, 2, 3):
        kept.write(number, None)
    (folder.checkpoints / file_name(3)).write_bytes(b"")
    assert kept_run(folder.path).checkpoint == 2
    for number in (1, 2):
        (folder.checkpoints / file_name(number)).write_bytes(b"")
    assert kept_run(folder.path).checkpoint is None


def test_end_time_is_that_of_summary_or_last_write(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", "interrupted")
    Checkpoints(folder.checkpoints, 3).write(2, None)
    for seconds, name in enumerate([*RunFolder.FILES, f"checkpoints/{file_name(2)}", "checkpoints"]):
        if (folder.path / name).exists():
            os.utime(folder.path / name, (1000 + seconds,) * 2)
    ended = kept_run(folder.path).written
    assert ended is not None
    assert ended.timestamp() == 1000 + RunFolder.FILES.index("summary.json")
    (folder.path / "summary.json").unlink()
    os.utime(folder.path / f"checkpoints/{file_name(2)}", (5000, 5000))
    last = kept_run(folder.path).written
    assert last is not None
    assert last.timestamp() == 5000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", b"", "summary.json must hold JSON"),
        ("summary.json", b"[]", "summary.json must hold keys and values, got list"),
        ("summary.json", b"[" * 100_000, "nested too deeply"),
        ("summary.json", b"\xff", "summary.json must hold JSON"),
        ("summary.json", b'{"status": "sunny"}', "status must be finished, interrupted or failed, got 'sunny'"),
        ("experiment.yaml", b"{", "not valid YAML"),
        ("experiment.yaml", b"- 1", "must hold a mapping"),
        ("experiment.yaml", None, "no such file"),
        ("metrics.jsonl", b"rubbish\n{}\n", "line 1 must be a round's metrics, got b'rubbish'"),
        ("environment.json", None, "must hold a run, got none"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = make(tmp_path / "run", "finished").path
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    run = kept_run(path)
    assert run.state is RunState.UNREADABLE
    assert message in (run.reason or "")
    if name in ("summary.json", "environment.json"):
        assert state_of(path) is RunState.UNREADABLE


def test_a_file_gone_meanwhile_is_no_unreadable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "run", "finished").path
    (path / "summary.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", lambda _: True)  # as a moment ago: a run that is resumed removes its summary
        assert state_of(path) is RunState.UNFINISHED
    (path / "summary.json").symlink_to("summary.json")
    assert state_of(path) is RunState.UNREADABLE


@settings(max_examples=30)
@given(st.sampled_from(["summary.json", "experiment.yaml", "metrics.jsonl"]), st.binary(max_size=60))
def test_nothing_that_a_file_may_hold_ends_the_listing(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    path = make(tmp_path_factory.mktemp("runs") / "run", "failed").path
    (path / name).write_bytes(content)
    assert kept_run(path).folder == path


def test_values_of_other_kinds_than_fed_writes_are_left_out(tmp_path: Path) -> None:
    path = make(tmp_path / "run", "failed", reason=3).path
    (path / "experiment.yaml").write_text("{name: 3, algorithm: x, rounds: {count: many}}")
    (path / "metrics.jsonl").write_text('{"round": 1, "test_accuracy": "high"}\n{"round": 2, "test_accuracy": NaN}\n')
    run = kept_run(path)
    assert (run.name, run.algorithm, run.rounds_planned, run.score, run.reason, run.rounds) == (*[None] * 5, 2)


def test_runs_are_found_at_any_depth_outside_runs(tmp_path: Path) -> None:
    places = ["b", "a/runs/fedavg/seed-0", "a/runs/fedavg/seed-1", "c/.hidden"]
    for place in [*places, "b/copy"]:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "environment.json").touch()
    assert list(runs_below(tmp_path, no_error)) == [tmp_path / place for place in sorted(places)]
    assert list(runs_below(tmp_path / "b", no_error)) == [tmp_path / "b"]
    for place in ("none", "b/environment.json"):
        with pytest.raises(InvalidInput, match="give one that holds runs"):
            list(runs_below(tmp_path / place, no_error))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, monkeypatch, capsys, "runs")


def test_the_list_has_a_line_a_run_and_reasons_below(run: Run, tmp_path: Path) -> None:
    make(tmp_path / "runs/done", "finished")
    make(tmp_path / "runs/stopped", "interrupted")
    make(tmp_path / "runs/broken", "failed", reason="round 4, client 2: the loss\nis not finite")
    folder = make(tmp_path / "runs/killed")
    Checkpoints(folder.checkpoints, 1).write(2, None)
    (make(tmp_path / "runs/odd").path / "summary.json").write_text("[")
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[0] == ["run", "name", "algorithm", "status", "rounds", "score", "written", "resumes", "after"]
    shown = {line[0]: " ".join(line[1:]) for line in lines[2:7]}
    assert list(shown) == ["broken", "done", "killed", "odd", "stopped"]
    assert shown["done"].startswith("tiny bmuf finished 3 of 9 accuracy 0.2000 20")
    assert shown["done"].endswith(" –")
    assert shown["killed"].startswith("tiny bmuf unfinished: no summary 3 of 9 accuracy 0.2000 20")
    assert shown["killed"].endswith(" round 2")
    assert shown["odd"].startswith("– – unreadable – – 20")
    assert out.splitlines()[-2] == "runs/broken: round 4, client 2: the loss is not finite"
    assert out.splitlines()[-1].startswith("runs/odd: runs/odd/summary.json must hold JSON")


def test_the_list_for_machines_holds_all_that_is_known(run: Run, tmp_path: Path) -> None:
    Checkpoints(make(tmp_path / "one/run", "interrupted").checkpoints, 1).write(2, None)
    code, out, err = run("one", "--json")
    (entry,) = json.loads(out)
    assert (code, err) == (0, "")
    assert entry.pop("written").endswith("+00:00")
    assert entry == {
        "folder": "one/run",
        "state": "interrupted",
        "reason": None,
        "name": "tiny",
        "algorithm": "bmuf",
        "rounds": 3,
        "rounds_planned": 9,
        "metric": "accuracy",
        "score": 0.2,
        "epsilon": None,
        "checkpoint": 2,
    }


@pytest.mark.parametrize(("width", "left_out"), [(160, ()), (90, ("name", "algorithm", "written"))])
def test_narrow_terminals_keep_folders_whole(
    width: int, left_out: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    make(tmp_path / "pair/runs/a-long-name/seed-0", "failed")
    shown = run(".").out
    assert "pair/runs/a-long-name/seed-0" in shown
    headings = ("name", "algorithm", "status", "score", "written", "resumes after")
    assert [heading for heading in headings if heading not in shown.splitlines()[1]] == [*left_out]


def test_private_runs_have_a_column_of_epsilon(run: Run, tmp_path: Path) -> None:
    make(tmp_path / "runs/public", "finished")
    assert "ε" not in run().out
    make(tmp_path / "runs/private", "finished", epsilon=0.71803, delta=1e-5)
    under_way = make(tmp_path / "runs/under-way")
    for number, epsilon in ((4, 1.25), (5, None)):
        under_way.append({"round": number, "epsilon": epsilon})
    lines = [line.split() for line in run().out.splitlines() if line.strip()]
    assert lines[0][6] == "ε"
    shown = {line[0]: line for line in lines[2:]}
    assert shown["private"][7:10] == ["accuracy", "0.2000", "0.719"]
    assert "1.25" in shown["under-way"]
    assert shown["public"][7:10] == ["accuracy", "0.2000", "–"]


def test_no_runs_are_a_sentence_and_an_empty_list(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    sentence = "no runs in empty: fed simulate writes them into runs/, or where --output says\n"
    assert run("empty") == (0, sentence, "")
    assert run("empty", "--json") == (0, "[]\n", "")


def test_no_folder_is_one_line_and_exits_with_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run() == (2, "", "error: runs: no such folder: give one that holds runs, as fed simulate writes them\n")
    assert run("file")[0::2] == (
        2,
        "error: file: is not a folder: give one that holds runs, as fed simulate writes them\n",
    )


def test_unreadable_folders_are_reported_and_the_rest_listed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "runs/done", "finished")
    (tmp_path / "runs/secret").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    closed = "secret"
    code, out, err = run()
    assert (code, err) == (0, "runs/secret cannot be read (Permission denied): what it holds is not listed\n")
    assert "done" in out
    closed = "runs"
    assert run() == (2, "", "error: runs cannot be read (Permission denied): make it readable\n")
