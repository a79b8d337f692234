"""Error feedback: a message lacks something of its update, which its client sends with later ones.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from fed.compression.blocks import as_bytes, from_bytes
from fed.compression.chain import CodecChain, check_order
from fed.compression.codec import Codec, CodecState, Draw, Rows, Values, later_errors
from fed.compression.pieces import empty
from fed.config.compatibility import Feature, Sections, Term
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment, InvalidPayload
from fed.vectors.tensors import Tensor, torch

__all__ = ["EF", "EF21", "Encoder", "ErrorFeedback", "NoFeedback", "ScaleAlone", "Sent", "error_unknown"]


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Hyperparameters):
    """Kinds of dealing with the difference between an update and its message.

    Attributes:
        scales: True if a chain that is no contraction is scaled, message by message, so that it becomes one.
        adds_up: True if the coordinator keeps the sum of all messages of all rounds, and moves the model by it.
    """

    scales: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse chains that make no sense, and feedback around a chain that has its own or none that helps."""
        for key, sections in (("uplink", experiment.uplink), ("downlink", experiment.downlink)):
            check_order(key, [section.make() for section in sections])
        for section in experiment.downlink:
            if reason := error_unknown(section.make()):
                raise InvalidExperiment(
                    f"downlink cannot hold {section.kind}, {reason}: each difference must carry the error of the "
                    "last one; choose another codec"
                )

    def init(self, values: Values) -> CodecState:
        """A client's state before its first task, [·] each; none unless a kind overrides this."""
        return {}

    @abstractmethod
    def wanted(self, update_KM: Tensor, state: CodecState) -> Tensor:
        """The vectors that are encoded in place of updates, [K, M]."""

    @abstractmethod
    def states(self, wanted_KM: Tensor, decoded_KM: Tensor, state: CodecState) -> tuple[CodecState, CodecState]:
        """The clients' states once their messages count, and if they are lost.

        Args:
            wanted_KM: the vectors that were encoded.
            decoded_KM: the vectors as the coordinator finds them.
            state: the clients' states before.
        """


@dataclass(frozen=True, kw_only=True)
class NoFeedback(ErrorFeedback):
    """No feedback: what a message lacks is lost."""

    scales: ClassVar[bool] = False

    def wanted(self, update_KM: Tensor, state: CodecState) -> Tensor:
        """The updates."""
        return update_KM

    def states(self, wanted_KM: Tensor, decoded_KM: Tensor, state: CodecState) -> tuple[CodecState, CodecState]:
        """No states: errors are lost."""
        return {}, {}


@dataclass(frozen=True, kw_only=True)
class ScaleAlone(NoFeedback):
    """No feedback, but chains become contractions: for rules of peers that keep the errors themselves."""

    scales: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class _Feedback(ErrorFeedback):
    """Base of the kinds that keep errors."""

    def needs(self) -> Sequence[Term]:
        """Clients that report, and parameters to which an earlier error can be added."""
        return (Term(Feature.REPORTS, "set error_feedback to none"), later_errors("set error_feedback to none"))

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse a chain that has a residual of its own, or whose error no client knows."""
        super().check_experiment(experiment)
        # Without codecs there is no error, and a client would keep a residual of zeros.
        if not experiment.uplink:
            raise InvalidExperiment(
                "error_feedback needs codecs whose errors it keeps, got uplink []: name a codec there, or set "
                "error_feedback to none"
            )
        for section in experiment.uplink:
            if reason := error_unknown(section.make()):
                raise InvalidExperiment(
                    f"error_feedback cannot keep the errors of {section.kind}, {reason}: set error_feedback to none, "
                    "or choose another codec"
                )


@dataclass(frozen=True, kw_only=True)
class EF(_Feedback):
    r"""The residual is sent with the next update (Seide et al. 2014; Karimireddy et al. 2019, 1901.09847).

    .. math:: p = Δ + γ e, \qquad e ← p - C(p)

    A message that is lost leaves e = p, and one that counts at a discount s leaves e = p − s C(p). A chain that is no
    contraction is scaled by what each message's error asks for, so that it becomes one:

    .. math:: C(p) ← \frac{C(p)}{1 + ω}, \qquad 1 + ω = \frac{‖C(p)‖²}{⟨p, C(p)⟩}

    Args:
        decay: γ in (0, 1], the share of the residual that is sent. Below 1 where clients take part so rarely that the
            model has moved on when a residual is sent.
    """

    decay: Annotated[float, Field(gt=0, le=1)] = 1.0

    def init(self, values: Values) -> CodecState:
        """A residual of zeros."""
        return {"residual": torch.zeros(values.numbers, dtype=values.dtype)}

    def wanted(self, update_KM: Tensor, state: CodecState) -> Tensor:
        """The updates with the residuals."""
        wanted_KM = torch.mul(state["residual"], self.decay, out=empty(update_KM.shape, update_KM.dtype))
        return wanted_KM.add_(update_KM)

    def states(self, wanted_KM: Tensor, decoded_KM: Tensor, state: CodecState) -> tuple[CodecState, CodecState]:
        """The rest that the message lacks, or all of it."""
        residual_KM = torch.sub(wanted_KM, decoded_KM, out=empty(wanted_KM.shape, wanted_KM.dtype))
        # Nothing of a lost message has arrived: all of it is still owed.
        return {"residual": residual_KM}, {"residual": wanted_KM}


@dataclass(frozen=True, kw_only=True)
class EF21(_Feedback):
    r"""Feedback by which clients send how their update differs from what they sent (Richtárik et al. 2021, 2106.05203).

    .. math:: c_i = C(Δ_i - g_i), \qquad g_i ← g_i + c_i, \qquad Δ = \sum_i p_i g_i

    The client keeps g_i, and the coordinator their weighted sum, so that the error vanishes where updates settle. All
    clients take part in every round; a message that is lost leaves g_i and the sum as they were. p_i is the client's
    share of the weights of all that have ever registered. A chain that is no contraction is scaled as under ``ef``.
    """

    adds_up: ClassVar[bool] = True

    def needs(self) -> Sequence[Term]:
        """Rounds with a cohort, and plain updates."""
        why = "because it counts a client's last update again where a message is lost"
        return (
            *super().needs(),
            Term(Feature.COHORTS, "set error_feedback to ef"),
            Term(Feature.CLIENT_NUMBERS, "set error_feedback to ef", "for each client's share of the weights"),
            Term(Feature.PLAIN_UPDATES, "set error_feedback to ef", why),
        )

    def lacks(self) -> Sequence[Term]:
        """Single answers, and messages from which an update can be read."""
        way_out = "set error_feedback to ef"
        why = "whose messages say how an update differs from the one before"
        return (
            Term(Feature.SINGLE_ANSWERS, way_out, "which keeps the sum of all updates alone"),
            Term(Feature.LEGIBLE_MESSAGES, way_out, why),
        )

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse rounds of some clients, too."""
        super().check_experiment(experiment)
        if (cohort := getattr(experiment.rounds, "cohort", "all")) != "all":
            raise InvalidExperiment(
                f"error_feedback ef21 needs all clients in every round, got rounds.cohort {cohort}: write rounds.cohort"
                " all, or set error_feedback to ef"
            )

    def init(self, values: Values) -> CodecState:
        """Zeros: nothing has been sent."""
        return {"sent": torch.zeros(values.numbers, dtype=values.dtype)}

    def wanted(self, update_KM: Tensor, state: CodecState) -> Tensor:
        """The updates minus the sum that was sent."""
        return update_KM - state["sent"]

    def states(self, wanted_KM: Tensor, decoded_KM: Tensor, state: CodecState) -> tuple[CodecState, CodecState]:
        """The sum that was sent, with the message and without it."""
        return {"sent": state["sent"] + decoded_KM}, {"sent": state["sent"]}


class Sent(NamedTuple):
    """Encoded vectors of K clients.

    Args:
        messages: K tensors of uint8.
        decoded_KM: vectors as the coordinator finds them, [K, M].
        counted: states of the clients once their messages count, [K, ·] each.
        lost: states of the clients if the messages are lost.
    """

    messages: list[Tensor]
    decoded_KM: Tensor
    counted: CodecState
    lost: CodecState


@dataclass(frozen=True)
class Encoder:
    """A chain of codecs with error feedback around it.

    Args:
        chain: chain of codecs.
        feedback: kind of error feedback; none is a kind too.
    """

    chain: CodecChain
    feedback: ErrorFeedback

    @property
    def most_bytes(self) -> int:
        """Bytes of a message that nobody exceeds."""
        return self._scale_bytes + self.chain.most_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of a message, or the most of them before lossless compression."""
        return self._scale_bytes + self.chain.size_bytes

    def init(self) -> CodecState:
        """A client's state before its first task, [·] each: the feedback's, and that of the codecs.

        Raises:
            InvalidExperiment: if both keep a tensor under one name.
        """
        kept = self.feedback.init(self.chain.values)
        coded = self.chain.init()
        if both := sorted(kept.keys() & coded.keys()):
            raise InvalidExperiment(
                f"{type(self.chain.lossy[0]).__name__} must keep its state under other names than "
                f"{type(self.feedback).__name__}, got {', '.join(both)} twice: rename it in the codec"
            )
        return {**kept, **coded}

    def encode(self, update_KM: Tensor, state: CodecState, draw: Draw) -> Sent:
        """Encode updates.

        Args:
            update_KM: finite values, [K, M].
            state: states of the clients, [K, ·] each.
            draw: the random streams.
        """
        wanted_KM = self.feedback.wanted(update_KM.to(self.chain.values.dtype), state)
        made = self.chain.encode(wanted_KM, state, draw)
        messages = [*made.content]
        # Decoded here as the coordinator does, so that the residual holds its rounding, too.
        decoded_KM = self.chain.decode(made.content, draw)
        if self._is_scaled:
            scales_K1 = _shrinking(wanted_KM, decoded_KM)
            decoded_KM = decoded_KM * scales_K1
            messages = [torch.cat(parts) for parts in zip(as_bytes(scales_K1), messages, strict=True)]
        counted, lost = self.feedback.states(wanted_KM, decoded_KM, state)
        # No name is in both: init has checked that, and the chain that codecs write their own names alone.
        return Sent(
            messages=messages,
            decoded_KM=decoded_KM,
            counted={**counted, **made.counted},
            lost={**lost, **made.lost},
        )

    def linear(self, wanted_KM: Tensor, draw: Draw) -> Tensor:
        """Values [K, ·] of a common chain, by a scale that makes it a contraction where errors are fed back.

        Args:
            wanted_KM: vectors to encode, [K, M].
            draw: the random streams.
        """
        return self.chain.linear(wanted_KM, draw) * (self.chain.shrinkage if self.feedback.scales else 1.0)

    def decode(self, messages: Rows, draw: Draw) -> Tensor:
        """Decode untrusted messages, [K, M].

        Args:
            messages: K tensors of uint8.
            draw: the random streams with which they were encoded.

        Raises:
            InvalidPayload: if one is no such message.
        """
        if not self._is_scaled:
            return self.chain.decode(messages, draw)
        taken = self._scale_bytes
        if any(len(message) < taken for message in messages):
            raise InvalidPayload(f"the scale of an encoded vector takes {taken} bytes")
        scales_K1 = from_bytes(torch.stack([message[:taken] for message in messages]), self.chain.values.dtype)
        return self.chain.decode([message[taken:] for message in messages], draw) * scales_K1

    @property
    def _is_scaled(self) -> bool:
        return self.feedback.scales and not self.chain.is_contraction

    @property
    def _scale_bytes(self) -> int:
        return self.chain.values.dtype.itemsize if self._is_scaled else 0


def error_unknown(codec: object) -> str:
    """Clause on a codec whose error nobody outside it can feed back; empty for the others.

    Example:
        >>> from fed.compression.sparsifiers import DGC, TopK
        >>> error_unknown(DGC()), error_unknown(TopK())
        ('which keeps a residual of its own', '')
    """
    if not isinstance(codec, Codec):
        return ""
    if codec.keeps_residual:
        return "which keeps a residual of its own"
    return "whose sums alone are read, by the coordinator, so that nobody knows its error" if codec.reads_sums else ""


def _shrinking(wanted_KM: Tensor, decoded_KM: Tensor) -> Tensor:
    """1/(1 + ω) of each message, [K, 1]: the scale at which its error is smallest, at least 0."""
    # A row alone: products of batches differ in the last bit.
    pairs = [*zip(wanted_KM.double(), decoded_KM.double(), strict=True)]
    common = torch.stack([torch.dot(wanted_M, decoded_M) for wanted_M, decoded_M in pairs])
    # In float64: squares of large numbers leave float32's range.
    square = torch.stack([torch.dot(decoded_M, decoded_M) for _, decoded_M in pairs])
    # Below 0 a message would point away from what was wanted.
    return (common / square.where(square > 0, 1)).clamp_min_(0).to(wanted_KM.dtype)[:, None]
