"""Evaluation of models, on the test set or on clients' held-out samples, by idle executors during the next round."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fed.clients.data import ClientId, Pair
from fed.clients.data.held_out import no_held_out_samples
from fed.clients.evaluation import Score
from fed.clients.measures import Metrics, is_higher_better
from fed.clients.training.executor import Executor, Item
from fed.clients.training.work_items import Evaluate, EvaluateByClients, Evaluated, Recipe
from fed.config.evaluation import ByBoth
from fed.config.experiment import Experiment
from fed.errors import InvalidData
from fed.server.federation import Federation, State
from fed.server.training_loop import Scores
from fed.tensors import Tensor, torch

__all__ = [
    "CLIENTS_AT_ONCE",
    "MODELS_AT_ONCE",
    "ClientScore",
    "ScoringByClients",
    "ScoringByCoordinator",
    "check_scored_by_both",
    "scores_of_both",
    "scores_over_clients",
    "sizes_of_parts",
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
        recipe: with the test set, the loss and the metrics.
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
        self._metrics = recipe.metrics
        models = federation.models()
        self._own = list(models if own is None else own)
        self._only_own = bool(self._own) and only_own
        own_models = [models[client] for client in self._own]
        states = own_models if self._only_own else [*own_models, federation.model()]
        self._sizes = sizes_of_parts(recipe)
        self._models = _split(states, MODELS_AT_ONCE)
        self._tickets = [
            executor.submit(self._item(models, number * _SAMPLES, size))
            for models in self._models
            for number, size in enumerate(self._sizes)
        ]

    def scores(self) -> Scores:
        """Scores of the federation's model, or the mean over the clients' models; None without a test set."""
        if not self._sizes:
            nothing = _test(None, [None] * len(self._metrics), self._metrics)
            return Scores({**nothing, **(_over_clients([], self._metrics) if self._own else {})})
        in_order = iter(_answers(self._executor, self._tickets))
        scores = [score for _ in self._models for score in self._joined([next(in_order) for _ in self._sizes])]
        own = scores[: len(self._own)]
        of_clients = [ClientScore(*one) for one in zip(self._own, [sum(self._sizes)] * len(own), own, strict=True)]
        rows = [_row(one, self._metrics) for one in of_clients]
        line = _over_clients(own, self._metrics) if own else {}
        if self._only_own:
            means = [line[f"client_{name}_mean"] for name in self._metrics]
            return Scores({**_test(statistics.fmean(score.loss for score in own), means, self._metrics), **line}, rows)
        return Scores({**_test(*scores[-1], self._metrics), **line}, rows)

    def _item(self, models: Sequence[State], first: int, size: int) -> Item:
        label = f"the evaluation of test samples {first} to {first + size - 1}"
        return Item(Evaluate(first, first + size), _stacked(models), label, cost=size, priority=_AFTER_TRAINING)

    def _joined(self, parts: list[Evaluated]) -> list[Score]:
        """Each model's scores over all parts of the test set, of means over samples; a single part is as it is."""
        by_model = zip(*(part.scores for part in parts), strict=True)
        return [_mean_score(of_parts, self._sizes) for of_parts in by_model]


class ScoringByClients:
    """Scores of each client's model, its own or the federation's, on its held-out samples.

    Args:
        held_out: each client's samples.
        metrics: that are computed, by name.
        federation: whose models are scored, as they are now.
        executor: does the work.
    """

    def __init__(
        self, held_out: Mapping[ClientId, Pair], metrics: Metrics, federation: Federation, executor: Executor
    ) -> None:
        self._executor = executor
        self._held_out = held_out
        self._metrics = metrics
        self._model, self._own = federation.model(), federation.models()
        groups = _split(list(held_out), MODELS_AT_ONCE if self._own else CLIENTS_AT_ONCE)
        self._tickets = [executor.submit(self._item(clients)) for clients in groups]

    def scores(self) -> Scores:
        """The mean over clients, weighted by their held-out samples, the spread over clients, and each client's.

        Raises:
            InvalidData: if no client holds anything out.
        """
        answers = _answers(self._executor, self._tickets)
        found = [
            ClientScore(*of_client)
            for answer in answers
            for of_client in zip(answer.clients, answer.samples, answer.scores, strict=True)
        ]
        if not found:
            raise no_held_out_samples(len(self._held_out))
        return scores_over_clients(found, self._metrics)

    def _item(self, clients: Sequence[ClientId]) -> Item:
        tensors = _stacked([self._own.get(client, self._model) for client in clients]) if self._own else self._model
        # The samples of clients on demand are not known before they are read.
        in_memory = isinstance(self._held_out, dict)
        cost = sum(len(self._held_out[client][1]) for client in clients) if in_memory else len(clients)
        label = f"the evaluation by {len(clients)} clients, the first of them {clients[0]!r}"
        return Item(EvaluateByClients(tuple(clients)), tensors, label, cost=cost, priority=_AFTER_TRAINING)


def check_scored_by_both(experiment: Experiment, *, has_test_set: bool) -> None:
    """Check that there is a test set for a coordinator that scores beside clients.

    Raises:
        InvalidData: if there is none.
    """
    if isinstance(experiment.evaluation.make(), ByBoth) and not has_test_set:
        raise InvalidData(
            "evaluation: both needs a test set for the coordinator beside those of clients, got data without one: "
            "raise data.test_fraction, give data that bring one, or write evaluation: clients"
        )


def scores_of_both(by_coordinator: Scores, by_clients: Scores) -> Scores:
    """A round's scores where both score: those of the test set from the coordinator, those of clients from clients.

    Args:
        by_coordinator: of the coordinator's scoring.
        by_clients: of the clients' own.
    """
    over_clients = {name: value for name, value in by_clients.line.items() if name.startswith("client_")}
    return Scores({**by_coordinator.line, **over_clients}, by_clients.clients)


class ClientScore(NamedTuple):
    """Score of a client's model on so many samples."""

    client: ClientId
    samples: int
    score: Score


def scores_over_clients(found: Sequence[ClientScore], metrics: Metrics) -> Scores:
    """The scores of clients: means weighted by samples, the spread over clients, and each one's own.

    Clients for whose samples a metric is undefined, such as AUROC of one class, have no part in what is said of it.

    Args:
        found: of each client.
        metrics: that were computed, by name.
    """
    if not found:
        names = [f"client_{name}_{what}" for name in metrics for what in ("mean", "std", "worst_decile")]
        return Scores({**_test(None, [None] * len(metrics), metrics), **dict.fromkeys(names)})
    scores = [one.score for one in found]
    mean = _mean_score(scores, [one.samples for one in found])
    spread = _over_clients(scores, metrics)
    worst = {
        f"client_{name}_worst_decile": _worst_decile(_defined(scores, place), is_higher_better(metric))
        for place, (name, metric) in enumerate(metrics.items())
    }
    rows = [_row(one, metrics) for one in found]
    return Scores({**_test(*mean, metrics), **spread, **worst}, rows)


def _test(loss: float | None, values: Sequence[float | None], metrics: Metrics) -> dict[str, Any]:
    """The part of a round's line on one model's scores, the first metric first; an accuracy that is none is None."""
    named = {f"test_{name}": value for name, value in zip(metrics, values, strict=True)}
    return {**named, "test_accuracy": named.get("test_accuracy"), "test_loss": loss}


def _row(one: ClientScore, metrics: Metrics) -> dict[str, Any]:
    """A client's line of the round."""
    named = dict(zip(metrics, one.score.metrics, strict=True))
    return {"client": one.client, "samples": one.samples, "loss": one.score.loss, **named}


def sizes_of_parts(recipe: Recipe) -> list[int]:
    """Numbers of samples of the parts in which models are scored on the test set; none without a test set."""
    samples = len(tuple(recipe.test)[1]) if recipe.test is not None else 0
    part = _SAMPLES if recipe.scores_in_parts else max(samples, 1)
    return [min(part, samples - first) for first in range(0, samples, part)]


def _split(sequence: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [sequence[first : first + size] for first in range(0, len(sequence), size)]


def _stacked(models: Sequence[State]) -> tuple[Tensor, ...]:
    """(vectors [K, V], integers [K, I])."""
    return tuple(torch.stack(parts) for parts in zip(*models, strict=True))


def _answers(executor: Executor, tickets: Sequence[int]) -> list[Evaluated]:
    """The answers in the order of the tickets."""
    answers = {ticket: answer for ticket, answer, _ in executor.results(tickets)}
    return [answers[ticket] for ticket in tickets]


def _mean_score(scores: Sequence[Score], sizes: Sequence[int]) -> Score:
    """The mean loss, and the mean of each metric where it is defined, weighted by the numbers of samples."""
    losses = [score.loss for score in scores]
    columns = zip(*(score.metrics for score in scores), strict=True)
    defined = ([pair for pair in zip(column, sizes, strict=True) if not math.isnan(pair[0])] for column in columns)
    return Score(_mean([*zip(losses, sizes, strict=True)]), tuple(map(_mean, defined)))


def _mean(sized: Sequence[tuple[float, int]]) -> float:
    if len(sized) < 2:  # a single value keeps its bits
        return sized[0][0] if sized else math.nan
    return sum(value * size for value, size in sized) / sum(size for _, size in sized)


def _defined(scores: Sequence[Score], place: int) -> list[float]:
    return [score.metrics[place] for score in scores if not math.isnan(score.metrics[place])]


def _over_clients(scores: Sequence[Score], metrics: Metrics) -> dict[str, float | None]:
    """The mean and standard deviation over clients, with equal weights; None without scores."""
    line: dict[str, float | None] = {}
    for place, name in enumerate(metrics):
        values = _defined(scores, place)
        is_finite = bool(values) and all(map(math.isfinite, values))  # pstdev fails for infinity
        undefined = math.nan if scores else None
        line[f"client_{name}_mean"] = statistics.fmean(values) if values else undefined
        line[f"client_{name}_std"] = statistics.pstdev(values) if is_finite else undefined
    return line


def _worst_decile(values: Sequence[float], is_higher_better: bool) -> float:
    """The mean over the worst tenth of the clients, rounded up to a whole client (Li et al. 2020, 1905.10497)."""
    in_order = sorted(values, reverse=not is_higher_better)
    return statistics.fmean(in_order[: -(-len(values) // 10)]) if values else math.nan
