"""Neighbourhood: what a peer sees of the others, and the exchanges that a rule makes with them.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload

from fed.aggregators.peer_rule import PeerRule, Received
from fed.compression.codec import CodecState, Draw
from fed.compression.feedback import Encoder
from fed.errors import InvalidExperiment
from fed.storage.checkpoints import Tree
from fed.vectors.mixing import Weights
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "Attendance",
    "EncodedRows",
    "Exchange",
    "Exchanges",
    "Neighbourhood",
    "PeerCodec",
    "first_codec_state",
    "first_state",
    "next_state",
    "renewed_state",
]


class Attendance(NamedTuple):
    """Peers that take part in a round, of those whose rows are here.

    Args:
        rows_S: places of those that take part, ascending.
        steps_S: number of optimizer steps after which each is cut off; None: it takes them all.
        failed: other peers, which broke down or went away too soon.
        anew_S: places in ``rows_S`` of the peers that begin anew, since members have come or gone for good.
    """

    rows_S: Tensor
    steps_S: list[int | None]
    failed: Sequence[int | str] = ()
    anew_S: Sequence[int] = ()


class EncodedRows(NamedTuple):
    """Vectors that travel encoded, one for each row that is here.

    Args:
        messages: message of each row, uint8, of unequal lengths.
        vectors_NM: vectors that receivers then have, in float64: the decoded messages, added to ``before_NM`` if there
            is one.
        before_NM: vectors that the messages are added to, of which every receiver keeps a copy: the ``vectors_NM`` of
            the row's last message, and before the first the same at all peers. A receiver that missed messages gets
            them with the next one, or ``before_NM`` itself where that is shorter. None: a message is the whole vector.
        decode: function from messages of one round, their senders and the round's number to vectors; for receivers that
            are not here.
        size_bytes: bytes of a message; with lossless compression the largest number before it.
        most_bytes: largest number of bytes that a message may have.
    """

    messages: Sequence[Tensor]
    vectors_NM: Tensor
    before_NM: Tensor | None
    decode: Callable[[Sequence[Tensor], Sequence[int | str], int], Tensor]
    size_bytes: int
    most_bytes: int


class Exchange(Protocol):
    """One exchange of messages with a round's neighbours."""

    def exchange(
        self, *tensors_NM: Tensor, encoded: EncodedRows | None = None
    ) -> tuple[Weights | None, tuple[Tensor, ...]]:
        """Send each row's message to its peer's neighbours, and wait for theirs.

        Args:
            tensors_NM: tensors of the messages that travel as they are, each in its own type.
            encoded: tensor that travels encoded; None: there is none.

        Returns:
            W of those that took part, None where peers never meet; of each tensor what was sent to the rows that
            are here, [S, M], the vectors of ``encoded`` last: ``senders_X`` are places in it.
        """


class Neighbourhood(Exchange, Protocol):
    """Peers that exchange vectors with their neighbours, in their own time.

    Attributes:
        bytes_sent: bytes sent in this round by the peers that are here.
        bytes_received: bytes received in this round by the peers that are here.
    """

    bytes_sent: int
    bytes_received: int

    @property
    def left_out(self) -> Collection[int | str]:
        """Peers whose messages came too late for one of this round's exchanges, and did not count."""

    @property
    def members(self) -> Sequence[int | str]:
        """Peers whose rows are here, in the order of a topology's nodes."""

    @property
    def gone(self) -> Collection[int]:
        """Places in ``members`` of those that have gone for good: their models count no more in the mean."""

    @property
    def clock(self) -> float:
        """Seconds since the run began: simulated ones, or real ones. It is never turned back."""

    def begin(self, number: int) -> Attendance:
        """Find out who takes part in a round, numbered from 1."""

    def train(self, samples_seen_S: Sequence[int]) -> None:
        """Take note that those that take part have trained on this many samples."""

    def end(self) -> None:
        """End the round."""

    def measures(self) -> dict[str, float]:
        """Counts of the round: ``alone``, the peers that mixed with nobody, and of a single peer the others it saw."""

    def state(self) -> Tree:
        """State for a checkpoint."""

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""


@dataclass(frozen=True)
class PeerCodec:
    """Codecs of what rules send by ``mix.encoded`` and ``mix.differences``.

    Args:
        encoder: encoder of vectors of the model's length.
        streams: random streams of the run.
    """

    encoder: Encoder
    streams: Streams

    def draw(self, members: Sequence[int | str], number: int) -> Draw:
        """The random streams of these peers' messages in a round."""
        return Draw(self.streams, [number] * len(members), members)

    def decode(self, messages: Sequence[Tensor], members: Sequence[int | str], number: int) -> Tensor:
        """Decode untrusted messages, [K, M] in float64.

        Args:
            messages: one tensor of uint8 a message.
            members: sender of each message.
            number: number of the round, from 1.

        Raises:
            InvalidPayload: if one is no such message.
        """
        return self.encoder.decode(messages, self.draw(members, number)).double()


class Exchanges:
    """One round's :class:`fed.aggregators.peer_rule.Mix` over a neighbourhood.

    Attributes:
        buffers_NR: float buffers as they are now: trained by local steps, and mixed with the first exchange.
        codec_state: state that peers keep for the codecs, [N, ·] each.

    Args:
        neighbourhood: neighbourhood in this round.
        buffers_NR: float buffers before the round, in the model's own type, in which vectors travel.
        codec: codec of vectors that travel encoded; None: the rule sends none.
        codec_state: state of the codecs before the round.
        members: peers whose rows are here.
        number: number of the round, from 1.
    """

    def __init__(
        self,
        neighbourhood: Exchange,
        buffers_NR: Tensor,
        codec: PeerCodec | None = None,
        codec_state: CodecState | None = None,
        members: Sequence[int | str] = (),
        number: int = 1,
    ) -> None:
        self.buffers_NR = buffers_NR
        self.codec_state = codec_state or {}
        self._neighbourhood = neighbourhood
        self._codec = codec
        self._members = members
        self._number = number
        self._buffers_travel = True

    @overload
    def __call__(self, x_NM: Tensor, /) -> Tensor: ...
    @overload
    def __call__(self, x_NM: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...
    def __call__(self, *tensors_NM: Tensor) -> Tensor | tuple[Tensor, ...]:
        """W x, of several vectors in one message W times each."""
        weights, tensors_SM = self._exchanged(*tensors_NM)
        mixed = tuple(map(weights.mixed, tensors_NM, tensors_SM))
        return mixed if len(mixed) > 1 else mixed[0]

    def neighbours(self, x_NM: Tensor, /) -> Iterator[Received]:
        """Single neighbours' vectors, in float64."""
        weights, (tensor_SM,) = self._exchanged(x_NM)
        for rows_K, senders_K, weights_K1 in weights.by_neighbour():
            yield Received(rows_K, weights_K1, tensor_SM[senders_K].double())

    def encoded(self, v_NP: Tensor, /) -> tuple[Tensor, Tensor]:
        """C(v) and W C(v)."""
        return self._encoded(v_NP, None)

    def differences(self, x_NP: Tensor, hat_NP: Tensor, /) -> tuple[Tensor, Tensor]:
        """x̂' = x̂ + C(x − x̂) and W x̂'."""
        return self._encoded(x_NP - hat_NP, hat_NP)

    def _encoded(self, v_NP: Tensor, sum_NP: Tensor | None) -> tuple[Tensor, Tensor]:
        """Own rows as neighbours decode them, added to ``sum_NP`` if there is one, and W times all such rows."""
        codec = self._codec
        if codec is None:
            raise InvalidExperiment(
                "a rule that encodes vectors must have compresses = True, got one without it: add it to the class"
            )
        made = codec.encoder.encode(v_NP, self.codec_state, codec.draw(self._members, self._number))
        self.codec_state = made.counted
        # as receivers decode it: all who keep a copy must keep the same one
        own_NP = made.decoded_KM.double() if sum_NP is None else sum_NP + made.decoded_KM
        message = EncodedRows(
            messages=made.messages,
            vectors_NM=own_NP,
            before_NM=sum_NP,
            decode=codec.decode,
            size_bytes=codec.encoder.size_bytes,
            most_bytes=codec.encoder.most_bytes,
        )
        weights, (tensor_SP,) = self._exchanged(encoded=message)
        return own_NP, weights.mixed(own_NP, tensor_SP)

    def _exchanged(self, *tensors_NM: Tensor, encoded: EncodedRows | None = None) -> tuple[Weights, Sequence[Tensor]]:
        """Rows after transport, in the type in which they travel; a row's own vector stays as it is."""
        buffers_NR = self.buffers_NR
        # single numbers are few bytes, and may be weights of which sums must be exact
        tensors = [tensor if tensor.shape[1] == 1 else tensor.to(buffers_NR.dtype) for tensor in tensors_NM]
        sends_buffers = self._buffers_travel and buffers_NR.shape[1] > 0
        beside = [buffers_NR] if sends_buffers else []
        weights, tensors_SM = self._neighbourhood.exchange(*beside, *tensors, encoded=encoded)
        if weights is None:
            raise InvalidExperiment(
                'the rule called mix, but its primitive is not "mix", so there is no topology: give its class '
                'primitive = "mix"'
            )
        # once a round, however many exchanges a rule makes of it
        self._buffers_travel = False
        if not sends_buffers:
            return weights, tensors_SM
        # mixed in float64, kept in the type in which they travel
        self.buffers_NR = weights.mixed(buffers_NR, tensors_SM[0]).to(buffers_NR.dtype)
        return weights, tensors_SM[1:]


def first_codec_state(codec: PeerCodec | None, peers: int) -> CodecState:
    """State of the codecs before the first round, a row for each peer."""
    return {name: part.repeat(peers, 1) for name, part in codec.encoder.init().items()} if codec else {}


def first_state(rule: PeerRule, params_NP: Tensor) -> Any:
    """A rule's state before the first round, checked against its contract.

    Raises:
        InvalidExperiment: if it is another than :meth:`PeerRule.init` is to give.
    """
    return _checked(rule, "init", rule.init(params_NP), params_NP.shape)


def next_state(rule: PeerRule, state: Any, descend: Any, mix: Exchanges) -> Any:
    """A rule's state after a round, checked against its contract.

    Args:
        rule: rule that makes one step.
        state: state of the rule before the round.
        descend: local steps of the round, a :class:`fed.aggregators.peer_rule.Descend`.
        mix: exchanges of the round.

    Raises:
        InvalidExperiment: if it is another than :meth:`PeerRule.step` is to give.
    """
    return _checked(rule, "step", rule.step(state, descend, mix), state.model_NP.shape)


def renewed_state(rule: PeerRule, state: Any, anew_S: Sequence[int]) -> Any:
    """A state in which some peers have begun anew, checked against the contract.

    Args:
        rule: rule that makes the new states.
        state: state of all that take part in a round.
        anew_S: rows of the peers that begin anew.

    Raises:
        InvalidExperiment: if :meth:`PeerRule.renewed` gives no such state.
    """
    if not rule.conserves_sum or not anew_S:  # without a sum over members nothing has to be put right
        return state
    rows_K = torch.tensor(anew_S)
    # the rule sees those alone that begin anew: the others keep their bits
    before = type(state)(*(part[rows_K] for part in state))
    after = _checked(rule, "renewed", rule.renewed(before), before.model_NP.shape)
    return type(state)(*(part.index_copy(0, rows_K, new) for part, new in zip(state, after, strict=True)))


def _checked(rule: PeerRule, method: str, state: Any, shape: "torch.Size") -> Any:
    named = f"{type(rule).__name__}.{method}"
    if "model_NP" not in getattr(state, "_fields", ()):
        raise InvalidExperiment(
            f"{named} must give a named tuple with the field model_NP, got {type(state).__name__}: write "
            "class State(NamedTuple), whose field model_NP is every peer's model"
        )
    for name, part in state._asdict().items():
        is_model = name == "model_NP"
        its_shape: tuple[int, ...] = part.shape if isinstance(part, Tensor) else ()
        dtype = part.dtype if isinstance(part, Tensor) else None
        is_like_models = its_shape == shape and dtype == torch.float64
        has_row_a_peer = its_shape[:1] == shape[:1]
        fits = is_like_models if is_model else has_row_a_peer
        if fits:
            continue
        got = f"{str(dtype)[6:]} {list(its_shape)}" if dtype else type(part).__name__  # without "torch."
        must = f"float64 {list(shape)}" if is_model else f"a tensor with a row for each of {shape[0]} peers"
        raise InvalidExperiment(f"{named} must give {name} as {must}, got {got}: rules compute on rows of peers")
    return state
