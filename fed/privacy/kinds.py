"""Base of the kinds of the section ``privacy``: where clients' messages are clipped, and who adds noise."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveFloat

from fed.config.compatibility import Feature, Sections, Term
from fed.config.components import Component
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment
from fed.privacy.adaptive_clip import (
    LARGEST_WEIGHT,
    SMALLEST_WEIGHT,
    AdaptiveClip,
    bit_weight_for,
    check_share,
)
from fed.privacy.clipping import LARGEST_CLIP, SMALLEST_CLIP
from fed.privacy.noise import NoiseSource
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.participation import ParticipationRule
from fed.privacy.protection import Protection
from fed.privacy.releases import LARGEST_MULTIPLIER, SMALLEST_DELTA, SMALLEST_MULTIPLIER, Release
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.lane_noise import LaneNoise

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan
    from fed.vectors.tensors import torch

__all__ = ["NOT_COVERED", "Policy", "Privacy", "most_rounds", "privacy_of"]

NOT_COVERED = (
    "That a client takes part, when it answers, and how often it fails.",
    "The number of clients, and what they say of their samples when they join: shapes, types and labels.",
    "Data that the coordinator has itself, such as its test set, and scores on them.",
    "What is found by running other experiments on the same data, unless their cost is added.",
)

_WAY_OUT = "set privacy to null"
_LEAST_CLIP = 1e-12  # squares of messages that are longer are numbers, of gradients in float32 too
_MOST_CLIP = 1e12  # sums of clipped gradients in float32 are numbers


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
        shares_noise: True if a message has enough noise only beside others', so that each sum that it is in tells more.

    Args:
        clip: C, the largest L2 norm of a client's whole message, to which longer ones are shortened; under ``unit:
            sample`` of a sample's gradient. ``adaptive``: it follows a quantile of the messages' norms, which is found
            with noise of its own (Andrew et al. 2021, 1905.03871).
        quantile: γ in (0, 1), the share of messages that an adaptive clip leaves as they are.
        first_clip: C of the first round, where it is adaptive.
        bit_weight: β, weight of the bit by which an adaptive clip moves, against a message of the clip's length; null:
            one with which the noise of the share is a twentieth, as far as half of the cost reaches.
        noise_multiplier: z, the standard deviation of the noise over C; null: it is found for ``epsilon``. Where the
            clip is adaptive: over the joint length of message and bit, so that both together cost what z says.
        epsilon: ε of the whole run, for which the noise is found; null: ``noise_multiplier`` is given.
        delta: δ, the probability that the promise of ε does not hold; far below one over the number of clients.
        budget_epsilon: ε beyond which no round begins; null for no budget.
        unit: share of the data that one person may have: all data of a client, or one of its samples.
    """

    clip: Annotated[float, Field(ge=_LEAST_CLIP, le=_MOST_CLIP)] | Literal["adaptive"] = 1.0
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    first_clip: Annotated[float, Field(ge=SMALLEST_CLIP, le=LARGEST_CLIP)] = 0.1
    bit_weight: Annotated[float, Field(ge=SMALLEST_WEIGHT, le=LARGEST_WEIGHT)] | None = None
    noise_multiplier: Annotated[float, Field(ge=SMALLEST_MULTIPLIER, le=LARGEST_MULTIPLIER)] | None = None
    epsilon: PositiveFloat | None = None
    delta: Annotated[float, Field(ge=SMALLEST_DELTA, lt=1)] = 1e-5
    budget_epsilon: PositiveFloat | None = None
    unit: Literal["client", "sample"] = "client"

    sees_single: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

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
        """True if the clip is adaptive: clients say, in a number behind their message, whether it was clipped."""
        return self.clip == "adaptive"

    @property
    def sent_clip(self) -> float:
        """Largest L2 norm of a message as it is sent: C, or 1 in units of a clip that moves."""
        return 1.0 if self.clip == "adaptive" else self.clip

    @property
    def known_bit_weight(self) -> float:
        """The weight β, which is known once the run is prepared; 0 where the clip is given, and there are no bits.

        Raises:
            InvalidExperiment: if it is not known.
        """
        if not self.has_bits:
            return 0.0
        if self.bit_weight is None:
            raise InvalidExperiment(
                "privacy.clip adaptive needs bit_weight where the clients of a round are not known, got null: give it"
            )
        return self.bit_weight

    @property
    def multiplier(self) -> float:
        """The noise multiplier z, which is known once the run is prepared."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier

    @property
    def key_multiplier(self) -> float:
        """The key ``noise_multiplier``, which is over the clip, over z of a release, which is over its sensitivity."""
        return 1.0

    def needs(self) -> Sequence[Term]:
        """A coordinator whose rounds ask each client of a cohort once."""
        features = Feature.REPORTS, Feature.COORDINATOR, Feature.COHORTS, Feature.FIXED_COHORTS, Feature.MEAN_OF_ANSWERS
        return [_term(feature) for feature in features]

    def lacks(self) -> Sequence[Term]:
        """Clients' losses and numbers of samples; and each client's message, unless it has noise and a fixed clip."""
        terms = [_term(Feature.CLIENT_NUMBERS, "under which clients tell neither losses nor numbers of samples")]
        if self.has_bits or not self.sees_single:
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
        self._check_clip(experiment)
        rounds = experiment.rounds.make()
        if getattr(rounds, "over_selection", 1.0) != 1:
            raise InvalidExperiment(
                "privacy needs rounds that count all whom they ask, for who answers first may depend on the data, got "
                f"rounds.over_selection {rounds.over_selection}: leave it out"
            )

    def _check_clip(self, experiment: Sections) -> None:
        """Refuse an adaptive clip where it would be that of gradients, or where messages of several rounds are added.

        Raises:
            InvalidExperiment: if it would.
        """
        if not self.has_bits:
            return
        if self.unit == "sample":
            raise InvalidExperiment(
                "privacy.clip adaptive follows the norms of clients' messages, and under unit sample the gradient of "
                "each sample is clipped: give a number as the clip, or write unit: client"
            )
        if experiment.error_feedback.kind != "none":
            raise InvalidExperiment(
                "privacy.clip adaptive needs error_feedback none, for errors of earlier rounds are in units of other "
                f"clips, got {experiment.error_feedback.kind}: leave it out, or give a number as the clip"
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
        """Refuse cohorts that are too small for an adaptive clip.

        Args:
            rounds: policy of the rounds.
            population: number of clients of the roster.

        Raises:
            InvalidExperiment: if they are.
        """
        if self.has_bits:
            cohort = rounds.cohort_of(population)
            check_share(self.multiplier_of_sum(cohort), self.known_bit_weight, cohort)

    def multiplier_of_sum(self, clients: float) -> float:
        """The noise multiplier of a sum: z, unless each client adds noise of its own.

        Args:
            clients: number of clients in the sum.
        """
        return self.multiplier

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

    def releases_of_message(
        self, fixed: FixedPoint | None = None, *, number: int, earlier: Sequence[int], rounds: int
    ) -> Mapping[Release, int]:
        """Releases of one message to its client, who knows in which rounds it takes part; with their counts.

        Args:
            fixed: fixed point of the messages under secure aggregation; None without.
            number: number of the message's round, from 1.
            earlier: rounds of the run that hold earlier messages of the client.
            rounds: number of rounds of the run.
        """
        return {self.release(1.0, fixed): 1}

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
        """Keys of the experiment that follow from its clients, with their values: the weight of an adaptive clip's bit.

        Args:
            rounds: policy of the rounds.
            population: number of clients.
        """
        if not self.has_bits or self.bit_weight is not None or self.noise_multiplier is None:
            return {}
        cohort = rounds.cohort_of(population)
        return {"privacy.bit_weight": bit_weight_for(self.multiplier_of_sum(cohort), cohort)}

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

    def adaptive_clip(self) -> AdaptiveClip | None:
        """The clip of the first round, which moves; None where it does not."""
        return AdaptiveClip(self.first_clip, self.quantile) if self.has_bits else None

    def noisy_sum(self, source: NoiseSource, rounds: int) -> NoisySum | None:
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


def most_rounds(rounds: Policy, population: int) -> int:
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


def _term(feature: Feature, why: str = "") -> Term:
    return Term(feature, way_out=_WAY_OUT, why=why, subject="privacy")
