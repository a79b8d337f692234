"""The kernel that mixes: its rows have the same bits alone as together, and W x is the dense product."""

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fed.topology import mixing_matrix
from fed.topology.graphs import complete, exponential, ring
from fed.vectors.mixing import Weights
from tests.aggregators.peer_rules import row_alone

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x_NM: x_NM,
    "columns": lambda x_NM: x_NM.T.contiguous().T,
    "every second": lambda x_NM: torch.stack([x_NM, x_NM], 2).flatten(1)[:, ::2],
    "shifted": lambda x_NM: torch.cat([x_NM[:, :1], x_NM], 1)[:, 1:],
}
sizes = st.one_of(st.integers(1, 9), st.sampled_from([64, 2410, 70_001]))  # the last takes several pieces


def random_graph(peers: int, share: float, seed: int) -> Tensor:
    """W of any graph, with lonely peers where few are linked, and weights that differ."""
    generator = np.random.default_rng(seed)
    linked_NN = np.triu(generator.random((peers, peers)) < share, 1)
    weights_NN = np.where(linked_NN | linked_NN.T, generator.random((peers, peers)) / peers, 0.0)
    weights_NN = (weights_NN + weights_NN.T) / 2
    return torch.from_numpy(weights_NN + np.diag(1 - weights_NN.sum(1)))


@settings(deadline=None)
@given(
    peers=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    size=sizes,
    seed=st.integers(0, 10**6),
    layout=st.sampled_from(list(LAYOUTS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_row_alone_has_the_bits_of_all_together(
    peers: int, share: float, size: int, seed: int, layout: str, dtype: torch.dtype
) -> None:
    matrix_NN = random_graph(peers, share, seed)
    own_NM = torch.randn(peers, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    sent_NM = own_NM.to(dtype)
    weights = Weights.of(matrix_NN)
    together_NM = weights.mixed(LAYOUTS[layout](own_NM), LAYOUTS[layout](sent_NM))
    for row in {0, peers // 2, peers - 1}:
        own, senders = row_alone(weights, row)
        assert torch.equal(own.mixed(own_NM[row : row + 1], sent_NM[senders])[0], together_NM[row])
    dense_NM = (matrix_NN - matrix_NN.diag().diag()) @ sent_NM.double() + matrix_NN.diag()[:, None] * own_NM
    torch.testing.assert_close(together_NM, dense_NM, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [ring, complete, exponential, lambda peers: nx.path_graph(peers)])
def test_mixing_is_the_dense_product_of_the_matrix(kind: Callable[[int], "nx.Graph[int]"]) -> None:
    for peers in (1, 2, 3, 33):
        matrix_NN = mixing_matrix(kind(peers))
        x_NM = torch.randn(peers, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(peers))
        mixed_NM = Weights.of(matrix_NN).mixed(x_NM, x_NM)
        torch.testing.assert_close(mixed_NM, matrix_NN.to_dense() @ x_NM, rtol=0, atol=1e-12)


@given(peers=st.integers(1, 10), share=st.floats(0, 1), seed=st.integers(0, 10**6), absent=st.integers(0, 2**10 - 1))
def test_weights_among_some_stay_doubly_stochastic(peers: int, share: float, seed: int, absent: int) -> None:
    """By the definition: an absent neighbour's weight is added to the self weight on both ends."""
    matrix_NN = random_graph(peers, share, seed)
    present_N = torch.tensor([not absent >> peer & 1 for peer in range(peers)])
    expected_NN = matrix_NN.clone()
    for i in range(peers):
        for j in range(peers):
            if i != j and not (present_N[i] and present_N[j]):
                expected_NN[i, i] += matrix_NN[i, j]
                expected_NN[i, j] = 0
    count = int(present_N.sum())
    got = Weights.of(matrix_NN).among(present_N)
    got_NN = got.mixed(torch.eye(count, dtype=torch.float64), torch.eye(count))
    torch.testing.assert_close(got_NN, expected_NN[present_N][:, present_N], rtol=0, atol=1e-14)
    torch.testing.assert_close(got_NN.sum(0), torch.ones(count, dtype=torch.float64), rtol=0, atol=1e-14)


def test_columns_keep_their_sums_in_a_directed_graph() -> None:
    matrix_NN = torch.tensor([[0.5, 0, 0.25], [0.5, 0.5, 0.25], [0, 0.5, 0.5]])
    among = Weights.of(matrix_NN).among(torch.tensor([True, False, True]))
    got_NN = among.mixed(torch.eye(2, dtype=torch.float64), torch.eye(2))
    assert torch.equal(got_NN, torch.tensor([[1, 0.25], [0, 0.75]], dtype=torch.float64))


@given(peers=st.integers(1, 10), share=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_neighbours_come_one_after_another_in_order(peers: int, share: float, seed: int) -> None:
    matrix_NN = random_graph(peers, share, seed)
    found: list[tuple[int, int, float]] = []
    for rows_K, senders_K, weights_K1 in Weights.of(matrix_NN).by_neighbour():
        found += zip(rows_K.tolist(), senders_K.tolist(), weights_K1[:, 0].tolist(), strict=True)
    off_NN = matrix_NN - matrix_NN.diag().diag()
    expected = [(i, j, off_NN[i, j].item()) for i, j in off_NN.nonzero().tolist()]
    assert sorted(found) == expected
    for row in range(peers):
        assert [j for i, j, _ in found if i == row] == [j for i, j, _ in expected if i == row]
