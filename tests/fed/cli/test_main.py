"""What the command line prints, where, and the code it exits with; in this process."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import fed
from fed.cli import doctor as cli_doctor
from fed.cli.main import app, main
from fed.config import yaml
from fed.config.registry import ALGORITHMS
from fed.config.schema import schema_text
from tests.fed.cli.commands import Run, runner

EXPERIMENT = """
name: tiny
data: {kind: digits, clients: 10}
model: {kind: logistic}
rounds: {count: 4, cohort: 3}
"""
COMPARISON = """
name: two
base: {data: {clients: 10}, model: {kind: logistic}, rounds: {count: 2, cohort: 3}}
compare: [{name: FedAvg}, {name: fast, local: {lr: 0.5}}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder that holds a tiny experiment and a tiny comparison."""
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT, encoding="utf-8")
    (tmp_path / "two.yaml").write_text(COMPARISON, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(folder, monkeypatch, capsys)


def test_help_and_version_are_results(run: Run) -> None:
    assert run("--version") == (0, f"fed {fed.__version__}\n", "")
    for arguments in ((), ("--help",), ("-h",), ("simulate", "--help")):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert "Usage: fed" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulat", "tiny.yaml"], "No such command 'simulat'"),
        (["simulate"], "fed simulate needs an experiment, got none: give a file, or --resume DIR"),
        (["simulate", "tiny.yaml", "--frob"], "No such option: --frob"),
        (["simulate", "tiny.yaml", "--set", "seed"], "Invalid value for --set: must have the form key=value"),
        (["compare", "two.yaml", "--jobs", "0"], "'0' is neither auto nor a number of at least 1"),
        (["compare"], "fed compare needs a comparison, got none: give a file, runs' folders, or --resume DIR"),
        (
            ["compare", "two.yaml", "tiny.yaml"],
            "takes one file, or folders of runs, got 2 of which two.yaml",
        ),
        (["compare", "two.yaml", "--set", "rounds.count=60"], "keys in base: write --set base.rounds.count=…"),
        (["compare", "two.yaml", "--set", "seed=3"], "keys in base: write --set 'seeds=[3]'"),
        (["compare", "--resume", "none"], "none must hold a comparison to resume, got no comparison.yaml"),
        (["compare", "--resume", "none", "--overwrite"], "give no --output, --overwrite or, without the file, --set"),
        (["compare", ".", "--set", "name=x"], "runs that exist are compared as they are: give no --set"),
        (["compare", "."], ". must hold runs, got none: give folders that fed simulate has written"),
        (["schema", "model"], "'model' is not one of 'experiment', 'comparison'"),
        (["simulate", "none.yaml"], "none.yaml: no such file"),
        (["simulate", "."], ".: cannot be read"),
        (["simulate", "two.yaml"], "two.yaml holds a comparison, not an experiment: run it with fed compare two.yaml"),
        (["compare", "tiny.yaml"], "tiny.yaml holds an experiment, not a comparison"),
        (["simulate", "tiny.yaml", "--set", "seed=true"], "tiny.yaml with --set: seed must be an integer, got True"),
        (["simulate", "tiny.yaml", "--set", "rounds.cohort=11"], "cohort"),
        (["simulate", "tiny.yaml", "--set", "data.clients=2000"], "clients"),
        (["simulate", "tiny.yaml", "--set", "model.kind=python:nowhere:Net"], "cannot import nowhere"),
        (["simulate", "tiny.yaml", "--output", "tiny.yaml"], "tiny.yaml exists and is not an empty folder"),
        (["simulate", "tiny.yaml", "--output", "tiny.yaml/run"], "tiny.yaml/run cannot be written to"),
        (
            ["simulate", "tiny.yaml", "--set", "simulation.batching=on", "--set", "local.precision=float16"],
            "simulation.batching must be auto or off here, got on: float16 scales each client's loss by its own grad",
        ),
        (["data", "tiny.yaml", "--set", "data=null"], "nothing to draw"),
        (["data", "tiny.yaml", "--picture", "picture.png"], "picture.png must end in .svg"),
        (["data", "tiny.yaml", "--picture", "none/picture.svg"], "none/picture.svg cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exits_with_2(run: Run, folder: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["tiny.yaml", "two.yaml"]


def test_fed_data_knows_a_nodes_file(run: Run, folder: Path) -> None:
    (folder / "node.yaml").write_text("{data: {kind: digits, clients: 3}, client: 1}", encoding="utf-8")
    code, _, err = run("data", "node.yaml")
    assert code == 2
    assert "got node.yaml, which describes one node by its key client: fed client --data FILE --dry-run" in err


def test_every_thing_wrong_has_a_line(run: Run) -> None:
    code, _, err = run("show", "tiny.yaml", "--set", "seed=-1", "--set", "rounds.cuont=3")
    assert code == 2
    assert [line.startswith("error: tiny.yaml with --set: ") for line in err.splitlines()] == [True, True]


def test_simulate_says_what_came_of_it_and_where_it_is(run: Run, folder: Path) -> None:
    code, out, err = run("simulate", "tiny.yaml")
    outcome, where = out.splitlines()
    assert code == 0
    assert outcome.startswith("4 rounds in ")
    assert "test accuracy 0." in outcome
    assert [line.split(",")[0] for line in err.splitlines()] == [f"round {number}/4" for number in range(1, 5)]
    summary = json.loads((folder / where / "summary.json").read_text(encoding="utf-8"))
    assert (where, summary["rounds"]) == ("runs/tiny", 4)


def test_nothing_is_overwritten_silently(run: Run, folder: Path) -> None:
    short = ("simulate", "tiny.yaml", "--set", "rounds.count=1")
    assert [run(*short).out.splitlines()[-1] for _ in range(3)] == ["runs/tiny", "runs/tiny-2", "runs/tiny-3"]
    before = (folder / "runs/tiny/summary.json").read_bytes()
    code, out, err = run(*short, "--output", "runs/tiny")
    assert (code, out) == (2, "")
    assert "--overwrite" in err
    assert (folder / "runs/tiny/summary.json").read_bytes() == before
    code, out, _ = run("simulate", "tiny.yaml", "--output", "runs/tiny", "--overwrite")
    assert (code, out.splitlines()[-1]) == (0, "runs/tiny")
    assert json.loads((folder / "runs/tiny/summary.json").read_text(encoding="utf-8"))["rounds"] == 4


def test_bad_input_costs_no_earlier_run(run: Run, folder: Path) -> None:
    assert run("simulate", "tiny.yaml", "--output", "here").code == 0
    before = {path.name: path.read_bytes() for path in (folder / "here").iterdir()}
    too_many = ("simulate", "tiny.yaml", "--set", "data.clients=5000")
    assert run(*too_many, "--output", "here", "--overwrite").code == 2
    assert {path.name: path.read_bytes() for path in (folder / "here").iterdir()} == before
    assert run(*too_many, "--output", "there").code == 2
    assert not (folder / "there").exists()


@pytest.mark.parametrize(
    ("name", "folder_name"), [("a/b: ü", "a-b-ü"), ("../up", "up"), ("...", "run"), ("x=1.5", "x=1.5")]
)
def test_no_name_leads_out_of_runs(run: Run, folder: Path, name: str, folder_name: str) -> None:
    out = run("simulate", "tiny.yaml", "--set", f"name={json.dumps(name)}", "--set", "rounds.count=1").out
    assert out.splitlines()[-1] == f"runs/{folder_name}"
    assert [path.name for path in (folder / "runs").iterdir()] == [folder_name]


def test_json_is_the_summary_alone_on_standard_output(run: Run, folder: Path) -> None:
    (folder / "chatty.py").write_text(
        "from torch import nn\n"
        "def net(input_shape, classes):\n"
        "    print('hello')\n"
        "    return nn.Linear(input_shape[0], classes)\n",
        encoding="utf-8",
    )
    code, out, err = run(
        "simulate", "tiny.yaml", "--set", "model={kind: python:chatty:net}", "--json", "--output", "here"
    )
    assert code == 0
    assert out == (folder / "here/summary.json").read_text(encoding="utf-8")
    assert json.loads(out)["rounds"] == 4
    assert "hello" in err


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("simulate", "tiny.yaml"), "kept in runs/tiny"),
        (("compare", "two.yaml", "--jobs", "1", "--output", "here"), "report in here/report.html"),
    ],
)
def test_json_leaves_where_it_was_kept_to_standard_error(run: Run, arguments: tuple[str, ...], note: str) -> None:
    assert run(*arguments, "--json").err.splitlines()[-1] == note


@pytest.mark.usefixtures("undrawn")
def test_report_is_drawn_when_it_is_asked_for(run: Run, folder: Path) -> None:
    assert run("simulate", "tiny.yaml").code == 0
    page = folder / "runs/tiny/report.html"
    assert not page.exists()
    environment = folder / "runs/tiny/environment.json"
    environment.write_text(
        json.dumps({**json.loads(environment.read_text()), "command": ["/bin/fed", "simulate", "it"]})
    )
    assert run("report", "runs/tiny") == (0, "runs/tiny/report.html\n", "")
    drawn = page.read_text(encoding="utf-8")
    for words in ("Round by round", "Who holds what", "fed simulate it", "wall time"):
        assert words in drawn
    # of one that was killed, or is under way: what its metrics say
    for name in ("summary.json", "population.json"):
        (folder / "runs/tiny" / name).unlink()
    metrics = folder / "runs/tiny/metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    assert run("report", "runs/tiny").code == 0
    drawn = page.read_text(encoding="utf-8")
    assert "Status: unfinished." in drawn
    assert "2 rounds of fedavg" in drawn
    metrics.write_bytes(b"")
    assert run("report", "runs/tiny").code == 0
    assert run("report", "runs/none").code == 2
    assert run("simulate", "tiny.yaml", "--output", "here", "--report").code == 0
    assert "Status" not in (folder / "here/report.html").read_text(encoding="utf-8")


def test_divergence_exits_with_1_and_keeps_the_last_good_model(run: Run, folder: Path) -> None:
    code, out, err = run("simulate", "tiny.yaml", "--set", "local.lr=1e38", "--json")
    kept, message = err.splitlines()[-2:]
    assert code == 1
    assert json.loads(out)["status"] == "failed"
    assert kept.endswith("kept in runs/tiny")
    assert message.startswith("error: ")
    assert "Traceback" not in err
    assert (folder / "runs/tiny/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("source", "what", "line"),
    [
        ("def net(input_shape, classes):\n    return undefined_name\n", "NameError", 2),
        ("def net(input_shape, classes):\n    raise ValueError('mine')\n", "ValueError: mine", 2),
        ("int('ten')\n", "invalid literal", 1),
    ],
)
def test_users_own_code_that_fails_shows_where(run: Run, folder: Path, source: str, what: str, line: int) -> None:
    module = f"own_{abs(hash(source))}"
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    code, out, err = run("simulate", "tiny.yaml", "--set", f"model.kind=python:{module}:net")
    assert (code, out) == (2, "")
    assert what in err
    assert f"{module}.py:{line}" in err
    assert "Traceback" not in err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("deadline_s", "expected"), [("1e-6", 1), ("1e6", 0)])
def test_a_run_without_any_answer_exits_1(run: Run, folder: Path, deadline_s: str, expected: int) -> None:
    settings = ("devices.kind=lognormal", f"rounds.deadline_s={deadline_s}")
    code, out, _ = run("simulate", "tiny.yaml", *(part for setting in settings for part in ("--set", setting)))
    assert code == expected
    assert "runs/tiny" in out, "what it has measured is kept, and shown"


def test_run_that_users_own_code_breaks_off_is_kept(run: Run, folder: Path) -> None:
    (folder / "tired.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    evaluations = 0\n"
        "    def __init__(self, input_shape, classes):\n"
        "        super().__init__(input_shape[0], classes)\n"
        "    def forward(self, x):\n"
        "        Net.evaluations += not self.training\n"
        "        if Net.evaluations > 10: raise RuntimeError('tired')\n"
        "        return super().forward(x)\n",
        encoding="utf-8",
    )
    settings = ("model.kind=python:tired:Net", "rounds.count=20")
    code, out, err = run("simulate", "tiny.yaml", *(part for setting in settings for part in ("--set", setting)))
    assert (code, out) == (1, "")
    assert "RuntimeError: tired" in err
    assert err.index("what was done is kept in runs/tiny") < err.index("Traceback")
    assert json.loads((folder / "runs/tiny/summary.json").read_text(encoding="utf-8"))["status"] == "failed"


def test_show_prints_every_value_in_force_as_yaml(run: Run) -> None:
    code, out, err = run("show", "tiny.yaml", "--set", "local.lr=0.25")
    assert (code, err) == (0, "")
    shown = yaml.parse(out)
    assert comments(out) == []
    assert shown["local"]["lr"] == 0.25
    assert shown == fed.Experiment(**shown).dump()
    assert yaml.parse(run("show", "two.yaml").out)["compare"][1]["local"]["lr"] == 0.5


def test_show_leaves_out_what_an_app_has_no_use_for(run: Run, folder: Path) -> None:
    (folder / "app.yaml").write_text("app: {clients: 2}\nlocal: {lr: 0.5}\n", encoding="utf-8")
    shown = yaml.parse(run("show", "app.yaml").out)
    assert {"data", "table", "model", "fixed", "loss", "metrics", "collate"}.isdisjoint(shown)
    assert "fraction" not in shown["evaluation"]
    told = ["lr", "schedule", "scaling", "base_cohort", "batch_size", "epochs", "steps"]
    assert ([*shown["local"]], [*shown["simulation"]]) == (told, ["workers", "executor"])
    assert fed.Experiment(**shown) == fed.Experiment.load(folder / "app.yaml")
    (folder / "apps.yaml").write_text(
        "base: {app: {clients: 2}}\ncompare: [{name: A}, {name: B, local.lr: 0.5}]\n", encoding="utf-8"
    )
    compared = yaml.parse(run("show", "apps.yaml").out)
    assert ([*compared["base"]["local"]], [*compared["compare"][1]["local"]]) == (told, told)


def comments(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("#")]


def test_show_says_it_of_each_variant(run: Run, folder: Path) -> None:
    text = COMPARISON.replace("local: {lr: 0.5}", "simulation: {batching: off}")
    (folder / "two.yaml").write_text(text.replace("]", ", {name: alone, rounds.cohort: 1}]"), encoding="utf-8")
    code, out, err = run("show", "two.yaml", "--batching")
    assert (code, err) == (0, "")
    assert comments(out) == [
        "# FedAvg: batched: up to 32 clients train as one computation, the most that simulation.group=auto takes",
        "# fast: one client at a time: simulation.batching is off",
        "# alone: one client at a time: a round trains one client",
    ]
    assert yaml.parse(out)["compare"][1]["simulation"]["batching"] == "off"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("data={kind: npz, path: gone.npz}",), "gone.npz"),
        (
            ("data=null", "model=null"),
            "data and model must be given in Python, where fed.simulate says it, as run.summary",
        ),
        (("data.clients=2000",), "clients"),
        (("simulation.batching=on", "local.precision=float16"), "simulation.batching must be auto or off here, got on"),
    ],
)
def test_show_prints_values_even_if_batching_is_unknown(run: Run, settings: tuple[str, ...], why: str) -> None:
    code, out, err = run(
        "show", "tiny.yaml", "--batching", *(part for setting in settings for part in ("--set", setting))
    )
    assert (code, err) == (0, "")
    (said,) = comments(out)
    assert said.startswith("# simulation: how clients will train is not known: ")
    assert why in said
    shown = yaml.parse(out)
    assert shown == fed.Experiment(**shown).dump()


def test_show_says_how_a_run_has_trained(run: Run) -> None:
    made = fed.simulate(
        fed.Experiment(model=None, rounds={"count": 1}), model=lambda: torch.nn.Linear(64, 10), output="own"
    )
    assert made.summary["training"].startswith("batched: up to 32 clients")
    assert made.summary["training"] in repr(made)
    (said,) = comments(run("show", "own/experiment.yaml", "--batching").out)
    assert said == f"# simulation: {made.summary['training']}; so the run has trained"
    (said,) = comments(run("show", "own/experiment.yaml", "--batching", "--set", "seed=1").out)
    assert "model must be given in Python" in said


def test_data_draws_who_holds_what(run: Run, folder: Path) -> None:
    code, out, err = run("data", "tiny.yaml", "--picture", "picture.svg")
    assert (code, err) == (0, "")
    assert out.startswith("10 clients, 1438 samples to train on, 359 to test on\n")
    assert (folder / "picture.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert run("data", "two.yaml").out == out


def test_algorithms_are_listed_with_primitive_and_paper(run: Run) -> None:
    code, out, err = run("algorithms")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert set(ALGORITHMS.builtin) < set(rows)
    assert rows["fedavg"].split()[1] == "mean"
    assert rows["dpsgd"].split()[1] == "mix"
    assert rows["fedprox"].rstrip().endswith("1812.06127")


@pytest.mark.parametrize("name", ["experiment", "comparison"])
def test_schema_is_printed(run: Run, name: str) -> None:
    assert run("schema", name) == (0, schema_text(getattr(fed, name.capitalize())), "")


def test_doctor_says_what_there_is(run: Run) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for what in ("cores", "memory", "torch", "safetensors", "cpu"):
        assert what in out


def test_doctor_tries_each_device(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "_devices", lambda: ([("cpu", "here"), ("cuda:7", "a broken GPU")], []))
    code, out, _ = run("doctor")
    assert code == 0
    assert "• cuda:7 is there and cannot compute (" in out
    assert "• cpu" not in out


def test_doctor_names_what_is_missing_and_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    known = cli_doctor._version
    monkeypatch.setattr(
        cli_doctor, "_version", lambda package: {"jinja2": None, "numpy": "1.9"}.get(package, known(package))
    )
    code, out, _ = run("doctor")
    assert code == 1
    assert '• jinja2 is missing: pip install "jinja2>=3.1"' in out
    assert '• numpy is 1.9, not >=2.0: pip install "numpy>=2.0"' in out


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, '• only for apps that fed flower-app writes: flwr is missing: pip install "fed[flower]"'),
        ("1.4.1", ': flwr is 1.4.1, not <1.43,>=1.41: pip install "fed[flower]"'),
        ("1.41.7", "│ flwr "),
    ],
)
def test_doctor_says_whether_flower_is_there(
    run: Run, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    known = cli_doctor._version
    monkeypatch.setattr(cli_doctor, "_version", lambda package: version if package == "flwr" else known(package))
    code, out, _ = run("doctor")
    assert code == 0
    assert said in out
    assert ('"fed[flower]"' in out) == (version != "1.41.7")


@pytest.mark.parametrize(
    ("source", "build", "remedy"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "2.13.0+cpu",
            " --index-url https://.*/whl/cpu",
        ),
        ("import no_such_part", "2.13.0", ""),
        ("", "2.13.0", None),
    ],
)
def test_doctor_says_that_torchvision_does_not_fit_torch(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, build: str, remedy: str | None
) -> None:
    (tmp_path / "torchvision.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    known = cli_doctor._version
    monkeypatch.setattr(
        cli_doctor, "_version", lambda package: "0.28.0" if package == "torchvision" else known(package)
    )
    monkeypatch.setattr(torch, "__version__", build)
    code, out, _ = run("doctor")
    sys.modules.pop("torchvision", None)
    said = [line for line in out.splitlines() if "torchvision" in line]
    assert (code, len(said)) == (0, 0 if remedy is None else 1)
    if remedy is not None:
        assert f"• torchvision 0.28.0 cannot be imported beside torch {build} (" in said[0]
        assert re.search(f"--force-reinstall --no-deps torchvision{remedy}$", said[0])


def test_doctor_names_extras_that_are_missing_and_their_purpose(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    optional = {package.name: extra for extra in cli_doctor.EXTRAS for package in cli_doctor._required(extra)}
    assert {"flower", "metrics"} <= {*optional.values()}
    known = cli_doctor._version
    monkeypatch.setattr(cli_doctor, "_version", lambda package: None if package in optional else known(package))
    code, out, _ = run("doctor")
    assert code == 0
    for package, extra in optional.items():
        line = next(line for line in out.splitlines() if line.endswith(f': pip install "fed[{extra}]"'))
        assert line.startswith(f"• only for {cli_doctor.EXTRAS[extra]}: ")
        assert f"{package} is missing" in line


def test_doctor_names_what_a_gpu_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("shutil.which", lambda program: None if program == "git" else f"/usr/bin/{program}")
    code, out, _ = run("doctor")
    assert code == 0
    assert f"• torch {torch.__version__} cannot train on this machine's GPU: pip install --force-reinstall torch" in out
    assert "• git is missing" in out


@pytest.mark.usefixtures("undrawn")
def test_compare_prints_its_table_and_where_the_report_is(run: Run, folder: Path) -> None:
    code, out, _ = run("compare", "two.yaml", "--set", "jobs=1")
    *table, report = out.splitlines()
    assert code == 0
    assert any("FedAvg" in line for line in table)
    assert any("fast" in line for line in table)
    assert report == "runs/two/report.html"
    assert (folder / report).is_file()


@pytest.mark.long
def test_compare_resumes_a_finished_comparison_to_the_same_table(run: Run, folder: Path) -> None:
    first = run("compare", "two.yaml", "--jobs", "1", "--json", "--output", "here")
    (folder / "here/report.html").unlink()
    again = run("compare", "--resume", "here", "--jobs", "auto", "--json")
    assert first.code == again.code == 0
    assert json.loads(again.out)["rows"] == json.loads(first.out)["rows"]
    assert again.err == "2 of 2 runs are done\nreport in here/report.html\n"
    assert (folder / "here/report.html").is_file()
    code, _, err = run("compare", "two.yaml", "--set", "base.rounds.count=9", "--resume", "here")
    assert (code, "rounds.count is 2 in here/comparison.yaml for FedAvg, got 9" in err) == (2, True), err


@pytest.mark.long
def test_compare_sets_runs_that_exist_side_by_side(run: Run, folder: Path) -> None:
    for name in ("a", "b"):
        for seed in (0, 1):
            settings = (f"name={name}", f"seed={seed}", f"local.lr={0.1 if name == 'a' else 0.3}")
            given = [part for setting in settings for part in ("--set", setting)]
            assert run("simulate", "tiny.yaml", *given, "--output", f"kept/{name}-{seed}")[0] == 0
    code, out, _ = run("compare", "kept/a-0", "kept/a-1", "kept/b-0", "kept/b-1")
    assert code == 0
    assert out.splitlines()[-1] == "runs/comparison/report.html"
    rows = json.loads((folder / "runs/comparison/comparison.json").read_bytes())["rows"]
    assert [(row["name"], row["seeds"], row["status"]) for row in rows] == [
        ("a", [0, 1], "finished"),
        ("b", [0, 1], "finished"),
    ]


@pytest.mark.usefixtures("undrawn")
def test_compare_exits_1_after_a_failed_run_and_reports(run: Run, folder: Path) -> None:
    path = folder / "two.yaml"
    path.write_text(COMPARISON.replace("lr: 0.5", "lr: 1e38"), encoding="utf-8")
    code, out, err = run("compare", "two.yaml", "--jobs", "1", "--json", "--output", "here")
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    assert code == 1
    assert out == (folder / "here/comparison.json").read_text(encoding="utf-8")
    assert [row["status"] for row in rows] == ["finished", "failed"]
    assert err.splitlines()[-1].startswith("error: fast: seed 0: ")
    assert (folder / "here/report.html").is_file()


def test_compare_finds_what_cannot_be_run_before_it_runs_anything(run: Run, folder: Path) -> None:
    code, out, err = run("compare", "two.yaml", "--set", "base.rounds.cohort=11")
    assert (code, out) == (2, "")
    assert err.startswith("error: FedAvg: ")
    assert len(err.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_show_prints_values_though_a_users_model_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_model.py").write_text(
        "def make():\n    raise RuntimeError('no model today')\n", encoding="utf-8"
    )
    (tmp_path / "e.yaml").write_text("model: {kind: 'python:broken_model:make'}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["show", str(tmp_path / "e.yaml"), "--batching"]) == 0
    said = capsys.readouterr().out
    assert "is not known: " in said
    assert re.search(r"raised RuntimeError: no model today, at .*broken_model\.py:2: correct it\n$", said)


def test_every_command_that_the_documents_name_is_there() -> None:
    root = Path(__file__).resolve().parents[3]
    texts = [path.read_text(encoding="utf-8") for path in (root / "README.md", *(root / "docs").glob("*.md"))]
    named = {found for text in texts for found in re.findall(r"(?:^|`|/bin/)fed ([a-z-]+)", text, re.MULTILINE)}
    assert named >= {"simulate", "server", "client", "keys"}
    assert named - set(typer.main.get_command(app).commands) == set()  # type: ignore[attr-defined]
