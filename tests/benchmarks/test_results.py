"""Tables of results come from folders of comparisons, and every table has its place and its variants."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import fed
from fed.reports.summary import row_of

ROOT = Path(__file__).resolve().parent.parent.parent
SUMMARY = {
    "status": "finished",
    "metrics": {"accuracy": "max"},
    "final_test_accuracy": 0.75,
    "final_test_loss": 0.5,
    "final_test_c_index": 0.75,
    "bytes_up": 2_000,
    "bytes_down": 1_000,
    "wall_s": 1.0,
    "virtual_s": 2.0,
}
LINE = {
    "round": 1,
    "test_accuracy": 0.75,
    "virtual_s": 2.0,
    "bytes_up": 2_000,
    "bytes_down": 1_000,
    "client_accuracy_mean": 0.7,
    "client_accuracy_std": 0.1,
    "client_accuracy_worst_decile": 0.4,
}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("results")


def test_every_table_has_one_place_between_markers(results: Any) -> None:
    for name, result in results.RESULTS.items():
        text = result.page.read_text(encoding="utf-8")
        assert [text.count(marker) for marker in results._markers(name)] == [1, 1], name


@pytest.mark.parametrize(
    "name",
    [
        *("algorithms", "digits", "heterogeneous", "peers", "compression", "secure", "attacks"),
        *("personal", "stragglers", "partial_work", "mnist", "similarity", "tcga", "privacy"),
    ],
)
def test_tables_hold_figures_of_their_variants(results: Any, name: str) -> None:
    compared = importlib.import_module("compared")
    result = results.RESULTS[name]
    found = [compared.Compared(Path(), *rows_and_runs(of)) for of in result.comparisons]
    head, rule, *lines = result.table(*found).splitlines()
    assert rule == "|---" * (head.count("|") - 1) + "|"
    assert all(re.search(r"\d", line.partition(" | ")[2]) for line in lines)
    assert len(lines) * (head.count("|") - 2) >= len({variant for of in found for variant in of.rows})
    assert len({line.count("|") for line in (head, *lines)}) == 1


def rows_and_runs(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a comparison of examples/ would come to, all runs alike."""
    comparison = fed.Comparison.load(ROOT / "examples" / f"{name}.yaml")
    run = {"metrics": [LINE], "summary": SUMMARY}
    rows = {variant: row_of(variant, "", {0: run, 1: run}, [0, 1], 0.5) for variant in comparison.variants()}
    return rows, {variant: {0: run, 1: run} for variant in rows}


@pytest.mark.long
def test_a_table_is_written_without_a_run(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"data": {"clients": 4}, "rounds": {"count": 1}, "simulation": {"workers": 0}}
    compare: Any = [
        {"name": name, "local.lr": lr} for name, lr in (("dropped", 0.01), ("FedAvg", 0.1), ("FedProx", 0.2))
    ]
    comparison = fed.Comparison(base=base, compare=compare, seeds=[0, 1])
    rows = fed.compare(comparison, output=tmp_path / "partial_work").rows
    page = tmp_path / "page.md"
    page.write_text("before\n{}\nold\n{}\nafter".format(*results._markers("partial_work")))
    table = results.ResultTable(results.RESULTS["partial_work"].table, ("partial_work",), page)
    monkeypatch.setitem(results.RESULTS, "partial_work", table)
    monkeypatch.setattr(sys, "argv", ["results.py", "partial_work", "--from", str(tmp_path)])
    assert results.main() == 0
    text = page.read_text()
    for row in rows:
        assert f"{row['final_test_accuracy']:.3f} ± {row['final_test_accuracy_std']:.3f}" in text
    assert text.startswith("before")
    assert text.endswith("after")
    assert "old" not in text
    monkeypatch.setattr(sys, "argv", ["results.py", "partial_work", "--from", str(tmp_path / "none")])
    assert results.main() == 1
    assert "must hold a comparison that has ended, got no comparison.json" in " ".join(capsys.readouterr().err.split())
