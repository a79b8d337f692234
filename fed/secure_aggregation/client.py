"""Client's moves in one session: a state machine without I/O or clock, which aborts by default."""

import contextlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from google.protobuf.message import DecodeError

from fed.errors import InvalidPayload, SessionFailed
from fed.protocol.protocol_pb2 import (
    Box,
    ClientList,
    Consent,
    Consents,
    Delivery,
    KeyList,
    RevealedShare,
    SealedShares,
    SessionKeys,
    Survivors,
    Unmasking,
)
from fed.secure_aggregation.key_agreement import KEY_BYTES, AgreementKey, open_box, seal, sign
from fed.secure_aggregation.masks import Mask, add_masks
from fed.secure_aggregation.shamir import SHARE_BYTES, share
from fed.secure_aggregation.terms import Identities, Session, Terms, keys_digest
from fed.vectors.tensors import Tensor

__all__ = ["TRANSITIONS", "ClientPhase", "SessionClient", "Transition"]


class ClientPhase(IntEnum):
    """Event that a client waits for, in the order of a session."""

    OPENING = 0
    KEYS = 1
    SHARES = 2
    MASKING = 3
    SURVIVORS = 4
    CONSENTS = 5
    RECORDING = 6
    OVER = 7


class Transition(NamedTuple):
    """Step of a session.

    Args:
        phase: phase in which the client waits.
        event: only event that is allowed in this phase.
        following: phase after the event.
        answer: answer of the client to the event.
    """

    phase: ClientPhase
    event: str
    following: ClientPhase
    answer: str


TRANSITIONS = (
    Transition(ClientPhase.OPENING, "its task", ClientPhase.KEYS, "fresh keys, signed for the terms"),
    Transition(ClientPhase.KEYS, "the list of clients and keys", ClientPhase.SHARES, "sealed shares of its secrets"),
    Transition(ClientPhase.SHARES, "the mask partners' boxes", ClientPhase.MASKING, "nothing"),
    Transition(ClientPhase.MASKING, "its own message, for this very task", ClientPhase.SURVIVORS, "the masked message"),
    Transition(ClientPhase.SURVIVORS, "the list of survivors", ClientPhase.CONSENTS, "its consent"),
    Transition(ClientPhase.CONSENTS, "the others' consents", ClientPhase.RECORDING, "nothing: the round is recorded"),
    Transition(ClientPhase.RECORDING, "the record is on the disk", ClientPhase.OVER, "one share of each mask partner"),
)
"""All steps of a session. Every other event in a phase, and every broken rule, leads to OVER, and reveals nothing."""


class SessionClient:
    """A client in one session: each method takes an event and returns the client's answer.

    An event out of its phase, or one that breaks a rule, ends the session: nothing is revealed after it.
    :data:`TRANSITIONS` has all steps.

    Attributes:
        phase: event that the client waits for.

    Args:
        name: name of the client.
        identity: long-term private key of the client, which signs.
        identities: identities of all clients, known beforehand.
        terms: terms of the session, as the client itself has made them.
        entropy: function that returns so many random bytes, from the system's cryptographic source on real nodes.
        least_threshold: smallest threshold t of a session that the client accepts, ≥ 1.

    Raises:
        SessionFailed: by each method but :meth:`abort`, with the rule that was broken.
    """

    def __init__(
        self,
        name: str,
        identity: EllipticCurvePrivateKey,
        identities: Identities,
        terms: Terms,
        entropy: Callable[[int], bytes],
        *,
        least_threshold: int = 1,
    ) -> None:
        self.phase = ClientPhase.OPENING
        self._name = name
        self._identity = identity
        self._identities = identities
        self._terms = terms
        self._entropy = entropy
        self._least_threshold = least_threshold
        self._sealing = AgreementKey.draw(entropy)
        self._masking = AgreementKey.draw(entropy)
        self._seed = entropy(KEY_BYTES)
        self._session: Session | None = None
        self._place = -1
        self._keys: dict[int, SessionKeys] = {}  # of mask partners
        self._shares: dict[int, bytes] = {}  # by owner's place: of its seed, then of its masking key
        self._masked_with: frozenset[int] = frozenset()
        self._survivors: tuple[int, ...] = ()
        self._survivors_to_sign = b""

    def open(self) -> SessionKeys:
        """Fresh keys, signed."""
        with self._phase(ClientPhase.OPENING, ClientPhase.KEYS):
            sealing = self._sealing.public
            masking = self._masking.public
            signature = sign(self._identity, self._terms.keys_to_sign(sealing, masking))
            self._own = SessionKeys(sealing=sealing, masking=masking, signature=signature)
            return self._own

    def share(self, listed: KeyList) -> SealedShares:
        """Shares of the client's two secrets, its seed and its private masking key, in a box for each mask partner.

        Args:
            listed: all clients, and the mask partners' keys.
        """
        with self._phase(ClientPhase.KEYS, ClientPhase.SHARES):
            session = self._agreed(listed)
            holders = session.graph.holders(self._place)
            secrets = [self._seed, self._masking.private]
            drawn = [share(secret, session.degree.threshold, len(holders), self._entropy) for secret in secrets]
            of_holder = {holder: b"".join(parts) for holder, *parts in zip(holders, *drawn, strict=True)}
            # On the complete graph a client holds a share of its own secrets, which needs no box.
            if self._place in of_holder:
                self._shares[self._place] = of_holder.pop(self._place)
            boxes = [
                Box(place=holder + 1, sealed=seal(self._sealing_key(self._place, holder), content))
                for holder, content in of_holder.items()
            ]
            return SealedShares(seed_sha256=session.seed_commitment(self._name, self._seed), boxes=boxes)

    def take_boxes(self, delivery: Delivery) -> None:
        """Open the boxes of the mask partners that have shared their secrets.

        Args:
            delivery: the boxes, one from each of these mask partners.
        """
        with self._phase(ClientPhase.SHARES, ClientPhase.MASKING):
            session = self._of_session()
            senders = [box.place - 1 for box in delivery.boxes]
            if len(set(senders)) != len(senders) or not self._keys.keys() >= set(senders):
                raise SessionFailed("boxes must be from mask partners, one of each, got others")
            # With fewer the round could never be unmasked: better to stop before the message is masked.
            if len(senders) < session.consents:
                raise SessionFailed(
                    f"at least {session.consents} mask partners must have shared their secrets, got {len(senders)}"
                )
            for box in delivery.boxes:
                content = open_box(self._sealing_key(box.place - 1, self._place), box.sealed)
                if len(content) != 2 * SHARE_BYTES:
                    raise SessionFailed(f"a box must hold two shares of {SHARE_BYTES} bytes, got {len(content)} bytes")
                self._shares[box.place - 1] = content
            # Masks are agreed on with those alone that have shared: the keys of others could not be recovered.
            self._masked_with = frozenset(senders)

    def mask(self, lanes: Tensor) -> Tensor:
        r"""The masked message; ``lanes`` are masked in place.

        .. math:: y_u = x_u + PRG(b_u) + \sum_{v > u} PRG(k_{uv}) - \sum_{v < u} PRG(k_{uv}) \bmod 2^R

        b is the client's seed, k the key that it agrees on with a mask partner v; partners are compared by place.

        Args:
            lanes: x_u, the client's message: signed integers of R bits.
        """
        with self._phase(ClientPhase.MASKING, ClientPhase.SURVIVORS):
            session = self._of_session()
            fixed = self._terms.fixed
            if lanes.numel() != fixed.lanes or lanes.dtype != fixed.dtype:
                raise SessionFailed(
                    f"a message must have {fixed.lanes} lanes of {fixed.dtype}, got {lanes.numel()} of {lanes.dtype}"
                )
            masks = [Mask(self._seed, is_added=True)]
            for other in self._masked_with:
                key = self._masking.agree(self._keys[other].masking, session.id, "mask")
                masks.append(Mask(key, is_added=self._place < other))
            numbers = lanes.numpy()
            add_masks(numbers.view(f"u{numbers.itemsize}"), masks)
            return lanes

    def consent(self, survivors: Survivors) -> Consent:
        """Consent to the list of survivors, a signature.

        Args:
            survivors: the clients whose masked messages are in the sum.
        """
        with self._phase(ClientPhase.SURVIVORS, ClientPhase.CONSENTS):
            session = self._of_session()
            self._survivors = session.unpack(survivors.places)
            # A list without it would have its masking key recovered, although its masked message has arrived.
            if self._place not in self._survivors:
                raise SessionFailed("the survivors must have this client among them, got a list without it")
            if len(self._survivors) < session.least_survivors:
                raise SessionFailed(
                    f"the sum must be of at least {session.least_survivors} clients, got {len(self._survivors)}"
                )
            # A survivor without shares has a seed that nobody can recover: the sum would stay masked.
            if unknown := self._keys.keys() & set(self._survivors) - self._masked_with:
                raise SessionFailed(f"{len(unknown)} of the survivors had shared no secrets")
            self._survivors_to_sign = session.survivors_to_sign(survivors.places)
            return Consent(signature=sign(self._identity, self._survivors_to_sign))

    def take_consents(self, consents: Consents) -> None:
        """Check that the mask partners have consented to the same survivors.

        Args:
            consents: signatures of as many mask partners as the threshold needs.
        """
        with self._phase(ClientPhase.CONSENTS, ClientPhase.RECORDING):
            session = self._of_session()
            signers = [consent.place - 1 for consent in consents.consents]
            # The threshold counts honest neighbours: so many signatures leave no room for a second list of survivors.
            known = self._masked_with & set(self._survivors)
            if len(set(signers)) != len(signers) or not known >= set(signers) or len(signers) < session.consents:
                raise SessionFailed(
                    f"{session.consents} other mask partners among the survivors must consent, once each, got "
                    f"{len(known & set(signers))}"
                )
            for consent in consents.consents:
                name = session.names[consent.place - 1]
                if not self._identities.is_signed(name, self._survivors_to_sign, consent.signature):
                    raise SessionFailed(f"{name!r} has not consented to these survivors")

    def unmask(self) -> Unmasking:
        """Shares of the survivors' seeds and of the others' masking keys, never both of one client."""
        with self._phase(ClientPhase.RECORDING, ClientPhase.OVER):
            seeds: list[RevealedShare] = []
            keys: list[RevealedShare] = []
            # Both shares of one client would unmask its own message.
            for owner, shares in sorted(self._shares.items()):
                survived = owner in self._survivors
                part = shares[:SHARE_BYTES] if survived else shares[SHARE_BYTES:]
                (seeds if survived else keys).append(RevealedShare(place=owner + 1, share=part))
            return Unmasking(seeds=seeds, keys=keys)

    def abort(self) -> None:
        """End the session: nothing is revealed any more."""
        self.phase = ClientPhase.OVER
        # So that shares do not outlive the session in memory.
        self._shares.clear()

    def _agreed(self, listed: KeyList) -> Session:
        """The session of the listed clients, once the list is found right."""
        try:
            clients = ClientList.FromString(listed.clients).clients
        except DecodeError:
            raise SessionFailed("the list of clients must be a ClientList, got other bytes") from None
        names = [client.name for client in clients]
        session = Session(self._terms, names, [client.keys_sha256 for client in clients])
        own = keys_digest(self._name, self._own)
        if self._name not in names or session.keys_sha256[names.index(self._name)] != own:
            raise SessionFailed("the list of clients must have this one with its own keys, got others")
        # The terms come from the coordinator, which could ask for a threshold that it reaches with its accomplices.
        if session.degree.threshold < self._least_threshold:
            raise SessionFailed(
                f"the threshold must be at least {self._least_threshold}, this client's own floor, got "
                f"{session.degree.threshold}"
            )
        self._session = session
        self._place = names.index(self._name)
        self._keys = {placed.place - 1: placed.keys for placed in listed.neighbours}
        neighbours = session.graph.neighbours(self._place)
        if len(listed.neighbours) != len(neighbours) or self._keys.keys() != set(neighbours):
            raise SessionFailed("the keys must be those of this client's mask partners, once each, got others")
        if strangers := [name for name in names if not self._identities.knows(name)]:
            raise SessionFailed(
                f"{strangers[0][:64]!r} is on the list of clients, and this client does not know its identity"
            )
        for place, keys in self._keys.items():
            name = names[place]
            signed = self._terms.keys_to_sign(keys.sealing, keys.masking)
            if keys_digest(name, keys) != session.keys_sha256[place]:
                raise SessionFailed(f"the keys of {name!r} differ from those in the list")
            if not self._identities.is_signed(name, signed, keys.signature):
                raise SessionFailed(f"the keys of {name!r} are not signed by it, for this session")
        return session

    def _sealing_key(self, sender: int, receiver: int) -> bytes:
        other = receiver if sender == self._place else sender
        # The direction is part of the key: a box cannot be sent back to its sender as the other's.
        purpose = f"box from {sender} to {receiver}"
        return self._sealing.agree(self._keys[other].sealing, self._of_session().id, purpose)

    def _of_session(self) -> Session:
        assert self._session is not None
        return self._session

    @contextlib.contextmanager
    def _phase(self, expected: ClientPhase, following: ClientPhase) -> Iterator[None]:
        """Pass from one phase to the next, or end the session."""
        try:
            if self.phase is not expected:
                raise SessionFailed(f"a message of the phase {expected.name} came in the phase {self.phase.name}")
            yield
        except InvalidPayload as error:
            self.abort()
            raise SessionFailed(str(error)) from None
        # Whatever has happened, nothing is revealed after it.
        except BaseException:
            self.abort()
            raise
        if self.phase is expected:  # else another thread has ended the session
            self.phase = following
