"""Participation: how often, and how far apart, one client takes part in the rounds of a run."""

import math
from dataclasses import dataclass

__all__ = ["ParticipationRule"]


@dataclass(frozen=True, kw_only=True)
class ParticipationRule:
    """Rule of who may take part, on which the sensitivity of a matrix mechanism rests.

    A client takes part in rounds that are at least b apart, and in k of them at most. With b = 1 it may take part in
    every round.

    Args:
        rounds: T ≥ 1, number of rounds of the run.
        min_separation: b ≥ 1, rounds from one participation of a client to its next.
        max_participations: k ≥ 1, largest number of participations of a client; None: as many as T and b leave room
            for.

    Raises:
        ValueError: if one of them is below 1.

    Reference: Choquette-Choo et al. 2023, 2306.08153, "(k, b)-participation"; rounds are counted as there.

    Example:
        >>> ParticipationRule(rounds=10, min_separation=4).times
        3
    """

    rounds: int
    min_separation: int = 1
    max_participations: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no rule."""
        if min(self.rounds, self.min_separation, self.times) < 1:
            raise ValueError(f"rounds, min_separation and max_participations must be at least 1, got {self}")

    @property
    def times(self) -> int:
        """The largest number of times that a client can take part."""
        fitting = math.ceil(self.rounds / max(self.min_separation, 1))
        return fitting if self.max_participations is None else min(self.max_participations, fitting)
