"""Bounds of robust rules: the number of messages needed to outvote f attackers among n clients.

Shapes: see :mod:`fed.layout`.
"""

import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeInt
from torch import Tensor

from fed.aggregators.transforms import Reducer
from fed.errors import InvalidExperiment

__all__ = ["Outvoting", "Point"]


@dataclass(frozen=True, kw_only=True)
class Outvoting(Reducer):
    """Base of rules that need n ≥ a f + b messages of a round.

    Args:
        attackers: f ≥ 0.

    Example:
        >>> from fed.aggregators.robust.selection import Krum
        >>> Krum(attackers=2).left(5)
        Traceback (most recent call last):
        fed.errors.InvalidExperiment: krum needs n ≥ 2f + 3 messages in a round, got n=5 with attackers f=2: raise \
rounds.cohort, or lower bucketing, until there are 7, or lower attackers
    """

    per_attacker: ClassVar[int] = 2
    """a."""
    beside: ClassVar[int] = 1
    """b."""

    attackers: NonNegativeInt = 0

    def left(self, messages: int) -> int:
        """One."""
        needed = self.per_attacker * self.attackers + self.beside
        if messages < needed:
            kind = re.sub(r"\B(?=[A-Z])", "_", type(self).__name__).lower()
            raise InvalidExperiment(
                f"{kind} needs n ≥ {self.per_attacker}f + {self.beside} messages in a round, got n={messages} with "
                f"attackers f={self.attackers}: raise rounds.cohort, or lower bucketing, until there are {needed}, or "
                "lower attackers"
            )
        return 1


@dataclass(frozen=True, kw_only=True)
class Point(Outvoting):
    """Base of rules that replace all messages by one point, and keep no state."""

    def reduce(
        self, state: None, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[None, Tensor, Tensor]:
        """The point, with the weight of all."""
        self.left(len(messages_SM))
        return None, self.point(messages_SM, weights_S).unsqueeze(0), weights_S.sum(0, keepdim=True)

    @abstractmethod
    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The point: [M]."""
