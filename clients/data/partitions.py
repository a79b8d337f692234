"""Who holds what: a partition names the holder of every sample, and so deals each out exactly once.

A partition is a function of ``samples``, ``clients`` (how many) and ``generator`` (its random stream), of which it
takes what it needs; its other parameters are the keys of its section. It returns an array [N]: the holder of each
sample, a number in 0 … clients − 1. One that does not take ``clients`` finds them in the samples and returns names.
"""

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.samples import Samples
from fed.clients.data.scores import hashes, scores, values
from fed.clients.data.skew import dirichlet, quantity, shards
from fed.errors import InvalidData

__all__ = ["by_hash", "by_range", "dirichlet", "file", "iid", "natural", "quantity", "rank", "shards"]


def iid(samples: Samples, clients: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """As many samples to every client, give or take one, drawn at random."""
    return generator.permutation(np.arange(len(samples)) % clients)


def by_range(samples: Samples, clients: int, by: str = "index") -> NDArray[np.int64]:
    """Sorted, then cut into ranges of as many samples, give or take one: the first to client 0, and so on.

    Args:
        samples: what is dealt.
        clients: how many ranges.
        by: what to sort by, ties in their order: a column; ``index``, the order of the source; ``label``; ``mean``,
            that of a sample's inputs.

    Raises:
        InvalidData: if there is no such column.
    """
    order = np.argsort(values(samples, by, "range"), kind="stable")
    return _dealt(order, np.arange(len(samples)) * clients // len(samples))


def by_hash(samples: Samples, clients: int, by: str = "content") -> NDArray[np.int64]:
    """To the client that a key hashes to, the same in every run: BLAKE2b of the key, modulo the number of clients.

    Args:
        samples: what is dealt.
        clients: the modulus.
        by: the key: a column, so that equal values stay together; ``content``, the sample itself; ``index``;
            ``label``; ``mean``.

    Raises:
        InvalidData: if there is no such column.
    """
    return (hashes(samples, by, "hash") % np.uint64(clients)).astype(np.int64)


def rank(samples: Samples, clients: int, by: str = "mean") -> NDArray[np.int64]:
    """Dealt out like cards from the highest score down, there and back, so that no client gets all of the top.

    Of any first m samples by rank, two clients hold numbers that differ by one at most.

    Args:
        samples: what is dealt.
        clients: how many hands.
        by: the score: a column of numbers; ``mean``, that of a sample's inputs; ``label``; ``index``.

    Raises:
        InvalidData: if there is no such column, or it holds anything but numbers.
    """
    order = np.argsort(-scores(samples, by, "rank"), kind="stable")
    turn_N, seat_N = np.divmod(np.arange(len(samples)), clients)
    return _dealt(order, np.where(turn_N % 2 == 0, seat_N, clients - 1 - seat_N))


def file(samples: Samples) -> NDArray[np.generic]:
    """A file a client, named like it without its ending.

    Raises:
        InvalidData: if the source does not read files whose samples it tells apart.
    """
    return _column(samples, "file", "file", "a folder of csv, npz or text")


def natural(samples: Samples) -> NDArray[np.generic]:
    """Each sample to the client that the source names.

    Raises:
        InvalidData: if the source names none.
    """
    return _column(samples, "client", "natural", "synthetic, text, or csv and npz with the key data.client")


def _dealt(order: NDArray[np.int64], holders_N: NDArray[np.int64]) -> NDArray[np.int64]:
    dealt_N = np.empty_like(holders_N)
    dealt_N[order] = holders_N
    return dealt_N


def _column(samples: Samples, name: str, partition: str, sources: str) -> NDArray[np.generic]:
    if name not in samples.columns:
        raise InvalidData(
            f"partition {partition} needs a source that knows the {name} of each sample, {sources}; this one does not: "
            "choose another data.partition"
        )
    return samples.columns[name]
