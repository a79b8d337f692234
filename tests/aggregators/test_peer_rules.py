"""One battery over every peer rule: what must hold of mixing, for all peers at once and for one at a time."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from fed.aggregators.adpsgd import ADPSGD
from fed.aggregators.choco import CHOCO
from fed.aggregators.choco import State as Hatted
from fed.aggregators.clipped_gossip import ClippedGossip
from fed.aggregators.d2 import D2
from fed.aggregators.deepsqueeze import DeepSqueeze
from fed.aggregators.dpsgd import DPSGD
from fed.aggregators.gradient_tracking import GradientTracking
from fed.aggregators.gradient_tracking import State as Tracked
from fed.aggregators.local import LocalOnly
from fed.aggregators.matcha import MATCHA
from fed.aggregators.moshpit import Moshpit
from fed.aggregators.noloco import NoLoCo
from fed.aggregators.peer_rule import PeerRule
from fed.aggregators.sgp import SGP
from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, Values
from fed.compression.feedback import Encoder, ScaleAlone
from fed.compression.quantisers import QSGD
from fed.compression.sparsifiers import RandomK, TopK
from fed.config.registry import ALGORITHMS
from fed.errors import InvalidExperiment, RunFailed
from fed.server.mixing.primitives import Exchanges, PeerCodec
from fed.server.mixing.rule_states import first_state, next_state
from fed.topology import Topology, mixing_matrix
from fed.topology.graphs import complete, directed_ring, exponential, ring
from fed.vectors.mixing import Weights
from fed.vectors.randomness import Streams
from tests.aggregators.peer_rules import Alone, Model, Quadratics, Together

PLAIN = [DPSGD(order="adapt_then_combine"), DPSGD(order="combine_then_adapt")]
CHOSEN = [NoLoCo(), Moshpit(), ADPSGD()]
ENCODED = [CHOCO(consensus_step=0.4), DeepSqueeze(consensus_step=0.2)]
RULES = [*PLAIN, MATCHA(), LocalOnly(), D2(), GradientTracking(), SGP(), ClippedGossip(radius=0.5), *CHOSEN, *ENCODED]
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


def coded(*codecs: Codec, parameters: int = PARAMETERS, dtype: torch.dtype = torch.float64) -> PeerCodec:
    """Codecs of vectors, scaled where they are no contraction; without one vectors travel as they are."""
    return PeerCodec(Encoder(CodecChain(codecs, Values(parameters, dtype)), ScaleAlone()), Streams(0))


def after(
    rule: PeerRule, state: Any, rounds: int, descend: Quadratics, weights: Weights, codec: PeerCodec | None = None
) -> Any:
    members = range(len(state.model_NP))
    for number in range(1, rounds + 1):
        mix = Exchanges(Together(weights), NO_BUFFERS[: len(members)], codec or coded(), {}, members, number)
        state = next_state(rule, state, descend, mix)
    return state


def among_partners(rule: PeerRule, state: Any, rounds: int, descend: Quadratics, first: int = 1) -> Any:
    """Rounds over the graphs that a rule chooses."""
    partners = rule.partners()
    assert partners is not None
    topology = Topology(partners, partners, len(state.model_NP), Streams(3))
    for number in range(first, first + rounds):
        state = after(rule, state, 1, descend, topology.weights(number))
    return state


def test_battery_has_every_rule() -> None:
    kinds = {type(ALGORITHMS.make(kind).make()) for kind in ALGORITHMS.builtin}
    assert {kind for kind in kinds if issubclass(kind, PeerRule)} == {*map(type, RULES)}


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
    hold_rows_alone(rule, topology, ())


@pytest.mark.parametrize("rule", ENCODED, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("codecs", [(TopK(fraction=0.4),), (QSGD(),), (RandomK(fraction=0.4), QSGD())])
def test_a_peer_alone_computes_encoded_rows_to_the_bit(rule: PeerRule, codecs: Sequence[Codec]) -> None:
    hold_rows_alone(rule, ring, codecs)


def hold_rows_alone(rule: PeerRule, topology: Graph, codecs: Sequence[Codec]) -> None:
    together, descend = Together(weights_of(topology)), Quadratics.random(PEERS, PARAMETERS, 0.1)
    buffers_NR, codec = start(5)[:, :2].float(), coded(*codecs, dtype=torch.float32)
    state = first_state(rule, start(3)[:1].expand(PEERS, -1))
    copies = [state.model_NP.clone() for _ in range(PEERS)]
    for number in range(1, 5):
        exchanges = Exchanges(together, buffers_NR, codec, {}, range(PEERS), number)
        moved = next_state(rule, state, descend, exchanges)
        for row in range(PEERS):
            only = slice(row, row + 1)
            own = Exchanges(Alone(row, together, number, copies[row]), buffers_NR[only], codec, {}, [row], number)
            alone = next_state(rule, type(state)(*(part[only] for part in state)), descend.of(row), own)
            for part, whole in zip((*alone, own.buffers_NR), (*moved, exchanges.buffers_NR), strict=True):
                assert torch.equal(part[0], whole[row])
        state, buffers_NR = moved, exchanges.buffers_NR
        together.sent.clear()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_without_gradients_the_peers_mean_stays(rule: PeerRule) -> None:
    codec = coded(TopK(fraction=0.4)) if rule.compresses else None
    first = first_state(rule, start(1))
    state = after(rule, first, 20, STILL, weights_of(star), codec) if rule not in CHOSEN else None
    state = state or among_partners(rule, first, 20, STILL)
    assert torch.allclose(state.model_NP.mean(0), start(1).mean(0), rtol=0, atol=1e-13)  # 160 sums of numbers about 1
    assert isinstance(rule, LocalOnly) or float((state.model_NP - start(1)).abs().max()) > 0.1


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
    state = after(rule, first_state(rule, start(1)), 1500, descend, weights_of(ring))
    x_NP = state.model_NP
    assert torch.allclose(x_NP, descend.optimum_P.expand_as(x_NP), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [D2(), GradientTracking()], ids=lambda rule: type(rule).__name__)
def test_rules_that_use_the_gradient_follow_a_schedule(rule: PeerRule) -> None:
    """The step size falls long before the optimum is reached."""
    descend = Quadratics.random(PEERS, PARAMETERS, 0.1)
    early = after(rule, first_state(rule, start(1)), 5, descend, weights_of(ring))
    x_NP = after(rule, early, 4000, replace(descend, step_size=0.03), weights_of(ring)).model_NP
    assert torch.allclose(x_NP, descend.optimum_P.expand_as(x_NP), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", PLAIN, ids=lambda rule: rule.order)
def test_dpsgd_reaches_its_biased_fixed_point(rule: DPSGD) -> None:
    """x = W (x − η a (x − b)), or x = W x − η a (x − b): a linear system in each parameter."""
    descend = Quadratics.random(PEERS, PARAMETERS, 0.1)
    biased_NP = after(rule, Model(start(1)), 1500, descend, weights_of(ring)).model_NP
    assert torch.allclose(biased_NP, fixed_point(descend, mixing_matrix(ring(PEERS)), rule.order), rtol=0, atol=1e-12)
    assert float((biased_NP - descend.optimum_P).abs().max()) > 0.01


def fixed_point(descend: Quadratics, matrix_NN: Tensor, order: str = "adapt_then_combine") -> Tensor:
    """Where D-PSGD rests under these weights."""
    columns, w_NN = [], matrix_NN.to_dense()
    for curvature_N, centre_N in zip(descend.curvature_NP.T, descend.centre_NP.T, strict=True):
        step_NN = descend.step_size * torch.diag(curvature_N)
        moved_NN = w_NN - (w_NN @ step_NN if order == "adapt_then_combine" else step_NN)
        pull_N = step_NN @ centre_N
        pull_N = w_NN @ pull_N if order == "adapt_then_combine" else pull_N
        columns.append(torch.linalg.solve(torch.eye(len(w_NN)) - moved_NN, pull_N))
    return torch.stack(columns, 1)


def test_the_trackers_mean_is_the_mean_gradient() -> None:
    descend, rule = Quadratics.random(PEERS, PARAMETERS, 0.05), GradientTracking()
    state = first_state(rule, start(1))
    for _ in range(50):
        state = after(rule, state, 1, descend, weights_of(ring))
        gradient_P = descend.gradient(state.model_NP).mean(0)
        assert torch.allclose(state.tracker_NP.mean(0), gradient_P, rtol=0, atol=1e-13)


def columns_of(seed: int) -> Tensor:
    """Column-stochastic weights of a random strongly connected graph, whose rows do not add up to 1."""
    generator, matrix_NN = np.random.default_rng(seed), torch.zeros(PEERS, PEERS, dtype=torch.float64)
    for j in range(PEERS):
        to = {j, (j + 1) % PEERS, *generator.choice(PEERS, size=generator.integers(0, 4)).tolist()}
        matrix_NN[list(to), j] = 1 / len(to)
    return matrix_NN


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_push_sum_averages_on_directed_graphs_that_change(dtype: torch.dtype) -> None:
    """w, mixed in the same message, takes the bias away; Σ w = n always, for w travels in float64."""
    state, buffers_NR = first_state(SGP(), start(1)), NO_BUFFERS.to(dtype)
    for number in range(200):
        mix = Exchanges(Together(Weights.of(columns_of(number))), buffers_NR)
        state = next_state(SGP(), state, STILL, mix)
        assert float(state.w_N1.sum()) == pytest.approx(PEERS, abs=1e-12)
    assert float((state.w_N1 - 1).abs().max()) > 0.1
    away = float((state.model_NP - start(1).mean(0)).abs().max())
    # x travels in the model's type: 200 roundings of numbers about 1, of 2⁻²⁵ each
    assert away < (1e-12 if dtype == torch.float64 else 200 * 2**-24)


def test_push_sum_says_so_where_no_weight_comes_in() -> None:
    """A directed ring on which the last peer's message never arrives: the first keeps half of its weight in each round,
    and what has left it gathers at the last, so that nothing is lost."""
    weights = Weights.of(mixing_matrix(directed_ring(PEERS)))
    late_X = (weights.rows_X == 0) & (weights.senders_X == PEERS - 1)
    assert int(late_X.sum()) == 1
    state, ring_without = first_state(SGP(), start(1)), weights.without(late_X)
    for number in range(1, 31):
        state = next_state(SGP(), state, STILL, Exchanges(Together(ring_without), NO_BUFFERS))
        assert float(state.w_N1[0]) == 2.0**-number
        assert float(state.w_N1.sum()) == pytest.approx(PEERS, abs=1e-12)
    assert float(state.w_N1[-1]) > PEERS - 0.1
    with pytest.raises(RunFailed, match="sgp needs messages that reach every peer, got a push-sum weight of 4"):
        next_state(SGP(), state, STILL, Exchanges(Together(ring_without), NO_BUFFERS))


def test_clipping_nothing_is_dpsgd() -> None:
    plain_NP = after(DPSGD(), Model(start(1)), 1, STILL, weights_of(star)).model_NP
    wide_NP = after(ClippedGossip(radius=1e9), Model(start(1)), 1, STILL, weights_of(star)).model_NP
    assert torch.allclose(wide_NP, plain_NP, rtol=0, atol=1e-14)


def test_an_outlier_moves_no_peer_further_than_the_radius() -> None:
    x_NP = start(1)
    x_NP[3] += 1e6
    moved_NP = after(ClippedGossip(radius=0.5), Model(x_NP), 1, STILL, weights_of(complete)).model_NP
    assert float((moved_NP - x_NP).norm(dim=1).max()) <= 0.5  # Σ W_ij < 1, of distances up to the radius


# Encoded vectors.


@pytest.mark.parametrize("rule", [CHOCO(consensus_step=1), DeepSqueeze(consensus_step=1)], ids=["choco", "deepsqueeze"])
def test_without_a_codec_compressed_gossip_is_dpsgd(rule: PeerRule) -> None:
    descend = Quadratics.random(PEERS, PARAMETERS, 0.1)
    plain = after(DPSGD(), first_state(DPSGD(), start(1)), 50, descend, weights_of(exponential))
    same = after(rule, first_state(rule, start(1)), 50, descend, weights_of(exponential))
    assert torch.allclose(same.model_NP, plain.model_NP, rtol=0, atol=1e-12)


NINE, WIDE = Weights.of(mixing_matrix(ring(9))), 40
TENTH = coded(TopK(fraction=0.1), parameters=WIDE)


def nine_start() -> Tensor:
    return torch.randn(9, WIDE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_choco_with_few_values_agrees_linearly() -> None:
    """From copies of 0, on a ring of 9: every 100 rounds leave less than a hundredth of the distance."""
    rule, still = CHOCO(consensus_step=0.3), Quadratics(torch.zeros(9, WIDE), torch.zeros(9, WIDE), 1.0)
    state, mean_P = Hatted(nine_start(), torch.zeros_like(nine_start())), nine_start().mean(0)
    apart = [float((state.model_NP - mean_P).norm())]
    for _ in range(4):
        state = after(rule, state, 100, still, NINE, TENTH)
        apart.append(float((state.model_NP - mean_P).norm()))
    assert all(later < before / 100 for before, later in itertools.pairwise(apart))


def test_choco_agrees_through_a_codec_that_is_no_contraction() -> None:
    """Random values times ten overshoot x̂ ninefold, unless each message is scaled."""
    rule, still = CHOCO(consensus_step=0.1), Quadratics(torch.zeros(9, WIDE), torch.zeros(9, WIDE), 1.0)
    codec, mean_P = coded(RandomK(fraction=0.1), parameters=WIDE), nine_start().mean(0)
    state = after(rule, Hatted(nine_start(), torch.zeros_like(nine_start())), 600, still, NINE, codec)
    assert float((state.model_NP - mean_P).norm()) < 1e-3 * float((nine_start() - mean_P).norm())


def test_a_peer_that_joins_has_no_error_of_another() -> None:
    rule = DeepSqueeze()
    state = after(rule, first_state(rule, start(1)), 3, STILL, weights_of(ring), coded(TopK(fraction=0.4)))
    joined = rule.joined(state)
    assert torch.equal(joined.model_NP, state.model_NP)
    assert float(state.error_NP.abs().max()) > 0.1
    assert not joined.error_NP.any()


@pytest.mark.long
def test_choco_with_few_values_rests_where_dpsgd_does() -> None:
    """Where x̂ = x, a step is D-PSGD's with the weights (1 − γ) I + γ W."""
    rule, descend = CHOCO(consensus_step=0.3), Quadratics.random(9, WIDE, 0.1)
    state = after(rule, first_state(rule, nine_start()[:1].expand(9, -1)), 800, descend, NINE, TENTH)
    matrix_NN = 0.7 * torch.eye(9, dtype=torch.float64) + 0.3 * mixing_matrix(ring(9)).to_dense()
    assert torch.allclose(state.model_NP, fixed_point(descend, matrix_NN), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", ENCODED, ids=lambda rule: type(rule).__name__)
def test_compressed_gossip_is_its_recursion_in_numpy(rule: CHOCO | DeepSqueeze) -> None:
    """Peer by peer, each with copies of its neighbours' x̂ or with the error of its last message."""
    descend, gamma, w = Quadratics.random(PEERS, PARAMETERS, 0.1), rule.consensus_step, mixing_matrix(ring(PEERS))
    w_NN, x = w.to_dense().numpy(), start(1)[:1].expand(PEERS, -1).numpy().copy()
    hats = {(i, j): x[j].copy() for i in range(PEERS) for j in range(PEERS)}  # peer i's copy of j's
    error = np.zeros_like(x)

    def largest(v: Any) -> Any:
        kept = np.argsort(-np.abs(v))[:2]
        return np.where(np.isin(np.arange(PARAMETERS), kept), v, 0.0)

    for _ in range(30):
        x = descend(torch.from_numpy(x)).numpy()
        if isinstance(rule, CHOCO):
            sent = [largest(x[i] - hats[i, i]) for i in range(PEERS)]
            hats = {(i, j): hat + sent[j] for (i, j), hat in hats.items()}
        else:
            sent = [largest(x[i] + error[i]) for i in range(PEERS)]
            error = np.stack([x[i] + error[i] - sent[i] for i in range(PEERS)])
            hats = {(i, j): sent[j] for i, j in hats}
        pulls = [[w_NN[i, j] * (hats[i, j] - hats[i, i]) for j in range(PEERS)] for i in range(PEERS)]
        x = np.stack([x[i] + gamma * np.sum(pulls[i], 0) for i in range(PEERS)])
    first = first_state(rule, start(1)[:1].expand(PEERS, -1))
    state = after(rule, first, 30, descend, weights_of(ring), coded(TopK(fraction=0.4)))
    np.testing.assert_allclose(state.model_NP.numpy(), x, rtol=0, atol=1e-12)


def test_only_a_rule_that_says_so_may_encode() -> None:
    with pytest.raises(InvalidExperiment, match="must have compresses = True, got one without it: add it"):
        Exchanges(Together(weights_of(ring)), NO_BUFFERS).encoded(start(1))


# Partners that rules choose.


def test_two_peers_of_noloco_draw_together_by_its_matrix() -> None:
    """Without gradients their difference d and that of their momenta, m: m ← α m − γ d, d ← d + m."""
    rule = NoLoCo(outer_momentum=0.5, consensus_step=0.9)
    state, mean_P = first_state(rule, start(1)[:2]), start(1)[:2].mean(0)
    still = Quadratics(torch.zeros(2, PARAMETERS), torch.zeros(2, PARAMETERS), 1.0)
    matrix, first_P = np.array([[1 - 0.9, 0.5], [-0.9, 0.5]]), (start(1)[0] - start(1)[1]).numpy()
    for number in range(1, 40):
        state = among_partners(rule, state, 1, still, number)
        power = np.linalg.matrix_power(matrix, number)
        np.testing.assert_allclose(state.model_NP[0] - state.model_NP[1], power[0, 0] * first_P, rtol=0, atol=1e-14)
        assert torch.allclose(state.model_NP.mean(0), mean_P, rtol=0, atol=1e-14)


def test_noloco_contracts_in_the_mean_over_all_pairings() -> None:
    r"""Of four peers, each pairing of three as likely: exact mean squares from a matrix of 3 × 3.

    With p = n / (2 (n − 1)), the mean share of a disagreement that is within pairs, and P its projection:
    x' = (1 − γ P) x + α δ and δ' = α δ − γ P x, where the mean of xᵀ P x is p ‖x‖².
    """
    rule, (alpha, gamma), share = NoLoCo(), (0.3, 0.7), 4 / 6
    pairings = [
        Weights.of(mixing_matrix(nx.Graph(pairs))) for pairs in ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)])
    ]
    still, x_NP = Quadratics(torch.zeros(4, 3), torch.zeros(4, 3), 1.0), start(1)[:4, :3]
    squares = np.array([float((x_NP - x_NP.mean(0)).square().sum()), 0.0, 0.0])  # ‖x‖², ⟨x, δ⟩, ‖δ‖²
    g = gamma * share
    matrix = np.array(
        [
            [1 - 2 * g + gamma * g, 2 * alpha * (1 - g), alpha**2],
            [gamma * g - g, alpha * (1 - 2 * g), alpha**2],
            [gamma * g, -2 * alpha * g, alpha**2],
        ]
    )
    for rounds in range(1, 5):
        squares, ends = matrix @ squares, []
        for chosen in itertools.product(pairings, repeat=rounds):
            state = first_state(rule, x_NP)
            for weights in chosen:
                state = after(rule, state, 1, still, weights)
            ends.append(float((state.model_NP - x_NP.mean(0)).square().sum()))
        assert np.mean(ends) == pytest.approx(squares[0], rel=1e-12)
    assert np.abs(np.linalg.eigvals(matrix)).max() < 0.6


def test_noloco_of_equal_peers_is_diloco() -> None:
    """One gradient for all: δ ← α δ + β (y − x), x ← x + δ."""
    descend, rule = Quadratics.random(PEERS, PARAMETERS, 0.1).of(0), NoLoCo()
    all_alike = Quadratics(descend.curvature_NP.expand(8, -1), descend.centre_NP.expand(8, -1), 0.1)
    x_P, momentum_P = start(1)[0], torch.zeros(PARAMETERS)
    state = among_partners(rule, first_state(rule, start(1)[:1].expand(PEERS, -1)), 20, all_alike)
    for _ in range(20):
        momentum_P = 0.3 * momentum_P + 0.7 * (descend(x_P[None])[0] - x_P)
        x_P = x_P + momentum_P
    assert torch.allclose(state.model_NP, x_P.expand(PEERS, -1), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("peers", "axes"), [(8, 3), (9, 2), (16, 2), (7, 1), (1, 2)])
def test_moshpit_is_exact_after_a_round_for_each_axis(peers: int, axes: int) -> None:
    rule, still = Moshpit(axes=axes), Quadratics(torch.zeros(peers, 3), torch.zeros(peers, 3), 1.0)
    x_NP = torch.randn(peers, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for first in (1, 2, 5):  # from any round on
        state = Model(x_NP)
        for number in range(first, first + axes):
            assert peers == 1 or float((state.model_NP - x_NP.mean(0)).abs().max()) > 0.1
            state = among_partners(rule, state, 1, still, number)
        assert torch.allclose(state.model_NP, x_NP.mean(0).expand(peers, -1), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("peers", "axes"), [(2, 2), (5, 2), (10, 2), (11, 3), (23, 4)])
def test_moshpit_agrees_on_grids_with_empty_places(peers: int, axes: int) -> None:
    rule, still = Moshpit(axes=axes), Quadratics(torch.zeros(peers, 3), torch.zeros(peers, 3), 1.0)
    x_NP = torch.randn(peers, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_mixed_NP = among_partners(rule, Model(x_NP), 40 * axes, still).model_NP
    assert torch.allclose(x_mixed_NP, x_NP.mean(0).expand(peers, -1), rtol=0, atol=1e-9)


def test_adpsgd_adds_stale_steps_to_the_average_of_pairs() -> None:
    """By its recursion: the peers' mean moves by the mean step from the models before the average."""
    descend, rule = Quadratics.random(PEERS, PARAMETERS, 0.1), ADPSGD()
    partners = rule.partners()
    topology, x_NP = Topology(partners, partners, PEERS, Streams(3)), start(1)
    state = among_partners(rule, Model(x_NP), 30, descend)
    for number in range(1, 31):
        matrix_NN = topology.matrix(number).to_dense()
        assert sorted(matrix_NN.flatten().tolist()) == [0.0] * 48 + [0.5] * 16
        x_NP = matrix_NN @ x_NP - 0.1 * descend.gradient(x_NP)
    assert torch.allclose(state.model_NP, x_NP, rtol=0, atol=1e-13)
    still_NP = among_partners(rule, Model(start(1)), 200, STILL).model_NP
    assert torch.allclose(still_NP, start(1).mean(0).expand(PEERS, -1), rtol=0, atol=1e-12)


# Messages.


def test_several_vectors_of_one_message_mix_as_each_alone() -> None:
    together = Together(weights_of(exponential))
    x_NP, w_N1 = Exchanges(together, NO_BUFFERS)(start(1), start(2)[:, :1])
    assert [[*map(list, (part.shape for part in parts))] for parts, _ in together.sent] == [[[8, 5], [8, 1]]]
    assert torch.equal(x_NP, Exchanges(together, NO_BUFFERS)(start(1)))
    assert torch.equal(w_N1, Exchanges(together, NO_BUFFERS)(start(2)[:, :1]))


def test_buffers_travel_with_the_first_exchange_alone() -> None:
    together, buffers_NR = Together(weights_of(ring)), start(2)[:, :2]
    mix = Exchanges(together, buffers_NR)
    mix(mix(start(1)))
    assert [[part.shape[1] for part in parts] for parts, _ in together.sent] == [[2, PARAMETERS], [PARAMETERS]]
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
