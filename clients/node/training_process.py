"""The process in which a node trains: it stays warm between tasks, and tensors go in and out as files."""

import contextlib
import hashlib
import logging
import os
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.clients.data import ClientId
from fed.clients.node.own_data import described, described_without_schema, samples_of
from fed.clients.node.plans import as_table, table_text
from fed.clients.node.training import Hidden, NodeTraining
from fed.clients.training.devices import device_of
from fed.clients.training.working_process import allow_children
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import FedError, RunFailed, error_with_line
from fed.processes.child_processes import end_with_parent, spawned, stop
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2 as pb
from fed.vectors.tensors import torch
from fed.wire.format import TaskSpec

if TYPE_CHECKING:
    from fed.secure_aggregation.fixed_point import FixedPoint

__all__ = ["TrainingProcess", "TrainingProcessDied"]

_log = logging.getLogger(__name__)


class TrainingProcessDied(RunFailed):
    """The training process ended in the middle of something."""


class TrainingProcess:
    """The node's handle of its training process; if that dies, the next question starts another.

    Each question raises :class:`TrainingProcessDied` if the process dies of it, else the process's own error.

    Attributes:
        spec: types and lengths of a task's tensors; empty before the process is prepared.
        fixed: the fixed point by which messages become lanes under secure aggregation; None without it.
        keeps_states: True if the client keeps something from task to task.
        needs_schema: reason why the node's table can be read by a schema alone; empty where it needs none.

    Args:
        client: id of the node's client.
        description: description of the node's data.
        folder: folder of all that the node keeps between tasks.
    """

    def __init__(self, client: ClientId, description: NodeData, folder: Path) -> None:
        self._arguments = client, description, folder
        self._process: Any = None
        self._pipe: Connection | None = None
        self._prepared: tuple[Experiment, pb.Plan] | None = None
        self.spec = TaskSpec()
        self.keeps_states = False
        self.fixed: FixedPoint | None = None
        self.needs_schema = ""
        self._is_closed = False

    def describe(self) -> pb.Joining:
        """Describe the node's data."""
        joining: pb.Joining
        joining, self.needs_schema = self._ask("describe")
        return joining

    def describe_by(self, schema: str) -> pb.Joining:
        """Describe the node's table, read by the server's schema.

        Args:
            schema: schema of tables, as JSON.
        """
        joining: pb.Joining = self._ask("describe_by", schema)
        return joining

    def prepare(self, experiment: Experiment, plan: pb.Plan, fixed_part: Path | None = None) -> None:
        """Get ready for an experiment; a second call for the same one does nothing.

        Args:
            experiment: experiment of the plan.
            plan: the server's plan.
            fixed_part: file of the model's fixed part that the server has sent; None: it has sent none.

        Raises:
            FixedPartMissing: if the server must send it.
        """
        own_plan = pb.Plan()
        # A copy: the plan goes on to others, who read the fields that are cleared here.
        own_plan.CopyFrom(plan)
        for name in ("identities", "heartbeat_s"):  # they may change, and training does not depend on them
            own_plan.ClearField(name)
        if self._prepared != (experiment, own_plan):
            self._prepared = None  # if this fails, nothing is prepared
            found = self._ask("prepare", experiment, own_plan, fixed_part)
            self.spec, self.fixed, self.keeps_states, casting, note = found
            if casting:
                _log.info("%s", casting)
            if note:
                _log.warning("local.precision %s: this client trains %s", experiment.local.precision, note)
            self._prepared = (experiment, own_plan)

    def train(
        self, assignment: pb.Assignment, path: Path, until_s: float | None = None
    ) -> pb.Answer | pb.Failed | Hidden:
        """Do a task.

        Args:
            assignment: the task, as the server told it.
            path: file of its payload.
            until_s: time by which it must be done, by the machine's clock, which both processes share; None: no limit.
        """
        done: Any = self._ask("train", assignment, path, until_s)
        if not isinstance(done, tuple):
            plain: pb.Answer | pb.Failed = done
            return plain
        answer, lanes, problem = done
        return Hidden(answer, torch.from_numpy(lanes), problem)

    def score(self, examination: pb.Examination, path: Path) -> pb.Scores:
        """Score a model on the node's held-out samples."""
        scores: pb.Scores
        scores, notes = self._ask("score", examination, path)
        for note in notes:
            _log.warning("%s", note)
        return scores

    def forget(self) -> None:
        """Remove all that the node keeps between tasks."""
        if self._prepared is not None:
            self._ask("forget")

    def close(self) -> None:
        """End the process for good."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _ask(self, what: str, *arguments: Any) -> Any:
        if self._is_closed:
            raise TrainingProcessDied("the node is about to end")
        if self._process is None or not self._process.is_alive():
            try:
                self._process, self._pipe = spawned(_serve, *self._arguments, daemon=True, name="training")
            except OSError as error:
                reason = f"the training process cannot be started ({error.strerror or error})"
                raise TrainingProcessDied(reason) from error
            # A process that was started again knows nothing: it is prepared as the one that died.
            if what in ("train", "score", "forget") and self._prepared is not None:
                self._exchange("prepare", (*self._prepared, None))
        return self._exchange(what, arguments)

    def _exchange(self, what: str, arguments: tuple[Any, ...]) -> Any:
        assert self._pipe is not None
        try:
            self._pipe.send((what, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            stop(self._process, within_s=1.0)
            self._pipe.close()
            reason = f"the training process has died (exit code {self._process.exitcode})"
            raise TrainingProcessDied(reason) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, client: ClientId, description: NodeData, folder: Path) -> None:
    """Answer the questions of the node's other process, one after another, until it is gone."""
    os.umask(0o077)  # states are files of this user alone
    allow_children()  # where several devices train, each has a process
    end_with_parent()  # no task goes on after the node, which may have been started again and have the same folder
    # One thread gives the bits of a simulation.
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    # Read at the first question, and once: data may take minutes to load.
    own = lru_cache(maxsize=1)(lambda schema: samples_of(description, client, as_table(schema) if schema else None))
    training: Any = None
    while True:
        try:
            what, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if what == "describe":
                device_of(description.device)  # one that is missing is refused before the node joins
                answer: Any = described_without_schema(description, client)
            elif what == "describe_by":
                answer = described(own(*arguments))
                answer.table_sha256 = hashlib.sha256(arguments[0].encode()).digest()
            elif what == "prepare":
                experiment, plan, fixed_part = arguments
                experiment = description.experiment_of_node(experiment)
                samples = own(table_text(experiment.table))
                training = NodeTraining(
                    samples,
                    experiment,
                    plan,
                    folder,
                    SYSTEM_CLOCK,
                    fixed_part,
                    node_config=description.node_config,
                    device=description.device,
                )
                answer = training.spec(), training.fixed, training.keeps_states, training.casting, training.note
            else:
                answer = getattr(training, what)(*arguments)
                if isinstance(answer, Hidden):  # as an array: a tensor would travel through a file of shared memory
                    answer = answer.answer, answer.lanes.numpy(), answer.problem
        except FedError as error:
            answer = error
        except OSError as error:
            answer = RunFailed(f"the node cannot write to its folders ({error.strerror or error}): make room there")
        except Exception as error:  # a user's, which may not survive pickling
            answer = RunFailed(error_with_line(error))
        with contextlib.suppress(OSError):
            pipe.send(answer)
