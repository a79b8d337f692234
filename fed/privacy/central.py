"""The kind central of the section ``privacy``: noise by a trusted coordinator."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fed.config.compatibility import Sections
from fed.errors import InvalidExperiment
from fed.privacy.clipping import largest_norm
from fed.privacy.kinds import NOT_COVERED, Policy, Privacy, most_rounds
from fed.privacy.noise import NoiseSource
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.protection import Protection
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.vectors.tensors import torch

if TYPE_CHECKING:
    from fed.privacy.plan import PrivacyPlan

__all__ = ["CentralPrivacy"]

_MANY = 2**62  # clients, more than any cohort has
_NUMBERS = 2**30  # of a message, for whose rounding lanes have room: a few thousandths of a per cent of the clip each


@dataclass(frozen=True, kw_only=True)
class CentralPrivacy(Privacy):
    r"""Noise by the coordinator: it sees each message, and what it makes of them protects every client.

    .. math::
        \bar u = \frac{1}{m} \left( \sum_{k ∈ S} u_k \min(1, \tfrac{C}{‖u_k‖}) + N(0, z² C² I) \right)

    m is the expected size of the cohort, whoever answers (McMahan et al. 2018, 1710.06963). With ``rounds.sampling:
    poisson`` each client's chance of being in a round amplifies the promise; without it a client's rounds are counted.
    """

    kind: ClassVar[str] = "central"

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse codecs, after which a message may be longer than the clip."""
        super().check_experiment(experiment)
        if self.unit == "sample":
            raise InvalidExperiment(
                f"privacy.unit sample is for noise in clients' own steps, got kind {self.kind}: write kind: local"
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
    def accepted_clip(self) -> float:
        """C: no client may change the sum by more, whatever it says."""
        return self.sent_clip

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
        return Protection(clip=self.sent_clip, bit_weight=self.known_bit_weight)

    def noisy_sum(self, source: NoiseSource, rounds: int) -> NoisySum:
        """Gaussian noise of standard deviation z·C on the sum."""
        return NoisySum(
            clip=self.sent_clip, noise_multiplier=self.multiplier, source=source, bit_weight=self.known_bit_weight
        )

    def lane_noise(self, least_honest: int) -> LaneNoise:
        """A clip in whole units, which leaves room for the rounding of the sum; the coordinator adds the noise."""
        clip = largest_norm(self.sent_clip, _NUMBERS)
        return LaneNoise(clip=clip, noise_multiplier=0.0, least_honest=least_honest, bit_weight=self.known_bit_weight)

    def plan(self, rounds: Policy, population: int) -> "PrivacyPlan":
        """Gaussian releases, one a round."""
        from fed.privacy.plan import PrivacyPlan

        sampling = self.amplified(rounds, population)
        trust = [
            "The coordinator is trusted: it sees each client's clipped message, and who takes part.",
            "Whoever sees the models that it publishes, clients included, learns no more than ε says.",
        ]
        if sampling < 1:
            trust.append(
                "It publishes neither its metrics nor its summary and report, which tell who or how many take part."
            )
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
            participations=None if sampling < 1 else most_rounds(rounds, population),
            trust=tuple(trust),
            not_covered=NOT_COVERED,
        )
