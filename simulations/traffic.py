"""What a run will send, known before its first round.

Shapes: P, the parameters that clients share; N peers.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fed.aggregators.base import Aggregator, Reduced
from fed.aggregators.client_side import message_sizes
from fed.layout import Layout

__all__ = ["CoordinatedTraffic"]


@dataclass(frozen=True)
class CoordinatedTraffic:
    """Models and what goes beside them, to clients and back, where every client of a round answers.

    Args:
        algorithm: what is broadcast and reported.
        shared: the layout of what leaves a client.
        population: how many clients there are.
        cohort: how many of them train in a round.
        rounds: how many there are.
    """

    algorithm: Aggregator
    shared: Layout
    population: int
    cohort: int
    rounds: int

    @cached_property
    def part_sizes(self) -> list[int]:
        """How many numbers each part of a client's message has; float buffers come beside them."""
        return message_sizes(self.algorithm, self._params_P, self.population)

    @property
    def message_size(self) -> int:
        """How many floating-point numbers a client answers."""
        return sum(self.part_sizes) + self.shared.size - self.shared.parameters

    @property
    def answer_bytes(self) -> int:
        """Bytes of a client's message and integers as they travel."""
        return self._bytes_of(self.message_size)

    @property
    def bytes_up(self) -> int:
        """What the coordinator gets, none of it where one client holds all data."""
        return 0 if self.algorithm.pools_data else self.rounds * self.cohort * self.answer_bytes

    @property
    def bytes_down(self) -> int:
        """What clients get. A broadcast may grow after the first round, as AFL's mixture does."""
        if self.algorithm.pools_data:
            return 0
        first = self.algorithm.init(self._params_P)
        means = tuple(torch.ones(size, dtype=torch.float64) for size in self.part_sizes)
        later = self.algorithm.apply(first, Reduced(means, self.cohort, self.population))
        beside = [sum(part.numel() for part in self.algorithm.broadcast(state)) for state in (first, later)]
        first_bytes, later_bytes = (self._bytes_of(self.shared.size + numbers) for numbers in beside)
        return self.cohort * (first_bytes + (self.rounds - 1) * later_bytes)

    @property
    def _params_P(self) -> Tensor:  # noqa: N802  # a shape suffix
        return torch.zeros(self.shared.parameters, dtype=torch.float64)

    def _bytes_of(self, numbers: int) -> int:
        return numbers * self.shared.dtype.itemsize + self.shared.integer_count * torch.int64.itemsize
