"""Algorithms over ``mean`` as chains of small pieces, in the manner of optax.

A piece may act where clients report (clip, weigh), on a round's messages before they are averaged (bucketing), in place
of their mean (median), or on what that left (a server optimiser). Shapes: K, clients of a group; S, clients of a round;
M, numbers of a message; P, the model's parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment

__all__ = ["Chain", "Composed", "Piece", "Reducer", "State", "chain"]


@dataclass(frozen=True, kw_only=True)
class Piece(Hyperparameters):
    """A step of a chain; one that overrides nothing does nothing. The first part of messages is the update."""

    def report(self, report: Report, work: ClientWork) -> Report:
        """What clients answer in place of what the pieces before have made of their work."""
        return report

    def init(self, params_P: Tensor) -> Any:
        """What the piece keeps on the server before the first round: a named tuple of tensors, or None."""
        return None

    def apply(self, state: Any, update_P: Tensor) -> tuple[Any, Tensor]:
        """What it keeps, and what it makes of the round's update."""
        return state, update_P


@dataclass(frozen=True, kw_only=True)
class Reducer(Piece, ABC):
    """A piece that needs the single messages of a round."""

    def left(self, messages: int) -> int:
        """How many messages are left of so many that reach it.

        Raises:
            InvalidExperiment: if those are too few.
        """
        return messages

    @abstractmethod
    def reduce(
        self, state: Any, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[Any, Tensor, Tensor]:
        """What it keeps, and fewer or other messages with their weights; one alone is the round's mean.

        Args:
            state: what it kept until now.
            messages_SM: in the order of their tasks, in float64.
            weights_S: above 0.
            generator: the round's own stream.

        Raises:
            InvalidExperiment: if there are too few messages.
        """


class State(NamedTuple):
    """What the coordinator keeps."""

    model_P: Tensor
    kept: tuple[Any, ...]  # by each piece


class Composed(Aggregator):
    r"""An algorithm that is the chain of its pieces.

    .. math:: x ← x + (a_n ∘ … ∘ a_1)(\text{mean}_S \, (r_n ∘ … ∘ r_1)(y_i - x))

    A subclass says which with :meth:`pieces`, as a function of its hyper-parameters.
    """

    update_alone: ClassVar[bool] = True

    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """The chain, from the clients to the model."""

    @cached_property
    def _pieces(self) -> tuple[Piece, ...]:
        return tuple(self.pieces())

    @property
    def linear(self) -> bool:  # type: ignore[override]  # it depends on the pieces
        """Whether no piece needs single messages."""
        return not any(isinstance(piece, Reducer) for piece in self._pieces)

    def init(self, params_P: Tensor) -> State:
        """The model, and what the pieces keep."""
        return State(params_P, tuple(piece.init(params_P) for piece in self._pieces))

    def report(self, work: ClientWork) -> Report:
        """The update, weighted by samples, through the pieces."""
        report = super().report(work)
        for piece in self._pieces:
            report = piece.report(report, work)
        return report

    def check(self, replies: int) -> None:
        """Refuse rounds in which too few messages reach a piece."""
        for piece in self._pieces:
            replies = piece.left(replies) if isinstance(piece, Reducer) else replies

    def combine(
        self, state: State, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[State, Tensor]:
        """The messages through the pieces that need them; the weighted mean of what is left."""
        kept = []
        for piece, piece_state in zip(self._pieces, state.kept, strict=True):
            if isinstance(piece, Reducer):
                piece_state, messages_SM, weights_S = piece.reduce(piece_state, messages_SM, weights_S, generator)
            kept.append(piece_state)
        state = state._replace(kept=tuple(kept))
        if len(messages_SM) == 1:
            return state, messages_SM[0]
        return super().combine(state, messages_SM, weights_S, generator)

    def apply(self, state: State, reduced: Reduced) -> State:
        """The model plus the mean update through the pieces."""
        update_P, kept = reduced.update_P, []
        for piece, piece_state in zip(self._pieces, state.kept, strict=True):
            piece_state, update_P = piece.apply(piece_state, update_P)
            kept.append(piece_state)
        return State(state.model_P + update_P, tuple(kept))


@dataclass(frozen=True, kw_only=True)
class Chain(Composed):
    """Pieces in a row.

    Args:
        of: the pieces, from the clients to the model.
    """

    of: tuple[Piece, ...]

    def pieces(self) -> tuple[Piece, ...]:
        """Those given."""
        return self.of


def chain(*pieces: Piece) -> Chain:
    """An algorithm from pieces.

    Args:
        pieces: from the clients to the model; their mean stands between the last that reports and the first that
            applies.

    Raises:
        InvalidExperiment: if one of them is not a piece.

    Example:
        >>> import torch
        >>> from fed.aggregators.pieces import Momentum, Scale
        >>> rule = chain(Momentum(momentum=0.5), Scale(factor=2.0))
        >>> state = rule.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     state = rule.apply(state, Reduced((torch.ones(1),), clients=1, population=1))
        >>> state.model_P
        tensor([5.])
    """
    for piece in pieces:
        if not isinstance(piece, Piece):
            raise InvalidExperiment(f"a chain must be made of fed.aggregators.composition.Piece, got {piece!r}")
    return Chain(of=pieces)
