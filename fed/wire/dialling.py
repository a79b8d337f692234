"""The dialling side of a stream: it is opened again after failures, heartbeats go out on it, and silence ends it."""

import logging
import queue
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from fed.errors import RunFailed
from fed.identity.credentials import hold_to_loopback
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.protocol.limits import MOST_MESSAGE_BYTES
from fed.protocol.protocol_pb2 import FromNode, ToNode
from fed.wire.messages import one_line

__all__ = ["WRONG_AUTHORITY", "WRONG_NAME", "DialPatience", "Dialler", "Outbox", "words_of"]

_log = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.2  # so that it hears at once when it is to stop
# By default gRPC waits for a second before it connects again, longer than our own first pause.
_OPTIONS = (("grpc.max_receive_message_length", MOST_MESSAGE_BYTES), ("grpc.initial_reconnect_backoff_ms", 200))
_NO_PROXY = ("grpc.enable_http_proxy", 0)  # which is another machine

WRONG_NAME = ("Hostname Verification Check failed", "not match")
"""Words of gRPC about a certificate that does not name the host that was dialled."""

WRONG_AUTHORITY = "CERTIFICATE_VERIFY_FAILED"
"""Word of gRPC about a certificate of another authority."""

_PLAINLY = {
    "Connection refused": "nothing listens there",
    "WRONG_VERSION_NUMBER": "it answers without TLS: does another program listen there, or a server with --insecure?",
    "Socket closed": "it has closed the connection, as a server does that asks for a certificate of its authority",
    "No route to host": "no route leads to that machine",
    "Network is unreachable": "this machine has no network",
    "Domain name not found": "no machine is known by that name",
    "DNS resolution failed": "no machine is known by that name",
}
"""Word of gRPC about a call that failed → what it means to a user."""

Outbox: TypeAlias = queue.Queue[FromNode | None]


@dataclass(frozen=True)
class DialPatience:
    """Time limits of the dialling side.

    Args:
        silence_s: seconds without a message from the other side, after which the connection counts as lost.
        call_s: seconds for one transfer; the next transfer continues a longer one.
        backoff_s: seconds before it dials again, doubled with each failure up to ``most_backoff_s``, times a random
            factor.
        most_backoff_s: seconds of the longest pause.
    """

    silence_s: float = 20.0
    call_s: float = 60.0
    backoff_s: float = 0.2
    most_backoff_s: float = 15.0

    def pause_s(self, failures: int) -> float:
        """The pause after a number of failures, which differs between nodes."""
        pause_s = self.backoff_s * 2.0 ** min(failures, 20)  # 2.0**1024 raises OverflowError
        # Unlike the run's draws, which all nodes share: they must not all dial at once.
        return min(pause_s, self.most_backoff_s) * (0.5 + random.random())


@dataclass
class Dialler(ABC):
    """Keeps a stream to a server open until that says farewell for good.

    Attributes:
        connected: event that is set while the stream is open and the server has accepted it; :meth:`take` sets it.
        heartbeat_s: seconds from one heartbeat to the next.
        farewell: reason of the server to end for good; it ends the dialler.
        problem: error that another attempt does not mend; it ends the dialler.
        parting: error that the server is told before it ends the stream, which is then not opened again.

    Args:
        server: address of the server, HOST:PORT.
        credentials: credentials of the channel; None: no encryption, on loopback only.
        patience: time limits.
        clock: clock by which it waits.
    """

    server: str
    credentials: grpc.ChannelCredentials | None
    patience: DialPatience = field(default_factory=DialPatience, kw_only=True)
    clock: Clock = field(default=SYSTEM_CLOCK, kw_only=True)

    def __post_init__(self) -> None:
        self._heard_s = 0.0
        self.connected = threading.Event()
        self.heartbeat_s = 1.0
        self.farewell = ""
        self.problem: Exception | None = None
        self.parting: Exception | None = None

    @abstractmethod
    def open(self, channel: grpc.Channel, said: Iterator[FromNode]) -> Any:
        """Make the call whose stream carries this side's messages, and yields those of the other side."""

    @abstractmethod
    def greet(self, outbox: Outbox) -> None:
        """Put into a new connection's outbox the message that a stream begins with."""

    @abstractmethod
    def heartbeat(self) -> FromNode:
        """The message that shows that this side is alive."""

    @abstractmethod
    def take(self, message: ToNode) -> None:
        """Act on a message; this must not take long."""

    def dial(self, stopped: threading.Event) -> str:
        """Attend again and again, until the server's farewell, which is returned.

        Args:
            stopped: event by which another thread ends the dialler.

        Raises:
            InvalidInput: if another machine would be dialled without credentials.
            RunFailed: if the server refuses this side for good, or is not the one that was meant.
        """
        failures = 0
        while not self._is_over(stopped):
            began_s = self.clock.monotonic_s()
            words = "it has ended the connection"
            try:
                self.attend(stopped)
            except grpc.RpcError as error:
                self._hold_to_authority(error)
                words = words_of(error)
            if self._is_over(stopped):
                break
            # A connection that lasted begins the backoff anew.
            failures = 0 if self.clock.monotonic_s() - began_s > self.patience.silence_s else failures + 1
            if failures in (0, 1, 5) or failures % 20 == 0:  # a server that is down for a day must not fill the log
                _log.info("%s cannot be reached (%s); trying again", self.server, words)
            self.clock.wait(self.patience.pause_s(failures), stopped)
        if problem := self.problem or self.parting:
            raise problem
        return self.farewell

    def _is_over(self, stopped: threading.Event) -> bool:
        return stopped.is_set() or bool(self.farewell or self.problem or self.parting)

    def attend(self, stopped: threading.Event) -> None:
        """Keep one connection for as long as it lasts."""
        outbox: Outbox = queue.Queue()
        self.greet(outbox)
        # A channel for each attempt: gRPC's own backoff of a broken one would delay the next.
        with self._channel() as channel:
            self._heard_s = self.clock.monotonic_s()
            call = self.open(channel, iter(outbox.get, None))
            ended = threading.Event()
            # A thread, since this one waits in the call for the other side's messages.
            watching = threading.Thread(target=self._watch, args=(call, outbox, ended, stopped), daemon=True)
            watching.start()
            try:
                for message in call:
                    self._heard_s = self.clock.monotonic_s()
                    self.take(message)
                    if self.farewell or self.problem is not None:
                        return
            finally:
                ended.set()
                self.connected.clear()
                outbox.put(None)  # ends gRPC's thread, which waits for the next message
                call.cancel()
                watching.join()

    def _channel(self) -> grpc.Channel:
        # Checked here, too, whoever made this caller: without certificates nothing may leave this machine.
        if self.credentials is None:
            hold_to_loopback(self.server)
            return grpc.insecure_channel(self.server, (*_OPTIONS, _NO_PROXY))
        return grpc.secure_channel(self.server, self.credentials, _OPTIONS)

    def _watch(self, call: grpc.Call, outbox: Outbox, ended: threading.Event, stopped: threading.Event) -> None:
        """Send heartbeats, and give the connection up when nothing comes from the other side."""
        said_s = self.clock.monotonic_s()
        while not self.clock.wait(_LOOKS_EVERY_S, ended):
            now_s = self.clock.monotonic_s()
            # Cancelling ends attend(), which would wait for a message for ever.
            if stopped.is_set() or self.problem is not None or now_s > self._heard_s + self.patience.silence_s:
                call.cancel()
                return
            # Whatever the server asks for, it must not take this side for dead.
            if now_s > said_s + min(self.heartbeat_s, self.patience.silence_s / 4):
                outbox.put(self.heartbeat())
                said_s = now_s

    def _hold_to_authority(self, error: grpc.RpcError) -> None:
        """End the dialler for an error that another attempt does not mend."""
        code = error.code()
        words = one_line(error.details() or "")
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            self.problem = RunFailed(f"{self.server} refuses this node: {words}")
        elif any(part in words for part in WRONG_NAME):
            host = self.server.rpartition(":")[0].strip("[]")
            self.problem = RunFailed(
                f"{self.server} shows a certificate that does not name {host}: dial the server by a name that its "
                f"certificate has, or give it one that names this one too (fed keys server DIR --host {host})"
            )
        elif WRONG_AUTHORITY in words:
            self.problem = RunFailed(
                f"{self.server} is not the server that this node's authority certifies: is it the right address, and "
                "are the credentials of the same authority?"
            )


def words_of(error: Exception) -> str:
    """Reason for which a call broke off, for a log."""
    if not isinstance(error, grpc.RpcError):
        return str(error)
    details = one_line(error.details() or "")
    meaning = next((plain for word, plain in _PLAINLY.items() if word in details), None)
    return meaning or f"{error.code().name.lower().replace('_', ' ')}: {details}"
