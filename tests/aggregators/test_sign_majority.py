"""Majority vote of signs: counted by hand, whatever the grouping, and a bit a parameter each way.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fed
from fed.aggregators.base import ClientWork, Reduced
from fed.aggregators.sign_majority import SignMajority
from fed.errors import InvalidExperiment
from fed.simulations.fleet import SimulatedFleet
from fed.wire.messages import Task

pytestmark = pytest.mark.usefixtures("device")

RULE = SignMajority(server_lr=0.25)


def voted(update_KP: Tensor, seed: int = 0) -> Tensor:
    """The step, of the mean as groups of two clients give it."""
    ones_K1 = torch.ones(len(update_KP), 1, dtype=torch.float64)
    anchor_P = torch.zeros(update_KP.shape[1])
    work = ClientWork(update_KP, anchor_P, anchor_P, ones_K1, ones_K1, 0.1, 0.0, ones_K1)
    (votes_KP,), weights_K1 = RULE.report(work)[:2]
    assert torch.equal(weights_K1, ones_K1)
    groups = [(weights_K1 / len(votes_KP) * votes_KP)[start : start + 2].sum(0) for start in range(0, len(votes_KP), 2)]
    mean_P = torch.stack(groups).sum(0)
    state = RULE.init(torch.zeros(update_KP.shape[1], dtype=torch.float64))
    stream = partial(np.random.default_rng, seed)
    return RULE.apply(state, Reduced((mean_P,), len(update_KP), 100, stream)).model_P


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7, 10, 49])
def test_the_majority_moves_each_coordinate(clients: int) -> None:
    generator = np.random.default_rng(clients)
    update_KP = torch.from_numpy(generator.standard_normal((clients, 500)) * 10.0 ** generator.integers(-9, 9, 500))
    update_KP[:, ::7] = 0.0
    votes_P = torch.where(update_KP >= 0, 1, -1).sum(0)
    ties_P = votes_P == 0
    moved_P = voted(update_KP)
    assert torch.equal(moved_P[~ties_P], 0.25 * votes_P[~ties_P].sign())
    assert bool(ties_P.any()) == (clients in (2, 6, 10))
    assert bool((moved_P.abs() == 0.25).all())


def test_ties_go_by_the_stream_alone() -> None:
    update_KP = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 4000)
    one, same, other = (voted(update_KP, seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    # fair: of 4000 coins the share of heads is within 4 standard deviations of a half, and so is that of equal ones
    for share in (one > 0, one == other):
        assert abs(float(share.double().mean()) - 0.5) < 4 * 0.5 / 4000**0.5


def experiment(**changed: Any) -> fed.Experiment:
    keys: dict[str, Any] = {
        "data": {"clients": 6},
        "rounds": {"count": 5},
        "algorithm": "sign_majority",
        "simulation": {"workers": 0},
    }
    return fed.Experiment(**{**keys, **changed})


def test_a_bit_a_parameter_each_way_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of ±1 has a mean magnitude of 1, and one of ±η the magnitude η: x̂ is x, to float32's rounding."""
    sent: list[Tensor] = []
    dispatch = SimulatedFleet.dispatch

    def dispatched(fleet: SimulatedFleet, tasks: Iterable[Task]) -> None:
        tasks = [*tasks]
        sent.append(tasks[0].model.params_V)
        dispatch(fleet, tasks)

    monkeypatch.setattr(SimulatedFleet, "dispatch", dispatched)
    run = fed.simulate(experiment())
    message = 1 + 4 + (run.summary["parameters"] + 7) // 8
    assert [line["bytes_up"] for line in run.metrics] == [6 * message] * 5
    assert [line["bytes_down"] for line in run.metrics][1:] == [6 * message] * 4
    for earlier, later in itertools.pairwise(sent):
        torch.testing.assert_close((later - earlier).abs(), torch.full_like(later, 0.003), rtol=1e-3, atol=0)
    alone = fed.simulate(experiment(downlink=[]))
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"hierarchy": {"fan_out": 2}}, id="edges"),
        pytest.param({"simulation": {"workers": 2}}, id="workers", marks=pytest.mark.processes),
    ],
)
def test_edges_and_workers_change_no_vote(changed: dict[str, Any]) -> None:
    plain, other = (fed.simulate(experiment(**keys)).model.state_dict() for keys in ({}, changed))
    assert all(map(torch.equal, plain.values(), other.values()))


@pytest.mark.parametrize("uplink", [["sign"], []])
def test_an_attacker_has_one_vote_however_loud(uplink: list[str]) -> None:
    models = [
        fed.simulate(
            experiment(uplink=uplink, adversaries={"kind": "sign_flip", "fraction": 0.34, "scale": scale})
        ).model
        for scale in (1.0, 1e6)
    ]
    for quiet, loud in zip(*(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(loud, quiet, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"error_feedback": "ef"}, "sign_majority needs error_feedback none, since votes have no errors, got ef"),
        ({"uplink": ["int8"]}, "sign_majority needs an uplink that leaves signs as they are, got int8: leave uplink"),
        ({"rounds": "buffered"}, "sign_majority needs updates that count in full, each of which has one vote, got"),
        ({"rounds": "asynchronous"}, "sign_majority"),
    ],
)
def test_what_changes_votes_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        experiment(**changed)
