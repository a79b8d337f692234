"""From the holder of each sample to the samples of each holder, and more holders for some. Shapes: N samples."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.pairs import ClientId
from fed.errors import InvalidData

__all__ = ["Holdings", "by_holder", "largest", "replicated"]

Holdings: TypeAlias = dict[ClientId, NDArray[np.int64]]
"""Client → indices of its samples, ascending."""


def by_holder(holders_N: NDArray[np.generic]) -> Holdings:
    """The samples of each holder; holders are in order, numbers before names.

    Example:
        >>> {client: indices.tolist() for client, indices in by_holder(np.array(["b", "a", "b"])).items()}
        {'a': [1], 'b': [0, 2]}
    """
    ids = holders_N.tolist()
    clients = sorted(set(ids), key=_order)
    number = {client: index for index, client in enumerate(clients)}
    numbers_N = np.array([number[client] for client in ids], dtype=np.int64)
    ends = np.cumsum(np.bincount(numbers_N, minlength=len(clients)))[:-1]
    members = np.split(np.argsort(numbers_N, kind="stable").astype(np.int64), ends)
    return dict(zip(clients, members, strict=True))


def largest(holdings: Holdings, clients: int | None) -> Holdings:
    """Those clients that have the most samples, all where ``clients`` is None; of equal ones the first.

    Args:
        holdings: client → indices of its samples.
        clients: how many to keep.

    Raises:
        InvalidData: if there are fewer.
    """
    if clients is None or clients == len(holdings):
        return holdings
    if clients > len(holdings):
        raise InvalidData(
            f"data.clients must be at most the number of clients in the data, got clients={clients} and "
            f"{len(holdings)} clients in the data: lower data.clients, or set it to null for all"
        )
    kept = sorted(holdings, key=lambda client: (-len(holdings[client]), _order(client)))[:clients]
    return {client: holdings[client] for client in sorted(kept, key=_order)}


def replicated(holdings: Holdings, overlap: float, generator: np.random.Generator) -> Holdings:
    """The same with more holders: each sample gets ⌊overlap⌋ others, and a random part of the samples one more.

    Args:
        holdings: every sample once.
        overlap: how many clients more than one hold a sample, on average: the number of copies, rounded, over that of
            samples.
        generator: the stream that chooses them, each set of other clients with the same probability.

    Raises:
        InvalidData: if there are not as many other clients.

    Example:
        >>> everyone = replicated({0: np.array([0]), 1: np.array([1])}, 1.0, np.random.default_rng(0))
        >>> everyone[0].tolist(), everyone[1].tolist()
        ([0, 1], [0, 1])
    """
    clients = list(holdings)
    if overlap > len(clients) - 1:
        raise InvalidData(
            f"data.partition.overlap must be at most the number of other clients, got overlap={overlap} with "
            f"{len(clients)} clients: lower it, or raise data.clients"
        )
    sample_N = np.concatenate(list(holdings.values()))
    holder_N = np.repeat(np.arange(len(clients)), [len(indices) for indices in holdings.values()])
    copies_N = np.full(len(sample_N), int(overlap))
    once_more = round((overlap - int(overlap)) * len(sample_N))
    copies_N[generator.permutation(len(sample_N))[:once_more]] += 1
    others = _other_holders(holder_N, copies_N, len(clients), generator)
    return {
        client: np.sort(np.concatenate([holdings[client], *(sample_N[other_N == number] for other_N in others)]))
        for number, client in enumerate(clients)
    }


def _other_holders(
    holder_N: NDArray[np.int64], copies_N: NDArray[np.int64], clients: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """For each copy of a sample who gets it, −1 where there is no such copy."""
    # Floyd's algorithm for all samples at once: distinct steps from the holder, in 1 … clients − 1.
    most = int(copies_N.max())
    steps: list[NDArray[np.int64]] = []
    for copy in range(most):
        top_N = clients - most + copy + np.zeros_like(holder_N)
        step_N = generator.integers(1, top_N, endpoint=True)
        taken_N = np.any([step_N == earlier_N for earlier_N in steps], axis=0) if steps else np.zeros_like(step_N, bool)
        steps.append(np.where(taken_N, top_N, step_N))
    return [np.where(copy < copies_N, (holder_N + step_N) % clients, -1) for copy, step_N in enumerate(steps)]


def _order(client: ClientId) -> tuple[bool, ClientId]:
    return isinstance(client, str), client
