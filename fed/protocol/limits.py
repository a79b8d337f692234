"""Limits and names to which both sides hold each other; docs/protocol.md has all of them."""

import re

from fed.protocol.protocol_pb2 import TaskId

__all__ = ["MOST_CLASSES", "MOST_HELD", "MOST_MESSAGE_BYTES", "NODE_NAME", "PROTOCOL", "TIMES_DAMAGED", "name_of"]

PROTOCOL = 1
"""Version of the protocol; both sides must speak the same."""

MOST_MESSAGE_BYTES = 4 << 20
"""Largest message that gRPC delivers. It ends the stream of a larger one without saying why."""

TIMES_DAMAGED = 3
"""Number of times that a payload may arrive damaged; after the last one it is not asked for again."""

MOST_CLASSES = 1 << 24
"""Largest number of classes that a model may be made for."""

MOST_HELD = 1000
"""Largest number of tasks that a node may hold."""

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Pattern of a node's name: up to 64 letters, digits, dots, hyphens and underscores, the first a letter or a digit."""


def name_of(task: TaskId) -> str:
    """A task's name among those of all servers that a run has had.

    Example:
        >>> name_of(TaskId(start=8, number=4))
        '8-4'
    """
    return f"{task.start}-{task.number}"
