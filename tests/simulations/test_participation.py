"""Who took part in each round, by id, in every kind of rounds."""

from pathlib import Path
from typing import Any

import pytest

import fed
from tests.simulations.durable_runs import BASE, CASES, experiment, left_in
from tests.simulations.users_parts import samples
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

SECURE = {"clip": 0.5, "max_weight": 128, "max_drop_out": 0.25}
MORE: dict[str, dict[str, Any]] = {
    "secure": {
        "rounds": {"kind": "synchronous", "cohort": 8, "deadline_s": 1.0},
        "devices": {**BASE["devices"], "availability": "always"},
        "secure_aggregation": SECURE,
    },
    "hierarchy": {**CASES["tolerant"], "hierarchy": {"fan_out": 3}, "simulation": {"batching": "off"}},
    "allreduce": {"algorithm": "allreduce", "rounds": {"deadline_s": 1.0}},
    "dpsgd": {"algorithm": "dpsgd", "rounds": {"deadline_s": 0.3}},
}
KINDS = ("buffered", "asynchronous", "bounded_staleness", "tolerant", "centralized")


@pytest.mark.parametrize("case", thinned([*KINDS, *MORE], quick=5))
def test_the_ids_are_as_many_as_the_counts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, case, {**CASES.get(case, {}), **MORE.get(case, {})})
    run = fed.simulate(experiment(case, 5), output=tmp_path / "run")
    left_in(tmp_path / "run")
    clients = {"all"} if case == "centralized" else set(range(12))
    for line in run.participation:
        assert clients.issuperset(line["asked"] + line["replied"] + line["late"] + line["failed"])
    assert any(line["replied"] for line in run.participation)


@pytest.mark.parametrize("case", ["synchronous", "tolerant", "secure"])
def test_each_client_asked_ends_in_one_list(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, case, {**CASES.get(case, {}), **MORE.get(case, {})})
    run = fed.simulate(experiment(case, 5), output=tmp_path / "run")
    lost = 0
    for line in run.participation:
        assert sorted(line["asked"]) == sorted(line["replied"] + line["late"] + line["failed"])
        lost += len(line["late"]) + len(line["failed"])
    assert lost, "the case tests no loss"


def test_clients_with_too_many_samples_are_the_late_ones(tmp_path: Path) -> None:
    """At 100 samples a second, 200 samples take longer than the deadline of one second, and 10 do not.

    In the second round the late ones are busy still.
    """
    train = {client: samples(200 if client % 2 else 10, client) for client in range(6)}
    rounds = {"kind": "synchronous", "count": 2, "deadline_s": 1.0, "partial_work": "drop"}
    devices = {"kind": "uniform", "samples_per_s": 100, "latency_s": 0.0}
    one = fed.Experiment(model="logistic", rounds=rounds, devices=devices)
    run = fed.simulate(one, data=fed.FederatedData(train, classes=3), output=tmp_path / "run")
    assert [(line["replied"], line["late"]) for line in run.participation] == [([0, 2, 4], [1, 3, 5]), ([0, 2, 4], [])]


def test_without_a_folder_there_is_none() -> None:
    run = fed.simulate(experiment("synchronous", 1))
    assert run.participation == []
    assert run.clients == []
    with pytest.raises(fed.errors.InvalidInput, match=r"table needs a run with a folder, got one without: give"):
        run.table("participation")
