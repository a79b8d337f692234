"""A node's transfers: payloads fetched and answers delivered, however often the connection breaks."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from fed.errors import DamagedPayload, InvalidPayload, RunFailed
from fed.processes.clock import Clock
from fed.protocol.limits import TIMES_DAMAGED
from fed.protocol.protocol_pb2 import Answer, Part, Payload, Receipt, Wanted
from fed.wire.dialling import DialPatience, words_of
from fed.wire.payloads import Incoming, TensorSpec, chunks

if TYPE_CHECKING:
    from fed.protocol.protocol_pb2_grpc import CoordinationStub

__all__ = ["Transfers"]

_log = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.05


class Transfers:
    """Calls beside the node's stream, which wait for that when they break off.

    Attributes:
        over: event that ends all transfers.
        stub: stub of the present connection, or of the last one.

    Args:
        patience: time limits of the transfers.
        connected: event that is set while the node's stream is open.
        clock: clock by which they wait.
    """

    def __init__(self, patience: DialPatience, connected: threading.Event, clock: Clock) -> None:
        self._clock = clock
        self._patience = patience
        self._connected = connected
        self.over = threading.Event()
        self.stub: CoordinationStub  # there is nothing to transfer before the first connection

    def download(self, payload: Payload, path: Path, spec: Sequence[TensorSpec], is_wanted: Callable[[], bool]) -> bool:
        """Fetch a file; False if it is not wanted any more.

        Args:
            payload: description of the file by the server.
            path: path of the file to write.
            spec: types and lengths of its tensors.
            is_wanted: function that returns True as long as the transfer shall go on.

        Raises:
            InvalidPayload: if it holds something else.
            DamagedPayload: if it came damaged too often.
            RunFailed: if the server does not have it any more.
            OSError: if it cannot be written.
        """
        incoming = Incoming(path, payload, spec)
        failures = 0
        times_damaged = 0
        while is_wanted() and not self.over.is_set():
            before_bytes = incoming.received_bytes
            try:
                if not incoming.is_complete:
                    wanted = Wanted(sha256=payload.sha256, offset=incoming.received_bytes)
                    # A stream whose other side is frozen ends by its limit alone.
                    for chunk in self.stub.Download(wanted, timeout=self._patience.call_s):
                        incoming.add(chunk)
                if incoming.is_complete:
                    incoming.check()
                    return True
            except DamagedPayload as error:
                times_damaged += 1
                if times_damaged == TIMES_DAMAGED:
                    raise
                _log.warning("a download was damaged (%s); it begins anew", error)
                incoming = Incoming(path, payload, spec)
            except (grpc.RpcError, ValueError) as error:  # a channel that was closed meanwhile raises ValueError
                # Another attempt would not find it either: the server keeps files for open tasks alone.
                if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.NOT_FOUND:
                    raise RunFailed("the server has no such payload any more") from None
                _log.info(
                    "a download broke off (%s); it will go on after %d bytes", words_of(error), incoming.received_bytes
                )
                failures += 1
                self._await_connection(failures, is_wanted)
            else:
                # A server that ends streams without a byte would else be asked without a pause.
                failures = failures + 1 if incoming.received_bytes == before_bytes else 0
                if failures:
                    self._await_connection(failures, is_wanted)
        return False

    def deliver(self, answer: Answer, path: Path, is_wanted: Callable[[], bool]) -> Receipt | None:
        """Send an answer until the server has it, or says that it wants none; None if it is not wanted any more.

        Args:
            answer: header of the answer.
            path: path of its file.
            is_wanted: function that returns True as long as the transfer shall go on.

        Raises:
            InvalidPayload: if the server says that it has more than there is.
            OSError: if the file cannot be read.
        """
        offset = failures = 0
        while is_wanted() and not self.over.is_set():
            path.stat()  # of a file that is gone gRPC would not say so, but break off again and again
            try:
                receipt: Receipt = self.stub.Deliver(_parts(answer, path, offset), timeout=self._patience.call_s)
            except (grpc.RpcError, ValueError) as error:
                _log.info("a delivery broke off (%s); it will go on", words_of(error))
                failures += 1
                self._await_connection(failures, is_wanted)
                continue
            if receipt.accepted or receipt.reason:
                return receipt
            # There is nothing to send from there on, and to ask again would not help.
            if receipt.received_bytes > answer.payload.size_bytes:
                raise InvalidPayload(
                    f"the server claims to have {receipt.received_bytes} of {answer.payload.size_bytes} bytes of an "
                    "answer"
                )
            # A server that takes nothing is not asked again without a pause.
            failures = failures + 1 if receipt.received_bytes <= offset else 0
            offset = receipt.received_bytes
            if failures:
                self._await_connection(failures, is_wanted)
        return None

    def _await_connection(self, failures: int, is_wanted: Callable[[], bool]) -> None:
        """Wait for a pause, and until the server is connected."""
        until_s = self._clock.monotonic_s() + self._patience.pause_s(failures)
        while is_wanted() and not self.over.is_set():
            if self._clock.monotonic_s() > until_s and self._connected.is_set():
                return
            self._clock.wait(_LOOKS_EVERY_S)


def _parts(answer: Answer, path: Path, offset: int) -> Iterator[Part]:
    header = Part(answer=answer)
    header.answer.offset = offset
    yield header
    for chunk in chunks(path, offset):
        yield Part(chunk=chunk)
