"""Sessions in one process, with clients that drop out at any phase."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fed.protocol.protocol_pb2 import Consents, Delivery, Unmasking
from fed.secure_aggregation.client import SessionClient
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities, Terms

SIGNERS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(4)]  # shared: keys of their own would take long


class Parties(NamedTuple):
    """A coordinator and its clients before a session."""

    coordinator: SessionCoordinator
    clients: dict[str, SessionClient]
    terms: Terms
    identities: Identities


def names_of(count: int) -> list[str]:
    return [f"client-{number:03}" for number in range(count)]


def signer_of(name: str) -> ec.EllipticCurvePrivateKey:
    return SIGNERS[int(name.split("-")[1]) % len(SIGNERS)]


def terms_of(
    clients: int, numbers: int = 3, *, bits: int = 32, number: int = 1, attempt: int = 0, **settings: Any
) -> Terms:
    section = SecureAggregation(**{"minimum_cohort": 2, "corrupt": 0.0, "max_drop_out": 0.0, **settings})
    fixed = FixedPoint(bits, (numbers,), (8.0,), most_clients=clients)
    return Terms(section, fixed, "run", number, attempt, b"plan", b"task", b"roster")


def entropy_of(seed: int) -> Callable[[int], bytes]:
    return np.random.default_rng(seed).bytes


def parties(count: int, terms: Terms | None = None) -> Parties:
    terms = terms or terms_of(count)
    names = names_of(count)
    identities = Identities({name: signer_of(name).public_key() for name in names}, b"roster")
    clients = {
        name: SessionClient(name, signer_of(name), identities, terms, entropy_of(seed))
        for seed, name in enumerate(names)
    }
    return Parties(SessionCoordinator(terms, identities), clients, terms, identities)


def lanes_of(terms: Terms, seed: int) -> torch.Tensor:
    """Random lanes over all of their range, so that sums wrap."""
    info = np.iinfo(f"i{terms.fixed.bits // 8}")
    drawn = np.random.default_rng(seed).integers(info.min, info.max, terms.fixed.lanes, info.dtype, endpoint=True)
    return torch.from_numpy(drawn)


def plain_sum(terms: Terms, messages: Sequence[torch.Tensor]) -> SecureSum:
    total = SecureSum(terms.fixed.bits, terms.fixed.lanes)
    for message in messages:
        total.add(message)
    return total


def share_secrets(
    made: Parties, *, without_keys: Collection[str] = (), without_shares: Collection[str] = ()
) -> dict[str, Delivery]:
    """Key exchange and sharing; returns each client's delivery."""
    coordinator, clients = made.coordinator, made.clients
    for name, client in clients.items():
        if name not in without_keys:
            coordinator.take_keys(name, client.open())
    for name, listed in coordinator.close_keys():
        if name not in without_shares:
            coordinator.take_shares(name, clients[name].share(listed))
    return dict(coordinator.close_shares())


def mask(client: SessionClient, delivery: Delivery, lanes: torch.Tensor) -> torch.Tensor:
    """Boxes and message at once."""
    client.take_boxes(delivery)
    return client.mask(lanes)


def unmask(client: SessionClient, consents: Consents) -> Unmasking:
    """Consents and shares at once."""
    client.take_consents(consents)
    return client.unmask()


def masked(made: Parties, deliveries: dict[str, Delivery], messages: dict[str, torch.Tensor]) -> None:
    """Masked messages of some clients."""
    for name, message in messages.items():
        made.coordinator.take_masked(name, mask(made.clients[name], deliveries[name], message.clone()))


def unmasked(
    made: Parties, *, without_consent: Collection[str] = (), without_unmasking: Collection[str] = ()
) -> SecureSum:
    """Consistency and unmasking."""
    survivors, names = made.coordinator.close_masked()
    for name in names:
        if name not in without_consent:
            made.coordinator.take_consent(name, made.clients[name].consent(survivors))
    for name, consents in made.coordinator.close_consents().items():
        if name not in without_unmasking:
            made.coordinator.take_unmasking(name, unmask(made.clients[name], consents))
    return made.coordinator.finish()
