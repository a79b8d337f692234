"""A fleet of real nodes, which dial in over gRPC and keep a stream open."""

import asyncio
import contextlib
import math
import shutil
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent import futures
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from fed.errors import InvalidInput, InvalidPayload, RunFailed
from fed.identity.credentials import ServerCredentials, hold_to_loopback
from fed.processes.clock import Clock
from fed.protocol.limits import MOST_MESSAGE_BYTES
from fed.protocol.protocol_pb2 import Examination, Joining, Payload, Plan, ToSession
from fed.server.grpc.leases import TaskOutcome
from fed.server.grpc.service import Arrival, NodeService, Patience, Scored, SessionMessage, handler_of
from fed.server.real_fleet import RealFleet
from fed.vectors.tensors import Tensor
from fed.wire.format import Format
from fed.wire.messages import Answer, Task
from fed.wire.newcomers import HANDSHAKE_MS, Newcomers
from fed.wire.payloads import read, written

if TYPE_CHECKING:
    from fed.server.grpc.sessions import NodeSessions

__all__ = ["NodeFleet"]

_Result = TypeVar("_Result")
_LOOKS_EVERY_S = 0.5  # so that Ctrl-C is heard
_ENDING_S = 2.0  # seconds in which gRPC's calls may end after the server has stopped
_OPTIONS = (
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else a second server could take the same port, and some of the nodes
    ("grpc.max_concurrent_streams", 10_000),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    # What arrives waits in memory until it is read: let nodes send no more ahead, however fast their lines are.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 18),
)


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
    ) -> None:
        if credentials is None:
            hold_to_loopback(listen)
        super().__init__(clock)
        self.patience = patience or Patience()
        self._spool = spool
        self.sessions: NodeSessions | None = None
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._ready: deque[TaskOutcome] = deque()
        self._is_closed = False
        self._due_s: dict[int, float] = {}  # by task
        self._payloads: dict[tuple[int, int | None], Payload] = {}
        self._loop = asyncio.new_event_loop()
        self._newcomers = Newcomers(clock)
        self._service = NodeService(
            start=self._start,
            spool=spool,
            arrivals=self._arrivals,
            admits=None if credentials is None else credentials.roster.admits,
            accepts=accepts,
            clock=clock,
            refusals=self._refusals,
            patience=self.patience,
            identified=self._newcomers.identify,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True)
        self._thread.start()
        try:
            self.port = self._within_loop(self._serve(listen, credentials))
        except InvalidInput:
            self._end_loop()
            raise
        spool.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds single updates
        for left in spool.iterdir():  # files of a server that was killed; nodes deliver again
            left.unlink()

    def registered(self) -> Sequence[int | str]:
        """All clients that joined before the members were fixed: numbers, then names."""
        for client, samples in self._call(lambda: [(one.client, one.samples) for one in self._service.nodes.values()]):
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
        self._call(self._service.assign, assignments)

    def tell(self, client: int | str, message: ToSession) -> None:
        """Send a node a message of its session; one that is not connected does not get it."""
        self._call(self._service.tell, client, message)

    def give_up(self, task: int, reason: str) -> None:
        """Fail a task that is under way; its failure arrives like an answer."""
        self._call(self._service.give_up, task, reason)

    def renew(self, identities: bytes) -> None:
        """Send all nodes the plan again if these identities are not in it yet."""
        if identities != self._plan.identities:
            self._plan.identities = identities
            self._call(self._service.make_known, self._plan, self._spec)

    def pass_time(self, until: float) -> None:
        """Take what has arrived, or wait for it for a moment."""
        self._pass_time(until)

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks, but those that have arrived whole; tell the nodes of the others."""
        for task in self._call(self._service.withdraw, [task for task in tasks if task in self._open]):
            self._miss(task)

    def close(self, reason: str, *, is_final: bool) -> None:
        """Dismiss all nodes and stop listening; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._call(self._service.dismiss, reason, is_final=is_final)
        self._within_loop(self._stop())
        self._end_loop()
        shutil.rmtree(self._spool, ignore_errors=True)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)  # a plain stop() from this thread would not wake the loop
        self._thread.join()
        self._loop.close()

    def _make_known(self, plan: Plan, message: Format) -> None:
        plan.heartbeat_s = self._service.patience.heartbeat_s
        self._plan = plan
        self._spec = message.uplink
        self._call(self._service.make_known, plan, message.uplink)

    def _examine(self, model: tuple[Tensor, Tensor], limit_s: float) -> None:
        payload = self._payload((-self._examination, None), model)  # negative: no version of the model has it
        for client in self._attending():
            examination = Examination(id=self._examination, payload=payload, **self._kept_state(client))
            if self._call(self._service.examine, client, examination):
                self._unscored.add(client)

    def _has_answer(self) -> bool:
        self._poll()
        return bool(self._ready)

    def _poll(self) -> None:
        while not self._arrivals.empty():
            self._take(self._arrivals.get())

    def _pass_time(self, until: float) -> None:
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
                # no client has the empty name: a failure of a task that is over makes no difference
                holder = self._open[arrival.task].client if arrival.task in self._open else ""
                self.sessions.take_failure(holder)
            task = self._with_whole_model(arrival.task) if arrival.lacks_model else None
            if task is None:
                self._ready.append(arrival)
            else:
                left_s = max(self._due_s[task.id] - self.clock, 0.0)
                self.dispatch([task if task.deadline_s is None else task._replace(deadline_s=left_s)])
        elif isinstance(arrival, Scored):
            self._take_scores(arrival.client, arrival.scores.id, arrival.scores)
        else:
            self._note_presence(arrival)
            if self.sessions is not None:
                self.sessions.resend()

    def _next_answer(self) -> Answer:
        arrival = self._ready.popleft()
        self._due_s.pop(arrival.task, None)
        task = self._open[arrival.task]
        if arrival.answer is None or arrival.path is None:
            return Answer.failure(task, arrival.problem)
        tensors = read(arrival.path, arrival.answer.payload)
        arrival.path.unlink(missing_ok=True)
        try:
            return self._received(task, arrival.answer, tensors)
        except InvalidPayload as error:
            self._call(self._refusals.note, task.client, str(error))
            return Answer.failure(task, f"its answer was refused: {error}")

    def _payload(self, content: tuple[int, int | None], tensors: tuple[Tensor, ...]) -> Payload:
        """Description of the file of these tensors; files that no open task needs are removed."""
        if content in self._payloads:
            return self._payloads[content]
        needed = {task.content for task in self._open.values()}
        before = {payload.sha256 for payload in self._payloads.values()}
        self._payloads = {known: payload for known, payload in self._payloads.items() if known in needed}
        for digest in before - {payload.sha256 for payload in self._payloads.values()}:
            (self._spool / f"{digest}.out").unlink(missing_ok=True)
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
        self._payloads[content] = payload
        return payload

    def _attending(self) -> list[int | str]:
        there = self._call(lambda: [node.client for node in self._service.nodes.values() if node.outbox is not None])
        return [client for client in there if self._members.take(client)]

    _free = _attending  # a cancelled task does not occupy its node

    def _call(self, function: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
        """Call a function in the loop's thread, in which all calls of nodes run."""

        async def call() -> _Result:
            return function(*arguments, **named)

        return self._within_loop(call())

    def _within_loop(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            # one thread alone touches the service, so that it needs no locks
            return asyncio.run_coroutine_threadsafe(step, self._loop).result()
        except futures.CancelledError as error:
            raise RunFailed("the server's connections were closed") from error

    async def _serve(self, listen: str, credentials: ServerCredentials | None) -> int:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((handler_of(self._service),))
        try:
            if credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, credentials.for_grpc(self._newcomers.arrived))
        except RuntimeError as error:
            raise InvalidInput(
                f"the server cannot listen on {listen}: is another program there, and is the address this machine's?"
            ) from error
        await self._server.start()
        # kept, since the loop itself holds tasks by weak references alone
        self._watching = [asyncio.create_task(self._service.watch())]
        if credentials is not None:
            self._watching.append(asyncio.create_task(self._newcomers.watch(int(port))))
        return int(port)

    async def _stop(self) -> None:
        for watching in self._watching:
            watching.cancel()
        await asyncio.wait(self._watching)  # the door's sockets would keep the port taken
        await self._server.stop(grace=2.0)
        if ending := asyncio.all_tasks() - {asyncio.current_task()}:  # gRPC's calls take some turns of the loop more
            await asyncio.wait(ending, timeout=_ENDING_S)
