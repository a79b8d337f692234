"""Worker: a process's work for clients, simulated or real: it trains groups of them, and evaluates models.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
import multiprocessing
from collections.abc import Sequence
from typing import Any

from fed.clients.data import ClientId, Held
from fed.clients.data.held import dense, size_of, taken
from fed.clients.training.determinism import deterministic
from fed.clients.training.devices import scoring_device
from fed.clients.training.evaluation import BatchedEvaluator, Score, confusion_counts, evaluate
from fed.clients.training.float32_products import float32_products
from fed.clients.training.group_trainer import GroupTraining
from fed.clients.training.local_trainer import ScoringTrainer
from fed.clients.training.work_items import CountClasses, Evaluate, EvaluateByClients, Evaluated, Recipe, Train, Trained
from fed.errors import AppFailed
from fed.processes.machine import keep_freed_memory
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Work", "on_device"]


def on_device(measure: Any, device: "torch.device") -> Any:
    """A loss or metric, moved to the device if it is a module, such as one with weights of classes."""
    # to() would move the user's own module.
    return copy.deepcopy(measure).to(device) if isinstance(measure, nn.Module) else measure


class Work:
    """Work of a process: one item after another, on one device.

    Attributes:
        train: work of the items of one kind, those that train.

    Args:
        recipe: parts of the run that the work needs.
        device: device that computes.
    """

    def __init__(self, recipe: Recipe, device: "torch.device") -> None:
        if multiprocessing.parent_process() is not None:  # fed.simulate has done so in the first process
            keep_freed_memory()
        scores = scoring_device(device)
        self._loss = on_device(recipe.loss, scores)
        self._metrics = {name: on_device(metric, scores) for name, metric in recipe.metrics.items()}
        self._recipe = recipe
        self._device = device
        self.train = GroupTraining(recipe, on_device(recipe.loss, device), device)
        self._trainer = self.train.trainer
        self._evaluator: BatchedEvaluator | None = None
        if recipe.is_batched:
            self._evaluator = BatchedEvaluator(
                module=recipe.module,
                loss=self._loss,
                metrics=self._metrics,
                device=device,
                private=recipe.private,
                moved=recipe.moved,
                collate=recipe.collate,
            )

    def __call__(
        self, task: Train | Evaluate | EvaluateByClients | CountClasses, tensors: Sequence[Tensor]
    ) -> tuple[Trained | Evaluated | None, Sequence[Tensor]]:
        """Do an item; the answer's tensors are on the CPU."""
        if isinstance(task, Train):
            return self.train(task, tensors)
        with deterministic(self._device, on=self._recipe.is_deterministic), float32_products(self._device):
            if isinstance(task, Evaluate):
                return self._evaluate(task, *tensors), ()
            if isinstance(task, CountClasses):
                return None, self._confusion_counts(task, *tensors)
            return self._evaluate_by_clients(task, *tensors), ()

    def _evaluate(self, task: Evaluate, vectors_KV: Tensor, integers_KI: Tensor) -> Evaluated:
        samples = self._test_samples(torch.tensor(task.places) if task.places else slice(task.first, task.last))
        with seeded_torch(self._recipe.streams.torch_seed("evaluation", task.first), self._device):
            if self._evaluator is not None and len(vectors_KV) > 1:
                scores = self._evaluator.scores(vectors_KV, integers_KI, samples)
            else:
                scores = [self._score(*state, samples) for state in zip(vectors_KV, integers_KI, strict=True)]
        return Evaluated(tuple(scores), (size_of(samples),) * len(scores))

    def _confusion_counts(self, task: CountClasses, vector_V: Tensor, integers_I: Tensor) -> Sequence[Tensor]:
        samples = self._test_samples(slice(task.first, task.last))
        # The draws of the evaluation, so that a model that draws gives the scored outputs.
        with seeded_torch(self._recipe.streams.torch_seed("evaluation", task.first), self._device):
            module = self._trainer.load(vector_V, integers_I)
            counts_CC = confusion_counts(module, samples, self._device, self._recipe.collate)
        return () if counts_CC is None else (counts_CC,)

    def _test_samples(self, places: slice | Tensor) -> Held:
        return dense(taken(self._recipe.test_samples, places))

    def _evaluate_by_clients(self, task: EvaluateByClients, vectors: Tensor, integers: Tensor) -> Evaluated:
        assert self._recipe.held_out is not None
        rows = [part.expand(len(task.clients), -1) for part in (vectors, integers)]
        if isinstance(self._trainer, ScoringTrainer):
            return self._evaluate_by_themselves(self._trainer, task, rows)
        scores = []
        samples = []
        clients = []
        for client, vector_V, integers_I in zip(task.clients, *rows, strict=True):
            pair = dense(self._recipe.held_out(client))
            if count := size_of(pair):
                with seeded_torch(self._recipe.streams.torch_seed("evaluation", client), self._device):
                    scores.append(self._score(vector_V, integers_I, pair))
                samples.append(count)
                clients.append(client)
        return Evaluated(tuple(scores), tuple(samples), tuple(clients))

    def _evaluate_by_themselves(
        self, trainer: ScoringTrainer, task: EvaluateByClients, rows: Sequence[Tensor]
    ) -> Evaluated:
        """Scores of clients on samples that nothing else sees."""
        found: dict[ClientId, tuple[Score, int]] = {}
        failed = []
        for client, vector_V, integers_I in zip(task.clients, *rows, strict=True):
            seed = self._recipe.streams.torch_seed("evaluation", client)
            try:
                score, samples = trainer.evaluate(client, vector_V, integers_I, seed=seed, round_number=task.round)
            except AppFailed as error:
                failed.append((client, str(error)))
                continue
            if samples:
                found[client] = score, samples
        scores = tuple(score for score, _ in found.values())
        counts = tuple(samples for _, samples in found.values())
        return Evaluated(scores, counts, tuple(found), tuple(failed), trainer.take_notes())

    def _score(self, vector_V: Tensor, integers_I: Tensor, samples: Held) -> Score:
        module = self._trainer.load(vector_V, integers_I)
        return evaluate(module, self._loss, self._metrics, samples, self._device, self._recipe.collate)
