"""Reports by the first metric, whichever it is: the best value is the highest or the lowest, as the metric says."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fed
from fed.errors import InvalidInput
from fed.reports import charts
from fed.reports.client_scores import last_client_scores, pooled
from fed.reports.conclusions import finding
from fed.reports.html import comparison_report, comparison_svg, write_run_report
from fed.reports.plot_style import styles
from fed.reports.summary import row_of
from fed.reports.tables import columns
from fed.storage.run_folder import to_json
from fed.storage.run_reader import kept_run
from fed.storage.scores import LOSS, NamedMetric, metrics_of, metrics_of_all
from tests.fed.reports.test_html import Reading, record, result_of

TWO = {"mae": "min", "r2": "max"}


def errors(*values: float, metrics: dict[str, str] = TWO, **more: Any) -> dict[str, Any]:
    """A run whose mean absolute errors these are, with an R² of 1 minus each."""
    run = record(*[None] * len(values), **more)
    for line, value in zip(run["metrics"], values, strict=True):
        line |= {"test_mae": value, "test_r2": 1 - value, "test_loss": value**2}
    named = {f"final_test_{name}": run["metrics"][-1][f"test_{name}"] for name in metrics}
    run["summary"] |= {**named, "final_test_loss": values[-1] ** 2, "metrics": metrics}
    return run


def test_the_least_error_is_the_best() -> None:
    runs = {"A": [errors(0.3), errors(0.32)], "B": [errors(0.9), errors(0.92)]}
    assert finding(result_of(runs)) == ("A ends with the lowest test MAE, 0.310 ± 0.014 over 2 seeds.")


def test_differences_are_the_same_when_undefined_values_are_read_back() -> None:
    runs = {"A": [errors(0.3), errors(0.32), errors(0.4)], "B": [errors(math.nan), errors(0.9), errors(0.91)]}
    result = result_of(runs)
    read = replace(
        result,
        rows=json.loads(to_json(result.rows)),
        runs={name: {seed: json.loads(to_json(run)) for seed, run in of.items()} for name, of in result.runs.items()},
    )
    assert read.rows[1]["final_test_mae"] is None
    assert [one.pairs for one in result.differences] == [2]
    assert read.differences == result.differences


@pytest.mark.parametrize("sign", [1, -1], ids=["higher", "lower"])
def test_an_error_ranks_as_its_negative_score_does(sign: int) -> None:
    """Turning values and direction around changes neither the best, nor its ties, nor the rounds to a target."""
    values = {"A": [(4.0, 2.0), (5.0, 2.5)], "B": [(3.0, 2.6), (6.0, 2.9)], "C": [(9.0, 8.0), (9.0, 8.5)]}
    metrics = {"mae": "max" if sign < 0 else "min"}
    runs = {
        name: [errors(*(sign * value for value in of), metrics=metrics) for of in seeds]
        for name, seeds in values.items()
    }
    result = result_of(runs, target=sign * 2.6)
    said = finding(result)
    assert said.startswith("A ends with the ")
    assert "not told apart from it: B (some 3 seeds would)" in said
    assert said.endswith(
        f"A is the first at {sign * 2.6:g}, after 2 rounds, and sends the fewest bytes to get there, 14 kB."
    )
    assert [row["reached"] for row in result.rows] == [2, 1, 0]


def test_a_target_of_an_error_is_reached_from_above() -> None:
    row = row_of("A", "fedavg", {0: errors(0.9, 0.5, 0.6, 0.4)}, [0], 0.5)
    assert (row["metric"], row["reached"], row["rounds_to_target"]) == ("mae", 1, 2.0)
    assert row_of("A", "fedavg", {0: errors(0.9, 0.6)}, [0], 0.5)["reached"] == 0


def test_baselines_of_an_error_bound_it_from_the_other_side() -> None:
    runs = {"Local": [errors(0.9)], "A": [errors(0.3)], "Centralized": [errors(0.2)]}
    said = finding(result_of(runs, {"Local": "local", "Centralized": "centralized"}))
    assert said.endswith("Centralized, the floor, ends at 0.200; Local, the ceiling, ends at 0.900.")


def test_all_metrics_have_a_column_and_their_deviation() -> None:
    result = result_of({"A": [errors(0.2), errors(0.4)]})
    shown = {column.heading: column.texts for column in columns(result)}
    assert [*shown][:3] == ["variant", "final MAE", "final R²"]
    assert (shown["final MAE"], shown["final R²"]) == (["0.300 ± 0.141"], ["0.700 ± 0.141"])
    assert result.rows[0]["final_test_r2_std"] == pytest.approx(0.02**0.5)


def test_page_of_an_error_says_its_name_and_direction() -> None:
    own: dict[str, Any] = {"client_mae_mean": 0.5, "client_mae_std": 0.1, "client_mae_worst_decile": 0.9}
    result = result_of({"A": [errors(0.5, 0.4, **own)], "B": [errors(0.5, 0.3, **own)]}, target=0.35)
    text = "".join(Reading(comparison_report(result, {})).texts)
    for words in ("MAE against rounds and bytes", "is\nat most the target", "those with the highest MAE"):
        assert words in text
    assert "ccuracy" not in text.partition("Settings in force")[0].replace("client_accuracy", "")
    svg = comparison_svg(result)
    assert svg is not None
    assert "test MAE" in svg


def test_variants_of_other_metrics_are_not_compared() -> None:
    runs = {"A": [errors(0.3)], "B": [record(0.9)]}
    assert finding(result_of(runs)) == (
        "Scores do not compare: A is scored by MAE, B by accuracy. Write metrics in the base to score all alike."
    )


def test_scores_of_one_test_set_compare_whoever_else_scores() -> None:
    own: dict[str, Any] = {"client_mae_worst_decile": 0.9}
    runs = {"A": [errors(0.3)], "B": [errors(0.2, **own)]}
    assert finding(result_of(runs)).startswith("Scores do not compare: clients score B ")
    result = result_of(runs, base={"evaluation": {"kind": "both"}})
    assert finding(result).startswith("B ends with the lowest test MAE")


def test_without_a_metric_the_loss_decides() -> None:
    runs = {"A": [errors(0.5, metrics={})], "B": [errors(0.3, metrics={})]}
    result = result_of(runs, target=0.1)
    assert finding(result).startswith("B ends with the lowest test loss, 0.090; ")
    assert [(row["metric"], row["reached"]) for row in result.rows] == [("loss", 0), ("loss", 1)]


def test_undefined_scores_are_never_the_best() -> None:
    for metric in (LOSS, NamedMetric("accuracy")):
        assert max([math.nan, 0.5], key=metric.rank) == max([0.5, math.nan], key=metric.rank) == 0.5


def test_older_runs_have_the_accuracy_alone() -> None:
    old, new = {"final_test_accuracy": 0.9}, {"metrics": TWO}
    assert metrics_of(old) == [NamedMetric("accuracy")]
    assert metrics_of({"final_test_accuracy": None}) == [LOSS]
    assert [metric.name for metric in metrics_of_all([old, {}, new, new])] == ["accuracy", "mae", "r2"]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_kept_run_is_listed_by_its_first_metric(has_ended: bool, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"data": {"clients": 3}, "rounds": {"count": 1}, "metrics": ["log_loss", "accuracy"]}
    run = fed.simulate(fed.Experiment(**keys), output=tmp_path)
    if not has_ended:
        (tmp_path / "summary.json").unlink()
    found = kept_run(tmp_path)
    assert found.metric == "log_loss"
    assert found.score == pytest.approx(run.summary["final_test_log_loss"], rel=1e-15)


@pytest.mark.long
def test_a_comparison_follows_its_first_metric_to_the_end(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "data": {"clients": 11},
        "rounds": {"count": 2},
        "evaluation": "clients",
        "metrics": ["log_loss", "accuracy"],
    }
    compare: list[Any] = [{"name": "A"}, {"name": "B", "local.lr": 0.001}]
    comparison = fed.Comparison(base=base, compare=compare, seeds=[0, 1], target=2.0)
    result = fed.compare(comparison, output=tmp_path / "both")
    good, bad = result.rows
    assert good["metric"] == bad["metric"] == "log_loss"
    assert good["final_test_log_loss"] < bad["final_test_log_loss"]
    assert finding(result).startswith("A ends with the lowest test log-loss")
    for row in result.rows:  # two of eleven are the worst tenth
        assert row["client_log_loss_worst_decile"] > row["client_log_loss_mean"]
        assert row["client_accuracy_worst_decile"] < row["client_accuracy_mean"]
    with (tmp_path / "both" / "comparison.csv").open() as file:
        assert [float(row["final_test_log_loss"]) for row in csv.DictReader(file)] == [
            row["final_test_log_loss"] for row in result.rows
        ]
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "Distribution over clients" in page
    assert "Clients of all seeds together." in page
    folders = [tmp_path / "both" / "runs" / "a" / f"seed-{seed}" for seed in (0, 1)]
    assert len(pooled(folders, "log_loss")) == 22
    means = [last_client_scores(folder)["log_loss"].mean() for folder in folders]
    assert np.mean(means) == pytest.approx(good["client_log_loss_mean"], rel=1e-12)
    text = write_run_report(folders[0]).read_text(encoding="utf-8")
    for words in ("Distribution over clients", "<td>log-loss</td>", "<td>accuracy</td>", "Other metrics by round"):
        assert words in text


def test_scores_of_clients_are_those_of_the_last_round(tmp_path: Path) -> None:
    rows = [(1, 0, 0.1), (1, 1, 0.2), (3, 0, 0.5), (3, 1, None), (3, 2, 0.7)]
    lines = [
        json.dumps({"round": number, "client": client, "samples": 4, "loss": 1.0, "mae": value})
        for number, client, value in rows
    ]
    assert last_client_scores(tmp_path) == {}
    (tmp_path / "clients.jsonl").write_text("\n".join(lines) + '\n{"round": 4, "client": 0, "ma', encoding="utf-8")
    found = last_client_scores(tmp_path)
    assert {name: values.tolist() for name, values in found.items()} == {"loss": [1.0] * 3, "mae": [0.5, 0.7]}
    (tmp_path / "clients.jsonl").write_text('{"round": 1}\n7\n', encoding="utf-8")
    with pytest.raises(InvalidInput, match="each line must be a client's scores, got '7"):
        last_client_scores(tmp_path)


def drawn_steps(values: list[float]) -> list[tuple[float, float]]:
    """The corners of the line of a distribution, in points."""
    svg = charts.distribution({"A": np.array(values)}, styles({"A": ""}), label="accuracy")
    (path,) = (of for of in re.findall(r'<path d="([^"]*)" clip-path', svg) if of.count("L") > 1 or "L" not in of)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path)]


def test_the_picture_steps_up_by_a_share_at_each_client() -> None:
    steps = drawn_steps([4.0, 1.0, 2.0])
    (left, low), (right, high) = steps[0], steps[-1]
    corners = {(round(3 * (x - left) / (right - left), 3), round(3 * (y - low) / (high - low), 3)) for x, y in steps}
    # x from 1 to 4 becomes 0 to 3; the share rises by a third at each of 1, 2 and 4
    assert corners == {(0, 0), (0, 1), (1, 1), (1, 2), (3, 2), (3, 3)}
    assert len(drawn_steps([float(number) for number in range(5000)])) < 1000
