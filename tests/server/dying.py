"""A node's process that kills itself in a phase of its first session."""

import os
import signal
from typing import Any

from fed.clients.node.sessions import SecureNode
from fed.wire import protocol_pb2 as pb

__all__ = ["die_at"]

_TOLD = {"shares": "key_list", "consent": "survivors", "unmasking": "consents"}


def die_at(phase: str) -> None:
    """Let every session end in a phase: keys, shares, masked, consent or unmasking, before its message leaves."""
    begin, hear, masked = SecureNode.begin, SecureNode.hear, SecureNode.masked

    def begin_or_die(node: SecureNode, assignment: pb.Assignment) -> pb.FromSession:
        keys = begin(node, assignment)
        _die(phase == "keys")
        return keys

    def hear_or_die(node: SecureNode, said: pb.ToSession) -> pb.FromSession | None:
        answer = hear(node, said)
        _die(said.HasField(_TOLD[phase]) if phase in _TOLD else False)
        return answer

    def mask_or_die(node: SecureNode, *arguments: Any) -> Any:
        found = masked(node, *arguments)
        _die(phase == "masked")
        return found

    patched: Any = SecureNode
    patched.begin, patched.hear, patched.masked = begin_or_die, hear_or_die, mask_or_die


def _die(is_time: bool) -> None:
    if is_time:
        os.kill(os.getpid(), signal.SIGKILL)
