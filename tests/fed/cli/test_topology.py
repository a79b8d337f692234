"""``fed topology``: the list, and one graph with its facts, its sketch and its picture."""

import contextlib
import math
import os
import re
from pathlib import Path

import networkx as nx
import pytest

from fed.cli.main import main
from fed.config.registry import TOPOLOGIES


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["topology", *arguments]) == 0
    return capsys.readouterr().out


def sketched(text: str, marks: str = "●") -> "nx.DiGraph[int]":
    """The graph that the sketch shows, two columns for each peer."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    rows = [line for line in text.splitlines() if re.match(r" *\d+ .*[·●]", line)]
    for line in rows:
        cells = line[3:].ljust(2 * len(rows))
        graph.add_edges_from(
            (int(line[:3]), peer) for peer in range(len(rows)) if cells[2 * peer + 1 : 2 * peer + 2] in marks
        )
    return graph


def test_kinds_are_listed_with_their_facts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {line.split()[0]: line for line in told(capsys).splitlines() if line.split()[:1]}
    assert rows.keys() >= TOPOLOGIES.builtin.keys()
    rho = (1 + 2 * math.cos(2 * math.pi / 16)) / 3
    assert rows["ring"].split()[1:5] == ["2", "8", f"{rho:.4g}", str(math.ceil(math.log(1e-3) / math.log(rho)))]
    assert rows["one_peer_exponential"].split()[1:5] == ["1", "15", "0", "4"]


def test_a_graph_is_drawn_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "ring", "12", "lazy=true")
    assert nx.utils.graphs_equal(sketched(text), nx.cycle_graph(12).to_directed())
    rho = (1 + (1 + 2 * math.cos(2 * math.pi / 12)) / 3) / 2
    for line in ("degree +2 neighbours", "diameter +6 hops", f"ρ +{rho:.4g},", f"spectral gap +{1 - rho:.4g}"):
        assert re.search(f"^{line}", text, re.MULTILINE)
    assert "keep the peers' mean" in text


def test_rows_of_a_sketch_send_to_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*sketched(told(capsys, "directed_ring", "3")).edges] == [(0, 1), (1, 2), (2, 0)]


def test_a_changing_graph_shows_each_pairs_first_round(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "one_peer_exponential", "8")
    assert re.search(r"^  0   1 2 · 3 · · ·", text, re.MULTILINE)
    assert re.search(r"^rounds to consensus +3, exactly", text, re.MULTILINE)


def test_random_graphs_follow_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (told(capsys, "erdos_renyi", "16", f"seed={seed}") for seed in (1, 1, 2))
    assert one == same != other


def test_a_graph_of_the_users_own_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """\
import networkx as nx
def wheel(peers, hub: int = 0):
    return nx.relabel_nodes(nx.wheel_graph(peers), {0: hub, hub: 0})
def broken(peers):
    return 1 / 0
"""
    (tmp_path / "wheels.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    text = told(capsys, "python:wheels:wheel", "6", "hub=2")
    assert sketched(text).out_degree(2) == 5
    assert "python:wheels:wheel" in text
    assert main(["topology", "python:wheels:broken", "6"]) == 2
    problem = "ZeroDivisionError: division by zero: correct it"
    assert capsys.readouterr().err == f"error: python:wheels:broken must make a graph of 6 peers, got {problem}\n"


def test_picture_is_whole_when_the_reader_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receiving, sending = os.pipe()
    os.close(receiving)
    with os.fdopen(sending, "w") as pipe, contextlib.suppress(BrokenPipeError):
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["topology", "ring", "8", "--picture", str(tmp_path / "ring.svg")]) == 1
    assert (tmp_path / "ring.svg").read_text().endswith("</svg>\n")


@pytest.mark.parametrize(("name", "head"), [("a.svg", b"<?xml"), ("a.PNG", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_a_picture_is_written(name: str, head: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "random_directed", "12", "--picture", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(head)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rng", "3"], "rng: no such topology; did you mean ring? known: ring, path"),
        (["ring"], "Invalid value for PEERS: must be given, as in fed topology ring 16"),
        (["ring", "8", "rows=2"], "ring: rows: unknown key; known: kind, weights, lazy (value: 2)"),
        (["ring", "8", "lazy"], "Invalid value for KEY=VALUE: must have the form key=value"),
        (["ring", "8", "seed=-1"], "seed must be a whole number from 0, got -1"),
        (["edges", "4"], "topology edges needs pairs or file, and not both"),
        (["hypercube", "6"], "topology hypercube needs a power of two as the number of peers, got 6: take 4 of them"),
        (["star", "5", "weights=uniform"], "topology.weights uniform needs equally many neighbours of all peers"),
        (["ring", "8", "--picture", "a.jpg"], "--picture a.jpg must end in .svg, .png or .pdf: give another name"),
        (["ring", "8", "--picture", "no/a.svg"], "--picture no/a.svg cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1
