"""Forgeries of a hostile coordinator: keys, boxes and consents in the names of its colluders, or of others."""

from collections.abc import Iterable

from fed.protocol.protocol_pb2 import Box, PlacedConsent, SessionKeys
from fed.secure_aggregation import key_agreement
from fed.secure_aggregation.terms import Terms
from tests.fed.secure_aggregation.hostile import spec
from tests.fed.secure_aggregation.hostile.record import Dealt
from tests.fed.secure_aggregation.hostile.world import World, signer_of


def keys_of(world: World, terms: Terms, signer: str) -> SessionKeys:
    """Keys whose private halves are the coordinator's.

    Args:
        world: keeps the private halves.
        terms: the terms that are signed.
        signer: the client whose identity signs.
    """
    sealing, masking = world.entropy(32), world.entropy(32)
    publics = spec.public_of(sealing), spec.public_of(masking)
    world.record.adversary.update(zip(publics, (sealing, masking), strict=True))
    signature = key_agreement.sign(signer_of(signer), terms.keys_to_sign(*publics))
    return SessionKeys(sealing=publics[0], masking=publics[1], signature=signature)


def boxes_for(world: World, dealt: Dealt) -> dict[str, Box]:
    """Boxes for a client, from all whose keys are the coordinator's."""
    boxes = {}
    for place, keys in dealt.keys.items():
        private = world.record.adversary.get(keys.sealing)
        if private is not None:
            own = dealt.keys[dealt.place].sealing
            key = spec.box_key(private, own, dealt.session, place, dealt.place)
            content = b"".join(spec.shares_of(bytes(32), 2))
            boxes[dealt.names[place]] = Box(place=place + 1, sealed=spec.sealed(key, content))
    return boxes


def consents_for(world: World, dealt: Dealt, places: bytes) -> list[PlacedConsent]:
    """All consents of a client's neighbours that there are to a list of survivors, and those of colluders."""
    to_sign = spec.digest("survivors", dealt.session, places)
    signed = {name: key_agreement.sign(signer_of(name), to_sign) for name in world.colluders}
    signed |= world.consents[dealt.session, places]
    return [
        PlacedConsent(place=place + 1, signature=signed[dealt.names[place]])
        for place in _places(places)
        if place in dealt.keys and place != dealt.place and dealt.names[place] in signed
    ]


def packed(names: list[str], survivors: Iterable[str]) -> bytes:
    """Bits of the survivors' places."""
    bits = sum(1 << names.index(one) for one in survivors)
    return bits.to_bytes(-(-len(names) // 8), "little")


def _places(packed: bytes) -> list[int]:
    bits = int.from_bytes(packed, "little")
    return [place for place in range(bits.bit_length()) if bits >> place & 1]
