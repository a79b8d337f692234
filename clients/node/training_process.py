"""The process in which a node trains: it stays warm between tasks, and files are all that goes in and out."""

import contextlib
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fed.child_processes import start_deaf, stop
from fed.clients.data import ClientId, Pair
from fed.clients.node.own_data import Described, described, samples_of
from fed.clients.node.training import NodeTask, NodeTraining, TaskDone, forget_before
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import FedError, RunFailed
from fed.wire.protocol_pb2 import Plan
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
        self._prepared: tuple[Any, bytes] | None = None
        self.spec: list[TensorMessage] = []
        self._is_closed = False

    def describe(self) -> Described:
        """Describe the node's data."""
        described: Described = self._ask("describe")
        return described

    def prepare(self, experiment: Experiment, plan: Plan) -> None:
        """Make ready for an experiment; for the same one again nothing is done."""
        wanted = experiment, Plan(signature=plan.signature, format=plan.format).SerializeToString()
        if self._prepared != wanted:
            self._prepared = None  # what fails here is not prepared
            spec = self._ask("prepare", *wanted)
            self.spec = [TensorMessage(dtype=dtype, numbers=numbers) for dtype, numbers in spec]
            self._prepared = wanted

    def train(self, order: NodeTask) -> TaskDone:
        """Do a task."""
        try:
            done: TaskDone = self._ask("train", order)
        except _Died as error:
            return TaskDone(problem=str(error), died=True)
        except (FedError, RuntimeError) as error:
            return TaskDone(problem=str(error))
        return done

    def score(
        self, payload: bytes, path: Path, kept_after: str | None, kept_discount: float = 1.0
    ) -> tuple[int, float, float | None]:
        """Score a model on what the node holds out.

        Args:
            payload: what the file holds, serialized.
            path: of the model's file.
            kept_after: the task whose state the client resumes from; None: the first state.
            kept_discount: the share of the way from before that task to after it.
        """
        scores: tuple[int, float, float | None] = self._ask("score", payload, path, kept_after, kept_discount)
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
        # a fork would copy gRPC's locks without the threads that hold them
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, *self._arguments), daemon=True, name="training")
        start_deaf(self._process)  # the node itself hears Ctrl-C, and ends it
        its_end.close()  # else the pipe stays open, and recv waits, when the process dies


def _serve(pipe: Connection, client: ClientId, description: NodeData, folder: Path) -> None:
    """Answer what the node's other process asks, one thing after another, until it is gone."""
    threading.Thread(target=_end_with_parent, name="watch", daemon=True).start()
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
                training = NodeTraining(client, pair, experiment, Plan.FromString(plan), folder)
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


def _end_with_parent() -> None:
    """End a task with its node, which may have been started again with the same folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # sys.exit would end this thread alone
