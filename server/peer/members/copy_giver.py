"""Copies of a peer's state for those that join: each round's is written once, however many ask for it."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fed.errors import FedError
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.members.link import Link

__all__ = ["CopyGiver"]

_log = logging.getLogger(__name__)


class CopyGiver:
    """Sender of copies.

    Args:
        snapshot: function that returns the last round with a state, and that state; None before the first.
        write: function that writes a copy to a file, from the file, the round and the state.
        new_file: function that returns the path of a new file.
    """

    def __init__(
        self,
        snapshot: Callable[[], tuple[int, Any] | None],
        write: Callable[[Path, int, Any], pb.Payload],
        new_file: Callable[[], Path],
    ) -> None:
        self._snapshot = snapshot
        self._write = write
        self._new_file = new_file
        self._giving: asyncio.Task[None] | None = None
        self._given: tuple[pb.PeerMessage, Path] | None = None

    def give(self, link: Link) -> None:
        """Begin to send a copy over a stream, unless one is being made: who gets none asks again."""
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give(link))

    async def _give(self, link: Link) -> None:
        if (found := self._snapshot()) is None:
            return
        number, state = found
        if self._given is None or self._given[0].copy.round != number:
            path = self._new_file()
            try:
                # Written in a thread beside the loop: a state of gigabytes must not hold up the heartbeats.
                payload = await asyncio.to_thread(self._write, path, number, state)
            except FedError as error:
                path.unlink(missing_ok=True)
                _log.warning("%r asked for a copy of this peer's state, which cannot be made: %s", link.name, error)
                return
            if self._given is not None:
                self._given[1].unlink(missing_ok=True)
            self._given = (pb.PeerMessage(copy=pb.Copy(round=number, payload=payload)), path)
        header, path = self._given
        link.send(header, path)
