"""Clients that diverge, where a run goes on without them: as if they had failed, to the bit."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.errors import Diverged, InvalidExperiment
from fed.server.observer import Essential
from fed.simulations import fleet as fleets
from fed.simulations.in_flight import Flight, depart
from fed.simulations.simulate import simulate
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

BAD = ("c2", "c7")
VARIED = {"kind": "lognormal", "sigma": 0.5}

RUNS: dict[str, dict[str, Any]] = {
    "synchronous": {"algorithm": "fedavg", "rounds": {"cohort": 7}},
    "one by one": {"algorithm": "fedavg", "simulation": {"batching": "off"}},
    "client states": {"algorithm": "scaffold", "rounds": {"cohort": 7}},
    "personal": {"algorithm": "ditto", "rounds": {"cohort": 7}},
    "single messages": {"algorithm": "median", "rounds": {"cohort": 7}},
    "over-selection": {
        "rounds": {"cohort": 4, "over_selection": 1.5},
        "devices": VARIED,
        "simulation": {"batching": "off"},
    },
    "quorum": {"rounds": {"cohort": 7, "quorum": 0.8}, "simulation": {"batching": "off"}},
    "buffered": {"rounds": {"kind": "buffered", "buffer": 3, "concurrency": 6}, "devices": VARIED},
    "asynchronous": {"rounds": {"kind": "asynchronous", "concurrency": 5}, "devices": VARIED},
    "residuals": {"uplink": ["topk"], "error_feedback": "ef", "rounds": {"cohort": 7}},
    "edges": {"hierarchy": {"fan_out": 3}, "simulation": {"batching": "off"}},
    "secure": {"secure_aggregation": {"clip": 1.0, "max_weight": 30}},
}


def experiment(kind: str, **rounds: Any) -> fed.Experiment:
    keys = {
        "algorithm": "fedavg",
        "local": {"lr": 0.05, "batch_size": 4},
        "simulation": {"batching": "on"},
        **RUNS[kind],
    }
    policy = {"count": 4, **keys.get("rounds", {}), **rounds}
    return fed.Experiment(**{**keys, "rounds": policy})


def poisoned() -> fed.FederatedData:
    data = parts.unequal()
    for client in BAD:
        data.train[client][0].mul_(1e30)
    return data


def run(keys: fed.Experiment, data: fed.FederatedData) -> fed.Run:
    return simulate(keys, data=data, model=partial(nn.Linear, 4, 3), loss=parts.squared)


def without_own_keys(finished: fed.Run) -> tuple[Any, ...]:
    """The outcome of a run as text, in which NaN is equal to itself, but for counts and times of its own."""
    bits, lines, summary, clients = parts.outcome(finished)
    for counts in (*lines, summary):
        counts.pop("diverged", None)
        counts.pop("uplink_pays_below_bytes_per_s", None)
    return bits, repr(lines), repr(summary), clients


def failing(*args: Any, **keys: Any) -> Flight:
    """A flight whose client breaks down when it would have answered."""
    flight = depart(*args, **keys)
    if flight.task.client in BAD:
        flight.problem = flight.problem or "it broke down"
    return flight


@pytest.mark.parametrize("kind", thinned(RUNS, quick=6))
def test_dropped_client_is_one_that_has_failed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = run(experiment(kind, diverged="drop"), poisoned())
    monkeypatch.setattr(fleets, "depart", failing)
    failed = run(experiment(kind), poisoned())
    assert without_own_keys(dropped) == without_own_keys(failed)
    assert dropped.summary["diverged"] == sum(line["failed"] for line in failed.metrics) > 0
    assert "diverged" not in failed.summary


def test_others_of_several_groups_keep_their_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 within 1e-12: groups without the failed client are cut elsewhere, and their sums round otherwise."""
    data = parts.unequal(torch.float64)
    for client in BAD:
        data.train[client][0].mul_(1e300)

    def weight(**rounds: Any) -> Tensor:
        keys = experiment("synchronous", **rounds).override({"simulation.group": 2})
        model = simulate(keys, data=data, model=linear_of_float64, loss=parts.squared).model
        assert isinstance(model, nn.Linear)
        return model.weight

    dropped = weight(diverged="drop")
    monkeypatch.setattr(fleets, "depart", failing)
    assert torch.allclose(dropped, weight(), rtol=0, atol=1e-12)


def linear_of_float64() -> nn.Linear:
    return nn.Linear(4, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("keys", "loss", "reason"),
    [
        ({"algorithm": {"kind": "qfedavg", "q": 40.0}}, 1e10, "what it reports is not finite"),  # the loss's power
        (
            {"secure_aggregation": {"max_weight": 2, "minimum_cohort": 2}},
            1e15,
            "its training loss times its samples is beyond the range of the sum, 7e13: scale the loss",
        ),
    ],
)
def test_dropped_clients_are_named_with_the_reason(
    keys: dict[str, Any], loss: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss of client 2 is finite, but nothing that it can report."""
    targets = {client: torch.full((2,), loss if client == 2 else 1.0) for client in range(4)}
    train = {client: (torch.ones(2, 1), target) for client, target in targets.items()}
    data = fed.FederatedData(train, test=train[0])  # nothing is said of a model that nobody scores
    finished = simulate(
        fed.Experiment(rounds={"count": 2, "diverged": "drop"}, **keys),
        data=data,
        model=partial(nn.Linear, 1, 1),
        loss=lambda output, target: (1e-9 * output + target[:, None]).mean(),
    )
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"round {number}: client 2 failed: {reason}" for number in (1, 2)]
    assert [(line["replied"], line["failed"], line["diverged"]) for line in finished.metrics] == [(3, 1, 1)] * 2
    assert (finished.summary["status"], finished.summary["diverged"]) == ("finished", 2)


def test_run_ends_where_it_waits_for_diverged_clients_alone() -> None:
    data, unbatched = parts.unequal(), {"simulation.batching": "off"}
    for client in data.clients:
        data.train[client][0].mul_(1e30)
    for kind in ("buffered", "quorum"):
        with pytest.raises(Diverged, match=r"round 1, client 'c\d': the training loss became"):
            run(experiment(kind, diverged="drop").override(unbatched), data)
    unmoved = run(experiment("synchronous", diverged="drop").override(unbatched), data).summary
    assert (unmoved["status"], unmoved["unanswered_rounds"], unmoved["diverged"]) == ("finished", 4, 28)


def test_resumed_run_drops_the_same_clients(tmp_path: Path) -> None:
    """With devices that differ, tasks under way were trained, and found to diverge, before the checkpoint."""
    keys = experiment("buffered", diverged="drop").override({"checkpoints.every": 1})
    whole = run(keys, poisoned())

    def stop(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    given: dict[str, Any] = {"data": poisoned(), "model": partial(nn.Linear, 4, 3), "loss": parts.squared}
    with pytest.raises(KeyboardInterrupt):
        simulate(keys, output=tmp_path / "run", observers=[Essential(parts.Watcher(stop))], **given)
    resumed = simulate(keys, output=tmp_path / "run", resume=True, **given)
    assert parts.outcome(whole) == parts.outcome(resumed)
    assert whole.summary["diverged"] > 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rounds": {"kind": "bounded_staleness"}}, "a mean over the clients that answered, got rounds bounded_stal"),
        ({"algorithm": "centralized"}, "clients that report to a coordinator, got algorithm centralized, whose one"),
        ({"algorithm": "dpsgd"}, "clients that report to a coordinator, got algorithm dpsgd"),
        ({"algorithm": "allreduce"}, "clients that report to a coordinator, got algorithm allreduce"),
        ({"algorithm": "local"}, "clients that report to a coordinator, got algorithm local"),
    ],
    ids=["bounded staleness", "centralized", "peers", "replicas", "local"],
)
def test_dropping_is_refused_where_all_must_answer(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidExperiment, match=f"rounds.diverged drop needs {said}.*: write rounds.diverged: stop"):
        fed.Experiment().override({**keys, "rounds": {**keys.get("rounds", {}), "diverged": "drop"}})
