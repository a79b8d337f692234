"""Nodes that hold sessions of secure aggregation on a clock that moves when nothing else does."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fed
from fed.clients.node.sessions import Limits, SecureNode
from fed.identity.authority import Authority
from fed.identity.credentials import NodeCredentials
from fed.identity.identities import SignedIdentities
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import digests_of, plan_digest
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.settings import settings_of
from fed.server.grpc.sessions import NodeSessions
from fed.server.secure_fleet import SessionResult
from fed.wire.messages import Answer, GlobalModel, Lanes, Task

__all__ = ["PATIENCE_S", "Conversation"]

PATIENCE_S = 10.0


class Conversation:
    """What sessions use of a :class:`fed.server.fleet.ConversingFleet`, of real nodes without a network.

    Attributes:
        sessions: with which a test begins and ends rounds.
        silent: (client, attempt, kind of its message), which do not leave the client.
        replaced: (client, attempt, kind of its message) → what leaves the client instead.
        sent: the tasks of each dispatch.
        said: all that clients have sent, by attempt, client and kind.
        asked: the kinds of messages that each client was told, in their order.
        given_up: tasks that the sessions have failed, with the reason.
        cancelled: tasks that the sessions have withdrawn.

    Args:
        folder: for keys.
        clients: how many.
    """

    def __init__(self, folder: Path, clients: int) -> None:
        self.clock = 0.0
        self.silent: set[tuple[int, int, str]] = set()
        self.replaced: dict[tuple[int, int, str], pb.FromSession] = {}
        self.sent: list[list[Task]] = []
        self.said: dict[tuple[int, int, str], pb.FromSession] = {}
        self.asked: dict[int, list[str]] = {client: [] for client in range(clients)}
        self.given_up: dict[int, str] = {}
        self.cancelled: list[int] = []
        self.fixed = FixedPoint(32, (3,), (8.0,), most_clients=clients)
        self._arriving: deque[Callable[[], None]] = deque()
        self._answers: list[Answer] = []
        self._open: dict[int, Task] = {}
        authority = Authority.create(folder / "keys")
        for client in range(clients):
            authority.issue(str(client))
        plan = pb.Plan(run="run", identities=(folder / "keys" / "server" / "identities.json").read_bytes())
        section = {"minimum_cohort": 3, "max_weight": 9, "max_drop_out": 0.0}
        experiment = fed.Experiment(data={"kind": "digits", "clients": clients}, secure_aggregation=section)
        settings = settings_of(experiment)
        assert settings is not None
        self._nodes = {}
        self._plan = plan
        self._own_sha256: dict[tuple[int, int], bytes] = {}  # by client and attempt, of its last task
        for client in range(clients):
            credentials = NodeCredentials.load(folder / "keys" / "nodes" / str(client))
            (place := folder / f"node-{client}").mkdir()
            self._nodes[client] = SecureNode(credentials, place, Limits(minimum_cohort=3), begins_record=True)
            self._nodes[client].prepare(experiment, plan, self.fixed)
        identities = SignedIdentities.read(plan.identities, self._nodes[0].credentials.authority_pem)
        fleet: Any = self  # as far as sessions use it
        self.sessions = NodeSessions(
            fleet, settings, self.fixed, "run", lambda: identities, PATIENCE_S, plan_digest(plan)
        )
        self._model = GlobalModel(0, torch.zeros(3), torch.zeros(0, dtype=torch.int64))

    def begin(self, number: int, clients: Sequence[int], deadline_s: float | None = None) -> None:
        """Begin a round; what the clients say arrives when time passes."""
        tasks = [Task(100 * number + one, number, one, self._model, deadline_s=deadline_s) for one in clients]
        self.sessions.open(tasks)
        self.dispatch(tasks)

    def take_masked(self) -> None:
        """Add the masked messages that come before the patience ends to the sum."""
        for answer in self.collect():
            self.sessions.take(answer)

    def rounds(self, number: int, clients: Sequence[int]) -> SessionResult:
        """A whole round."""
        self.begin(number, clients)
        self.take_masked()
        return self.sessions.close()

    def lanes(self, client: int) -> Tensor:
        """A client's message before it is masked."""
        return torch.full((self.fixed.lanes,), client + 1, dtype=torch.int32)

    def arrive(self, client: int, message: pb.FromSession) -> None:
        """Let a message of a client arrive when time passes."""
        self._arriving.append(lambda: self.sessions.take_message(client, message))

    def arrive_all(self) -> None:
        """Let all that has been sent arrive."""
        while self._arriving:
            self._arriving.popleft()()

    def dispatch(self, tasks: Iterable[Task]) -> None:
        self.sent.append([*tasks])
        self._open |= {task.id: task for task in self.sent[-1]}
        names = {task.client: pb.TaskId(start=1, number=task.id) for task in self.sent[-1]}
        assignments = {task.client: pb.Assignment(task=names[task.client], round=task.round) for task in self.sent[-1]}
        self.sessions.begin(assignments, self._model)
        for client, assignment in assignments.items():
            own_sha256 = digests_of(self._plan, assignment).own
            self._own_sha256[int(client), assignment.attempt] = own_sha256
            self._say_all(int(client), self._nodes[int(client)].join(assignment))
            self._say_all(int(client), self._nodes[int(client)].trained(own_sha256, self.lanes(int(client))))

    def tell(self, client: int, message: pb.ToSession) -> None:
        copied = pb.ToSession()
        copied.CopyFrom(message)
        self.asked[client].append(copied.WhichOneof("what") or "")
        self._arriving.append(lambda: self._answer(client, copied))

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        self.arrive_all()
        answers, self._answers = self._answers, []
        self._open = {one: task for one, task in self._open.items() if one not in {a.tasks[0] for a in answers}}
        if self._open and until < math.inf:
            self.clock = until
        yield from answers

    def cancel(self, tasks: Iterable[int]) -> None:
        self.cancelled += tasks

    def renew(self, identities: bytes) -> None:
        """They know them."""

    def give_up(self, task: int, reason: str) -> None:
        self.given_up[task] = reason

    def pass_time(self, until: float) -> None:
        if not self._arriving:
            self.clock = until
        self.arrive_all()

    def _answer(self, client: int, message: pb.ToSession) -> None:
        self._say_all(client, self._nodes[client].answer(message))
        if message.HasField("delivery") and (client, message.attempt, "masked") not in self.silent:
            masked = self._nodes[client].masked(self._own_sha256[client, message.attempt], lambda: True)
            assert masked is not None
            number = message.task.number
            self._answers.append(Answer((number,), number // 100, (client,), Lanes(masked), size_bytes=1000))

    def _say_all(self, client: int, messages: Sequence[pb.FromSession]) -> None:
        for message in messages:
            self._say(client, message)

    def _say(self, client: int, message: pb.FromSession) -> None:
        key = client, message.attempt, message.WhichOneof("what") or ""
        self.said[key] = message
        if key not in self.silent:
            self.arrive(client, self.replaced.get(key, message))
