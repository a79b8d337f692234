"""A hostile coordinator: it speaks the protocol over mutual TLS, and says to each node whatever a test likes."""

import hashlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from torch import Tensor

from fed.identity.authority import Authority
from fed.identity.credentials import ServerCredentials, peer_of
from fed.protocol import protocol_pb2 as pb
from fed.protocol.protocol_pb2_grpc import CoordinationServicer, add_CoordinationServicer_to_server
from fed.storage.serialization import bytes_of
from fed.wire.payloads import joined

__all__ = ["BOUND_S", "HostileCoordinator", "NodeRefuses", "View"]

BOUND_S = 120.0
_HEARTBEAT_S = 1.0
_CHUNK_BYTES = 1 << 16

_Found = TypeVar("_Found")


class NodeRefuses(Exception):
    """A node says that it does not do what it is asked; the sentence."""


@dataclass
class View:
    """All that the coordinator sees of one node, in the order in which it came.

    Args:
        said: the messages of its stream, of all connections, without heartbeats: these come by the clock.
        delivered: the heads of its deliveries, with their bytes.
        wanted: the files that it has downloaded, each as often as it has begun to.
        outbox: the messages for it.
        connections: the number of times that it has come.
        is_gone: True if its last stream has ended.
    """

    said: list[pb.FromNode] = field(default_factory=list)
    delivered: list[tuple[pb.Answer, bytes]] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    outbox: "queue.Queue[pb.ToNode | None]" = field(default_factory=queue.Queue)
    connections: int = 0
    is_gone: bool = False

    def hold_to_stay(self) -> None:
        """Check that the node takes part.

        Raises:
            NodeRefuses: if it has said farewell, or is gone.
        """
        for message in reversed(self.said):
            if message.HasField("farewell"):
                raise NodeRefuses(message.farewell.reason)
            if message.HasField("joining"):
                break
        if self.is_gone:
            raise NodeRefuses("its stream has ended")


class HostileCoordinator(CoordinationServicer):
    """The server's side of the wire, by hand.

    Attributes:
        views: the views of the nodes, by name.
        port: the port that it listens on.

    Args:
        folder: the folder of the keys.
        names: the names of the nodes that the authority certifies.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.keys = folder / "keys"
        authority = Authority.create(self.keys, hosts=["127.0.0.1"])
        for name in names:
            authority.issue(name)
        self.credentials = ServerCredentials.load(self.keys)
        self.views = {name: View() for name in names}
        self._files: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        add_CoordinationServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_secure_port("127.0.0.1:0", self.credentials.for_listening())
        self._server.start()

    def close(self) -> None:
        self._is_closed = True
        for view in self.views.values():
            view.outbox.put(None)
        self._server.stop(grace=0.5).wait()

    def tell(self, name: str, **what: Any) -> None:
        """Send a node a message."""
        self.views[name].outbox.put(pb.ToNode(**what))

    def publish(self, tensors: Sequence[Tensor]) -> pb.Payload:
        """Tensors that nodes can download."""
        payload, _ = joined(tensors)
        self._files[payload.sha256] = b"".join(map(bytes_of, tensors))
        return payload

    def content(self, payload: pb.Payload) -> bytes:
        """The bytes of a payload that nodes can download."""
        return self._files[payload.sha256]

    def wait(self, condition: Callable[[], _Found | None], what: str, within_s: float = BOUND_S) -> _Found:
        """Its first value that is not None, once nodes have said enough.

        Raises:
            AssertionError: if there is none in time.
        """
        until_s = time.monotonic() + within_s
        with self._changed:
            while (found := condition()) is None:
                left_s = until_s - time.monotonic()
                assert left_s > 0, f"waited {within_s:g} s for {what}"
                self._changed.wait(min(left_s, 0.5))
        return found

    def wait_to_join(self, names: Sequence[str], connections: int = 1) -> None:
        """Wait until these nodes have joined, so many times each."""
        for name in names:
            self.wait(lambda view=self.views[name]: view.connections >= connections or None, f"{name!r} to join")  # type: ignore[misc]

    def Attend(self, request_iterator: Iterator[pb.FromNode], context: Any) -> Iterator[pb.ToNode]:  # noqa: N802
        """A node's stream."""
        view = self._view_of(context)
        outbox = view.outbox = queue.Queue()
        threading.Thread(target=self._listen, args=(view, request_iterator, outbox), daemon=True).start()
        while not self._is_closed:
            try:
                message = outbox.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                message = pb.ToNode(heartbeat=pb.Heartbeat())
            if message is None:
                return
            yield message

    def Download(self, request: pb.Wanted, context: Any) -> Iterator[pb.Chunk]:  # noqa: N802
        """A published file."""
        if not request.offset:
            self._view_of(context).wanted.append(request.sha256)
        content = self._files[request.sha256][request.offset :]
        for begin in range(0, len(content), _CHUNK_BYTES):
            data = content[begin : begin + _CHUNK_BYTES]
            yield pb.Chunk(data=data, crc32=zlib.crc32(data))

    def Deliver(self, request_iterator: Iterator[pb.Part], context: Any) -> pb.Receipt:  # noqa: N802
        """A masked message, or whatever else comes."""
        view = self._view_of(context)
        head, *chunks = request_iterator
        content = b"".join(part.chunk.data for part in chunks)
        assert hashlib.sha256(content).hexdigest() == head.answer.payload.sha256
        with self._changed:
            view.delivered.append((head.answer, content))
            self._changed.notify_all()
        return pb.Receipt(accepted=True)

    def _view_of(self, context: Any) -> View:
        peer = peer_of(context)
        assert peer is not None
        return self.views[peer[0]]

    def _listen(self, view: View, said: Iterator[pb.FromNode], outbox: "queue.Queue[pb.ToNode | None]") -> None:
        try:
            for message in said:
                with self._changed:
                    if not message.HasField("heartbeat"):
                        view.said.append(message)
                    if message.HasField("joining"):
                        view.connections += 1
                        view.is_gone = False
                    self._changed.notify_all()
        except grpc.RpcError:
            pass  # the node is gone
        except Exception:
            if not self._is_closed:
                raise
        with self._changed:
            view.is_gone = view.outbox is outbox
            self._changed.notify_all()
        outbox.put(None)
