"""Evaluation of models, on the test set or on clients' held-out samples, by idle executors during the next round."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fed.clients.data import ClientId, Pair
from fed.clients.data.held_out import no_held_out_samples
from fed.clients.evaluation import Score
from fed.clients.training.executor import Executor, Item
from fed.clients.training.work_items import Evaluate, EvaluateByClients, Evaluated, Recipe
from fed.server.federation import Federation, State
from fed.tensors import Tensor, torch

__all__ = [
    "CLIENTS_AT_ONCE",
    "MODELS_AT_ONCE",
    "ScoringByClients",
    "ScoringByCoordinator",
    "scores_over_clients",
]

CLIENTS_AT_ONCE = 32
"""The largest number of clients in one item that score the same model."""

MODELS_AT_ONCE = 8
"""The largest number of models in one item."""

_SAMPLES = 4096
_AFTER_TRAINING = 1  # a priority behind training's: scores keep no client waiting


class ScoringByCoordinator:
    """Scores of the federation's model and the clients' own on the test set.

    Args:
        recipe: with the test set, the loss and the metric.
        federation: whose models are scored, as they are now.
        executor: does the work.
        only_own: True to score the clients' own models alone, where they have some.
        own: clients whose own models are scored; all unless given.
    """

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        executor: Executor,
        *,
        only_own: bool = False,
        own: Sequence[ClientId] | None = None,
    ) -> None:
        self._executor = executor
        models = federation.models()
        self._own = [models[client] for client in (models if own is None else own)]
        self._only_own = bool(self._own) and only_own
        states = self._own if self._only_own else [*self._own, federation.model()]
        samples = len(tuple(recipe.test)[1]) if recipe.test is not None else 0
        part = _SAMPLES if recipe.scores_in_parts else max(samples, 1)
        self._sizes = [min(part, samples - first) for first in range(0, samples, part)]
        self._models = _split(states, MODELS_AT_ONCE)
        self._tickets = [
            executor.submit(self._item(models, number * _SAMPLES, size))
            for models in self._models
            for number, size in enumerate(self._sizes)
        ]

    def line(self) -> dict[str, Any]:
        """The scores of the federation's model, or the mean over the clients' models; None without a test set."""
        if not self._sizes:
            return {"test_accuracy": None, "test_loss": None, **(_over_clients([]) if self._own else {})}
        in_order = iter(_answers(self._executor, self._tickets))
        scores = [score for _ in self._models for score in self._joined([next(in_order) for _ in self._sizes])]
        own = scores[: len(self._own)]
        line = _over_clients(own) if own else {}
        if self._only_own:
            loss = statistics.fmean(score.loss for score in own)
            return {"test_accuracy": line["client_accuracy_mean"], "test_loss": loss, **line}
        return {"test_accuracy": scores[-1].accuracy, "test_loss": scores[-1].loss, **line}

    def _item(self, models: Sequence[State], first: int, size: int) -> Item:
        label = f"the evaluation of test samples {first} to {first + size - 1}"
        return Item(Evaluate(first, first + size), _stacked(models), label, cost=size, priority=_AFTER_TRAINING)

    def _joined(self, parts: list[Evaluated]) -> list[Score]:
        """Each model's scores over all parts of the test set, of means over samples; a single part is as it is."""
        by_model = zip(*(part.scores for part in parts), strict=True)
        return [Score(*_mean_score(of_parts, self._sizes)) for of_parts in by_model]


class ScoringByClients:
    """Scores of each client's model, its own or the federation's, on its held-out samples."""

    def __init__(self, held_out: Mapping[ClientId, Pair], federation: Federation, executor: Executor) -> None:
        self._executor = executor
        self._held_out = held_out
        self._model, self._own = federation.model(), federation.models()
        groups = _split(list(held_out), MODELS_AT_ONCE if self._own else CLIENTS_AT_ONCE)
        self._tickets = [executor.submit(self._item(clients)) for clients in groups]

    def line(self) -> dict[str, Any]:
        """The mean over clients, weighted by their held-out samples, and the spread over clients.

        Raises:
            InvalidData: if no client holds anything out.
        """
        answers = _answers(self._executor, self._tickets)
        samples = [size for answer in answers for size in answer.samples]
        if not samples:
            raise no_held_out_samples(len(self._held_out))
        return scores_over_clients([score for answer in answers for score in answer.scores], samples)

    def _item(self, clients: Sequence[ClientId]) -> Item:
        tensors = _stacked([self._own.get(client, self._model) for client in clients]) if self._own else self._model
        # The samples of clients on demand are not known before they are read.
        in_memory = isinstance(self._held_out, dict)
        cost = sum(len(self._held_out[client][1]) for client in clients) if in_memory else len(clients)
        label = f"the evaluation by {len(clients)} clients, the first of them {clients[0]!r}"
        return Item(EvaluateByClients(tuple(clients)), tensors, label, cost=cost, priority=_AFTER_TRAINING)


def scores_over_clients(scores: Sequence[Score], samples: Sequence[int]) -> dict[str, Any]:
    """The scores of clients as a part of a round's metrics: means weighted by samples, and the spread over clients.

    Args:
        scores: of each client.
        samples: the number of samples that each client holds out.
    """
    loss, accuracy = _mean_score(scores, samples)
    worst = {"client_accuracy_worst_decile": _worst_decile(_measured(scores))}
    return {"test_accuracy": accuracy, "test_loss": loss, **_over_clients(scores), **worst}


def _split(sequence: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [sequence[first : first + size] for first in range(0, len(sequence), size)]


def _stacked(models: Sequence[State]) -> tuple[Tensor, ...]:
    """(vectors [K, V], integers [K, I])."""
    return tuple(torch.stack(parts) for parts in zip(*models, strict=True))


def _answers(executor: Executor, tickets: Sequence[int]) -> list[Evaluated]:
    """The answers in the order of the tickets."""
    answers = {ticket: answer for ticket, answer, _ in executor.results(tickets)}
    return [answers[ticket] for ticket in tickets]


def _mean_score(scores: Sequence[Score], sizes: Sequence[int]) -> tuple[Any, Any]:
    """The mean loss and the mean accuracy, weighted by the numbers of samples; None without any."""
    return _mean([score.loss for score in scores], sizes), _mean([score.accuracy for score in scores], sizes)


def _mean(values: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    sized = [(value, size) for value, size in zip(values, sizes, strict=True) if value is not None]
    if len(sized) < 2:  # a single value keeps its bits
        return sized[0][0] if sized else None
    return sum(value * size for value, size in sized) / sum(size for _, size in sized)


def _measured(scores: Sequence[Score]) -> list[float]:
    return [score.accuracy for score in scores if score.accuracy is not None]


def _over_clients(scores: Sequence[Score]) -> dict[str, float | None]:
    """The mean and standard deviation over clients, with equal weights."""
    measured = _measured(scores)
    is_finite = all(map(math.isfinite, measured))  # pstdev fails for infinity
    return {
        "client_accuracy_mean": statistics.fmean(measured) if measured else None,
        "client_accuracy_std": (statistics.pstdev(measured) if is_finite else math.nan) if measured else None,
    }


def _worst_decile(measured: Sequence[float]) -> float | None:
    """The mean over the worst tenth of the clients, rounded up to a whole client (Li et al. 2020, 1905.10497)."""
    if any(map(math.isnan, measured)):
        return math.nan  # NaN has no place in an order
    return statistics.fmean(sorted(measured)[: -(-len(measured) // 10)]) if measured else None
