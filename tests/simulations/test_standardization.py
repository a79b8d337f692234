"""Tables standardized over all clients: the first exchange finds the mean and the deviation of the pooled data."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fed
from fed.cli.main import main
from fed.config import yaml
from fed.errors import InvalidData, InvalidExperiment
from fed.simulations.standardization import standardized

pytestmark = pytest.mark.usefixtures("device")

ROWS = 90


def tables(folder: Path) -> tuple[list[pd.DataFrame], dict[str, Any]]:
    """Three clients' tables, one of them much longer, an empty fourth, and the experiment that reads them."""
    draw = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "plain": draw.normal(3, 2, ROWS),
            "far": 1e6 + 1e-3 * draw.normal(size=ROWS),
            "tiny": 1e-20 * draw.normal(size=ROWS),
            "centred": np.resize([1e-16, -1e-16], ROWS),
            "huge": 1e30 * draw.normal(5, 1, ROWS),
            "constant": 0.1,
            "colour": np.resize(["red", "white", "red"], ROWS),
            "holes": np.where(draw.random(ROWS) < 0.2, np.nan, draw.normal(size=ROWS)),
            "ill": draw.permutation(np.resize(["no", "yes"], ROWS)),
        }
    )
    parts = [frame[:70], frame[70:89], frame[89:], frame[:0]]
    folder.mkdir()
    for name, part in zip("abcd", parts, strict=True):
        part.to_csv(folder / f"{name}.csv", index=False)
    features = dict.fromkeys(("plain", "far", "tiny", "centred", "huge", "constant"), "real")
    table = {
        "features": {**features, "colour": ["red", "white"], "holes": {"missing": 0.5}},
        "target": "ill",
        "classes": ["no", "yes"],
        "standardize": "federated",
    }
    data = {"kind": "csv", "path": str(folder), "partition": "file", "test_fraction": 0.0}
    return parts, {"data": data, "table": table, "model": "logistic", "rounds": {"count": 1}, "local": {"lr": 1e-3}}


def found(experiment: fed.Experiment, data: fed.FederatedData | None = None) -> dict[str, tuple[float, float]]:
    table = standardized(experiment, data)[0].table
    assert table is not None
    assert isinstance(table.standardize, dict)
    assert not table.sought
    return {name: (mean, deviation or 0.0) for name, (mean, deviation) in table.standardize.items()}


def pooled(parts: list[pd.DataFrame], name: str) -> tuple[float, float]:
    """Mean and deviation by definition, over all rows, in arithmetic of 80 bits."""
    values = np.concatenate([part[name].fillna(0.5).to_numpy() for part in parts]).astype(np.longdouble)
    mean = values.sum() / len(values)
    return float(mean), float(np.sqrt(np.square(values - mean).sum() / len(values)))


def test_moments_are_those_of_the_pooled_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts, keys = tables(tmp_path / "tables")
    moments = found(fed.Experiment(**keys))
    assert [*moments] == ["plain", "far", "tiny", "centred", "huge", "constant", "holes"]  # and no category
    for name in ("plain", "far", "huge", "holes"):
        # Float64 rounds each of some 100 additions by 1.1e-16.
        assert moments[name] == pytest.approx(pooled(parts, name), rel=1e-12), name
    for name in ("tiny", "centred"):  # whose mean is much smaller than its numbers
        mean, deviation = pooled(parts, name)
        assert moments[name][1] == pytest.approx(deviation, rel=1e-12), name
        assert moments[name][0] == pytest.approx(mean, abs=1e-12 * deviation), name
    assert moments["constant"] == pytest.approx((0.1, 1.0), rel=1e-15)
    assert [record.getMessage() for record in caplog.records if "do not differ" in record.getMessage()] == [
        "standardize: the numbers of constant do not differ, and become 0"
    ]


def test_held_out_shares_and_dropped_rows_do_not_count(tmp_path: Path) -> None:
    parts, keys = tables(tmp_path / "tables")
    keys["table"]["features"]["holes"] = "real"
    keys["table"]["missing"] = "drop"
    whole = [part.dropna() for part in parts]
    assert found(fed.Experiment(**keys))["plain"] == pytest.approx(pooled(whole, "plain"), rel=1e-12)
    experiment = fed.Experiment(**{**keys, "evaluation": {"kind": "clients", "fraction": 0.5}})
    run = fed.simulate(experiment)
    given = fed.simulate(standardized(experiment, None)[0])
    table = run.experiment.table
    assert table is not None
    assert table == given.experiment.table
    assert table.moments["plain"][0] != pytest.approx(pooled(whole, "plain")[0], rel=1e-6)
    assert all(map(torch.equal, run.model.state_dict().values(), given.model.state_dict().values()))


def test_a_resumed_run_keeps_its_numbers_and_asks_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, keys = tables(tmp_path / "tables")
    experiment = fed.Experiment(**{**keys, "checkpoints": {"every": 1}, "rounds": {"count": 2}})
    with caplog.at_level(logging.INFO):
        fed.simulate(experiment, output=tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if "standardized over" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("standardized over 3 clients, by mean and deviation: plain ")
    kept = yaml.parse((tmp_path / "run" / "experiment.yaml").read_text())["table"]["standardize"]
    assert kept == {name: [*numbers] for name, numbers in found(experiment).items()}
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    monkeypatch.setattr("fed.simulations.standardization.exchanged", lambda _: pytest.fail("a second exchange"))
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "checkpoints" / "2.safetensors").unlink(missing_ok=True)
    assert main(["simulate", "--resume", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    fed.simulate(experiment, output=tmp_path / "run", resume=True)  # which seeks them, as it did at first


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_goes_on_with_what_its_runs_have_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, keys = tables(tmp_path / "tables")
    keys["checkpoints"] = {"every": 1}
    comparison = fed.Comparison(base=keys, grid={"local.lr": [1e-3, 1e-2]})
    whole = fed.compare(comparison, output=tmp_path / "compared")
    ended = next((tmp_path / "compared").glob("runs/*/seed-0/summary.json"))
    monkeypatch.setattr("fed.simulations.standardization.exchanged", lambda _: pytest.fail("a second exchange"))
    ended.unlink()
    again = fed.compare(comparison, output=tmp_path / "compared", resume=True)
    scores = [[row["final_test_accuracy"] for row in result.rows] for result in (whole, again)]
    assert scores[0] == scores[1]
    assert {row["status"] for row in again.rows} == {"finished"}
    changed = fed.Comparison(
        base={**keys, "table": {**keys["table"], "standardize": {"plain": [0, 1]}}}, grid={"local.lr": [1e-3, 1e-2]}
    )
    with pytest.raises(InvalidExperiment, match=r"table\.standardize"):
        fed.compare(changed, output=tmp_path / "compared", resume=True)


def test_frames_of_a_program_are_standardized_as_files(tmp_path: Path) -> None:
    parts, keys = tables(tmp_path / "tables")
    given = dict(zip("abc", parts, strict=False))
    of_files = fed.Experiment(**keys)
    experiment = of_files.override({"data": None})
    data = fed.FederatedData(given, table=experiment.table)
    assert found(experiment, data) == found(of_files)
    assert fed.simulate(experiment, data=given).experiment.table == standardized(of_files, None)[0].table
    dealt = fed.partition(pd.concat(parts), table=experiment.table, clients=2)
    with pytest.raises(InvalidData, match="got data that are no frames any more: give frames by client"):
        fed.simulate(experiment, data=dealt)


SECURE = {"minimum_cohort": 3, "max_drop_out": 0.0}


def test_secure_sums_need_bounds_and_find_the_same(tmp_path: Path) -> None:
    parts, keys = tables(tmp_path / "tables")
    keys["secure_aggregation"] = {**SECURE, "max_weight": 1000}
    with pytest.raises(InvalidExperiment, match=r"needs bounds of each real .* of 'plain'"):
        fed.Experiment(**keys)
    bounds = {"plain": [-10, 20], "constant": [-1, 1], "holes": [-5, 5]}
    features: dict[str, Any] = {name: {"bounds": ends} for name, ends in bounds.items()}
    features["holes"]["missing"] = 0.5
    keys["table"] = {**keys["table"], "features": {**features, "colour": ["red", "white"]}}
    open_keys = {**keys, "secure_aggregation": None}
    hidden, plain = (found(fed.Experiment(**each)) for each in (keys, open_keys))
    # Fixed point: 3 clients of weight 1000 leave 2⁴⁰ levels, of which a mean loses one.
    for name in ("plain", "holes"):
        width = bounds[name][1] - bounds[name][0]
        mean, deviation = pooled(parts, name)
        assert plain[name] == pytest.approx((mean, deviation), rel=1e-12)
        assert abs(hidden[name][0] - mean) < width / 2**40
        assert abs(hidden[name][1] ** 2 - deviation**2) < 2 * width**2 / 2**40
    assert hidden["constant"] == pytest.approx((0.1, 1.0), rel=0, abs=2 / 2**40)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"algorithm": "dpsgd"}, "needs a coordinator that adds up what clients find, got algorithm dpsgd"),
        ({"algorithm": "allreduce"}, "needs a coordinator that adds up what clients find, got algorithm allreduce"),
        ({"stages": ["python:tests.trial_stages:Shakes"]}, "needs clients' sums as they are, got stages"),
        ({"adversaries": {"kind": "sign_flip", "fraction": 0.3}}, "needs honest clients"),
    ],
)
def test_exact_sums_without_a_place_are_refused(tmp_path: Path, others: dict[str, Any], said: str) -> None:
    _, keys = tables(tmp_path / "tables")
    with pytest.raises(InvalidExperiment) as caught:
        fed.Experiment(**{**keys, **others})
    assert said in str(caught.value)
    assert "write means and deviations" in str(caught.value)
