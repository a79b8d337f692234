"""What a node does of an experiment: tasks and scores, from files and into files, and what its client keeps between."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fed.clients.client_states import ClientStates
from fed.clients.data import ClientId, FederatedData, Pair
from fed.clients.setup import Preparation
from fed.clients.training.batches import Batches, normalises_batches
from fed.clients.training.work_items import EvaluateByClients, Evaluated, Train, Trained
from fed.clients.training.worker import Work
from fed.config.experiment import Experiment
from fed.errors import InvalidCheckpoint, RunFailed
from fed.storage.checkpoints import Checkpoints
from fed.wire.payloads import read, spec_of, written
from fed.wire.protocol_pb2 import Payload, Signature

__all__ = [
    "BEGAN_ANEW",
    "NodeTask",
    "NodeTraining",
    "TaskDone",
    "forget_before",
]

BEGAN_ANEW = (
    "what this node kept between tasks is gone from its folder, or damaged; it goes on from what it had at first, and "
    "tells the server"
)
"""What a node logs then."""

_SHARE_OF_TIME = 0.9  # for local steps, which do not always take as long


@dataclass(frozen=True)
class NodeTask:
    """A task, as it comes to who trains.

    Args:
        name: of the task, under which what the client keeps after it is stored.
        train: what to do.
        payload: what the file holds, serialized.
        path: of the file.
        kept_after: the task whose state is gone on from; None: the first one.
        until_s: when it must be done, if need be with fewer steps, by :func:`time.monotonic`; None: no matter.
    """

    name: str
    train: Train
    payload: bytes
    path: Path
    kept_after: str | None
    until_s: float | None = None


class TaskDone(NamedTuple):
    """What came of a task: a file and what is in it, or why there is none."""

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
        signature: what models are made for.
        folder: for what the client keeps between tasks.

    Raises:
        InvalidInput: if data, model and algorithm do not fit each other.
    """

    def __init__(
        self, client: ClientId, pair: Pair, experiment: Experiment, signature: Signature, folder: Path
    ) -> None:
        self._client = client
        self._folder = folder
        data = FederatedData({client: pair}, None, signature.classes or None)
        self._prepared = Preparation(experiment, data)
        self._recipe = self._prepared.recipe(self._prepared.data, is_batched=False)
        self._work = Work(self._recipe, 0)
        self._step_s: float | None = None

    @property
    def keeps_states(self) -> bool:
        """Whether the client goes on with what it kept after an earlier task."""
        return bool(self._prepared.given().client_state) or self._recipe.keeps_own

    def spec(self) -> list[tuple[str, int]]:
        """The types and sizes of a task's tensors: the model's vector, its integers, then broadcasts at first."""
        model = self._prepared.layout.shared.pack(self._prepared.module)
        return [(part.dtype, part.numbers) for part in spec_of([*model, *self._prepared.given().broadcast])]

    def train(self, order: NodeTask) -> TaskDone:
        """Do a task; the answer takes the place of the file that came with it."""
        vector_V, integers_I, *broadcast = read(order.path, Payload.FromString(order.payload))
        aggregator = self._prepared.algorithm
        states, are_lost = self._states(order.kept_after)
        reports_models = aggregator.plain_report and aggregator.plain_start
        train = replace(order.train, wants="models") if reports_models else order.train
        kept = states.stacked([self._client], [(vector_V, integers_I)])
        given = vector_V, integers_I, *broadcast, *kept
        train = self._in_time(train, given, order.until_s) if order.until_s is not None else train
        began_s = time.monotonic()
        trained, tensors = self._work(train, given)
        assert isinstance(trained, Trained)
        if trained.diverged is not None:
            return TaskDone(problem=trained.diverged[1], diverged=True)
        messages, integers, *left = tensors
        states.keep([self._client], left)
        if left:
            Checkpoints(self._folder / order.name, 1).write(0, states.state())
            _make_newest(self._folder / order.name)
        payload = written(order.path, [messages[0], integers[0]])
        self._step_s = (time.monotonic() - began_s) / self._steps_of(train)
        weight = trained.weights[0] if trained.weights else float(trained.samples[0])
        return TaskDone(
            payload.SerializeToString(),
            weight,
            trained.samples[0],
            trained.train_losses[0],
            began_anew=are_lost and bool(kept),
        )

    def score(self, payload: bytes, path: Path, kept_after: str | None) -> tuple[int, float, float | None]:
        """Score a model, or the client's own, on what the client holds out: samples, loss and metric.

        Raises:
            RunFailed: if the client's own is lost.
        """
        if self._prepared.held_out is None:
            return 0, 0.0, None
        vector_V, integers_I = read(path, Payload.FromString(payload))
        states, are_lost = self._states(kept_after)
        models = states.models((vector_V, integers_I))
        if models and are_lost:
            raise RunFailed("its own model is lost, or damaged: it has none to score until it has trained again")
        model = models[self._client] if models else (vector_V, integers_I)
        rows = tuple(part.unsqueeze(0) for part in model)
        found, _ = self._work(EvaluateByClients((self._client,)), rows)
        assert isinstance(found, Evaluated)
        return (found.samples[0], found.losses[0], found.metrics[0]) if found.samples else (0, 0.0, None)

    def _in_time(self, train: Train, tensors: Sequence[Tensor], until_s: float) -> Train:
        """With as many steps as fit at the pace of the last task; for a first one a step is tried out before.

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

    def _states(self, kept_after: str | None) -> tuple[ClientStates, bool]:
        """What the client goes on from; and whether what it was to go on from is lost, so that it is the first."""
        states = self._prepared.client_states()
        if kept_after is None:
            return states, False
        try:
            newest = Checkpoints(self._folder / kept_after, 1).newest()
        except InvalidCheckpoint:
            newest = None
        states.restore(newest[1] if newest else {})
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
