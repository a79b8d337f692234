"""``fed export``: a run's tables as CSV and as Parquet."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import fed
from tests.fed.cli.commands import Run, runner
from tests.simulations.durable_runs import experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, in which some clients are lost, with scores of clients whose ids are numbers and names."""
    folder = tmp_path_factory.mktemp("export") / "run"
    fed.simulate(experiment("tolerant", 3), output=folder)
    rows = ['{"round":1,"client":7,"loss":0.5}', '{"round":1,"client":"ann, \\"ü\\"","loss":null,"f1":[1,2]}']
    (folder / "clients.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, monkeypatch, capsys, "export")


def expected(folder: Path, what: str) -> list[dict[str, Any]]:
    kept = fed.Run.load(folder)
    if what == "metrics":
        return kept.metrics
    if what == "clients":
        return [
            {"round": 1, "client": 7, "loss": 0.5, "f1": None},
            {"round": 1, "client": 'ann, "ü"', "loss": None, "f1": "[1, 2]"},
        ]
    events = ("asked", "replied", "late", "failed")
    return [
        {"round": line["round"], "client": client, "event": event}
        for line in kept.participation
        for event in events
        for client in line[event]
    ]


@pytest.mark.parametrize("what", ["metrics", "clients", "participation"])
def test_csv_holds_every_value(what: str, folder: Path, run: Run, tmp_path: Path) -> None:
    known = expected(folder, what)
    assert run(str(folder), "--to", "table.csv", "--what", what).out == "table.csv\n"
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert rows == [{name: "" if value is None else str(value) for name, value in row.items()} for row in known]


@pytest.mark.parametrize("what", ["metrics", "clients", "participation"])
def test_parquet_holds_every_value_to_the_bit(what: str, folder: Path, run: Run, tmp_path: Path) -> None:
    assert run(str(folder), "--to", "table.parquet", "--what", what).code == 0
    rows = expected(folder, what)
    if what == "clients":
        rows = [{**row, "client": str(row["client"])} for row in rows]  # a column has one type
    assert parquet.read_table(tmp_path / "table.parquet").to_pylist() == rows


def test_a_file_is_replaced_only_when_told_to(folder: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("mine")
    refused = run(str(folder), "--to", "table.csv")
    assert (refused.code, refused.err) == (2, "error: table.csv exists: choose another --to, or pass --overwrite\n")
    assert (tmp_path / "table.csv").read_text() == "mine"
    assert run(str(folder), "--to", "table.csv", "--overwrite").code == 0
    assert (tmp_path / "table.csv").read_text().startswith("round,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--to", "table.xlsx"], "--to must end in .csv or .parquet, got table.xlsx: choose one of them"),
        (
            ["{run}", "--to", "no/table.csv"],
            "no/table.csv cannot be written (No such file or directory): choose",
        ),
        (
            ["empty", "--to", "table.csv"],
            "empty must hold a run or a comparison that has ended, got none: see",
        ),
        (["{begun}", "--to", "table.csv"], "begun must hold metrics to export, got none: choose another --what"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    arguments: list[str], message: str, folder: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "environment.json").write_text("{}")
    refused = run(*(part.format(run=folder, begun="begun") for part in arguments))
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert message in refused.err
    assert not (tmp_path / "table.csv").exists()


def test_export_loads_no_torch(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom fed.cli.main import main\n"
        "assert main(['export', sys.argv[1], '--to', sys.argv[2], '--what', 'participation']) == 0\n"
        "assert not {'torch', 'pandas', 'pyarrow'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, folder, tmp_path / "table.csv"], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "table.csv").stat().st_size
