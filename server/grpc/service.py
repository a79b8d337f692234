"""The server's side of the wire: nodes that attend, the tasks that they hold, and the files that come and go.

All of it runs in one event loop; a fleet in another thread hands it assignments and takes what arrives from a queue.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from fed.clients.node.own_data import signature_of_an_app
from fed.clients.node.plans import names_sha256
from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import MOST_HELD, NODE_NAME
from fed.quantities import counted
from fed.server.grpc.deliveries import Deliveries
from fed.server.grpc.leases import Lease, Leases
from fed.server.observer import NodeCame, NodeWent
from fed.server.registry import TaskOutcome
from fed.server.validation import reason_of, refusal_of_joining, refusal_of_scores
from fed.wire.calls import Admission, Call, Reception, TurnedAway, converse, parsed, send_file
from fed.wire.messages import client_id_of, one_line
from fed.wire.payloads import TensorSpec
from fed.wire.rate_limits import Allowance, Refusals

__all__ = ["Arrival", "Node", "NodeService", "Patience", "Scored", "SessionMessage", "handler_of"]

_log = logging.getLogger(__name__)

_MOST_NODES = 100_000
_MOST_OWED = 16  # answers in sessions that a node may send at once without using its allowance
_REPLACED = (3, 30, 300)
"""Numbers of a node's connections that another one has replaced before it ended, at which the log says so."""
_TWICE = (
    "another connection came in your name; if that goes on, a second node uses it: give each node a name of its own"
)
_UNASKED = 100  # messages at once, and a tenth of it in the time between two heartbeats


@dataclass(frozen=True)
class Patience:
    """Time limits of a server.

    Args:
        heartbeat_s: seconds from one heartbeat to the next, either way.
        silence_s: seconds without a message, heartbeats among them, after which a connection counts as lost.
        lease_s: seconds without a heartbeat after which a task has failed.
        stall_s: seconds to wait for the next piece of a transfer.
        session_s: seconds to wait for the messages of one phase of a session of secure aggregation.
    """

    heartbeat_s: float = 5.0
    silence_s: float = 20.0
    lease_s: float = 60.0
    stall_s: float = 30.0
    session_s: float = 60.0


@dataclass
class Node:
    """A node that has joined in this run.

    Args:
        client: id of the client that it stands for.
        samples: number of samples that it trains on.
        unasked: allowance of messages that it was not asked for.
        outbox: queue of messages to it; None while it does not attend.
        owed: number of answers in sessions that it was asked for, and has not sent.
        replaced: number of its connections that another one has replaced before they ended.
    """

    client: int | str
    samples: int
    unasked: Allowance
    outbox: "asyncio.Queue[pb.ToNode] | None" = None
    owed: int = 0
    replaced: int = 0


class SessionMessage(NamedTuple):
    """Message of a node in a session of secure aggregation."""

    client: int | str
    message: pb.FromSession


class Scored(NamedTuple):
    """Scores that a node found of a model."""

    client: int | str
    scores: pb.Scores


Arrival: TypeAlias = TaskOutcome | Scored | SessionMessage | NodeCame | NodeWent
"""Arrival that a fleet takes: what becomes of a task, what a node says, or a node that has come or gone."""


@dataclass
class NodeService:
    """Answers nodes' calls, each in the name that its certificate says.

    Args:
        start: number that names this start of the server, and its tasks.
        spool: folder of files on their way.
        arrivals: queue of what becomes of tasks, what nodes say, and of nodes that come and go.
        admits: function from a name and a certificate in PEM to the reason why a node is refused, or None. It is None
            itself where there are no certificates, and nodes are believed.
        accepts: function from what a node says when it joins to the reason why it is refused, or None.
        patience: time limits.
        plan: plan that nodes are told when they join; None until it is known.
        schema: schema by which nodes read their tables before they join, as JSON; empty where there is none.
        code: names of code of users that nodes must accept before they join.
        is_over: True if the run is over, so that nodes that are not accepted have done nothing wrong.
        refusals: counter of refused messages.
        identified: function that is called with the address of each call that shows a certificate.
        nodes: client → node that stands for it.
        clock: time, by which it waits.
    """

    start: int
    spool: Path
    arrivals: SimpleQueue[Arrival]
    admits: Admission | None
    accepts: Callable[[pb.Joining], str | None]
    _: KW_ONLY
    clock: Clock
    refusals: Refusals
    patience: Patience = field(default_factory=Patience)
    plan: pb.Plan | None = None
    schema: str = ""
    code: Sequence[str] = ()
    is_over: bool = False
    identified: Callable[[str], object] = lambda address: None
    nodes: dict[int | str, Node] = field(default_factory=dict)
    _examined: dict[int | str, int] = field(default_factory=dict)
    _partings: dict[int | str, str] = field(default_factory=dict)  # last reason of a node that takes no part

    def __post_init__(self) -> None:
        self._reception = Reception(self.admits, self.refusals, self.identified)
        self._leases = Leases(
            self.start,
            self.spool,
            arrived=self.arrivals.put,
            lease_s=self.patience.lease_s,
            clock=self.clock,
        )
        self._deliveries = Deliveries(
            self._leases,
            self.refusals,
            self.spool,
            stall_s=self.patience.stall_s,
            clock=self.clock,
        )

    def assign(self, assignments: Sequence[tuple[int | str, pb.Assignment]]) -> None:
        """Give tasks to nodes; a node that does not attend gets its task when it returns."""
        for client, assignment in assignments:
            self._tell(client, self._leases.give(client, assignment).told(self.clock.monotonic_s()))

    def examine(self, client: int | str, examination: pb.Examination) -> bool:
        """Have a node score a model; False if it does not attend, or has not answered the last examination yet."""
        # A node that is slow is not given a second model to score.
        if client in self._examined or not self._tell(client, pb.ToNode(examination=examination)):
            return False
        self._examined[client] = examination.id
        return True

    def withdraw(self, tasks: Collection[int]) -> list[int]:
        """Stop waiting for these tasks; the numbers of those whose answers had not arrived."""
        withdrawn = [lease for task in tasks if (lease := self._leases.withdraw(task)) is not None]
        for lease in withdrawn:
            self._tell_withdrawn(lease)
        return [lease.number for lease in withdrawn]

    def make_known(self, plan: pb.Plan, answer_spec: tuple[TensorSpec, ...]) -> None:
        """Tell the plan to all that attend, and from now on to all that join."""
        self.plan = plan
        self._deliveries.spec = answer_spec
        for client in self.nodes:
            self._tell(client, pb.ToNode(plan=plan))

    def tell(self, client: int | str, message: pb.ToSession) -> None:
        """Send a node a message of its session, if it attends."""
        self._tell(client, pb.ToNode(session=message))

    def give_up(self, task: int, reason: str) -> None:
        """Fail a task that is under way."""
        for lease in self._leases:
            if lease.number == task:
                self._leases.fail(lease, reason)
                self._tell_withdrawn(lease)

    def dismiss(self, reason: str, *, is_final: bool) -> None:
        """Dismiss all nodes."""
        for node in self.nodes.values():
            self._tell(node.client, pb.ToNode(farewell=pb.Farewell(reason=reason, is_final=is_final)))

    async def watch(self) -> None:
        """Fail tasks whose holders send no heartbeat."""
        # A task fails at most a twentieth of its lease too late.
        every_s = self.patience.lease_s / 20
        while True:
            began_s = self.clock.monotonic_s()
            await self.clock.pause(every_s)
            now_s = self.clock.monotonic_s()
            if (frozen_s := now_s - began_s - every_s) > every_s:  # this process was frozen, and heard no heartbeat
                for lease in self._leases:
                    lease.lease_until_s += frozen_s
            for lease in self._leases:
                if now_s > lease.lease_until_s:
                    self._leases.fail(lease, f"it has sent no heartbeat for {self.patience.lease_s:g} s")
                    self._tell_withdrawn(lease)

    async def Attend(self, _: Any, context: Any) -> None:  # noqa: N802  # as the protocol names it
        """A node's stream, for as long as it lasts."""
        await self._reception.answer(context, self._attend)

    async def Download(self, wanted: pb.Wanted, context: Any) -> None:  # noqa: N802
        """A file of ours from an offset, by its hash."""
        send = partial(send_file, spool=self.spool, wanted=wanted, limit_s=self.patience.stall_s)
        await self._reception.answer(context, send)

    async def Deliver(self, _: Any, context: Any) -> pb.Receipt:  # noqa: N802
        """An answer's file, from the offset that its sender says."""
        return await self._reception.answer(context, self._deliveries.take)

    async def _attend(self, call: Call) -> None:
        joining = await self._joining(call)
        if joining is None:
            return
        client = client_id_of(joining.name) if call.client is None else call.client
        if reason := self._reason_against(joining, is_named=call.name is not None):
            farewell = pb.Farewell(reason=reason, is_final=True, is_refusal=not self.is_over)
            await call.tell(pb.ToNode(farewell=farewell), self.patience.silence_s)
            raise TurnedAway(grpc.StatusCode.PERMISSION_DENIED, reason)
        known = self.nodes.get(client)
        replaces_another = known is not None and known.outbox is not None
        node = self._joined(client, joining)
        outbox = node.outbox
        assert outbox is not None
        if not replaces_another:  # two nodes of one name replace each other's connections again and again
            _log.info("client %r has joined: it %s", client, _samples_in_words(joining))
        self.arrivals.put(NodeCame(client))
        try:
            problems = await converse(self._tell_all(call, node, outbox), self._listen(call, node))
        finally:
            if node.outbox is outbox:  # else it has come back on another connection
                node.outbox = None
                self._drop_examination(client)
                _log.info("client %r is gone", client)
                self.arrivals.put(NodeWent(client))
        for problem in problems:
            if isinstance(problem, TurnedAway) and problem.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                if problem.code is grpc.StatusCode.PERMISSION_DENIED and node.outbox is None:  # else it has come back
                    # A node that was revoked will not come back for its tasks.
                    for lease in self._leases.of(client):
                        self._leases.fail(lease, problem.reason)
                raise problem
            if not isinstance(problem, TurnedAway):
                _log.warning("the connection of client %r has failed: %s", client, problem)

    async def _joining(self, call: Call) -> pb.Joining | None:
        """Wait for a node's joining; None if it takes no part.

        Before it counts, the node accepts the run's code, and reads its table by the run's schema.
        """
        message = await call.first(pb.FromNode, self.patience.stall_s)
        # Nothing is believed before it is known who speaks.
        if not message.HasField("joining"):
            raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "a stream must begin with the node's joining")
        joining = message.joining
        knows_code = not joining.HasField("code_sha256") or joining.code_sha256 == names_sha256(self.code)
        if self.code and not knows_code:
            anew = await self._joined_anew(call, joining, pb.ToNode(code=pb.Code(names=self.code)))
            if anew is None:
                return None
            joining = anew
        wanted = hashlib.sha256(self.schema.encode()).digest()
        knows_schema = not joining.HasField("table_sha256") or joining.table_sha256 == wanted
        if self.schema and not knows_schema:
            return await self._joined_anew(call, joining, pb.ToNode(table=pb.Table(schema=self.schema)))
        return joining

    async def _joined_anew(self, call: Call, joining: pb.Joining, question: pb.ToNode) -> pb.Joining | None:
        """Ask a node what must be known before it joins; its next joining, or None if it takes no part.

        Args:
            call: call of the node.
            joining: joining that it has sent.
            question: message that it answers by joining again, or by a farewell.
        """
        await call.tell(question, self.patience.silence_s)
        while (said := await call.next(pb.FromNode, self.patience.silence_s)) is not None:
            if said.HasField("joining"):
                return said.joining
            if said.HasField("farewell"):
                client = client_id_of(joining.name) if call.client is None else call.client
                self._say_parting(client, one_line(said.farewell.reason))
                return None
            # It lives and reads, and must not take this side for dead meanwhile.
            await call.tell(pb.ToNode(heartbeat=pb.Heartbeat()), self.patience.silence_s)
        raise TurnedAway(grpc.StatusCode.CANCELLED, "it has left before it joined")

    async def _tell_all(self, call: Call, node: Node, outbox: "asyncio.Queue[pb.ToNode]") -> None:
        while True:
            try:
                message = await self.clock.within(self.patience.heartbeat_s, outbox.get())
            except TimeoutError:
                # Nothing else was told for so long, and the node must not take the server for dead.
                message = pb.ToNode(heartbeat=pb.Heartbeat())
            if message.HasField("session") or message.assignment.model_sha256:  # which begins a session
                # Bounded, so that a node that never answers saves up nothing.
                node.owed = min(node.owed + 1, _MOST_OWED)
            await call.tell(message, self.patience.silence_s)
            if message.HasField("farewell"):
                return

    async def _listen(self, call: Call, node: Node) -> None:
        while (message := await call.next(pb.FromNode, self.patience.silence_s)) is not None:
            problem = self._problem_with(message, node)
            if problem is None:
                continue
            if problem:
                self.refusals.note(node.client, problem)
            if message.HasField("farewell"):
                self._take_leave(node.client, one_line(message.farewell.reason))
                return
            if not node.unasked.spend():
                raise TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, "it has sent more messages than a node needs")

    def _problem_with(self, message: pb.FromNode, node: Node) -> str | None:
        """Reason to refuse a message; None: it was asked for; "": it is in order, but was not asked for."""
        client = node.client
        if message.HasField("heartbeat"):
            return self._heard(client, message.heartbeat)
        if message.HasField("accepted"):
            lease = self._leases.own(client, message.accepted)
            is_new = lease is not None and not lease.is_accepted
            return self._renew(client, message.accepted) or (None if is_new else "")
        if message.HasField("failed"):
            return self._failed(client, message.failed)
        if message.HasField("scores"):
            return self._scored(client, message.scores)
        if message.HasField("session"):
            self.arrivals.put(SessionMessage(client, message.session))
            is_asked = node.owed > 0
            node.owed = max(node.owed - 1, 0)
            return None if is_asked else ""
        if message.HasField("farewell"):
            return ""
        if message.HasField("joining"):
            return "a node joins once on a stream"
        return "its message is of a kind that this version does not know"

    def _take_leave(self, client: int | str, reason: str) -> None:
        """Fail the tasks of a node that takes no part."""
        self._say_parting(client, reason)
        for lease in self._leases.of(client):
            self._leases.fail(lease, reason)

    def _say_parting(self, client: int | str, reason: str) -> None:
        """Say why a node takes no part, once, however often its service manager starts it again."""
        if self._partings.get(client) == reason:
            return
        if len(self._partings) < _MOST_NODES:  # without certificates anyone may invent names
            self._partings[client] = reason
        _log.warning("client %r takes no part: %s", client, reason)

    def _heard(self, client: int | str, heartbeat: pb.Heartbeat) -> str:
        if len(heartbeat.held) > MOST_HELD:
            return f"a node may hold {MOST_HELD} tasks at most, got {len(heartbeat.held)}"
        return next(filter(None, [self._renew(client, task) for task in heartbeat.held]), "")

    def _renew(self, client: int | str, task: pb.TaskId) -> str:
        """Renew the lease of a client's task, if it is not over; returns the refusal of another's task, else ""."""
        lease = self._leases.find(task)
        if lease is None:
            return ""
        if lease.client != client:
            return f"task {task.number} is not in flight for it"
        lease.is_accepted = True
        self._leases.renew(lease)
        return ""

    def _failed(self, client: int | str, failed: pb.Failed) -> str | None:
        lease = self._leases.own(client, failed.task)
        if lease is None:
            return f"task {failed.task.number} is not in flight for it"
        self._leases.fail(lease, reason_of(failed), lacks_model=failed.lacks_model)
        return None

    def _scored(self, client: int | str, scores: pb.Scores) -> str | None:
        if self._examined.get(client) != scores.id:
            return f"it was not asked for scores {scores.id}"
        # Asked once, answered once: later scores of it are refused.
        del self._examined[client]
        problem = refusal_of_scores(scores)
        said = pb.Scores(id=scores.id, problem=problem or one_line(scores.problem))  # refused numbers go no further
        self.arrivals.put(Scored(client, said if said.problem else scores))
        return problem

    def _joined(self, client: int | str, joining: pb.Joining) -> Node:
        node = self.nodes.get(client)
        if node is None:
            unasked = Allowance(_UNASKED, _UNASKED / 10 / self.patience.heartbeat_s, self.clock)
            node = self.nodes[client] = Node(client, joining.samples, unasked)
        # Each joining costs a plan and lines of the log.
        if not node.unasked.spend():
            raise TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, "it has joined too often in a short time")
        if node.outbox is not None:
            # A dead connection may not have been noticed yet.
            node.outbox.put_nowait(pb.ToNode(farewell=pb.Farewell(reason=_TWICE)))
            node.replaced += 1
            if node.replaced in _REPLACED:
                _log.warning(
                    "client %r has dialled in %d times while it was connected: does a second node use its name? "
                    "give each a name of its own",
                    client,
                    node.replaced,
                )
            self._drop_examination(client)
        # It may have been started again with other data.
        node.samples = joining.samples
        # A new one: what a dead connection was owed is told again below, or does not matter any more.
        node.outbox = asyncio.Queue()
        if self.plan is not None:
            node.outbox.put_nowait(pb.ToNode(plan=self.plan))
        held = {task.number for task in joining.held if task.start == self.start}
        for task in joining.held:
            # What it holds has outlived the connection that was lost.
            self._renew(client, task)
            if self._leases.find(task) is None:  # it has ended while the node was away
                node.outbox.put_nowait(pb.ToNode(withdrawal=pb.Withdrawal(task=task)))
        for lease in self._leases.of(client):
            if lease.number not in held:  # it was lost with a connection, or with the node's process
                node.outbox.put_nowait(lease.told(self.clock.monotonic_s()))
        return node

    def _drop_examination(self, client: int | str) -> None:
        """Drop an examination whose connection is lost; its scores count as missing."""
        if (examination := self._examined.pop(client, None)) is not None:
            self.arrivals.put(Scored(client, pb.Scores(id=examination, problem="its connection was lost")))

    def _reason_against(self, joining: pb.Joining, *, is_named: bool) -> str | None:
        if not is_named and not NODE_NAME.fullmatch(joining.name):
            return (
                "a node's name must be up to 64 letters, digits, dots, hyphens and underscores, the first a letter "
                "or a digit"
            )
        if len(self.nodes) >= _MOST_NODES:  # without certificates anyone may invent names
            return f"the server has {_MOST_NODES} nodes, and takes no more"
        return refusal_of_joining(joining) or self.accepts(joining)

    def _tell(self, client: int | str, message: pb.ToNode) -> bool:
        node = self.nodes.get(client)
        if node is None or node.outbox is None:
            return False
        node.outbox.put_nowait(message)
        return True

    def _tell_withdrawn(self, lease: Lease) -> None:
        self._tell(lease.client, pb.ToNode(withdrawal=pb.Withdrawal(task=lease.assignment.task)))


def _samples_in_words(joining: pb.Joining) -> str:
    """Number of samples that a node trains on, as far as it tells it."""
    if joining.hides_numbers:
        return "hides its number of samples"
    if joining.signature == signature_of_an_app():
        return "runs an app, which tells its number of samples as it trains"
    return f"has {counted(joining.samples, 'sample')}"


def handler_of(service: NodeService) -> grpc.GenericRpcHandler:
    """Handlers of the protocol's calls; bytes that are no request count as an empty one, which is refused."""

    def wanted(request: bytes) -> pb.Wanted:
        try:
            return pb.Wanted.FromString(request)
        except DecodeError:
            return pb.Wanted()

    return grpc.method_handlers_generic_handler(
        "fed.v1.Coordination",
        {
            "Attend": grpc.stream_stream_rpc_method_handler(
                service.Attend, partial(parsed, pb.FromNode), pb.ToNode.SerializeToString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(service.Download, wanted, pb.Chunk.SerializeToString),
            "Deliver": grpc.stream_unary_rpc_method_handler(
                service.Deliver, partial(parsed, pb.Part), pb.Receipt.SerializeToString
            ),
        },
    )
