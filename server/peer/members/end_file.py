"""File beside a peer's messages: the members that have ended a run that is over, and those that have not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from fed.errors import InvalidPayload
from fed.server.peer.members.member import Member, refusal_of_table
from fed.storage.atomic_files import write_atomically

__all__ = ["EndFile"]

_NAME = "end.json"


class EndFile(NamedTuple):
    """Content of the file.

    Args:
        awaited: the names of members that have not come to the end.
        ended: members that have ended all their rounds.
    """

    awaited: Sequence[str] = ()
    ended: Sequence[Member] = ()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file in a folder; nothing if it is not there, or damaged.

        Args:
            folder: the folder of a peer's messages.
        """
        try:
            said = json.loads((folder / _NAME).read_text())
            ended = [Member(**one) for one in said["ended"]]
            # Its members go into the table that others are sent.
            if reason := refusal_of_table(ended):
                raise InvalidPayload(reason)
            return cls([str(name) for name in said["awaited"]], ended)
        except (OSError, ValueError, KeyError, TypeError, InvalidPayload):  # a damaged file counts as none
            return cls()

    def write(self, folder: Path) -> None:
        """Write the file.

        Args:
            folder: the folder of a peer's messages.

        Raises:
            OSError: if it cannot be written.
        """
        said = {"awaited": [*self.awaited], "ended": [member._asdict() for member in self.ended]}
        write_atomically(folder / _NAME, json.dumps(said).encode())
