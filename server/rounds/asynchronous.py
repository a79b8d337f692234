"""Asynchronous rounds: a client that answers is replaced at once, and no round waits for stragglers.

Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022, arXiv 2106.06639; Xie et al.,
"Asynchronous federated optimization", 2019, arXiv 1903.03934.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from fed.config.compatibility import Feature, Term
from fed.config.components import Component
from fed.config.registry import STALENESSES
from fed.errors import InvalidExperiment
from fed.server.rounds.staleness import Staleness
from fed.server.rounds.synchronous import WithoutCohorts, await_clients, fail_if_stalled

if TYPE_CHECKING:
    from fed.server.coordinator import Coordinator
    from fed.server.round_stats import RoundStats

__all__ = ["Asynchronous", "Buffered"]


@dataclass(frozen=True, kw_only=True)
class _Unsynchronised(WithoutCohorts):
    """Base of policies under which some clients have tasks at any time, from models of different ages.

    All that happens in one instant is handled before the next dispatch.

    Args:
        concurrency: number of clients that have tasks at any time; all, where there are fewer.
        staleness: weight s of an update by its age: polynomial, constant or hinge.
        most_stale: age beyond which an update is dropped, in versions of the model; never unless given.
    """

    mixes: ClassVar[bool] = False
    """True if the model moves towards clients' models, rather than by their updates."""

    concurrency: PositiveInt = 100
    staleness: Annotated[Component, STALENESSES] = field(default_factory=lambda: STALENESSES.validate("polynomial"))
    most_stale: NonNegativeInt | None = None

    @property
    def updates(self) -> int:
        """Number of updates that move the model."""
        return 1

    def check(self, population: int) -> None:
        """Check the policy against the number of clients.

        Raises:
            InvalidExperiment: if more updates should move the model than clients have tasks.
        """
        # The buffer would never fill: no more answers come than there are tasks.
        if self.updates > self.asked_of(population):
            raise InvalidExperiment(
                f"rounds.buffer must be at most {self.asked_of(population)}, of clients that have tasks, got "
                f"{self.updates}: lower it, or raise rounds.concurrency"
            )

    def cohort_of(self, population: int) -> int:
        """Number of clients that move the model in a round."""
        return min(self.updates, population)

    def asked_of(self, population: int) -> int:
        """Number of clients that have tasks at a time."""
        return min(self.concurrency, population)

    def weight(self, staleness: int) -> float | None:
        """Factor of an update of that age; None: it is dropped."""
        if self.most_stale is not None and staleness > self.most_stale:
            return None
        return self._weights.weight(staleness)

    def round(self, coordinator: "Coordinator", number: int, state: None) -> "RoundStats":
        """Run one round, numbered from 1: until enough updates have moved the model.

        The round ends with fewer updates where clients keep states and all available ones have answered.
        """
        accumulator = coordinator.new_accumulator(mixes=self.mixes)
        begins_s = coordinator.fleet.clock
        while len(accumulator.replied) < self.updates:
            fail_if_stalled(coordinator, number, begins_s)
            free = self.asked_of(len(coordinator.fleet.registered())) - len(coordinator.open)
            if clients := self.draw(coordinator, number, free, again=len(accumulator.asked)):
                coordinator.dispatch(accumulator, number, clients, cohort=self.updates)
            if not coordinator.open:
                if coordinator.keeps_states and accumulator.loss_of and not coordinator.fleet.available():
                    break  # all clients that could answer wait for the verdict on their last answers
                await_clients(coordinator, number, 1)
                continue
            # One instant at a time, so that free clients get tasks at once.
            coordinator.collect(accumulator, enough=1, weigh=self.weight)
        return coordinator.step(accumulator, number)

    @cached_property
    def _weights(self) -> Staleness:
        weights: Staleness = STALENESSES.validate(self.staleness).make()
        return weights


@dataclass(frozen=True, kw_only=True)
class Buffered(_Unsynchronised):
    r"""The model moves by the mean of K updates of any age, Σ s(τ) n Δ / Σ n (Nguyen et al. 2022, 2106.06639).

    .. math:: x ← x + η_g \sum_i n_i \, s(τ_i) Δ_i / \sum_i n_i

    The discount s is not a part of the normaliser: a buffer of stale updates takes a smaller step. n_i is the
    algorithm's weight, samples for FedAvg; with n = 1 the normaliser is the paper's K. τ_i is the number of times that
    the model has moved since client i got its task; η_g, and what else is done with the mean, are the algorithm's. With
    equal devices, and as many clients at a time as the buffer holds, these are synchronous rounds, to the bit. Updates
    that arrive in one instant count together, even if they are more than the buffer's.

    Args:
        buffer: K, number of updates that move the model.
    """

    buffer: PositiveInt = 10

    def lacks(self) -> Sequence[Term]:
        """Cohorts, and whole updates where staleness discounts them."""
        if not self._weights.discounts:
            return super().lacks()
        why = "which discount updates by their staleness"
        return [*super().lacks(), Term(Feature.WHOLE_UPDATES, "write rounds.staleness: constant", why)]

    @property
    def updates(self) -> int:
        """Size K of the buffer."""
        return self.buffer


@dataclass(frozen=True, kw_only=True)
class Asynchronous(_Unsynchronised):
    r"""Every answer moves the model towards the client's, the less the older its start (1903.03934).

    .. math:: x ← x + η_g \, α \, s(τ) (y - x)

    y is the client's model, x the present one; η_g, and what else is done with the difference, are the algorithm's. Of
    answers that arrive in one instant the mean counts, weighted by samples.

    Args:
        mixing: α in (0, 1], the part of the way to a client's model that the model moves, before the discount.
    """

    mixes: ClassVar[bool] = True

    mixing: Annotated[float, Field(gt=0, le=1)] = 0.6

    def needs(self) -> Sequence[Term]:
        """A coordinator, and single plain updates: a difference from the present model is no update of the one sent."""
        why = "because they mix clients' models with the present one"
        features = Feature.PLAIN_UPDATES, Feature.DECODED_MESSAGES
        return [*super().needs(), *(Term(feature, "choose buffered rounds", why) for feature in features)]

    def weight(self, staleness: int) -> float | None:
        """α s(τ)."""
        weight = super().weight(staleness)
        return None if weight is None else self.mixing * weight
