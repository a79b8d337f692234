"""Sessions of secure aggregation among simulated clients: the whole protocol, or its arithmetic and bytes alone.

Shapes: see :mod:`fed.vectors.layout`.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import Message

from fed.errors import InvalidExperiment, SessionFailed
from fed.secure_aggregation.client import SessionClient
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.key_agreement import digest
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities, Terms
from fed.secure_aggregation.traffic import Traffic, sharing_traffic, unmasking_traffic
from fed.server.secure_fleet import SessionResult
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.simulated_clients import SimulatedClients
from fed.vectors.tensors import Tensor
from fed.wire.messages import Answer, Task

__all__ = ["EmulatedSessions", "RealSessions", "SimulatedSessions"]

_log = logging.getLogger(__name__)
_Sent = TypeVar("_Sent", bound=Message)
_ORDER = int("FFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551", 16)  # order of the curve P-256


@dataclass(eq=False)
class SimulatedSessions(ABC):
    """Sessions of simulated clients, in which those that have answered stay to the end.

    A client that fails, or misses the deadline, has shared its secrets and drops out before its masked message. Keys
    and shares travel while clients train; unmasking moves the clock. A round with too few messages is tried again once,
    with fresh keys, among the clients whose messages have come.

    Args:
        fleet: fleet of the clients; its clock moves while the sum is unmasked.
        clients: clients with their devices, which decide how long messages take.
        settings: section ``secure_aggregation`` of the experiment.
        fixed: fixed point by which messages become lanes.
    """

    fleet: SimulatedFleet
    clients: SimulatedClients
    settings: SecureAggregation
    fixed: FixedPoint
    _tasks: dict[int, Task] = field(default_factory=dict)
    _came: list[int] = field(default_factory=list)  # tasks whose messages have come

    def open(self, tasks: Sequence[Task]) -> None:
        """Begin a round with these tasks."""
        self._tasks = {task.id: task for task in tasks}
        self._came = []

    def take(self, answer: Answer) -> None:
        """Take an answer, or a group's, until the round ends."""
        self._came += answer.tasks

    def close(self) -> SessionResult:
        """Unmask the sum, or try again with those whose messages have come."""
        survivors = sorted(self._came)
        result = SessionResult()
        for attempt, asked in enumerate((sorted(self._tasks), survivors)):
            if attempt and not self._begin_again(result, survivors):
                break
            if self._attempt(result, asked, survivors, attempt):
                break
        return result

    def _attempt(self, result: SessionResult, asked: Sequence[int], survivors: Sequence[int], attempt: int) -> bool:
        """Hold one session; True if it has given a sum."""
        degree = self.settings.degree(len(asked))
        least = self.settings.least_survivors(len(asked))
        is_enough = len(survivors) >= least
        result.total, moved = self._session(asked, survivors, attempt, is_enough=is_enough)
        result.bytes_up += moved.up
        result.bytes_down += moved.down
        if result.total is None:
            result.problem = f"{len(survivors)} of {len(asked)} clients have sent their messages, {least} are needed"
            return False
        unmasking = unmasking_traffic(len(asked), len(survivors), degree)
        self._pass_time(survivors, [unmasking, Traffic(0, 0)])
        result.survivors = survivors
        result.problem = ""  # of an attempt before
        return True

    def _begin_again(self, result: SessionResult, survivors: Sequence[int]) -> bool:
        """Exchange keys and send masked messages once more; False if there are too few clients for a session."""
        try:
            sharing = sharing_traffic(self._names(survivors), self.settings.degree(len(survivors)))
        # So few clients leave no safe graph: the round fails, and the run goes on.
        except InvalidExperiment:
            return False
        number = self._tasks[survivors[0]].round
        _log.info("round %d tries again with fresh keys, among %d clients", number, len(survivors))
        masked_bytes = len(survivors) * self.fixed.lanes * self.fixed.dtype.itemsize
        result.bytes_up += masked_bytes
        # One after the other: keys and shares, their delivery, masked messages.
        self._pass_time(survivors, [Traffic(sharing.up, 0), Traffic(0, sharing.down), Traffic(masked_bytes, 0)])
        return True

    def _pass_time(self, tasks: Sequence[int], exchanges: Iterable[Traffic]) -> None:
        """Move the clock by exchanges, each as long as the slowest client takes for its equal part of the bytes."""
        devices = [self.clients.device_of(self._tasks[task].client) for task in tasks]
        count = len(tasks)
        takes_s = sum(
            max(device.task_s(bytes_down=down // count, samples=0, bytes_up=up // count) for device in devices)
            for up, down in exchanges
        )
        until = self.fleet.clock + takes_s
        while self.fleet.clock < until and self.fleet.wait(until):
            pass  # other clients come and go meanwhile

    def _names(self, tasks: Iterable[int]) -> list[str]:
        return sorted(str(self._tasks[task].client) for task in tasks)

    @abstractmethod
    def _session(
        self, asked: Sequence[int], survivors: Sequence[int], attempt: int, *, is_enough: bool
    ) -> tuple[SecureSum | None, Traffic]:
        """One session: the sum, or None where there are not enough messages, and all bytes but the messages'.

        Args:
            asked: numbers of the tasks whose clients take part.
            survivors: numbers of the tasks whose messages have come.
            attempt: number of the attempt in its round, from 0.
            is_enough: True if there are as many messages as the settings need.
        """


@dataclass(eq=False)
class EmulatedSessions(SimulatedSessions):
    """The sum without masks, and the bytes of the protocol in closed form."""

    _sum: SecureSum | None = None  # of the round's messages, none of which is kept

    def open(self, tasks: Sequence[Task]) -> None:
        """Begin a round."""
        super().open(tasks)
        self._sum = SecureSum(self.fixed.bits, self.fixed.lanes)

    def take(self, answer: Answer) -> None:
        """Add a message, or a group's, to the sum."""
        super().take(answer)
        assert self._sum is not None
        self._sum.add(answer.lanes, len(answer.tasks))

    def _session(
        self, asked: Sequence[int], survivors: Sequence[int], attempt: int, *, is_enough: bool
    ) -> tuple[SecureSum | None, Traffic]:
        degree = self.settings.degree(len(asked))
        sharing = sharing_traffic(self._names(asked), degree)
        if not is_enough:
            return None, sharing
        unmasking = unmasking_traffic(len(asked), len(survivors), degree)
        return self._sum, Traffic(sharing.up + unmasking.up, sharing.down + unmasking.down)


@dataclass(eq=False)
class RealSessions(SimulatedSessions):
    """The whole protocol, in one process, with keys that follow from the run's seed: it hides nothing from the user."""

    _signers: dict[str, ec.EllipticCurvePrivateKey] = field(default_factory=dict)
    _messages: dict[int, Tensor] = field(default_factory=dict)  # by task; its client masks it in each attempt

    def open(self, tasks: Sequence[Task]) -> None:
        """Begin a round."""
        super().open(tasks)
        self._messages = {}

    def take(self, answer: Answer) -> None:
        """Keep a client's message, for it to mask when the round ends."""
        super().take(answer)
        self._messages[answer.tasks[0]] = answer.lanes

    def _session(
        self, asked: Sequence[int], survivors: Sequence[int], attempt: int, *, is_enough: bool
    ) -> tuple[SecureSum | None, Traffic]:
        of_name = {str(self._tasks[task].client): task for task in asked}
        coordinator, clients = self._parties(of_name, attempt)
        counted = _Counted()
        total: SecureSum | None = None
        # A session of too few clients has no sum, and the round is tried again.
        with contextlib.suppress(SessionFailed):
            total = self._held(of_name, coordinator, clients, counted, is_enough=is_enough)
        return total, counted.traffic()

    def _held(
        self,
        of_name: Mapping[str, int],
        coordinator: SessionCoordinator,
        clients: Mapping[str, SessionClient],
        counted: "_Counted",
        *,
        is_enough: bool,
    ) -> SecureSum | None:
        """Hold the session, and count its bytes.

        Args:
            of_name: client's name → number of its task.
            coordinator: coordinator of the session.
            clients: name → client of the session.
            counted: counter of the bytes of all messages but the masked ones.
            is_enough: True if there are as many messages as the settings need.
        """
        for name, client in clients.items():
            coordinator.take_keys(name, counted.up(client.open()))
        for name, listed in coordinator.close_keys():
            shares = clients[name].share(counted.down(listed))
            coordinator.take_shares(name, counted.up(shares))
        for name, delivery in coordinator.close_shares().items():
            counted.down(delivery)
            if of_name[name] in self._messages:
                lanes = self._messages[of_name[name]].clone()  # masked in place, and another attempt needs the message
                clients[name].take_boxes(delivery)
                coordinator.take_masked(name, clients[name].mask(lanes))
        if not is_enough:
            return None
        told, names = coordinator.close_masked()
        for name in names:
            consent = clients[name].consent(counted.down(told))
            coordinator.take_consent(name, counted.up(consent))
        for name, consents in coordinator.close_consents().items():
            clients[name].take_consents(counted.down(consents))
            coordinator.take_unmasking(name, counted.up(clients[name].unmask()))
        return coordinator.finish()

    def _parties(self, of_name: dict[str, int], attempt: int) -> tuple[SessionCoordinator, dict[str, SessionClient]]:
        """Coordinator and clients of a session, by name."""
        streams = self.clients.streams
        task = next(iter(self._tasks.values()))  # all tasks of a round have one model
        identities = Identities({name: self._signer(name).public_key() for name in of_name}, b"simulated")
        model = [tensor.numpy().tobytes() for tensor in task.model.tensors]
        terms = Terms(
            settings=self.settings,
            fixed=self.fixed,
            run=f"simulation of seed {streams.seed}",
            round=task.round,
            attempt=attempt,
            plan_sha256=b"simulated",  # clients and coordinator are one process, with no plan to agree on
            task_sha256=digest("model", *model),
            identities_sha256=identities.sha256,
        )
        clients = {
            name: SessionClient(
                name=name,
                identity=self._signer(name),
                identities=identities,
                terms=terms,
                # With the attempt: fresh keys, as real clients draw them.
                entropy=streams.generator("secure aggregation", name, task.round, attempt).bytes,
            )
            for name in of_name
        }
        return SessionCoordinator(terms, identities), clients

    def _signer(self, name: str) -> ec.EllipticCurvePrivateKey:
        if name not in self._signers:
            # 64 bits more than the order has, so that the remainder is all but uniform.
            drawn = int.from_bytes(self.clients.streams.generator("identity", name).bytes(40), "big")
            self._signers[name] = ec.derive_private_key(1 + drawn % (_ORDER - 1), ec.SECP256R1())
        return self._signers[name]


@dataclass
class _Counted:
    """Bytes of messages that pass through it."""

    _up: int = 0
    _down: int = 0

    def up(self, message: _Sent) -> _Sent:
        self._up += message.ByteSize()
        return message

    def down(self, message: _Sent) -> _Sent:
        self._down += message.ByteSize()
        return message

    def traffic(self) -> Traffic:
        return Traffic(self._up, self._down)
