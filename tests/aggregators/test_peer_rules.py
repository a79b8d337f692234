"""One battery over every peer rule: what must hold of mixing, for all peers at once and for one at a time."""

import math
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor

from fed.aggregators.clipped_gossip import ClippedGossip
from fed.aggregators.d2 import D2
from fed.aggregators.dpsgd import DPSGD
from fed.aggregators.gradient_tracking import GradientTracking
from fed.aggregators.gradient_tracking import State as Tracked
from fed.aggregators.local import LocalOnly
from fed.aggregators.peer_rule import PeerRule
from fed.aggregators.sgp import SGP
from fed.errors import InvalidExperiment
from fed.mixing import Weights
from fed.server.peer.neighbourhood import Exchanges, first_state, next_state
from fed.topology import mixing_matrix
from fed.topology.graphs import complete, exponential, ring
from tests.aggregators.peer_rules import Alone, Choco, Model, Quadratics, Together

PLAIN = [DPSGD(order="adapt_then_combine"), DPSGD(order="combine_then_adapt")]
RULES = [*PLAIN, LocalOnly(), D2(), GradientTracking(), SGP(), ClippedGossip(radius=0.5), Choco()]
PEERS, PARAMETERS = 8, 5
NO_BUFFERS = torch.zeros(PEERS, 0, dtype=torch.float64)
Graph = Callable[[int], "nx.Graph[int]"]


def star(peers: int) -> "nx.Graph[int]":
    graph: nx.Graph[int] = nx.star_graph(peers - 1)
    return graph


def weights_of(topology: Graph) -> Weights:
    return Weights.of(mixing_matrix(topology(PEERS)))


def start(seed: int) -> Tensor:
    return torch.randn(PEERS, PARAMETERS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STILL = Quadratics(torch.zeros(PEERS, PARAMETERS), torch.zeros(PEERS, PARAMETERS), 1.0)


def after(rule: PeerRule, state: Any, rounds: int, descend: Quadratics, weights: Weights) -> Any:
    for _ in range(rounds):
        state = next_state(rule, state, descend, Exchanges(Together(weights), NO_BUFFERS))
    return state


@pytest.mark.parametrize("rule", PLAIN)
def test_without_gradients_a_ring_contracts_by_rho(rule: PeerRule) -> None:
    rho = (1 + 2 * math.cos(2 * math.pi / PEERS)) / 3
    # The slowest mode of a ring is a wave around it: start there, and every round shrinks the error by ρ exactly.
    wave_N = torch.cos(2 * math.pi * torch.arange(PEERS, dtype=torch.float64) / PEERS)
    mean_P = start(0).mean(0)
    state = Model(mean_P + wave_N[:, None] * start(0)[0])
    error = (state.model_NP - mean_P).norm()
    for _ in range(30):
        state = after(rule, state, 1, STILL, weights_of(ring))
        assert float((state.model_NP - mean_P).norm() / error) == pytest.approx(rho, abs=1e-9)
        error = (state.model_NP - mean_P).norm()
    assert torch.allclose(state.model_NP.mean(0), mean_P, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", PLAIN)
def test_on_a_complete_graph_one_round_is_the_mean(rule: PeerRule) -> None:
    mixed_NP = after(rule, Model(start(2)), 1, STILL, weights_of(complete)).model_NP
    assert torch.allclose(mixed_NP, start(2).mean(0).expand_as(mixed_NP), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("topology", [ring, complete, exponential, star])
def test_a_peer_alone_computes_its_row_to_the_bit(rule: PeerRule, topology: Graph) -> None:
    """In float32 on the wire and with buffers, over rounds in which all of a rule's state has moved."""
    together, descend = Together(weights_of(topology)), Quadratics.random(PEERS, PARAMETERS, 0.1)
    buffers_NR = start(5)[:, :2].float()
    state = first_state(rule, start(3))
    for _ in range(4):
        exchanges = Exchanges(together, buffers_NR)
        moved = next_state(rule, state, descend, exchanges)
        for row in range(PEERS):
            only = slice(row, row + 1)
            own = Exchanges(Alone(row, together), buffers_NR[only])
            alone = next_state(rule, type(state)(*(part[only] for part in state)), descend.of(row), own)
            for part, whole in zip((*alone, own.buffers_NR), (*moved, exchanges.buffers_NR), strict=True):
                assert torch.equal(part[0], whole[row])
        state, buffers_NR = moved, exchanges.buffers_NR
        together.sent.clear()


def test_the_two_orders_differ_by_what_neighbours_see() -> None:
    matrix_NN, x_NP, descend = (
        mixing_matrix(ring(PEERS)).to_dense(),
        start(5),
        Quadratics.random(PEERS, PARAMETERS, 0.1),
    )
    moved_NP = descend(x_NP)
    combine, adapt = (after(rule, Model(x_NP), 1, descend, weights_of(ring)).model_NP for rule in reversed(PLAIN))
    assert torch.allclose(combine, matrix_NN @ x_NP + moved_NP - x_NP, rtol=0, atol=1e-14)
    assert torch.allclose(adapt, matrix_NN @ moved_NP, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", [D2(), GradientTracking()], ids=lambda rule: type(rule).__name__)
def test_rules_that_use_the_gradient_reach_the_true_optimum(rule: PeerRule) -> None:
    """On a ring of unequal quadratics, where D-PSGD ends beside it, by its closed form."""
    descend = Quadratics.random(PEERS, PARAMETERS, 0.1)
    # ρ of this ring is 0.80, and η a about 0.1: 1,500 rounds take the error far below a rounding.
    x_NP = after(rule, first_state(rule, start(1)), 1500, descend, weights_of(ring)).model_NP
    assert torch.allclose(x_NP, descend.optimum_P.expand_as(x_NP), rtol=0, atol=1e-12)
    biased_NP = after(DPSGD(), Model(start(1)), 1500, descend, weights_of(ring)).model_NP
    matrix_NN = mixing_matrix(ring(PEERS)).to_dense()
    for column, curvature_N in enumerate(descend.curvature_NP.T):  # x = W (x − η a (x − b))
        system_NN = torch.eye(PEERS) - matrix_NN @ torch.diag(1 - 0.1 * curvature_N)
        fixed_N = torch.linalg.solve(system_NN, matrix_NN @ (0.1 * curvature_N * descend.centre_NP[:, column]))
        assert torch.allclose(biased_NP[:, column], fixed_N, rtol=0, atol=1e-12)
    assert float((biased_NP - descend.optimum_P).abs().max()) > 0.01


def test_the_trackers_mean_is_the_mean_gradient() -> None:
    descend, rule = Quadratics.random(PEERS, PARAMETERS, 0.05), GradientTracking()
    state = first_state(rule, start(1))
    for _ in range(50):
        state = after(rule, state, 1, descend, weights_of(ring))
        gradient_P = descend.gradient(state.model_NP).mean(0)
        assert torch.allclose(state.tracker_NP.mean(0), gradient_P, rtol=0, atol=1e-13)


def test_push_sum_averages_on_a_directed_graph() -> None:
    """Columns add up to 1 and rows do not: w, mixed in the same message, takes the bias away; Σ w = n always."""
    matrix_NN = torch.zeros(PEERS, PEERS, dtype=torch.float64)
    for j in range(PEERS):
        to = {j, (j + 1) % PEERS, (j + j % 3 + 1) % PEERS}
        matrix_NN[list(to), j] = 1 / len(to)
    weights, state = Weights.of(matrix_NN), first_state(SGP(), start(1))
    for _ in range(200):
        state = after(SGP(), state, 1, STILL, weights)
        assert float(state.w_N1.sum()) == pytest.approx(PEERS, abs=1e-12)
    assert float((state.w_N1 - 1).abs().max()) > 0.1
    assert torch.allclose(state.model_NP, start(1).mean(0).expand(PEERS, -1), rtol=0, atol=1e-12)


def test_clipping_nothing_is_gossip_and_an_outlier_moves_nobody_far() -> None:
    plain_NP = after(DPSGD(), Model(start(1)), 1, STILL, weights_of(star)).model_NP
    wide_NP = after(ClippedGossip(radius=1e9), Model(start(1)), 1, STILL, weights_of(star)).model_NP
    assert torch.allclose(wide_NP, plain_NP, rtol=0, atol=1e-14)
    x_NP = start(1)
    x_NP[3] += 1e6
    moved_NP = after(ClippedGossip(radius=0.5), Model(x_NP), 1, STILL, weights_of(complete)).model_NP
    assert float((moved_NP - x_NP).norm(dim=1).max()) <= 0.5  # Σ W_ij < 1, of distances up to the radius


def test_compressed_differences_reach_consensus_on_the_mean() -> None:
    mean_P = start(1).mean(0)
    state = after(Choco(), first_state(Choco(), start(1)), 400, STILL, weights_of(ring))
    assert torch.allclose(state.model_NP, mean_P.expand(PEERS, -1), rtol=0, atol=1e-10)


def test_several_vectors_of_one_message_mix_as_each_alone() -> None:
    together = Together(weights_of(exponential))
    x_NP, w_N1 = Exchanges(together, NO_BUFFERS)(start(1), start(2)[:, :1])
    assert [list(sent.shape) for sent in together.sent] == [[PEERS, PARAMETERS + 1]]
    assert torch.equal(x_NP, Exchanges(together, NO_BUFFERS)(start(1)))
    assert torch.equal(w_N1, Exchanges(together, NO_BUFFERS)(start(2)[:, :1]))


def test_buffers_travel_with_the_first_exchange_alone() -> None:
    together, buffers_NR = Together(weights_of(ring)), start(2)[:, :2]
    mix = Exchanges(together, buffers_NR)
    mix(mix(start(1)))
    assert [sent.shape[1] for sent in together.sent] == [PARAMETERS + 2, PARAMETERS]
    assert torch.equal(mix.buffers_NR, Exchanges(together, NO_BUFFERS)(buffers_NR))


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (lambda rule, x_NP: x_NP, "a named tuple with the field model_NP, got Tensor"),
        (lambda rule, x_NP: Model(x_NP[0]), r"model_NP as float64 \[8, 5\], got float64 \[5\]"),
        (lambda rule, x_NP: Model(x_NP.float()), r"model_NP as float64 \[8, 5\], got float32 \[8, 5\]"),
        (lambda rule, x_NP: Tracked(x_NP, x_NP[:3], x_NP), r"tracker_NP as .* each of 8 peers, got float64 \[3, 5\]"),
    ],
)
def test_a_state_that_is_none_is_refused(init: Callable[[Any, Tensor], Any], words: str) -> None:
    broken = type("Broken", (LocalOnly,), {"init": init})
    with pytest.raises(InvalidExperiment, match=f"Broken.init must give {words}"):
        first_state(broken(), start(1))
