"""A fleet of real nodes, which dial in over gRPC and keep a stream open."""

import asyncio
import contextlib
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from fed.errors import InvalidInput, RunFailed
from fed.identity.credentials import ServerCredentials, hold_to_loopback
from fed.processes.clock import Clock
from fed.protocol.protocol_pb2 import Examination, Joining, Payload, Plan, ToSession
from fed.server.grpc.service import Arrival, NodeService, Patience, Scored, SessionMessage, handler_of
from fed.server.real_fleet import RealFleet
from fed.server.registry import TaskOutcome
from fed.vectors.tensors import Tensor
from fed.wire.format import Format
from fed.wire.listening import Listening
from fed.wire.loop_thread import LoopThread
from fed.wire.messages import Task
from fed.wire.payloads import written

if TYPE_CHECKING:
    from fed.server.grpc.sessions import NodeSessions

__all__ = ["NodeFleet"]

_LOOKS_EVERY_S = 0.5  # so that Ctrl-C is heard


class NodeFleet(RealFleet):
    """A fleet of nodes that hold a task each until its answer is there, through lost connections and restarts.

    Attributes:
        patience: time limits.
        sessions: sessions of the nodes under secure aggregation; None without it.

    Args:
        listen: address, HOST:PORT.
        spool: folder for files on their way, of this fleet alone.
        credentials: credentials of the server; None: no encryption, on loopback only.
        accepts: function from what a node says when it joins to the reason why it is refused, or None.
        patience: time limits; None: the usual ones.
        clock: time, by which it waits.
        schema: schema by which nodes read their tables before they join, as JSON; empty where there is none.
        code: names of code of users that nodes must accept before they join.
        is_over: True if the run is over, so that nodes that are not accepted have done nothing wrong.

    Raises:
        InvalidInput: if it cannot listen there, or must not.
    """

    def __init__(
        self,
        listen: str,
        spool: Path,
        *,
        credentials: ServerCredentials | None,
        accepts: Callable[[Joining], str | None],
        clock: Clock,
        patience: Patience | None = None,
        schema: str = "",
        code: Sequence[str] = (),
        is_over: bool = False,
    ) -> None:
        if credentials is None:
            hold_to_loopback(listen)
        super().__init__(clock)
        self.patience = patience or Patience()
        self._spool = spool
        self.sessions: NodeSessions | None = None
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._is_closed = False
        self._due_s: dict[int, float] = {}  # by task
        self._payloads: dict[tuple[int, int | None], Payload] = {}
        self._listening = Listening(clock)
        self._service = NodeService(
            start=self._start,
            spool=spool,
            arrivals=self._arrivals,
            admits=None if credentials is None else credentials.roster.admits,
            accepts=accepts,
            clock=clock,
            refusals=self._refusals,
            patience=self.patience,
            schema=schema,
            code=code,
            is_over=is_over,
            identified=self._listening.newcomers.identify,
        )
        self._thread = LoopThread("nodes")
        try:
            self.port = self._thread.wait_for(self._serve(listen, credentials))
        except InvalidInput:
            # Else its thread would stay, one for each attempt.
            self._thread.end()
            raise
        spool.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds single updates
        for left in spool.iterdir():  # files of a server that was killed; nodes deliver again
            left.unlink()

    def registered(self) -> Sequence[int | str]:
        """All clients that joined before the members were fixed: numbers, then names."""
        joined = self._thread.call(lambda: [(node.client, node.samples) for node in self._service.nodes.values()])
        for client, samples in joined:
            self._members.come(client, samples)
        return super().registered()

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks out; the nodes fetch what belongs to them."""
        members = self.registered()
        assignments = []
        for task in tasks:
            self._open[task.id] = task
            self._due_s[task.id] = math.inf if task.deadline_s is None else self.clock + task.deadline_s
            payload = self._payload(task.content, task.tensors)
            assignments.append((task.client, self._assignment(task, members, payload)))
        if self.sessions is not None and assignments:
            self.sessions.begin(dict(assignments), self._open[assignments[0][1].task.number].model)
        self._thread.call(self._service.assign, assignments)

    def tell(self, client: int | str, message: ToSession) -> None:
        """Send a node a message of its session; one that is not connected does not get it."""
        self._thread.call(self._service.tell, client, message)

    def give_up(self, task: int, reason: str) -> None:
        """Fail a task that is under way; its failure arrives like an answer."""
        self._thread.call(self._service.give_up, task, reason)

    def renew(self, identities: bytes) -> None:
        """Send all nodes the plan again if these identities are not in it yet."""
        if identities != self._plan.identities:
            self._plan.identities = identities
            self._thread.call(self._service.make_known, self._plan, self._spec)

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks, but those that have arrived whole; tell the nodes of the others."""
        for task in self._thread.call(self._service.withdraw, [task for task in tasks if task in self._open]):
            self._due_s.pop(task, None)
            self._miss(task)

    def close(self, reason: str, *, is_final: bool) -> None:
        """Dismiss all nodes and stop listening; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.call(self._service.dismiss, reason, is_final=is_final)
        self._thread.wait_for(self._stop())
        self._thread.end()
        # After the loop has ended, for its calls read and write there.
        shutil.rmtree(self._spool, ignore_errors=True)

    def _make_known(self, plan: Plan, message: Format, fixed_part: Sequence[Tensor]) -> None:
        if fixed_part:
            self._spooled(fixed_part)  # for the whole run
        plan.heartbeat_s = self._service.patience.heartbeat_s
        self._plan = plan
        self._spec = message.uplink
        self._payloads = {}  # an earlier plan's versions of its model have the same numbers
        self._thread.call(self._service.make_known, plan, message.uplink)

    def _examine(self, model: tuple[Tensor, Tensor], limit_s: float, round_number: int) -> None:
        payload = self._payload((-self._examination, None), model)  # negative: no version of the model has it
        for client in self._attending():
            told = self._kept_state(client)
            examination = Examination(id=self._examination, payload=payload, round=round_number, **told)
            if self._thread.call(self._service.examine, client, examination):
                self._unscored.add(client)

    def _has_answer(self) -> bool:
        self._poll()
        return super()._has_answer()

    def _poll(self) -> None:
        while not self._arrivals.empty():
            self._take(self._arrivals.get())

    def pass_time(self, until: float) -> None:
        """Take what has arrived, or wait for it for a moment."""
        with contextlib.suppress(Empty):
            self._take(self.time.take(self._arrivals, min(until - self.clock, _LOOKS_EVERY_S)))
        if self.sessions is not None:
            self.sessions.tick()

    def _take(self, arrival: Arrival) -> None:
        if isinstance(arrival, SessionMessage):
            if self.sessions is not None:
                self.sessions.take_message(arrival.client, arrival.message)
        elif isinstance(arrival, TaskOutcome):
            if self.sessions is not None and arrival.answer is None and not arrival.lacks_model:
                # No client has the empty name: a failure of a task that is over makes no difference.
                holder = self._open[arrival.task].client if arrival.task in self._open else ""
                self.sessions.take_failure(holder)
            task = self._with_whole_model(arrival.task) if arrival.lacks_model else None
            if task is None:
                self._due_s.pop(arrival.task, None)
                self._outcomes.append(arrival)
            else:
                # A task that is sent again has what is left of its deadline.
                left_s = max(self._due_s[task.id] - self.clock, 0.0)
                self.dispatch([task if task.deadline_s is None else task._replace(deadline_s=left_s)])
        elif isinstance(arrival, Scored):
            self._take_scores(arrival.client, arrival.scores.id, arrival.scores)
        else:
            self._note_presence(arrival)
            if self.sessions is not None:
                # A node that is back lacks what was said while it was away.
                self.sessions.resend()

    def _refuse(self, client: int | str, reason: str) -> None:
        # refusals of calls are counted in that thread
        self._thread.call(super()._refuse, client, reason)

    def _payload(self, content: tuple[int, int | None], tensors: tuple[Tensor, ...]) -> Payload:
        """Description of the file of these tensors; files that no open task needs are removed."""
        if content in self._payloads:
            return self._payloads[content]
        needed = {task.content for task in self._open.values()}
        before = {payload.sha256 for payload in self._payloads.values()}
        self._payloads = {known: payload for known, payload in self._payloads.items() if known in needed}
        # By hash, for two contents may be one file.
        for digest in before - {payload.sha256 for payload in self._payloads.values()}:
            (self._spool / f"{digest}.out").unlink(missing_ok=True)
        self._payloads[content] = payload = self._spooled(tensors)
        return payload

    def _spooled(self, tensors: Sequence[Tensor]) -> Payload:
        """Write the file of these tensors, under its hash."""
        writing = self._spool / "writing"
        try:
            payload = written(writing, tensors)
        except OSError as error:
            writing.unlink(missing_ok=True)
            raise RunFailed(
                f"{self._spool} cannot be written to ({error.strerror or error}): make room there that this process "
                "may write to, then resume the run"
            ) from None
        writing.replace(self._spool / f"{payload.sha256}.out")  # a file under its hash is always whole
        return payload

    def _attending(self) -> list[int | str]:
        nodes = self._service.nodes
        there = self._thread.call(lambda: [node.client for node in nodes.values() if node.outbox is not None])
        return [client for client in there if self._members.take(client)]

    _free = _attending  # a cancelled task does not occupy its node

    async def _serve(self, listen: str, credentials: ServerCredentials | None) -> int:
        credentials_for = None if credentials is None else credentials.for_listening
        port = await self._listening.begin(listen, handler_of(self._service), credentials_for, who="the server")
        # Kept, since the loop itself holds tasks by weak references alone.
        self._watching = asyncio.create_task(self._service.watch())
        return port

    async def _stop(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])
        await self._listening.end(grace_s=2.0)
