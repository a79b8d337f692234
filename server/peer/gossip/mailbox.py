"""Messages of exchanges: those to neighbours until no receiver may need them again, and theirs until they are mixed.

Shapes: see :mod:`fed.vectors.layout`.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.json_format import MessageToDict, ParseDict

from fed.errors import InvalidPayload, RunFailed, os_errors_as
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.gossip.copies import hash_of
from fed.server.peer.gossip.exchange import ExchangeKey, GossipExchange
from fed.vectors.tensors import Tensor
from fed.wire.payloads import Incoming, written

__all__ = ["CheckVectors", "Inbox", "Outbox", "OutboxMessage", "finite_tensors"]

CheckVectors: TypeAlias = Callable[[ExchangeKey, str, Sequence[Tensor]], None]
"""Function that raises InvalidPayload where the vectors that a peer sent in an exchange cannot be decoded."""

_LACKS = "this peer has no copy of the vector that the differences are added to"
_OTHER_HASH = "the vector that it sent has another hash than it named"
_OTHER_VIEW = "it sees other members than this peer"


@dataclass
class OutboxMessage:
    """Message to neighbours, which is on disk.

    Args:
        key: round and place of the exchange that it belongs to.
        view: hash of the members by which the sender found its neighbours, and its generation.
        payload: size and tensors of its file.
        path: file with its tensors.
        owed: names of the receivers that may need it again.
        before: hash of the vector that its differences are added to; empty where it has none.
    """

    key: ExchangeKey
    view: str
    payload: pb.Payload
    path: Path
    owed: set[str]
    before: str = ""

    def header(self) -> pb.PeerMessage:
        """Message that goes before the file."""
        vectors = pb.Vectors(round=self.key.round, exchange=self.key.exchange, view=self.view, payload=self.payload)
        vectors.before = self.before
        return pb.PeerMessage(vectors=vectors)


class Outbox:
    """Messages that stay on disk until their receivers have the outcome of their round on disk, or do not take them.

    Args:
        folder: directory of the messages' files, used by this peer alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._messages: dict[Path, OutboxMessage] = {}

    def post(self, exchange: GossipExchange) -> list[OutboxMessage]:
        """Write down the messages of an exchange: one; for differences a second one, with the vector that they add to.

        Raises:
            RunFailed: if they cannot be written.
        """
        differences = exchange.differences
        if differences is None:
            return [self._keep(exchange, exchange.tensors, exchange.receivers)]
        whole_P = differences.whole_P
        know_it = exchange.receivers & differences.known_by
        # receivers with another copy of the vector, or none, get it with the differences
        lack_it = exchange.receivers - differences.known_by
        messages = []
        if know_it:
            messages.append(self._keep(exchange, [*exchange.tensors, whole_P[:0]], know_it))
        if lack_it:
            messages.append(self._keep(exchange, [*exchange.tensors, whole_P], lack_it, suffix="-whole"))
        return messages

    def _keep(
        self, exchange: GossipExchange, tensors: Sequence[Tensor], receivers: Collection[str], suffix: str = ""
    ) -> OutboxMessage:
        """Write a message down.

        Args:
            exchange: exchange that it belongs to.
            tensors: contents of the message.
            receivers: names of the neighbours that may need it.
            suffix: end of its file's name, by which the messages of an exchange differ.
        """
        key = exchange.key
        before = "" if exchange.differences is None else exchange.differences.before
        path = self._folder / f"{key.round:06d}-{key.exchange}{suffix}.out"
        with os_errors_as(RunFailed, f"{self._folder} cannot be written to", "make room there, then resume the run"):
            payload = written(path, tensors)
            said: dict[str, Any] = {"key": key, "view": exchange.view, "owed": sorted(receivers), "before": before}
            said |= {"payload": MessageToDict(payload)}
            # The description last: without it a message counts as not written.
            path.with_suffix(".json").write_text(json.dumps(said))
        message = OutboxMessage(key, exchange.view, payload, path, owed=set(receivers), before=before)
        self._messages[path] = message
        return message

    def owed_to(self, name: str) -> list[OutboxMessage]:
        """Messages that a receiver may need."""
        return [message for message in self._messages.values() if name in message.owed]

    def release(self, key: ExchangeKey, name: str, *, is_open: bool = False) -> None:
        """Keep a message for this receiver no longer.

        Args:
            key: round and place of the message's exchange.
            name: the receiver's name.
            is_open: True if the exchange goes on, so that the file stays.
        """
        for message in self.owed_to(name):
            if message.key == key:
                message.owed.discard(name)
                if not is_open:
                    self.close(message)

    def close(self, message: OutboxMessage) -> None:
        """Remove a message that no receiver may need."""
        if not message.owed and self._messages.pop(message.path, None) is not None:
            for path in (message.path.with_suffix(".json"), message.path):
                path.unlink(missing_ok=True)

    def restore(self, number: int) -> None:
        """Take up the messages on disk of rounds up to this one, and remove all other files."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                said = json.loads(path.read_text())
                key = ExchangeKey(*said["key"])
                payload = ParseDict(said["payload"], pb.Payload())
                message = OutboxMessage(
                    key,
                    view=said["view"],
                    payload=payload,
                    path=path.with_suffix(".out"),
                    owed=set(said["owed"]),
                    before=said["before"],
                )
                is_whole = message.path.stat().st_size == payload.size_bytes
            except (OSError, ValueError, KeyError, TypeError):  # this peer was killed while it wrote the message
                is_whole = False
            if is_whole and key.round <= number:
                self._messages[message.path] = message
        wanted = {message.path for message in self._messages.values()}
        for path in self._folder.iterdir():
            # Rounds after the last checkpoint are run again, and write their messages anew.
            if path.with_suffix(".out") not in wanted:
                path.unlink()


class _Arrival(NamedTuple):
    """Message of a neighbour that is whole.

    Args:
        view: hash of the members by which its sender found its neighbours, and its generation.
        tensors: contents of the message.
        before: hash of the vector that its differences are added to; empty where it has none.
    """

    view: str
    tensors: list[Tensor]
    before: str


class Inbox:
    """Neighbours' messages that are whole, until their exchange is over.

    Args:
        check: check of vectors that can be decoded; None: all can.
    """

    def __init__(self, check: CheckVectors | None) -> None:
        self._check = check
        self._arrivals: dict[tuple[ExchangeKey, str], _Arrival] = {}

    def __contains__(self, message: tuple[ExchangeKey, str]) -> bool:
        """True if the message of an exchange and a neighbour is here."""
        return message in self._arrivals

    def take(self, key: ExchangeKey, name: str, header: pb.Vectors, incoming: Incoming) -> bool:
        """Take a neighbour's message; false if it has come before, over another stream.

        Args:
            key: round and place of the exchange.
            name: name of the neighbour.
            header: message that came before the file.
            incoming: file of the message, which is whole.

        Raises:
            InvalidPayload: if its vectors are not finite, or cannot be decoded.
        """
        tensors = finite_tensors(incoming)
        if self._check is not None:
            self._check(key, name, tensors)
        if (key, name) in self._arrivals:
            return False
        self._arrivals[key, name] = _Arrival(header.view, tensors, header.before)
        return True

    def flaw(self, exchange: GossipExchange, name: str) -> str | None:
        """Reason why a neighbour's message must not count in an exchange, or None."""
        arrival = self._arrivals[exchange.key, name]
        if arrival.view != exchange.view:
            return _OTHER_VIEW
        if exchange.differences is None:
            return None
        if not arrival.before:
            return "its differences must name the vector that they are added to"
        if (whole_P := arrival.tensors[-1]).numel():
            return None if hash_of(whole_P) == arrival.before else _OTHER_HASH
        return None if exchange.differences.held.get(name) == arrival.before else _LACKS

    def drop(self, key: ExchangeKey, name: str) -> None:
        """Forget a message that does not count."""
        del self._arrivals[key, name]

    def end(self, exchange: GossipExchange, counted: Collection[str]) -> None:
        """Hand over the contents of the messages of these neighbours, and forget all messages of the exchange."""
        exchange.received = {name: self._arrivals[exchange.key, name].tensors for name in counted}
        for name in self.senders(exchange.key):
            self.drop(exchange.key, name)

    def senders(self, key: ExchangeKey) -> list[str]:
        """Names of the neighbours whose messages of an exchange are here."""
        return [name for its_key, name in self._arrivals if its_key == key]

    def held(self, name: str) -> int:
        """Number of messages of a neighbour that are here."""
        return sum(its_name == name for _, its_name in self._arrivals)

    def forget_before(self, key: ExchangeKey) -> None:
        """Forget the messages of earlier exchanges."""
        self._arrivals = {one: arrival for one, arrival in self._arrivals.items() if one[0] >= key}


def finite_tensors(incoming: Incoming) -> list[Tensor]:
    """Tensors of a file that is whole, which is then removed.

    Raises:
        InvalidPayload: if they are not finite.
    """
    tensors = incoming.take()
    # before they count: one NaN would reach all peers within some rounds
    if not all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point()):
        raise InvalidPayload("its vectors must be finite, got infinity or NaN")
    return tensors
