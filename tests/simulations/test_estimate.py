"""What a run is expected to take, against what it took."""

from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.config.compatibility import Feature, lacks
from fed.config.registry import ALGORITHMS, TOPOLOGIES
from fed.simulations.estimate import expect
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from tests.lora_models import INPUTS, adapted
from tests.thinned import thinned

CLIENTS = 9
OVER_ADAPTERS = ("ffa_lora", "fedex_lora", "flora")
AWAY = "if nobody fails or is away"


def data() -> fed.FederatedData:
    inputs = torch.randn(CLIENTS, 4, 3, generator=torch.Generator().manual_seed(0))
    return fed.FederatedData({client: (part, (part.sum(1) > 0).long()) for client, part in enumerate(inputs)})


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def with_adapters() -> nn.Module:
    return nn.Sequential(nn.Linear(3, INPUTS), adapted(classes=2))


def assert_as_expected(**keys: Any) -> None:
    experiment = fed.Experiment(local={"batch_size": 4}, **keys)
    model = with_adapters if experiment.algorithm.kind in OVER_ADAPTERS else with_buffers
    expected = expect(Simulation(experiment, data(), model))
    took = simulate(experiment, data=data(), model=model).summary
    assert (expected.bytes_up, expected.bytes_down) == (took["bytes_up"], took["bytes_down"])


@pytest.mark.parametrize("rounds", [{"count": 3}, {"count": 3, "cohort": 7}], ids=str)
@pytest.mark.parametrize("kind", thinned(ALGORITHMS.builtin, quick=13))
def test_as_many_bytes_travel_as_expected(kind: str, rounds: dict[str, Any]) -> None:
    if "cohort" in rounds and lacks(ALGORITHMS.make(kind).make(), Feature.COORDINATOR):
        rounds = {**rounds, "cohort": CLIENTS}
    elif "cohort" in rounds and kind == "cyclic":
        rounds = {**rounds, "cohort": 1}
    downlink: dict[str, Any] = {"downlink": []} if "cohort" in rounds else {}  # else it depends on who comes when
    assert_as_expected(algorithm={"kind": kind}, rounds=rounds, **downlink)


def test_differences_are_counted_as_if_clients_came_in_turn() -> None:
    rounds = {"count": 9, "cohort": CLIENTS // 3, "sampling": "round_robin"}
    for kind in ("int8", "sign"):
        assert_as_expected(rounds=rounds, downlink=[kind])
    experiment = fed.Experiment(rounds=rounds, downlink=["sign"])
    assert expect(Simulation(experiment, data(), with_buffers)).proviso == "if clients come in turn"


@pytest.mark.parametrize("fan_out", [None, 3])
@pytest.mark.parametrize(
    ("rounds", "devices", "proviso"),
    [
        ({"cohort": 4}, {}, ""),
        ({"cohort": 4}, {"kind": "lognormal"}, ""),
        ({"cohort": 4}, {"interruption": 0.5}, ""),
        ({"cohort": 4, "partial_work": "drop"}, {}, ""),
        ({"cohort": 4, "partial_work": "drop"}, {"interruption": 0.5}, "if nobody fails or is late"),
        ({"cohort": 4, "over_selection": 1.5}, {}, "if nobody fails or is late"),
        ({"cohort": 4, "deadline_s": 10}, {}, "if nobody fails or is late"),
        ({"cohort": 4, "backup_after_s": 10}, {}, "if nobody fails or is late"),
        ({"cohort": 4}, {"failure": 0.1}, "if nobody fails or is late"),
        ({"cohort": 4}, {"availability": "daily"}, "if nobody fails or is late"),
        ({"cohort": 4}, {"staying_s": 1e6}, "if nobody fails or is late"),
        ({"kind": "buffered", "buffer": 2}, {}, "if nobody fails or is late"),
    ],
)
def test_an_expectation_says_what_it_takes_for_granted(
    rounds: dict[str, Any], devices: dict[str, Any], proviso: str, fan_out: int | None
) -> None:
    if fan_out and "kind" in rounds:
        return
    hierarchy = {"hierarchy": {"fan_out": fan_out}} if fan_out else {}
    experiment = fed.Experiment(rounds=rounds, devices=devices, **hierarchy)
    clauses = [*([proviso] if proviso else []), *(["without edges"] if fan_out else [])]
    assert expect(Simulation(experiment, data(), with_buffers)).proviso == " and ".join(clauses)


@pytest.mark.parametrize("kind", ["dpsgd", "local", "centralized"])
def test_who_needs_no_coordinator_sends_what_is_expected(kind: str) -> None:
    rounds = {} if kind == "dpsgd" else {"cohort": 4, "over_selection": 2.0}
    experiment = fed.Experiment(algorithm={"kind": kind}, rounds=rounds)
    assert expect(Simulation(experiment, data(), with_buffers)).proviso == ""
    fallible = experiment.override({"devices.failure": 0.1})
    assert expect(Simulation(fallible, data(), with_buffers)).proviso == ("" if kind == "centralized" else AWAY)


def test_of_the_clients_beyond_the_cohort_no_answers_are_expected() -> None:
    rounds = {"count": 3, "cohort": 4, "over_selection": 1.5}
    assert_as_expected(rounds=rounds, devices={"kind": "lognormal"})


@pytest.mark.parametrize(
    "rounds",
    [
        {"kind": "buffered", "buffer": 3, "concurrency": 6},
        {"kind": "asynchronous", "concurrency": 5},
        {"kind": "bounded_staleness", "bound": 1},
    ],
    ids=lambda rounds: rounds["kind"],
)
def test_unsynchronised_rounds_send_about_what_is_expected(rounds: dict[str, Any]) -> None:
    """The last to answer are not replaced, and under a bound the fast are some tasks ahead in the end."""
    experiment = fed.Experiment(rounds={"count": 30, **rounds}, devices={"kind": "lognormal"})
    expected = expect(Simulation(experiment, data(), with_buffers))
    took = simulate(experiment, data=data(), model=with_buffers).summary
    assert expected.bytes_up == pytest.approx(took["bytes_up"], rel=0.1)
    assert expected.bytes_down == pytest.approx(took["bytes_down"], rel=0.1)


KEYS: dict[str, dict[str, Any]] = {
    "edges": {"pairs": [[peer, (peer + 3) % CLIENTS] for peer in range(CLIENTS)] + [[0, 1], [1, 2]]},
    "random_regular": {"degree": 4},
}


@pytest.mark.parametrize("topology", thinned([kind for kind in TOPOLOGIES.builtin if kind != "hypercube"], quick=4))
def test_as_many_bytes_travel_among_peers_as_expected(topology: str) -> None:
    keys = {"kind": topology, **KEYS.get(topology, {})}
    for kind in ("sgp", "gradient_tracking", "dpsgd"):
        if kind == "sgp" or "directed" not in topology:
            assert_as_expected(algorithm={"kind": kind}, topology=keys, rounds={"count": 2})


@pytest.mark.parametrize("kind", ["choco", "deepsqueeze", "noloco", "moshpit", "adpsgd"])
def test_rules_send_what_is_expected_of_their_messages(kind: str) -> None:
    assert_as_expected(algorithm={"kind": kind}, rounds={"count": 3})
    if kind in ("choco", "deepsqueeze"):
        assert_as_expected(algorithm={"kind": kind}, rounds={"count": 3}, uplink=["int8"])
