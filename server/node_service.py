"""The server's side of the wire: nodes that attend, the tasks that they hold, and the files that come and go.

All of it runs in one event loop; a fleet in another thread hands it assignments and takes what arrives from a queue.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from fed.credentials import peer_of
from fed.errors import InvalidPayload
from fed.messages import client_id_of
from fed.payloads import Incoming, chunks
from fed.protocol_pb2 import (
    Answer,
    Assignment,
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

__all__ = ["PROTOCOL", "Arrival", "Node", "NodeService", "Patience"]

PROTOCOL = 1
"""The version of the protocol; both sides must speak the same."""

_log = logging.getLogger(__name__)
_SAYS_EVERY_S = 30.0
_Result = TypeVar("_Result")


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


@dataclass
class Node:
    """A node that has joined in this run.

    Args:
        client: its id.
        samples: that it trains on.
        outbox: what is to be told it; None while it does not attend.
    """

    client: int | str
    samples: int
    outbox: "asyncio.Queue[ToNode] | None" = None


@dataclass
class _Order:
    """A task under way."""

    assignment: Assignment
    client: int | str
    lease_until_s: float
    is_accepted: bool = False
    incoming: Incoming | None = None
    delivery: object = None  # the call that brings it; an earlier one, of a connection that was cut, has no say


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
    arrivals: SimpleQueue[Arrival | Scores]
    admits: _Admission | None
    accepts: Callable[[Joining], str | None]
    on_change: Callable[[], None]
    patience: Patience = field(default_factory=Patience)
    plan: Plan | None = None
    answer_spec: Sequence[TensorMessage] = ()
    nodes: dict[int | str, Node] = field(default_factory=dict)
    refused: int = 0
    _orders: dict[int, _Order] = field(default_factory=dict)
    _delivered: dict[int, str] = field(default_factory=dict)
    _examined: dict[int | str, int] = field(default_factory=dict)
    _full_since_s: float = -math.inf
    _planned: asyncio.Event = field(default_factory=asyncio.Event)

    def assign(self, assignments: Sequence[tuple[int | str, Assignment]]) -> None:
        """Give tasks to nodes; to those that do not attend, when they do."""
        now_s = time.monotonic()
        for client, assignment in assignments:
            self._orders[assignment.task.number] = _Order(assignment, client, now_s + self.patience.lease_s)
            self._tell(client, ToNode(assignment=assignment))

    def examine(self, client: int | str, examination: Examination) -> bool:
        """Have a node score a model; False if it does not attend."""
        if not self._tell(client, ToNode(examination=examination)):
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
        """From now on nodes that join get this plan."""
        self.plan, self.answer_spec = plan, answer_spec
        self._planned.set()

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
            for task, order in [*self._orders.items()]:
                if now_s > order.lease_until_s:
                    del self._orders[task]
                    self._drop(order)
                    silence = f"it has given no sign of life for {self.patience.lease_s:g} s"
                    self.arrivals.put(Arrival(task, order.client, problem=silence))
                    self._tell(order.client, ToNode(withdrawal=Withdrawal(task=order.assignment.task)))

    async def Attend(self, _: Any, context: Any) -> None:  # noqa: N802  # as the protocol names it
        """A node's stream, for as long as it lasts."""
        name = await self._name_of(context)
        message = await self._first(context)
        if not isinstance(message, FromNode) or not message.HasField("joining"):
            await self._refuse(context, name, "a stream must begin with the node's joining")
        joining = message.joining
        client = client_id_of(name or joining.name)
        if reason := self._reason_against(joining):
            await context.write(ToNode(farewell=Farewell(reason=reason, is_final=True)))
            await self._refuse(context, client, reason)
        node = self._joined(client, joining)
        outbox = node.outbox
        assert outbox is not None
        _log.info("client %r has joined with %d samples", client, joining.samples)
        sides = [
            asyncio.create_task(self._tell_all(context, outbox)),
            asyncio.create_task(self._listen(context, client)),
        ]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for side in sides:
                side.cancel()
            for ended in await asyncio.gather(*sides, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, TimeoutError | grpc.aio.BaseError):
                    _log.warning("the connection of client %r has failed: %s", client, ended)
            if node.outbox is outbox:  # else it has come back on another connection
                node.outbox = None
                self._examine_no_more(client)
                _log.info("client %r is gone", client)
                self.on_change()

    async def Download(self, wanted: Wanted, context: Any) -> None:  # noqa: N802
        """A file of ours from an offset, by its hash."""
        await self._name_of(context)
        path = self.spool / f"{wanted.sha256}.out"
        if not wanted.sha256.isalnum() or not path.is_file():
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such payload any more")
        try:
            for chunk in chunks(path, wanted.offset):
                await _within(self.patience.stall_s, context.write(chunk))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "nothing was taken for too long")

    async def Deliver(self, _: Any, context: Any) -> Receipt:  # noqa: N802
        """An answer's file, from the offset that its sender says."""
        name = await self._name_of(context)
        first = await self._first(context)
        if not isinstance(first, Part) or not first.HasField("answer"):
            return Receipt(reason="a delivery must begin with the answer's header")
        answer = first.answer
        task = answer.task.number
        if self._delivered.get(task) == answer.payload.sha256 and answer.task.start == self.start:
            return Receipt(accepted=True)
        order = self._orders.get(task) if answer.task.start == self.start else None
        if order is None or (name is not None and order.client != client_id_of(name)):
            return self._refusal(name, f"task {task} is not in flight for it")
        try:
            incoming = self._incoming(order, answer)
            if answer.offset != incoming.received_bytes:
                return Receipt(received_bytes=incoming.received_bytes)
            delivery = order.delivery = object()
            while not incoming.is_complete:
                part = await _within(self.patience.stall_s, context.read())
                if self._orders.get(task) is not order:
                    return self._refusal(order.client, f"task {task} is not in flight any more")
                is_chunk = isinstance(part, Part) and part.HasField("chunk")
                if not is_chunk or order.delivery is not delivery or order.incoming is not incoming:
                    return Receipt(received_bytes=incoming.received_bytes)
                incoming.add(part.chunk)
                order.lease_until_s = time.monotonic() + self.patience.lease_s
            incoming.check()
        except InvalidPayload as error:
            self._drop(order)
            return self._refusal(order.client, str(error))
        except TimeoutError:
            return Receipt(received_bytes=incoming.received_bytes)
        except OSError as error:
            self._say_full(error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server has no room for the answer now")
        del self._orders[task]
        self._delivered[task] = answer.payload.sha256
        self.arrivals.put(Arrival(task, order.client, answer, incoming.path))
        return Receipt(accepted=True)

    async def _tell_all(self, context: Any, outbox: "asyncio.Queue[ToNode]") -> None:
        await self._planned.wait()
        assert self.plan is not None
        await context.write(ToNode(plan=self.plan))
        self.on_change()
        while True:
            try:
                message = await asyncio.wait_for(outbox.get(), self.patience.heartbeat_s)
            except TimeoutError:
                message = ToNode(heartbeat=Heartbeat())
            await _within(self.patience.silence_s, context.write(message))
            if message.HasField("farewell"):
                return

    async def _listen(self, context: Any, client: int | str) -> None:
        while True:
            message = await _within(self.patience.silence_s, context.read())
            if not isinstance(message, FromNode):
                return
            if message.HasField("heartbeat"):
                for task in message.heartbeat.held:
                    self._renew(client, task)
            elif message.HasField("accepted"):
                self._renew(client, message.accepted)
            elif message.HasField("failed"):
                self._failed(client, message.failed)
            elif message.HasField("scores") and self._examined.get(client) == message.scores.id:
                del self._examined[client]
                self.arrivals.put(message.scores)

    def _renew(self, client: int | str, task: TaskId) -> None:
        order = self._orders.get(task.number) if task.start == self.start else None
        if order is not None and order.client == client:
            order.is_accepted = True
            order.lease_until_s = time.monotonic() + self.patience.lease_s

    def _failed(self, client: int | str, failed: Failed) -> None:
        order = self._orders.get(failed.task.number) if failed.task.start == self.start else None
        if order is not None and order.client == client:
            del self._orders[failed.task.number]
            self._drop(order)
            reason = failed.reason[:500]
            self.arrivals.put(Arrival(failed.task.number, client, problem=reason, diverged=failed.diverged))

    def _joined(self, client: int | str, joining: Joining) -> Node:
        node = self.nodes.setdefault(client, Node(client, joining.samples))
        if node.outbox is not None:
            node.outbox.put_nowait(ToNode(farewell=Farewell(reason="another connection came in your name")))
            self._examine_no_more(client)
        node.samples, node.outbox = joining.samples, asyncio.Queue()
        held = {task.number for task in joining.held if task.start == self.start}
        for task in joining.held:
            self._renew(client, task)
            if task.start != self.start or task.number not in self._orders:
                node.outbox.put_nowait(ToNode(withdrawal=Withdrawal(task=task)))
        for number, order in self._orders.items():
            if order.client == client and number not in held:
                node.outbox.put_nowait(ToNode(assignment=order.assignment))
        return node

    def _examine_no_more(self, client: int | str) -> None:
        """A connection takes the examination that came over it along."""
        if (examination := self._examined.pop(client, None)) is not None:
            self.arrivals.put(Scores(id=examination, problem="its connection was lost"))

    def _reason_against(self, joining: Joining) -> str | None:
        if joining.protocol != PROTOCOL:
            return f"the server speaks version {PROTOCOL} of the protocol, got {joining.protocol}: update the older"
        if joining.samples < 1:
            return "a node must have samples to train on, got none"
        return self.accepts(joining)

    def _incoming(self, order: _Order, answer: Answer) -> Incoming:
        if order.incoming is None or order.incoming.payload.sha256 != answer.payload.sha256:
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

    async def _first(self, context: Any) -> Any:
        """The message that a call begins with."""
        try:
            return await _within(self.patience.stall_s, context.read())
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "nothing was said for too long")

    async def _name_of(self, context: Any) -> str | None:
        """Whose certificate it is; None where there are none."""
        if self.admits is None:
            return None
        peer = peer_of(context)
        if peer is None:
            return await self._refuse(context, "somebody", "a node must show its certificate")
        reason = self.admits(*peer)
        return peer[0] if reason is None else await self._refuse(context, peer[0], reason)

    async def _refuse(self, context: Any, who: object, reason: str) -> NoReturn:
        self._refusal(who, reason)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        raise AssertionError("an aborted call goes on")

    def _refusal(self, who: object, reason: str) -> Receipt:
        self.refused += 1
        _log.warning("refused %r: %s", who, reason)
        return Receipt(reason=reason)


async def _within(limit_s: float, step: Awaitable[_Result]) -> _Result:
    return await asyncio.wait_for(step, limit_s)
