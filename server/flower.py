"""A fleet of the nodes of a Flower federation, over the grid that its ``ServerApp`` is given.

Shapes: see :mod:`fed.messages`.
"""

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fed.checkpoints import Tree
from fed.errors import InvalidPayload
from fed.flower_records import array_of, field, flower, packed, unpacked
from fed.messages import Failure, GroupReply, Reply, Task
from fed.protocol_pb2 import Joining, Plan, Scores, Signature
from fed.server.answers import checked, update_of
from fed.server.kept_states import KeptStates, TaskName
from fed.server.members import Members

__all__ = ["FlowerFleet", "FlowerPatience"]

_log = logging.getLogger(__name__)
_MESSAGE_LOST, _NODE_LOST = 3, 5  # Flower's codes
_UNDELIVERED = (_MESSAGE_LOST, _NODE_LOST)
_SAYS_EVERY_S = 30.0
_SHORTEST_TTL_S = 1.0


@dataclass(frozen=True)
class FlowerPatience:
    """How long to wait on Flower's engine.

    Args:
        pull_every_s: between two looks for answers.
        look_every_s: between two looks for nodes.
        absent_s: for a node that is gone to come back for its task, after which the task has failed.
        sends: how often a task is sent before it has failed.
    """

    pull_every_s: float = 0.05
    look_every_s: float = 2.0
    absent_s: float = 60.0
    sends: int = 3


class _Sent(NamedTuple):
    """A message under way: to which node and client, and of which task or examination."""

    node: int
    kind: Literal["query", "train", "evaluate"]
    client: int | str | None = None
    number: int = 0


class _Waiting(NamedTuple):
    """A task that is to be sent: since when, and how often it was sent before."""

    since_s: float
    sends: int


class FlowerFleet:
    """A :class:`fed.server.fleet.Fleet` of Flower's nodes.

    A node has one message in flight, so one that trains on for a round which is over counts as not there until its
    answer, which nobody waits for, has come. A message that Flower could not deliver, or whose node was lost, is sent
    again. A client is who its node says: the first of several nodes that say the same, for as long as that is there.

    Args:
        grid: Flower's.
        accepts: what a node says of its data → why it is refused, or None.
        patience: how long to wait.
    """

    def __init__(
        self, grid: Any, *, accepts: Callable[[Joining], str | None], patience: FlowerPatience | None = None
    ) -> None:
        self.refused = 0
        """How often something was refused."""
        self._grid = grid
        self._accepts = accepts
        self._patience = patience or FlowerPatience()
        self._run = secrets.token_hex(8)
        self._start = secrets.randbits(62)
        self._began_s = time.monotonic()
        self._look_s = -math.inf
        self._changes = self._seen = 0
        self._present: dict[int, tuple[int | str, int] | None] = {}  # node → (client, samples); None: not known (yet)
        self._members = Members()
        self._sent: dict[str, _Sent] = {}
        self._open: dict[int, Task] = {}
        self._due_s: dict[int, float] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._sends: dict[int, int] = {}
        self._answers: deque[GroupReply | Failure] = deque()
        self._scores: list[Scores] = []
        self._examination = 0
        self._kept = KeptStates()
        self._array: tuple[tuple[Tensor, ...], Any] | None = None
        self._signature: Signature | None = None
        self._message_size: int | None = None
        self._asks_place = False

    @property
    def clock(self) -> float:
        """Seconds since the run began, those in which there was no server left out."""
        return time.monotonic() - self._began_s

    def begin(
        self,
        plan: Plan,
        answer: Sequence[Tensor],
        *,
        reports_models: bool,
        asks_place: bool = False,
        keeps_checkpoints: bool = True,
    ) -> None:
        """What nodes will work for.

        Args:
            plan: of which they get what the model is made for; the experiment is in the app.
            answer: tensors like those of an answer.
            reports_models: whether clients answer trained models, in the model's type, rather than messages.
            asks_place: whether clients are told their numbers.
            keeps_checkpoints: whether the run may go on from an earlier state.
        """
        self._keeps_checkpoints = keeps_checkpoints
        self._signature = plan.signature
        self._message_size = None if reports_models else answer[0].numel()
        self._asks_place = asks_place

    def await_nodes(self, count: int) -> None:
        """Wait until so many attend."""
        self._poll()
        said_s = -math.inf
        while (there := len(self._attending())) < count:
            if time.monotonic() > said_s + _SAYS_EVERY_S:
                _log.info("waiting for %d nodes, of which %d are there", count, there)
                said_s = time.monotonic()
            self._step()

    def members(self) -> Sequence[int | str]:
        """All that have ever been there, those left out that came after the members were fixed; numbers, then names."""
        for who in reversed(self._present.values()):  # of several that say the same the first counts
            if who is not None:
                self._members.come(*who)
        return self._members.ids()

    def fix_members(self) -> None:
        """From now on nobody becomes one; who is none is there, and is asked nothing."""
        self._members.close()

    def nodes(self) -> Sequence[int | str]:
        """Those that are there and have no message."""
        self._poll()
        self._seen = self._changes
        there = self._free().keys() - {task.client for task in self._open.values()}
        return [client for client in self.members() if client in there]

    def size_of(self, client: int | str) -> int:
        """How many samples a client said it trains on."""
        return self._members.size_of(client)

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks to nodes that have none, and the others when they have."""
        for task in tasks:
            self._open[task.id] = task
            self._waiting[task.id] = _Waiting(self.clock, 0)
            if task.deadline_s is not None:
                self._due_s[task.id] = self.clock + task.deadline_s
        self._send()

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[GroupReply | Failure]:
        """Answers as they arrive."""
        replies, said_s = 0, time.monotonic()
        while enough is None or replies < enough:
            if self._answers:
                answer = self._answers.popleft()
                replies += isinstance(answer, GroupReply)
                yield answer
                continue
            if not self._open or self.clock >= until:
                return
            if time.monotonic() > said_s + _SAYS_EVERY_S:
                waiting = sorted({str(task.client) for task in self._open.values()})
                _log.info("waiting for answers of %d clients, %s among them", len(waiting), waiting[0])
                said_s = time.monotonic()
            self._step(until)

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these but those that are there; Flower cannot tell their nodes."""
        for task in set(tasks) - set(map(_task_of, self._answers)):
            self._close(task)

    def wait(self, until: float = math.inf) -> bool:
        """Wait until a node comes, goes or has done its work."""
        said_s = time.monotonic()
        while not self._answers:
            if self._changes != self._seen:
                self._seen = self._changes
                return True
            if self.clock >= until:
                return False
            if time.monotonic() > said_s + _SAYS_EVERY_S:
                _log.info("waiting for nodes; %d are there", len(self._attending()))
                said_s = time.monotonic()
            self._step(until)
        return False

    def scores(self, model: tuple[Tensor, Tensor], limit_s: float) -> list[Scores]:
        """What nodes that have no message find of a model, or of their own, on samples that they hold out.

        Args:
            model: (vector [V], integers [I]).
            limit_s: how long to wait for them.
        """
        self._poll()
        self._scores, self._examination = [], self._examination + 1
        array, messages, sent = array_of(model), [], []
        for client, node in self._free().items():
            content = packed(model, array, **self._heading(client))
            messages.append(_message(content, node, "evaluate", limit_s))
            sent.append(_Sent(node, "evaluate", client, self._examination))
        self._push(messages, sent)
        until_s = time.monotonic() + limit_s
        while any(map(self._is_awaited_score, self._sent.values())) and time.monotonic() < until_s:
            self._step()
        return self._scores

    def state(self) -> Tree:
        """Clock, members, and after which task each client's state is to be found."""
        return {"clock": self.clock, "members": self._members.state(), "kept": self._kept.state(), "run": self._run}

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said; open tasks are asked for again."""
        self._began_s = time.monotonic() - state["clock"]
        self._members.restore(state["members"])
        self._kept.restore(state["kept"])
        self._run = state["run"]

    def _attending(self) -> dict[int | str, int]:
        """The node of each client that is there."""
        attending: dict[int | str, int] = {}
        for node, who in self._present.items():
            if who is not None and self._members.take(who[0]):
                attending.setdefault(who[0], node)
        return attending

    def _free(self) -> dict[int | str, int]:
        busy = {sent.node for sent in self._sent.values()}
        return {client: node for client, node in self._attending().items() if node not in busy}

    def _step(self, until: float = math.inf) -> None:
        """Take what has come, or give it time to come."""
        before = self._changes, len(self._answers)
        self._poll()
        if before == (self._changes, len(self._answers)):
            time.sleep(max(0.0, min(self._patience.pull_every_s, until - self.clock)))

    def _poll(self) -> None:
        if time.monotonic() >= self._look_s:
            self._look()
            self._look_s = time.monotonic() + self._patience.look_every_s
        self._send()
        for message in self._grid.pull_messages(set(self._sent)) if self._sent else ():
            self._take(message)
        self._send()

    def _look(self) -> None:
        """Who is there; newcomers are asked who they are."""
        there = list(self._grid.get_node_ids())
        for node in self._present.keys() - set(there):
            who = self._present.pop(node)
            self._changes += who is not None
            if who is not None:
                _log.info("client %r is gone", who[0])
        new = [node for node in there if node not in self._present]
        self._present |= dict.fromkeys(new)
        messages = [_message(packed(()), node, "query", None) for node in new]
        self._push(messages, [_Sent(node, "query") for node in new])

    def _send(self) -> None:
        """Tasks that wait, as far as their nodes are there and free."""
        if not self._waiting:
            return
        free, attending = self._free(), self._attending()
        messages, sent = [], []
        for number, waiting in [*self._waiting.items()]:
            task = self._open[number]
            node = free.pop(task.client, None)
            left_s = self._due_s.get(number, math.inf) - self.clock
            if node is not None and left_s > 0:
                ttl_s = max(left_s, _SHORTEST_TTL_S) if math.isfinite(left_s) else None
                messages.append(_message(self._content(task), node, "train", ttl_s, task.round))
                sent.append(_Sent(node, "train", task.client, number))
                self._sends[number] = waiting.sends + 1
                del self._waiting[number]
            elif left_s <= 0:
                self._fail(number, "it did not answer in time")
            elif task.client not in attending and self.clock > waiting.since_s + self._patience.absent_s:
                self._fail(number, f"it was not there for {self._patience.absent_s:g} s")
        self._push(messages, sent)

    def _push(self, messages: Sequence[Any], sent: Sequence[_Sent]) -> None:
        if not messages:
            return
        ids = [*self._grid.push_messages(messages)] or [None] * len(messages)  # nothing: they were too large
        for found, one in zip(ids, sent, strict=True):
            if found:
                self._sent[found] = one
            elif one.kind == "train":
                self._again(one, "Flower took no message for it")
            else:
                _log.warning("Flower took no message for node %d", one.node)

    def _content(self, task: Task) -> Any:
        tensors = (task.vector_V, task.integers_I, *task.broadcast)
        if self._array is None or not _are(self._array[0], tensors):
            self._array = tensors, array_of(tensors)
        members = self.members()
        return packed(
            tensors,
            self._array[1],
            **self._heading(task.client),
            name=_text((self._start, task.id)),
            round=task.round,
            repeats=task.repeats,
            lr=task.lr,
            steps=task.steps,
            broadcast_count=len(task.broadcast),
            population=len(members),
            place=members.index(task.client) if self._asks_place else None,
        )

    def _heading(self, client: int | str) -> dict[str, Any]:
        assert self._signature is not None
        return {
            "run": self._run,
            "input_shape": list(self._signature.input_shape),
            "input_dtype": self._signature.input_dtype,
            "classes": self._signature.classes,
            "kept_after": _text(self._kept.after(client)),
            "durable_after": _text(self._kept.durable_after(client)),
        }

    def _take(self, message: Any) -> None:
        """A message, from whoever sent it; one that nobody waits for is dropped."""
        sent = self._sent.pop(message.metadata.reply_to_message_id, None)
        if sent is None:
            return
        self._changes += 1
        if not message.has_content():
            self._undone(sent, message.error.code, str(message.error.reason or "")[:500])
            return
        try:
            if message.metadata.src_node_id != sent.node:
                raise InvalidPayload("another node answers in its name")
            fields, tensors = unpacked(message.content)
            if "problem" in fields:
                self._give_up(sent, field(fields, "problem", str)[:500], diverged=fields.get("diverged") is True)
            elif sent.kind == "train":
                self._take_answer(sent, fields, tensors)
            elif sent.kind == "query":
                self._take_description(sent.node, fields)
            elif self._is_awaited_score(sent):
                self._scores.append(_scores_of(fields))
        except InvalidPayload as error:
            self._refuse(sent, str(error))

    def _take_description(self, node: int, fields: Mapping[str, Any]) -> None:
        client = fields.get("client")
        if type(client) not in (int, str) or len(str(client)) > 200:
            raise InvalidPayload(f"a client must be a number or a name, got {str(client)[:40]!r}")
        samples, shape = field(fields, "samples", int), field(fields, "input_shape", list)
        if samples < 1 or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
            raise InvalidPayload(f"a node must have samples to train on, got {samples} of shape {shape[:8]}")
        signature = Signature(
            input_shape=shape,
            input_dtype=field(fields, "input_dtype", str)[:40],
            classes=min(max(field(fields, "classes", int), 0), 2**31 - 1),
        )
        if reason := self._accepts(Joining(samples=samples, signature=signature)):
            raise InvalidPayload(reason)
        if node in self._present and isinstance(client, int | str):
            if client in self._attending():
                _log.warning("another node says that it is client %r; it waits until the first is gone", client)
            else:
                _log.info("client %r is there with %d samples", client, samples)
                self._members.come(client, samples)
            self._present[node] = client, samples

    def _take_answer(self, sent: _Sent, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        task = self._open.get(sent.number)
        if task is None:
            return  # it comes too late
        if len(tensors) != 2:
            raise InvalidPayload(f"an answer must have 2 tensors, got {len(tensors)}")
        answer = checked(
            task,
            (tensors[0], tensors[1]),
            samples=field(fields, "samples", int),
            weight=field(fields, "weight", float),
            train_loss=field(fields, "train_loss", float),
            size_bytes=sum([tensor.nbytes for tensor in tensors]),
            message_size=self._message_size,
        )
        if isinstance(answer, str):
            raise InvalidPayload(answer)
        self._close(task.id)
        self._kept.count(task.client, (self._start, task.id), is_durable=not self._keeps_checkpoints)
        self._answers.append(update_of(answer, task) if isinstance(answer, Reply) else answer)

    def _undone(self, sent: _Sent, code: int, reason: str) -> None:
        """Flower says that there is no answer."""
        said = f"Flower's error {code}: {reason.strip().splitlines()[-1] if reason.strip() else 'no reason given'}"
        if code == _NODE_LOST or (sent.kind == "query" and code in _UNDELIVERED):
            self._present.pop(sent.node, None)  # Flower lists it for a while: whether it is there it must say again
        if sent.kind == "train" and code in _UNDELIVERED:
            self._again(sent, said)
        elif code not in _UNDELIVERED or sent.kind == "evaluate":
            self._give_up(sent, said)

    def _again(self, sent: _Sent, reason: str) -> None:
        if sent.number not in self._open:
            return
        sends = self._sends.get(sent.number, 0)
        if sends >= self._patience.sends:
            self._fail(sent.number, f"it was sent its task {sends} times: {reason}")
            return
        _log.info("client %r is sent its task again: %s", sent.client, reason)
        self._waiting[sent.number] = _Waiting(self.clock, sends)

    def _refuse(self, sent: _Sent, reason: str) -> None:
        self.refused += 1
        who = f"node {sent.node}" if sent.client is None else repr(sent.client)
        _log.warning("refused %s: %s", who, reason)
        if sent.kind == "train":
            self._fail(sent.number, f"its answer was refused: {reason}")

    def _give_up(self, sent: _Sent, reason: str, *, diverged: bool = False) -> None:
        if sent.kind == "train":
            self._fail(sent.number, reason, diverged=diverged)
        elif sent.kind == "query":
            _log.warning("node %d does not take part: %s", sent.node, reason)
        elif self._is_awaited_score(sent):
            self._scores.append(Scores(problem=reason))

    def _fail(self, number: int, reason: str, *, diverged: bool = False) -> None:
        """A task has failed, unless nobody waits for it any more."""
        task = self._open.get(number)
        if task is not None:
            self._close(number)
            self._answers.append(Failure(number, task.round, task.client, reason, diverged=diverged))

    def _is_awaited_score(self, sent: _Sent) -> bool:
        return sent.kind == "evaluate" and sent.number == self._examination

    def _close(self, number: int) -> None:
        for known in (self._open, self._waiting, self._due_s, self._sends):
            known.pop(number, None)


def _message(content: Any, node: int, kind: str, ttl_s: float | None, number: int = 0) -> Any:
    return flower("app").Message(content, node, kind, ttl=ttl_s, group_id=str(number))


def _scores_of(fields: Mapping[str, Any]) -> Scores:
    samples, loss, metric = field(fields, "samples", int), field(fields, "loss", float), fields.get("metric")
    if not 0 <= samples < 2**53 or not (metric is None or (isinstance(metric, float) and math.isfinite(metric))):
        raise InvalidPayload(f"scores must be of at least 0 samples and finite, got {samples} and {str(metric)[:40]}")
    return Scores(samples=samples, loss=loss, metric=metric)


def _text(task: TaskName | None) -> str | None:
    return None if task is None else f"{task[0]}-{task[1]}"


def _task_of(answer: GroupReply | Failure) -> int:
    return answer.task if isinstance(answer, Failure) else answer.tasks[0]


def _are(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
