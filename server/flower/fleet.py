"""A fleet of the nodes of a Flower federation, over the grid that its ``ServerApp`` is given."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from fed.errors import InvalidPayload
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.protocol import protocol_pb2 as pb
from fed.quantities import counted
from fed.server.observer import NodeCame, NodeWent
from fed.server.real_fleet import RealFleet
from fed.server.registry import TaskOutcome
from fed.server.validation import reason_of, refusal_of_joining, refusal_of_scores
from fed.vectors.tensors import Tensor
from fed.wire.flower_records import array_of, flower, packed, unpacked
from fed.wire.format import Format
from fed.wire.messages import Task, client_id_of
from fed.wire.payloads import TensorSpec, hold_to_payload, joined, split
from fed.wire.rate_limits import Unnamed

__all__ = ["FlowerFleet", "flat_payload"]

_log = logging.getLogger(__name__)
# Codes of Flower's errors.
_MESSAGE_LOST = 3
_NODE_LOST = 5
_UNDELIVERED = (_MESSAGE_LOST, _NODE_LOST)
_SHORTEST_TTL_S = 1.0
# The name becomes part of log lines and of the run's files.
_MOST_LETTERS = 200
_ANSWERS = {"query": "joining", "train": "answer", "evaluate": "scores"}


class _Sent(NamedTuple):
    """A message under way.

    Args:
        node: id of the receiving node, from Flower.
        kind: "query", who it is; "train", to do a task; or "evaluate", to score a model.
        client: client that the node stands for; None: it has not said so yet.
        number: number of the task or the examination; 0 for a query.
        round: number of the task's round; 0 where there is no task.
    """

    node: int
    kind: Literal["query", "train", "evaluate"]
    client: int | str | None = None
    number: int = 0
    round: int = 0


@dataclass
class _Progress:
    """A task until its answer is there.

    Args:
        due_s: time by which it must be answered, in seconds of the fleet's clock.
        since_s: time since which it has waited to be sent, in seconds of that clock; None: it is under way.
        sends: number of times that it was sent.
    """

    due_s: float
    since_s: float | None
    sends: int = 0


class FlowerFleet(RealFleet):
    """A fleet of Flower's nodes.

    A node has one message in flight, so one that trains on for a round which is over counts as not there until its
    answer, which is not waited for, has come. A message that Flower could not deliver, or whose node was lost, is sent
    again. A client is who its node says: the first of several nodes that say the same, for as long as that is there.

    Attributes:
        pull_every_s: seconds from one look for answers to the next.
        look_every_s: seconds from one look for nodes to the next.
        absent_s: seconds that a node which is gone has to come back for its task, after which the task has failed.
        sends: number of times that a task is sent before it has failed.

    Args:
        grid: grid of the ``ServerApp``, from Flower.
        accepts: function from what a node says of its data to the reason why it is refused, or None.
        clock: time, by which it waits.
    """

    pull_every_s = 0.05
    look_every_s = 2.0
    absent_s = 60.0
    sends = 3

    def __init__(self, grid: Any, *, accepts: Callable[[pb.Joining], str | None], clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(clock)
        self._grid = grid
        self._accepts = accepts
        self._look_s = -math.inf
        self._present: dict[int, tuple[int | str, int] | None] = {}  # node → (client, samples); None: not known (yet)
        self._sent: dict[str, _Sent] = {}
        self._progress: dict[int, _Progress] = {}
        self._flat: tuple[tuple[int, int | None], tuple[pb.Payload, Any]] | None = None
        self._plan = pb.Plan()
        self._fixed_part: Any = None  # of the model, as one of Flower's arrays
        self._lacking: set[int] = set()  # nodes whose next message brings the fixed part
        self._spec: Sequence[TensorSpec] = ()

    def registered(self) -> Sequence[int | str]:
        """All clients that joined before the members were fixed: numbers, then names."""
        for who in reversed(self._present.values()):  # of several that say the same the first counts
            if who is not None:
                self._members.come(*who)
        return super().registered()

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks to nodes that have none, and the others when they have."""
        for task in tasks:
            self._open[task.id] = task
            due_s = math.inf if task.deadline_s is None else self.clock + task.deadline_s
            self._progress[task.id] = _Progress(due_s, self.clock)
        self._send()

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks, but those that have arrived; Flower cannot tell their nodes."""
        for task in set(tasks) - {outcome.task for outcome in self._outcomes}:
            if task in self._open:
                self._miss(task)
            self._progress.pop(task, None)

    def _make_known(self, plan: pb.Plan, message: Format, fixed_part: Sequence[Tensor]) -> None:
        """Keep what nodes are told with each message; the experiment is in the app."""
        # Nodes keep the states of each run in a folder of that name.
        self._plan = pb.Plan(run=self.run, signature=plan.signature, format=plan.format)
        if fixed_part:
            self._plan.fixed_part.CopyFrom(plan.fixed_part)
            self._fixed_part = array_of(joined(fixed_part)[1])
        self._spec = message.uplink

    def _examine(self, model: tuple[Tensor, Tensor], limit_s: float, round_number: int) -> None:
        self._poll()
        asked = []
        payload, array = flat_payload(model)
        for client, node in self._free().items():
            told = self._kept_state(client)
            examination = pb.Examination(id=self._examination, payload=payload, round=round_number, **told)
            content = packed(pb.Request(plan=self._plan, examination=examination), array, self._fixed_for(node))
            sent = _Sent(node, "evaluate", client=client, number=self._examination)
            asked.append((sent, content, limit_s))
            self._unscored.add(client)
        self._push(asked)

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

    def pass_time(self, until: float) -> None:
        """Take what has arrived, or wait for a moment."""
        before = self._changes, len(self._outcomes)
        self._poll()
        if before == (self._changes, len(self._outcomes)):
            # Flower's grid is polled, since it tells nothing by itself
            self.time.wait(min(self.pull_every_s, until - self.clock))

    def _poll(self) -> None:
        if self.time.monotonic_s() >= self._look_s:
            self._look()
            self._look_s = self.time.monotonic_s() + self.look_every_s
        self._send()
        for message in self._grid.pull_messages(set(self._sent)) if self._sent else ():
            self._take(message)
        self._send()

    def _look(self) -> None:
        """Look for nodes; newcomers are asked who they are."""
        there = list(self._grid.get_node_ids())
        for node in self._present.keys() - set(there):
            who = self._present.pop(node)
            if who is not None:
                client, _ = who
                self._note_presence(NodeWent(client))
                _log.info("client %r is gone", client)
        new = [node for node in there if node not in self._present]
        # Noted before they have answered, so that each is asked once.
        self._present |= dict.fromkeys(new)
        self._push([(_Sent(node, "query"), packed(pb.Request()), None) for node in new])

    def _send(self) -> None:
        """Send the waiting tasks whose nodes are connected and free; fail those that waited too long."""
        waiting = [(number, one) for number, one in self._progress.items() if one.since_s is not None]
        if not waiting:
            return
        free = self._free()
        attending = self._attending()
        asked = []
        for number, progress in waiting:
            task = self._open[number]
            node = free.pop(task.client, None)
            left_s = progress.due_s - self.clock
            if node is not None and left_s > 0:
                ttl_s = max(left_s, _SHORTEST_TTL_S) if math.isfinite(left_s) else None
                sent = _Sent(node, "train", client=task.client, number=number, round=task.round)
                asked.append((sent, self._content(task, node), ttl_s))
                progress.sends += 1
                progress.since_s = None
            # A task that cannot be done in time is not sent: it would keep its node from the next one.
            elif left_s <= 0:
                self._fail(number, "it did not answer in time")
            elif task.client not in attending and self.clock > (progress.since_s or 0.0) + self.absent_s:
                self._fail(number, f"it was not there for {self.absent_s:g} s")
        self._push(asked)

    def _push(self, asked: Sequence[tuple[_Sent, Any, float | None]]) -> None:
        """Send messages, each with its content and the seconds in which to answer; None: Flower's 12 hours."""
        if not asked:
            return
        message = flower("app").Message
        messages = [
            message(content, sent.node, sent.kind, ttl=ttl_s, group_id=str(sent.round))
            for sent, content, ttl_s in asked
        ]
        ids = [*self._grid.push_messages(messages)] or [None] * len(messages)  # nothing: they were too large
        for found, (sent, *_) in zip(ids, asked, strict=True):
            if found:
                self._sent[found] = sent
            else:
                self._send_again(sent, "Flower took no message for it")

    def _fixed_for(self, node: int) -> Any:
        """The model's fixed part for a node that lacks it; None for others."""
        return self._fixed_part if node in self._lacking else None

    def _content(self, task: Task, node: int) -> Any:
        if self._flat is None or self._flat[0] != task.content:
            self._flat = task.content, flat_payload(task.tensors)
        payload, array = self._flat[1]
        assignment = self._assignment(task, self.registered(), payload)
        return packed(pb.Request(plan=self._plan, assignment=assignment), array, self._fixed_for(node))

    def _take(self, message: Any) -> None:
        """Take a message from any sender; drop it if no answer is waited for."""
        sent = self._sent.pop(message.metadata.reply_to_message_id, None)
        if sent is None:
            return
        # The node is free now, and the dispatch that waits for one must look again.
        self._changes += 1
        if not message.has_content():
            # The reason may be a whole traceback of the node's.
            self._undelivered(sent, message.error.code, str(message.error.reason or "")[:500])
            return
        try:
            if message.metadata.src_node_id != sent.node:  # the reply's id alone would let any node answer for another
                raise InvalidPayload("only the node that was given the task may answer it, got another node")
            response, data = _response_of(sent.kind, message.content)
            if response.HasField("failed"):
                progress = self._progress.get(sent.number) if sent.kind == "train" else None
                is_new = response.failed.lacks_fixed_part and sent.node not in self._lacking
                if is_new:
                    self._lacking.add(sent.node)
                if progress and (is_new or (response.failed.lacks_model and self._with_whole_model(sent.number))):
                    progress.since_s = self.clock
                    return
                self._give_up(sent, reason_of(response.failed))
            elif sent.kind == "train":
                self._lacking.discard(sent.node)
                self._take_answer(sent, response.answer, data)
            elif sent.kind == "query":
                self._take_joining(sent.node, response.joining)
            else:
                self._take_scores(sent.client, sent.number, response.scores)
        except InvalidPayload as error:
            sender: int | str = Unnamed(f"node {sent.node}") if sent.client is None else sent.client
            self._refusals.note(sender, str(error))
            self._give_up(sent, f"its answer was refused: {error}")

    def _take_joining(self, node: int, joining: pb.Joining) -> None:
        client = client_id_of(joining.name)
        if reason := self._accepts(joining):
            raise InvalidPayload(reason)
        if node in self._present:
            if client in self._attending():
                _log.warning("another node says that it is client %r; it waits until the first is gone", client)
            else:
                _log.info("client %r is there with %s", client, counted(joining.samples, "sample"))
                self._members.come(client, joining.samples)
                self._note_presence(NodeCame(client))
            # Kept while it waits, so that it takes the client's place once the first is gone.
            self._present[node] = client, joining.samples

    def _take_answer(self, sent: _Sent, header: pb.Answer, data: bytes) -> None:
        task = self._open.get(sent.number)
        if task is None:
            return  # it comes too late
        # After the look for the task: a late answer may be of another run's format.
        hold_to_payload(data, header.payload, self._spec)
        self._outcomes.append(TaskOutcome(task.id, header, partial(split, data, header.payload)))
        self._progress.pop(task.id, None)

    def _undelivered(self, sent: _Sent, code: int, reason: str) -> None:
        """Take Flower's word that a message has no answer."""
        said = f"Flower's error {code}: {reason.strip().splitlines()[-1] if reason.strip() else 'no reason given'}"
        if code == _NODE_LOST or (sent.kind == "query" and code in _UNDELIVERED):
            self._present.pop(sent.node, None)  # Flower lists it for a while: whether it is there it must say again
        if sent.kind == "train" and code in _UNDELIVERED:
            self._send_again(sent, said)
        elif code not in _UNDELIVERED or sent.kind == "evaluate":
            self._give_up(sent, said)

    def _send_again(self, sent: _Sent, reason: str) -> None:
        """Send a task once more; anything else is given up."""
        progress = self._progress.get(sent.number)
        if sent.kind != "train":
            self._give_up(sent, reason)
        elif progress is not None and progress.sends >= self.sends:
            self._fail(sent.number, f"it was sent its task {progress.sends} times: {reason}")
        elif progress is not None:
            _log.info("client %r is sent its task again: %s", sent.client, reason)
            progress.since_s = self.clock

    def _give_up(self, sent: _Sent, reason: str) -> None:
        if sent.kind == "train":
            self._fail(sent.number, reason)
        elif sent.kind == "query":
            _log.warning("node %d does not take part: %s", sent.node, reason)
        else:
            self._take_scores(sent.client, sent.number, pb.Scores(problem=reason))

    def _fail(self, number: int, reason: str) -> None:
        """Fail a task, unless it is not waited for any more."""
        if number in self._open:
            self._progress.pop(number, None)
            self._outcomes.append(TaskOutcome(number, problem=reason))


def flat_payload(tensors: Sequence[Tensor]) -> tuple[pb.Payload, Any]:
    """Tensors as they travel: described by a header's payload, and one of Flower's arrays, which messages may share.

    Raises:
        InvalidPayload: if one has a type that does not travel.
    """
    payload, data = joined(tensors)
    return payload, array_of(data)


def _response_of(kind: str, content: Mapping[str, Any]) -> tuple[pb.Response, bytes]:
    """A node's untrusted response, as far as it can be checked without the task, and the bytes of its payload.

    Args:
        kind: kind of the request: "query", "train" or "evaluate".
        content: content of the node's message, from Flower.

    Raises:
        InvalidPayload: if no node can answer that.
    """
    response, data = unpacked(content, pb.Response)
    if (what := response.WhichOneof("what")) not in ("failed", _ANSWERS[kind]):
        raise InvalidPayload(f"a node must answer {_ANSWERS[kind]} or failed, got {what or 'nothing'}")
    reason = refusal_of_scores(response.scores) if what == "scores" else None
    if what == "joining":
        name = response.joining.name
        reason = refusal_of_joining(response.joining)
        if not 0 < len(name) <= _MOST_LETTERS:
            reason = f"a client's name must have 1 to {_MOST_LETTERS} letters, got {len(name)}"
    if reason is not None:
        raise InvalidPayload(reason)
    return response, data
