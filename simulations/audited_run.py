"""Audited run: the parts that audits with canaries as clients and with canaries as samples share."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from fed.clients.data import ClientId, ClientsOnDemand, FederatedData, Held
from fed.errors import BudgetSpent
from fed.server.rounds.coordinated import Coordinated

__all__ = ["AuditedRun", "names_beside", "rounds_within_budget", "with_canaries"]


class AuditedRun(NamedTuple):
    """Run with canaries, of an audit.

    Args:
        scores_m: score of each canary, larger for those that are in.
        included_m: True for canaries whose coin put them in.
        rounds: number of rounds of the run.
        claimed_epsilon: ε that the run claims, under ``unit: sample`` for the canaries' client.
    """

    scores_m: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    included_m: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    rounds: int
    claimed_epsilon: float


def names_beside(clients: Sequence[ClientId], count: int, noun: str) -> list[ClientId]:
    """Ids of further clients, of the type of the others', and none of theirs.

    Args:
        clients: ids of the clients that are there.
        count: number of further clients.
        noun: beginning of their ids, where these are texts.

    Example:
        >>> names_beside(["a", "bc"], 2, "canary"), names_beside([3, 5], 2, "canary")
        (['canary 00', 'canary 01'], [6, 7])
    """
    if isinstance(clients[0], str):
        longest = max(len(str(client)) for client in clients)
        return [f"{noun} {number:0{longest}}" for number in range(count)]
    first = 1 + max(int(client) for client in clients)
    return list(range(first, first + count))


def with_canaries(
    data: FederatedData, clients: Sequence[ClientId], names: Sequence[ClientId], samples: Held
) -> FederatedData:
    """Data of some clients, and of further ones that all hold the same samples.

    Args:
        data: data of all clients.
        clients: ids of the clients that stay.
        names: ids of the further ones.
        samples: (inputs, targets) of each of these.
    """
    if isinstance(data.train, dict):
        kept = {client: data.train[client] for client in clients}
        return replace(data, train={**kept, **dict.fromkeys(names, samples)})
    read = partial(_read, data, frozenset(names), samples)
    return replace(data, train=ClientsOnDemand((*clients, *names), read))


def _read(data: FederatedData, names: frozenset[ClientId], samples: Held, client: ClientId) -> Held:
    return samples if client in names else data.read(client)


def rounds_within_budget(federation: Coordinated, count: int) -> Iterator[int]:
    """Run rounds one after the other, as far as the budget allows, and give the number of each that is done.

    Args:
        federation: federation of the run.
        count: number of rounds of the run.
    """
    for number in range(1, count + 1):
        try:
            federation.round(number)
        except BudgetSpent:
            return
        yield number
