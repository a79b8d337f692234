"""Participation: how often, and how far apart, one client takes part in the rounds of a run."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fed.errors import InvalidExperiment, RunFailed

__all__ = ["ParticipationRule", "Participations"]

_log = logging.getLogger(__name__)


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

    def check_clients(self, population: int, cohort: int) -> None:
        """Refuse a run for whose cohorts clients are too few.

        Args:
            population: number of clients.
            cohort: number of clients of a round.

        Raises:
            InvalidExperiment: if they are.
        """
        if cohort * self.rounds > population * self.times:
            raise InvalidExperiment(
                f"privacy.max_participations of {self.times} allows {population * self.times} participations of "
                f"{population} clients, got {self.rounds} rounds of {cohort}: raise it, or have fewer rounds"
            )


class Participations:
    """Record of who has been asked in which round, by which the rule is kept, whoever draws the cohorts.

    A client that was asked has taken part, whether it has answered or not: the model of that round may hold its answer.

    Args:
        rule: rule to keep.

    Example:
        >>> record = Participations(ParticipationRule(rounds=9, min_separation=3))
        >>> record.note(["a"], 1)
        >>> [record.allows("a", number) for number in (2, 3, 4)]
        [False, False, True]
    """

    def __init__(self, rule: ParticipationRule) -> None:
        self.rule = rule
        self._asked: dict[int | str, tuple[int, int]] = {}  # client → its last round, and its number of rounds
        self._few = 0

    def allows(self, client: int | str, number: int) -> bool:
        """True if a client may be asked.

        Args:
            client: the client.
            number: number of the round, from 1.
        """
        if client not in self._asked:
            return True
        last, times = self._asked[client]
        return number - last >= self.rule.min_separation and times < self.rule.times

    def say_if_few(self, eligible: int, wanted: int, number: int) -> None:
        """Warn where fewer clients may be asked than a round wants, at the 1st, 10th, 100th time and so on.

        Args:
            eligible: number of clients that may be asked.
            wanted: number of clients that the round wants.
            number: number of the round, from 1.
        """
        if eligible >= wanted:
            return
        self._few += 1
        if str(self._few).strip("0") == "1":  # a long run must not fill its log
            _log.warning(
                "round %d asks %d of the %d clients that it wants, for no other may take part, by "
                "privacy.min_separation and max_participations",
                number,
                eligible,
                wanted,
            )

    def note(self, clients: Iterable[int | str], number: int) -> None:
        """Note that clients are asked.

        Args:
            clients: clients that are asked, each once.
            number: number of the round, from 1.

        Raises:
            RunFailed: if one of them may not be asked.
        """
        for client in clients:
            if not self.allows(client, number):
                raise RunFailed(
                    f"round {number} would ask client {client} against privacy.min_separation = "
                    f"{self.rule.min_separation} and max_participations = {self.rule.times}: draw cohorts by "
                    "Rounds.draw, which leaves such clients out"
                )
            _, times = self._asked.get(client, (0, 0))
            self._asked[client] = (number, times + 1)

    def state(self) -> list[list[Any]]:
        """State for a checkpoint: client, last round and number of rounds of each."""
        return [[client, *asked] for client, asked in self._asked.items()]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        """Resume from what :meth:`state` wrote down."""
        self._asked = {client: (last, times) for client, last, times in state}
