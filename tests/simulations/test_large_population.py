"""A million clients: a run reads the cohorts of its rounds, and whoever is wrong among them is named."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.cli.main import main
from fed.clients.checks import check_batch_norm, check_labels, check_model
from fed.clients.data import Pair
from fed.clients.data.describe import partition_of
from fed.clients.scoring.losses import cross_entropy
from fed.errors import InvalidData, InvalidExperiment
from fed.reports.html import run_report, write_run_report
from fed.server.observer import Essential
from fed.vectors.randomness import Streams
from tests.simulations.users_parts import Watcher

pytestmark = pytest.mark.usefixtures("device")

MILLION = range(10**6)
ROUNDS, COHORT = 3, 100
TEST: Pair = (torch.eye(2), torch.tensor([0, 1]))
# Reads of the first client, for a sample's shape and labels, however many clients there are.
BEFOREHAND = 10


def size(client: int) -> int:
    return 2 + client % 3


def make(client: int, reads: list[int] | None = None) -> Pair:
    """Each client's own points, and on which side of a line of its own they lie."""
    if reads is not None:
        reads.append(client)
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(size(client), 2, generator=generator)
    return inputs, (inputs[:, 0] > 0.1 * (client % 7)).long()


def million(reads: list[int] | None = None, **more: Any) -> fed.FederatedData:
    train = fed.ClientsOnDemand(MILLION, partial(make, reads=reads), size)
    return fed.FederatedData(train, **{"test": TEST, "classes": 2, **more})


def experiment(**keys: Any) -> fed.Experiment:
    rounds = {"count": ROUNDS, "cohort": COHORT}
    simulation = {"workers": 0}  # auto would look at some clients' data to find how long a run takes
    return fed.Experiment(
        **{"model": {"kind": "logistic"}, "rounds": rounds, "seed": 3, "simulation": simulation, **keys}
    )


def cohorts(seed: int = 3) -> list[int]:
    streams = Streams(seed)
    return [
        int(client)
        for number in range(1, ROUNDS + 1)
        for client in streams.generator("cohort", number).choice(len(MILLION), size=COHORT, replace=False)
    ]


def test_a_run_reads_its_cohorts_alone() -> None:
    reads: list[int] = []
    run = fed.simulate(experiment(), data=million(reads))
    assert (run.summary["clients"], run.summary["status"]) == (10**6, "finished")
    assert [line["replied"] for line in run.metrics] == [COHORT] * ROUNDS
    drawn = cohorts()
    assert set(reads) == {0, *drawn}
    assert len(reads) <= len(drawn) + BEFOREHAND, "each once a round"


@pytest.mark.usefixtures("undrawn")
def test_a_report_and_an_expectation_look_at_some_clients(tmp_path: Path) -> None:
    reads: list[int] = []
    run = fed.simulate(experiment(), data=million(reads), output=tmp_path / "run", observers=[Essential(Watcher())])
    assert len(reads) < ROUNDS * COHORT + 1000
    page = " ".join(write_run_report(tmp_path / "run").read_text().split())
    assert "Samples that each client of 200, evenly spaced among 1,000,000, holds." in page
    assert "evenly spaced" not in run_report(run, partition_of(fed.FederatedData({0: make(0), 1: make(1)})))


def test_a_million_devices_come_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "million.yaml"
    file.write_text(
        "data: {kind: synthetic, clients: 1000000, test_fraction: 0}\nrounds: {count: 2, cohort: 5}\n", encoding="utf-8"
    )
    run = fed.simulate(fed.Experiment.load(file))
    assert (run.summary["clients"], run.summary["final_test_accuracy"]) == (10**6, None)


def test_who_holds_what_is_printed_of_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "million.yaml"
    file.write_text("data: {kind: synthetic, clients: 1000000, test_fraction: 0}\n", encoding="utf-8")
    assert main(["data", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1000000 clients, samples on demand to train on, none to test on\n")
    assert "looked at: 200 of 1000000 clients, evenly spaced" in printed
    assert main(["data", str(file), "--set", "data.clients=20"]) == 0
    assert re.match(r"20 clients, \d+ samples to train on, none to test on\n", capsys.readouterr().out)


def test_a_built_in_model_must_be_told_the_classes() -> None:
    with pytest.raises(InvalidData, match="data on demand must say how many classes there are"):
        fed.simulate(experiment(), data=million(classes=None))


def test_labels_are_checked_at_once_or_when_read() -> None:
    reads: list[int] = []
    data = million(reads, classes=None)
    module = nn.Linear(2, 2)
    held = check_labels(data, check_model(module, data, cross_entropy, {}))
    assert (held.classes, len(reads) <= BEFOREHAND) == (2, True)
    in_memory = fed.FederatedData({0: make(0)}, TEST)
    assert check_labels(in_memory, 2) is in_memory
    assert check_labels(million(classes=2), 5).classes == 2, "what the data say counts"
    with pytest.raises(InvalidData, match=r"data on demand must have at most 3 classes, .* got classes=5: give"):
        check_labels(million(classes=5), 3)
    with pytest.raises(InvalidData, match=r"targets of client 7 must be in 0 … 1, .* got -3"):
        check_labels(fed.FederatedData({7: (TEST[0], TEST[1] - 3)}), 2)
    with pytest.raises(InvalidData, match=r"targets of the test set must be in 0 … 1, .* got 6"):
        check_labels(million(classes=None, test=(TEST[0], TEST[1] + 5)), 2)


def test_batch_norm_holds_what_is_known_to_two_samples() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    reads: list[int] = []
    check_batch_norm(module, million(reads), batch_size=2)
    assert reads == [0]
    lonely = fed.FederatedData(fed.ClientsOnDemand(["x"], lambda client: (torch.zeros(1, 2), torch.zeros(1))))
    with pytest.raises(InvalidData, match=r"got 1 on client 'x'"):
        check_batch_norm(module, lonely, batch_size=2)
    with pytest.raises(InvalidExperiment, match=r"local.batch_size must be 2 or more"):
        check_batch_norm(module, lonely, batch_size=1)
