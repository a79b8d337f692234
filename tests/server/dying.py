"""A node's process that kills itself in a phase of its first session."""

import os
import signal
from collections.abc import Sequence
from typing import Any

from fed.clients.node.sessions import SecureNode
from fed.protocol import protocol_pb2 as pb

__all__ = ["die_at"]

_TOLD = {"shares": "key_list", "consent": "survivors", "unmasking": "consents"}


def die_at(phase: str) -> None:
    """Let every session end in a phase: keys, shares, masked, consent or unmasking, before its message leaves."""
    join, answer, masked = SecureNode.join, SecureNode.answer, SecureNode.masked

    def join_or_die(node: SecureNode, assignment: pb.Assignment) -> Sequence[pb.FromSession]:
        keys = join(node, assignment)
        _die(phase == "keys")
        return keys

    def answer_or_die(node: SecureNode, message: pb.ToSession) -> Sequence[pb.FromSession]:
        found = answer(node, message)
        _die(message.HasField(_TOLD[phase]) if phase in _TOLD else False)
        return found

    def mask_or_die(node: SecureNode, *arguments: Any) -> Any:
        found = masked(node, *arguments)
        _die(phase == "masked")
        return found

    patched: Any = SecureNode
    patched.join, patched.answer, patched.masked = join_or_die, answer_or_die, mask_or_die


def _die(is_time: bool) -> None:
    if is_time:
        os.kill(os.getpid(), signal.SIGKILL)
