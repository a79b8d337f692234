"""Members that go for good: every rule over ``mix`` ends where it would have without them, by one code path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fed.aggregators.d2 import D2
from fed.aggregators.gradient_tracking import GradientTracking
from fed.aggregators.peer_rule import PeerRule
from fed.aggregators.sgp import SGP
from fed.server.mixing.primitives import Exchanges
from fed.server.mixing.rule_states import first_state, next_state, renewed_state
from fed.topology import Topology, mixing_matrix
from fed.topology.graphs import ring
from fed.vectors.mixing import Weights
from fed.vectors.randomness import Streams
from tests.aggregators.peer_rules import Quadratics, Together
from tests.aggregators.test_peer_rules import RULES, coded
from tests.thinned import thinned

PEERS, PARAMETERS, STAYS_UNTIL, ROUNDS = 7, 5, 40, 600
GONE = 2
STAY = [row for row in range(PEERS) if row != GONE]
SUMS = [rule for rule in RULES if rule.conserves_sum]
ALL = Quadratics.random(PEERS, PARAMETERS, 0.1)
LEFT = Quadratics(ALL.curvature_NP[STAY], ALL.centre_NP[STAY], 0.1)


def directed(peers: int) -> Tensor:
    """Column-stochastic weights whose rows do not add up to 1: each sends to the next, and every second one to all."""
    matrix_NN = torch.eye(peers, dtype=torch.float64)
    for sender in range(peers):
        matrix_NN[(sender + 1) % peers, sender] = 1.0
        if sender % 2:
            matrix_NN[:, sender] = 1.0
    return matrix_NN / matrix_NN.sum(0)


def weights(rule: PeerRule, peers: int) -> Callable[[int], Weights]:
    """Weights of each round: of partners that a rule chooses, of a directed graph where it corrects them, or a ring."""
    if (partners := rule.partners()) is not None:
        return Topology(partners, partners, peers, Streams(3)).weights
    fixed = Weights.of(directed(peers) if rule.corrects_weights else mixing_matrix(ring(peers)))
    return lambda number: fixed


def after(rule: PeerRule, state: Any, numbers: range, descend: Quadratics) -> Any:
    peers = len(state.model_NP)
    weights_in = weights(rule, peers)
    for number in numbers:
        together = Together(weights_in(number))
        mix = Exchanges(together, torch.zeros(peers, 0, dtype=torch.float64), coded(), {}, range(peers), number)
        state = next_state(rule, state, descend, mix)
    return state


def start() -> Tensor:
    return torch.randn(PEERS, PARAMETERS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def of_rows(state: Any, rows: list[int]) -> Any:
    return type(state)(*(part[rows] for part in state))


def ends(rule: PeerRule, *, begin_anew: bool) -> tuple[Tensor, Tensor]:
    """Models long after one of seven has gone, and those of six that never met it."""
    early = of_rows(after(rule, first_state(rule, start()), range(1, STAYS_UNTIL), ALL), STAY)
    early = renewed_state(rule, early, range(len(STAY)) if begin_anew else [])
    late = after(rule, early, range(STAYS_UNTIL, ROUNDS), LEFT)
    never = after(rule, first_state(rule, start()[STAY]), range(1, ROUNDS), LEFT)
    return late.model_NP, never.model_NP


@pytest.mark.parametrize("rule", thinned(RULES, quick=5), ids=lambda rule: type(rule).__name__)
def test_the_others_end_as_if_they_had_never_met_it(rule: PeerRule) -> None:
    """The slowest mode shrinks to 0.95 a round: 560 rounds leave 3e-13 of what parts them, and roundings."""
    late_NP, never_NP = ends(rule, begin_anew=True)
    assert torch.allclose(late_NP, never_NP, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", SUMS, ids=lambda rule: type(rule).__name__)
def test_a_rule_that_conserves_a_sum_must_begin_anew(rule: PeerRule) -> None:
    late_NP, never_NP = ends(rule, begin_anew=False)
    assert not torch.allclose(late_NP, never_NP, rtol=0, atol=1e-3)


@pytest.mark.parametrize("rule", [D2(), GradientTracking()], ids=lambda rule: type(rule).__name__)
def test_the_others_reach_the_optimum_of_their_own_mean(rule: PeerRule) -> None:
    late_NP, _ = ends(rule, begin_anew=True)
    assert torch.allclose(late_NP, LEFT.optimum_P.expand_as(late_NP), rtol=0, atol=1e-9)
    assert float((LEFT.optimum_P - ALL.optimum_P).abs().max()) > 0.01


def share(rule: PeerRule, state: Any) -> Any:
    """Each peer's share of what must add up to 0."""
    if isinstance(rule, GradientTracking):
        return state.tracker_NP - state.gradient_NP
    if isinstance(rule, D2):
        return state.model_NP - state.last_NP + state.step_NP
    assert isinstance(rule, SGP)
    return state.w_N1 - 1


@pytest.mark.parametrize("rule", SUMS, ids=lambda rule: type(rule).__name__)
def test_sums_hold_while_members_stay_and_once_they_begin_anew(rule: PeerRule) -> None:
    """A sum of seven numbers about 1 over 40 rounds; each share is far from 0."""
    state = after(rule, first_state(rule, start()[:1].expand(PEERS, -1)), range(1, STAYS_UNTIL), ALL)
    assert float(share(rule, state).sum(0).abs().max()) < 1e-12
    assert float(share(rule, state).abs().max()) > 0.01
    left = of_rows(state, STAY)
    assert float(share(rule, left).sum(0).abs().max()) > 0.01
    renewed = renewed_state(rule, left, range(len(STAY)))
    assert torch.equal(renewed.model_NP, left.model_NP)
    assert float(share(rule, renewed).abs().max()) == 0
    again = after(rule, renewed, range(STAYS_UNTIL, 2 * STAYS_UNTIL), LEFT)
    assert float(share(rule, again).sum(0).abs().max()) < 1e-12


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_peers_that_do_not_begin_anew_keep_their_states(rule: PeerRule) -> None:
    state = after(rule, first_state(rule, start()), range(1, STAYS_UNTIL), ALL)
    renewed = renewed_state(rule, state, [1, 4])
    for part, before in zip(renewed, state, strict=True):
        others = [0, 2, 3, 5, 6]
        assert torch.equal(part[others], before[others])
    assert any(not torch.equal(*parts) for parts in zip(renewed, state, strict=True)) == rule.conserves_sum
