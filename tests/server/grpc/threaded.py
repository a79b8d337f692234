"""Nodes of one process, each a thread with all of the client's side of the wire, that train in that process."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fed.clients.data import FederatedData, Pair
from fed.clients.node.edge_node import EdgeNode
from fed.clients.node.own_data import described
from fed.clients.node.privacy import PrivateNode
from fed.clients.node.sessions import SecureNode
from fed.clients.node.training import Hidden, NodeTraining
from fed.clients.training.work_items import Train
from fed.config.experiment import Experiment
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.protocol_pb2 import Answer, Assignment, Examination, Failed, Joining, Plan, Scores
from fed.wire.dialling import DialPatience
from fed.wire.format import TaskSpec

if TYPE_CHECKING:
    from fed.secure_aggregation.fixed_point import FixedPoint

__all__ = ["ThreadedNode", "ThreadedTraining", "nodes_of"]

PATIENCE = DialPatience(silence_s=10.0, call_s=20.0, backoff_s=0.05, most_backoff_s=0.2)


class ThreadedTraining:
    """In the place of a training process.

    Attributes:
        orders: the tasks, as they were given.
        answers: the bytes of their answers, with what else is said of them.
        worked: what was done for them, trials among it.
    """

    def __init__(self, data: FederatedData, folder: Path) -> None:
        self._data, self._folder = data, folder
        self.training: NodeTraining | None = None
        self._plan = Plan()
        self.spec = TaskSpec()
        self.fixed: FixedPoint | None = None
        self.keeps_states = False
        self.needs_schema = ""
        self.orders: list[tuple[Assignment, float | None, bytes]] = []
        self.answers: list[tuple[Answer | Failed | Hidden, bytes]] = []
        self.worked: list[Train] = []

    def describe(self) -> Joining:
        return described(self._data)

    def prepare(self, experiment: Experiment, plan: Plan, fixed_part: Path | None = None) -> None:
        if self.training is None or self._plan.format != plan.format:
            self._experiment, self._plan = experiment, plan
            self.training = self.made_anew(fixed_part)
            self.training._work.train = self._noting(self.training._work.train)
            self.spec, self.fixed = self.training.spec(), self.training.fixed
            self.keeps_states = self.training.keeps_states

    def made_anew(self, fixed_part: Path | None = None) -> NodeTraining:
        """As a process that has done nothing yet."""
        return NodeTraining(self._data, self._experiment, self._plan, self._folder, SYSTEM_CLOCK, fixed_part)

    def _noting(self, work: Any) -> Any:
        def note(train: Train, tensors: Sequence[Tensor]) -> Any:
            self.worked.append(train)
            return work(train, tensors)

        return note

    def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Answer | Failed | Hidden:
        assert self.training is not None
        self.orders.append((assignment, until_s, path.read_bytes()))
        done = self.training.train(assignment, path, until_s)
        self.answers.append((done, b"" if isinstance(done, Hidden) else path.read_bytes()))
        return done

    def forget(self) -> None:
        if self.training is not None:
            self.training.forget()

    def score(self, examination: Examination, path: Path) -> Scores:
        assert self.training is not None
        return self.training.score(examination, path)[0]


class ThreadedNode:
    """A node that has begun to work.

    Args:
        port: of the server, on this machine.
        client: whom it stands for.
        samples: its own; with a test set as data of this one client.
        folder: of its own.
        allowed: code that it accepts.
        secure: its sessions; None: it hides nothing.
        over_tls: True if it dials with the keys of its sessions.
        private: its account of privacy; None: it keeps none.
    """

    def __init__(
        self,
        port: int,
        client: int | str,
        samples: Pair | FederatedData,
        folder: Path,
        allowed: Sequence[str] = (),
        secure: SecureNode | None = None,
        over_tls: bool = False,
        private: PrivateNode | None = None,
    ) -> None:
        data = samples if isinstance(samples, FederatedData) else FederatedData({client: samples})
        self.training = ThreadedTraining(data, folder / "kept")
        training: Any = self.training
        channel = secure.credentials.for_dialling() if secure is not None and over_tls else None
        where = f"127.0.0.1:{port}", channel, str(client), client
        self.node = EdgeNode(
            *where, training, folder / "files", allowed, secure=secure, private=private, patience=PATIENCE
        )
        self._thread = threading.Thread(target=self.node.run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until the run is over."""
        self._thread.join(60)
        assert not self._thread.is_alive()


def nodes_of(data: FederatedData, port: int, folder: Path, allowed: Sequence[str] = ()) -> list[ThreadedNode]:
    """A node for each of the clients."""
    return [
        ThreadedNode(port, client, data.only(client, client), folder / f"node-{client}", allowed)
        for client in data.clients
    ]
