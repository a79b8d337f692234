"""Synchronous rounds: ask a cohort, wait for all of it, apply the mean."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from pydantic import PositiveInt

from fed.errors import InvalidExperiment
from fed.families import SAMPLINGS
from fed.hyperparameters import Hyperparameters
from fed.kinds import Component
from fed.server.coordinator import Coordinator, Exchange
from fed.server.sampling import Draw, Sampling

__all__ = ["Synchronous"]


@dataclass(frozen=True, kw_only=True)
class Synchronous(Hyperparameters):
    """Each round a random cohort trains from the same model, and the round ends when all have answered.

    Args:
        count: how many rounds.
        cohort: how many clients a round, or ``all``. Of no effect where everybody always takes part: for algorithms
            over mix and for the baselines.
        sampling: who takes part: uniform, weighted, round_robin, poisson or power_of_choice.
        evaluate_every: rounds from one evaluation to the next; the last round is always evaluated.
    """

    count: PositiveInt = 50
    cohort: PositiveInt | Literal["all"] = "all"
    sampling: Annotated[Component, SAMPLINGS] = field(default_factory=lambda: SAMPLINGS.validate({}))
    evaluate_every: PositiveInt = 1

    def check(self, population: int) -> None:
        """Hold the policy to the number of clients.

        Raises:
            InvalidExperiment: if the cohort is larger than the population, or the rule that draws it cannot.
        """
        if self.cohort != "all" and self.cohort > population:
            raise InvalidExperiment(
                f"rounds.cohort must be at most {population}, the number of clients, got {self.cohort}: "
                "lower it, or write all"
            )
        self._rule.check(self.cohort_of(population), population)

    def round(self, coordinator: Coordinator, number: int) -> Exchange:
        """One round, numbered from 1."""
        fleet = coordinator.fleet
        cohort = self.cohort_of(len(fleet.nodes()))
        chosen = self._rule.sample(Draw(fleet, number, cohort, coordinator.streams, coordinator.losses))
        return coordinator.exchange(number, chosen)

    @cached_property
    def _rule(self) -> Sampling:
        rule: Sampling = SAMPLINGS.validate(self.sampling).make()
        return rule

    def cohort_of(self, population: int) -> int:
        """How many of so many clients take part in a round."""
        return population if self.cohort == "all" else min(self.cohort, population)

    def evaluates(self, number: int) -> bool:
        """Whether the model is evaluated after a round."""
        return number % self.evaluate_every == 0 or number == self.count
