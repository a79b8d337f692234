"""The kind local of the section ``privacy``: noise by each client."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fed.config.compatibility import Sections
from fed.errors import InvalidExperiment
from fed.privacy.dp_sgd import SamplePrivacy
from fed.privacy.kinds import NOT_COVERED, Policy, Privacy, most_rounds
from fed.privacy.noise import NoiseSource
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
    client, whose ε follows from its own number of samples. That number is not protected.
    """

    sees_single: ClassVar[bool] = True

    @property
    def multiplier_of_plan(self) -> float:
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

    def of_samples(self) -> SamplePrivacy | None:
        """Clip and noise of each local step, under ``unit: sample``."""
        if self.unit != "sample":
            return None
        return SamplePrivacy(clip=self.fixed_clip, noise_multiplier=self.multiplier)

    def release(self, sampling: float, fixed: FixedPoint | None = None) -> Release:
        """A Gaussian release of sensitivity 2C: a client's data are replaced by others."""
        return Release(noise_multiplier=self.multiplier / self.multiplier_of_plan)

    def protection(self, source: NoiseSource) -> Protection | None:
        """The clip, and Gaussian noise of standard deviation z·C; None under ``unit: sample``."""
        if self.unit == "sample":
            return None
        return Protection(clip=self.fixed_clip, noise_multiplier=self.multiplier, source=source)

    def plan(self, rounds: Policy, population: int) -> "PrivacyPlan":
        """Gaussian releases, one in each round that a client takes part in.

        Raises:
            InvalidExperiment: under ``unit: sample``.
        """
        from fed.privacy.plan import PrivacyPlan

        if self.unit == "sample":
            raise InvalidExperiment(
                "privacy.unit sample costs each client by its own number of samples, which the experiment does not "
                "say: see epsilon in the metrics of its run"
            )
        return PrivacyPlan(
            kind="local",
            mechanism="Gaussian noise, rounded onto a grid and added to its message by each client",
            noise_multiplier=(self.noise_multiplier or 2.0) / self.multiplier_of_plan,
            rounds=rounds.count,
            delta=self.delta,
            amplification="none is claimed, for the coordinator knows who takes part",
            clients=population,
            cohort=rounds.cohort_of(population),
            unit=self.unit,
            neighbourhood="replace-one",
            budget_epsilon=self.budget_epsilon,
            participations=most_rounds(rounds, population),
            trust=("Nobody is trusted but the client: the coordinator learns no more of its data than ε says.",),
            not_covered=NOT_COVERED,
        )
