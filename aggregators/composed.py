"""Contract of a transform of updates, and algorithms over ``mean`` that are chains of transforms.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.aggregators.users_methods import explain_errors
from fed.config.hyperparameters import Hyperparameters
from fed.vectors.tensors import Tensor

__all__ = ["Composed", "Messages", "Reducer", "State", "Transform"]


@dataclass(frozen=True, kw_only=True)
class Transform(Hyperparameters):
    """A step of a chain; one that overrides nothing does nothing. The first part of messages is the update."""

    update_alone: ClassVar[bool] = True
    """True if a message stays the update alone; a class with a report of its own says so."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        explain_errors(cls)
        if "report" in vars(cls):
            cls.update_alone = vars(cls).get("update_alone", False)

    def report(self, report: Report, work: ClientWork) -> Report:
        """Report in place of the one that the transforms before have made."""
        return report

    def init(self, params_P: Tensor) -> Any:
        """Server state of the transform before the first round: a named tuple of tensors, or None."""
        return None

    def update(self, mean_update_P: Tensor, state: Any, params_P: Tensor) -> tuple[Tensor, Any]:
        """Update in place of the mean update, and the transform's next state.

        Args:
            mean_update_P: the round's mean update, as the transforms before leave it.
            state: the transform's state after the round before.
            params_P: the model that the update is added to.
        """
        return mean_update_P, state


class Messages(NamedTuple):
    """Messages of a round, in the order of their tasks.

    Args:
        vectors_SM: the messages, one in each row, in float64.
        weights_S: each message's weight, > 0.
    """

    vectors_SM: Tensor
    weights_S: Tensor

    def replaced_by(self, point_M: Tensor) -> "Messages":
        """A single message in the place of all, with their weight."""
        return Messages(point_M.unsqueeze(0), self.weights_S.sum(0, keepdim=True))


@dataclass(frozen=True, kw_only=True)
class Reducer(Transform, ABC):
    """Transform that needs the single messages of a round."""

    def left(self, messages: int) -> int:
        """Number of messages that this transform leaves of a round's ``messages``.

        Raises:
            InvalidExperiment: if the round has too few.
        """
        return messages

    @abstractmethod
    def reduce(self, state: Any, messages: Messages, generator: np.random.Generator) -> tuple[Any, Messages]:
        """Next state, and fewer or other messages; a single one is the round's mean.

        Args:
            state: the transform's state after the round before.
            messages: all messages of the round.
            generator: the round's own random stream.

        Raises:
            InvalidExperiment: if there are too few messages.
        """


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    kept: tuple[Any, ...]  # by each transform


class Composed(Aggregator):
    r"""An algorithm that is the chain of its transforms.

    .. math:: x ← x + (a_n ∘ … ∘ a_1)(\text{mean}_S \, (r_n ∘ … ∘ r_1)(y_i - x))

    A subclass says which with :meth:`transforms`, as a function of its hyper-parameters.
    """

    @abstractmethod
    def transforms(self) -> Sequence[Transform]:
        """The chain, from the clients to the model."""

    @cached_property
    def _transforms(self) -> tuple[Transform, ...]:
        return tuple(self.transforms())

    @property
    def linear(self) -> bool:  # type: ignore[override]  # it depends on the transforms
        """True if no transform needs single messages."""
        return not any(isinstance(transform, Reducer) for transform in self._transforms)

    @property
    def update_alone(self) -> bool:  # type: ignore[override]  # as above
        """True if no transform adds to a message."""
        return all(transform.update_alone for transform in self._transforms)

    def init(self, params_P: Tensor) -> State:
        """The model, and the transforms' states."""
        return State(params_P, tuple(transform.init(params_P) for transform in self._transforms))

    def report(self, work: ClientWork) -> Report:
        """The update, weighted by samples, through the transforms."""
        report = super().report(work)
        for transform in self._transforms:
            report = transform.report(report, work)
        return report

    def check(self, replies: int) -> None:
        """Refuse rounds in which too few messages reach a transform."""
        for transform in self._transforms:
            # Each transform sees what the one before it leaves: buckets make few of many.
            replies = transform.left(replies) if isinstance(transform, Reducer) else replies

    def combine(
        self, state: State, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[State, Tensor]:
        """The messages through the transforms that need them; the weighted mean of the remaining messages."""
        messages = Messages(messages_SM, weights_S)
        kept = []
        for transform, its_state in zip(self._transforms, state.kept, strict=True):
            if isinstance(transform, Reducer):
                its_state, messages = transform.reduce(its_state, messages, generator)
            kept.append(its_state)
        state = state._replace(kept=tuple(kept))
        if len(messages.vectors_SM) == 1:  # the mean of one, w m / w, need not have the bits of m
            return state, messages.vectors_SM[0]
        return super().combine(state, messages.vectors_SM, messages.weights_S, generator)

    def apply(self, state: State, reduced: Reduced) -> State:
        """The model plus the mean update through the transforms."""
        update_P = reduced.update_P
        kept = []
        for transform, its_state in zip(self._transforms, state.kept, strict=True):
            # All see the round's first model: the order of the chain changes updates, never what they are relative to.
            update_P, its_state = transform.update(update_P, its_state, state.model_P)
            kept.append(its_state)
        return State(state.model_P + update_P, tuple(kept))
