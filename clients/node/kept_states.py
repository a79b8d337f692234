"""States that a client keeps on its disk between tasks, until the server says whether and how much a task counts.

Shapes: see :mod:`fed.vectors.layout`.
"""

import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from fed.clients.training.client_states import ClientState, ClientStates, at_discount
from fed.errors import InvalidCheckpoint, InvalidPayload
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import name_of
from fed.secure_aggregation.reasons import ClientRefusal, Reason
from fed.storage.checkpoints import Checkpoints, Tree
from fed.vectors.tensors import Tensor

__all__ = ["KeptStates"]


class KeptStates:
    """A client's states before and after each of its tasks, a folder for each task.

    Args:
        folder: the folder of all that the client keeps.
        client: id of the client.
        first: () → the client's states before its first task.
        beside: file names in the folder that belong to no task.
    """

    def __init__(
        self, folder: Path, client: int | str, first: Callable[[], ClientStates], beside: Collection[str]
    ) -> None:
        self._folder = folder
        self._client = client
        self._first = first
        self._beside = beside

    @property
    def is_needed(self) -> bool:
        """True if the client keeps something from task to task, for the algorithm or for codecs."""
        return bool(self._first().names)

    def refuse_another(self, task: pb.TaskId, own_sha256: str) -> None:
        """Refuse a task if the client has done another one of the same name, whose state would be lost.

        Args:
            task: the name of the task.
            own_sha256: the digest of all that the task carries.

        Raises:
            ClientRefusal: if the digest is not that of the task that was done.
        """
        name = name_of(task)
        found = self._record(name) if (self._folder / name).is_dir() else None
        if found is not None and found.get("own_sha256", own_sha256) != own_sha256:
            raise ClientRefusal(f"the server has described task {name} in two different ways", Reason.TOLD_TWICE)

    def forget_before(self, task: pb.TaskId) -> None:
        """Remove the states that the client kept after tasks before this one."""
        oldest = self._folder / name_of(task)
        if not oldest.is_dir():
            return
        for other in self._folder.iterdir():
            # By time, since numbers of tasks begin anew when a server is started again.
            if other.name not in self._beside and other.stat().st_mtime_ns < oldest.stat().st_mtime_ns:
                shutil.rmtree(other, ignore_errors=True)

    def resumed(self, asked: pb.Assignment | pb.Examination) -> tuple[ClientStates, bool]:
        """The states that the client resumes from.

        Returns:
            The states, and True if the state that the server names is lost: then the client resumes from its initial
            one.

        Raises:
            InvalidPayload: if the discount of the last task is not in (0, 1].
        """
        discount = asked.kept_discount if asked.HasField("kept_discount") else 1.0
        if not 0 < discount <= 1:
            raise InvalidPayload(f"the server's kept_discount must be in (0, 1], got {discount}")
        states = self._first()
        if isinstance(asked, pb.Assignment) and states.codec_names:
            for lost in map(name_of, reversed(asked.lost_after)):
                if found := self._record(lost):
                    states.commit(self._client, found["before"])
                    return states, found["are_lost"]
        if not asked.kept_after.start:
            return states, False
        if found := self._record(name_of(asked.kept_after)):
            states.commit(self._client, at_discount(found["before"], found["after"], discount))
        return states, not found

    def keep(
        self,
        task: pb.TaskId,
        own_sha256: str,
        before: ClientState,
        *,
        states: ClientStates,
        rows: Sequence[Tensor],
        are_lost: bool,
    ) -> None:
        """Store the client's state before and after a task, until the server says whether and how much it counts.

        Args:
            task: the name of the task, by which the server will name the state.
            own_sha256: the digest of all that the task carries.
            before: the state before the task.
            states: the client's states.
            rows: the state after the task, and the codecs' state if the message is lost.
            are_lost: True if the state before the task was lost. It stays lost if the message is.
        """
        if not rows:
            return
        after = dict(zip(states.names, rows, strict=False))
        # A client whose message is lost goes on from the state before, but with the codecs' state for that case.
        before |= dict(zip(states.codec_names, rows[len(states.names) :], strict=True))
        kept = {"before": before, "after": after, "are_lost": are_lost, "own_sha256": own_sha256}
        place = self._folder / name_of(task)
        Checkpoints(place, 1).write(0, kept)
        _make_newest(place)

    def _record(self, name: str) -> Tree | None:
        """The states that a task left, if they are there."""
        try:
            newest = Checkpoints(self._folder / name, 1).newest()
        except InvalidCheckpoint:
            return None
        return None if newest is None else newest[1]


def _make_newest(folder: Path) -> None:
    """Give a folder a later time than its neighbours have, even if the clock was set back."""
    newest_ns = max([other.stat().st_mtime_ns for other in folder.parent.iterdir() if other != folder], default=0)
    if folder.stat().st_mtime_ns <= newest_ns:
        os.utime(folder, ns=(newest_ns + 1, newest_ns + 1))
