"""Terms and clients of a session: all that its clients agree on before they reveal anything."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from fed.errors import InvalidExperiment, SessionFailed
from fed.protocol.protocol_pb2 import SessionKeys
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.graph import Degree, SessionGraph
from fed.secure_aggregation.key_agreement import DIGEST_BYTES, digest, is_signed
from fed.secure_aggregation.settings import SecureAggregation

__all__ = ["Identities", "Session", "Terms", "keys_digest"]


@dataclass(frozen=True)
class Identities:
    """The long-term identities of a run's clients, known to each client beforehand.

    Args:
        keys: name → public key.
        sha256: digest of all keys.
    """

    keys: Mapping[str, EllipticCurvePublicKey]
    sha256: bytes

    def knows(self, name: str) -> bool:
        """Tell whether there is a client of this name."""
        return name in self.keys

    def is_signed(self, name: str, signed: bytes, signature: bytes) -> bool:
        """Tell whether a signature of a digest is by the client of this name.

        Args:
            name: untrusted name of the client.
            signed: digest that was signed.
            signature: untrusted bytes of a signature.
        """
        key = self.keys.get(name)
        return key is not None and is_signed(key, signed, signature)


@dataclass(frozen=True)
class Terms:
    """All that a session's clients agree on, but the list of clients.

    Each client makes the terms itself, from its own experiment and from the task that it was sent.

    Args:
        settings: section of the experiment.
        fixed: fixed point by which messages become lanes.
        run: name of the run.
        round: number of the round, from 1.
        attempt: number of the attempt in its round, from 0.
        plan_sha256: digest of the run's plan: the experiment and the format of messages.
        task_sha256: digest of all that the round's tasks have in common: the model and the step size above all.
        identities_sha256: digest of the clients' identities.
        ledger: state of the coordinator's ledger of privacy, as the round's tasks tell it; empty without.
    """

    settings: SecureAggregation
    fixed: FixedPoint
    run: str
    round: int
    attempt: int
    plan_sha256: bytes
    task_sha256: bytes
    identities_sha256: bytes
    ledger: bytes = b""

    @cached_property
    def digest(self) -> bytes:
        """Digest of all terms."""
        numbers = self.round, self.attempt, self.fixed.lanes
        settings = asdict(self.settings)
        del settings["mode"]  # of simulations alone
        fixed = asdict(self.fixed)
        if self.fixed.noise is None:
            del fixed["noise"]  # clients of an earlier version know none
        elif not self.fixed.noise.bit_weight:
            del fixed["noise"]["bit_weight"]  # likewise
        return digest(
            "terms",
            self.run.encode(),
            b"".join(number.to_bytes(8, "big") for number in numbers),
            self.plan_sha256,
            self.task_sha256,
            self.identities_sha256,
            _json(settings),
            _json(fixed),
            *([self.ledger] if self.ledger else []),
        )

    def keys_to_sign(self, sealing: bytes, masking: bytes) -> bytes:
        """Digest of fresh keys and terms, which the client's identity signs."""
        return digest("keys", self.digest, sealing, masking)


@dataclass(frozen=True)
class Session:
    """One attempt of a round, once all keys are known.

    Args:
        terms: terms of the session.
        names: names of the clients, in ascending order.
        keys_sha256: digest of each client's keys, in that order.

    Raises:
        SessionFailed: if these clients cannot hold a session on these terms.
    """

    terms: Terms
    names: Sequence[str]
    keys_sha256: Sequence[bytes]

    def __post_init__(self) -> None:
        """Check the list of clients."""
        # One order for all: places are part of every mask's sign.
        if list(self.names) != sorted(set(self.names)):
            raise SessionFailed("a session's clients must be listed once each, by name, got another list")
        if any(len(one) != DIGEST_BYTES for one in self.keys_sha256):
            raise SessionFailed(f"the digests of a session's keys must have {DIGEST_BYTES} bytes, got others")
        # Above most_clients sums of lanes could wrap, below minimum_cohort they hide too little.
        if not self.terms.settings.minimum_cohort <= len(self.names) <= self.terms.fixed.most_clients:
            raise SessionFailed(
                f"a session must have from {self.terms.settings.minimum_cohort} to {self.terms.fixed.most_clients} "
                f"clients, got {len(self.names)}"
            )
        try:
            self.degree  # noqa: B018  # a property, computed here so that an unsafe session is never made
        except InvalidExperiment as error:
            raise SessionFailed(str(error)) from None

    @cached_property
    def id(self) -> bytes:
        """Digest of terms, degree, names and keys; every key that is agreed on in the session depends on it."""
        degree = b"".join(number.to_bytes(8, "big") for number in self.degree)
        named = [
            part for pair in zip(self.names, self.keys_sha256, strict=True) for part in (pair[0].encode(), pair[1])
        ]
        return digest("session", self.terms.digest, degree, *named)

    @cached_property
    def degree(self) -> Degree:
        """The graph's degree and threshold."""
        return self.terms.settings.degree(len(self.names), is_begun=True)

    @cached_property
    def graph(self) -> SessionGraph:
        """Graph of mask partners."""
        return SessionGraph(len(self.names), self.degree, self.id)

    @cached_property
    def least_survivors(self) -> int:
        """Smallest number of survivors whose sum is revealed."""
        return self.terms.settings.least_survivors(len(self.names))

    @property
    def consents(self) -> int:
        """Number of consents that a client needs from neighbours: t, or in a complete graph t − 1 beside its own."""
        return self.degree.threshold - self.degree.is_complete

    def survivors_to_sign(self, places: bytes) -> bytes:
        """Digest of session and survivors, which a client signs to consent.

        Args:
            places: one bit for each client, as :meth:`pack` makes them.
        """
        return digest("survivors", self.id, places)

    def seed_commitment(self, name: str, seed: bytes) -> bytes:
        """Digest by which a client commits to the seed of its own mask."""
        return digest("seed", self.id, name.encode(), seed)

    def pack(self, survivors: Sequence[int]) -> bytes:
        """Bits of the clients' places, lowest first, set for survivors."""
        bits = sum(1 << place for place in survivors)
        return bits.to_bytes(-(-len(self.names) // 8), "little")

    def unpack(self, places: bytes) -> tuple[int, ...]:
        """Places whose bits are set, in ascending order.

        Raises:
            SessionFailed: if there are more or fewer bits than clients.
        """
        bits = int.from_bytes(places, "little")
        if len(places) != -(-len(self.names) // 8) or bits >> len(self.names):
            raise SessionFailed(f"survivors must be a bit for each of {len(self.names)} clients, got others")
        return tuple(place for place in range(len(self.names)) if bits >> place & 1)


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def keys_digest(name: str, keys: SessionKeys) -> bytes:
    """Digest of a client's keys, with its name.

    Args:
        name: name of the client.
        keys: keys of the client.
    """
    return digest("listed keys", name.encode(), keys.sealing, keys.masking, keys.signature)
