"""The kind local of the section ``privacy``: noise by each client."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from fed.config.compatibility import Sections
from fed.errors import InvalidExperiment
from fed.privacy.kinds import NOT_COVERED, Policy, Privacy, most_rounds
from fed.privacy.noise import NoiseSource
from fed.privacy.participation import ParticipationRule
from fed.privacy.protection import Protection
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import FixedPoint

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan

__all__ = ["LocalPrivacy"]


@dataclass(frozen=True, kw_only=True)
class LocalPrivacy(Privacy):
    r"""Noise by each client: the coordinator sees messages that protect their clients already.

    .. math:: u_k ← u_k \min(1, \tfrac{C}{‖u_k‖}) + N(0, z² C² I)

    That a client takes part is no secret, so that neighbours differ in one client's data: two messages are 2C apart at
    most, and ε is that of a noise multiplier of z / 2.

    With ``unit: sample`` each local step clips the gradient of each sample and adds noise to their sum (DP-SGD:
    :mod:`fed.privacy.dp_sgd`), and messages leave as they are. Neighbours differ by one sample more or less of one
    client, whose ε follows from its own number of samples. That number is not protected. ``epsilon`` is that of each
    client, which finds its own noise.

    Args:
        max_participations: largest number of rounds that a client takes part in, which the coordinator keeps to; null
            for as many as its cohorts ask it in.
    """

    max_participations: PositiveInt | None = None

    sees_single: ClassVar[bool] = True

    @property
    def key_multiplier(self) -> float:
        """2, for neighbours of which one client's data are replaced; of samples 1."""
        return 1.0 if self.unit == "sample" else 2.0

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse apps under ``unit: sample``, and masks, which hide by what each client's ε is counted."""
        super().check_experiment(experiment)
        if self.unit == "sample" and experiment.secure_aggregation is not None:
            raise InvalidExperiment(
                "privacy.unit sample counts each client's ε by its number of samples, which secure_aggregation hides "
                "from the coordinator: write unit: client, or set secure_aggregation to null"
            )
        if self.unit == "sample" and getattr(experiment, "app", None) is not None:
            raise InvalidExperiment(
                "privacy.unit sample needs clients that fed trains, for noise is added in each of their steps, got an "
                "app: write unit: client"
            )

    def multiplier_of_sum(self, clients: float) -> float:
        """√m z: the noise of each client is in the sum."""
        return self.multiplier * math.sqrt(clients)

    def participation_rule(self, rounds: int) -> ParticipationRule | None:
        """Rule of at most ``max_participations``, where it is given.

        Args:
            rounds: number of rounds of the run.
        """
        if self.max_participations is None:
            return None
        return ParticipationRule(rounds=rounds, max_participations=self.max_participations)

    def fitted(self, rounds: Policy, population: int) -> Mapping[str, Any]:
        """Weight of a bit; and the largest number of rounds of a client, where noise is found for fewer than all.

        Raises:
            InvalidExperiment: if too few clients may take part in some rounds.
        """
        rule = self.participation_rule(rounds.count)
        if rule is not None:
            rule.check_clients(population, rounds.cohort_of(population))
            return super().fitted(rounds, population)
        # The noise is found for so many: clients that come and go must not be asked more often.
        drawn = most_rounds(rounds, population)
        is_bound = self.epsilon is not None and drawn < rounds.count
        return {"privacy.max_participations": drawn} if is_bound else super().fitted(rounds, population)

    def participations(self, rounds: Policy, population: int) -> int:
        """Largest number of rounds that a client takes part in.

        Args:
            rounds: policy of the rounds.
            population: number of clients of the roster.
        """
        rule = self.participation_rule(rounds.count)
        drawn = most_rounds(rounds, population)
        return drawn if rule is None else min(rule.times, drawn)

    def release(self, sampling: float, fixed: FixedPoint | None = None) -> Release:
        """A Gaussian release of sensitivity 2C: a client's data are replaced by others."""
        return Release(noise_multiplier=self.multiplier / self.key_multiplier)

    def protection(self, source: NoiseSource) -> Protection | None:
        """The clip, and Gaussian noise of standard deviation z·C; None under ``unit: sample``."""
        if self.unit == "sample":
            return None
        return Protection(
            clip=self.sent_clip, noise_multiplier=self.multiplier, source=source, bit_weight=self.known_bit_weight
        )

    def plan(self, rounds: Policy, population: int) -> "PrivacyPlan":
        """Gaussian releases, one in each round that a client takes part in.

        Raises:
            InvalidExperiment: under ``unit: sample``.
        """
        from fed.privacy.plan import PrivacyPlan

        if self.unit == "sample":
            raise InvalidExperiment(
                "privacy.unit sample costs each client by its own number of samples: plan each client by itself"
            )
        return PrivacyPlan(
            kind="local",
            mechanism="Gaussian noise, rounded onto a grid and added to its message by each client",
            noise_multiplier=(self.noise_multiplier or 2.0) / self.key_multiplier,
            rounds=rounds.count,
            delta=self.delta,
            amplification="none is claimed, for the coordinator knows who takes part",
            clients=population,
            cohort=rounds.cohort_of(population),
            unit=self.unit,
            neighbourhood="replace-one",
            budget_epsilon=self.budget_epsilon,
            participations=self.participations(rounds, population),
            trust=("Nobody is trusted but the client: the coordinator learns no more of its data than ε says.",),
            not_covered=NOT_COVERED,
        )

    def plan_of_samples(
        self,
        rounds: Policy,
        population: int | None,
        *,
        sampling: float,
        steps: int,
        noise_multiplier: float = 1.0,
    ) -> "PrivacyPlan":
        """Plan of one client under ``unit: sample``, whose local steps are releases.

        Args:
            rounds: policy of the rounds.
            population: number of clients of the roster; None at a client, which does not know it.
            sampling: q in (0, 1], with which each of its samples is in a step's batch.
            steps: number of steps of a task.
            noise_multiplier: z > 0; 1 where another is sought.
        """
        from fed.privacy.plan import PrivacyPlan

        rule = self.participation_rule(rounds.count)
        if population is None:
            participations = rounds.count if rule is None else rule.times
        else:
            participations = self.participations(rounds, population)
        amplification = "none is claimed, for each step's batch holds all samples"
        if sampling < 1:
            amplification = (
                f"Poisson sampling: each sample is in a step's batch with probability {sampling:.4g}, by a draw of the "
                "client's own that nobody else sees"
            )
        return PrivacyPlan(
            kind="local",
            mechanism=(
                "Gaussian noise, rounded onto a grid and added by each client, in each of its local steps, to the sum "
                "of its samples' clipped gradients (DP-SGD)"
            ),
            noise_multiplier=noise_multiplier,
            rounds=rounds.count,
            delta=self.delta,
            sampling=sampling,
            amplification=amplification,
            releases_a_round=steps,
            unit="sample",
            neighbourhood="add-or-remove-one",
            budget_epsilon=self.budget_epsilon,
            participations=participations,
            trust=("Nobody is trusted but the client: the coordinator learns no more of a sample than ε says.",),
            not_covered=(
                "A client's number of samples, from which its number of steps and its ε follow.",
                "What is true of all samples of a client together.",
                *NOT_COVERED,
            ),
        )
