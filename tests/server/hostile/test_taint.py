"""Two nodes of one name and one key, with different samples: the coordinator's view of them is the same."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fed.clients.data import Pair
from fed.clients.node.said import SENTENCES, TOLD, WITHHELD
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.reasons import Reason
from tests.server.hostile.coordinator import NodeRefuses
from tests.server.hostile.nodes import COHORT, GUEST, Field, samples_of
from tests.server.hostile.plans import Run

NUMBERS = pb.TaskId(start=1, number=1), pb.TaskId(start=1, number=2)
RANDOM = {
    "SessionKeys.sealing",
    "SessionKeys.masking",
    "SessionKeys.signature",
    "SealedShares.seed_sha256",
    "Box.sealed",
    "Consent.signature",
    "RevealedShare.share",
    "Payload.sha256",
}
"""Fields that are fresh keys, signatures, sealed boxes, shares, and the hash of masked lanes."""


@dataclass
class Seen:
    """All that the coordinator has seen of a node: what it said and delivered, without what is random."""

    said: Sequence[bytes]
    delivered: Sequence[tuple[bytes, int]]
    messages: Sequence[pb.FromNode]


def test_each_field_that_a_node_says_is_told_or_withheld() -> None:
    assert _fields_said() == TOLD.keys() | WITHHELD.keys()
    assert not TOLD.keys() & WITHHELD.keys()
    assert _fields_said() >= SENTENCES


@pytest.fixture(scope="module")
def usual(field: Field) -> Seen:
    """The coordinator's view of a node with the usual samples."""
    return seen_of(field, "usual", samples_of(int(GUEST)))


@pytest.mark.parametrize("what", ["others", "diverging"])
def test_view_is_the_same_for_other_samples(what: str, field: Field, usual: Seen) -> None:
    inputs, labels = samples_of(int(GUEST), count=13)
    pairs = {"others": (3.0 * inputs + 1.0, labels.clamp(max=1)), "diverging": (inputs * 1e30, labels)}
    other = seen_of(field, what, pairs[what])
    assert len(usual.delivered) == 1
    assert other.said == usual.said
    assert other.delivered == usual.delivered


def test_view_of_labels_beyond_the_plan_is_a_constant_sentence(field: Field, usual: Seen) -> None:
    inputs, labels = samples_of(int(GUEST))
    other = seen_of(field, "beyond", (inputs, labels + 3))
    *same, _ = other.said
    assert same == usual.said[: len(same)]
    assert [*sentences(other.messages[-1])] == [Reason.CANNOT_FOLLOW]
    assert not other.delivered


def seen_of(field: Field, state: str, pair: Pair, changed: Mapping[str, Any] | None = None, **told: Any) -> Seen:
    """The view of a node through all that a coordinator may ask, as far as the node goes along.

    Args:
        field: coordinator and nodes.
        state: name of the node's folder.
        pair: samples of the node.
        changed: keys of the experiment that are others; None: none.
        told: fields of the tasks beside the usual ones.
    """
    coordinator, names = field.coordinator, (*COHORT[:2], GUEST)
    before = len(coordinator.views[GUEST].said), len(coordinator.views[GUEST].delivered)
    program = field.start(GUEST, pair, state=state)
    coordinator.wait_to_join([GUEST], coordinator.views[GUEST].connections + 1)
    run = Run(coordinator, f"taint {state}", changed or {})
    run.tell(names)
    # A model of this test alone: the other clients reveal nothing of one model twice.
    model_V = run.model(200 + len(field.programs))
    task, other = (run.task(model_V, task=number, **told) for number in NUMBERS)
    try:
        run.settle(names, number=1)
        total = run.sum_of(dict.fromkeys(names, task))
        assert total.clients == len(names)
        run.settle(names, number=2)
        with pytest.raises(NodeRefuses):  # another attempt of the round
            run.session({GUEST: other}).assign()
        coordinator.tell(GUEST, withdrawal=pb.Withdrawal(task=other.task))
        run.settle([GUEST], number=3)
    except NodeRefuses:
        pass
    finally:
        program.kill()
    view = coordinator.views[GUEST]
    said = view.said[before[0] :]
    for message in said:
        assert set(sentences(message)) <= set(Reason)
    delivered = [(blank(head), len(content)) for head, content in view.delivered[before[1] :]]
    return Seen([blank(message) for message in said], delivered, said)


def blank(message: Message) -> bytes:
    """The bytes of a message, with zeros in place of what is random."""
    copied = type(message)()
    copied.CopyFrom(message)
    for part, field in fields_of(copied):
        if f"{part.DESCRIPTOR.name}.{field.name}" in RANDOM:
            value = getattr(part, field.name)
            setattr(part, field.name, type(value)() if isinstance(value, str) else bytes(len(value)))
    return copied.SerializeToString(deterministic=True)


def sentences(message: pb.FromNode) -> Iterator[str]:
    """Sentences in a message."""
    for part, field in fields_of(message):
        if f"{part.DESCRIPTOR.name}.{field.name}" in SENTENCES:
            yield getattr(part, field.name)


def fields_of(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """All fields that are set, with the messages that they are of."""
    for field, value in message.ListFields():
        if field.message_type is None:
            yield message, field
            continue
        for part in value if field.is_repeated else [value]:
            yield from fields_of(part)


def _fields_said() -> set[str]:
    """Names of all fields, as ``Message.field``, that messages of a node have."""
    names: set[str] = set()
    left = [pb.FromNode.DESCRIPTOR, pb.Answer.DESCRIPTOR]
    while left:
        kind = left.pop()
        for field in kind.fields:
            name = f"{kind.name}.{field.name}"
            if name not in names and field.message_type is not None:
                left.append(field.message_type)
            names.add(name)
    return names
