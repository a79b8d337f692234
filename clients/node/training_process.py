"""The process in which a node trains: it stays warm between tasks, and files are all that goes in and out."""

import contextlib
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fed.child_processes import end_with_parent, spawned, stop
from fed.clients.data import ClientId, Pair
from fed.clients.node.own_data import described, samples_of
from fed.clients.node.training import NodeTraining, TaskDone, forget_before
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import FedError, RunFailed
from fed.wire.protocol_pb2 import Assignment, Examination, Joining, Plan, Scores
from fed.wire.protocol_pb2 import Tensor as TensorMessage

__all__ = ["TrainingProcess"]


class _Died(RunFailed):
    """The training process ended in the middle of something."""


class TrainingProcess:
    """The node's handle of its training process; if that dies, the next question starts another.

    Attributes:
        spec: what the tensors of a task must be, once it is prepared.

    Args:
        client: the node's id.
        description: of its data.
        folder: for what it keeps.
    """

    def __init__(self, client: ClientId, description: NodeData, folder: Path) -> None:
        self._arguments = client, description, folder
        self._folder = folder
        self._process: Any = None
        self._pipe: Connection | None = None
        self._prepared: tuple[Experiment, Plan] | None = None
        self.spec: list[TensorMessage] = []
        self._is_closed = False

    def describe(self) -> Joining:
        """Describe the node's data."""
        joining: Joining = self._ask("describe")
        return joining

    def prepare(self, experiment: Experiment, plan: Plan) -> None:
        """Make ready for an experiment; for the same one again nothing is done."""
        wanted = experiment, Plan(signature=plan.signature, format=plan.format)
        if self._prepared != wanted:
            self._prepared = None  # what fails here is not prepared
            self.spec = self._ask("prepare", *wanted)
            self._prepared = wanted

    def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> TaskDone:
        """Do a task.

        Args:
            assignment: as the server made it.
            path: of the file with its payload.
            until_s: when it must be done, by :func:`time.monotonic`; None: no matter.
        """
        try:
            done: TaskDone = self._ask("train", assignment, path, until_s)
        except _Died as error:
            return TaskDone(problem=str(error), died=True)
        except (FedError, RuntimeError) as error:
            return TaskDone(problem=str(error))
        return done

    def score(self, examination: Examination, path: Path) -> Scores:
        """Score a model on what the node holds out."""
        scores: Scores = self._ask("score", examination, path)
        return scores

    def forget_before(self, name: str) -> None:
        """Remove what the client kept after tasks before this one."""
        forget_before(self._folder, name)

    def close(self) -> None:
        """End it for good."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _ask(self, what: str, *arguments: Any) -> Any:
        if self._is_closed:
            raise _Died("the node is about to end")
        if self._process is None or not self._process.is_alive():
            self._begin()
            if what != "describe":
                self._exchange("describe", ())
            if what not in ("describe", "prepare") and self._prepared is not None:
                self._exchange("prepare", self._prepared)
        return self._exchange(what, arguments)

    def _exchange(self, what: str, arguments: tuple[Any, ...]) -> Any:
        assert self._pipe is not None
        try:
            self._pipe.send((what, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            stop(self._process, within_s=1.0)
            self._pipe.close()
            raise _Died(f"the training process has died (exit code {self._process.exitcode})") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _begin(self) -> None:
        self._process, self._pipe = spawned(_serve, *self._arguments, daemon=True, name="training")


def _serve(pipe: Connection, client: ClientId, description: NodeData, folder: Path) -> None:
    """Answer what the node's other process asks, one thing after another, until it is gone."""
    end_with_parent()  # no task goes on after the node, which may have been started again and have the same folder
    # one thread gives the bits of a simulation
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    training: NodeTraining | None = None
    pair: Pair | None = None
    while True:
        try:
            what, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if what == "describe":
                pair, names = samples_of(description)
                answer: Any = described(pair, names)
            elif what == "prepare":
                assert pair is not None
                experiment, plan = arguments
                training = NodeTraining(client, pair, experiment, plan, folder)
                answer = training.spec()
            else:
                assert training is not None
                answer = getattr(training, what)(*arguments)
        except Exception as error:
            words = str(error) if isinstance(error, FedError) else f"{type(error).__name__}: {error}"
            if isinstance(error, OSError):
                words = f"the node cannot write to its folders ({error.strerror or error}): make room there"
            # a user's exception may not survive pickling
            answer = error if isinstance(error, FedError) else RuntimeError(words)
        with contextlib.suppress(OSError):
            pipe.send(answer)
