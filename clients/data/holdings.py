"""Holdings: each client's samples, made from the holder of each sample, and replicated where clients overlap.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.samples import ClientId
from fed.errors import InvalidData

__all__ = ["Holdings", "by_holder", "in_order", "largest", "replicated"]

Holdings: TypeAlias = dict[ClientId, NDArray[np.int64]]
"""Client → indices of its samples, ascending."""


def in_order(clients: Iterable[ClientId]) -> list[ClientId]:
    """Ids of clients, numbers before names."""
    return sorted(clients, key=lambda client: (isinstance(client, str), client))


def by_holder(holders_E: NDArray[np.generic]) -> Holdings:
    """Group samples by holder; holders are in order, numbers before names.

    Example:
        >>> {client: indices.tolist() for client, indices in by_holder(np.array(["b", "a", "b"])).items()}
        {'a': [1], 'b': [0, 2]}
    """
    ids = holders_E.tolist()
    clients = in_order(set(ids))
    number = {client: index for index, client in enumerate(clients)}
    numbers_E = np.array([number[client] for client in ids], dtype=np.int64)
    ends = np.cumsum(np.bincount(numbers_E, minlength=len(clients)))[:-1]
    # A stable sort, so that each client's indices ascend.
    members = np.split(np.argsort(numbers_E, kind="stable").astype(np.int64), ends)
    return dict(zip(clients, members, strict=True))


def largest(holdings: Holdings, clients: int | None) -> Holdings:
    """Keep the clients with the most samples, all where ``clients`` is None; of equal ones the first.

    Args:
        holdings: client → indices of its samples.
        clients: number of clients to keep, ≥ 1; None: all.

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
    # A stable sort of clients in order.
    kept = sorted(in_order(holdings), key=lambda client: len(holdings[client]), reverse=True)[:clients]
    return {client: holdings[client] for client in in_order(kept)}


def replicated(holdings: Holdings, overlap: float, generator: np.random.Generator) -> Holdings:
    """Replicate samples: each gets ⌊overlap⌋ more holders, and a random part of the samples one more.

    Args:
        holdings: every sample once.
        overlap: mean number of further clients that hold a sample, ≥ 0: the number of copies, rounded, over that of
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
    sample_E = np.concatenate(list(holdings.values()))
    holder_E = np.repeat(np.arange(len(clients)), [len(indices) for indices in holdings.values()])
    copies_E = np.full(len(sample_E), int(overlap))
    # A fixed number of samples rather than a draw for each: the overlap is then what the user has asked for.
    once_more = round((overlap - int(overlap)) * len(sample_E))
    copies_E[generator.permutation(len(sample_E))[:once_more]] += 1
    others = _other_holders(holder_E, copies_E, len(clients), generator)
    with_copies: Holdings = {}
    for number, client in enumerate(clients):
        copies = [sample_E[other_E == number] for other_E in others]
        with_copies[client] = np.sort(np.concatenate([holdings[client], *copies]))
    return with_copies


def _other_holders(
    holder_E: NDArray[np.int64], copies_E: NDArray[np.int64], clients: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Holder of each copy of a sample, −1 where there is no such copy."""
    # Floyd's algorithm for all samples at once: distinct steps from the holder, in 1 … clients − 1.
    most = int(copies_E.max())
    steps: list[NDArray[np.int64]] = []
    for copy in range(most):
        # The top grows with each copy, and takes the place of a step that is drawn twice: all sets are equally likely.
        top_E = clients - most + copy + np.zeros_like(holder_E)
        step_E = generator.integers(1, top_E, endpoint=True)
        taken_E = np.any([step_E == earlier_E for earlier_E in steps], axis=0) if steps else np.zeros_like(step_E, bool)
        steps.append(np.where(taken_E, top_E, step_E))
    return [np.where(copy < copies_E, (holder_E + step_E) % clients, -1) for copy, step_E in enumerate(steps)]
