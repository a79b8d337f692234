"""Kinds of the section ``privacy``: where clients' messages are clipped, and who adds noise."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveFloat

from fed.config.compatibility import Feature, Sections, Term
from fed.config.components import Component
from fed.config.experiment import Experiment, Local
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment
from fed.privacy.adaptive_clip import AdaptiveClip, check_cohort
from fed.privacy.dp_sgd import SamplePrivacy, sampling_rate
from fed.privacy.noise import NoiseSource
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.participation import ParticipationRule
from fed.privacy.protection import Protection
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.vectors.tensors import torch

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan

__all__ = [
    "NOT_COVERED",
    "CentralPrivacy",
    "DistributedPrivacy",
    "LocalPrivacy",
    "Policy",
    "Privacy",
    "privacy_of",
    "with_noise",
]

_WAY_OUT = "set privacy to null"
_MANY = 2**62  # clients, more than any cohort has


class Policy(Protocol):
    """Policy of rounds, as far as the cost of a run depends on who takes part."""

    @property
    def count(self) -> int:
        """Number of rounds."""

    def cohort_of(self, population: int) -> int:
        """Number of clients that are to answer in a round."""

    @property
    def rule(self) -> Any:
        """Sampling rule."""


@dataclass(frozen=True, kw_only=True)
class Privacy(Hyperparameters, ABC):
    """Base of the kinds of differential privacy.

    Attributes:
        sees_single: True if the coordinator, or anybody else, may use each client's message by itself.
        takes_adaptive_clip: True if the clip may move from round to round.

    Args:
        clip: C, the largest L2 norm of a client's whole message, to which longer ones are shortened; under ``unit:
            sample`` of a sample's gradient. ``adaptive``: it follows a quantile of the messages' norms, which is found
            with noise of its own (Andrew et al. 2021, 1905.03871).
        quantile: γ in (0, 1), the share of messages that an adaptive clip leaves as they are.
        first_clip: C of the first round, where it is adaptive.
        noise_multiplier: z, the standard deviation of the noise over C; null: it is found for ``epsilon``.
        epsilon: ε of the whole run, for which the noise is found; null: ``noise_multiplier`` is given.
        delta: δ, the probability that the promise of ε does not hold; far below one over the number of clients.
        budget_epsilon: ε beyond which no round begins; null for no budget.
        unit: share of the data that one person may have: all data of a client, or one of its samples.
    """

    clip: PositiveFloat | Literal["adaptive"] = 1.0
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    first_clip: PositiveFloat = 0.1
    noise_multiplier: PositiveFloat | None = None
    epsilon: PositiveFloat | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    budget_epsilon: PositiveFloat | None = None
    unit: Literal["client", "sample"] = "client"

    sees_single: ClassVar[bool] = False
    takes_adaptive_clip: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Hold the keys to each other."""
        super().__post_init__()
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise InvalidExperiment(
                "privacy needs one of noise_multiplier and epsilon, got "
                f"{'neither' if self.epsilon is None else 'both'}: give the noise, or the ε that the run may cost"
            )

    @property
    def has_bits(self) -> bool:
        """True if clients say, in a number behind their message, whether it was clipped."""
        return self.clip == "adaptive"

    @property
    def fixed_clip(self) -> float:
        """C, where it is given.

        Raises:
            InvalidExperiment: if it is adaptive.
        """
        if self.clip == "adaptive":
            raise InvalidExperiment(
                "privacy.clip adaptive is for kind central, which releases a noisy quantile beside the sum: give a "
                "number as the clip, or write kind: central"
            )
        return self.clip

    @property
    def multiplier(self) -> float:
        """The noise multiplier z, which is known once the run is prepared."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier

    @property
    def multiplier_of_plan(self) -> float:
        """The noise multiplier z over that of a release, which is over the release's sensitivity."""
        return 1.0

    def needs(self) -> Sequence[Term]:
        """A coordinator whose rounds ask each client of a cohort once."""
        features = Feature.REPORTS, Feature.COORDINATOR, Feature.COHORTS, Feature.FIXED_COHORTS, Feature.MEAN_OF_ANSWERS
        return [_term(feature) for feature in features]

    def lacks(self) -> Sequence[Term]:
        """Clients' losses and numbers of samples; and each client's message, where it has no noise of its own."""
        terms = [_term(Feature.CLIENT_NUMBERS, "under which clients tell neither losses nor numbers of samples")]
        if not self.sees_single:
            terms.append(_term(Feature.SINGLE_ANSWERS, "which bounds what a client changes in a sum, and nowhere else"))
        return terms

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse what would tell something that the noise does not cover.

        Raises:
            InvalidExperiment: if there is such a thing.
        """
        if experiment.table is not None and experiment.table.sought:
            raise InvalidExperiment(
                "privacy does not cover the sums by which tables are standardized, got table.standardize: federated: "
                "write means and deviations, such as {age: [40, 12]}"
            )
        if not self.takes_adaptive_clip:
            self.fixed_clip  # noqa: B018  # for its error
        rounds = experiment.rounds.make()
        if getattr(rounds, "over_selection", 1.0) != 1:
            raise InvalidExperiment(
                "privacy needs rounds that count all whom they ask, for who answers first may depend on the data, got "
                f"rounds.over_selection {rounds.over_selection}: leave it out"
            )

    def check_layout(self, *, dtype: "torch.dtype", float_buffers: int, integer_buffers: int) -> None:
        """Refuse a model with numbers that follow from samples and are not clipped.

        Args:
            dtype: type of the model, and of messages on the wire.
            float_buffers: number of values in float buffers that leave a client.
            integer_buffers: number of values in integer buffers that leave a client.

        Raises:
            InvalidExperiment: if there are some.
        """
        if float_buffers or integer_buffers:
            raise InvalidExperiment(
                f"privacy does not cover a model's buffers, got {float_buffers} numbers in float buffers and "
                f"{integer_buffers} in integer ones: replace batch normalisation by GroupNorm, or give it "
                "track_running_stats=False"
            )

    def check_rounds(self, rounds: Policy, population: int) -> None:
        """Refuse cohorts that are too small for the noise.

        Args:
            rounds: policy of the rounds.
            population: number of clients of the roster.

        Raises:
            InvalidExperiment: if they are.
        """
        if self.clip == "adaptive":
            check_cohort(self.multiplier, rounds.cohort_of(population))

    def amplified(self, rounds: Policy, population: int) -> float:
        """Probability q with which each client is in a round, where nobody can tell who is; 1 elsewhere.

        Args:
            rounds: policy of the rounds.
            population: number of clients of the roster.
        """
        return 1.0

    @property
    def accepted_clip(self) -> float | None:
        """Largest L2 norm of a message that the coordinator accepts; None: any."""
        return None

    @abstractmethod
    def release(self, sampling: float, fixed: FixedPoint | None = None) -> Release:
        """Release of a round, to a client that may be in it.

        Args:
            sampling: q, as :meth:`amplified` says.
            fixed: fixed point of the messages under secure aggregation; None without.
        """

    def releases(
        self,
        sampling: float,
        fixed: FixedPoint | None = None,
        *,
        number: int,
        rounds: int,
        is_repeated: bool = False,
    ) -> dict[Release, int]:
        """Releases of one round, with their counts.

        Args:
            sampling: q, as :meth:`amplified` says.
            fixed: fixed point of the messages under secure aggregation; None without.
            number: number of the round, from 1.
            rounds: number of rounds of the run.
            is_repeated: True if the round has been released before, with other noise.
        """
        return {self.release(sampling, fixed): 1}

    def costs_all(self, sampling: float) -> bool:
        """True if a round costs every client the same, because nobody can tell who is in it.

        Args:
            sampling: q, as :meth:`amplified` says.
        """
        return sampling < 1

    def participation_rule(self, rounds: int) -> ParticipationRule | None:
        """Rule of who may be asked, which the coordinator keeps to; None: anybody at any time.

        Args:
            rounds: number of rounds of the run.
        """
        return None

    def fitted(self, rounds: Policy, population: int) -> Mapping[str, Any]:
        """Keys of the experiment that follow from its clients, with their values.

        Args:
            rounds: policy of the rounds.
            population: number of clients.
        """
        return {}

    @abstractmethod
    def protection(self, source: NoiseSource) -> Protection | None:
        """Protection of a client's message before it is encoded; None where it has none.

        Args:
            source: source of noise.
        """

    def lane_noise(self, least_honest: int) -> LaneNoise | None:
        """Clip and noise of messages that secure aggregation adds; None where these have none.

        Args:
            least_honest: h, smallest number of honest clients in a sum.
        """
        return None

    def of_samples(self) -> SamplePrivacy | None:
        """Clip and noise of each local step; None where whole messages are protected."""
        return None

    def noisy_sum(self, source: NoiseSource, rounds: int) -> NoisySum | AdaptiveClip | None:
        """Noise of the coordinator on the sum of the messages; None where it adds none.

        Args:
            source: source of noise.
            rounds: number of rounds of the run.
        """
        return None

    @abstractmethod
    def plan(self, rounds: Policy, population: int) -> "PrivacyPlan":
        """Plan of what a run will release.

        Args:
            rounds: policy of the rounds.
            population: number of clients of the roster.
        """


@dataclass(frozen=True, kw_only=True)
class CentralPrivacy(Privacy):
    r"""Noise by the coordinator: it sees each message, and what it makes of them protects every client.

    .. math::
        \bar u = \frac{1}{m} \left( \sum_{k ∈ S} u_k \min(1, \tfrac{C}{‖u_k‖}) + N(0, z² C² I) \right)

    m is the expected size of the cohort, whoever answers (McMahan et al. 2018, 1710.06963). With ``rounds.sampling:
    poisson`` each client's chance of being in a round amplifies the promise; without it a client's rounds are counted.
    """

    takes_adaptive_clip: ClassVar[bool] = True
    kind: ClassVar[str] = "central"

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse codecs, after which a message may be longer than the clip."""
        super().check_experiment(experiment)
        if self.unit == "sample":
            raise InvalidExperiment(
                f"privacy.unit sample is for noise in clients' own steps, got kind {self.kind}: write kind: local"
            )
        if self.clip == "adaptive" and experiment.secure_aggregation is not None:
            raise InvalidExperiment(
                "privacy.clip adaptive moves from round to round, and under secure_aggregation it is fixed: give a "
                "number as the clip"
            )
        # A sum of too few is not revealed at all: one client more would add the others' messages too.
        if experiment.secure_aggregation is not None and self.amplified(experiment.rounds.make(), _MANY) < 1:
            raise InvalidExperiment(
                f"privacy {self.kind} needs sums of any number of clients where cohorts are drawn by Poisson sampling, "
                "and secure_aggregation reveals none of few: write rounds.sampling: uniform, or set secure_aggregation "
                "to null"
            )
        lossy = [section.kind for section in experiment.uplink if section.kind != "zstd"]
        if lossy:
            raise InvalidExperiment(
                f"privacy {self.kind} needs messages that arrive as they were clipped, got uplink "
                f"{', '.join(lossy)}: leave the codecs out, or write privacy kind: local, whose noise comes before them"
            )
        if getattr(experiment.algorithm.make(), "votes", False):
            raise InvalidExperiment(
                f"privacy {self.kind} bounds the length of messages, got algorithm "
                f"{experiment.algorithm.kind}, which counts their signs: choose one such as fedavg"
            )

    def check_layout(self, *, dtype: "torch.dtype", float_buffers: int, integer_buffers: int) -> None:
        """Refuse models of 16 bits too, whose messages are rounded by more than the bound has room for."""
        super().check_layout(dtype=dtype, float_buffers=float_buffers, integer_buffers=integer_buffers)
        if dtype not in (torch.float32, torch.float64):
            raise InvalidExperiment(
                f"privacy {self.kind} needs a model of float32 or float64, for rounding to fewer bits makes clipped "
                f"messages longer, got {str(dtype).removeprefix('torch.')}: widen it, and write local.precision for "
                "arithmetic of 16 bits"
            )

    @property
    def accepted_clip(self) -> float | None:
        """C: no client may change the sum by more, whatever it says; None where tasks say it."""
        return None if self.clip == "adaptive" else self.clip

    def amplified(self, rounds: Policy, population: int) -> float:
        """Cohort over population under Poisson sampling."""
        if not getattr(rounds.rule, "amplifies", False):
            return 1.0
        return min(rounds.cohort_of(population) / population, 1.0)

    def release(self, sampling: float, fixed: FixedPoint | None = None) -> Release:
        """A Gaussian release of sensitivity C: a client is in the sum, or is not."""
        return Release(noise_multiplier=self.multiplier, sampling=sampling)

    def protection(self, source: NoiseSource) -> Protection:
        """The clip alone."""
        return Protection(clip=None if self.clip == "adaptive" else self.clip)

    def noisy_sum(self, source: NoiseSource, rounds: int) -> NoisySum | AdaptiveClip:
        """Gaussian noise of standard deviation z·C on the sum."""
        if self.clip == "adaptive":
            return AdaptiveClip(self.first_clip, self.quantile, self.multiplier, source)
        return NoisySum(clip=self.clip, noise_multiplier=self.multiplier, source=source)

    def lane_noise(self, least_honest: int) -> LaneNoise:
        """A clip in whole units, which leaves no message longer than C; the coordinator adds the noise."""
        return LaneNoise(clip=self.fixed_clip, noise_multiplier=0.0, least_honest=least_honest)

    def plan(self, rounds: Policy, population: int) -> "PrivacyPlan":
        """Gaussian releases, one a round."""
        from fed.privacy.plan import PrivacyPlan

        sampling = self.amplified(rounds, population)
        if sampling < 1:
            why = (
                f"Poisson sampling: each of the {population} clients of the roster is in a round with probability "
                f"{sampling:g}, whether it is there or not, and nobody but the coordinator knows who"
            )
        else:
            why = "none is claimed, for cohorts are not drawn by Poisson sampling: write rounds.sampling: poisson"
        return PrivacyPlan(
            kind=self.kind,
            mechanism="Gaussian noise, rounded onto a grid and added to the sum by the coordinator",
            noise_multiplier=self.noise_multiplier or 1.0,
            rounds=rounds.count,
            delta=self.delta,
            sampling=sampling,
            amplification=why,
            clients=population,
            cohort=rounds.cohort_of(population),
            unit=self.unit,
            neighbourhood="add-or-remove-one",
            budget_epsilon=self.budget_epsilon,
            participations=None if sampling < 1 else _most_rounds(rounds, population),
            trust=(
                "The coordinator is trusted: it sees each client's clipped message, and who takes part.",
                "Whoever sees the models that it publishes, clients included, learns no more than ε says.",
            ),
            not_covered=NOT_COVERED,
        )


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
            participations=_most_rounds(rounds, population),
            trust=("Nobody is trusted but the client: the coordinator learns no more of its data than ε says.",),
            not_covered=NOT_COVERED,
        )


@dataclass(frozen=True, kw_only=True)
class DistributedPrivacy(Privacy):
    r"""Noise by the clients together, under secure aggregation: the coordinator sees their sum alone, with its noise.

    .. math:: q_k = \left⌊ \frac{Δ_2}{C} u_k \min(1, \tfrac{C}{‖u_k‖}) \right⌋_0 + \operatorname{Skellam}(z² Δ_2² / h)

    h is the smallest number of honest clients in a sum that clients reveal, by ``secure_aggregation.minimum_cohort``
    and ``corrupt``, so that a sum of more has more noise (Agarwal et al. 2021, 2110.04995). A client that drops out
    adds none, and those that are left add enough. ``secure_aggregation.clip`` is not used.
    """

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

    def protection(self, source: NoiseSource) -> None:
        """None: messages are clipped and get their noise as lanes."""

    def lane_noise(self, least_honest: int) -> LaneNoise:
        """Skellam noise, of which h clients add a variance of z²C²."""
        return LaneNoise(clip=self.fixed_clip, noise_multiplier=self.multiplier, least_honest=least_honest)

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
            participations=_most_rounds(rounds, population),
            trust=(
                "The coordinator is not trusted with single messages: secure aggregation shows it their sum alone.",
                "As many clients as secure_aggregation.corrupt says may collude with it; the others add all the noise.",
            ),
            not_covered=NOT_COVERED,
        )


_UNITS = 2.0**16  # of a clip, in lanes of 32 bits with a hundred clients
_NUMBERS = 2**30  # of a message, for a plan that is made before the model is known; what they cost is below 10⁻⁶
NOT_COVERED = (
    "That a client takes part, when it answers, and how often it fails.",
    "The number of clients, and what they say of their samples when they join: shapes, types and labels.",
    "Data that the coordinator has itself, such as its test set, and scores on them.",
    "What is found by running other experiments on the same data, unless their cost is added.",
)


def _most_rounds(rounds: Policy, population: int) -> int:
    """Largest number of rounds in which one client takes part."""
    most: int = rounds.rule.most_rounds(rounds.count, rounds.cohort_of(population), population)
    return most


class _Private(Protocol):
    @property
    def privacy(self) -> Component | None: ...


def privacy_of(experiment: _Private) -> Privacy | None:
    """Settings of an experiment's differential privacy; None where it has none."""
    section = experiment.privacy
    if section is None:
        return None
    settings: Privacy = section.make()
    return settings


def with_noise(experiment: Experiment, population: int, steps: Mapping[int, int] | None = None) -> Experiment:
    """The experiment with the keys of ``privacy`` that follow from its clients, and the noise for its ``epsilon``.

    Args:
        experiment: experiment of a run.
        population: number of clients, at least as many as take part.
        steps: number of samples of each client → number of local steps of its tasks, for ``unit: sample``; None: not
            known.

    Raises:
        InvalidExperiment: if no noise does, if its rounds are too small for it, or if the package dp-accounting is
            missing.
    """
    settings = privacy_of(experiment)
    if settings is None:
        return experiment
    if found_keys := settings.fitted(experiment.rounds.make(), population):
        # The separation is part of the experiment, as nodes and a resumed run see it.
        return with_noise(experiment.override(dict(found_keys)), population, steps)
    if settings.epsilon is None:
        settings.check_rounds(experiment.rounds.make(), population)
        return experiment
    from fed.privacy.accounting import noise_multiplier_for

    rounds = experiment.rounds.make()
    if settings.unit == "client":
        plans = [settings.plan(rounds, population)]
    else:
        plans = _plans_of_samples(settings, experiment.local, rounds=rounds, population=population, steps=steps)
    try:
        found = max(noise_multiplier_for(plan, settings.epsilon) for plan in plans)
    except ValueError as error:
        raise InvalidExperiment(f"privacy.epsilon cannot be reached: {error}") from None
    noise = found * settings.multiplier_of_plan
    resolved = experiment.override({"privacy.epsilon": None, "privacy.noise_multiplier": noise})
    return with_noise(resolved, population)  # for its checks


def _plans_of_samples(
    settings: Privacy, local: Local, *, rounds: Policy, population: int, steps: Mapping[int, int] | None
) -> "list[PrivacyPlan]":
    """Plan of the client of each number of samples."""
    from fed.privacy.plan import PrivacyPlan

    if steps is None:
        raise InvalidExperiment(
            "privacy.epsilon cannot be reached under unit: sample, for the clients' numbers of samples are not known "
            "before they join: give noise_multiplier"
        )
    return [
        PrivacyPlan(
            kind="local",
            mechanism="Gaussian noise, added to the sum of clipped gradients in each local step",
            noise_multiplier=1.0,
            rounds=rounds.count,
            delta=settings.delta,
            sampling=sampling_rate(samples, local.batch_size * local.accumulate),
            releases_a_round=steps_of_task,
            unit="sample",
            participations=_most_rounds(rounds, population),
        )
        for samples, steps_of_task in steps.items()
    ]


def _term(feature: Feature, why: str = "") -> Term:
    return Term(feature, way_out=_WAY_OUT, why=why, subject="privacy")
