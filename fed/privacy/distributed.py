"""The kind distributed of the section ``privacy``: noise by the clients together."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fed.config.compatibility import Sections
from fed.errors import InvalidExperiment
from fed.privacy.kinds import NOT_COVERED, Policy, Privacy, most_rounds
from fed.privacy.noise import NoiseSource
from fed.privacy.protection import Protection
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.lane_noise import LaneNoise

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan

__all__ = ["DistributedPrivacy"]

_UNITS = 2.0**16  # of a clip, in lanes of 32 bits with a hundred clients
_NUMBERS = 2**30  # of a message, for a plan that is made before the model is known; what they cost is below 10⁻⁶


@dataclass(frozen=True, kw_only=True)
class DistributedPrivacy(Privacy):
    r"""Noise by the clients together, under secure aggregation: the coordinator sees their sum alone, with its noise.

    .. math:: q_k = \left⌊ \frac{Δ_2}{C} u_k \min(1, \tfrac{C}{‖u_k‖}) \right⌋_0 + \operatorname{Skellam}(z² Δ_2² / h)

    h is the smallest number of honest clients in a sum that clients reveal, by ``secure_aggregation.minimum_cohort``
    and ``corrupt``, so that a sum of more has more noise (Agarwal et al. 2021, 2110.04995). A client that drops out
    adds none, and those that are left add enough. ``secure_aggregation.clip`` is not used.
    """

    shares_noise: ClassVar[bool] = True

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse sums that are not secret, and errors that clients keep of their own noise."""
        super().check_experiment(experiment)
        if self.unit == "sample":
            raise InvalidExperiment(
                "privacy.unit sample is for noise in clients' own steps, got kind distributed: write kind: local"
            )
        if experiment.secure_aggregation is None:
            raise InvalidExperiment(
                "privacy distributed needs secure_aggregation, under which the coordinator sees a sum alone, got none: "
                "add the section, or write privacy kind: local"
            )
        if experiment.error_feedback.kind != "none":
            raise InvalidExperiment(
                "privacy distributed needs error_feedback none, for errors would take the noise of one round back in "
                f"the next, got {experiment.error_feedback.kind}: leave it out"
            )
        if getattr(experiment.algorithm.make(), "votes", False):
            raise InvalidExperiment(
                "privacy distributed bounds the length of messages, got algorithm "
                f"{experiment.algorithm.kind}, which counts their signs: choose one such as fedavg"
            )

    def release(self, sampling: float, fixed: FixedPoint | None = None) -> Release:
        """A release with Skellam noise: a client is in the sum, or is not."""
        assert fixed is not None
        return Release(noise_multiplier=self.multiplier, skellam_l2=fixed.l2_units, skellam_l1=fixed.l1_units)

    def protection(self, source: NoiseSource) -> Protection | None:
        """None: messages are clipped and get their noise as lanes; before that come an adaptive clip and its bit."""
        return Protection(clip=1.0, bit_weight=self.known_bit_weight) if self.has_bits else None

    def lane_noise(self, least_honest: int) -> LaneNoise:
        """Skellam noise, of which h clients add a variance of z²C²."""
        return LaneNoise(
            clip=self.sent_clip,
            noise_multiplier=self.multiplier,
            least_honest=least_honest,
            bit_weight=self.known_bit_weight,
        )

    def plan(self, rounds: Policy, population: int) -> "PrivacyPlan":
        """Skellam releases, one in each round that a client takes part in."""
        from fed.privacy.plan import PrivacyPlan

        return PrivacyPlan(
            kind="distributed",
            mechanism="Skellam noise, added by the clients under the masks of secure aggregation",
            noise_multiplier=self.noise_multiplier or 1.0,
            rounds=rounds.count,
            delta=self.delta,
            amplification="none is claimed, for the coordinator knows who takes part",
            clients=population,
            cohort=rounds.cohort_of(population),
            skellam_l2=_UNITS,
            skellam_l1=_UNITS * math.sqrt(_NUMBERS),
            unit=self.unit,
            neighbourhood="add-or-remove-one",
            budget_epsilon=self.budget_epsilon,
            participations=most_rounds(rounds, population),
            trust=(
                "The coordinator is not trusted with single messages: secure aggregation shows it their sum alone.",
                "As many clients as secure_aggregation.corrupt says may collude with it; the others add all the noise.",
            ),
            not_covered=NOT_COVERED,
        )
