"""Evaluation: by the coordinator on a test set, by the clients on their own samples, or both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.vectors.randomness import Streams

__all__ = ["ByBoth", "ByClients", "ByCoordinator"]


@dataclass(frozen=True, kw_only=True)
class ByCoordinator(Hyperparameters):
    """The coordinator scores the global model, or the peers' mean, on the data's test set, on which no client trains.

    Args:
        peers: number of peers whose models are scored beside their mean, ≥ 1, or ``all``, which takes long where there
            are many. The same peers are scored each round, drawn from the stream "scored".
        samples: number of test samples that score clients' own models (peers' and those of ``local``) before the last
            round, ≥ 1, or ``all``, which takes long where there are many models. The same samples are used each round,
            drawn from the stream "scored samples". A single model, the peers' mean, and the last round's models are
            scored on all samples.
    """

    peers: PositiveInt | Literal["all"] = 16
    samples: PositiveInt | Literal["all"] = 250

    def scored(self, clients: Sequence[int | str], streams: Streams) -> Sequence[int | str]:
        """The peers whose models are scored, in their order.

        Args:
            clients: names or numbers of all peers.
            streams: random streams of the run.
        """
        if self.peers == "all" or self.peers >= len(clients):
            return clients
        places = streams.generator("scored").choice(len(clients), size=self.peers, replace=False)
        # Sorted, so that scores stand in the clients' order in tables and files.
        return [clients[place] for place in sorted(places.tolist())]

    def sample(self, count: int, streams: Streams) -> Sequence[int]:
        """The places of the test samples that score clients' own models before the last round, in their order.

        Args:
            count: number of test samples.
            streams: random streams of the run.
        """
        if self.samples == "all" or self.samples >= count:
            return range(count)
        return sorted(streams.generator("scored samples").choice(count, size=self.samples, replace=False).tolist())

    def needs(self) -> Sequence[Term]:
        """A global model."""
        return (Term(Feature.GLOBAL_MODEL, "write evaluation: clients"),)


@dataclass(frozen=True, kw_only=True)
class ByClients(Hyperparameters):
    """Each client scores a model on its own test set, where the data bring such, or on a share that it holds out.

    The model is the client's own where the algorithm lets clients keep whole ones, otherwise the coordinator's.

    Args:
        fraction: share of a client's samples to hold out, in (0, 1), where the data bring no test sets of clients' own;
            rounded to whole samples, of which at least one is trained on.
    """

    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2

    def needs(self) -> Sequence[Term]:
        """Scores of each client."""
        return (Term(Feature.CLIENT_NUMBERS, "write evaluation: coordinator", "to weigh their scores"),)


@dataclass(frozen=True, kw_only=True)
class ByBoth(ByClients):
    """The coordinator scores the global model, or the peers' mean, on the test set, and clients score too.

    Args:
        fraction: share of a client's samples to hold out, in (0, 1), as in ``clients``.
    """

    def needs(self) -> Sequence[Term]:
        """A global model, and scores of each client."""
        return (Term(Feature.GLOBAL_MODEL, "write evaluation: clients"), *super().needs())
