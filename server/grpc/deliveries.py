"""Answers on their way in: each into a file of its own, over several connections if it must, until it is whole."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from fed.errors import DamagedPayload, InvalidPayload
from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import TIMES_DAMAGED
from fed.server.grpc.leases import Lease, Leases
from fed.wire.calls import Call, TurnedAway
from fed.wire.messages import refusal_of_numbers
from fed.wire.rate_limits import Allowance, Refusals

if TYPE_CHECKING:
    from fed.wire.payloads import TensorSpec

__all__ = ["Deliveries"]

_log = logging.getLogger(__name__)
_SAYS_EVERY_S = 30.0


class Deliveries:
    """Receiver of nodes' answers.

    Attributes:
        spec: types and lengths that an answer's tensors must have.

    Args:
        leases: leases of the tasks that are answered.
        refusals: counter of refused answers.
        spool: folder of files on their way.
        stall_s: seconds to wait for the next piece of a delivery.
        clock: time, which limits how often the log reports a full disk.
    """

    def __init__(self, leases: Leases, refusals: Refusals, spool: Path, stall_s: float, clock: Clock) -> None:
        self.spec: tuple[TensorSpec, ...] = ()
        self._leases = leases
        self._refusals = refusals
        self._spool = spool
        self._stall_s = stall_s
        self._full = Allowance(1, 1 / _SAYS_EVERY_S, clock)  # limits how often the log reports a full disk

    async def take(self, call: Call) -> pb.Receipt:
        """Take one delivery.

        Raises:
            TurnedAway: if it does not begin with an answer's header, or stalls.
        """
        first = await call.first(pb.Part, self._stall_s)
        if not first.HasField("answer"):
            raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "a delivery must begin with the answer's header")
        answer = first.answer
        lease = self._leases.find(answer.task)
        # Without certificates a caller has no name, and the task says whose it is.
        client = lease.client if call.client is None and lease is not None else call.client
        # Before its lease is looked at, which may be that of another attempt by now, with other masks.
        if self._leases.was_completed(client, answer):
            return pb.Receipt(accepted=True)
        # Another's task is refused like one that does not exist: a stranger learns nothing.
        if lease is None or lease.client != client:
            return self._refusal(call.sender, f"task {answer.task.number} is not in flight for it")
        try:
            return await self._received(call, lease, answer)
        except DamagedPayload as error:
            self._refusal(lease.client, str(error))
            lease.times_damaged += 1
            if lease.times_damaged < TIMES_DAMAGED:
                return pb.Receipt(received_bytes=lease.incoming.received_bytes if lease.incoming else 0)
            return self._refused(lease, f"it came damaged {TIMES_DAMAGED} times: {error}")
        except InvalidPayload as error:
            return self._refused(lease, str(error))
        except OSError as error:
            if self._full.spend():
                _log.warning(
                    "%s cannot be written to (%s): make room there; nodes try again until then",
                    self._spool,
                    error.strerror or error,
                )
            # No fault of the node's, which keeps the answer and tries again.
            await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server has no room for the answer now")

    async def _received(self, call: Call, lease: Lease, answer: pb.Answer) -> pb.Receipt:
        """Receive what is left of an answer; what has come of it stays when the delivery breaks off."""
        # Before any of its tensors is taken.
        if reason := refusal_of_numbers(answer.samples, answer.weight, answer.train_loss):
            raise InvalidPayload(reason)
        incoming = self._leases.incoming(lease, answer, self.spec)
        if answer.offset != incoming.received_bytes:  # the receipt tells the node from where to continue
            return pb.Receipt(received_bytes=incoming.received_bytes)
        lease.deliveries += 1
        delivery = lease.deliveries
        while not incoming.is_complete:
            part = await call.next(pb.Part, self._stall_s)
            if lease not in self._leases:  # other calls ran during the await, and may have ended it
                return self._refusal(lease.client, f"task {lease.number} is not in flight any more")
            # A newer connection of the node has taken over.
            if part is None or lease.deliveries != delivery or lease.incoming is not incoming:
                return pb.Receipt(received_bytes=incoming.received_bytes)
            if not part.HasField("chunk"):
                raise InvalidPayload("after the answer's header there must be chunks")
            incoming.add(part.chunk)
            # A large answer may take longer than a lease on a slow line.
            self._leases.renew(lease)
        try:
            incoming.check()
        except DamagedPayload:
            lease.drop()
            raise
        self._leases.complete(lease, answer, incoming)
        return pb.Receipt(accepted=True)

    def _refused(self, lease: Lease, reason: str) -> pb.Receipt:
        """Refuse an answer for good: its task has failed."""
        self._leases.fail(lease, f"its answer was refused: {reason}")
        return self._refusal(lease.client, reason)

    def _refusal(self, sender: int | str, reason: str) -> pb.Receipt:
        self._refusals.note(sender, reason)
        return pb.Receipt(reason=reason)
