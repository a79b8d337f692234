"""An edge node: dials the coordinator, keeps a stream open, trains what it is asked, and comes back after failures."""

import logging
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import grpc

from fed import __version__
from fed.clients.data import ClientId
from fed.clients.node_training import BEGAN_ANEW, Described, Order, TaskDone, TrainingProcess, as_experiment
from fed.clients.tasks import Train
from fed.credentials import hold_to_loopback
from fed.errors import DamagedPayload, FedError, InvalidInput, InvalidPayload, RunFailed
from fed.messages import one_line
from fed.payloads import Incoming, chunks
from fed.protocol_pb2 import (
    Answer,
    Assignment,
    Examination,
    Failed,
    FromNode,
    Heartbeat,
    Joining,
    Part,
    Payload,
    Plan,
    Scores,
    Signature,
    TaskId,
    ToNode,
    Wanted,
)
from fed.protocol_pb2 import Tensor as TensorMessage
from fed.protocol_pb2_grpc import CoordinationStub

__all__ = ["EdgeNode", "NodePatience"]

_log = logging.getLogger(__name__)
_PROTOCOL = 1
_MOST_WAITING = 100  # things that a server asks for before they are done
_MOST_CLASSES = 1 << 24
_MOST_CLIENTS = 1 << 20
_TIMES_DAMAGED = 3
_SHORTEST_S, _LONGEST_S = 0.01, 3600.0
_LOOKS_EVERY_S = 0.2  # so that it hears at once when it is to stop
_OPTIONS = (("grpc.max_receive_message_length", 4 << 20), ("grpc.initial_reconnect_backoff_ms", 200))


_NO_PROXY = ("grpc.enable_http_proxy", 0)  # which is another machine


@dataclass(frozen=True)
class NodePatience:
    """How long a node waits.

    Args:
        silence_s: without a sign of life from the server, after which the connection counts as lost.
        call_s: for one transfer; a longer one goes on in the next.
        backoff_s: before it dials again, doubled up to ``most_backoff_s``, times a random factor.
        most_backoff_s: the longest pause.
    """

    silence_s: float = 20.0
    call_s: float = 60.0
    backoff_s: float = 0.2
    most_backoff_s: float = 15.0


@dataclass
class _Held:
    """A task, until its answer is delivered or nobody wants it; with when it must be there, by our clock."""

    assignment: Assignment
    path: Path
    due_s: float
    done: TaskDone | None = None


class _Asked(NamedTuple):
    """An examination, and where its scores go, as long as that connection lasts."""

    examination: Examination
    outbox: "queue.Queue[FromNode | None]"


@dataclass
class EdgeNode:
    """One node of a deployment.

    Args:
        server: HOST:PORT.
        credentials: for the channel; None: without any, on loopback.
        name: in the certificate, or where there is none what it is to be called.
        client: the id that it stands for.
        training: its training process.
        folder: for files on their way.
        allowed: ``python:`` names that it accepts.
        patience: how long it waits.
    """

    server: str
    credentials: grpc.ChannelCredentials | None
    name: str
    client: ClientId
    training: TrainingProcess
    folder: Path
    allowed: Sequence[str] = ()
    patience: NodePatience = field(default_factory=NodePatience)
    tasks_done: int = 0

    def __post_init__(self) -> None:
        self._held: dict[tuple[int, int], _Held] = {}
        self._work: queue.Queue[_Held | Plan | _Asked] = queue.Queue()
        self._mark = secrets.token_hex(4)  # nothing that an earlier start left open can be in the way
        self._connected = threading.Event()
        self._over = threading.Event()
        self._outbox: queue.Queue[FromNode | None] = queue.Queue()
        self._lock = threading.Lock()
        self._stub: CoordinationStub | None = None
        self._problem: Exception | None = None
        self._heard_s = 0.0
        self._delivery_s: float | None = None  # that the last one took
        self._heartbeat_s = 1.0
        self._described: Described | None = None
        self._plan: Plan | None = None
        self._farewell = ""

    def run(self, *, stopped: threading.Event | None = None) -> str:
        """Work until the server says farewell for good; its last words.

        Args:
            stopped: ends it from another thread.

        Raises:
            InvalidInput: if the node's data cannot be used, it does not accept what it is to run, or goes without
                credentials to another machine.
            RunFailed: if the server refuses it for good.
        """
        stopped = stopped or threading.Event()
        self._described = self.training.describe()
        self._clear_folder()
        threading.Thread(target=self._work_on, name="work", daemon=True).start()
        try:
            self._attend_again_and_again(stopped)
        finally:
            self._over.set()
        return self._farewell

    def _attend_again_and_again(self, stopped: threading.Event) -> None:
        failures = 0
        while not stopped.is_set() and not self._farewell:
            began_s, words = time.monotonic(), "it has ended the connection"
            try:
                self._attend(stopped)
            except grpc.RpcError as error:
                self._hold_to_authority(error)
                words = _words_of(error)
            if self._problem is not None:
                raise self._problem
            if stopped.is_set() or self._farewell:
                return
            failures = 0 if time.monotonic() - began_s > self.patience.silence_s else failures + 1
            if failures in (0, 1, 5) or failures % 20 == 0:
                _log.info("%s cannot be reached (%s); trying again", self.server, words)
            stopped.wait(self._pause_s(failures))

    def _clear_folder(self) -> None:
        """Remove what an earlier start left when it was killed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.iterdir():
                left.unlink()
        except OSError as error:
            raise InvalidInput(f"{self.folder} cannot be written to ({error.strerror}): give another --state") from None

    def _pause_s(self, failures: int) -> float:
        """Longer after each failure, and not the same for all nodes."""
        pause_s = self.patience.backoff_s * 2.0 ** min(failures, 20)
        return min(pause_s, self.patience.most_backoff_s) * (0.5 + random.random())

    def _attend(self, stopped: threading.Event) -> None:
        """One connection, for as long as it lasts."""
        outbox: queue.Queue[FromNode | None] = queue.Queue()
        described = self._described
        assert described is not None
        signature = Signature(
            input_shape=described.input_shape, input_dtype=described.input_dtype, classes=described.classes
        )
        with self._lock:
            joining = Joining(
                protocol=_PROTOCOL,
                software=f"fed {__version__}",
                name=self.name,
                samples=described.samples,
                signature=signature,
                held=[item.assignment.task for item in self._held.values()],
            )
            outbox.put(FromNode(joining=joining))
            self._outbox = outbox
        with self._channel() as channel:
            self._stub = CoordinationStub(channel)  # type: ignore[no-untyped-call]
            self._heard_s = time.monotonic()
            call = self._stub.Attend(iter(outbox.get, None))
            ended = threading.Event()
            watching = threading.Thread(target=self._watch, args=(call, outbox, ended, stopped), daemon=True)
            watching.start()
            try:
                for message in call:
                    self._heard_s = time.monotonic()
                    self._take(message)
                    if self._farewell or self._problem is not None:
                        return
            finally:
                ended.set()
                self._connected.clear()
                outbox.put(None)
                call.cancel()
                watching.join()

    def _channel(self) -> grpc.Channel:
        if self.credentials is None:
            hold_to_loopback(self.server)
            return grpc.insecure_channel(self.server, (*_OPTIONS, _NO_PROXY))
        return grpc.secure_channel(self.server, self.credentials, _OPTIONS)

    def _watch(
        self, call: grpc.Call, outbox: "queue.Queue[FromNode | None]", ended: threading.Event, stopped: threading.Event
    ) -> None:
        """Give signs of life, and give the connection up when there are none from the other side."""
        said_s = time.monotonic()
        while not ended.wait(_LOOKS_EVERY_S):
            now_s = time.monotonic()
            if stopped.is_set() or self._problem is not None or now_s > self._heard_s + self.patience.silence_s:
                call.cancel()
                return
            if now_s > said_s + min(self._heartbeat_s, self.patience.silence_s / 4):
                with self._lock:
                    held = [item.assignment.task for item in self._held.values()]
                outbox.put(FromNode(heartbeat=Heartbeat(held=held)))
                said_s = now_s

    def _take(self, message: ToNode) -> None:
        if self._work.qsize() >= _MOST_WAITING:
            self._problem = RunFailed(
                f"{self.server} asks for more than {_MOST_WAITING} things at once, which no server should: is it one "
                "that you trust?"
            )
        elif message.HasField("plan"):
            if not _SHORTEST_S <= message.plan.heartbeat_s <= _LONGEST_S:
                self._problem = RunFailed(
                    f"{self.server} asks for a sign of life every {message.plan.heartbeat_s} s, which must be "
                    f"{_SHORTEST_S} to {_LONGEST_S} s"
                )
                return
            is_known = not self._connected.is_set() and message.plan == self._plan  # each connection begins with one
            self._heartbeat_s, self._plan = message.plan.heartbeat_s, message.plan
            _log.info("connected to %s, as %r", self.server, self.client)
            self._connected.set()
            if not is_known:
                self._work.put(message.plan)
        elif message.HasField("assignment"):
            self._accept(message.assignment)
        elif message.HasField("withdrawal"):
            with self._lock:
                self._held.pop(_key_of(message.withdrawal.task), None)
        elif message.HasField("examination"):
            self._work.put(_Asked(message.examination, self._outbox))
        elif message.HasField("farewell"):
            reason = one_line(message.farewell.reason)
            if message.farewell.is_final:
                self._farewell = reason or "the server needs no more"
            else:
                _log.info("%s ends the connection: %s", self.server, reason)

    def _prepare(self, plan: Plan) -> None:
        described = self._described
        assert described is not None
        said = plan.signature
        if (tuple(said.input_shape), said.input_dtype) != (
            described.input_shape,
            described.input_dtype,
        ) or not described.classes <= said.classes <= _MOST_CLASSES:
            raise RunFailed("the server's plan is for other samples than this node's: is it the right server?")
        self.training.prepare(as_experiment(plan.experiment, self.allowed), plan.signature)

    def _accept(self, assignment: Assignment) -> None:
        key = _key_of(assignment.task)
        due_s = time.monotonic() + assignment.deadline_s
        with self._lock:
            if key not in self._held:
                self._held[key] = _Held(assignment, self.folder / f"{self._mark}-{key[0]}-{key[1]}", due_s)
                self._work.put(self._held[key])
        self._outbox.put(FromNode(accepted=assignment.task))

    def _work_on(self) -> None:
        """Tasks, one after another."""
        while not self._over.is_set():
            item = self._work.get()
            try:
                if isinstance(item, Plan):
                    self._prepare(item)
                elif isinstance(item, _Asked):
                    self._score(item)
                else:
                    self._do(item)
            except (FedError, OSError) as error:
                if isinstance(item, Plan) and isinstance(error, InvalidInput):
                    self._problem = type(error)(one_line(str(error).replace("\n", "; ")))
                else:
                    self._have_failed(item, _sentence(error, self.folder))
            except Exception as error:  # whatever it is, the next task may go well
                _log.exception("a task failed")
                self._have_failed(item, f"{type(error).__name__}: {error}")

    def _have_failed(self, item: "_Held | Plan | _Asked", reason: str) -> None:
        if isinstance(item, _Held):
            self._give_up(item, reason)
        elif isinstance(item, Plan):
            self._problem = RunFailed(one_line(reason.replace("\n", "; ")))

    def _do(self, held: _Held) -> None:
        """Train as often as it takes to send the answer, twice at most: who dies of a task will die of it again."""
        done = self._train(held)
        if done is not None and done.died and not self._over.is_set():
            _log.warning("%s; task %d begins anew", done.problem, held.assignment.task.number)
            done = self._train(held)  # from a new file: half an answer may be in it
        if done is not None and done.problem:
            self._give_up(held, done.problem, diverged=done.diverged)
        elif done is not None:
            if done.began_anew:
                _log.warning("task %d: %s", held.assignment.task.number, BEGAN_ANEW)
            held.done = done
            self._deliver(held, done)

    def _train(self, held: _Held) -> TaskDone | None:
        """What came of it; None if nobody wants it any more."""
        assignment = held.assignment
        began_s = time.monotonic()
        if not self._download(
            assignment.payload, held.path, self._spec_of(assignment.payload), lambda: self._is_wanted(held)
        ):
            held.path.unlink(missing_ok=True)
            return None
        until_s = None
        if assignment.HasField("deadline_s") and assignment.takes_parts:  # the way back may be as long as the way here
            until_s = held.due_s - (self._delivery_s or time.monotonic() - began_s)
        if assignment.durable_after.start:
            self.training.forget_before(_name_of(assignment.durable_after))
        train = Train(
            (self.client,),
            assignment.round,
            "messages",
            assignment.lr if assignment.HasField("lr") else None,
            (assignment.steps if assignment.HasField("steps") else None,),
            assignment.broadcast_count,
            assignment.population,
            (assignment.place,) if assignment.HasField("place") else (),
            ((assignment.round, *filter(None, [assignment.repeats])),),
        )
        kept_after = _name_of(assignment.kept_after) if assignment.kept_after.start else None
        payload = assignment.payload.SerializeToString()
        return self.training.train(Order(_name_of(assignment.task), train, payload, held.path, kept_after, until_s))

    def _score(self, asked: _Asked) -> None:
        examination, outbox = asked
        path = self.folder / f"{self._mark}-scores-{examination.id}"
        scores = Scores(id=examination.id, problem="it was asked for no longer")
        try:
            if self._download(examination.payload, path, self.training.spec[:2], lambda: self._outbox is outbox):
                kept_after = _name_of(examination.kept_after) if examination.kept_after.start else None
                found = self.training.score(examination.payload.SerializeToString(), path, kept_after)
                scores = Scores(id=examination.id, samples=found[0], loss=found[1], metric=found[2])
        except (FedError, RuntimeError, OSError) as error:
            problem = str(error) if isinstance(error, RuntimeError) else _sentence(error, self.folder)
            scores = Scores(id=examination.id, problem=problem)
        finally:
            path.unlink(missing_ok=True)
        outbox.put(FromNode(scores=scores))

    def _download(
        self, payload: Payload, path: Path, spec: Sequence[TensorMessage], is_wanted: Callable[[], bool]
    ) -> bool:
        """Fetch a file, however often the connection breaks; False if nobody wants it any more."""
        incoming, failures, times_damaged = Incoming(path, payload, spec), 0, 0
        while is_wanted() and not self._over.is_set():
            before_bytes = incoming.received_bytes
            try:
                if not incoming.is_complete:
                    wanted = Wanted(sha256=payload.sha256, offset=incoming.received_bytes)
                    assert self._stub is not None
                    for chunk in self._stub.Download(wanted, timeout=self.patience.call_s):
                        incoming.add(chunk)
                if incoming.is_complete:
                    incoming.check()
                    return True
            except DamagedPayload as error:
                times_damaged += 1
                if times_damaged == _TIMES_DAMAGED:
                    raise
                _log.warning("a download was damaged (%s); it begins anew", error)
                incoming = Incoming(path, payload, spec)
            except (grpc.RpcError, ValueError) as error:  # a channel that was closed meanwhile raises ValueError
                if _is_gone(error):
                    raise RunFailed("the server has no such payload any more") from None
                _log.info(
                    "a download broke off (%s); it will go on after %d bytes", _words_of(error), incoming.received_bytes
                )
                failures += 1
                self._await_connection(failures, is_wanted)
            else:
                failures = failures + 1 if incoming.received_bytes == before_bytes else 0
                if failures:
                    self._await_connection(failures, is_wanted)
        return False

    def _spec_of(self, payload: Payload) -> list[TensorMessage]:
        """What a task's tensors must be, as far as it can be known: what is broadcast may have a number a client."""
        model, broadcast, said = self.training.spec[:2], self.training.spec[2:], payload.tensors[2:]
        if len(said) != len(broadcast):
            return [*model, *broadcast]
        most = max([_MOST_CLIENTS, *(part.numbers for part in model)])
        fits = [one.dtype == other.dtype and one.numbers <= most for one, other in zip(said, broadcast, strict=True)]
        return [*model, *(said if all(fits) else broadcast)]

    def _await_connection(self, failures: int, is_wanted: Callable[[], bool]) -> None:
        """Before a transfer goes on: a pause, and until the server is there."""
        until_s = time.monotonic() + self._pause_s(failures)
        while is_wanted() and not self._over.is_set():
            if time.monotonic() > until_s and self._connected.is_set():
                return
            time.sleep(_LOOKS_EVERY_S / 4)

    def _deliver(self, held: _Held, done: TaskDone) -> None:
        """Send an answer until the server has it, or says that it wants none."""
        payload = Payload.FromString(done.payload)
        offset = failures = 0
        began_s = time.monotonic()
        while self._is_wanted(held) and not self._over.is_set():
            answer = Answer(
                task=held.assignment.task,
                payload=payload,
                offset=offset,
                weight=done.weight,
                samples=done.samples,
                train_loss=done.train_loss,
                began_anew=done.began_anew,
            )
            held.path.stat()  # of a file that is gone gRPC would not say so, but break off again and again
            try:
                assert self._stub is not None
                receipt = self._stub.Deliver(_parts(answer, held.path), timeout=self.patience.call_s)
            except (grpc.RpcError, ValueError) as error:
                _log.info("a delivery broke off (%s); it will go on", _words_of(error))
                failures += 1
                self._await_connection(failures, lambda: self._is_wanted(held))
                continue
            if receipt.accepted:
                _log.info("round %d: answered, with a training loss of %.4g", held.assignment.round, done.train_loss)
                self._let_go(held)
                self.tasks_done += 1
                self._delivery_s = time.monotonic() - began_s
                return
            if receipt.reason:
                reason = one_line(receipt.reason)
                _log.warning("the answer to task %d was refused: %s", held.assignment.task.number, reason)
                self._let_go(held)
                return
            if receipt.received_bytes > payload.size_bytes:
                raise InvalidPayload(
                    f"the server has {receipt.received_bytes} of {payload.size_bytes} bytes of an answer, as it says"
                )
            failures = failures + 1 if receipt.received_bytes <= offset else 0
            offset = receipt.received_bytes
            if failures:
                self._await_connection(failures, lambda: self._is_wanted(held))
        held.path.unlink(missing_ok=True)

    def _give_up(self, held: _Held, reason: str, *, diverged: bool = False) -> None:
        if self._over.is_set():  # it may be done after another start
            return
        _log.warning("task %d of round %d: %s", held.assignment.task.number, held.assignment.round, reason)
        key = _key_of(held.assignment.task)
        with self._lock:  # at once, so that a connection that begins meanwhile names the task or hears of it
            if self._held.get(key) is held:
                del self._held[key]
                self._outbox.put(FromNode(failed=Failed(task=held.assignment.task, reason=reason, diverged=diverged)))
        held.path.unlink(missing_ok=True)

    def _is_wanted(self, held: _Held) -> bool:
        with self._lock:
            return self._held.get(_key_of(held.assignment.task)) is held

    def _let_go(self, held: _Held) -> None:
        with self._lock:
            self._held.pop(_key_of(held.assignment.task), None)
        held.path.unlink(missing_ok=True)

    def _hold_to_authority(self, error: grpc.RpcError) -> None:
        """What no patience mends ends the node."""
        code, words = error.code(), one_line(error.details() or "")
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            self._problem = RunFailed(f"{self.server} refuses this node: {words}")
        elif "CERTIFICATE_VERIFY_FAILED" in words or "not match" in words:
            self._problem = RunFailed(
                f"{self.server} is not the server that this node's authority certifies: {words}; is it the right "
                "address, and are the credentials of the same authority?"
            )


def _parts(answer: Answer, path: Path) -> Iterator[Part]:
    yield Part(answer=answer)
    for chunk in chunks(path, answer.offset):
        yield Part(chunk=chunk)


def _key_of(task: TaskId) -> tuple[int, int]:
    return task.start, task.number


def _name_of(task: TaskId) -> str:
    return f"{task.start}-{task.number}"


def _sentence(error: FedError | OSError, folder: Path) -> str:
    if isinstance(error, FedError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"a file of the node's is gone from {folder}: leave what is there to the node"
    return f"the node cannot write to {folder} ({error.strerror or error}): make room there"


def _is_gone(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.NOT_FOUND


def _words_of(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name.lower().replace('_', ' ')}: {one_line(error.details() or '')}"
    return str(error)
