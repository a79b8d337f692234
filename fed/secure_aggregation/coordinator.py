"""Coordinator's side of a session: a state machine without I/O or clock, that holds one sum and no client's message."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum

from fed.errors import InvalidPayload, SessionFailed
from fed.processes.machine import usable_cores
from fed.protocol.protocol_pb2 import (
    ClientList,
    Consent,
    Consents,
    Delivery,
    KeyList,
    PlacedConsent,
    PlacedKeys,
    SealedShares,
    SessionKeys,
    Survivors,
    Unmasking,
)
from fed.secure_aggregation.fixed_point import SecureSum
from fed.secure_aggregation.key_agreement import DIGEST_BYTES, TAG_BYTES, AgreementKey
from fed.secure_aggregation.masks import Mask, add_masks
from fed.secure_aggregation.shamir import SHARE_BYTES, recover
from fed.secure_aggregation.terms import Identities, Session, Terms, keys_digest
from fed.vectors.tensors import Tensor

__all__ = ["SessionCoordinator", "SessionPhase"]

_WORTH_THREADS = 1 << 24  # numbers of all masks: for fewer, threads take longer than they save
_MOST_THREADS = 8  # each has a vector as long as the sum


class SessionPhase(IntEnum):
    """Messages that the coordinator of a session collects."""

    KEYS = 0
    SHARES = 1
    MASKED = 2
    CONSENTS = 3
    UNMASKING = 4
    OVER = 5


class SessionCoordinator:
    """The coordinator of one session: it takes messages of clients, phase by phase, and closes each phase once.

    A client whose message is missing when its phase is closed has dropped out; a refused message counts as missing.

    Attributes:
        phase: message that the coordinator collects.
        replied: names of the clients whose message of this phase has come.
        cheaters: names of clients that have revealed false shares.

    Args:
        terms: terms of the session.
        identities: identities of all clients.

    Raises:
        InvalidPayload: by the methods that take a message, if it must not count.
        SessionFailed: by those that close a phase, if too few clients are left.
    """

    def __init__(self, terms: Terms, identities: Identities) -> None:
        self.phase = SessionPhase.KEYS
        self.replied: set[str] = set()
        self.cheaters: set[str] = set()
        self._terms = terms
        self._identities = identities
        self._trial = AgreementKey.draw(os.urandom)  # which finds keys that agree on nothing
        self._keys: dict[str, SessionKeys] = {}
        self._session: Session | None = None
        self._places: dict[str, int] = {}
        self._seeds_sha256: dict[int, bytes] = {}
        self._deliveries: dict[int, Delivery] = defaultdict(Delivery)  # by receiver
        self._sum = SecureSum(terms.fixed.bits, terms.fixed.lanes)
        self._masked: set[int] = set()
        self._consents: dict[int, bytes] = {}
        self._survivors_to_sign = b""
        self._revealed: dict[int, dict[int, bytes]] = defaultdict(dict)  # owner → holder → share

    def take_keys(self, name: str, keys: SessionKeys) -> None:
        """Fresh keys of a client."""
        self._expect(SessionPhase.KEYS, name)
        if not self._identities.is_signed(name, self._terms.keys_to_sign(keys.sealing, keys.masking), keys.signature):
            raise InvalidPayload(f"the keys of {name!r} are not signed by it, for this session")
        for key in (keys.sealing, keys.masking):  # a point of small order would end the sessions of its mask partners
            self._trial.agree(key, b"", "trial")
        self._keys[name] = keys
        self.replied.add(name)

    def close_keys(self) -> Iterator[tuple[str, KeyList]]:
        """Clients that have sent keys, each with its list, made when it is asked for: lists of all clients are long."""
        self._expect_to_close(SessionPhase.KEYS)
        names = sorted(self._keys)
        session = Session(self._terms, names, [keys_digest(name, self._keys[name]) for name in names])
        self._session = session
        self._places = {name: place for place, name in enumerate(names)}
        listed = ClientList()
        for name, sha256 in zip(names, session.keys_sha256, strict=True):
            listed.clients.add(name=name, keys_sha256=sha256)
        clients = listed.SerializeToString()
        placed = [PlacedKeys(place=place + 1, keys=self._keys[name]) for place, name in enumerate(names)]
        self._pass(SessionPhase.SHARES)
        return (
            (name, KeyList(clients=clients, neighbours=[placed[other] for other in session.graph.neighbours(place)]))
            for name, place in self._places.items()
        )

    def take_shares(self, name: str, shares: SealedShares) -> None:
        """Sealed shares of a client's secrets."""
        self._expect(SessionPhase.SHARES, name)
        session = self._of_session()
        place = self._places[name]
        boxes = {box.place - 1: box.sealed for box in shares.boxes}
        # A neighbour without its box would not mask with this client, and their masks would not cancel.
        if len(boxes) != len(shares.boxes) or boxes.keys() != {*session.graph.neighbours(place)}:
            raise InvalidPayload(f"the boxes of {name!r} must be for its mask partners, one each, got others")
        lengths = {*map(len, boxes.values())}
        if lengths != {2 * SHARE_BYTES + TAG_BYTES} or len(shares.seed_sha256) != DIGEST_BYTES:
            raise InvalidPayload(f"the boxes of {name!r} must hold two shares each, got {sorted(lengths)[:3]} bytes")
        self._seeds_sha256[place] = shares.seed_sha256
        for receiver, sealed in boxes.items():
            self._deliveries[receiver].boxes.add(place=place + 1, sealed=sealed)
        self.replied.add(name)

    def close_shares(self) -> Mapping[str, Delivery]:
        """The boxes for each client that has shared its secrets."""
        self._expect_to_close(SessionPhase.SHARES)
        session = self._of_session()
        if len(self._seeds_sha256) < session.least_survivors:
            raise SessionFailed(self._too_few("have shared their secrets", len(self._seeds_sha256)))
        self._pass(SessionPhase.MASKED)
        deliveries = self._deliveries
        self._deliveries = defaultdict(Delivery)
        return {session.names[place]: deliveries[place] for place in sorted(self._seeds_sha256)}

    def take_masked(self, name: str, lanes: Tensor) -> None:
        """Masked message of a client, which is added to the sum and not kept."""
        self._expect(SessionPhase.MASKED, name)
        place = self._places[name]
        if place not in self._seeds_sha256:
            raise InvalidPayload(f"{name!r} has shared no secrets in this session")
        # Added before it is noted: a message of another size is refused, and has not counted.
        self._sum.add(lanes)
        self._masked.add(place)
        self.replied.add(name)

    def close_masked(self) -> tuple[Survivors, Sequence[str]]:
        """The list of survivors as each of them is told it, and their names."""
        self._expect_to_close(SessionPhase.MASKED)
        session = self._of_session()
        if len(self._masked) < session.least_survivors:
            raise SessionFailed(self._too_few("have sent their masked messages", len(self._masked)))
        # Sorted: each client signs the same bytes.
        survivors = Survivors(places=session.pack(sorted(self._masked)))
        self._survivors_to_sign = session.survivors_to_sign(survivors.places)
        self._pass(SessionPhase.CONSENTS)
        return survivors, [session.names[place] for place in sorted(self._masked)]

    def take_consent(self, name: str, consent: Consent) -> None:
        """Consent of a survivor to the list of survivors."""
        self._expect(SessionPhase.CONSENTS, name)
        if self._places[name] not in self._masked:
            raise InvalidPayload(f"{name!r} is not among the survivors")
        if not self._identities.is_signed(name, self._survivors_to_sign, consent.signature):
            raise InvalidPayload(f"{name!r} has not signed these survivors")
        self._consents[self._places[name]] = consent.signature
        self.replied.add(name)

    def close_consents(self) -> Mapping[str, Consents]:
        """The consents for each client that has consented, if as many of its mask partners have as it needs."""
        self._expect_to_close(SessionPhase.CONSENTS)
        session = self._of_session()
        relayed = {}
        placed = {place: PlacedConsent(place=place + 1, signature=one) for place, one in self._consents.items()}
        for place in sorted(self._consents):
            others = [other for other in session.graph.neighbours(place) if other in self._consents]
            if len(others) >= session.consents:
                # No more signatures than a client needs: they are most of what this phase sends.
                counted = [placed[other] for other in others[: session.consents]]
                relayed[session.names[place]] = Consents(consents=counted)
        # Before anyone reveals: shares that are too few would cost the clients their round for nothing.
        reach = (sum(session.names[one] in relayed for one in session.graph.holders(owner)) for owner in self._owners())
        if min(reach) < session.degree.threshold:
            raise SessionFailed(self._too_few("have consented to the survivors", len(self._consents)))
        self._pass(SessionPhase.UNMASKING)
        return relayed

    def take_unmasking(self, name: str, unmasking: Unmasking) -> None:
        """Shares that a client reveals: one of each secret that it holds a share of."""
        self._expect(SessionPhase.UNMASKING, name)
        session = self._of_session()
        holder = self._places[name]
        if holder not in self._consents:
            raise InvalidPayload(f"{name!r} has not consented")
        # Holding is mutual: a client holds shares of those that hold its own.
        held = self._seeds_sha256.keys() & {*session.graph.holders(holder)}
        seeds, keys = ({one.place - 1: one.share for one in kind} for kind in (unmasking.seeds, unmasking.keys))
        # A place that is named twice would hide the second share.
        is_whole = len(seeds) + len(keys) == len(unmasking.seeds) + len(unmasking.keys)
        if not is_whole or {*seeds} != held & self._masked or {*keys} != held - self._masked:
            raise InvalidPayload(f"{name!r} must reveal a share of each secret that it holds, got others")
        if {*map(len, (*seeds.values(), *keys.values()))} - {SHARE_BYTES}:
            raise InvalidPayload(f"the shares of {name!r} must have {SHARE_BYTES} bytes")
        for owner, revealed in (*seeds.items(), *keys.items()):
            self._revealed[owner][holder] = revealed
        self.replied.add(name)

    @property
    def can_finish(self) -> bool:
        """True once every secret that is needed has a threshold of shares."""
        least = self._of_session().degree.threshold
        return all(len(self._revealed.get(owner, ())) >= least for owner in self._owners())

    def finish(self) -> SecureSum:
        """The survivors' sum, without masks.

        Raises:
            SessionFailed: if a secret has too few shares, or more than one of them is false.
        """
        self._expect_to_close(SessionPhase.UNMASKING)
        session = self._of_session()
        if not self.can_finish:
            raise SessionFailed(self._too_few("have revealed shares", len(self.replied)))
        self._pass(SessionPhase.OVER)
        masks = []
        masked = self._masked
        for owner in self._owners():
            if owner in masked:
                masks.append(Mask(self._recovered(owner, self._is_seed), is_added=False))
                continue
            key = AgreementKey(self._recovered(owner, self._is_masking_key))
            # Of a client that has dropped out only the halves that survivors added are in the sum.
            for other in session.graph.neighbours(owner):
                if other in masked:
                    agreed = key.agree(self._keys[session.names[other]].masking, session.id, "mask")
                    masks.append(Mask(agreed, is_added=owner < other))  # the other's mask had the opposite sign
        is_worth_threads = len(masks) * len(self._sum.lanes) > _WORTH_THREADS
        add_masks(self._sum.lanes, masks, threads=min(usable_cores(), _MOST_THREADS) if is_worth_threads else 1)
        return self._sum

    def _owners(self) -> Sequence[int]:
        """Clients whose secrets are needed: survivors, and mask partners of theirs that dropped out after sharing."""
        graph = self._of_session().graph
        masked = self._masked
        return [
            place
            for place in sorted(self._seeds_sha256)
            if place in masked or not masked.isdisjoint(graph.neighbours(place))
        ]

    def _is_seed(self, owner: int, secret: bytes) -> bool:
        session = self._of_session()
        return session.seed_commitment(session.names[owner], secret) == self._seeds_sha256[owner]

    def _is_masking_key(self, owner: int, secret: bytes) -> bool:
        return AgreementKey(secret).public == self._keys[self._of_session().names[owner]].masking

    def _recovered(self, owner: int, is_right: Callable[[int, bytes], bool]) -> bytes:
        """The secret of a client, without the share of one holder if that one is false.

        Args:
            owner: place of the client.
            is_right: function that tells whether a secret is the one that the client has committed to.
        """
        session = self._of_session()
        holders = session.graph.holders(owner)
        revealed = self._revealed[owner]
        points = {holder: point for point, holder in enumerate(holders, 1)}
        # A cheater is left out first, since it has most likely falsified its other shares as well.
        known = [holder for holder in revealed if session.names[holder] in self.cheaters]
        for left_out in (None, *known, *revealed):
            shares = {points[holder]: one for holder, one in revealed.items() if holder != left_out}
            # Fewer shares fit any secret.
            if len(shares) < session.degree.threshold:
                continue
            with contextlib.suppress(InvalidPayload):
                if is_right(owner, secret := recover(shares, len(holders))):
                    if left_out is not None:
                        self.cheaters.add(session.names[left_out])
                    return secret
        raise SessionFailed(
            f"the revealed shares of {session.names[owner]!r} must recover what it has committed to, with one left out "
            "at most: several are false, or there is none to spare"
        )

    def _expect(self, phase: SessionPhase, name: str) -> None:
        if self.phase is not phase:
            raise InvalidPayload(f"a message for the phase {phase.name} came in the phase {self.phase.name}")
        if name in self.replied:
            raise InvalidPayload(f"{name!r} has sent its message of the phase {phase.name} before")
        if phase is not SessionPhase.KEYS and name not in self._places:
            raise InvalidPayload(f"{name!r} is not in this session")

    def _expect_to_close(self, phase: SessionPhase) -> None:
        if self.phase is not phase:
            raise SessionFailed(f"the session is in the phase {self.phase.name}, and not in {phase.name}")

    def _pass(self, following: SessionPhase) -> None:
        self.phase = following
        self.replied = set()

    def _of_session(self) -> Session:
        assert self._session is not None
        return self._session

    def _too_few(self, what: str, count: int) -> str:
        session = self._of_session()
        needed = max(session.least_survivors, session.degree.threshold)
        return f"{count} of {len(session.names)} clients {what}, and {needed} are needed"
