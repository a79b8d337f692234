"""Secrets that the adversary can compute: from shares that were revealed, and from boxes that it opens."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from tests.fed.secure_aggregation.hostile import spec
from tests.fed.secure_aggregation.hostile.record import Dealt, Record

Place: TypeAlias = tuple[str, bytes]
"""A client in a session: its name and the session's id."""


class Secrets(NamedTuple):
    """A client's two secrets of a session."""

    seed: bytes
    masking: bytes


@dataclass
class _Shares:
    """Shares of one client's two secrets, by point."""

    seed: dict[int, int] = field(default_factory=dict)
    masking: dict[int, int] = field(default_factory=dict)


class Knowledge:
    """The honest clients' secrets, as far as the adversary has them.

    Attributes:
        secrets: the secrets of each honest client in each session, as only it knows them.

    Args:
        record: the record of the transcript.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._dealt = {(one.owner, one.session): one for one in record.dealt}
        self.secrets = {at: _secrets(dealt, record) for at, dealt in self._dealt.items()}

    @cached_property
    def seeds(self) -> set[Place]:
        """Clients whose seed is known."""
        return {at for at, shares in self._shares.items() if _leads_to(shares.seed, self.secrets[at].seed)}

    @cached_property
    def maskings(self) -> set[Place]:
        """Clients whose private masking key is known."""
        return {at for at, shares in self._shares.items() if _leads_to(shares.masking, self.secrets[at].masking)}

    @cached_property
    def publics(self) -> set[bytes]:
        """Public masking keys whose private halves are known."""
        found = {spec.public_of(self.secrets[at].masking) for at in self.maskings}
        return found | self._record.adversary.keys()

    @cached_property
    def _shares(self) -> dict[Place, _Shares]:
        known: dict[Place, _Shares] = defaultdict(_Shares)
        for dealt in self._record.dealt:
            self._open(dealt, known[dealt.owner, dealt.session])
        for said in self._record.unmasked:
            holder, session = said.dealt.place, said.dealt.session
            for is_seed, shares in ((True, said.shares.seeds), (False, said.shares.keys)):
                for one in shares:
                    owner = self._dealt.get((said.dealt.names[one.place - 1], session))
                    if owner is not None:  # else a colluder's
                        kind = known[owner.owner, session].seed if is_seed else known[owner.owner, session].masking
                        kind[_points(owner)[holder]] = int.from_bytes(one.share, "big")
        return known

    def _open(self, dealt: Dealt, known: _Shares) -> None:
        """Open the boxes that are sealed for keys of the adversary."""
        points = _points(dealt)
        for box in dealt.shares.boxes:
            holder = box.place - 1
            private = self._record.adversary.get(dealt.keys[holder].sealing)
            if private is None:
                continue
            own = dealt.keys[dealt.place].sealing
            key = spec.box_key(private, own, dealt.session, dealt.place, holder)
            content = spec.opened(key, box.sealed)
            known.seed[points[holder]] = int.from_bytes(content[: spec.SHARE_BYTES], "big")
            known.masking[points[holder]] = int.from_bytes(content[spec.SHARE_BYTES :], "big")


def _secrets(dealt: Dealt, record: Record) -> Secrets:
    """Find, among all that a client has drawn, what it has committed to and what its public key belongs to."""
    drawn, masking = record.drawn[dealt.owner], dealt.keys[dealt.place].masking
    seeds = (
        one
        for one in drawn
        if spec.digest("seed", dealt.session, dealt.owner.encode(), one) == dealt.shares.seed_sha256
    )
    return Secrets(next(seeds), next(one for one in drawn if spec.public_of(one) == masking))


def _points(dealt: Dealt) -> dict[int, int]:
    """Point of each holder's share."""
    return {holder: point for point, holder in enumerate(dealt.holders, 1)}


def _leads_to(shares: dict[int, int], secret: bytes) -> bool:
    """True if these shares lead to the secret: fewer than its threshold lead to a random number."""
    return bool(shares) and spec.value_at_zero(shares) == int.from_bytes(secret, "big")
