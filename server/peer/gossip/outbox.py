"""Outbox of a peer: messages to neighbours on disk, until no receiver may need them again."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict

from fed.errors import RunFailed, os_errors_as
from fed.protocol import protocol_pb2 as pb
from fed.vectors.tensors import Tensor
from fed.wire.payloads import written

__all__ = ["ExchangeKey", "Outbox", "OutboxMessage"]


class ExchangeKey(NamedTuple):
    """Round, from 1, and place of an exchange in it, from 0."""

    round: int
    exchange: int


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

    def keep(
        self,
        key: ExchangeKey,
        view: str,
        tensors: Sequence[Tensor],
        receivers: Collection[str],
        *,
        before: str = "",
        is_whole: bool = False,
    ) -> OutboxMessage:
        """Write a message down.

        Args:
            key: round and place of the exchange that it belongs to.
            view: hash of the members by which this peer found its neighbours, and its generation.
            tensors: contents of the message.
            receivers: names of the neighbours that may need it.
            before: hash of the vector that its differences are added to; empty where it has none.
            is_whole: True if it has that vector with it; an exchange of differences has one message with it and one
                without.

        Returns:
            The message, as it is on disk.

        Raises:
            RunFailed: if it cannot be written.
        """
        path = self._folder / f"{key.round:06d}-{key.exchange}{'-whole' if is_whole else ''}.out"
        with os_errors_as(RunFailed, f"{self._folder} cannot be written to", "make room there, then resume the run"):
            payload = written(path, tensors)
            said: dict[str, Any] = {"key": key, "view": view, "owed": sorted(receivers), "before": before}
            said |= {"payload": MessageToDict(payload)}
            # The description last: without it a message counts as not written.
            path.with_suffix(".json").write_text(json.dumps(said))
        message = OutboxMessage(key, view, payload, path, owed=set(receivers), before=before)
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
