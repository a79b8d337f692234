"""One battery over every peer rule: what must hold of mixing, for all peers at once and for one at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fed.aggregators.base import PeerRule
from fed.aggregators.dpsgd import DPSGD
from fed.aggregators.local import Local
from fed.topology import complete, exponential, mixing_matrix, ring

RULES = [DPSGD(order="adapt_then_combine"), DPSGD(order="combine_then_adapt")]
PEERS, PARAMETERS = 8, 5
Topology = Callable[[int], object]


def start(seed: int) -> Tensor:
    return torch.randn(PEERS, PARAMETERS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stay(x_NP: Tensor) -> Tensor:
    return x_NP


@pytest.mark.parametrize("rule", RULES)
def test_without_gradients_a_ring_contracts_the_consensus_error_by_rho(rule: PeerRule) -> None:
    mixing_NN = mixing_matrix(ring(PEERS))
    rho = (1 + 2 * math.cos(2 * math.pi / PEERS)) / 3
    x_NP = start(0)
    mean_P = x_NP.mean(0)
    # The slowest mode of a ring is a wave around it: start there, and every round shrinks the error by ρ exactly.
    wave_N = torch.cos(2 * math.pi * torch.arange(PEERS, dtype=torch.float64) / PEERS)
    x_NP = mean_P + wave_N[:, None] * x_NP[0]
    error = (x_NP - mean_P).norm()
    for _ in range(30):
        x_NP = rule.step(x_NP, stay, lambda y: torch.sparse.mm(mixing_NN, y))
        assert float((x_NP - mean_P).norm() / error) == pytest.approx(rho, abs=1e-9)
        error = (x_NP - mean_P).norm()
    assert torch.allclose(x_NP.mean(0), mean_P, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_from_anywhere_a_ring_contracts_by_rho_in_the_end(rule: PeerRule) -> None:
    mixing_NN = mixing_matrix(ring(PEERS))
    rho = (1 + 2 * math.cos(2 * math.pi / PEERS)) / 3
    x_NP = start(1)
    errors = []
    for _ in range(120):
        x_NP = rule.step(x_NP, stay, lambda y: torch.sparse.mm(mixing_NN, y))
        errors.append(float((x_NP - x_NP.mean(0)).norm()))
    # The next mode's ρ is 1/3 + 0·2/3, of which (0.333/0.805)^60 < 1e-22 is left.
    assert errors[60] / errors[59] == pytest.approx(rho, abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_on_a_complete_graph_one_round_is_the_mean(rule: PeerRule) -> None:
    mixing_NN = mixing_matrix(complete(PEERS))
    x_NP = start(2)
    mixed_NP = rule.step(x_NP, stay, lambda y: torch.sparse.mm(mixing_NN, y))
    assert torch.allclose(mixed_NP, x_NP.mean(0).expand_as(x_NP), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", [*RULES, Local()])
@pytest.mark.parametrize("topology", [ring, complete, exponential])
def test_one_peer_alone_computes_its_row_of_all(rule: PeerRule, topology: Topology) -> None:
    mixing_NN = mixing_matrix(topology(PEERS))  # type: ignore[arg-type]  # a graph
    weights_NN = mixing_NN.to_dense()
    x_NP, target_NP = start(3), start(4)

    def descend_all(y_NP: Tensor) -> Tensor:
        return y_NP - 0.1 * (y_NP - target_NP)

    together_NP = rule.step(x_NP, descend_all, lambda y: torch.sparse.mm(mixing_NN, y))

    # What every peer puts on the wire is what the rule passes to mix; each then sums what its neighbours sent.
    sent: list[Tensor] = []

    def send(y_P: Tensor) -> Tensor:
        sent.append(y_P)
        return y_P

    for i in range(PEERS):
        rule.step(x_NP[i], lambda y, i=i: y - 0.1 * (y - target_NP[i]), send)  # type: ignore[misc]  # i is bound now
    for i in range(PEERS):

        def receive(_: Tensor, i: int = i) -> Tensor:
            return torch.stack([weights_NN[i, j] * sent[j] for j in range(PEERS)]).sum(0)

        alone_P = rule.step(x_NP[i], lambda y, i=i: y - 0.1 * (y - target_NP[i]), receive)  # type: ignore[misc]
        assert torch.allclose(alone_P, together_NP[i], rtol=0, atol=1e-14)


def test_the_two_orders_differ_by_what_neighbours_see() -> None:
    mixing_NN = mixing_matrix(ring(PEERS))
    x_NP, gradient_NP = start(5), start(6)

    def mix(y_NP: Tensor) -> Tensor:
        mixed_NP: Tensor = torch.sparse.mm(mixing_NN, y_NP)
        return mixed_NP

    combine_first = DPSGD(order="combine_then_adapt").step(x_NP, lambda y: y - gradient_NP, mix)
    adapt_first = DPSGD(order="adapt_then_combine").step(x_NP, lambda y: y - gradient_NP, mix)
    assert torch.allclose(combine_first, mix(x_NP) - gradient_NP, rtol=0, atol=1e-14)
    assert torch.allclose(adapt_first, mix(x_NP - gradient_NP), rtol=0, atol=1e-14)


def test_local_never_mixes() -> None:
    def refuse(_: Tensor) -> Tensor:
        raise AssertionError("local must not mix")

    assert torch.equal(Local().step(start(7), lambda y: y + 1, refuse), start(7) + 1)
