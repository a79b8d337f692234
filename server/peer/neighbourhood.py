"""Neighbourhood: what a peer sees of the others, and the exchanges that a rule makes with them.

Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from fed.aggregators.peer_rule import PeerRule, Received
from fed.errors import InvalidExperiment
from fed.mixing import Weights
from fed.storage.checkpoints import Tree

__all__ = ["Attendance", "Exchange", "Exchanges", "Neighbourhood", "first_state", "next_state"]


class Attendance(NamedTuple):
    """The peers of a round, of those that are here.

    Args:
        rows_S: the places of those that take part, ascending.
        steps_S: how many optimizer steps each takes where it is cut off in them; None: all.
        failed: how many others broke down, or went away too soon.
    """

    rows_S: Tensor
    steps_S: list[int | None]
    failed: int


class Exchange(Protocol):
    """One exchange of vectors with a round's neighbours."""

    def exchange(self, rows_NM: Tensor) -> tuple[Weights | None, Tensor]:
        """Send each row to its peer's neighbours, and wait for theirs.

        Returns:
            W of those that took part, None where peers never meet; what was sent to the rows that are here, [S, M]:
            ``senders_X`` are places in it.
        """


class Neighbourhood(Exchange, Protocol):
    """Peers that exchange vectors with their neighbours, in their own time.

    Attributes:
        bytes_sent: in this round, by the peers that are here.
        bytes_received: likewise.
    """

    bytes_sent: int
    bytes_received: int

    @property
    def members(self) -> Sequence[int | str]:
        """Peers whose rows are here, in the order of a topology's nodes."""

    @property
    def clock(self) -> float:
        """Seconds since the run began: simulated ones, or real ones. It is never turned back."""

    def begin(self, number: int) -> Attendance:
        """Find out who takes part in a round, numbered from 1."""

    def train(self, samples_seen_S: Sequence[int]) -> None:
        """Take note that those that take part have trained on this many samples."""

    def end(self) -> None:
        """End the round."""

    def state(self) -> Tree:
        """State for a checkpoint."""

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""


class Exchanges:
    """One round's :class:`fed.aggregators.peer_rule.Mix` over a neighbourhood.

    Attributes:
        buffers_NR: float buffers as they are now: trained by local steps, and mixed with the first exchange.

    Args:
        neighbourhood: of this round.
        buffers_NR: in the model's own type, in which all vectors travel.
    """

    def __init__(self, neighbourhood: Exchange, buffers_NR: Tensor) -> None:
        self.buffers_NR = buffers_NR
        self._neighbourhood = neighbourhood
        self._buffers_travel = True

    @overload
    def __call__(self, x_NM: Tensor, /) -> Tensor: ...
    @overload
    def __call__(self, x_NM: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...
    def __call__(self, x_NM: Tensor, /, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """W x, of several vectors in one message W times each."""
        own_NM = torch.cat([x_NM, *more], 1) if more else x_NM
        weights, sent_SM = self._exchanged(own_NM)
        mixed_NM = weights.mixed(own_NM, sent_SM)
        return torch.split(mixed_NM, [part.shape[1] for part in (x_NM, *more)], 1) if more else mixed_NM

    def neighbours(self, x_NM: Tensor, /) -> Iterator[Received]:
        """Single neighbours' vectors, in float64."""
        weights, sent_SM = self._exchanged(x_NM)
        for rows_K, senders_K, weights_K1 in weights.by_neighbour():
            yield Received(rows_K, weights_K1, sent_SM[senders_K].double())

    def _exchanged(self, own_NM: Tensor) -> tuple[Weights, Tensor]:
        """Rows after transport, in the type in which they travel; a row's own vector stays as it is."""
        size, sends_buffers = own_NM.shape[1], self._buffers_travel
        sent_NM = own_NM.to(self.buffers_NR.dtype)
        parts = torch.cat([sent_NM, self.buffers_NR], 1) if sends_buffers else sent_NM
        weights, sent_SM = self._neighbourhood.exchange(parts)
        if weights is None:
            raise InvalidExperiment(
                "a rule that mixes must have the primitive mix, so that its peers get a topology, got none: "
                'give the class primitive = "mix"'
            )
        if not sends_buffers:
            return weights, sent_SM
        self._buffers_travel = False
        # mixed in float64, kept in the type in which they travel
        self.buffers_NR = weights.mixed(self.buffers_NR, sent_SM[:, size:]).to(self.buffers_NR.dtype)
        return weights, sent_SM[:, :size]


def first_state(rule: PeerRule, params_NP: Tensor) -> Any:
    """A rule's state before the first round, held to its contract.

    Raises:
        InvalidExperiment: if it is another than :meth:`PeerRule.init` is to give.
    """
    return _held(rule, "init", rule.init(params_NP), params_NP.shape)


def next_state(rule: PeerRule, state: Any, descend: Any, mix: Exchanges) -> Any:
    """A rule's state after a round, held to its contract.

    Args:
        rule: makes one step.
        state: before the round.
        descend: the rule's :class:`fed.aggregators.peer_rule.Descend`.
        mix: its exchanges.

    Raises:
        InvalidExperiment: if it is another than :meth:`PeerRule.step` is to give.
    """
    return _held(rule, "step", rule.step(state, descend, mix), state.model_NP.shape)


def _held(rule: PeerRule, method: str, state: Any, shape: torch.Size) -> Any:
    named = f"{type(rule).__name__}.{method}"
    if "model_NP" not in getattr(state, "_fields", ()):
        raise InvalidExperiment(
            f"{named} must give a named tuple with the field model_NP, got {type(state).__name__}: write "
            "class State(NamedTuple), whose field model_NP is every peer's model"
        )
    for name, part in state._asdict().items():
        is_model = name == "model_NP"
        its_shape, dtype = (part.shape, part.dtype) if isinstance(part, Tensor) else ((), None)
        if (its_shape == shape and dtype == torch.float64) if is_model else its_shape[:1] == shape[:1]:
            continue
        got = f"{str(dtype)[6:]} {list(its_shape)}" if dtype else type(part).__name__
        must = f"float64 {list(shape)}" if is_model else f"a tensor with a row for each of {shape[0]} peers"
        raise InvalidExperiment(f"{named} must give {name} as {must}, got {got}: rules compute on rows of peers")
    return state
