"""Scores of models on the test set, found by whoever is free while the next round goes on.

Shapes: V, a model's floating-point state; I, its integers.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from fed.simulations.executor import Executor, Item
from fed.simulations.federation import Federation, State
from fed.simulations.simulation import Simulation
from fed.simulations.tasks import Evaluate, Evaluated

__all__ = ["MODELS_AT_ONCE", "Scoring"]

MODELS_AT_ONCE = 8
"""The most models of one item."""

_SAMPLES = 4096
_AFTER_TRAINING = 1


class Scoring:
    """One round's scores, of the federation's model and of the clients' own where they keep some.

    Args:
        simulation: with the test set.
        federation: whose models are scored, as they are now.
        executor: begins at once where it has nothing better to do.
    """

    def __init__(self, simulation: Simulation, federation: Federation, executor: Executor) -> None:
        test = simulation.data.test
        self._executor = executor
        self._own = list(federation.models().values())
        self._only_own = bool(self._own) and simulation.algorithm.primitive is None
        states = self._own if self._only_own else [*self._own, federation.model()]
        samples = 0 if test is None else len(test[1])
        self._sizes = [min(_SAMPLES, samples - first) for first in range(0, samples, _SAMPLES)]
        self._models = [states[first : first + MODELS_AT_ONCE] for first in range(0, len(states), MODELS_AT_ONCE)]
        self._tickets = [
            executor.submit(self._item(models, first * _SAMPLES, size))
            for models in self._models
            for first, size in enumerate(self._sizes)
        ]

    def line(self) -> dict[str, Any]:
        """The scores as a part of the round's metrics; None without a test set."""
        if not self._sizes:
            names = [
                "test_accuracy",
                "test_loss",
                *(["client_accuracy_mean", "client_accuracy_std"] if self._own else []),
            ]
            return dict.fromkeys(names)
        scored = {ticket: answer for ticket, answer, _ in self._executor.results(self._tickets)}
        in_order = iter([scored[ticket] for ticket in self._tickets])
        scores = [score for _ in self._models for score in self._joined([next(in_order) for _ in self._sizes])]
        own = scores[: len(self._own)]
        line: dict[str, Any] = {}
        if own:
            accuracies = [accuracy for _, accuracy in own if accuracy is not None]
            line = {
                "client_accuracy_mean": statistics.fmean(accuracies) if accuracies else None,
                "client_accuracy_std": _deviation(accuracies) if accuracies else None,
            }
        if self._only_own:
            loss = statistics.fmean(loss for loss, _ in own)
            return {"test_accuracy": line["client_accuracy_mean"], "test_loss": loss, **line}
        loss, accuracy = scores[-1]
        return {"test_accuracy": accuracy, "test_loss": loss, **line}

    def _item(self, models: Sequence[State], first: int, size: int) -> Item:
        tensors = tuple(torch.stack(parts) for parts in zip(*models, strict=True))
        label = f"the evaluation of test samples {first} to {first + size - 1}"
        return Item(Evaluate(first, first + size), tensors, label, cost=size, priority=_AFTER_TRAINING)

    def _joined(self, parts: list[Evaluated]) -> list[tuple[float, float | None]]:
        """Each model's scores over all parts of the test set."""
        losses = [self._mean(of_model) for of_model in zip(*(part.losses for part in parts), strict=True)]
        metrics = [
            None if None in of_model else self._mean(of_model)
            for of_model in zip(*(part.metrics for part in parts), strict=True)
        ]
        return list(zip(losses, metrics, strict=True))

    def _mean(self, values: Sequence[float]) -> float:
        if len(values) == 1:
            return values[0]
        return sum(value * size for value, size in zip(values, self._sizes, strict=True)) / sum(self._sizes)


def _deviation(values: list[float]) -> float:
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan  # pstdev takes no infinity
