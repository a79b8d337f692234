"""The test set: which samples no client trains on."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.federated import ClientId
from fed.randomness import Streams

__all__ = ["at_random", "of_each", "share"]


def share(samples: int, fraction: float) -> int:
    """How many of some samples are held out: the nearest whole number, but never all of them.

    Args:
        samples: how many there are, at least 1.
        fraction: in [0, 1).

    Example:
        >>> share(10, 0.25), share(2, 0.9), share(1, 0.9)
        (3, 1, 0)
    """
    return min(int(samples * fraction + 0.5), samples - 1)


def at_random(samples: int, fraction: float, streams: Streams) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A share of all samples by a plain permutation, which knows neither labels nor the partition.

    Args:
        samples: how many there are, at least 1.
        fraction: of them to hold out, in [0, 1).
        streams: the experiment's random streams.

    Returns:
        Indices of the training samples and of those held out, each ascending.

    Example:
        >>> train, test = at_random(10, 0.2, Streams(0))
        >>> len(train), len(test)
        (8, 2)
    """
    order = streams.generator("test set").permutation(samples)
    held_out = share(samples, fraction)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def of_each(
    holdings: Mapping[ClientId, NDArray[np.int64]], fraction: float, streams: Streams
) -> tuple[dict[ClientId, NDArray[np.int64]], NDArray[np.int64]]:
    """The same share of every client's samples, from a stream of its own; each client keeps at least one.

    Args:
        holdings: client → indices of its samples.
        fraction: of them to hold out, in [0, 1).
        streams: the experiment's random streams.

    Returns:
        What each client keeps, and the indices of all samples held out, client by client.
    """
    kept: dict[ClientId, NDArray[np.int64]] = {}
    test = []
    for client, indices in holdings.items():
        order = streams.generator("test set", client).permutation(indices)
        held_out = share(len(indices), fraction)
        kept[client] = np.sort(order[held_out:])
        test.append(np.sort(order[:held_out]))
    return kept, np.concatenate(test)
