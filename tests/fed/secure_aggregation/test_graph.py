import math
from typing import Any

import networkx as nx
import numpy as np
import pytest

from fed.errors import InvalidExperiment
from fed.protocol.protocol_pb2 import FromNode, FromSession, SealedShares
from fed.secure_aggregation.graph import Degree, SessionGraph, complete_degree, harary_degree
from fed.secure_aggregation.key_agreement import TAG_BYTES
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.shamir import SHARE_BYTES


@pytest.mark.parametrize(
    ("clients", "corrupt", "dropped", "semi_honest", "malicious"),
    [
        (32, 0.05, 0.1, (6, 2), (8, 5)),
        (100, 0.05, 0.1, (16, 6), (26, 16)),
        (100, 0.33, 0.2, (54, 34), (74, 54)),
        (1000, 0.1, 0.1, (48, 27), (96, 67)),
        (10_000, 0.05, 0.1, (42, 22), (96, 64)),
    ],
)
def test_degrees_are_the_known_answers(
    clients: int, corrupt: float, dropped: float, semi_honest: tuple[int, int], malicious: tuple[int, int]
) -> None:
    """Bell et al. 2020 and their authors' code."""
    colluders = math.floor(corrupt * clients)  # as they count them
    assert harary_degree(clients, colluders, dropped, is_semi_honest=True)[:2] == semi_honest
    assert harary_degree(clients, colluders, dropped)[:2] == malicious


@pytest.mark.parametrize(("clients", "neighbours"), [(50, 26), (110, 40)])
def test_degree_keeps_those_that_stay_connected(clients: int, neighbours: int) -> None:
    """Half drop out, and none is corrupt: the others must stay connected, which decides these degrees alone.

    By exact fractions; with 2⁻⁴⁰ in place of 2⁻⁴¹ the second would be 38. One share must not be the secret itself.
    """
    assert harary_degree(clients, 0, 0.5, is_semi_honest=True) == Degree(neighbours, 2, False)


def test_harary_graph_is_regular_connected_and_symmetric() -> None:
    graph = SessionGraph(50, Degree(8, 5, False), b"digest")
    edges = {place: graph.neighbours(place) for place in range(50)}
    made = nx.Graph((place, other) for place, others in edges.items() for other in others)
    assert {len(set(others) - {place}) for place, others in edges.items()} == {8}
    assert made.number_of_edges() == 200
    assert nx.node_connectivity(made) == 8  # Harary's: as many as the degree
    assert all(graph.holders(place) == others for place, others in edges.items())


def test_order_on_the_circle_follows_the_digest() -> None:
    degree = Degree(4, 3, False)
    first, again, other = (SessionGraph(60, degree, name) for name in (b"a", b"a", b"b"))
    assert [first.neighbours(place) for place in range(60)] == [again.neighbours(place) for place in range(60)]
    assert [first.neighbours(place) for place in range(60)] != [other.neighbours(place) for place in range(60)]


def test_pairs_are_equally_often_neighbours() -> None:
    degree, times = Degree(4, 3, False), 3000
    counts = np.zeros(11)
    for number in range(times):
        counts[list(SessionGraph(11, degree, number.to_bytes(4, "big")).neighbours(3))] += 1
    expected = times * 4 / 10
    deviation = math.sqrt(times * 0.4 * 0.6)
    assert counts[3] == 0
    assert np.abs(np.delete(counts, 3) - expected).max() < 5 * deviation


@pytest.mark.parametrize("clients", [3, 5, 10, 32, 99, 100])
@pytest.mark.parametrize("corrupt", [0.0, 0.1, 0.33, 0.5])
def test_complete_threshold_leaves_no_room_for_two_groups(clients: int, corrupt: float) -> None:
    colluders = math.ceil(corrupt * clients)
    degree = complete_degree(clients, colluders)
    assert 2 * degree.threshold > clients + colluders
    assert degree.holders == clients
    least = (clients + colluders) // 2 + 1
    assert complete_degree(clients, colluders, least).threshold == least
    with pytest.raises(InvalidExperiment, match=f"from {least} to {clients}"):
        complete_degree(clients, colluders, least - 1)


@pytest.mark.parametrize(("clients", "threshold"), [(5, 3), (7, 4), (9, 5)])
def test_one_colluder_never_holds_both_secrets_by_default(clients: int, threshold: int) -> None:
    """Two groups of honest clients and one colluder have a threshold each: (n − 1)/2 + 1 shares of either secret."""
    assert 2 * (threshold - 1) <= clients - 1
    with pytest.raises(InvalidExperiment, match=f"from {threshold + 1} to {clients}"):
        SecureAggregation(threshold=threshold, minimum_cohort=2).degree(clients)


@pytest.mark.parametrize(("corrupt", "clients", "colluders"), [(0.1, 5, 1), (0.1, 10, 1), (0.07, 100, 7), (0.0, 9, 0)])
def test_colluders_are_rounded_up_to_whole_clients(corrupt: float, clients: int, colluders: int) -> None:
    assert SecureAggregation(corrupt=corrupt).colluders(clients) == colluders


def test_settings_choose_the_graph_by_the_number_of_clients() -> None:
    section = SecureAggregation(max_drop_out=0.1)
    assert section.degree(100).is_complete
    assert section.degree(1000) == harary_degree(1000, 100, 0.1)
    assert SecureAggregation(graph="complete").degree(500).neighbours == 499
    assert not SecureAggregation(graph="harary", corrupt=0.05, max_drop_out=0.1).degree(60).is_complete
    assert section.least_survivors(1000) == 900  # no more may drop out than the graph was made for
    assert section.least_survivors(100) == 67


@pytest.mark.parametrize(
    ("keys", "clients", "match"),
    [
        ({}, 4, "minimum_cohort = 5"),
        ({"max_drop_out": 0.4}, 10, "at most 6"),
        ({"corrupt": 0.7}, 10, "at most 8, .* got 9 by auto: lower max_drop_out or corrupt"),
        ({"threshold": 9}, 10, "at most 8, .* got 9: lower it"),
        ({"threshold": 5}, 10, "from 6 to 10"),
        ({"threshold": 11}, 10, "from 6 to 10"),
        ({"graph": "harary", "corrupt": 0.3, "max_drop_out": 0.3}, 10, "no sparse graph"),
        ({"threshold": 3}, 1000, "from [0-9]+ to [0-9]+ in a sparse"),
        ({"minimum_cohort": 11}, 12, "minimum_cohort must be at most 10"),
    ],
)
def test_cohorts_in_which_no_round_succeeds_are_refused(keys: dict[str, Any], clients: int, match: str) -> None:
    with pytest.raises(InvalidExperiment, match=match):
        SecureAggregation(**keys).check(clients, clients)


def test_complete_graphs_have_as_many_shares_as_a_message_holds() -> None:
    settings = SecureAggregation(graph="complete")
    assert settings.degree(512).neighbours == 511
    shares = SealedShares(seed_sha256=bytes(32))
    for place in range(511):
        shares.boxes.add(place=place + 1, sealed=bytes(2 * SHARE_BYTES + TAG_BYTES))
    assert FromNode(session=FromSession(shares=shares)).ByteSize() < 1 << 16
    with pytest.raises(InvalidExperiment, match="512 of 513 clients: write graph: auto"):
        settings.degree(513)


def test_threshold_may_be_given_in_a_sparse_graph() -> None:
    degree = harary_degree(1000, 100, 0.2)
    given = SecureAggregation(threshold=degree.threshold + 1).degree(1000)
    assert given == degree._replace(threshold=degree.threshold + 1)
    with pytest.raises(InvalidExperiment, match=f"to {degree.neighbours} in a sparse"):
        SecureAggregation(threshold=degree.neighbours + 1).degree(1000)
