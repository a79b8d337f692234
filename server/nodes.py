"""A fleet of real nodes, which dial in over gRPC and keep a stream open. Shapes: see :mod:`fed.messages`."""

import asyncio
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import grpc
from torch import Tensor

from fed.checkpoints import Tree
from fed.errors import InvalidInput, RunFailed
from fed.messages import Failure, GroupReply, Reply, Task
from fed.payloads import read, spec_of, written
from fed.protocol_pb2 import Assignment, Examination, Joining, Payload, Plan, Scores, TaskId
from fed.server.answers import checked
from fed.server.kept_states import KeptStates, TaskName
from fed.server.members import Members
from fed.server.node_service import Arrival, NodeService, Patience, handler_of

__all__ = ["NodeFleet"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_SAYS_EVERY_S = 30.0
_LOOKS_EVERY_S = 0.5  # so that Ctrl-C is heard
_OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 10_000),
)


class NodeFleet:
    """A :class:`fed.server.fleet.Fleet` of real nodes.

    What a client keeps changes when its answer is collected; a node is told with each task after which of its earlier
    ones that is, so that a server that begins again from a checkpoint finds what its clients kept then.

    Args:
        listen: HOST:PORT.
        spool: a folder for files on their way, of this fleet alone.
        credentials: of the server; None: anybody may come, which is for loopback alone.
        admits: (name, certificate in PEM) → why a node is refused, or None.
        accepts: what a node says when it joins → why it is refused, or None.
        patience: how long to wait for nodes.

    Raises:
        InvalidInput: if it cannot listen there.
    """

    def __init__(
        self,
        listen: str,
        spool: Path,
        *,
        credentials: grpc.ServerCredentials | None,
        admits: Callable[[str, bytes], str | None] | None,
        accepts: Callable[[Joining], str | None],
        patience: Patience | None = None,
    ) -> None:
        self._spool = spool
        spool.mkdir(parents=True, exist_ok=True)
        for left in spool.iterdir():
            left.unlink()
        self._arrivals: SimpleQueue[Arrival | Scores] = SimpleQueue()
        self._start = secrets.randbits(63)
        self._changed = threading.Condition()
        self._changes = self._seen = 0
        self._began_s = time.monotonic()
        self._members = Members()
        self._open: dict[int, Task] = {}
        self._kept = KeptStates()
        self._ready: deque[Arrival] = deque()
        self._keeps_checkpoints = True
        self._is_closed = False
        self._payloads: dict[str, tuple[tuple[Tensor, ...], Payload]] = {}
        self._examinations = 0
        self._message_size: int | None = None
        self._asks_place = False
        self._loop = asyncio.new_event_loop()
        self._service = NodeService(
            self._start, spool, self._arrivals, admits, accepts, self._notice, patience or Patience()
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True)
        self._thread.start()
        self.port = self._within_loop(self._serve(listen, credentials))

    @property
    def clock(self) -> float:
        """Seconds since the run began, those in which there was no server left out."""
        return time.monotonic() - self._began_s

    @property
    def refused(self) -> int:
        """How often something was refused."""
        return self._service.refused

    def begin(
        self,
        plan: Plan,
        answer: Sequence[Tensor],
        *,
        reports_models: bool,
        asks_place: bool = False,
        keeps_checkpoints: bool = True,
    ) -> None:
        """Tell nodes what they will work for.

        Args:
            plan: as they will get it.
            answer: tensors like those of an answer.
            reports_models: whether clients answer trained models, in the model's type, rather than messages.
            asks_place: whether clients are told their numbers.
            keeps_checkpoints: whether clients may have to go back to what they kept earlier.
        """
        self._keeps_checkpoints = keeps_checkpoints
        self._message_size = None if reports_models else answer[0].numel()
        self._asks_place = asks_place
        self._call(self._service.make_known, plan, spec_of(answer))

    def await_nodes(self, count: int) -> None:
        """Wait until so many attend."""
        said_s = -math.inf
        while (there := len(self._attending())) < count:
            if time.monotonic() > said_s + _SAYS_EVERY_S:
                _log.info("waiting for %d nodes, of which %d are there", count, there)
                said_s = time.monotonic()
            self._await_change(time.monotonic() + _SAYS_EVERY_S)

    def members(self) -> Sequence[int | str]:
        """All that have ever joined, those left out that came after the members were fixed; numbers, then names."""
        for client, samples in self._call(lambda: [(one.client, one.samples) for one in self._service.nodes.values()]):
            self._members.come(client, samples)
        return self._members.ids()

    def fix_members(self) -> None:
        """From now on nobody becomes one; who is none attends, and is asked nothing."""
        self._members.close()

    def nodes(self) -> Sequence[int | str]:
        """Those that attend and have no task."""
        with self._changed:
            self._seen = self._changes
        busy = {task.client for task in self._open.values()}
        there = set(self._attending()) - busy
        return [client for client in self.members() if client in there]

    def size_of(self, client: int | str) -> int:
        """How many samples a client said it trains on."""
        return self._members.size_of(client)

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks out; the nodes fetch what belongs to them."""
        members = self.members()
        assignments = []
        for task in tasks:
            self._open[task.id] = task
            assignment = Assignment(
                task=TaskId(start=self._start, number=task.id),
                round=task.round,
                repeats=task.repeats,
                lr=task.lr,
                steps=task.steps,
                broadcast_count=len(task.broadcast),
                population=len(members),
                place=members.index(task.client) if self._asks_place else None,
                payload=self._payload((task.vector_V, task.integers_I, *task.broadcast)),
                kept_after=_task_id(self._kept.after(task.client)),
                durable_after=_task_id(self._kept.durable_after(task.client)),
                deadline_s=task.deadline_s,
                takes_parts=task.takes_parts,
            )
            assignments.append((task.client, assignment))
        self._call(self._service.assign, assignments)

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[GroupReply | Reply | Failure]:
        """Answers as they arrive."""
        replies, said_s = 0, time.monotonic()
        while self._open and (enough is None or replies < enough):
            left_s = until - self.clock
            if not self._has_arrived(max(0.0, min(left_s, _LOOKS_EVERY_S))):
                if left_s <= 0:
                    return
                if time.monotonic() > said_s + _SAYS_EVERY_S:
                    waiting = sorted({str(task.client) for task in self._open.values()})
                    _log.info("waiting for answers of %d clients, %s among them", len(waiting), waiting[0])
                    said_s = time.monotonic()
                continue
            answer = self._taken(self._ready.popleft())
            replies += not isinstance(answer, Failure)
            yield answer
            del answer  # it may be large, and the next is on its way

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these, unless a node has been told that its answer is there; the other nodes are told."""
        for task in self._call(self._service.withdraw, [task for task in tasks if task in self._open]):
            self._open.pop(task)

    def wait(self, until: float = math.inf) -> bool:
        """Wait until a node comes or goes."""
        limit_s = self._began_s + until
        while not self._has_arrived():
            if self._await_change(min(limit_s, time.monotonic() + _SAYS_EVERY_S)):
                return True
            if time.monotonic() >= limit_s:
                return False
            _log.info("waiting for nodes; %d attend", len(self._attending()))
        return False

    def scores(self, model: tuple[Tensor, Tensor], limit_s: float) -> list[Scores]:
        """What nodes that attend find of a model, or of their own, on samples that they hold out.

        Args:
            model: (vector [V], integers [I]).
            limit_s: how long to wait for them.
        """
        self._examinations += 1
        payload = self._payload(model)
        asked = 0
        for client in self._attending():
            kept_after = _task_id(self._kept.after(client))
            examination = Examination(id=self._examinations, payload=payload, kept_after=kept_after)
            asked += self._call(self._service.examine, client, examination)
        found: list[Scores] = []
        until_s = time.monotonic() + limit_s
        while len(found) < asked and time.monotonic() < until_s:
            try:
                arrival = self._arrivals.get(timeout=_LOOKS_EVERY_S)
            except Empty:
                continue
            if isinstance(arrival, Arrival):
                self._ready.append(arrival)
            elif arrival.id == self._examinations:
                found.append(arrival)
        return found

    def state(self) -> Tree:
        """Clock, members, and after which task each client's state is to be found."""
        return {"clock": self.clock, "members": self._members.state(), "kept": self._kept.state()}

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said; open tasks are asked for again."""
        self._began_s = time.monotonic() - state["clock"]
        self._members.restore(state["members"])
        self._kept.restore(state["kept"])

    def close(self, reason: str, *, is_final: bool) -> None:
        """Send nodes home and listen no more; again, nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._call(self._service.dismiss, reason, is_final=is_final)
        self._within_loop(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for left in self._spool.iterdir():
            left.unlink(missing_ok=True)
        self._spool.rmdir()

    def _has_arrived(self, within_s: float = 0.0) -> bool:
        """Whether the answer to an open task is there; nothing else that arrived is of interest any more."""
        while True:
            while self._ready and self._ready[0].task not in self._open:
                gone = self._ready.popleft()
                if gone.path is not None:
                    gone.path.unlink(missing_ok=True)
            if self._ready:
                return True
            try:
                arrival = self._arrivals.get(timeout=within_s) if within_s else self._arrivals.get_nowait()
            except Empty:
                return False
            if isinstance(arrival, Arrival):
                self._ready.append(arrival)

    def _taken(self, arrival: Arrival) -> GroupReply | Reply | Failure:
        task = self._open.pop(arrival.task)
        if arrival.answer is None or arrival.path is None:
            problem = f"its training diverged: {arrival.problem}" if arrival.diverged else arrival.problem
            return Failure(task.id, task.round, task.client, problem)  # not as diverged: no node may end the run
        answer = arrival.answer
        vector, integers_I = read(arrival.path, answer.payload)
        arrival.path.unlink(missing_ok=True)
        reply = checked(
            task,
            (vector, integers_I),
            samples=answer.samples,
            weight=answer.weight,
            train_loss=answer.train_loss,
            size_bytes=answer.payload.size_bytes,
            message_size=self._message_size,
        )
        if isinstance(reply, str):
            self._service.refused += 1
            _log.warning("refused %r: %s", task.client, reply)
            return Failure(task.id, task.round, task.client, f"its answer was refused: {reply}")
        self._kept.count(task.client, (self._start, task.id), is_durable=not self._keeps_checkpoints)
        return reply

    def _payload(self, tensors: tuple[Tensor, ...]) -> Payload:
        """The file of these tensors, of which all tasks of a version have one; others go when nobody needs them."""
        for known, payload in self._payloads.values():
            if len(known) == len(tensors) and all(map(_is, known, tensors)):
                return payload
        needed = {id(task.vector_V) for task in self._open.values()}
        for digest, (known, _) in [*self._payloads.items()]:
            if id(known[0]) not in needed:
                del self._payloads[digest]
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
        writing.replace(self._spool / f"{payload.sha256}.out")
        self._payloads[payload.sha256] = tensors, payload
        return payload

    def _attending(self) -> list[int | str]:
        there = self._call(lambda: [node.client for node in self._service.nodes.values() if node.outbox is not None])
        return [client for client in there if self._members.take(client)]

    def _notice(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _await_change(self, until_s: float) -> bool:
        """Whether a node came or went since :meth:`nodes` was asked, until then."""
        while True:
            with self._changed:
                left_s = min(until_s - time.monotonic(), _LOOKS_EVERY_S)
                if self._changes != self._seen or self._changed.wait_for(
                    lambda: self._changes != self._seen, max(left_s, 0.0)
                ):
                    self._seen = self._changes
                    return True
            if time.monotonic() >= until_s or not self._arrivals.empty():
                return False

    def _call(self, function: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
        """In the loop's thread, which all that nodes do runs in."""

        async def call() -> _Result:
            return function(*arguments, **named)

        result: _Result = self._within_loop(call())
        return result

    def _within_loop(self, step: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(step, self._loop).result()
        except futures.CancelledError as error:
            raise RunFailed("the server's connections were closed") from error

    async def _serve(self, listen: str, credentials: grpc.ServerCredentials | None) -> int:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((handler_of(self._service),))
        try:
            if credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise InvalidInput(
                f"the server cannot listen on {listen}: is another program there, and is the address this machine's?"
            ) from error
        await self._server.start()
        self._watching = asyncio.create_task(self._service.watch())
        return int(port)

    async def _stop(self) -> None:
        self._watching.cancel()
        await self._server.stop(grace=2.0)


def _task_id(found: TaskName | None) -> TaskId | None:
    return None if found is None else TaskId(start=found[0], number=found[1])


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other
