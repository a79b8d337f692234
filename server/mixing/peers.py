"""Rounds of peers: the models that are here, all simulated ones or a single real one, moved by a rule over ``mix``.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from fed.aggregators.peer_rule import PeerRule
from fed.clients.data import ClientId
from fed.server.mixing.neighbourhood import Attendance, Neighbourhood
from fed.server.mixing.primitives import Exchanges, LocalSteps, LocalTraining, PeerCodec
from fed.server.mixing.rule_states import first_codec_state, first_state, next_state, renewed_state
from fed.server.round_stats import Participation, RoundStats, mean_loss
from fed.storage.checkpoints import Tree, plain, refilled
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, torch

__all__ = ["Peers"]


@dataclass
class Peers:
    """Peers that start from one model, train on their own data and mix with their neighbours.

    The rule's state is float64, whatever the model's type: local steps start from the model rounded to that type, and
    what they add to it is added to the state. Integer buffers stay each peer's own. The mean over peers is the plain
    one, as doubly stochastic mixing keeps it; peers that have gone for good no longer count in it.

    Args:
        rule: rule of what a peer does in a round.
        neighbourhood: neighbourhood whose members are in the order of the clients.
        training: training of the peers.
        layout: layout of the model.
        first: first model of every peer: (vector [V], integers [I]).
        codec: codec of vectors that travel encoded; None where the rule has none.
        honest: rows of the peers whose models count in the mean and in measures; None: all.

    Attributes:
        copied: number of the last round, and the state of a single peer after it, for a peer that joins; None before
            the first round, and where there are several peers.

    Raises:
        InvalidExperiment: if the rule's state is none.
    """

    rule: PeerRule
    neighbourhood: Neighbourhood
    training: LocalTraining
    layout: Layout
    first: InitVar[tuple[Tensor, Tensor]]
    codec: PeerCodec | None = None
    honest: Sequence[int] | None = None

    def __post_init__(self, first: tuple[Tensor, Tensor]) -> None:
        """Give every peer the first model."""
        self._vectors_NV, self._integers_NI = (part.repeat(len(self.neighbourhood.members), 1) for part in first)
        self._state = first_state(self.rule, self._vectors_NV[:, : self.layout.parameters].double())
        self._codec_state = first_codec_state(self.codec, len(self.neighbourhood.members))
        self.copied: tuple[int, tuple[Tensor, ...]] | None = None

    @property
    def clock(self) -> float:
        """Seconds since the run began; simulated ones until the slowest peer of a round has finished it."""
        return self.neighbourhood.clock

    def model(self) -> tuple[Tensor, Tensor]:
        """The peers' mean: (vector [V], integers [I]), of integers the largest."""
        integers_HI = self._counted(self._integers_NI)
        vectors_HV = self._counted(self._vectors_NV)
        integers_I = integers_HI.amax(0) if integers_HI.numel() else integers_HI[0]
        # in float64: the mean of equal models is that model, to the bit
        return vectors_HV.mean(0, dtype=torch.float64).to(self.layout.dtype), integers_I

    def clients(self) -> Sequence[int | str]:
        """Peers whose models are here."""
        return self.neighbourhood.members

    def measures(self) -> dict[str, float]:
        r"""The consensus distance of the models that are here; a real peer knows its own alone, and counts the others.

        .. math:: \sqrt{\frac{1}{N} \sum_i \|x_i - \bar x\|^2}, \qquad \bar x = \frac{1}{N} \sum_i x_i

        x are the parameters of the rule's state, without buffers.
        """
        counts = self.neighbourhood.measures()
        if len(self.neighbourhood.members) == 1:
            return counts
        distance = self._counted(self._state.model_NP).var(0, correction=0).sum().sqrt()
        return {"consensus_distance": float(distance), **counts}

    def _counted(self, part_N: Tensor) -> Tensor:
        """The part's rows of honest peers that have not gone for good; of all honest ones, if all of these have."""
        gone = self.neighbourhood.gone
        if self.honest is None and not gone:
            return part_N
        rows = range(len(part_N)) if self.honest is None else self.honest
        return part_N[[row for row in rows if row not in gone] or [*rows]]

    def models(self) -> Mapping[ClientId, tuple[Tensor, Tensor]]:
        """Each peer's own model."""
        states = zip(self._vectors_NV, self._integers_NI, strict=True)
        return dict(zip(self.neighbourhood.members, states, strict=True))

    def occupation(self) -> dict[str, Any]:
        """Empty: how long peers wait for each other is not counted."""
        return {}

    def state(self) -> Tree:
        """State of the rule and of the codecs, the models' buffers, and the clocks."""
        buffers = {"buffers": self._vectors_NV[:, self.layout.parameters :], "integers": self._integers_NI}
        kept = {"rule": plain(self._state), "codec": dict(self._codec_state)}
        return {**kept, **buffers, "neighbourhood": self.neighbourhood.state()}

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self._state = refilled(self._state, state["rule"])
        self._vectors_NV = self._joined(self._state, state["buffers"])
        self._integers_NI = state["integers"]
        self._codec_state = state["codec"]
        self.neighbourhood.restore(state["neighbourhood"])

    def copy(self) -> tuple[Tensor, ...]:
        """A single peer's state as flat tensors, for one that joins: the rule's, then buffers and integers."""
        buffers_NR = self._vectors_NV[:, self.layout.parameters :]
        return tuple(part.flatten() for part in (*self._state, buffers_NR, self._integers_NI))

    def adopt(self, copied: Sequence[Tensor]) -> None:
        """Begin from another peer's :meth:`copy`."""
        *parts, buffers_NR, integers_NI = copied
        state = type(self._state)(*(new.view_as(old) for new, old in zip(parts, self._state, strict=True)))
        # a rule may have to put right what holds for the one that gave the copy alone
        self._state = self.rule.joined(state)
        self._vectors_NV = self._joined(self._state, buffers_NR.unsqueeze(0))
        self._integers_NI = integers_NI.unsqueeze(0)

    def round(self, number: int) -> RoundStats:
        """Peers that are there train, and mix where the rule says so; the others keep what they had.

        Raises:
            Diverged: if a peer's loss or model is no longer finite; all models stay as they were.
            InvalidExperiment: if the rule's state is none.
            RunFailed: if no peer is there, and none ever will be.
        """
        attendance = self.neighbourhood.begin(number)
        count = len(attendance.rows_S)
        # no peer is there: models stay, and the round counts nobody
        train_loss = self._step(number, attendance) if count else None
        self.neighbourhood.end()
        if len(self.neighbourhood.members) == 1:
            self.copied = number, self.copy()  # together: another thread gives it to those that join
        replied = [self.neighbourhood.members[row] for row in attendance.rows_S.tolist()]
        asked = [*replied, *attendance.failed]
        return RoundStats(
            selected=len(asked),
            replied=count,
            late=len(self.neighbourhood.left_out),
            failed=len(attendance.failed),
            bytes_up=self.neighbourhood.bytes_sent,
            bytes_down=self.neighbourhood.bytes_received,
            train_loss=train_loss,
            participation=Participation(asked, replied, [*self.neighbourhood.left_out], attendance.failed),
        )

    def _step(self, number: int, attendance: Attendance) -> float | None:
        """Move those that take part, and give their mean loss."""
        rows_S = attendance.rows_S
        params = self.layout.parameters
        # places copy, so that a round that diverges changes nothing
        codec_state = {name: part[rows_S] for name, part in self._codec_state.items()}
        members = [self.neighbourhood.members[row] for row in rows_S.tolist()]
        buffers_SR = self._vectors_NV[rows_S, params:]
        exchanges = Exchanges(
            self.neighbourhood,
            buffers_SR,
            self.codec,
            codec_state=codec_state,
            members=members,
            number=number,
        )
        local = LocalSteps(
            self.training,
            self.neighbourhood,
            attendance,
            number=number,
            step_size=self.training.lr_in(number, len(self.neighbourhood.members)),
            exchanges=exchanges,
            integers_SI=self._integers_NI[rows_S],
        )
        all_take_part = len(rows_S) == len(self._vectors_NV)

        def placed(part_N: Tensor, its_rows_S: Tensor) -> Tensor:
            # not in place: the last round's models may still be scored
            return its_rows_S if all_take_part else part_N.index_copy(0, rows_S, its_rows_S)

        before = self._state if all_take_part else type(self._state)(*(part[rows_S] for part in self._state))
        before = renewed_state(self.rule, before, attendance.anew_S)
        after = next_state(self.rule, before, local, exchanges)
        self._vectors_NV = placed(self._vectors_NV, self._joined(after, exchanges.buffers_NR))
        self._integers_NI = placed(self._integers_NI, local.integers_SI)
        self._state = type(after)(*map(placed, self._state, after))
        self._codec_state = {
            name: placed(part, exchanges.codec_state[name]) for name, part in self._codec_state.items()
        }
        return mean_loss(local.losses)

    def _joined(self, state: Any, buffers_SR: Tensor) -> Tensor:
        """Whole models [S, V], of which users see what the model's type holds."""
        return torch.cat([state.model_NP.to(self.layout.dtype), buffers_SR], 1)
