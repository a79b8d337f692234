"""The kind dp_ftrl of the section ``privacy``: noise correlated over rounds, without any assumption on sampling."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import PositiveInt

from fed.config.compatibility import Sections
from fed.config.components import Component
from fed.config.registry import MATRIX_MECHANISMS
from fed.errors import InvalidExperiment
from fed.privacy.central import CentralPrivacy
from fed.privacy.correlated_sum import CorrelatedSum
from fed.privacy.kinds import NOT_COVERED, Policy
from fed.privacy.matrix_mechanism import MatrixMechanism
from fed.privacy.noise import NoiseSource
from fed.privacy.participation import ParticipationRule
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import FixedPoint

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan

__all__ = ["FollowTheLeaderPrivacy"]


@dataclass(frozen=True, kw_only=True)
class FollowTheLeaderPrivacy(CentralPrivacy):
    r"""Noise by the coordinator that is correlated over rounds: most of one round's noise is taken off in later ones.

    .. math::
        \bar u_t = \frac{1}{m} \left( \sum_{k ∈ S_t} u_k \min(1, \tfrac{C}{‖u_k‖}) + (M^{-1} n)_t \right), \qquad
        n_t ∼ N(0, z² C² I)

    M is a matrix, chosen such that sums over rounds, which the model is, have the least error for what all rounds cost
    together: a release of sensitivity C·s_T, where s_T follows from M and from how often, and how far apart, a client
    may take part. No sampling is assumed: cohorts may be drawn in any way, and be known to all. The coordinator asks
    nobody more often than the keys say, whatever draws the cohorts (Kairouz et al. 2021, 2103.00039; Choquette-Choo et
    al. 2023, 2306.08153).

    Args:
        mechanism: kind of the matrix, blt or banded.
        min_separation: rounds from one participation of a client to its next, ≥ 1; null for as many as clients and
            cohort leave room for.
        max_participations: largest number of rounds that a client takes part in; null for as many as ``min_separation``
            leaves room for.
    """

    mechanism: Annotated[Component, MATRIX_MECHANISMS] = field(default_factory=lambda: MATRIX_MECHANISMS.validate({}))
    min_separation: PositiveInt | None = None
    max_participations: PositiveInt | None = None

    kind: ClassVar[str] = "dp_ftrl"

    def _check_clip(self, experiment: Sections) -> None:
        """Refuse an adaptive clip: sums of several clips would not add up to one with little noise."""
        if self.has_bits:
            raise InvalidExperiment(
                "privacy.clip adaptive is not for kind dp_ftrl, whose later rounds take back noise of earlier ones, so "
                "that all must have one clip: give a number as the clip, or write kind: central"
            )

    def participation_rule(self, rounds: int) -> ParticipationRule:
        """Rule that the coordinator keeps to.

        Args:
            rounds: number of rounds of the run.
        """
        return ParticipationRule(
            rounds=rounds, min_separation=self.min_separation or 1, max_participations=self.max_participations
        )

    def matrix(self, rounds: int) -> MatrixMechanism:
        """Matrix mechanism of a run.

        Args:
            rounds: number of rounds of the run.
        """
        found: MatrixMechanism = (
            MATRIX_MECHANISMS.validate(self.mechanism).make().mechanism(self.participation_rule(rounds))
        )
        return found

    def fitted(self, rounds: Policy, population: int) -> Mapping[str, Any]:
        """The widest separation that the plan leaves room for, unless one is given.

        Raises:
            InvalidExperiment: if too few clients may take part in some rounds.
        """
        cohort = rounds.cohort_of(population)
        widest = population // cohort
        separation = self.min_separation or widest
        if separation > widest:
            raise InvalidExperiment(
                f"privacy.min_separation of {separation} rounds needs {cohort * separation} clients, as many as "
                f"{separation} cohorts of {cohort} have, got {population}: lower it, or rounds.cohort"
            )
        rule = ParticipationRule(
            rounds=rounds.count, min_separation=separation, max_participations=self.max_participations
        )
        rule.check_clients(population, cohort)
        return {} if self.min_separation else {"privacy.min_separation": separation}

    def amplified(self, rounds: Policy, population: int) -> float:
        """1: nothing is gained by chance."""
        return 1.0

    def costs_all(self, sampling: float) -> bool:
        """True: a round costs each client what it costs the one of the worst pattern of participation."""
        return True

    def releases(
        self,
        sampling: float,
        fixed: FixedPoint | None = None,
        *,
        number: int,
        rounds: int,
        is_repeated: bool = False,
    ) -> dict[Release, int]:
        """Gaussian release of a round of the matrix mechanism; none where it adds nothing to the cost.

        Args:
            sampling: 1.
            fixed: None.
            number: t, number of the round, from 1.
            rounds: T, number of rounds of the run.
            is_repeated: True if the round has been released before, with other noise.
        """
        release = self.matrix(rounds).release(
            self.multiplier, self.participation_rule(rounds), number, is_repeated=is_repeated
        )
        return {} if release is None else {release: 1}

    def releases_of_message(
        self, fixed: FixedPoint | None = None, *, number: int, earlier: Sequence[int], rounds: int
    ) -> Mapping[Release, int]:
        """Gaussian release of a message, which shows in all rounds that follow, and beside earlier ones even more.

        Args:
            fixed: None.
            number: number of the message's round, from 1.
            earlier: rounds of the run that hold earlier messages of the client.
            rounds: T, number of rounds of the run.
        """
        added = self.matrix(rounds).added_by(number, earlier, rounds)
        return {Release(noise_multiplier=self.multiplier / math.sqrt(added)): 1}

    def noisy_sum(self, source: NoiseSource, rounds: int) -> CorrelatedSum:
        """Noise whose sums over rounds are small.

        Args:
            source: source of the noise.
            rounds: number of rounds of the run.
        """
        return CorrelatedSum(
            clip=self.sent_clip,
            noise_multiplier=self.multiplier,
            source=source,
            mechanism=self.matrix(rounds),
            rounds=rounds,
        )

    def plan(self, rounds: Policy, population: int) -> "PrivacyPlan":
        """Gaussian releases of a matrix mechanism, whose costs add up to that of its sensitivity."""
        from fed.privacy.plan import PrivacyPlan

        separation = self.fitted(rounds, population).get("privacy.min_separation", self.min_separation)
        fitted = replace(self, min_separation=separation)
        rule = fitted.participation_rule(rounds.count)
        section = MATRIX_MECHANISMS.validate(self.mechanism)
        return PrivacyPlan(
            kind=self.kind,
            mechanism=(
                f"Gaussian noise, correlated over rounds by a {section.kind} matrix, rounded onto a grid and added to "
                "the sum by the coordinator"
            ),
            noise_multiplier=self.noise_multiplier or 1.0,
            rounds=rounds.count,
            delta=self.delta,
            sensitivities=tuple(fitted.matrix(rounds.count).sensitivities(rule).tolist()),
            amplification=(
                "none is claimed, and none is needed: the promise holds whoever takes part, for the coordinator asks "
                f"no client again within {rule.min_separation} rounds, nor more than {rule.times} times"
            ),
            clients=population,
            cohort=rounds.cohort_of(population),
            unit=self.unit,
            neighbourhood="add-or-remove-one",
            budget_epsilon=self.budget_epsilon,
            participations=rule.times,
            trust=(
                "The coordinator is trusted: it sees each client's clipped message, and who takes part.",
                "It keeps the noise of past rounds, in its checkpoints too, by which models lose their protection.",
                "Whoever sees the models that it publishes, clients included, learns no more than ε says.",
            ),
            not_covered=NOT_COVERED,
        )
