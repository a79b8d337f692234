"""Bytes of a session but for the masked messages, in closed form, for a simulation that runs no protocol."""

from collections.abc import Sequence
from typing import NamedTuple

from fed.protocol.protocol_pb2 import Box, Consent, PlacedConsent, PlacedKeys, RevealedShare, SessionKeys
from fed.secure_aggregation.graph import Degree
from fed.secure_aggregation.key_agreement import DIGEST_BYTES, KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES
from fed.secure_aggregation.shamir import SHARE_BYTES

__all__ = ["Traffic", "sharing_traffic", "unmasking_traffic"]

_SIGNATURE = bytes(SIGNATURE_BYTES)
_KEYS = SessionKeys(sealing=bytes(KEY_BYTES), masking=bytes(KEY_BYTES), signature=_SIGNATURE)
_PLACED_KEYS = PlacedKeys(place=1, keys=_KEYS)
_BOX = Box(place=1, sealed=bytes(2 * SHARE_BYTES + TAG_BYTES))
_CONSENT = Consent(signature=_SIGNATURE)
_PLACED_CONSENT = PlacedConsent(place=1, signature=_SIGNATURE)
_REVEALED_SHARE = RevealedShare(place=1, share=bytes(SHARE_BYTES))


class Traffic(NamedTuple):
    """Bytes that travel, of all clients together.

    Args:
        up: bytes from the clients to the coordinator, the same from each of them.
        down: bytes from the coordinator to the clients.
    """

    up: int
    down: int


def sharing_traffic(names: Sequence[str], degree: Degree) -> Traffic:
    """Keys, lists, shares and deliveries of a session in which no client drops out before its masked message.

    Args:
        names: names of the clients.
        degree: degree of their graph.
    """
    listed = sum(_field(2 + len(name.encode()) + _field(DIGEST_BYTES)) for name in names)
    boxes = degree.neighbours * _field(_BOX.ByteSize())
    up = _KEYS.ByteSize() + _field(DIGEST_BYTES) + boxes
    down = _field(listed) + degree.neighbours * _field(_PLACED_KEYS.ByteSize()) + boxes
    return Traffic(len(names) * up, len(names) * down)


def unmasking_traffic(clients: int, survivors: int, degree: Degree) -> Traffic:
    """Survivors, consents and shares of a session, where every survivor stays to the end.

    Args:
        clients: n, the number of clients.
        survivors: number of clients whose masked messages are in the sum.
        degree: degree of the graph.
    """
    up = _CONSENT.ByteSize() + degree.holders * _field(_REVEALED_SHARE.ByteSize())
    # On the complete graph a client counts its own share, and needs one consent less.
    consents = (degree.threshold - degree.is_complete) * _field(_PLACED_CONSENT.ByteSize())
    return Traffic(survivors * up, survivors * (_field(-(-clients // 8)) + consents))


def _field(size_bytes: int) -> int:
    """Bytes of a field of bytes, or of a message, with its tag and length."""
    return 1 + -(-size_bytes.bit_length() // 7) + size_bytes
