"""Plan of a private run: what it will release, and what is promised to whom, before anything is released."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from fed.privacy.releases import Release

__all__ = ["PrivacyPlan"]


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Releases that a private run will make, in numbers, and the words of its sheet.

    Args:
        kind: name of the kind, such as ``central``.
        mechanism: noun phrase on the noise and on who adds it, such as ``Gaussian noise, added by the coordinator``.
        noise_multiplier: z > 0, standard deviation of the noise over the sensitivity of what is released.
        rounds: number of rounds, > 0.
        delta: δ in (0, 1).
        key_multiplier: value of the experiment's key ``noise_multiplier`` over z; 2 where the sensitivity is twice the
            clip.
        sampling: q in (0, 1], where amplification by Poisson sampling is claimed; 1 where none is claimed.
        amplification: sentence on why amplification holds, or on why none is claimed.
        clients: number of clients on the roster; 0 where it is not known.
        cohort: expected number of clients of a round; 0 where it is not known.
        releases_a_round: number of releases of a round in which a unit takes part; the local steps of DP-SGD.
        sensitivities: s_1, …, s_T of a matrix mechanism, the sensitivity of its first t rounds at clip 1; empty for
            independent noise.
        skellam_l2: Δ₂ in whole units, where the noise is Skellam noise; None where it is Gaussian.
        skellam_l1: Δ₁ in whole units, with ``skellam_l2`` alone.
        unit: protected unit, all data of a client or one sample.
        neighbourhood: neighbouring data sets, those with one unit more or less, or with one unit replaced.
        budget_epsilon: ε at which the run halts; None where it has no budget.
        participations: number of the plan's rounds in which a unit takes part at most; None where any number is
            accounted for. In more rounds than the plan's it may take part as often in each such block.
        trust: sentences on who sees what, and so on whom the promise holds against.
        not_covered: sentences on what the promise does not cover.

    Example:
        >>> plan = PrivacyPlan(
        ...     kind="central",
        ...     mechanism="Gaussian noise, added by the coordinator",
        ...     noise_multiplier=1.0,
        ...     rounds=100,
        ...     delta=1e-5,
        ...     sampling=0.01,
        ... )
        >>> plan.releases()
        {Release(noise_multiplier=1.0, sampling=0.01, skellam_l2=None, skellam_l1=None): 100}
    """

    kind: str
    mechanism: str
    noise_multiplier: float
    rounds: int
    delta: float
    key_multiplier: float = 1.0
    sampling: float = 1.0
    amplification: str = "none is claimed"
    clients: int = 0
    cohort: float = 0.0
    releases_a_round: int = 1
    sensitivities: tuple[float, ...] = ()
    skellam_l2: float | None = None
    skellam_l1: float | None = None
    unit: Literal["client", "sample"] = "client"
    neighbourhood: Literal["add-or-remove-one", "replace-one"] = "add-or-remove-one"
    budget_epsilon: float | None = None
    participations: int | None = None
    trust: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse amplification that is not accounted for.

        Raises:
            ValueError: if sampling is claimed beside neighbours of which one unit is replaced.
        """
        if self.sampling < 1 and self.neighbourhood == "replace-one":
            raise ValueError(
                "amplification by Poisson sampling is accounted for between neighbours that differ by one unit more or "
                f"less, got sampling {self.sampling} and replace-one: claim no amplification"
            )

    def releases(self, rounds: int | None = None) -> dict[Release, int]:
        """Releases of the run, or of its first rounds, with their counts.

        Args:
            rounds: number of first rounds, ≥ 0; all rounds of the plan where it is None. Independent noise goes on
                for any number of rounds, a matrix mechanism for those of the plan.

        Raises:
            ValueError: if a matrix mechanism is asked for more rounds than it has.
        """
        rounds = self.rounds if rounds is None else rounds
        if not self.sensitivities:
            count = self._participations_of(rounds) * self.releases_a_round
            return {self._release(self.noise_multiplier): count} if count else {}
        if rounds > len(self.sensitivities):
            raise ValueError(
                f"the matrix mechanism is made for {len(self.sensitivities)} rounds, got {rounds}: plan it for as many"
            )
        return dict(Counter(self._matrix_releases(rounds)))

    def _participations_of(self, rounds: int) -> int:
        if self.participations is None:
            return rounds
        whole, rest = divmod(rounds, self.rounds)
        return whole * self.participations + min(rest, self.participations)

    def _release(self, noise_multiplier: float) -> Release:
        return Release(
            noise_multiplier=noise_multiplier,
            sampling=self.sampling,
            skellam_l2=self.skellam_l2,
            skellam_l1=self.skellam_l1,
        )

    def _matrix_releases(self, rounds: int) -> list[Release]:
        """A release of each round that adds to the sensitivity: 1/z_t² = (s_t² − s_{t−1}²)/z²."""
        releases = []
        before = 0.0
        for sensitivity in self.sensitivities[:rounds]:
            added = sensitivity**2 - before**2
            if added > 0:
                releases.append(self._release(self.noise_multiplier / math.sqrt(added)))
            before = sensitivity
        return releases

    def with_noise(self, noise_multiplier: float) -> Self:
        """The plan with another noise multiplier z > 0."""
        return replace(self, noise_multiplier=noise_multiplier)

    def with_cohort(self, cohort: float) -> Self:
        """The plan with another expected cohort, and with its probability where amplification is claimed."""
        amplified = self.sampling < 1 and self.clients > 0
        sampling = min(cohort / self.clients, 1.0) if amplified else self.sampling
        return replace(self, cohort=cohort, sampling=sampling)

    @staticmethod
    def union(*releases: Mapping[Release, int]) -> dict[Release, int]:
        """All releases of several runs or parts of a run, as one multiset."""
        total: Counter[Release] = Counter()
        for counts in releases:
            total.update(counts)
        return dict(total)
