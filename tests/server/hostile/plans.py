"""Plans, tasks and sessions of a hostile coordinator: those of an honest one, but for what a test changes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fed
from fed.clients.data import FederatedData
from fed.clients.node.plans import part_of_nodes
from fed.clients.node.training import Hidden, NodeTraining
from fed.clients.setup import Preparation
from fed.config.experiment import Experiment
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import ledger_term, model_digest, plan_digest, task_digest
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.fixed_point import SecureSum, SumOfClients
from fed.secure_aggregation.settings import settings_of
from fed.secure_aggregation.terms import Terms
from fed.vectors.tensors import Tensor
from fed.wire.agreed_format import header_of
from fed.wire.payloads import read
from tests.server.hostile.coordinator import HostileCoordinator, NodeRefuses, View
from tests.server.hostile.nodes import CLASSES, COHORT, FEATURES, GUEST, samples_of

__all__ = ["KEYS", "Run", "Session", "lanes_of"]

KEYS: dict[str, Any] = {
    "seed": 5,
    "model": {"kind": "logistic"},
    "algorithm": {"kind": "local_sgd"},
    "local": {"lr": 0.5, "batch_size": 4, "epochs": 2},
    "rounds": {"count": 1},
    "secure_aggregation": {"minimum_cohort": 3, "max_drop_out": 0.0},
}
_START = 77
_numbers = count(1)


@dataclass
class Run:
    """A run as its nodes are told it.

    Args:
        coordinator: the coordinator that tells it.
        name: the run's name.
        changed: keys of the experiment in place of :data:`KEYS`.
        most_clients: the largest number of clients in its sessions.
    """

    coordinator: HostileCoordinator
    name: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    most_clients: int = len(COHORT)

    def __post_init__(self) -> None:
        data = FederatedData({int(name): samples_of(int(name)) for name in (*COHORT, GUEST)}, None, CLASSES)
        self.experiment = Experiment(**{**KEYS, **self.changed})
        self.data = data
        prepared = Preparation(self.experiment, data)
        self.format = prepared.message_format(len(COHORT), self.most_clients, self.most_clients)
        self.first_V = prepared.layout.shared.pack(prepared.module)[0]
        self.plan = pb.Plan(
            run=self.name,
            experiment=json.dumps(part_of_nodes(self.experiment)),
            signature=pb.Signature(input_shape=[FEATURES], input_dtype="float32", classes=CLASSES),
            heartbeat_s=600.0,
            format=header_of(self.format),
            identities=self.coordinator.credentials.identities().content,
        )

    def tell(self, names: Sequence[str] = COHORT) -> None:
        """Tell nodes the plan."""
        for name in names:
            self.coordinator.tell(name, plan=self.plan)

    def model(self, seed: int) -> Tensor:
        """Some model of the experiment; 0: its first one."""
        if not seed:
            return self.first_V
        drawn = np.random.default_rng(seed).normal(size=self.first_V.numel())
        return torch.from_numpy(drawn.astype(np.float32))

    def task(self, model_V: Tensor, **changed: Any) -> pb.Assignment:
        """A task that brings a model, as an honest server tells it but for what is changed."""
        tensors = [model_V, torch.zeros(0, dtype=torch.int64)]
        assignment = pb.Assignment(
            task=pb.TaskId(start=_START, number=next(_numbers)),
            round=1,
            lr=0.5,
            population=len(COHORT),
            payload=self.coordinator.publish(tensors),
            model_sha256=model_digest(tensors),
        )
        assignment.MergeFrom(pb.Assignment(**changed))
        return assignment

    def terms(self, assignment: pb.Assignment) -> Terms:
        """The terms of a task's session, as its clients make them."""
        settings = settings_of(self.experiment)
        fixed = self.format.fixed
        assert settings is not None
        assert fixed is not None
        return Terms(
            settings=settings,
            fixed=fixed,
            run=self.plan.run,
            round=assignment.round,
            attempt=assignment.attempt,
            plan_sha256=plan_digest(self.plan),
            task_sha256=task_digest(assignment),
            identities_sha256=self.coordinator.credentials.identities().known().sha256,
            ledger=ledger_term(assignment),
        )

    def session(self, tasks: Mapping[str, pb.Assignment], *, terms: Terms | None = None) -> "Session":
        """A session of these clients.

        Args:
            tasks: the tasks, by client.
            terms: the terms of the session; those of its first task unless given.
        """
        return Session(self.coordinator, tasks, terms or self.terms(next(iter(tasks.values()))))

    def settle(self, names: Sequence[str] = COHORT, number: int | None = None) -> None:
        """Wait until nodes have done all that they were asked for: they do one thing after another.

        Args:
            names: the nodes' names.
            number: the number of the examination whose answer they wait for.
        """
        number = number or 1000 + next(_numbers)
        for name in names:
            view = self.coordinator.views[name]
            since = len(view.said)
            self.coordinator.tell(name, examination=pb.Examination(id=number))

            def is_answered(view: View = view, since: int = since) -> bool | None:
                view.hold_to_stay()
                return any(message.scores.id == number for message in view.said[since:]) or None

            self.coordinator.wait(is_answered, f"{name!r} to settle")

    def mask(self, tasks: Mapping[str, pb.Assignment]) -> "Session":
        """A session until messages are masked, and no further."""
        session = self.session(tasks)
        session.assign()
        session.share()
        session.take_masked()
        self.settle([*tasks])
        return session

    def sum_of(self, tasks: Mapping[str, pb.Assignment]) -> SecureSum:
        """The sum of a whole session."""
        return self.session(tasks).run()

    def honest_mean(self, model_V: Tensor) -> Tensor:
        """The mean of the cohort's updates of a model, found by a simulation that knows all their samples."""
        data = replace(self.data, train={int(name): samples_of(int(name)) for name in COHORT})
        prepared = Preparation(self.experiment, data)
        prepared.layout.shared.unpack(model_V, torch.zeros(0, dtype=torch.int64), prepared.module)
        trained = fed.simulate(
            self.experiment.override({"data": None, "model": None}), data=data, model=prepared.module
        ).model
        return Preparation(self.experiment, data, trained).layout.shared.pack(trained)[0] - model_V

    def message(self, name: str, assignment: pb.Assignment, folder: Path) -> Tensor:
        """A client's message before it is masked, of which the coordinator must not learn a bit."""
        data = replace(self.data, train={int(name): samples_of(int(name))})
        training = NodeTraining(data, self.experiment, self.plan, folder, SYSTEM_CLOCK)
        path = folder / "payload"
        path.write_bytes(self.coordinator.content(assignment.payload))
        hidden = training.train(assignment, path)
        assert isinstance(hidden, Hidden)
        return hidden.lanes

    def trained(self, name: str, assignment: pb.Assignment, folder: Path) -> Tensor:
        """A client's trained model, as it would send it without secure aggregation."""
        plain = Run(self.coordinator, self.name, {**self.changed, "secure_aggregation": None})
        data = replace(self.data, train={int(name): samples_of(int(name))})
        training = NodeTraining(data, plain.experiment, plain.plan, folder, SYSTEM_CLOCK)
        path = folder / "plain"
        path.write_bytes(self.coordinator.content(assignment.payload))
        answer = training.train(assignment, path)
        assert isinstance(answer, pb.Answer)
        return read(path, answer.payload)[0]

    def mean(self, total: SecureSum) -> Tensor:
        """The mean of a sum's messages."""
        return self.read(total).mean_M

    def read(self, total: SecureSum) -> SumOfClients:
        """All that a sum says."""
        assert self.format.fixed is not None
        return self.format.fixed.read(total)


class Session:
    """One session of nodes, phase by phase.

    Args:
        coordinator: the coordinator that holds it.
        tasks: the tasks, by client.
        terms: the terms of the session.
    """

    def __init__(self, coordinator: HostileCoordinator, tasks: Mapping[str, pb.Assignment], terms: Terms) -> None:
        self._coordinator = coordinator
        self._tasks = tasks
        self._moves = SessionCoordinator(terms, coordinator.credentials.identities().known())
        self._since = {name: (len(view.said), len(view.delivered)) for name, view in coordinator.views.items()}

    def run(self) -> SecureSum:
        """The sum, from the tasks on.

        Raises:
            NodeRefuses: if a node does not go along.
        """
        self.assign()
        self.share()
        self.take_masked()
        return self.unmask()

    def assign(self) -> None:
        """Send the tasks, and take the clients' keys."""
        for name, assignment in self._tasks.items():
            self._coordinator.tell(name, assignment=assignment)
        for name in self._tasks:
            self._moves.take_keys(name, self.answer(name, "keys").keys)

    def share(self) -> None:
        """Hand out the keys, take the boxes, and hand them out."""
        for name, listed in self._moves.close_keys():
            self.say(name, key_list=listed)
        for name in self._tasks:
            self._moves.take_shares(name, self.answer(name, "shares").shares)
        for name, delivery in self._moves.close_shares().items():
            self.say(name, delivery=delivery)

    def take_masked(self) -> None:
        """Take the masked messages."""
        for name in self._tasks:
            self._moves.take_masked(name, self.masked(name))

    def unmask(self) -> SecureSum:
        """Name the survivors, take consents and shares, and find the sum."""
        self.consent()
        return self.reveal()

    def consent(self) -> None:
        """Name the survivors, and take their consents."""
        survivors, names = self._moves.close_masked()
        for name in names:
            self.say(name, survivors=survivors)
        for name in names:
            self._moves.take_consent(name, self.answer(name, "consent").consent)

    def reveal(self) -> SecureSum:
        """Hand out the consents, take shares, and find the sum."""
        relayed = self._moves.close_consents()
        for name, consents in relayed.items():
            self.say(name, consents=consents)
        for name in relayed:
            self._moves.take_unmasking(name, self.answer(name, "unmasking").unmasking)
        return self._moves.finish()

    def say(self, name: str, **what: Any) -> None:
        """Say something in the session."""
        task = self._tasks[name]
        self._coordinator.tell(name, session=pb.ToSession(task=task.task, attempt=task.attempt, **what))

    def answer(self, name: str, kind: str) -> pb.FromSession:
        """A client's answer of a kind."""

        def found(view: View) -> pb.FromSession | None:
            for message in self._of_task(name, view):
                if message.session.HasField(kind):
                    return message.session
            return None

        answered: pb.FromSession = self._wait(name, found, kind)
        return answered

    def masked(self, name: str) -> Tensor:
        """A client's masked message."""

        def found(view: View) -> bytes | None:
            for head, content in view.delivered[self._since[name][1] :]:
                if head.task == self._tasks[name].task:
                    return content
            return None

        return lanes_of(self._wait(name, found, "masked"))

    def _wait(self, name: str, found: Callable[[View], Any], what: str) -> Any:
        view = self._coordinator.views[name]

        def found_or_refused() -> Any:
            if (one := found(view)) is not None:
                return one
            for message in self._of_task(name, view):
                if sentence := message.failed.reason or message.session.aborted:
                    raise NodeRefuses(sentence)
            return None

        return self._coordinator.wait(found_or_refused, f"the {what} of {name!r}")

    def _of_task(self, name: str, view: View) -> Sequence[pb.FromNode]:
        """All that a node has said of its task since the session began, or of the run."""
        view.hold_to_stay()
        task = self._tasks[name]
        found = []
        for message in view.said[self._since[name][0] :]:
            if message.HasField("failed") and message.failed.task == task.task:
                found.append(message)
            if message.session.task == task.task and message.session.attempt == task.attempt:
                found.append(message)
        return found


def lanes_of(content: bytes) -> Tensor:
    """Lanes of a message, of 32 bits."""
    return torch.from_numpy(np.frombuffer(content, np.int32).copy())
