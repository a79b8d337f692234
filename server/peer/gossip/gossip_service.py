"""Service of a peer that gossips: the vectors that it exchanges with its neighbours.

A message stays on disk until its receivers have the outcome of its round on disk, or have not taken it. So a peer that
was killed finds, when it is back, all that its neighbours have sent it since its last checkpoint.

All of it runs in one event loop; a run in another thread begins rounds and exchanges.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fed.errors import InvalidPayload, RunFailed, os_errors_as
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.gossip.exchange import ExchangeKey, GossipExchange
from fed.server.peer.gossip.generations import MOST_GENERATIONS, Generations
from fed.server.peer.gossip.mailbox import CheckVectors, Inbox, Outbox, OutboxMessage, finite_tensors
from fed.server.peer.members.ahead import Ahead
from fed.server.peer.members.link import Link, Refused
from fed.server.peer.members.member_service import MemberService
from fed.server.peer.members.standing import Standing
from fed.vectors.tensors import Tensor
from fed.wire.messages import one_line
from fed.wire.payloads import Incoming, TensorSpec, written

__all__ = ["GossipService"]

_log = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.1
_ASKS_AGAIN_S = 2.0

_OVER = "this exchange is over"
_NO_NEIGHBOUR = "it is not a neighbour in this round"


@dataclass(kw_only=True)
class GossipService(MemberService):
    """Service of a peer that exchanges vectors with neighbours.

    Attributes:
        bytes_sent: bytes of vectors sent since the service was made.
        bytes_received: bytes of vectors received since then.
        included: names of the neighbours whose vectors counted, by exchange, for the latest rounds.
        generations: the generations that this peer knows of.
        replays_until: the last round that this peer may have taken part in before it was killed; 0: none.

    Args:
        specs: types and lengths of the tensors of each exchange of a round.
        copied: types and lengths of the tensors of a copy of a peer's state.
        ahead: number of rounds by which another may be ahead, ≥ 1.
        check: check of others' vectors that can be decoded; None: all can.
        conserves_sum: True if the rule relies on a sum over the members.
    """

    specs: Sequence[Sequence[TensorSpec]]
    copied: Sequence[TensorSpec]
    ahead: int
    check: CheckVectors | None = None
    conserves_sum: bool = False
    replays_until: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    _coming: set[tuple[ExchangeKey, str]] = field(default_factory=set)
    _refused: set[tuple[ExchangeKey, str]] = field(default_factory=set)
    _verdicts: dict[tuple[ExchangeKey, str], bool] = field(default_factory=dict)
    _open: GossipExchange | None = None
    included: dict[ExchangeKey, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next = ExchangeKey(0, 0)
        self._outbox = Outbox(self.folder)
        self._inbox = Inbox(self.check)
        self.generations = Generations(are_kept=self.conserves_sum)
        self._copy: tuple[int, list[Tensor]] | None = None
        self._ahead = Ahead("vectors")

    # The run's side.

    def begin(self, number: int, durable: int) -> Standing:
        """Begin a round, and forget the exchanges of earlier ones."""
        # neighbours may be so far behind, and still contradict an outcome
        oldest = number - self.ahead - 2
        if number <= self.rounds:
            present = {member.name for member in self.members.present(self.clock.monotonic_s())}
            self.generations.look(present, oldest)
        self._next = ExchangeKey(number, 0)
        self._inbox.forget_before(self._next)
        self._refused = {key for key in self._refused if key[0] >= self._next}
        self._verdicts = {key: one for key, one in self._verdicts.items() if key[0] >= self._next}
        self.included = {key: one for key, one in self.included.items() if key.round >= oldest}
        return super().begin(number, durable)

    def enter_generation(self) -> bool:
        """Enter the newest generation with this round; true if this peer's state must begin anew for it."""
        if not self.generations.enter(is_replay=self.round <= self.replays_until):
            return False
        self._tell_progress()
        return True

    def begin_generation(self) -> None:
        """Begin a new generation, and tell the others."""
        self.generations.begin()
        self._tell_progress()

    def has_message(self, number: int, name: str) -> bool:
        """Tell whether a message of this round is here, from one peer."""
        return (ExchangeKey(number, 0), name) in self._inbox

    async def send_and_await(self, exchange: GossipExchange, limit_s: float) -> None:
        """Send this peer's vectors to neighbours, and wait for theirs; the exchange then has what has come of it.

        Args:
            exchange: exchange that begins.
            limit_s: seconds to wait, > 0.
        """
        self._open = exchange
        messages = self._outbox.post(exchange)
        for name in self._inbox.senders(exchange.key):
            self._check_arrival(exchange, name)
        for message in messages:
            for name in sorted(message.owed):
                self._send(message, name)
        neighbours = exchange.senders | exchange.receivers
        self.reach(neighbours)
        until_s = self.clock.monotonic_s() + limit_s
        while not self._is_settled(exchange) and (left_s := until_s - self.clock.monotonic_s()) > 0:
            self.raise_failure()
            await self.next_change(min(left_s, _LOOKS_EVERY_S))
            self.reach(neighbours)
        self._close(exchange, messages)

    async def copy(self, limit_s: float) -> tuple[int, list[Tensor]] | None:
        """A copy of another's state, and the round after which it is; None if no member gives one in time."""
        until_s = self.clock.monotonic_s() + limit_s
        asked: set[str] = set()
        while self._copy is None and self.clock.monotonic_s() < until_s:
            self.raise_failure()
            holders = [name for name, number in self.reached.items() if number > 1 and name not in asked]
            # one after another, for a copy is as large as a model
            if holders and (link := self.links.link(holders[0])) is not None:
                asked.add(link.name)
                link.tell(pb.PeerMessage(copy_wanted=pb.CopyWanted()))
            else:
                asked.clear()
            await self.next_change(_ASKS_AGAIN_S)
        found = self._copy
        self._copy = None
        return found

    def restore(self, number: int, included: Mapping[ExchangeKey, frozenset[str]]) -> None:
        """Resume after a round, with the messages that are on disk."""
        self.round = self.durable = number
        self._next = ExchangeKey(number + 1, 0)
        self.included = dict(included)
        # so far ahead this peer may have been before it was killed
        self.replays_until = number + self.ahead if number else 0
        self._outbox.restore(number)

    # The others' side.

    def incoming(self, link: Link, header: pb.PeerMessage) -> Incoming | None:
        """Make the file that a message is put into."""
        self._hear(link)
        if header.HasField("copy"):
            self._check_round(header.copy.round)
            return Incoming(self.new_file(), header.copy.payload, self.copied)
        vectors = header.vectors
        key = ExchangeKey(vectors.round, vectors.exchange)
        name = link.name
        if key < self._next:
            self._tell_outcome(name, key)
            return None
        if (key, name) in self._inbox:
            if self._open is not None and key == self._open.key:
                self._tell_verdict(name, key, None)  # the verdict was lost with an earlier stream
            return None
        if (key, name) in self._coming:  # over an earlier stream; the last one counts
            self._coming.discard((key, name))
        if key.round > self.round + self.ahead:
            self._ahead.note(name, key.round, self.round)
            self._refuse(key, name, f"this peer is in round {self.round}, got vectors of round {key.round}")
            return None
        self._ahead.end(name)
        reason = self._reason_against(key, name)
        if reason is None:
            try:
                incoming = Incoming(self.new_file(), vectors.payload, self.specs[key.exchange])
            except InvalidPayload as error:
                self._refuse(key, name, str(error))
                raise
            self._coming.add((key, name))
            return incoming
        self._refuse(key, name, reason)
        raise Refused(f"its vectors of round {key.round}: {reason}")

    def arrived(self, link: Link, header: pb.PeerMessage, incoming: Incoming) -> None:
        """Take a file that is whole."""
        if header.HasField("copy"):
            self._copy = (header.copy.round, finite_tensors(incoming))
            self._changed.set()
            return
        vectors = header.vectors
        name = link.name
        key = ExchangeKey(vectors.round, vectors.exchange)
        self._coming.discard((key, name))
        if key < self._next:
            self._tell_outcome(name, key)
            return
        try:
            is_new = self._inbox.take(key, name, vectors, incoming)
        except InvalidPayload as error:
            self._refuse(key, name, str(error))
            raise
        if not is_new:
            return
        self.bytes_received += incoming.payload.size_bytes
        if self._open is not None and key == self._open.key:
            self._check_arrival(self._open, name)
        self._changed.set()

    def closed(self, link: Link) -> None:
        """Forget the vectors that were still to come over a stream."""
        # the other side sends them again over its next stream
        self._coming = {(key, name) for key, name in self._coming if name != link.name}
        if self.links.link(link.name) is None:
            self._ahead.end(link.name)
        super().closed(link)

    # Details.

    def _take(self, link: Link, message: pb.PeerMessage) -> None:
        if message.HasField("verdict"):
            self._take_verdict(link.name, message.verdict)
        else:
            raise Refused("its message is of a kind that this version does not know")

    def _resend(self, link: Link) -> None:
        for message in self._outbox.owed_to(link.name):
            self._send_over(link, message)

    def _progress(self) -> pb.Progress:
        progress = super()._progress()
        progress.generation = self.generations.latest
        return progress

    def _take_progress(self, name: str, progress: pb.Progress) -> None:
        if progress.generation > MOST_GENERATIONS:
            raise Refused(f"a generation may have the number {MOST_GENERATIONS} at most, got {progress.generation}")
        if self.generations.heard(name, progress.generation):
            self._tell_progress()
        # its outcome is on that peer's disk, which asks for it no more
        for message in self._outbox.owed_to(name):
            if message.key.round <= progress.durable:
                self._release(message.key, name)

    def _take_verdict(self, name: str, verdict: pb.Verdict) -> None:
        key = ExchangeKey(verdict.round, verdict.exchange)
        # it will not ask for them again: the file need not stay for it
        if not verdict.taken:
            _log.debug("peer %r has not taken the vectors of round %d: %s", name, key.round, one_line(verdict.reason))
            self._release(key, name)
        if key < self._next:
            # a message that counts at one end alone has broken the sum
            if self.generations.verdict(key, name, counts=verdict.taken):
                self._tell_progress()
        elif key.round <= self.round + 1:
            self._verdicts[key, name] = verdict.taken

    def _release(self, key: ExchangeKey, name: str) -> None:
        self._outbox.release(key, name, is_open=self._open is not None and self._open.key == key)

    def _check_arrival(self, exchange: GossipExchange, name: str) -> None:
        """Take a neighbour's vectors into the open exchange, or drop them; tell it which, and why."""
        key = exchange.key
        if name not in exchange.senders:
            self._inbox.drop(key, name)
            self._tell_verdict(name, key, _NO_NEIGHBOUR)
        elif (flaw := self._inbox.flaw(exchange, name)) is not None:
            self._inbox.drop(key, name)
            self._refuse(key, name, flaw)
        else:
            self._tell_verdict(name, key, None)

    def _send(self, message: OutboxMessage, name: str) -> None:
        if (link := self.links.link(name)) is not None:
            self._send_over(link, message)

    def _send_over(self, link: Link, message: OutboxMessage) -> None:
        link.send(message.header(), message.path)
        self.bytes_sent += message.payload.size_bytes

    def _is_settled(self, exchange: GossipExchange) -> bool:
        present = {member.name for member in self.members.present(self.clock.monotonic_s())}
        neighbours = exchange.senders | exchange.receivers
        return all(self._is_settled_with(exchange, name, name in present) for name in neighbours)

    def _is_settled_with(self, exchange: GossipExchange, name: str, is_present: bool) -> bool:
        received = self._received_from(exchange, name)
        taken = self._taken_by(exchange, name)
        if received is False or taken is False:
            return True
        return not is_present or (received is not None and taken is not None)

    def _received_from(self, exchange: GossipExchange, name: str) -> bool | None:
        """True once a neighbour's vectors are here, False if they will not count, None while that is open."""
        if name not in exchange.senders:
            return True
        if (exchange.key, name) in self._inbox:
            return True
        return False if (exchange.key, name) in self._refused else None

    def _taken_by(self, exchange: GossipExchange, name: str) -> bool | None:
        """True once a neighbour has taken this peer's vectors, False if it will not, None while that is open."""
        return self._verdicts.get((exchange.key, name)) if name in exchange.receivers else True

    def _close(self, exchange: GossipExchange, messages: Sequence[OutboxMessage]) -> None:
        key = exchange.key
        senders = exchange.senders
        receivers = exchange.receivers
        # where vectors go both ways, both sides count each other's or neither does
        counted = [
            name for name in sorted(senders) if self._received_from(exchange, name) and self._taken_by(exchange, name)
        ]
        exchange.reached = frozenset(
            name for name in receivers if self._taken_by(exchange, name) and (name not in senders or name in counted)
        )
        self.included[key] = frozenset(counted)
        # of two peers that send to each other, one may still leave out vectors that it has taken
        settled = exchange.reached | (receivers - senders)
        self.generations.ended(key, {name: name in exchange.reached for name in settled})
        for message in messages:
            # who has left it out needs it no more
            message.owed &= exchange.reached
        for name in sorted(senders - {*counted}):  # one without this peer's vectors would wait for them
            self._tell_verdict(name, key, "this peer has left it out")
        self._open = None
        self._next = ExchangeKey(key.round, key.exchange + 1)
        self._inbox.end(exchange, counted)
        for message in messages:
            self._outbox.close(message)

    def _reason_against(self, key: ExchangeKey, name: str) -> str | None:
        if key.exchange >= len(self.specs):
            return f"a round has {len(self.specs)} exchanges, got exchange {key.exchange}"
        held = self._inbox.held(name) + sum(its_name == name for _, its_name in self._coming)
        # each waits in memory until its round begins
        if held > self.ahead * len(self.specs):
            return "it has sent too many vectors ahead"
        if self._open is not None and key == self._open.key and name not in self._open.senders:
            return _NO_NEIGHBOUR
        return None

    def _refuse(self, key: ExchangeKey, name: str, reason: str) -> None:
        if key.round <= self.round + 1:
            # of rounds further ahead nothing is kept, which a hostile peer could name without end
            self._refused.add((key, name))
        self._tell_verdict(name, key, reason)
        self._changed.set()

    def _tell_outcome(self, name: str, key: ExchangeKey) -> None:
        """Tell a neighbour whether its vectors counted in an exchange that is over."""
        self._tell_verdict(name, key, None if name in self.included.get(key, ()) else _OVER)

    def _tell_verdict(self, name: str, key: ExchangeKey, reason: str | None) -> None:
        if (link := self.links.link(name)) is not None:
            verdict = pb.Verdict(round=key.round, exchange=key.exchange, taken=reason is None, reason=reason or "")
            link.tell(pb.PeerMessage(verdict=verdict))

    def _write_copy(self, path: Path, number: int, state: Sequence[Tensor]) -> pb.Payload:
        with os_errors_as(RunFailed, f"{self.folder} cannot be written to", "make room there"):
            return written(path, state)
