"""Neighbourhood of a real peer: the neighbours that it mixes with in a round, over the streams of its service.

Neighbours are found from the members that are present, by the experiment's topology. Two members of different views do
not mix until they agree. A neighbour that is gone, late or refused is left out of the exchange at both ends. A peer
keeps the weight that such a neighbour would have had.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fed.server.mixing.neighbourhood import Attendance, EncodedRows
from fed.server.observer import NodeCame, NodeWent
from fed.server.peer.gossip.copies import Copies, Differences
from fed.server.peer.gossip.exchange import ExchangeKey, GossipExchange
from fed.server.peer.gossip.gossip_service import GossipService
from fed.server.peer.gossip.own_weights import OwnWeights
from fed.server.peer.members.member import Member
from fed.server.peer.members.service_thread import ServiceThread
from fed.server.peer.members.standing import Standing, round_of_most
from fed.server.peer.members.waiting import Waiting, nobody_came
from fed.server.telling import Observers
from fed.storage.checkpoints import Tree
from fed.topology import Topology
from fed.vectors.mixing import Weights
from fed.vectors.tensors import Tensor, torch
from fed.wire.messages import client_id_of

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["RealNeighbourhood"]

_log = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.05
_SAID_AFTER_S = 1.0
_MESSAGES_WITHIN_S = 2.0  # wait, after a resumption, for messages of rounds that the others have left behind


class RealNeighbourhood:
    """A :class:`fed.server.mixing.neighbourhood.Neighbourhood` of one peer, whose neighbours are other processes.

    Attributes:
        thread: event loop in which the service runs.
        left_out: names of the neighbours that were left out of this round's exchanges.
        neighbours: names of this round's neighbours: those that send to this peer and those that it sends to.
        last_names: names of the members when this peer last took part; empty before it has.

    Args:
        service: exchanges of this peer with others, not yet started.
        topology: function that makes the run's topology of the members.
        pushes: True where rules correct weights that do not keep the mean, as push-sum does.
        deadline_s: seconds that an exchange may take, > 0.
        waits_alone: True if this peer waits in rounds in which all others are away.
        observers: listeners to members that come and go, as a round finds them; None: no listeners.
    """

    def __init__(
        self,
        service: GossipService,
        topology: Callable[[Sequence[Member]], Topology],
        *,
        pushes: bool,
        deadline_s: float,
        waits_alone: bool,
        observers: Observers | None = None,
    ) -> None:
        self._observers = observers or Observers()
        self._there: frozenset[int | str] = frozenset()
        self.service = service
        self._time = service.clock
        self.bytes_sent = self.bytes_received = 0
        self.left_out: set[str] = set()
        self._left_out_before: set[str] = set()
        self.neighbours: frozenset[str] = frozenset()
        self.skips_to = 0
        self._moved = (0, 0)
        self._seen = 1  # members at the beginning of the round, with this peer
        self._weights = OwnWeights()
        self._topology = lru_cache(2)(topology)
        self._pushes = pushes
        self._deadline_s = deadline_s
        self._waits_alone = waits_alone
        self._exchange = 0
        self._has_mixed = False
        self._began_s = self._time.monotonic_s()
        self._earlier_s = 0.0
        self._written = 0  # the last round whose state was asked for, for a checkpoint
        self.last_names: list[str] = []
        self._copies = Copies()
        self.thread = ServiceThread(service)

    @property
    def members(self) -> Sequence[int | str]:
        """Members whose rows are here: this peer alone."""
        return (self.service.members.own.client,)

    @property
    def gone(self) -> tuple[int, ...]:
        """No rows: the only row that is here is this peer's own."""
        return ()

    @property
    def clock(self) -> float:
        """Seconds since the run began, those between a stop and its resumption left out."""
        return self._earlier_s + self._time.monotonic_s() - self._began_s

    def begin(self, number: int) -> Attendance:
        """Find a round's neighbours; a peer that most others have left behind skips to their round.

        Raises:
            RunFailed: if all others are away, and have not come for as long as this peer may wait.
        """
        self.bytes_sent = self.bytes_received = 0
        self.left_out = set()
        self.neighbours = frozenset()
        # without checkpoints a killed peer joins anew, and asks for no earlier message
        durable = self._written if self._keeps_checkpoints else number - 1
        self._exchange = 0
        self._has_mixed = False
        standing = self.thread.call(self.service.begin, number, durable)
        # rounds that it skips anyway need nobody
        if self._waits_alone and number >= self.skips_to:
            standing = self._await_others(number, standing)
        self._seen = len(standing.present)
        self._tell_presence(standing)
        if number >= self.skips_to:
            self._find_neighbours(number, standing)
            self._catch_up(number, standing)
        if number < self.skips_to:
            self.neighbours = frozenset()
            return Attendance(torch.empty(0, dtype=torch.int64), [])
        begins_anew = self.thread.call(self.service.enter_generation)
        if begins_anew:
            _log.info("round %d: this peer begins anew with the members that there are now", number)
        return Attendance(torch.zeros(1, dtype=torch.int64), [None], anew_S=[0] if begins_anew else [])

    def train(self, samples_seen_S: Sequence[int]) -> None:
        """Do nothing: real time passes by itself."""

    def exchange(self, *tensors_NM: Tensor, encoded: EncodedRows | None = None) -> tuple[Weights, tuple[Tensor, ...]]:
        """Send this peer's row to its neighbours, and wait for theirs until the deadline."""
        tensors = [tensor_NM[0] for tensor_NM in tensors_NM]
        differences = None
        if encoded is not None:
            tensors.append(encoded.messages[0])
            differences = self._differences(encoded)
        exchange = GossipExchange(
            ExchangeKey(self.service.round, self._exchange),
            tensors,
            # of another generation's state a sum would be wrong, so the view names it, too
            view=f"{self._standing.view}.{self.service.generations.own}",
            senders=frozenset(self._weights.of_senders),
            receivers=frozenset(self._weights.of_receivers),
            differences=differences,
        )
        self._exchange += 1
        self.thread.wait_for(self.service.send_and_await(exchange, self._deadline_s))
        rows = {name: exchange.received[name] for name in self._weights.of_senders if name in exchange.received}
        self.left_out |= exchange.senders - rows.keys()
        self._has_mixed |= bool(rows)
        tensors_SM = [
            torch.stack([row[place] for row in rows.values()]) if rows else tensor_NM[:0]
            for place, tensor_NM in enumerate(tensors_NM)
        ]
        if encoded is not None:
            messages = {name: row[len(tensors_NM)] for name, row in rows.items()}
            decoded_SM = self._decoded(encoded, messages, exchange.key.round)
            if differences is not None:
                decoded_SM = self._added(decoded_SM, rows, exchange.reached)
            tensors_SM.append(decoded_SM)
        return self._weights.after(rows.keys(), exchange.reached, pushes=self._pushes), tuple(tensors_SM)

    def end(self) -> None:
        """Log which neighbours were left out, and count the bytes of the round."""
        moved = self.thread.call(lambda: (self.service.bytes_sent, self.service.bytes_received))
        self.bytes_sent, self.bytes_received = (now - then for now, then in zip(moved, self._moved, strict=True))
        self._moved = moved
        if self.left_out - self._left_out_before:
            named = ", ".join(sorted(self.left_out))
            _log.warning("round %d: mixed without %s", self.service.round, named)
        self._left_out_before = self.left_out

    def measures(self) -> dict[str, float]:
        """Members at the beginning of the round, with this peer, its neighbours then, and 1 if it mixed with nobody."""
        is_alone = self._exchange > 0 and not self._has_mixed
        return {"members": self._seen, "neighbours": len(self.neighbours), "alone": int(is_alone)}

    def graph(self) -> "nx.Graph[str]":
        """Members and this peer's own neighbours in the last round in which it took part."""
        import networkx as nx

        own = self.service.members.own.name
        graph: nx.Graph[str] = nx.DiGraph() if self._pushes else nx.Graph()
        graph.add_nodes_from(self.last_names or [own])
        graph.add_edges_from((name, own) for name in self._weights.of_senders)
        graph.add_edges_from((own, name) for name in self._weights.of_receivers)
        return graph

    def state(self) -> Tree:
        """Clock, members and the neighbours whose vectors counted, for a checkpoint."""
        self._written = self.service.round
        included = self.thread.call(lambda: [[*key, *sorted(names)] for key, names in self.service.included.items()])
        copies = self._copies.state()
        return {
            "clock": self.clock,
            "members": self.last_names,
            "included": included,
            "copies": copies,
            "generations": self.thread.call(self.service.generations.state),
        }

    def restore(self, state: Tree) -> None:
        """Resume from a state that :meth:`state` gave."""
        self._earlier_s = state["clock"]
        self._began_s = self._time.monotonic_s()
        self.last_names = state["members"]
        self._copies.restore(state["copies"])
        self.thread.call(self.service.generations.restore, state["generations"])

    def resume(self, number: int, state: Mapping[str, Any] | None, *, keeps_checkpoints: bool) -> None:
        """Make the service ready, before it listens.

        Args:
            number: the last round whose state is here; 0: none.
            state: result of :meth:`state` after that round; None: the run begins.
            keeps_checkpoints: True if the run writes checkpoints.
        """
        self._keeps_checkpoints = keeps_checkpoints
        self._written = number
        said = [] if state is None else state["included"]
        included = {ExchangeKey(one, exchange): frozenset(names) for one, exchange, *names in said}
        self.thread.call(self.service.restore, number, included)
        if state is not None:
            self.restore(state)

    def _await_others(self, number: int, standing: Standing) -> Standing:
        """Wait while all others are away; if all have ended their rounds, this peer ends, too.

        Args:
            number: the number of the round that begins.
            standing: the standing as it begins.

        Returns:
            The standing once another is there.

        Raises:
            RunFailed: if none has come for as long as this peer may wait.
        """
        waiting = Waiting(self.service.patience_s)
        is_said = False
        while len(standing.present) == 1 and (others := self._others()):
            if self.thread.call(self.service.have_ended, others):
                self.skips_to = self.service.rounds + 1
                _log.warning("round %d: all others have ended, and this peer ends with the model that it has", number)
                return standing
            if waiting.is_exhausted(self._time.monotonic_s()):
                raise nobody_came(f"round {number} needs another peer, and all are away", waiting.limit_s)
            if waiting.waited_s > _SAID_AFTER_S and not is_said:
                is_said = True
                _log.warning(
                    "round %d waits: all others are away; this peer waits for up to %.0f s more, or goes on alone with "
                    "rounds.alone: go_on",
                    number,
                    waiting.left_s,
                )
            self._time.wait(_LOOKS_EVERY_S)
            self.thread.call(self.service.raise_failure)
            standing = self.thread.call(self.service.standing)
        return standing

    def _tell_presence(self, standing: Standing) -> None:
        """Tell observers of the others that have come and gone since the last round."""
        there = frozenset(member.client for member in standing.present) - {self.service.members.own.client}
        # as text, for numbers and names have no order in common
        for client in sorted(there - self._there, key=str):
            self._observers.tell(NodeCame(client))
        for client in sorted(self._there - there, key=str):
            self._observers.tell(NodeWent(client))
        self._there = there

    def _others(self) -> frozenset[str]:
        """Names of the others that were members when this peer last took part, or are known where it never did."""
        own = self.service.members.own.name
        last = frozenset(self.last_names) - {own} or self.thread.call(self.service.ready) - {own}
        return frozenset(self.thread.call(self.service.admitted, last))

    def _decoded(self, encoded: EncodedRows, messages: Mapping[str, Tensor], number: int) -> Tensor:
        """Vectors that neighbours' encoded messages give, a row for each.

        Args:
            encoded: row of this peer, with the decoder.
            messages: bytes of the neighbours' encoded vectors by name, in the order of the rows.
            number: the round, from 1.
        """
        if not messages:
            return encoded.vectors_NM[:0]
        senders = [client_id_of(name) for name in messages]
        return encoded.decode([*messages.values()], senders, number)

    def _differences(self, encoded: EncodedRows) -> Differences | None:
        """Vectors that this exchange's messages are added to; None where messages stand by themselves."""
        if encoded.before_NM is None:
            return None
        mine = self._weights
        before_P = encoded.before_NM[0]
        return self._copies.begin(self.service.round, before_P, receivers=mine.of_receivers, senders=mine.of_senders)

    def _added(self, decoded_SM: Tensor, rows: Mapping[str, Sequence[Tensor]], reached: frozenset[str]) -> Tensor:
        """Neighbours' vectors: decoded differences, added to the copies of the last vectors, which they replace."""
        if rows:
            before = [self._copies.before(name, row[-1]) for name, row in rows.items()]
            decoded_SM = torch.stack(before) + decoded_SM
        self._copies.end(dict(zip(rows, decoded_SM, strict=True)), reached, self.last_names)
        return decoded_SM

    def _find_neighbours(self, number: int, standing: Standing) -> None:
        self._standing = standing
        self.last_names = [member.name for member in standing.present]
        # without counts, which grow with each heartbeat: equal members have a topology that is cached
        alike = tuple(Member(member.name, member.address, 0) for member in standing.present)
        matrix_NN = self._topology(alike).matrix(number)
        self._weights = OwnWeights.of(matrix_NN, self.last_names, self.service.members.own.name)
        self.neighbours = self._weights.neighbours

    def _catch_up(self, number: int, standing: Standing) -> None:
        """Skip rounds that neighbours have left behind without this peer, where most of the others are ahead.

        A neighbour of this round waits in it for this peer, unless it has left this peer out. A neighbour may be
        further because it was sent this peer's vectors before this peer was killed; then it has kept its own vectors
        for this peer. If only a minority is ahead, this peer does not skip: the minority may come from the other side
        of a partition that has healed.
        """
        ahead = [name for name, its in standing.rounds.items() if name in self._weights.of_senders and its > number + 1]
        # messages of these rounds may have been here before this peer was killed
        is_replay = number <= self.service.replays_until
        until_s = self._time.monotonic_s() + (_MESSAGES_WITHIN_S if is_replay else 0.0)
        while ahead:
            ahead = [name for name in ahead if not self.thread.call(self.service.has_message, number, name)]
            if self._time.monotonic_s() >= until_s:
                break
            self._time.wait(_LOOKS_EVERY_S)
        if ahead and (later := round_of_most(number, [*standing.rounds.values()])):
            self.skips_to = later
            if is_replay:  # the others may have counted vectors of rounds that this peer skips
                self.thread.call(self.service.begin_generation)
            _log.warning("round %d: most of the others are ahead, and this peer goes on in round %d", number, later)
