"""Client sampling: rules that draw the cohort of a round from a population."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from pydantic import PositiveInt

from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams

if TYPE_CHECKING:
    from fed.server.fleet import Fleet

__all__ = ["CohortDraw", "Poisson", "PowerOfChoice", "RoundRobin", "Sampling", "UniformSampling", "Weighted"]


class CohortDraw(NamedTuple):
    """Inputs of a cohort's draw: the clients, its size, the round, and the random stream.

    Args:
        fleet: fleet of the population.
        number: number of the round, from 1.
        cohort: number of clients to ask.
        streams: random streams of the run.
        losses: last training loss of each client that has taken part.
        again: number of clients that have already been drawn for this round.
    """

    fleet: "Fleet"
    number: int
    cohort: int
    streams: Streams
    losses: Mapping[int | str, float]
    again: int = 0

    @property
    def population(self) -> int:
        """Number of available clients."""
        return len(self.fleet.available())

    @property
    def size(self) -> int:
        """The cohort, or the number of available clients where they are fewer."""
        return min(self.cohort, self.population)

    @property
    def stream(self) -> tuple[str, *tuple[int, ...]]:
        """Name of the draw's own stream."""
        return ("cohort", self.number, self.again) if self.again else ("cohort", self.number)

    @property
    def generator(self) -> np.random.Generator:
        """The draw's own stream, from its beginning."""
        return self.streams.generator(*self.stream)

    def by_samples(self, count: int) -> np.ndarray:
        """Clients drawn one after the other, each with a probability proportional to its samples."""
        samples = np.array([self.fleet.size_of(client) for client in self.fleet.available()], dtype=np.float64)
        return self.generator.choice(len(samples), size=count, replace=False, p=samples / samples.sum())


class _AsSeen:
    """Fleet whose available clients stay those of one moment, since places in their list must not move meanwhile.

    Args:
        fleet: fleet, whose real nodes come and go.
    """

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._available = fleet.available()

    def available(self) -> Sequence[int | str]:
        return self._available

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)


@dataclass(frozen=True, kw_only=True)
class Sampling(Hyperparameters, ABC):
    """Rule that draws cohorts.

    Attributes:
        amplifies: True if each client is drawn by itself with the same probability, whatever the data, so that chance
            hides who took part.
    """

    amplifies: ClassVar[bool] = False

    def check(self, cohort: int) -> None:
        """Check that the rule can draw a cohort of this size.

        Raises:
            InvalidExperiment: if it cannot draw such a cohort.
        """

    def most(self, cohort: int, population: int) -> int:
        """Largest number of clients that a round asks.

        Args:
            cohort: number of clients that it is to ask.
            population: number of all clients.
        """
        return cohort

    def most_rounds(self, count: int, cohort: int, population: int) -> int:
        """Largest number of a run's rounds that one client is asked in.

        Args:
            count: number of rounds.
            cohort: number of clients that a round asks.
            population: number of all clients.
        """
        return count

    def sample(self, draw: CohortDraw) -> list[int | str]:
        """Clients of a round, in the fleet's order."""
        seen = _AsSeen(draw.fleet)
        nodes = seen.available()
        return [nodes[place] for place in sorted(self.places(draw._replace(fleet=cast("Fleet", seen))))]

    @abstractmethod
    def places(self, draw: CohortDraw) -> Sequence[int] | np.ndarray:
        """Clients of a round as places in the fleet, from 0, in any order."""


@dataclass(frozen=True, kw_only=True)
class UniformSampling(Sampling):
    """Uniform sampling: every cohort of that size is equally likely."""

    def places(self, draw: CohortDraw) -> Sequence[int] | np.ndarray:
        """Draw without replacement."""
        population = draw.population
        size = min(draw.cohort, population)
        if size == 1:  # as asynchronous rounds draw them, in a fraction of the time
            # Below the population, rounding included, since the number is at most 1 - 2⁻⁵³.
            return [int(draw.streams.uniforms(*draw.stream)[0] * population)]
        return draw.streams.places(population, size, *draw.stream)


@dataclass(frozen=True, kw_only=True)
class Weighted(Sampling):
    """Weighted sampling: clients are drawn one by one, by their samples, without replacement.

    An algorithm that weighs by samples counts a large client twice then, once when drawn and once in the mean: weigh
    clients alike to be fair to samples (Li et al. 2020, 1907.02189, scheme I). A round looks at every client's size.
    """

    def needs(self) -> Sequence[Term]:
        """Clients' numbers of samples."""
        return _terms_of_numbers("rounds.sampling weighted")

    def places(self, draw: CohortDraw) -> Sequence[int] | np.ndarray:
        """Draw by samples."""
        return draw.by_samples(draw.size)


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Sampling):
    """Round-robin sampling: all clients in turn, in a random order that stays the same."""

    def most_rounds(self, count: int, cohort: int, population: int) -> int:
        """Number of cycles, the last of which may not be whole."""
        return -(-count * cohort // population)

    def places(self, draw: CohortDraw) -> Sequence[int] | np.ndarray:
        """Next clients in the order."""
        # A stream without the round, so that the order stays the same.
        order = draw.streams.generator("order of clients").permutation(draw.population)
        return order[(np.arange(draw.size) + (draw.number - 1) * draw.size) % draw.population]


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """Each client by itself with probability cohort / registered clients: cohorts vary, and may be empty.

    A client that is drawn while it is not available does not take part. So the probability is the same whichever
    clients are available, as the accounting of differential privacy for this kind of sampling assumes.
    """

    amplifies: ClassVar[bool] = True

    def needs(self) -> Sequence[Term]:
        """Rounds that wait for a cohort: others would draw again until a client is in it."""
        return (Term(Feature.COHORTS, "write rounds.sampling: uniform", subject="rounds.sampling poisson"),)

    def most(self, cohort: int, population: int) -> int:
        """All clients, since chance may draw them all."""
        return population

    def places(self, draw: CohortDraw) -> Sequence[int] | np.ndarray:
        """Draw each registered client with the same probability; keep the available ones."""
        members = draw.fleet.registered()
        generator = draw.generator
        # A binomial number, then that many of them, has the law of one coin a client.
        count = generator.binomial(len(members), min(draw.cohort / len(members), 1.0))
        drawn = generator.choice(len(members), size=count, replace=False)
        available = {client: place for place, client in enumerate(draw.fleet.available())}
        return [available[members[place]] for place in drawn if members[place] in available]


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sampling):
    """Clients with the largest losses among candidates drawn by their samples (Cho et al. 2020, 2010.01243, rpow-d).

    A client's loss is that of its last task, so that nothing more is sent; clients without one come first. A round
    looks at every client's size.

    Args:
        candidates: d, number of candidates that are drawn, at least the cohort; twice the cohort unless given.
    """

    candidates: PositiveInt | None = None

    def needs(self) -> Sequence[Term]:
        """Clients' losses and numbers of samples."""
        return _terms_of_numbers("rounds.sampling power_of_choice")

    def check(self, cohort: int) -> None:
        """Check that the candidates are not fewer than the cohort.

        Raises:
            InvalidExperiment: if there are fewer.
        """
        if self.candidates is not None and self.candidates < cohort:
            raise InvalidExperiment(
                f"rounds.sampling.candidates must be at least the cohort of {cohort}, got {self.candidates}: raise it"
            )

    def places(self, draw: CohortDraw) -> Sequence[int] | np.ndarray:
        """Candidates with the largest losses; of equal ones the first drawn."""
        self.check(draw.size)
        count = min(self.candidates or 2 * draw.size, draw.population)
        nodes = draw.fleet.available()
        drawn = draw.by_samples(count)
        losses = [draw.losses.get(nodes[place], np.inf) for place in drawn]
        # A stable sort: of equal losses the first drawn is taken on every machine.
        return drawn[np.argsort(np.negative(losses), kind="stable")[: draw.size]]


def _terms_of_numbers(subject: str) -> tuple[Term, ...]:
    """Terms of a sampling by clients' numbers, which an app's clients tell with their answers alone."""
    features = (Feature.CLIENT_NUMBERS, Feature.OWN_TRAINING)
    return tuple(Term(feature, "write rounds.sampling: uniform", subject=subject) for feature in features)
