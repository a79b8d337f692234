"""What federated data refuse, and what they know without being asked twice."""

from typing import Any

import pytest
import torch

from fed.clients.data import ClientsOnDemand, FederatedData, Pair
from fed.errors import InvalidData

PAIR: Pair = (torch.zeros(3, 2), torch.tensor([0, 1, 1]))


LABELS = PAIR[1]
NOT_A_NUMBER = torch.tensor([[0, 0], [0, torch.nan], [0, 0]])


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((torch.zeros(0, 2), LABELS[:0]), "client 'b' must hold at least one sample"),
        ((torch.zeros(3, 2), LABELS[:2]), "client 'b' must have as many targets as inputs"),
        ((torch.zeros(3, 4), LABELS), "inputs of client 'b' must be like those of client 'a'"),
        ((torch.zeros(3, 2), torch.zeros(3)), "targets of client 'b' must be like those of client 'a'"),
        ((NOT_A_NUMBER, LABELS), r"inputs of client 'b' must be finite, got nan at index \(1, 1\)"),
        ((torch.zeros(3, 2), "abc"), "targets of client 'b' must be a tensor, an array, a frame or a list of numbers"),
        ((torch.zeros(3, 2), ["yes", "no", "no"]), "got 'yes' in row 1: number the classes, .* numpy.searchsorted"),
        ((*PAIR, LABELS), "client 'b' must hold a pair of tensors .*, got 3 parts"),
    ],
)
def test_data_that_cannot_be_learned_from_name_the_client(second: Any, said: str) -> None:
    with pytest.raises(InvalidData, match=said) as caught:
        FederatedData({"a": PAIR, "b": second})
    assert "\n" not in str(caught.value)


def test_clients_come_by_id() -> None:
    pairs: Any = [PAIR, PAIR]
    with pytest.raises(InvalidData, match=r"must be a mapping .* got list: .* dict\(enumerate\(pairs\)\)") as caught:
        FederatedData(pairs)
    assert "\n" not in str(caught.value)
    assert FederatedData(dict(enumerate(pairs))).sizes == {0: 3, 1: 3}


def test_labels_are_less_than_the_number_of_classes() -> None:
    beyond = (PAIR[0], LABELS + 1)
    assert FederatedData({"a": beyond}, beyond, classes=3).number_of_classes() == 3
    with pytest.raises(InvalidData, match="targets of client 'b' must be in 0 … 1, as classes=2 says, got 2"):
        FederatedData({"a": PAIR, "b": beyond}, classes=2)
    with pytest.raises(InvalidData, match="targets of the test set must be in 0 … 1"):
        FederatedData({"a": PAIR}, beyond, classes=2)


def test_there_must_be_a_client() -> None:
    with pytest.raises(InvalidData, match="at least one client"):
        FederatedData({})


def test_the_test_set_must_be_like_the_training_data() -> None:
    with pytest.raises(InvalidData, match="inputs of the test set must be like those of client 'a'"):
        FederatedData({"a": PAIR}, (torch.zeros(3, 5), PAIR[1]))


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    large = torch.full((3, 2), 3e38)
    assert FederatedData({"a": (large, PAIR[1])}).sizes == {"a": 3}
    with pytest.raises(InvalidData, match="must be finite, got -inf"):
        FederatedData({"a": (torch.stack([large[0], large[0], -large[0] * 10]), PAIR[1])})


def test_data_in_memory_are_read_as_they_are() -> None:
    data = FederatedData({"a": PAIR, 7: PAIR})
    assert (data.clients, data.is_on_demand, data.size_of(7)) == (("a", 7), False, 3)
    assert data.read("a") is PAIR
    with pytest.raises(KeyError):
        data.read("b")


def test_classes_are_those_of_all_clients_and_the_test_set() -> None:
    assert FederatedData({"a": PAIR}).number_of_classes() == 2
    assert FederatedData({"a": PAIR}, (torch.zeros(1, 2), torch.tensor([6]))).number_of_classes() == 7
    assert FederatedData({"a": PAIR}, classes=4).number_of_classes() == 4
    assert FederatedData({"a": (PAIR[0], torch.zeros(3))}).number_of_classes() is None


def test_pooled_data_hold_every_sample_in_one_place() -> None:
    pooled = FederatedData({"a": PAIR, "b": PAIR}, PAIR).pooled()
    assert pooled.sizes == {"all": 6}
    assert pooled.test is PAIR


def test_printed_data_are_one_line_of_numbers() -> None:
    data = FederatedData({"a": PAIR, "b": PAIR}, client_tests={"a": PAIR})
    assert repr(data) == "FederatedData(2 clients with 6 samples, no test set, 1 test set of clients)"
    many = FederatedData(ClientsOnDemand(range(9), lambda client: PAIR), PAIR, classes=2)
    assert str(many) == "FederatedData(9 clients, 3 samples to test on)"
