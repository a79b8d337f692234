"""Held-out samples: of all clients as one test set, or each client's own for itself.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.federated import FederatedData
from fed.clients.data.held import Held, joined, size_of, taken
from fed.clients.data.on_demand import ClientsOnDemand
from fed.clients.data.samples import ClientId
from fed.errors import InvalidData
from fed.vectors.randomness import Streams
from fed.vectors.tensors import torch

__all__ = ["for_each", "no_held_out_samples", "of_each", "of_each_holder", "of_each_on_demand", "parted", "share"]

_TESTED = 1000


def share(samples: int, fraction: float) -> int:
    """Number of held-out samples: the nearest whole number, but never all of them.

    Args:
        samples: number of samples, at least 1.
        fraction: share of them to hold out, in [0, 1).

    Example:
        >>> share(10, 0.25), share(2, 0.9), share(1, 0.9)
        (3, 1, 0)
    """
    return min(int(samples * fraction + 0.5), samples - 1)  # round() would go to the even of two neighbours


def parted(
    indices_E: NDArray[np.int64], fraction: float, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hold out a share of samples by a plain permutation, which knows neither labels nor the partition.

    Args:
        indices_E: indices of the samples, at least one.
        fraction: share of them to hold out, in [0, 1).
        generator: the stream to draw from.

    Returns:
        Indices of the samples to keep and of those held out, each ascending.

    Example:
        >>> train, test = parted(np.arange(10), 0.2, np.random.default_rng(0))
        >>> len(train), len(test)
        (8, 2)
    """
    order = generator.permutation(indices_E)
    held_out = share(len(indices_E), fraction)
    # Ascending, so that what is drawn later depends on which samples are kept, not on the permutation.
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def of_each(
    holdings: Mapping[ClientId, NDArray[np.int64]], fraction: float, streams: Streams
) -> tuple[dict[ClientId, NDArray[np.int64]], NDArray[np.int64]]:
    """Hold out the same share of every client's samples, from a stream of its own; each client keeps at least one.

    Args:
        holdings: client → indices of its samples.
        fraction: share of them to hold out, in [0, 1).
        streams: the experiment's random streams.

    Returns:
        Client → indices of the samples that it keeps; and the indices of all samples held out, client by client.
    """
    kept: dict[ClientId, NDArray[np.int64]] = {}
    test = []
    for client, indices in holdings.items():
        kept[client], held_out = parted(indices, fraction, streams.generator("test set", client))
        test.append(held_out)
    return kept, np.concatenate(test)


def of_each_holder(data: FederatedData, fraction: float, streams: Streams) -> FederatedData:
    """Hold out as :func:`of_each`, of data whose samples are read when they are needed: none is read for it.

    Args:
        data: clients in memory, without a test set.
        fraction: share of each client's samples to hold out, in [0, 1).
        streams: the experiment's random streams.
    """
    cut = _Cut(data, fraction, streams)
    test = joined([cut.held_out(client) for client in data.clients])
    train = {client: cut.kept(client) for client in data.clients}
    return replace(data, train=train, test=test if size_of(test) else None)


def of_each_on_demand(data: FederatedData, fraction: float, streams: Streams | None = None) -> FederatedData:
    """Hold out as :func:`of_each`, whenever a client is read; the test set is of the first 1,000 clients.

    Args:
        data: data on demand, without a test set.
        fraction: share of each client's samples to hold out, in [0, 1).
        streams: the experiment's random streams; None: the last samples are held out, for data whose order means
            nothing.
    """
    cut = _Cut(data, fraction, streams)
    test = joined([cut.held_out(client) for client in data.clients[:_TESTED]])
    return replace(data, train=cut.train(), test=test if size_of(test) else None)


def for_each(data: FederatedData, fraction: float, streams: Streams) -> tuple[FederatedData, Mapping[Any, Held]]:
    """Split every client's samples in two: one part to train on, and one on which it alone scores models.

    The draw is independent of that of a test set. A client with one sample trains on it. Where the data bring test sets
    of clients' own, those are what clients hold out, and nothing is drawn.

    Args:
        data: data in memory, or on demand: then a client is parted whenever it is read.
        fraction: share of each client's samples to hold out, in (0, 1).
        streams: the experiment's random streams.

    Returns:
        The data to train on, and client → its held-out samples. A client that holds nothing out is missing there; on
        demand, where this is not known before it is read, its pair is empty.

    Raises:
        InvalidData: if no client holds anything out, where that is known.
    """
    if data.client_tests is not None:
        is_in_memory = isinstance(data.client_tests, dict)
        return data, data.client_tests if is_in_memory else ClientsOnDemand(tuple(data.client_tests), data.read_test)
    # Under a name of its own: else these would be the very samples of the common test set.
    cut = _Cut(data, fraction, streams, "client test set")
    if data.is_on_demand:
        return replace(data, train=cut.train()), ClientsOnDemand(data.clients, cut.held_out)
    parts = {client: cut.parts(client) for client in data.clients}
    held_out = {client: held for client, (_, held) in parts.items() if size_of(held)}
    if not held_out:
        raise no_held_out_samples(len(parts))
    train = {client: held for client, (held, _) in parts.items()}
    # Held-out samples may have the largest label.
    return replace(data, train=train, classes=data.number_of_classes()), held_out


def no_held_out_samples(clients: int) -> InvalidData:
    """Message for the case that no client has a sample to hold out."""
    return InvalidData(
        f"evaluation by clients needs a client with samples enough to hold one out, got none among {clients}: raise "
        "evaluation.fraction, deal the data to fewer clients, or write evaluation: coordinator"
    )


@dataclass(frozen=True)
class _Cut:
    """Clients in two parts: the samples that they train on, and those that they hold out."""

    data: FederatedData
    fraction: float
    streams: Streams | None
    purpose: str = "test set"

    def train(self) -> ClientsOnDemand:
        knows_sizes = isinstance(self.data.train, ClientsOnDemand) and self.data.train.size is not None
        return ClientsOnDemand(self.data.clients, self.kept, self.size if knows_sizes else None)

    def size(self, client: ClientId) -> int:
        # The number follows from the size: no permutation need be drawn for it.
        size = self.data.size_of(client)
        return size - share(size, self.fraction)

    def kept(self, client: ClientId) -> Held:
        return self.parts(client)[0]

    def held_out(self, client: ClientId) -> Held:
        return self.parts(client)[1]

    def parts(self, client: ClientId) -> list[Held]:
        held = self.data.read(client)
        places = np.arange(size_of(held))
        if self.streams is None:
            parts = np.split(places, [len(places) - share(len(places), self.fraction)])
        else:
            parts = [*parted(places, self.fraction, self.streams.generator(self.purpose, client))]
        return [taken(held, torch.from_numpy(part)) for part in parts]
