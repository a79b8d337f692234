"""Training at a node: tasks and scores, from files and into files, and the client's state between tasks.

Shapes: see :mod:`fed.layout`.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fed.clients.client_states import ClientState, ClientStates, at_discount
from fed.clients.data import ClientId, FederatedData, Pair
from fed.clients.setup import Preparation
from fed.clients.training.batches import Batches, normalises_batches
from fed.clients.training.work_items import EvaluateByClients, Evaluated, Train, Trained
from fed.clients.training.worker import Work
from fed.config.experiment import Experiment
from fed.errors import InvalidCheckpoint, RunFailed
from fed.storage.checkpoints import Checkpoints
from fed.wire.format import Format
from fed.wire.payloads import read, tensor_messages, written
from fed.wire.protocol_pb2 import Payload, Plan

__all__ = [
    "STATE_LOST",
    "NodeTask",
    "NodeTraining",
    "TaskDone",
    "forget_before",
]

STATE_LOST = (
    "what this node kept between tasks is gone from its folder, or damaged; it goes on from what it had at first, and "
    "tells the server"
)
"""What a node logs then."""

_SHARE_OF_TIME = 0.9  # for local steps, which do not always take as long


@dataclass(frozen=True)
class NodeTask:
    """Task as the training process gets it.

    Args:
        name: of the task, under which what the client keeps after it is stored.
        train: what to do.
        payload: what the file holds, serialized.
        path: of the file.
        kept_after: the task whose state the client resumes from; None: the first state.
        kept_discount: the share of the way from before that task to after it.
        until_s: when it must be done, if need be with fewer steps, by :func:`time.monotonic`; None: no matter.
    """

    name: str
    train: Train
    payload: bytes
    path: Path
    kept_after: str | None
    kept_discount: float = 1.0
    until_s: float | None = None


class TaskDone(NamedTuple):
    """Result of a task: a file and its contents, or the reason why there is none."""

    payload: bytes = b""
    weight: float = 0.0
    samples: int = 0
    train_loss: float = 0.0
    problem: str = ""
    diverged: bool = False
    died: bool = False
    began_anew: bool = False  # because what the client kept is lost


class NodeTraining:
    """One node's part of an experiment.

    Args:
        client: its id.
        pair: its samples.
        experiment: the parts that concern it.
        plan: the signature that models are made for, and the format of messages.
        folder: for what the client keeps between tasks.

    Raises:
        InvalidInput: if data, model and algorithm do not fit each other.
        InvalidPayload: if the server's model is another.
    """

    def __init__(self, client: ClientId, pair: Pair, experiment: Experiment, plan: Plan, folder: Path) -> None:
        self._client = client
        self._folder = folder
        data = FederatedData({client: pair}, None, plan.signature.classes or None)
        self._prepared = Preparation(experiment, data)
        own = self._prepared.message_format(1)
        self._message = Format.of(plan.format, own) if plan.HasField("format") else own  # before there is a plan
        self._recipe = self._prepared.recipe(self._prepared.data, self._message, is_batched=False)
        self._work = Work(self._recipe, 0)
        self._step_s: float | None = None

    @property
    def keeps_states(self) -> bool:
        """True if the client keeps a state from task to task."""
        return bool(self._prepared.client_states().names)

    def spec(self) -> list[tuple[str, int]]:
        """The types and lengths of a task's tensors: the model's vector, its integers, then broadcasts at first."""
        return [(part.dtype, part.numbers) for part in tensor_messages(self._message.downlink)]

    def train(self, order: NodeTask) -> TaskDone:
        """Do a task; the answer takes the place of the file that came with it."""
        vector_V, integers_I, *broadcast = read(order.path, Payload.FromString(order.payload))
        states, are_lost = self._states(order.kept_after, order.kept_discount)
        given = vector_V, integers_I, *broadcast, *states.stacked([self._client], [(vector_V, integers_I)])
        train = replace(order.train, wants="payload", state_names=states.names)
        train = self._in_time(train, given, order.until_s) if order.until_s is not None else train
        began_s = time.monotonic()
        trained, tensors = self._work(train, given)
        assert isinstance(trained, Trained)
        if trained.diverged is not None:
            return TaskDone(problem=trained.diverged[1], diverged=True)
        count = len(self._message.uplink)
        # before the answer goes, which the server may count at once
        self._keep(order.name, states.of(self._client, (vector_V, integers_I)), tensors[count:])
        payload = written(order.path, [part[0] for part in tensors[:count]])
        self._step_s = (time.monotonic() - began_s) / self._steps_of(train)
        return TaskDone(
            payload.SerializeToString(),
            trained.weights[0],
            trained.samples[0],
            trained.train_losses[0],
            began_anew=are_lost and bool(states.names),
        )

    def score(
        self, payload: bytes, path: Path, kept_after: str | None, kept_discount: float = 1.0
    ) -> tuple[int, float, float | None]:
        """Score a model, or the client's own, on what the client holds out: samples, loss and metric.

        Args:
            payload: the description of the model's tensors.
            path: their file.
            kept_after: the task whose state the client resumes from; None: the first state.
            kept_discount: the share of the way that this state moved.

        Raises:
            RunFailed: if the client's own is lost.
        """
        if self._prepared.held_out is None:
            return 0, 0.0, None
        vector_V, integers_I = read(path, Payload.FromString(payload))
        states, are_lost = self._states(kept_after, kept_discount)
        models = states.models((vector_V, integers_I))
        if models and are_lost:
            raise RunFailed("its own model is lost, or damaged: it has none to score until it has trained again")
        model = models[self._client] if models else (vector_V, integers_I)
        rows = tuple(part.unsqueeze(0) for part in model)
        found, _ = self._work(EvaluateByClients((self._client,)), rows)
        assert isinstance(found, Evaluated)
        return (found.samples[0], found.losses[0], found.metrics[0]) if found.samples else (0, 0.0, None)

    def _in_time(self, train: Train, tensors: Sequence[Tensor], until_s: float) -> Train:
        """Training with as many steps as fit at the pace of the last task; before a first one a step is tried out.

        Several phases go together, and are done whatever time they take.
        """
        if len(self._recipe.phases) > 1:
            return train
        if self._step_s is None:
            began_s = time.monotonic()
            self._work(replace(train, steps=(1,)), tensors)
            self._step_s = time.monotonic() - began_s
        most, left_s = self._steps_of(train), until_s - time.monotonic()
        steps = int(max(1, min(most, _SHARE_OF_TIME * left_s / self._step_s)))
        return replace(train, steps=(steps,)) if steps < most else train

    def _steps_of(self, train: Train) -> int:
        """Optimizer steps of all phases."""
        samples, never_single = self._prepared.data.size_of(self._client), normalises_batches(self._recipe.module)
        return sum(
            Batches(phase.local(self._recipe.local), samples, never_single, phase.steps(train.steps[0])).steps
            for phase in self._recipe.phases
        )

    def _keep(self, name: str, before: ClientState, rows: Sequence[Tensor]) -> None:
        """Store the client's state before and after a task, until it is known which part of the way counts."""
        if rows:
            after = {key: part[0].clone() for key, part in zip(before, rows, strict=True)}
            Checkpoints(self._folder / name, 1).write(0, {"before": before, "after": after})
            _make_newest(self._folder / name)

    def _states(self, kept_after: str | None, discount: float) -> tuple[ClientStates, bool]:
        """The client's state, and whether it is lost, so that the client begins with its first one."""
        states = self._prepared.client_states()
        if kept_after is None:
            return states, False
        try:
            newest = Checkpoints(self._folder / kept_after, 1).newest()
        except InvalidCheckpoint:
            newest = None
        if newest is not None:
            states.commit(self._client, at_discount(newest[1]["before"], newest[1]["after"], discount))
        return states, newest is None


def forget_before(folder: Path, name: str) -> None:
    """Remove what a client kept in a folder after tasks before this one."""
    oldest = folder / name
    if oldest.is_dir():
        for other in folder.iterdir():
            if other.stat().st_mtime_ns < oldest.stat().st_mtime_ns:
                shutil.rmtree(other, ignore_errors=True)


def _make_newest(folder: Path) -> None:
    """Give a folder a later time than those beside it have, though the clock was set back."""
    newest_ns = max([other.stat().st_mtime_ns for other in folder.parent.iterdir() if other != folder], default=0)
    if folder.stat().st_mtime_ns <= newest_ns:
        os.utime(folder, ns=(newest_ns + 1, newest_ns + 1))
