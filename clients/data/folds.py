"""Folds of a cross-validation: each client's samples in K parts, one of which is held out to test on.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.federated import FederatedData
from fed.clients.data.held import Held, size_of, taken
from fed.clients.data.on_demand import ByClient, ClientsOnDemand
from fed.clients.data.samples import ClientId
from fed.config.sections import FoldSection
from fed.errors import InvalidData
from fed.vectors.randomness import Streams
from fed.vectors.tensors import torch

__all__ = ["fold_of", "holding_out"]


def fold_of(samples: int, folds: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Fold of each of a client's samples, in 1 … K; sizes differ by one at most.

    Where K does not divide the samples, chance decides which folds have one more, so that those of many clients
    together are of about one size.

    Args:
        samples: number of the client's samples, at least 1.
        folds: K, the number of folds, at least 2.
        generator: the client's stream.

    Example:
        >>> np.bincount(fold_of(11, 3, np.random.default_rng(0)))[1:].tolist()
        [4, 3, 4]
    """
    # A random first fold: with 0 the small clients' larger folds would all be the first ones.
    first = int(generator.integers(folds))
    fold_E = np.empty(samples, dtype=np.int64)
    fold_E[generator.permutation(samples)] = 1 + (first + np.arange(samples)) % folds
    return fold_E


def holding_out(data: FederatedData, fold: FoldSection, streams: Streams) -> FederatedData:
    """Hold one fold of each client's samples out: its own test set, and all of them together the test set.

    The test set that data bring is not used. A client with fewer samples than folds holds nothing out in some of them;
    one with a single sample trains on it in every fold, and is not tested.

    Args:
        data: data in memory, or on demand: then every client is asked for its size, and parted whenever it is read.
        fold: number of the fold to hold out, and number of folds.
        streams: random streams of the data; each client has one for its folds, the same whichever fold is held out.

    Raises:
        InvalidData: if no client holds anything out.
    """
    parted = _Parted(data, fold, streams)
    tested = [client for client in data.clients if parted.size(client) < data.size_of(client)]
    if not tested:
        raise InvalidData(
            f"data.fold must hold a sample out of some client, got fold {fold.number} of {fold.of} and "
            f"{len(data.clients)} clients with too few samples: lower the number of folds, or deal the data to fewer "
            "clients"
        )
    if data.is_on_demand:
        knows_sizes = isinstance(data.train, ClientsOnDemand) and data.train.size is not None
        train = ClientsOnDemand(data.clients, parted.kept, parted.size if knows_sizes else None)
        return replace(data, train=train, test=None, client_tests=ByClient(tested, parted.held_out))
    held = {client: parted.kept(client) for client in data.clients}
    tests = {client: parted.held_out(client) for client in tested}
    # Held-out samples may have the largest label.
    return replace(data, train=held, test=None, classes=data.number_of_classes(), client_tests=tests)


@dataclass(frozen=True)
class _Parted:
    """Clients in two parts: their samples of one fold, and the others, on which they train."""

    data: FederatedData
    fold: FoldSection
    streams: Streams

    def size(self, client: ClientId) -> int:
        size = self.data.size_of(client)
        return size - int(self._is_held_out(client, size).sum())

    def kept(self, client: ClientId) -> Held:
        return self._part(client, are_held_out=False)

    def held_out(self, client: ClientId) -> Held:
        return self._part(client, are_held_out=True)

    def _part(self, client: ClientId, *, are_held_out: bool) -> Held:
        held = self.data.read(client)
        places = np.flatnonzero(self._is_held_out(client, size_of(held)) == are_held_out)
        return taken(held, torch.from_numpy(places))

    def _is_held_out(self, client: ClientId, samples: int) -> NDArray[np.bool_]:
        if samples == 1:
            return np.zeros(1, dtype=bool)  # the client trains on its only sample in every fold
        # The same stream in every fold, so that each sample is tested exactly once.
        fold_E = fold_of(samples, self.fold.of, self.streams.generator("folds", client))
        return np.asarray(fold_E == self.fold.number)
