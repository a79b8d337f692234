"""Who takes part in a round: rules that draw a cohort from a population."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from fed.errors import InvalidExperiment
from fed.hyperparameters import Hyperparameters
from fed.randomness import Streams
from fed.server.fleet import Fleet

__all__ = ["Poisson", "PowerOfChoice", "RoundRobin", "Sampling", "Uniform", "Weighted"]


@dataclass(frozen=True, kw_only=True)
class Sampling(Hyperparameters, ABC):
    """A rule that draws cohorts."""

    @abstractmethod
    def sample(
        self, fleet: Fleet, number: int, cohort: int, streams: Streams, losses: Mapping[int | str, float]
    ) -> list[int | str]:
        """The clients of a round, in the fleet's order.

        Args:
            fleet: the population.
            number: of the round, from 1.
            cohort: how many clients, at most all.
            streams: the run's random streams.
            losses: the last training loss of each client that has taken part.
        """


@dataclass(frozen=True, kw_only=True)
class Uniform(Sampling):
    """Every cohort of that size is as likely as every other."""

    def sample(  # noqa: D102
        self, fleet: Fleet, number: int, cohort: int, streams: Streams, losses: Mapping[int | str, float]
    ) -> list[int | str]:
        nodes = fleet.nodes()
        return _of(nodes, streams.generator("cohort", number).choice(len(nodes), size=cohort, replace=False))


@dataclass(frozen=True, kw_only=True)
class Weighted(Sampling):
    """One client after the other is drawn, with a probability proportional to its samples, without replacement.

    An algorithm that weighs by samples counts a large client twice then, once when drawn and once in the mean: weigh
    clients alike to be fair to samples (Li et al. 2020, 1907.02189, scheme I). A round looks at every client's size.
    """

    def sample(  # noqa: D102
        self, fleet: Fleet, number: int, cohort: int, streams: Streams, losses: Mapping[int | str, float]
    ) -> list[int | str]:
        nodes = fleet.nodes()
        return _of(nodes, _by_samples(fleet, nodes, streams.generator("cohort", number), cohort))


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Sampling):
    """Everybody in turn, in a random order that stays the same."""

    def sample(  # noqa: D102
        self, fleet: Fleet, number: int, cohort: int, streams: Streams, losses: Mapping[int | str, float]
    ) -> list[int | str]:
        nodes = fleet.nodes()
        order = streams.generator("order of clients").permutation(len(nodes))
        return _of(nodes, order[(np.arange(cohort) + (number - 1) * cohort) % len(nodes)])


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """Each client by itself with probability cohort / population: cohorts vary, and may be empty.

    Differential privacy is accounted for this kind of sampling.
    """

    def sample(  # noqa: D102
        self, fleet: Fleet, number: int, cohort: int, streams: Streams, losses: Mapping[int | str, float]
    ) -> list[int | str]:
        nodes, generator = fleet.nodes(), streams.generator("cohort", number)
        return _of(
            nodes, generator.choice(len(nodes), generator.binomial(len(nodes), cohort / len(nodes)), replace=False)
        )


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sampling):
    """Of some candidates, drawn by their samples, those with the largest losses (Cho et al. 2020, 2010.01243, rpow-d).

    A client's loss is that of its last task, so that nothing more is sent; who never had one comes first.
    A round looks at every client's size.

    Args:
        candidates: d, how many are drawn, at least the cohort; twice the cohort unless given.
    """

    candidates: PositiveInt | None = None

    def sample(  # noqa: D102
        self, fleet: Fleet, number: int, cohort: int, streams: Streams, losses: Mapping[int | str, float]
    ) -> list[int | str]:
        nodes = fleet.nodes()
        count = min(self.candidates or 2 * cohort, len(nodes))
        if count < cohort:
            raise InvalidExperiment(f"rounds.sampling.candidates must be at least the cohort of {cohort}, got {count}")
        drawn = _by_samples(fleet, nodes, streams.generator("cohort", number), count)
        by_loss = sorted(drawn.tolist(), key=lambda place: -losses.get(nodes[place], np.inf))  # ties as drawn
        return _of(nodes, np.array(by_loss[:cohort]))


def _by_samples(fleet: Fleet, nodes: Sequence[int | str], generator: np.random.Generator, count: int) -> np.ndarray:
    samples = np.array([fleet.size_of(client) for client in nodes], dtype=np.float64)
    return generator.choice(len(nodes), size=count, replace=False, p=samples / samples.sum())


def _of(nodes: Sequence[int | str], places: np.ndarray) -> list[int | str]:
    return [nodes[place] for place in sorted(places.tolist())]
