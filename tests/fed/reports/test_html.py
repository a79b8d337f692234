"""Reports: whole pages that need nothing else, claim no more than the runs show, and take names for what they are."""

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx
import numpy as np
import pytest
import torch
from rich.console import Console

import fed
from fed.clients.data.describe import partition_of
from fed.errors import InvalidData
from fed.reports import charts, heat_maps, html
from fed.reports.conclusions import failures, finding
from fed.reports.html import comparison_report, comparison_svg, run_report, write_run_report
from fed.reports.plot_style import EM_INCH, INK, NARROW_INCH, WIDTH_INCH, styles, svg_of
from fed.reports.summary import ComparisonResult, row_of
from fed.reports.tables import columns, table
from fed.reports.text_tables import latex, markdown
from tests.simulations.users_parts import on_demand, small
from tests.thinned import thinned

pytestmark = pytest.mark.xdist_group("report")  # so that the page of most tests is made once
ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "<script>a(1)</script>&amp;\"'>$x_{1$ \\frac{"
VOID = {"meta", "br", "img", "input", "link", "hr"}


class Reading(HTMLParser):
    """What a browser would make of a page: its elements, properly nested, and what they refer to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def line(number: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    measured = {"test_accuracy": accuracy, "test_loss": None if accuracy is None else 1 - accuracy, "train_loss": 0.3}
    return {"round": number, "virtual_s": float(number), "bytes_up": 3000, "bytes_down": 4000, **measured, **more}


def record(*accuracies: float | None, sends: bool = True, **more: Any) -> dict[str, Any]:
    none = {} if sends else {"bytes_up": 0, "bytes_down": 0}
    metrics = [line(number, accuracy, **none, **more) for number, accuracy in enumerate(accuracies, 1)]
    totals = {key: sum(entry[key] for entry in metrics) for key in ("bytes_up", "bytes_down")}
    final = {"final_test_accuracy": accuracies[-1], "final_test_loss": 0.2}
    counts = {"rounds": len(metrics), "clients": 3, "parameters": 1234}
    summary = {"status": "finished", **final, **totals, **counts, "wall_s": 1.0, "virtual_s": 2.0, "seed": 0}
    return {"metrics": metrics, "summary": summary}


def result_of(
    runs: dict[str, list[dict[str, Any]]], kinds: dict[str, str] | None = None, **keys: Any
) -> ComparisonResult:
    """A comparison of made-up runs, by variant; kinds of algorithms are fedavg unless given."""
    compare = [{"name": name, "algorithm": {"kind": (kinds or {}).get(name, "fedavg")}} for name in runs]
    seeds = list(range(max(map(len, runs.values()))))
    comparison = fed.Comparison(**{"compare": compare, "seeds": seeds, **keys})
    by_seed = {name: dict(enumerate(of)) for name, of in runs.items()}
    rows = [
        row_of(name, variant.algorithm.kind, by_seed[name], seeds, comparison.target)
        for name, variant in comparison.variants().items()
    ]
    return ComparisonResult(comparison, rows, by_seed)


def data_of(clients: int, classes: int, **more: Any) -> fed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    pairs: dict[int | str, tuple[torch.Tensor, torch.Tensor]] = {}
    for client in range(clients):
        labels = torch.randint(classes, (5,), generator=generator)
        labels[0] = client % classes
        pairs[client] = (torch.zeros(5, 2), labels)
    return fed.FederatedData(train=pairs, **more)


@pytest.fixture(scope="module")
def several() -> ComparisonResult:
    own = {"client_accuracy_mean": 0.4, "client_accuracy_std": 0.1}
    runs = {
        "FedAvg": [record(0.5, None, 0.8), record(0.6, None, 0.9)],
        "_under $x_1$ 漢字": [record(0.5, 0.7, 0.85), record(0.6, 0.7, 0.95)],
        HOSTILE: [record(0.2, 0.3, 0.4, sends=False, **own), record(0.2, 0.3, 0.5, sends=False, **own)],
    }
    return result_of(runs, {HOSTILE: "local"}, name=HOSTILE, target=0.8)


@pytest.fixture(scope="module")
def page(several: ComparisonResult) -> str:
    return comparison_report(
        several, {"Who holds what": partition_of(data_of(100, 10)), HOSTILE: partition_of(data_of(3, 2))}
    )


def test_page_is_well_nested_and_asks_for_nothing_else(page: str) -> None:
    reading = Reading(page)
    assert reading.open == []
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in reading.references)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", page)
    assert not {"link", "iframe", "object", "base", "form"} & set(reading.tags)


def test_page_runs_its_own_script_and_no_other(page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert scripts == [(Path(html.__file__).with_name("page.js")).read_text(encoding="utf-8")]
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy == [f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"], (
        "nothing is loaded, and only the script of this hash runs"
    )


def test_pictures_hold_the_values_of_their_lines(several: ComparisonResult) -> None:
    lines = {"A": charts.Curve(*(np.array([1.0, 2.0, 4.0]) for _ in range(6)))}
    wide, narrow = (charts.curves(lines, styles({"A": ""}), label="loss", width_inch=width) for width in (9.6, 3.6))
    for svg, beside in ((wide, True), (narrow, False)):
        kept = ElementTree.fromstring(svg).findtext("{http://www.w3.org/2000/svg}metadata")
        first, second = json.loads(kept or "")
        assert first["labels"] == ["round", "loss"]
        assert [first["lines"][0][key] for key in ("name", "x", "y")] == ["A", [1, 2, 4], [1, 2, 4]]
        assert second["lines"][0]["x"] == [2, 4, 8]
        assert (first["box"][2] < second["box"][0]) == beside
        assert (first["box"][3] < second["box"][1]) == (not beside)
    assert "<metadata>" not in (comparison_svg(several) or "")


def test_names_are_shown_as_they_stand_and_never_run(page: str) -> None:
    reading = Reading(page)
    assert page.count("<script") == 1, "its own"
    # The title, the heading, the finding, the table, the changes and a heading of a partition.
    assert sum(HOSTILE in text for text in reading.texts) >= 6
    assert sum(text.startswith(HOSTILE[:31]) and text.endswith("…") for text in reading.texts) == 4, (
        "legends, in wide and in narrow pictures"
    )
    assert any("_under $x_1$ 漢字" in text for text in reading.texts)


def test_picture_identifiers_are_unique_and_references_resolve(page: str) -> None:
    reading = Reading(page)
    assert [name for name, times in reading.ids.items() if times > 1] == []
    inner = {reference[1:] for reference in reading.references if reference.startswith("#")}
    assert inner | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(reading.ids)


def test_page_takes_its_ink_from_the_reader(page: str) -> None:
    assert INK not in page
    assert "currentColor" in page
    assert "prefers-color-scheme: dark" in page


def test_page_has_every_variant_its_figures_and_its_settings(several: ComparisonResult, page: str) -> None:
    text = "".join(Reading(page).texts)
    for column in columns(several):
        assert all(cell in text for cell in column.texts), column.heading
    for expected in ("0.850 ± 0.071", "algorithm.kind: local", "batch_size: 16", "Clients' own models", "torch"):
        assert expected in text


def test_same_runs_give_the_same_picture(several: ComparisonResult) -> None:
    assert comparison_svg(several) == comparison_svg(several)


def test_picture_is_a_file_of_its_own(several: ComparisonResult) -> None:
    svg = comparison_svg(several)
    assert svg is not None
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {(element.text or "").strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"FedAvg", HOSTILE[:31] + "…", "_under $x_1$ 漢字", "target", "0.8", "round"} <= texts


def test_without_measurements_there_is_a_page_and_no_picture() -> None:
    failed = {"metrics": [], "summary": {"status": "failed", "reason": "loss <is> NaN"}}
    result = result_of({"A": [failed]}, target=0.5)
    assert comparison_svg(result) is None
    text = "".join(Reading(comparison_report(result, {})).texts)
    assert "A: seed 0: loss <is> NaN" in text
    assert "No variant was measured to the end." in text


def failed(reason: str) -> dict[str, Any]:
    return {"metrics": [], "summary": {"status": "failed", "reason": reason}}


@pytest.mark.usefixtures("undrawn")
def test_each_failure_reason_stands_once_below_the_table() -> None:
    reason = "the training loss of client 7 is not finite"
    runs = {"A": [record(0.5)] * 4, "B": [failed(reason), failed(reason), record(0.5), failed("died")]}
    result = result_of(runs)
    assert failures(result) == [f"B: seeds 0, 1: {reason}; seed 3: died"]
    assert columns(result)[-1].texts == ["finished", "failed"]
    assert comparison_report(result, {}).count(reason) == 1


def test_terminal_table_does_not_break_the_words_of_a_name() -> None:
    name = "trial 4: local.lr=0.037, local.batch_size=16"
    result = result_of({name: [record(0.5)], "B": [failed("died")]}, target=0.5)
    for width in (80, 100, 200):
        shown = io.StringIO()
        Console(width=width, file=shown).print(table(columns(result), width))
        assert all(word in shown.getvalue() for word in (*name.split(), "finished"))
    assert name in shown.getvalue()


@pytest.mark.usefixtures("undrawn")
def test_where_accuracy_is_not_measured_the_loss_is_drawn() -> None:
    runs = {"A": [record(0.5, 0.6)], "B": [record(0.5, 0.7)]}
    for of in runs.values():
        of[0]["summary"]["final_test_accuracy"] = None
        of[0]["metrics"] = [{**entry, "test_accuracy": None} for entry in of[0]["metrics"]]
    text = "".join(Reading(comparison_report(result_of(runs), {})).texts)
    assert "Loss against rounds and bytes" in text
    assert "final loss" in text


@pytest.mark.usefixtures("undrawn")
def test_page_of_private_runs_says_what_they_cost_together() -> None:
    runs = {"A": [record(0.5)], "B": [record(0.6)]}
    for (run,) in runs.values():
        run["summary"] |= {"epsilon": 2.0, "delta": 1e-5}
    result = result_of(runs)
    note = "ε = 4 at δ = 2e-05 for those whose data are in all of the 2 private runs (the sums of theirs)."
    assert note in " ".join("".join(Reading(comparison_report(result, {})).texts).split())
    assert "\\(the sums of theirs\\)" in markdown(result)
    assert r"Privacy: $\varepsilon$ = 4 at $\delta$ = 2e-05" in latex(result)


def test_table_has_epsilon_of_private_variants() -> None:
    runs = {name: [record(0.5), record(0.6)] for name in "ABC"}
    assert "ε of a run" not in {column.heading for column in columns(result_of(runs))}
    spent = [(("A", 0), 1.9994), (("A", 1), 2.5), (("B", 0), 3.0)]
    for (name, seed), epsilon in spent:
        runs[name][seed]["summary"] |= {"epsilon": epsilon, "delta": 1e-5}
    result = result_of(runs)
    (column,) = [column for column in columns(result) if column.heading == "ε of a run"]
    assert column.texts == ["2.5", "3", "–"]
    assert column.values == [2.5, 3.0, None]
    assert "ε of a run" in "".join(Reading(comparison_report(result, {})).texts)
    assert r"\varepsilon$ of a run" in latex(result)
    runs["B"][0]["summary"]["delta"] = 1e-6
    assert "3 at δ = 1e-06" in markdown(result_of(runs))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "settings", thinned([{}, {"algorithm": {"kind": "dpsgd"}}, {"algorithm": {"kind": "centralized"}}], quick=1)
)
def test_single_run_has_a_page_of_its_own(settings: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"name": HOSTILE, "data": {"clients": 5}, "rounds": {"count": 2}, **settings}
    run = fed.simulate(fed.Experiment(**keys))
    reading = Reading(run_report(run, partition_of(data_of(5, 10))))
    text = "".join(reading.texts)
    assert reading.open == []
    assert reading.tags["script"] == 1, "its own"
    assert f"{run.summary['final_test_accuracy']:.4f}" in text
    assert "count: 2" in text


@pytest.mark.usefixtures("undrawn")
def test_page_of_a_private_run_shows_what_it_spent() -> None:
    run = fed.simulate(fed.Experiment(data={"clients": 5}, rounds={"count": 2}))
    assert "Privacy spent" not in run_report(run, None)
    private = replace(
        run,
        metrics=[{**line, "epsilon": 0.5 * line["round"]} for line in run.metrics],
        summary={**run.summary, "epsilon": 0.99801, "delta": 1e-5},
    )
    text = "".join(Reading(run_report(private, None)).texts)
    assert "Privacy spent by round" in text
    assert "ε = 0.999 at δ = 1e-05" in text
    assert "epsilon=0.99801, delta=1e-05" in repr(private)


def test_a_page_of_peers_shows_their_graph_and_consensus(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    keys: dict[str, Any] = {"data": {"clients": 5}, "rounds": {"count": 2}, "algorithm": "dpsgd"}
    fed.simulate(fed.Experiment(**keys), output=tmp_path / "peers")
    page = write_run_report(tmp_path / "peers").read_text(encoding="utf-8")
    assert "Consensus by round" in page
    drawn = page.partition('aria-label="Peers and their neighbours"')[2].partition("</figure>")[0]
    assert re.findall(r">(\d)</text>", drawn) == [*"01234"]
    fed.simulate(fed.Experiment(**{**keys, "algorithm": "fedavg"}), output=tmp_path / "clients")
    request.getfixturevalue("undrawn")
    assert "Peers and their neighbours" not in write_run_report(tmp_path / "clients").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_comparison_draws_each_graph_of_peers_once(tmp_path: Path) -> None:
    base: dict[str, Any] = {"data": {"clients": 4}, "rounds": {"count": 1}, "model": {"kind": "logistic"}}
    ring = {"algorithm": "dpsgd", "topology": "ring"}
    compare: Any = [
        {"name": "on a ring", **ring},
        {"name": "tracked", **ring, "algorithm": "gradient_tracking"},
        {"name": "all", **ring, "topology": "complete"},
        {"name": "pairs", "algorithm": "noloco"},
        {"name": "led", "algorithm": "fedavg"},
        {"name": "alone", "algorithm": "local"},
    ]
    fed.compare(fed.Comparison(base=base, compare=compare), output=tmp_path / "both")
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert Reading(page).open == []
    drawn = re.findall('aria-label="Peers and their neighbours: ([^"]*)">(.*?)</figure>', page, re.DOTALL)
    assert [names for names, _ in drawn] == ["on a ring, tracked", "all", "pairs"]
    assert [len(re.findall(r"<path [^>]*clip-path", svg)) for _, svg in drawn] == [4, 6, 2]
    assert all(re.findall(r">(\d)</text>", svg) == [*"0123"] for _, svg in drawn)


def test_the_page_of_a_real_peer_shows_what_it_saw() -> None:
    run = fed.simulate(fed.Experiment().override({"data.clients": 5, "rounds.count": 3}))
    seen = [{"members": 4 - late, "neighbours": 2, "late": late} for late in (0, 1, 1)]
    metrics = [{**line, **its} for line, its in zip(run.metrics, seen, strict=True)]
    of_peer = fed.Run(run.experiment, metrics, {**run.summary, "peer": "<ann>", "clients": 3}, run.model)
    page = run_report(of_peer, None, nx.Graph([("<ann>", "ben"), ("<ann>", "$cy$")]))
    reading = Reading(page)
    assert reading.open == []
    text = "".join(reading.texts)
    for words in ("<ann>", "ben", "$cy$", "members at the end", "mixed without", "neighbours", "members"):
        assert words in text
    assert "This peer and its neighbours" in text
    assert "What became of tasks" not in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "travelled in clear: the coordinator could see them"),
        ({"hierarchy": {"kind": "edges", "fan_out": 3}}, "its edges could see those of their clients"),
        (
            {"secure_aggregation": {"max_weight": 400}},
            "With the protocol, which was emulated here, a",
        ),
        (
            {"secure_aggregation": {"max_weight": 400, "mode": "real"}},
            "The coordinator could see who took part and when, and the sums of 2 rounds, each over 6 clients",
        ),
        ({"secure_aggregation": {"max_weight": 3, "clip": 0.001}}, "% of a round's numbers were clipped"),
        ({"secure_aggregation": {"max_weight": 3}}, "12 weights were capped"),
        ({"secure_aggregation": {"max_weight": 400}, "devices.failure": 0.9}, "in no round were enough clients left"),
        ({"algorithm": "dpsgd"}, ""),
    ],
    ids=str,
)
def test_page_says_what_the_coordinator_could_see(changes: dict[str, Any], words: str) -> None:
    run = fed.simulate(fed.Experiment().override({"data.clients": 6, "rounds.count": 2, **changes}))
    text = "".join(Reading(run_report(run, None)).texts)
    assert words in text
    assert ("What the coordinator could see" in text) == bool(words)


@pytest.mark.usefixtures("undrawn")
def test_interrupted_run_says_so() -> None:
    run = fed.simulate(fed.Experiment().override({"data.clients": 5, "rounds.count": 1}))
    cut_short = fed.Run(run.experiment, [], {**run.summary, "status": "interrupted", "rounds": 0}, run.model)
    assert "Status: interrupted." in run_report(cut_short, partition_of(data_of(2, 2)))


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (1, 2), (100, 10), (300, 40), (1000, 3)])
def test_partition_is_drawn_for_few_and_for_many(clients: int, classes: int) -> None:
    counts_CL = np.random.default_rng(0).integers(0, 9, (clients, classes))
    svg = heat_maps.partition([f"client <{number}>" for number in range(clients)], counts_CL)
    ElementTree.fromstring(svg)
    assert len(svg) < 500_000


def test_curve_is_the_mean_of_rounds_that_all_runs_measured() -> None:
    runs = [[line(1, 0.2), line(2, None), line(3, 0.6)], [line(1, 0.4), line(2, 0.5), line(3, 0.8), line(4, 0.9)]]
    curve = charts.curve_of(runs, "test_accuracy")
    assert curve is not None
    assert curve.rounds.tolist() == [1, 3]
    assert curve.size_bytes.tolist() == [7000, 21000]
    np.testing.assert_allclose(curve.mean, [0.3, 0.7], rtol=1e-15)
    np.testing.assert_allclose(curve.deviation, [0.02**0.5] * 2, rtol=1e-14)  # sqrt((0.1² + 0.1²) / 1)


def test_curve_tells_bytes_of_each_way() -> None:
    curve = charts.curve_of(
        [[line(1, 0.2), line(2, 0.3, bytes_up=5000)], [line(1, 0.2), line(2, 0.3)]], "test_accuracy"
    )
    assert curve is not None
    assert curve.bytes_up.tolist() == [3000, 7000]
    assert curve.bytes_down.tolist() == [4000, 8000]


def bytes_labels(svg: str) -> dict[str, float]:
    """The places of the labels of bytes on the horizontal axis of the first panel that has some."""
    root = ElementTree.fromstring(svg)
    for axis in (group for group in root.iter() if (group.get("id") or "").startswith("matplotlib.axis_")):
        texts = [text for text in axis.iter("{http://www.w3.org/2000/svg}text") if (text.text or "").endswith("B")]
        if texts:
            return {text.text or "": float(text.get("x") or 0) for text in texts}
    return {}


def test_bytes_have_a_logarithmic_axis_where_settings_differ() -> None:
    sent = np.array([100.0, 1000.0, 10_000.0])
    ends = np.array([0.1, 0.2, 0.3])
    curves = {
        name: charts.Curve(np.arange(1.0, 4), factor * sent, sent, ends, ends, 0 * ends)
        for name, factor in (("raw", 10.0), ("coded", 1.0))
    }
    look = styles(dict.fromkeys(curves, ""))
    places = bytes_labels(charts.curves(curves, look, label="accuracy", by_way=True))
    assert [*places] == ["100 B", "1 kB", "10 kB", "100 kB"]
    assert np.diff([*places.values()]) == pytest.approx([places["1 kB"] - places["100 B"]] * 3)
    alike = dict.fromkeys(curves, curves["coded"])
    labels = bytes_labels(charts.curves(alike, look, label="accuracy"))
    assert {"0 B", "10 kB", "20 kB"} <= {*labels}
    assert labels["20 kB"] - labels["10 kB"] == pytest.approx(labels["10 kB"] - labels["0 B"])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("bytes_up", "is_shown"), [(3900, False), (40, True)])
def test_bytes_of_each_way_are_drawn_where_they_differ(bytes_up: int, is_shown: bool) -> None:
    runs = {"A": [record(0.5, 0.6, bytes_up=4000)], "B": [record(0.5, 0.7, bytes_up=bytes_up)]}
    page = comparison_report(result_of(runs), {})
    assert ("Accuracy against bytes up and down" in page) == is_shown


def test_curve_has_the_mean_of_simulated_times() -> None:
    runs = [[{**line(1, 0.2), "virtual_s": 3.0}], [{**line(1, 0.4), "virtual_s": 4.0}]]
    curve = charts.curve_of(runs, "test_accuracy")
    assert curve is not None
    assert curve.virtual_s.tolist() == [3.5]


@pytest.mark.parametrize(("end_s", "unit"), [(100.0, "s"), (600.0, "min"), (9000.0, "h"), (2e5, "days")])
def test_time_has_a_unit_of_its_size(end_s: float, unit: str) -> None:
    one = np.array([1.0, 2.0])
    lines = {"A": charts.Curve(one, one, one, np.array([0.0, end_s]), one, 0 * one)}
    svg = charts.against_time(lines, styles({"A": ""}), label="accuracy")
    assert f"simulated time, {unit}<" in svg


def test_widely_different_times_have_a_logarithmic_axis() -> None:
    one = np.array([1.0, 2.0])
    lines = {name: charts.Curve(one, one, one, end_s * one, one, 0 * one) for name, end_s in (("A", 3.0), ("B", 900.0))}
    svg = charts.against_time(lines, styles(dict.fromkeys(lines, "")), label="accuracy")
    assert "mathdefault" not in svg
    assert {">0.1<", ">1<", ">10<"} <= set(re.findall(r">[\d.]+<", svg))


def test_page_tells_of_time_where_there_is_something_to_tell(request: pytest.FixtureRequest) -> None:
    rounds = {"kind": "buffered", "count": 3, "buffer": 1, "concurrency": 3}
    page = run_report(fed.simulate(fed.Experiment(data={"clients": 5}, rounds=rounds)), partition_of(data_of(5, 10)))
    assert "What became of tasks" in page
    assert "mean staleness" in page
    request.getfixturevalue("undrawn")
    keys = {"data": {"clients": 5}, "rounds": {"count": 3, "cohort": 3}}
    page = run_report(fed.simulate(fed.Experiment(**keys)), partition_of(data_of(5, 10)))
    assert "Accuracy against simulated time" in page
    assert "What became of tasks" not in page


def test_table_shows_late_and_failed_shares_and_staleness() -> None:
    tasks: dict[str, Any] = {"selected": 8, "replied": 4, "late": 2, "failed": 1, "staleness_mean": 1.5}
    shown = {column.heading: column.texts for column in columns(result_of({"A": [record(0.5, 0.6, **tasks)]}))}
    assert (shown["late"], shown["failed"], shown["staleness"]) == (["25%"], ["12%"], ["1.5"])
    assert not {"late", "failed", "staleness"} & {column.heading for column in columns(result_of({"A": [record(0.5)]}))}


def test_curve_within_runs_has_the_spread_over_clients() -> None:
    runs = [[line(1, 0.2, own_mean=0.5, own_std=0.1)], [line(1, 0.4, own_mean=0.7, own_std=0.3)]]
    curve = charts.curve_of(runs, "own_mean")
    assert curve is not None
    np.testing.assert_allclose([curve.mean[0], curve.deviation[0]], [0.6, 0.2], rtol=1e-15)
    assert charts.curve_of(runs, "absent") is None


def test_styles_tell_35_variants_and_both_baselines_apart() -> None:
    algorithms = {f"variant {number}": "fedavg" for number in range(35)} | {"floor": "local", "ceiling": "centralized"}
    looks = styles(algorithms)
    assert len(set(looks.values())) == len(algorithms)
    assert [name for name, look in looks.items() if look.colour == INK] == ["floor", "ceiling"]


@pytest.mark.parametrize(
    "names",
    [
        ["FedAvg", "Local"],
        [f"trial {number}: local.lr=0.0{number}, local.batch_size=16" for number in range(1, 12)],
        [f"{'W' * 60}{ending}" for ending in "ABC"],  # alike but for their ends
        [f"{'漢' * 40}{middle}{'字' * 40}" for middle in "ABC"],  # alike at both ends
    ],
)
def test_legend_fits_the_figure_and_tells_its_lines_apart(names: list[str]) -> None:
    labels = charts.short_labels(names)
    assert len(set(labels)) == len(names)
    assert all(len(label) <= 32 for label in labels)
    curve = charts.Curve(*(np.array([1.0, 2.0]) for _ in range(6)))
    lines = dict.fromkeys(names, curve)
    svg = ElementTree.fromstring(charts.curves(lines, styles(dict.fromkeys(names, "")), label="accuracy"))
    legend = next(group for group in svg.iter() if (group.get("id") or "").startswith("legend_"))
    places = [float(text.get("x") or 0) for text in legend.iter("{http://www.w3.org/2000/svg}text")]
    assert len(places) == len(names)
    # The legend stands in the middle: what does not leave at the left, its lines of 4 em before the labels, fits.
    assert min(places) > 4 * 9


# What the finding claims.


def said(runs: dict[str, list[dict[str, Any]]], **keys: Any) -> str:
    return finding(result_of(runs, {"Local": "local", "Centralized": "centralized"}, **keys))


def test_finding_tells_the_noise_from_what_is_larger() -> None:
    # Differences to A: 0.09, 0.10, 0.11, a mean of ten deviations; -0.03, 0, 0.03; -0.31, -0.30, -0.29.
    runs = {
        "A": [record(0.7), record(0.8), record(0.6)],
        "B": [record(0.79), record(0.9), record(0.71)],
        "C": [record(0.67), record(0.8), record(0.63)],
        "D": [record(0.39), record(0.5), record(0.31)],
    }
    # Half an interval: 4.303 · 0.01 / √3 = 0.025.
    assert said(runs) == (
        "B ends with the highest test accuracy, 0.800 ± 0.095 over 3 seeds. Against the baseline A, with 95 % "
        "intervals, better by more than the noise: B by 0.100 (+0.075 to +0.125); worse by more than the noise: D by "
        "0.300 (-0.325 to -0.275); not told apart from it: C."
    )


def test_lower_errors_are_said_to_be_better() -> None:
    runs = {"A": [record(None), record(None), record(None)], "B": [record(None), record(None), record(None)]}
    for name, losses in {"A": (0.5, 0.7, 0.6), "B": (0.39, 0.6, 0.51)}.items():
        for run, loss in zip(runs[name], losses, strict=True):
            run["summary"]["final_test_loss"] = loss
    assert "better by more than the noise: B by 0.100 (-0.125 to -0.075)" in said(runs)


def test_page_has_the_differences_and_how_they_were_found(page: str) -> None:
    text = " ".join(Reading(page).texts)
    assert "Differences to FedAvg" in text
    assert "Where all pairs differ by the same, the noise is not known" in text
    assert "Each seed sets data and training" in text


def test_tables_for_papers_hold_names_as_they_stand() -> None:
    names = ["a|b_c", "50 % & #1", "x-2 *{\\}$ <i>"]
    accuracies = [(0.5, 0.7), (0.6, 0.9), (0.1, 0.2)]
    result = result_of({name: list(map(record, two)) for name, two in zip(names, accuracies, strict=True)})
    rows = [line for line in markdown(result).splitlines() if line.startswith("|")]
    # A cell ends at a bar without a backslash: all rows have as many as the head.
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(re.findall(r"\|", rows[0]))}
    assert re.sub(r"\\(.)", r"\1", rows[2]).startswith("| a|b_c | 0.600 ± 0.141 | –")
    table = latex(result)
    assert "a\\textbar{}b\\_c & 0.600 $\\pm$ 0.141 & --" in table
    assert "50 \\% \\& \\#1 & 0.750" in table
    assert "x-2 *\\{\\textbackslash{}\\}\\$ \\textless{}i\\textgreater{} & 0.150" in table
    assert "$-$0.450" in table
    body = table.split("\\midrule")[1].split("\\bottomrule")[0].strip().splitlines()
    assert len({len(re.findall(r"(?<!\\)&", row)) for row in body}) == 1


def test_only_finished_folds_that_both_have_are_paired() -> None:
    keys: dict[str, Any] = {"compare": [{"name": "A"}, {"name": "B"}], "folds": 3, "seeds": [5]}
    comparison = fed.Comparison(**keys)
    failed = {"metrics": [], "summary": {"status": "failed", "reason": "NaN"}}
    runs = {
        "A": {(5, 1): record(0.5), (5, 2): record(0.6), (5, 3): record(0.7)},
        "B": {(5, 1): record(0.6), (5, 2): record(0.8), (5, 3): failed},
    }
    rows = [row_of(name, "fedavg", runs[name], comparison.repetitions(), None) for name in runs]
    result = ComparisonResult(comparison, rows, runs)
    assert (rows[1]["seeds"], rows[1]["runs"], rows[1]["reason"]) == ([5], 2, "seed 5 fold 3: NaN")
    (found,) = result.differences
    assert found.pairs == 2
    assert found.mean == pytest.approx(0.15)
    assert "says nothing of other seeds" in markdown(result)


def test_finding_does_not_compare_client_scores_with_test_scores() -> None:
    by_clients: dict[str, Any] = {"client_accuracy_worst_decile": 0.7}
    runs = {"A": [record(0.5), record(0.51)], "B": [record(0.8, **by_clients), record(0.81, **by_clients)]}
    assert said(runs) == (
        "Scores do not compare: clients score B on samples of their own, the coordinator A on the test set. "
        "Write evaluation: clients in the base to score all alike."
    )


def test_finding_from_one_seed_does_not_claim_a_difference() -> None:
    assert said({"A": [record(0.5)], "B": [record(0.9)]}) == (
        "B ends with the highest test accuracy, 0.900; with one seed nobody can say how much of that is chance."
    )


def test_baselines_win_nothing_but_are_told() -> None:
    runs = {"Local": [record(0.3)], "A": [record(0.8)], "Centralized": [record(0.9)]}
    assert said(runs).startswith("A ends with a test accuracy of 0.800. ")
    assert said(runs).endswith("Centralized, the ceiling, ends at 0.900; Local, the floor, ends at 0.300.")


def test_finding_counts_to_the_target_only_those_that_always_arrive() -> None:
    runs = {"often": [record(0.9), record(0.1)], "A": [record(0.1, 0.9), record(0.1, 0.9)]}
    assert said(runs, target=0.9).endswith(
        "A is the first at 0.9, after 2 rounds, and sends the fewest bytes to get there, 14 kB."
    )
    assert said(runs, target=0.95).endswith("None reaches 0.95 with every seed.")


@pytest.mark.long
def test_no_plotting_library_is_loaded_before_a_picture_is_drawn() -> None:
    code = (
        "import sys, fed.simulations.compare\n"
        "assert {'fed.reports.html', 'fed.reports.charts'} <= set(sys.modules)\n"
        "assert not {'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "from fed.reports import heat_maps\n"
        "heat_maps.partition(['a'], __import__('numpy').ones((1, 1), int))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("undrawn")
def test_unread_broken_client_costs_neither_summary_nor_report(tmp_path: Path) -> None:
    data = on_demand(bad=[7])
    keys = fed.Experiment(rounds={"count": 1, "cohort": 1}, seed=1, simulation={"workers": 0})
    run = fed.simulate(keys, data=data, model=small, output=tmp_path / "run")
    with pytest.raises(InvalidData, match="client 7 "):
        data.read(7)
    assert run.summary["status"] == "finished"
    assert (tmp_path / "run" / "summary.json").is_file()
    page = write_run_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Round by round" in page
    assert "Who holds what" not in page
    good = run_report(run, partition_of(on_demand()))
    assert "Who holds what" in good


@pytest.mark.parametrize("width_inch", [NARROW_INCH, pytest.param(WIDTH_INCH, marks=pytest.mark.long)])
@pytest.mark.parametrize("totals", [[123.4e6], [5e6, 123e6], [2e6, 900e6]])
def test_labels_of_bytes_stand_apart(totals: list[float], width_inch: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gaps_em: list[float] = []

    def measured(figure: Any) -> str:
        figure.canvas.draw()
        for axes in figure.axes:
            labels = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text().endswith("B")]
            places = sorted((box.x0, box.x1) for box in labels if axes.bbox.x0 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1)
            gaps_em.extend((right[0] - left[1]) / figure.dpi / EM_INCH for left, right in pairwise(places))
        return svg_of(figure)

    monkeypatch.setattr(charts, "svg_of", measured)
    rounds = np.arange(1.0, 11)
    lines = {
        str(total): charts.Curve(rounds, total * rounds / 20, total * rounds / 20, rounds, rounds / 10, 0 * rounds)
        for total in totals
    }
    charts.curves(lines, styles(dict.fromkeys(lines, "")), label="accuracy", by_way=True, width_inch=width_inch)
    assert gaps_em
    assert min(gaps_em) > 0.5
