"""Bytes of a session but for the masked messages, in closed form: what a simulation counts that runs no protocol."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from fed.secure_aggregation.graph import Degree
from fed.secure_aggregation.key_agreement import DIGEST_BYTES, KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES
from fed.secure_aggregation.shamir import SHARE_BYTES
from fed.wire.protocol_pb2 import (
    Box,
    Consent,
    PlacedConsent,
    PlacedKeys,
    RevealedShare,
    SessionKeys,
)

__all__ = ["Traffic", "sharing_traffic", "unmasking_traffic"]


class Traffic(NamedTuple):
    """Bytes that travel.

    Args:
        up: from each client to the coordinator.
        down: from the coordinator to all clients together.
    """

    up: int
    down: int


def sharing_traffic(names: Sequence[str], degree: Degree) -> Traffic:
    """Keys, lists, shares and deliveries of a session in which no client drops out before its masked message.

    Args:
        names: of the clients.
        degree: of their graph.
    """
    keys, placed, box = _sizes()[:3]
    listed = sum(_field(2 + len(name.encode()) + _field(DIGEST_BYTES)) for name in names)
    boxes = degree.neighbours * _field(box)
    up = keys + _field(DIGEST_BYTES) + boxes
    return Traffic(up, len(names) * (_field(listed) + degree.neighbours * _field(placed) + boxes))


def unmasking_traffic(clients: int, survivors: int, degree: Degree) -> Traffic:
    """Survivors, consents and shares of a session, where every survivor stays to the end.

    Args:
        clients: n.
        survivors: those whose masked messages are in the sum.
        degree: of the graph.
    """
    consent, placed_consent, revealed = _sizes()[3:]
    consents = (degree.threshold - degree.is_complete) * _field(placed_consent)
    down = survivors * (_field(-(-clients // 8)) + consents)
    return Traffic(consent + degree.holders * _field(revealed), down)


def _field(size_bytes: int) -> int:
    """Bytes of a field of bytes, or of a message, with its tag and length."""
    return 1 + -(-size_bytes.bit_length() // 7) + size_bytes


@cache
def _sizes() -> tuple[int, ...]:
    """Bytes of messages that always have the same."""
    keys = SessionKeys(sealing=bytes(KEY_BYTES), masking=bytes(KEY_BYTES), signature=bytes(SIGNATURE_BYTES))
    messages = [
        keys,
        PlacedKeys(place=1, keys=keys),
        Box(place=1, sealed=bytes(2 * SHARE_BYTES + TAG_BYTES)),
        Consent(signature=bytes(SIGNATURE_BYTES)),
        PlacedConsent(place=1, signature=bytes(SIGNATURE_BYTES)),
        RevealedShare(place=1, share=bytes(SHARE_BYTES)),
    ]
    return tuple(message.ByteSize() for message in messages)
