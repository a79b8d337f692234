"""The benchmark of secure aggregation runs true sessions and measures what it says."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fed.secure_aggregation.client
import fed.secure_aggregation.coordinator
from fed.secure_aggregation.masks import add_masks

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def secure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("secure")


@pytest.mark.parametrize("clients", [10, 120])
def test_sum_is_exact_and_every_mask_is_counted(secure: Any, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[Any, list[int]] = {fed.secure_aggregation.coordinator: [], fed.secure_aggregation.client: []}
    for module, found in counts.items():

        def counted(lanes: Any, masks: Any, found: list[int] = found, **options: Any) -> None:
            found.append(len(masks))
            add_masks(lanes, masks)

        monkeypatch.setattr(module, "add_masks", counted)
    driven, staying = secure.Driver(secure.Setting(clients, 50, 0.1), clients).drive(), clients * 9 // 10
    assert driven.total.clients == driven.plain.clients == staying
    assert np.array_equal(driven.total.lanes, driven.plain.lanes)
    assert [*counts.values()] == [[driven.masks["coordinator"]], [driven.masks["clients"]] * staying]


def test_clients_that_are_not_timed_cost_the_coordinator_alike(secure: Any) -> None:
    setting = secure.Setting(40, 50, 0.1)
    driven, whole = (secure.Driver(setting, timed).drive() for timed in (3, 40))
    assert driven.plain is None
    assert driven.masks == whole.masks == {"clients": 40, "coordinator": 36 + 4 * 36}
    assert len(driven.spent_s["clients"]) == 3
    assert {stage for one in driven.spent_s["clients"] for stage in one} == secure.STAGES["clients"].keys()
    assert driven.spent_s["coordinator"][0].keys() == secure.STAGES["coordinator"].keys()
    assert vars(fed.secure_aggregation.client)["add_masks"] is add_masks


def test_a_run_writes_medians_and_ratios(secure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, page = tmp_path / "secure.json", tmp_path / "page.md"
    options = "--quick", "--without-flower", "--repetitions", "1"
    page.write_text("\n".join(secure.SECURE))
    monkeypatch.setattr(secure, "NUMBERS", (100,))
    monkeypatch.setattr("report.PAGE", page)
    monkeypatch.setattr(sys, "argv", ["secure.py", *options, "--output", str(output)])
    assert secure.main() == 0
    rows = json.loads(output.read_text())["rows"]
    assert [tuple(row["size"].values()) for row in rows] == [
        (clients, 100, dropped, 0.1, 1) for clients in (10, 32) for dropped in (0.0, 0.1)
    ]
    for row in rows:
        for side, stage in secure.OF_MASKS.items():
            assert row[side]["times_limit"] == row[side][f"{stage}_s"] / row[side]["limit_s"] > 0
    assert page.read_text() == "\n".join(secure.SECURE)  # a quick run leaves the page alone


def test_what_misses_its_target_is_said(secure: Any) -> None:
    sides = {"clients": {"masking_s": 0.061, "times_limit": 9.0}, "coordinator": {"total_s": 5.1, "times_limit": 9.0}}
    sizes = [vars(replace(secure.Setting(1000, 1_000_000, 0.1), cores=cores)) for cores in (1, 2)]
    assert secure.shortfalls({"rows": [{"size": size, **sides} for size in sizes]}) == [
        "1,000, 1,000,000, 10%, 10%, 1: clients: masking ≤ 60 ms must hold, got 0.061 s",
        "1,000, 1,000,000, 10%, 10%, 2: coordinator: together ≤ 5,000 ms must hold, got 5.1 s",
    ]


def test_flower_is_absent_where_it_is_not_installed(secure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(secure, "PEERS", ROOT / "nowhere")
    found = secure.flower([])
    assert "not installed" in found["absent"]
    *_, table = secure.tables({"flower": found, "rows": []})
    assert table.rows == [["Flower's SecAgg+", f"absent: {found['absent']}"]]


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
def test_flower_is_measured_beside_us(secure: Any) -> None:
    row = secure.measure(secure.Setting(10, 1000, 0.1), 1, 1.0)
    found = secure.flower([row])
    (theirs,) = found["rows"]
    assert theirs["was_run"]
    assert set(theirs["clients"]) == {f"{stage}_s" for stage in secure.STAGES["clients"]}
    *_, table = secure.tables({"flower": found, "rows": [row]})
    assert len(table.rows) == 1
