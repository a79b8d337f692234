"""Ring all-reduce against the exact sum, whatever the number of members, their order and the length."""

import json
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fed.errors import InvalidPayload
from fed.server.peer.replica.ring import Ring, RoundSum
from fed.vectors.reduction import PACKED_BYTES, WeightedMean
from fed.wire.messages import Answer, Update


def update_of(member: int, numbers: int) -> Answer:
    generator = torch.Generator().manual_seed(member)
    update_M = torch.randn(numbers, generator=generator) * 10.0 ** (member % 7 - 3)
    integers_I = torch.tensor([member, -member])
    weight = member + 1 if member % 3 else member + 0.3
    return Answer((member,), 1, (member,), Update(update_M, weight), integers_I, (member + 1,), (member / 3,))


def in_turn(rings: Sequence[Ring], sent_bytes: list[int]) -> None:
    for step in range(rings[0].messages):
        sent = [ring.message(step) for ring in rings]
        for place, ring in enumerate(rings):
            sent_bytes[place] += sent[place][0].nbytes
            ring.take(sent[place - 1])


@given(st.integers(1, 9), st.integers(0, 40), st.randoms(use_true_random=False))
def test_every_member_has_the_exact_sum(members: int, numbers: int, draws: random.Random) -> None:
    order = draws.sample(range(members), members)
    names, answers = [str(member) for member in order], [update_of(member, numbers) for member in order]
    rings = [Ring(p, names, RoundSum.of(names[p], answers[p], numbers)) for p in range(members)]
    sent_bytes = [0] * members
    in_turn(rings, sent_bytes)
    expected = WeightedMean(numbers)
    for answer in answers:
        expected.add(answer.update.update_M, answer.update.weight)
    for ring in rings:
        total = ring.result()
        assert total.mean().finish().equal(expected.finish())
        assert total.mean().weight == expected.weight
        assert [one.name for one in total.contributions] == [str(member) for member in range(members)]
        assert [one.train_loss for one in total.contributions] == [member / 3 for member in range(members)]
        assert total.integers_I.tolist() == [members - 1, 0]
        assert all(map(torch.equal, total.tensors(), rings[0].result().tensors()))
        assert RoundSum.read(total.tensors(), numbers).contributions == total.contributions
    assert sum(sent_bytes) == 2 * (members - 1) * PACKED_BYTES * numbers
    if numbers % members == 0:
        assert set(sent_bytes) == {2 * (members - 1) * PACKED_BYTES * numbers // members}


def test_lanes_of_chunks_may_differ_in_number() -> None:
    names, numbers = ("1", "2", "3"), 6
    answers = [update_of(1, numbers).with_update(torch.tensor([0.0, 0, 0, 0, 1e30, k])) for k in range(3)]
    rings = [Ring(p, names, RoundSum.of(names[p], answers[p], numbers)) for p in range(3)]
    in_turn(rings, [0] * 3)
    assert len(rings[0].result().lanes) > 4
    assert rings[0].result().mean().finish().tolist() == [0, 0, 0, 0, float(torch.tensor(1e30)), 1]


NAMES = "ann", "bob", "eve"


def second_of_three() -> tuple[Ring, list[Tensor]]:
    """The member after ann, and ann's first message."""
    first, second = (Ring(p, NAMES, RoundSum.of(NAMES[p], update_of(p, 6), 6)) for p in range(2))
    return second, list(first.message(0))


def written(*contributions: Sequence[object]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(contributions).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("place", "tensor", "why"),
    [
        (0, torch.zeros(7, dtype=torch.int32), "up to 30 lanes of 2, got 7 numbers"),
        (0, torch.zeros(0, dtype=torch.int32), "up to 30 lanes of 2, got 0"),
        (0, torch.zeros(62, dtype=torch.int32), "up to 30 lanes of 2, got 62"),
        (1, torch.zeros(3, dtype=torch.int64), "integer buffers"),
        (2, torch.zeros(9, dtype=torch.uint8), "whose updates"),
        (2, written(), "each member's update once"),
        (2, written(["ann", 1, "1", 0.5], ["ann", 1, "1", 0.5]), "each member's update once"),
        (2, written(["bob", 1, "1", 0.5]), "updates of the members before it"),
        (2, written(["ann", 1, "1", 0.5], ["eve", 1, "1", 0.5]), "updates of the members before it"),
        (2, written(["../ann", 1, "1", 0.5]), "name each member"),
        (2, written(["ann", 0, "1", 0.5]), "samples"),
        (2, written(["ann", 1, "0", 0.5]), "weight must be positive"),
        (2, written(["ann", 1, "1/0", 0.5]), "weights that are"),
        (2, written(["ann", 1, "9" * 300, 0.5]), "weight must be positive and at most"),
        (2, written(["ann", 1, "1" + "0" * 399, 0.5]), "weight must be positive and at most"),
        (2, written(["ann", 1, "1e9", 0.5]), "weights that are"),
        (2, written(["ann", 1, "1", float("nan")]), "loss must be finite"),
        (2, written(["ann", 1, "1"]), "whose updates"),
    ],
)
def test_a_message_that_cannot_be_is_refused(place: int, tensor: Tensor, why: str) -> None:
    ring, tensors = second_of_three()
    tensors[place] = tensor
    with pytest.raises(InvalidPayload, match=why):
        ring.take(tensors)
    assert ring.taken == 0
    ring.take(second_of_three()[1])
    assert ring.taken == 1


def test_weights_travel_exactly() -> None:
    weight = 0.1
    answer = update_of(0, 2)
    answer = answer._replace(content=answer.update._replace(weight=weight))
    total = RoundSum.of("7", answer, 2)
    assert RoundSum.read(total.tensors(), 2).contributions[0].weight == Fraction(weight)


def test_sum_of_no_numbers_has_no_lanes() -> None:
    """As a ring's chunk is where there are fewer numbers than members."""
    tensors = RoundSum.of("7", update_of(0, 2), 2).tensors()
    with pytest.raises(InvalidPayload, match="no lanes"):
        RoundSum.read(tensors, 0)
