"""The server's side of the wire: nodes that attend, the tasks that they hold, and the files that come and go.

All of it runs in one event loop; a fleet in another thread hands it assignments and takes what arrives from a queue.
"""

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from fed.credentials import peer_of
from fed.errors import DamagedPayload, InvalidPayload
from fed.messages import client_id_of, one_line, refusal_of_numbers
from fed.payloads import CHUNK_BYTES, SHA256, Incoming, chunks
from fed.protocol_pb2 import (
    Answer,
    Assignment,
    Chunk,
    Examination,
    Failed,
    Farewell,
    FromNode,
    Heartbeat,
    Joining,
    Part,
    Plan,
    Receipt,
    Scores,
    TaskId,
    ToNode,
    Wanted,
    Withdrawal,
)
from fed.protocol_pb2 import Tensor as TensorMessage
from fed.server.answers import refusal_of_joining, refusal_of_scores

__all__ = ["MOST_TAKEN_BYTES", "PROTOCOL", "Arrival", "Node", "NodeService", "Patience", "Scored", "handler_of"]

PROTOCOL = 1
"""The version of the protocol; both sides must speak the same."""

MOST_TAKEN_BYTES = 4 << 20
"""Of a message that gRPC hands on; it cuts the stream of a larger one off, and does not say so."""

_log = logging.getLogger(__name__)
_SAYS_EVERY_S = 30.0
_Result = TypeVar("_Result")
_Message = TypeVar("_Message", FromNode, Part)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_BYTES = {FromNode: 1 << 16, Part: CHUNK_BYTES + (1 << 16)}
_MOST_HELD = 1000
_MOST_NODES = 100_000
_MOST_DELIVERED = 10_000  # that are remembered, so that one sent twice is known
_CALLS_AT_ONCE = 8
_TIMES_DAMAGED = 3
_UNASKED = 100  # messages at once, and a tenth of it in the time between two heartbeats
_LINES = 20  # of the log for a sender at once, and then one in ten seconds
_MOST_SENDERS = 1000  # that are told apart in that


@dataclass(frozen=True)
class Patience:
    """How long a server waits.

    Args:
        heartbeat_s: between two signs of life, either way.
        silence_s: without one, after which a connection counts as lost.
        lease_s: without a sign of life from who holds a task, after which the task has failed.
        stall_s: for the next piece of a transfer.
    """

    heartbeat_s: float = 5.0
    silence_s: float = 20.0
    lease_s: float = 60.0
    stall_s: float = 30.0


class _Allowance:
    """How often something may be done: so many times at once, and again as time passes."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most = self._left = most
        self._per_s = per_s
        self._since_s = time.monotonic()
        self.denied = 0

    def spend(self) -> bool:
        """Whether it may be done once more; if not, how often is in ``denied`` until somebody resets it."""
        now_s = time.monotonic()
        self._left = min(self._most, self._left + self._per_s * (now_s - self._since_s))
        self._since_s = now_s
        if self._left < 1:
            self.denied += 1
            return False
        self._left -= 1
        return True


class _Caller(NamedTuple):
    """Whose call it is: by its certificate, or where there are none a name that any call may claim."""

    name: str | None = None
    certificate_pem: bytes = b""

    @property
    def client(self) -> int | str | None:
        return None if self.name is None else client_id_of(self.name)


class _TurnedAway(Exception):
    """A call that is ended because of what its caller says or is."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass
class Node:
    """A node that has joined in this run.

    Args:
        client: its id.
        samples: that it trains on.
        unasked: how much it may say unasked.
        outbox: what is to be told it; None while it does not attend.
    """

    client: int | str
    samples: int
    unasked: _Allowance
    outbox: "asyncio.Queue[ToNode] | None" = None


@dataclass
class _Order:
    """A task under way."""

    assignment: Assignment
    client: int | str
    given_s: float
    lease_until_s: float
    is_accepted: bool = False
    incoming: Incoming | None = None
    deliveries: int = 0  # that were begun; one that was before the last, of a connection that was cut, has no say
    times_damaged: int = 0

    def told(self) -> ToNode:
        """The assignment as it is told now: with as many seconds as are left."""
        message = ToNode(assignment=self.assignment)
        if self.assignment.HasField("deadline_s"):
            left_s = self.given_s + self.assignment.deadline_s - time.monotonic()
            message.assignment.deadline_s = max(left_s, 0.0)
        return message


@dataclass(frozen=True)
class Arrival:
    """What became of a task, as a node says.

    Args:
        task: its number.
        client: who had it.
        answer: the header of what it sent, with its file; or
        path: where that is.
        problem: why there is none.
        diverged: whether its numbers are no longer finite.
    """

    task: int
    client: int | str
    answer: Answer | None = None
    path: Path | None = None
    problem: str = ""
    diverged: bool = False


class Scored(NamedTuple):
    """What a node found of a model."""

    client: int | str
    scores: Scores


_Admission: TypeAlias = Callable[[str, bytes], str | None]


@dataclass
class NodeService:
    """Answers nodes' calls, each in the name that its certificate says.

    Args:
        plan: what nodes are told when they join; None until it is known.
        start: of this server, which its tasks are named by.
        answer_spec: what an answer's tensors must be.
        spool: the folder of files on their way.
        arrivals: takes what becomes of tasks.
        admits: (name, certificate in PEM) → why a node is refused, or None; where there are no certificates it is
            None itself, and nodes are believed.
        accepts: what a node says when it joins → why it is refused, or None.
        patience: how long to wait.
        on_change: is called when a node comes or goes.
    """

    start: int
    spool: Path
    arrivals: SimpleQueue[Arrival | Scored]
    admits: _Admission | None
    accepts: Callable[[Joining], str | None]
    on_change: Callable[[], None]
    patience: Patience = field(default_factory=Patience)
    plan: Plan | None = None
    answer_spec: Sequence[TensorMessage] = ()
    nodes: dict[int | str, Node] = field(default_factory=dict)
    refused: int = 0
    _orders: dict[int, _Order] = field(default_factory=dict)
    _delivered: dict[int, tuple[int | str, str]] = field(default_factory=dict)
    _examined: dict[int | str, int] = field(default_factory=dict)
    _full_since_s: float = -math.inf
    _calls: Counter[str] = field(default_factory=Counter)
    _lines: dict[object, _Allowance] = field(default_factory=dict)

    def assign(self, assignments: Sequence[tuple[int | str, Assignment]]) -> None:
        """Give tasks to nodes; to those that do not attend, when they do."""
        now_s = time.monotonic()
        for client, assignment in assignments:
            order = _Order(assignment, client, now_s, now_s + self.patience.lease_s)
            self._orders[assignment.task.number] = order
            self._tell(client, order.told())

    def examine(self, client: int | str, examination: Examination) -> bool:
        """Have a node score a model; False if it does not attend, or has not answered the last examination yet."""
        if client in self._examined or not self._tell(client, ToNode(examination=examination)):
            return False
        self._examined[client] = examination.id
        return True

    def withdraw(self, tasks: Collection[int]) -> list[int]:
        """Wait for these no longer; those of them that had not arrived, and will not."""
        withdrawn = [task for task in tasks if task in self._orders]
        for task in withdrawn:
            order = self._orders.pop(task)
            self._drop(order)
            self._tell(order.client, ToNode(withdrawal=Withdrawal(task=order.assignment.task)))
        return withdrawn

    def make_known(self, plan: Plan, answer_spec: Sequence[TensorMessage]) -> None:
        """Tell the plan to all that attend, and from now on to all that join."""
        self.plan, self.answer_spec = plan, answer_spec
        for client in self.nodes:
            self._tell(client, ToNode(plan=plan))

    def dismiss(self, reason: str, *, is_final: bool) -> None:
        """Send everybody home."""
        for node in self.nodes.values():
            self._tell(node.client, ToNode(farewell=Farewell(reason=reason, is_final=is_final)))

    async def watch(self) -> None:
        """Fail tasks whose holders give no sign of life."""
        every_s = self.patience.lease_s / 20
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(every_s)
            now_s = time.monotonic()
            if (frozen_s := now_s - began_s - every_s) > every_s:  # it is we who gave no sign of life, nor heard one
                for order in self._orders.values():
                    order.lease_until_s += frozen_s
            for order in [*self._orders.values()]:
                if now_s > order.lease_until_s:
                    self._fail(order, f"it has given no sign of life for {self.patience.lease_s:g} s")
                    self._tell(order.client, ToNode(withdrawal=Withdrawal(task=order.assignment.task)))

    async def Attend(self, _: Any, context: Any) -> None:  # noqa: N802  # as the protocol names it
        """A node's stream, for as long as it lasts."""
        await self._answered(context, self._attend)

    async def Download(self, wanted: Wanted, context: Any) -> None:  # noqa: N802
        """A file of ours from an offset, by its hash."""
        await self._answered(context, partial(self._download, wanted))

    async def Deliver(self, _: Any, context: Any) -> Receipt:  # noqa: N802
        """An answer's file, from the offset that its sender says."""
        return await self._answered(context, self._deliver)

    async def _answered(self, context: Any, serve: Callable[[Any, _Caller], Awaitable[_Result]]) -> _Result:
        """One call, in its caller's name; who may not make it, or does not keep to the protocol, is turned away."""
        caller = _Caller()
        try:
            if self.admits is None:
                return await serve(context, caller)
            peer = peer_of(context)
            if peer is None:
                raise _TurnedAway(grpc.StatusCode.PERMISSION_DENIED, "a node must show its certificate")
            caller = _Caller(*peer)
            self._hold_to_roster(caller)
            if self._calls[peer[0]] >= _CALLS_AT_ONCE:
                raise _TurnedAway(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"a node may have {_CALLS_AT_ONCE} calls open, and no more"
                )
            self._calls[peer[0]] += 1
            try:
                return await serve(context, caller)
            finally:
                self._calls[peer[0]] -= 1
        except _TurnedAway as turned:
            self._refusal(caller.name if caller.name is not None else context.peer(), turned.reason)
            await context.abort(turned.code, turned.reason)
            raise AssertionError("an aborted call goes on") from None

    async def _attend(self, context: Any, caller: _Caller) -> None:
        message = await self._first(context, caller, FromNode)
        if not message.HasField("joining"):
            raise _TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "a stream must begin with the node's joining")
        joining = message.joining
        client = client_id_of(joining.name) if caller.client is None else caller.client
        if reason := self._reason_against(joining, is_named=caller.name is not None):
            await context.write(ToNode(farewell=Farewell(reason=reason, is_final=True)))
            raise _TurnedAway(grpc.StatusCode.PERMISSION_DENIED, reason)
        node = self._joined(client, joining)
        outbox = node.outbox
        assert outbox is not None
        _log.info("client %r has joined with %d samples", client, joining.samples)
        self.on_change()
        teller = asyncio.create_task(self._tell_all(context, caller, outbox))
        listener = asyncio.create_task(self._listen(context, caller, node))
        try:
            await asyncio.wait({teller, listener}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            teller.cancel()
            listener.cancel()
            ended = await asyncio.gather(teller, listener, return_exceptions=True)
            if node.outbox is outbox:  # else it has come back on another connection
                node.outbox = None
                self._examine_no_more(client)
                _log.info("client %r is gone", client)
                self.on_change()
        for problem in ended:
            if isinstance(problem, _TurnedAway) and problem.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                if problem.code is grpc.StatusCode.PERMISSION_DENIED and node.outbox is None:  # else it has come back
                    self._fail_all(client, problem.reason)
                raise problem
            if isinstance(problem, Exception) and not isinstance(problem, _TurnedAway):
                _log.warning("the connection of client %r has failed: %s", client, problem)

    async def _download(self, wanted: Wanted, context: Any, caller: _Caller) -> None:
        path = self.spool / f"{wanted.sha256}.out"
        if not SHA256.fullmatch(wanted.sha256):
            raise _TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "a payload is asked for by 64 hexadecimal digits")
        try:
            if wanted.offset > (size_bytes := path.stat().st_size):
                reason = f"the payload has {size_bytes} bytes, got an offset of {wanted.offset}"
                raise _TurnedAway(grpc.StatusCode.OUT_OF_RANGE, reason)
            ready, loop = chunks(path, wanted.offset), asyncio.get_running_loop()
            chunk, read_bytes = next(ready, None), wanted.offset
        except FileNotFoundError:  # another thread removes it
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such payload any more")
            raise AssertionError("an aborted call goes on") from None
        while chunk is not None:
            read_bytes += CHUNK_BYTES
            coming = loop.run_in_executor(None, next, ready, None) if read_bytes < size_bytes else None
            self._hold_to_roster(caller)
            await self._within(self.patience.stall_s, context.write(chunk))
            chunk = await coming if coming is not None else None

    async def _deliver(self, context: Any, caller: _Caller) -> Receipt:
        first = await self._first(context, caller, Part)
        if not first.HasField("answer"):
            raise _TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "a delivery must begin with the answer's header")
        answer = first.answer
        task = answer.task.number
        order = self._orders.get(task) if answer.task.start == self.start else None
        client = order.client if caller.client is None and order is not None else caller.client
        if order is None or order.client != client:
            delivered = self._delivered.get(task) if answer.task.start == self.start else None
            if delivered is not None and delivered == (
                delivered[0] if client is None else client,
                answer.payload.sha256,
            ):
                return Receipt(accepted=True)
            return self._refusal(caller.name or context.peer(), f"task {task} is not in flight for it")
        try:
            return await self._received(context, caller, order, answer)
        except DamagedPayload as error:
            self._refusal(order.client, str(error))
            order.times_damaged += 1
            if order.times_damaged < _TIMES_DAMAGED:
                return Receipt(received_bytes=order.incoming.received_bytes if order.incoming else 0)
            return self._refused(order, f"it came damaged {_TIMES_DAMAGED} times: {error}")
        except InvalidPayload as error:
            return self._refused(order, str(error))
        except OSError as error:
            self._say_full(error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server has no room for the answer now")
            raise AssertionError("an aborted call goes on") from None

    async def _received(self, context: Any, caller: _Caller, order: _Order, answer: Answer) -> Receipt:
        """What becomes of a delivery once it is known whose it is; what has come of it stays when it breaks off."""
        task = answer.task.number
        if reason := refusal_of_numbers(answer.samples, answer.weight, answer.train_loss):
            raise InvalidPayload(reason)
        incoming = self._incoming(order, answer)
        if answer.offset != incoming.received_bytes:
            return Receipt(received_bytes=incoming.received_bytes)
        order.deliveries += 1
        delivery = order.deliveries
        while not incoming.is_complete:
            part = await self._next(context, caller, Part)
            if self._orders.get(task) is not order:
                return self._refusal(order.client, f"task {task} is not in flight any more")
            if part is None or order.deliveries != delivery or order.incoming is not incoming:
                return Receipt(received_bytes=incoming.received_bytes)
            if not part.HasField("chunk"):
                raise InvalidPayload("after the answer's header there must be chunks")
            incoming.add(part.chunk)
            order.lease_until_s = time.monotonic() + self.patience.lease_s
        try:
            incoming.check()
        except DamagedPayload:
            self._drop(order)
            raise
        del self._orders[task]
        self._delivered[task] = order.client, answer.payload.sha256
        if len(self._delivered) > _MOST_DELIVERED:
            del self._delivered[next(iter(self._delivered))]
        self.arrivals.put(Arrival(task, order.client, answer, incoming.path))
        return Receipt(accepted=True)

    async def _tell_all(self, context: Any, caller: _Caller, outbox: "asyncio.Queue[ToNode]") -> None:
        while True:
            try:
                message = await asyncio.wait_for(outbox.get(), self.patience.heartbeat_s)
            except TimeoutError:
                message = ToNode(heartbeat=Heartbeat())
            self._hold_to_roster(caller)
            await self._within(self.patience.silence_s, context.write(message))
            if message.HasField("farewell"):
                return

    async def _listen(self, context: Any, caller: _Caller, node: Node) -> None:
        while (message := await self._next(context, caller, FromNode, self.patience.silence_s)) is not None:
            problem = self._problem_with(message, node.client)
            if problem is None:
                continue
            if problem:
                self._refusal(node.client, problem)
            if not node.unasked.spend():
                raise _TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, "it says more than a node has to say")

    def _problem_with(self, message: FromNode, client: int | str) -> str | None:
        """Why a message is refused; "" if it is not, and None if it was asked for."""
        if message.HasField("heartbeat"):
            return self._heard(client, message.heartbeat)
        if message.HasField("accepted"):
            order = self._own(client, message.accepted)
            is_new = order is not None and not order.is_accepted
            return self._renew(client, message.accepted) or (None if is_new else "")
        if message.HasField("failed"):
            return self._failed(client, message.failed)
        if message.HasField("scores"):
            return self._scored(client, message.scores)
        return "a node joins once on a stream" if message.HasField("joining") else "it says nothing that is known here"

    async def _first(self, context: Any, caller: _Caller, kind: type[_Message]) -> _Message:
        """The message that a stream begins with."""
        if (message := await self._next(context, caller, kind)) is None:
            reason = (
                f"a stream must begin with a message of at most {_MOST_BYTES[kind]} bytes, but ended before there was "
                f"one: it broke off, or the message had more than {MOST_TAKEN_BYTES}"
            )
            raise _TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, reason)
        return message

    async def _next(
        self, context: Any, caller: _Caller, kind: type[_Message], limit_s: float | None = None
    ) -> _Message | None:
        """The next message of a stream, None at its end."""
        try:
            message = await self._within(self.patience.stall_s if limit_s is None else limit_s, context.read())
        except DecodeError:
            raise _TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "it sent bytes that are no message") from None
        self._hold_to_roster(caller)
        if not isinstance(message, kind):
            return None
        return message

    async def _within(self, limit_s: float, step: Awaitable[_Result]) -> _Result:
        try:
            return await asyncio.wait_for(step, limit_s)
        except TimeoutError:
            raise _TurnedAway(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing moved for {limit_s:g} s") from None

    def _hold_to_roster(self, caller: _Caller) -> None:
        """TLS asks once, when a connection begins; the roster may have changed since."""
        if self.admits is not None and (reason := self.admits(caller.name or "", caller.certificate_pem)) is not None:
            raise _TurnedAway(grpc.StatusCode.PERMISSION_DENIED, reason)

    def _heard(self, client: int | str, heartbeat: Heartbeat) -> str:
        if len(heartbeat.held) > _MOST_HELD:
            return f"a node may hold {_MOST_HELD} tasks at most, got {len(heartbeat.held)}"
        return next(filter(None, [self._renew(client, task) for task in heartbeat.held]), "")

    def _own(self, client: int | str, task: TaskId) -> _Order | None:
        order = self._orders.get(task.number) if task.start == self.start else None
        return order if order is not None and order.client == client else None

    def _renew(self, client: int | str, task: TaskId) -> str:
        """Go on waiting for a task of a client; why not, if it is another's. One that is over may still be named."""
        order = self._own(client, task)
        if order is not None:
            order.is_accepted = True
            order.lease_until_s = time.monotonic() + self.patience.lease_s
            return ""
        is_anothers = task.start == self.start and task.number in self._orders
        return f"task {task.number} is not in flight for it" if is_anothers else ""

    def _failed(self, client: int | str, failed: Failed) -> str | None:
        order = self._own(client, failed.task)
        if order is None:
            return f"task {failed.task.number} is not in flight for it"
        self._fail(order, one_line(failed.reason) or "it says no reason", diverged=failed.diverged)
        return None

    def _scored(self, client: int | str, scores: Scores) -> str | None:
        if self._examined.get(client) != scores.id:
            return f"it was not asked for scores {scores.id}"
        del self._examined[client]
        problem = refusal_of_scores(scores)
        said = Scores(id=scores.id, problem=problem or one_line(scores.problem))
        self.arrivals.put(Scored(client, said if said.problem else scores))
        return problem

    def _fail(self, order: _Order, reason: str, *, diverged: bool = False) -> None:
        """A task whose answer nobody waits for any more."""
        number = order.assignment.task.number
        self._orders.pop(number, None)
        self._drop(order)
        self.arrivals.put(Arrival(number, order.client, problem=reason, diverged=diverged))

    def _fail_all(self, client: int | str, reason: str) -> None:
        for order in [*self._orders.values()]:
            if order.client == client:
                self._fail(order, reason)

    def _refused(self, order: _Order, reason: str) -> Receipt:
        """An answer of whom it was asked of, which is none."""
        self._fail(order, f"its answer was refused: {reason}")
        return self._refusal(order.client, reason)

    def _joined(self, client: int | str, joining: Joining) -> Node:
        node = self.nodes.get(client)
        if node is None:
            unasked = _Allowance(_UNASKED, _UNASKED / 10 / self.patience.heartbeat_s)
            node = self.nodes[client] = Node(client, joining.samples, unasked)
        if not node.unasked.spend():
            raise _TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, "it comes again and again")
        if node.outbox is not None:
            node.outbox.put_nowait(ToNode(farewell=Farewell(reason="another connection came in your name")))
            self._examine_no_more(client)
        node.samples, node.outbox = joining.samples, asyncio.Queue()
        if self.plan is not None:
            node.outbox.put_nowait(ToNode(plan=self.plan))
        held = {task.number for task in joining.held if task.start == self.start}
        for task in joining.held:
            self._renew(client, task)
            if task.start != self.start or task.number not in self._orders:
                node.outbox.put_nowait(ToNode(withdrawal=Withdrawal(task=task)))
        for number, order in self._orders.items():
            if order.client == client and number not in held:
                node.outbox.put_nowait(order.told())
        return node

    def _examine_no_more(self, client: int | str) -> None:
        """A connection takes the examination that came over it along."""
        if (examination := self._examined.pop(client, None)) is not None:
            self.arrivals.put(Scored(client, Scores(id=examination, problem="its connection was lost")))

    def _reason_against(self, joining: Joining, *, is_named: bool) -> str | None:
        if joining.protocol != PROTOCOL:
            return f"the server speaks version {PROTOCOL} of the protocol, got {joining.protocol}: update the older"
        if not is_named and not _NAME.fullmatch(joining.name):
            return "a node's name must be up to 64 letters, digits, dots, hyphens and underscores, the first no sign"
        if len(joining.held) > _MOST_HELD:
            return f"a node may hold {_MOST_HELD} tasks at most, got {len(joining.held)}"
        if len(self.nodes) >= _MOST_NODES:
            return f"the server has {_MOST_NODES} nodes, and takes no more"
        return refusal_of_joining(joining) or self.accepts(joining)

    def _incoming(self, order: _Order, answer: Answer) -> Incoming:
        if order.incoming is None or order.incoming.payload != answer.payload:
            path = self.spool / f"{answer.task.number}.in"
            order.incoming = Incoming(path, answer.payload, self.answer_spec)
        return order.incoming

    def _tell(self, client: int | str, message: ToNode) -> bool:
        node = self.nodes.get(client)
        if node is None or node.outbox is None:
            return False
        node.outbox.put_nowait(message)
        return True

    def _drop(self, order: _Order) -> None:
        if order.incoming is not None:
            order.incoming.path.unlink(missing_ok=True)
            order.incoming = None

    def _say_full(self, error: OSError) -> None:
        """Once a while: nodes try again until there is room."""
        if time.monotonic() > self._full_since_s + _SAYS_EVERY_S:
            reason = error.strerror or str(error)
            _log.warning(
                "%s cannot be written to (%s): make room there; nodes try again until then", self.spool, reason
            )
            self._full_since_s = time.monotonic()

    def _refusal(self, who: object, reason: str) -> Receipt:
        """Counted always, and logged unless the same sender fills the log."""
        self.refused += 1
        known = who if who in self._lines or len(self._lines) < _MOST_SENDERS else None
        lines = self._lines.setdefault(known, _Allowance(_LINES, 0.1))
        if lines.spend():
            more, lines.denied = lines.denied, 0
            _log.warning("refused %r: %s%s", who, reason, f" ({more} more were not logged)" if more else "")
        return Receipt(reason=reason)


def _parsed(kind: type[_Message], data: bytes) -> _Message:
    """A message of a stream, if it is no longer than any has to be."""
    if len(data) > (most_bytes := _MOST_BYTES[kind]):
        reason = f"a message must have at most {most_bytes} bytes, got {len(data)}"
        raise _TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, reason)
    return kind.FromString(data)


def handler_of(service: NodeService) -> grpc.GenericRpcHandler:
    """Calls of the protocol, for a server; bytes that are no request are taken for an empty one, which is refused."""

    def wanted(request: bytes) -> Wanted:
        try:
            return Wanted.FromString(request)
        except DecodeError:
            return Wanted()

    return grpc.method_handlers_generic_handler(
        "fed.v1.Coordination",
        {
            "Attend": grpc.stream_stream_rpc_method_handler(
                service.Attend, partial(_parsed, FromNode), ToNode.SerializeToString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(service.Download, wanted, Chunk.SerializeToString),
            "Deliver": grpc.stream_unary_rpc_method_handler(
                service.Deliver, partial(_parsed, Part), Receipt.SerializeToString
            ),
        },
    )
