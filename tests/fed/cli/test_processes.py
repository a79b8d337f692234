"""The command line as a process: signals, pipes, a terminal, and what it loads before it is asked for anything."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
EXPERIMENT = """
name: tiny
data: {kind: digits, clients: 10}
model: {kind: logistic}
rounds: {count: 3, cohort: 3}
"""
Process: TypeAlias = "subprocess.Popen[str]"
Start: TypeAlias = Callable[..., Process]
ENDLESS = "rounds.count=1000000"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT, encoding="utf-8")
    (tmp_path / "two.yaml").write_text(
        "base: {data: {clients: 10}, model: {kind: logistic}, rounds: {cohort: 3, count: 2}}\n"
        "compare: [{name: A}, {name: B, rounds: {cohort: 3, count: 1000000}}]\n",
        encoding="utf-8",
    )
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts ``fed`` in the folder; whatever becomes of the test, no process is left."""
    processes = []

    def start(*arguments: str, stderr: int = subprocess.PIPE, start_new_session: bool = False, **more: str) -> Process:
        command = [sys.executable, "-m", "fed", *arguments]
        given: dict[str, Any] = {"cwd": folder, "env": environment(**more), "text": True, "encoding": "utf-8"}
        given["start_new_session"] = start_new_session
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, **given))
        return processes[-1]

    yield start
    for process in processes:
        with process:
            process.kill()


def wait_until(holds: Callable[[], bool], process: Process) -> None:
    """Ask again and again, with a bound; nothing is gained by asking of a process that has ended."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


def test_shell_completes_commands(start: Start) -> None:
    asked = {"_FED_COMPLETE": "complete_bash", "COMP_WORDS": "fed sh", "COMP_CWORD": "1"}
    assert start(**asked).communicate()[0].split() == ["show"]


def members(session: int) -> list[Path]:
    """The processes of a session that are not dead yet."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, _, its = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
            found += [process] if int(its) == session and state not in "ZX" else []
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.long
def test_ended_run_with_workers_leaves_no_process_or_file(start: Start, folder: Path, sent: signal.Signals) -> None:
    settings = (ENDLESS, "simulation.workers=2", "simulation.group=1")
    arguments = (part for setting in settings for part in ("--set", setting))
    process = start("simulate", "tiny.yaml", *arguments, "--json", start_new_session=True)
    metrics = folder / "runs/tiny/metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.stat().st_size > 0, process)
    alive = members(process.pid)
    assert len(alive) >= 3, "the workers"
    assert [place for place in alive if "/dev/shm/" in (place / "maps").read_text(encoding="utf-8")] == []
    if sent == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    out, err = process.communicate(timeout=PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while members(process.pid):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "Traceback" not in err
    if sent == signal.SIGKILL:
        assert process.returncode == -sent
        return
    assert process.returncode == 130
    assert err.splitlines()[-1].endswith("what was done is kept in runs/tiny")
    summary = json.loads(out)
    lines = metrics.read_text(encoding="utf-8").splitlines()
    assert summary["status"] == "interrupted"
    assert 0 <= summary["rounds"] - len(lines) <= 1
    assert (folder / "runs/tiny/model.safetensors").is_file()


@pytest.mark.long
def test_interrupted_comparison_is_kept_and_exits_with_130(start: Start, folder: Path) -> None:
    process = start("compare", "two.yaml", "--jobs", "1")
    runs = folder / "runs/comparison/runs"
    wait_until(lambda: any(path.stat().st_size for path in runs.glob("b/seed-0/metrics.jsonl")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-2:] == [
        "stopped after 1 of 2 runs; what was done is kept in runs/comparison",
        "go on with: fed compare --resume runs/comparison",
    ]
    result = json.loads((folder / "runs/comparison/comparison.json").read_text(encoding="utf-8"))
    assert [row["status"] for row in result["rows"]] == ["finished", "interrupted"]
    summaries = [json.loads((runs / name / "seed-0/summary.json").read_text(encoding="utf-8")) for name in "ab"]
    assert [summary["status"] for summary in summaries] == ["finished", "interrupted"]


def runs_begun(place: Path) -> int:
    return len([*place.glob("runs/*/*/metrics.jsonl")])


@pytest.mark.long
def test_comparison_killed_three_times_has_the_undisturbed_table(start: Start, folder: Path) -> None:
    (folder / "twelve.yaml").write_text(
        "base: {data: {clients: 10}, model: {kind: logistic}, rounds: {cohort: 3, count: 40}}\n"
        "compare:\n- name: FedAvg\n- {name: Prox, algorithm: {kind: fedprox, mu: 0.1}}\n- {name: a/b, local.lr: 0.3}\n"
        "seeds: [0, 1, 2, 3]\ntarget: 0.8\n",
        encoding="utf-8",
    )
    moments = random.Random(11)
    place = folder / "broken"
    arguments: tuple[str, ...] = ("twelve.yaml", "--output", "broken")
    for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = start("compare", *arguments, "--jobs", "2", "--json", start_new_session=True)
        begun = min(12, runs_begun(place) + moments.randrange(1, 5))
        wait_until(partial(lambda begun: runs_begun(place) >= begun, begun), process)
        process.send_signal(sent)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == (-signal.SIGKILL if sent == signal.SIGKILL else 130), err
        assert "Traceback" not in err
        assert sent == signal.SIGKILL or err.splitlines()[-1] == "go on with: fed compare --resume broken"
        arguments = ("--resume", "broken")
    assert start("compare", *arguments).wait(PATIENCE_S) == 0
    assert start("compare", "twelve.yaml", "--output", "whole").wait(PATIENCE_S) == 0
    tables = [json.loads((folder / name / "comparison.json").read_bytes()) for name in ("broken", "whole")]
    for table in tables:
        del table["environment"]
        for row in [*table["rows"], *(run for of_it in table["runs"].values() for run in of_it.values())]:
            del row["wall_s"]
    assert tables[0] == tables[1]


@pytest.mark.long
def test_bar_of_a_comparison_says_at_once_what_it_does(start: Start) -> None:
    shown, its = pty.openpty()
    process = start("compare", "two.yaml", "--set", "base.rounds.count=1", stderr=its, TERM="xterm", COLUMNS="100")
    os.close(its)
    text = read_terminal(shown, until="estimating the time of A, 1 of 2 variants")
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert "loading PyTorch, and the comparison" in text


@pytest.mark.parametrize("arguments", [("--help",), ("show", "tiny.yaml")])
def test_reader_that_leaves_is_no_error_to_tell(start: Start, arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 1


def test_output_without_space_is_one_sentence(folder: Path) -> None:
    command = [sys.executable, "-m", "fed", "schema"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, cwd=folder, env=environment(), stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"error: there is no space left to write to: free some, and run the command again\n"


ENDING = """
import atexit, sys, threading, time
import fed.cli.main as line

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()

def late():
    time.sleep(0.2)
    print("waited for")

def command():
    atexit.register(print, "tidied up")
    threading.Thread(target=late).start()
    sys.stdout.write("said, ")
    return 3

line.main = command
from fed.__main__ import main
sys.exit(main())
"""


def test_a_command_ends_whole_but_frees_no_objects(folder: Path) -> None:
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said, waited for\ntidied up\n", "")


def test_run_goes_on_when_nobody_reads_its_progress(start: Start) -> None:
    process = start("simulate", "tiny.yaml")
    assert process.stderr is not None
    process.stderr.close()
    assert process.stdout is not None
    assert process.stdout.read().splitlines()[-1] == "runs/tiny"
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.long
def test_terminal_shows_a_bar_and_keeps_nothing_of_it(start: Start) -> None:
    shown, its = pty.openpty()
    process = start("simulate", "tiny.yaml", stderr=its, TERM="xterm", COLUMNS="100")
    os.close(its)
    text = read_terminal(shown)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "round 3/3, accuracy 0." in text
    assert "0.0 s left" in text
    assert out.splitlines()[-1] == "runs/tiny"


@pytest.mark.parametrize("more", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
def test_colours_are_left_out_where_they_are_not_wanted(folder: Path, more: dict[str, str]) -> None:
    shown, its = pty.openpty()
    command = [sys.executable, "-m", "fed", "--help"]
    with subprocess.Popen(command, cwd=folder, env=environment(TERM="xterm", **more), stdout=its):
        os.close(its)
        text = read_terminal(shown)
    assert "Usage" in text
    colours = re.findall(r"\x1b\[[0-9;]*3[0-7]m", text)
    assert bool(colours) == (not more)


def read_terminal(end: int, until: str = "\0") -> str:
    content = b""
    try:
        while until.encode() not in content and (chunk := os.read(end, 4096)):
            content += chunk
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(end)
    return content.decode()


def test_users_module_in_working_folder_is_found_and_shadows_nothing(folder: Path) -> None:
    (folder / "json.py").write_text("raise RuntimeError('shadowed')\n", encoding="utf-8")
    (folder / "mine.py").write_text(
        "import os\n\nfrom torch import nn\n\nos.chdir(os.sep)  # as modules do that unpack data elsewhere\n\n\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, input_shape, classes, bias: bool = True):\n"
        "        import others\n\n        super().__init__(input_shape[0], classes, bias)\n",
        encoding="utf-8",
    )
    (folder / "others.py").touch()
    command = [
        str(Path(sys.executable).with_name("python")),
        "-c",
        "import sys; sys.path.pop(0); from fed.cli.main import main; sys.exit(main())",
        *("simulate", "tiny.yaml", "--set", "model={kind: python:mine:Net, bias: false}", "--json"),
    ]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["parameters"]) == (0, 640), done.stderr
