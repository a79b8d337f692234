"""Primitives of a rule's step: descend, the local steps of a round, and mix, its exchanges with neighbours.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import overload

from fed.aggregators.peer_rule import Received
from fed.clients.data import ClientId
from fed.clients.training.executor import Executor, Item
from fed.clients.training.group_trainer import rows_not_finite
from fed.clients.training.groups import Groups
from fed.clients.training.work_items import Train, label_of
from fed.clients.way_out import UpdateStages
from fed.compression.codec import CodecState, Draw
from fed.compression.feedback import Encoder
from fed.errors import Diverged, InvalidExperiment
from fed.server.mixing.neighbourhood import Attendance, EncodedRows, Exchange, Neighbourhood
from fed.vectors.mixing import Weights
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch

__all__ = ["Exchanges", "LocalSteps", "LocalTraining", "PeerCodec"]


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


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Local training of peers in all rounds.

    Args:
        sizes: number of samples of each peer.
        groups: groups of peers that train together.
        executor: executor that trains.
        lr_in: function from (round, peers) to the step size of local steps.
        stages: changes of what local steps add to models.
    """

    sizes: Sequence[int]
    groups: Groups
    executor: Executor
    lr_in: Callable[[int, int], float]
    stages: UpdateStages


@dataclass
class LocalSteps:
    """One round's :class:`fed.aggregators.peer_rule.Descend`: local steps of the peers that take part.

    Args:
        training: parts of the run that train peers.
        neighbourhood: neighbourhood that is told how much they have trained.
        attendance: peers that take part.
        number: number of the round, from 1.
        step_size: step size of each local step.
        exchanges: exchanges of the round, which hold the models' float buffers.
        integers_SI: integer buffers of those that take part.

    Attributes:
        losses: mean loss and number of samples of each peer that has trained.
    """

    training: LocalTraining
    neighbourhood: Neighbourhood
    attendance: Attendance
    _: KW_ONLY
    number: int
    step_size: float
    exchanges: Exchanges
    integers_SI: Tensor
    losses: list[tuple[float, int]] = field(default_factory=list)

    @cached_property
    def lr(self) -> float | Tensor:
        """The sum of step sizes over the local steps; a column where peers take different numbers of them."""
        steps_S = [*map(self.training.groups.steps, self._sizes_S, self.attendance.steps_S)]
        if len(set(steps_S)) == 1:
            return self.step_size * steps_S[0]
        return self.step_size * torch.tensor(steps_S, dtype=torch.float64).unsqueeze(1)

    def __call__(self, x_SP: Tensor) -> Tensor:
        """Every peer's local steps, in the model's type; what rounding to it takes away is given back.

        Raises:
            Diverged: naming a peer whose numbers are no longer finite.
        """
        buffers_SR = self.exchanges.buffers_NR
        rounded_SP = x_SP.to(buffers_SR.dtype)
        start_SV = torch.cat([rounded_SP, buffers_SR], 1)
        params_SV, self.integers_SI = self._trained(start_SV)
        self.neighbourhood.train([self._seen(row) for row in range(len(x_SP))])
        if self.training.stages:
            return self._changed(x_SP, start_SV, params_SV)
        self.exchanges.buffers_NR = params_SV[:, x_SP.shape[1] :]
        params_SP = params_SV[:, : x_SP.shape[1]]
        # what rounding took away is exact, as the difference of two numbers so close
        return params_SP if x_SP.dtype == rounded_SP.dtype else (x_SP - rounded_SP).add_(params_SP)

    def _changed(self, x_SP: Tensor, start_SV: Tensor, params_SV: Tensor) -> Tensor:
        """Models after local steps whose updates stages have changed."""
        parameters = x_SP.shape[1]
        rounds = [self.number] * len(x_SP)
        update_SV = self.training.stages(params_SV.double() - start_SV, rounds, self._members_S)
        if rows := rows_not_finite(update_SV.to(start_SV.dtype)):
            reason = "what stages make of its update is not finite"
            raise Diverged.of(self.number, self._members_S[rows[0]], reason)
        self.exchanges.buffers_NR = (start_SV[:, parameters:] + update_SV[:, parameters:]).to(start_SV.dtype)
        return x_SP + update_SV[:, :parameters]

    def _trained(self, start_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Models and integers after the local steps.

        Raises:
            Diverged: naming the first peer of those whose loss or model is no longer finite.
        """
        params_SV = torch.empty_like(start_SV)
        integers_SI = torch.empty_like(self.integers_SI)
        diverged: list[tuple[int, ClientId, str]] = []
        groups = self.training.groups.of(self._sizes_S, self.attendance.steps_S)
        tickets = self.training.executor.submit_all([self._item(rows, start_SV) for rows in groups])
        for ticket, rows in zip(
            tickets, groups, strict=True
        ):  # in turn, so that of several errors the same one is raised everywhere
            for _, trained, tensors in self.training.executor.results([ticket]):
                self.training.groups.note(trained.most_together, trained.uncaptured)
                if trained.diverged:
                    diverged += ((self._members_S.index(client), client, why) for client, why in trained.diverged)
                    continue
                params_SV[rows], integers_SI[rows] = tensors
                self.losses += zip(trained.train_losses, trained.samples, strict=True)
        if diverged:
            _, client, reason = min(diverged)
            raise Diverged.of(self.number, client, reason)
        return params_SV, integers_SI

    def _item(self, rows: list[int], start_SV: Tensor) -> Item:
        clients = tuple(self._members_S[row] for row in rows)
        cuts = tuple(self.attendance.steps_S[row] for row in rows)
        train = Train(clients, self.number, wants="models", lr=self.step_size, steps=cuts)
        models = (start_SV[rows], self.integers_SI[rows])
        cost = sum(map(self._seen, rows))
        return Item(train, models, label_of(train), cost=cost)

    def _seen(self, row: int) -> int:
        """Number of samples that a peer's steps see."""
        return self.training.groups.seen(self._sizes_S[row], self.attendance.steps_S[row])

    @cached_property
    def _members_S(self) -> list[ClientId]:  # noqa: N802  # a shape suffix
        return [self.neighbourhood.members[row] for row in self.attendance.rows_S]

    @cached_property
    def _sizes_S(self) -> list[int]:  # noqa: N802
        return [self.training.sizes[row] for row in self.attendance.rows_S]
