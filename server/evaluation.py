"""Evaluation of models, on the test set or on clients' held-out samples, by idle executors during the next round."""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from fed.clients.data import ClientId, Held
from fed.clients.data.held import size_of
from fed.clients.data.held_out import no_held_out_samples
from fed.clients.scoring.measures import Metrics, is_higher_better
from fed.clients.training.evaluation import Score
from fed.clients.training.executor import Executor, Item
from fed.clients.training.work_items import Evaluate, EvaluateByClients, Evaluated, Recipe
from fed.config.evaluation import ByBoth
from fed.config.experiment import Experiment
from fed.errors import InvalidData
from fed.server.federation import Federation, State
from fed.server.training_loop import Scores
from fed.storage.scores import CLIENT_FIGURES, NamedMetric
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "CLIENTS_AT_ONCE",
    "MODELS_AT_ONCE",
    "ClientScore",
    "ScoringByClients",
    "ScoringByCoordinator",
    "check_scored_by_both",
    "parts_of",
    "say_without_scores",
    "scores_of_both",
    "scores_over_clients",
]

_log = logging.getLogger(__name__)

CLIENTS_AT_ONCE = 32
"""Largest number of clients in one item that score the same model."""

MODELS_AT_ONCE = 8
"""Largest number of models in one item."""

_SAMPLES = 4096  # test samples of one item, where models can be scored in parts
_AFTER_TRAINING = 1  # a priority behind training's: scores keep no client waiting


class ScoringByCoordinator:
    """Scores of the federation's model and the clients' own on the test set.

    Args:
        recipe: recipe with the test set, the loss and the metrics.
        federation: federation whose models are scored, as they are now.
        executor: executor that does the work.
        only_own: True to score the clients' own models alone, where they have some.
        own: clients whose own models are scored; all unless given.
        sample: places of the test samples that clients' own models are scored on, where there are several; all samples
            unless given.
    """

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        executor: Executor,
        *,
        only_own: bool = False,
        own: Sequence[ClientId] | None = None,
        sample: Sequence[int] = (),
    ) -> None:
        self._executor = executor
        self._metrics = recipe.metrics
        models = federation.models()
        self._own = list(models if own is None else own)
        self._only_own = bool(self._own) and only_own
        own_models = [models[client] for client in self._own]
        rest = [] if self._only_own else [federation.model()]
        self._samples = _test_samples(recipe)
        self._of_own = self._samples
        self._sets: list[_ScoredSet] = []
        # Many models are scored on a sample, the federation's alone on all.
        if len(own_models) > 1 and 0 < len(sample) < self._samples:
            self._of_own = len(sample)
            self._submit(own_models, recipe, tuple(sample))
            self._submit(rest, recipe)
        else:
            self._submit([*own_models, *rest], recipe)

    def scores(self) -> Scores:
        """Scores of the federation's model, or the mean over the clients' models; None without a test set."""
        if not self._samples:
            of_own = _over_clients([], self._metrics) if self._own else {}
            return Scores({**_test_line(None, self._metrics), **of_own})
        answers = iter(_answers(self._executor, [ticket for scored in self._sets for ticket in scored.tickets]))
        scores: list[Score] = []
        for scored in self._sets:
            for _ in range(scored.groups):
                parts = [next(answers) for _ in scored.sizes]
                scores += _joined(parts, scored.sizes)
        own = scores[: len(self._own)]  # they were submitted first
        of_clients = [ClientScore(client, self._of_own, one) for client, one in zip(self._own, own, strict=True)]
        rows = [_client_line(one, self._metrics) for one in of_clients]
        line: dict[str, Any] = _over_clients(own, self._metrics) if own else {}
        if len(own) > 1:
            of_all = self._of_own if self._only_own else self._samples
            line = {"test_samples": of_all, "client_test_samples": self._of_own, **line}
        if self._only_own:
            means = tuple(line[f"client_{name}_mean"] for name in self._metrics)
            score = Score(statistics.fmean(score.loss for score in own), means)
        else:
            score = scores[-1]  # the federation's model was submitted last
        return Scores({**_test_line(score, self._metrics), **line}, rows)

    def _submit(self, states: Sequence[State], recipe: Recipe, places: tuple[int, ...] = ()) -> None:
        """Have models scored, on the whole test set or on some places of it."""
        parts = parts_of(recipe, len(places) or self._samples)
        # A stack of all models would take as much memory again.
        groups = _split(states, MODELS_AT_ONCE)
        # One after another: an item holds a copy of its models.
        tickets = [
            self._executor.submit(_item(models, first, end, places)) for models in groups for first, end in parts
        ]
        self._sets.append(_ScoredSet(len(groups), [end - first for first, end in parts], tickets))


class _ScoredSet(NamedTuple):
    """Models that are scored on the same samples.

    Args:
        groups: number of groups of models, each of which is scored at once.
        sizes: number of samples in each part that the samples are cut into.
        tickets: tickets of the items, group by group.
    """

    groups: int
    sizes: Sequence[int]
    tickets: Sequence[int]


def _item(models: Sequence[State], first: int, end: int, places: tuple[int, ...]) -> Item:
    label = f"the evaluation of test samples {first} to {end - 1}"
    content = Evaluate(first, end, places[first:end])
    return Item(content, _stacked(models), label, cost=end - first, priority=_AFTER_TRAINING)


def _joined(parts: Sequence[Evaluated], sizes: Sequence[int]) -> list[Score]:
    """Each model's scores over all parts, means weighted by the parts' samples; a single part keeps its bits."""
    by_model = zip(*(part.scores for part in parts), strict=True)
    return [_mean_score(of_parts, sizes) for of_parts in by_model]


class ScoringByClients:
    """Scores of each client's model, its own or the federation's, on its held-out samples.

    Args:
        held_out: held-out samples of each client.
        metrics: metrics to compute, by name.
        federation: federation whose models are scored, as they are now.
        executor: executor that does the work.
        is_of_app: True if clients score on samples of their own, which nothing else knows: they may have none.
        round_number: number of the round, from 1, which an app's clients are told.
        said: sentences of the log that the run has said, to which those of these scores are added; each is said once.
    """

    def __init__(
        self,
        held_out: Mapping[ClientId, Held],
        metrics: Metrics,
        federation: Federation,
        executor: Executor,
        *,
        is_of_app: bool = False,
        round_number: int = 1,
        said: set[str] | None = None,
    ) -> None:
        self._executor = executor
        self._held_out = held_out
        self._metrics = metrics
        self._is_of_app = is_of_app
        self._round_number = round_number
        self._said = set() if said is None else said
        self._model = federation.model()
        self._own = federation.models()
        groups = _split(list(held_out), MODELS_AT_ONCE if self._own else CLIENTS_AT_ONCE)
        self._tickets = [executor.submit(self._item(clients)) for clients in groups]

    def scores(self) -> Scores:
        """The mean over clients, weighted by their held-out samples, the spread over clients, and each client's.

        Raises:
            InvalidData: if no client holds anything out.
        """
        answers = _answers(self._executor, self._tickets)
        found = [
            ClientScore(client, samples, score)
            for answer in answers
            for client, samples, score in zip(answer.clients, answer.samples, answer.scores, strict=True)
        ]
        for answer in answers:
            for client, reason in answer.failed:
                _log.warning("client %r could not score the model: %s", client, reason)
            for note in answer.notes:
                if note not in self._said:  # each worker process finds it out
                    self._said.add(note)
                    _log.warning("%s", note)
        if not found and not self._is_of_app:
            raise no_held_out_samples(len(self._held_out))
        return scores_over_clients(found, self._metrics)

    def _item(self, clients: Sequence[ClientId]) -> Item:
        # Clients without models of their own share one copy of the federation's.
        tensors = _stacked([self._own.get(client, self._model) for client in clients]) if self._own else self._model
        # The samples of clients on demand are not known before they are read.
        in_memory = isinstance(self._held_out, dict)
        cost = sum(size_of(self._held_out[client]) for client in clients) if in_memory else len(clients)
        label = f"the evaluation by {len(clients)} clients, the first of them {clients[0]!r}"
        return Item(
            EvaluateByClients(tuple(clients), self._round_number), tensors, label, cost=cost, priority=_AFTER_TRAINING
        )


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


@cache
def say_without_scores() -> None:
    """Say, once a process, that nobody scores the model, since there are no samples for it."""
    _log.warning(
        "nobody scores the model, for the data have no test set: give one, as FederatedData(…, test=…) or by "
        "data.test_fraction, and the coordinator scores on it; or write evaluation: clients, and each client holds out "
        "a share of its samples to score on"
    )


def scores_of_both(by_coordinator: Scores, by_clients: Scores) -> Scores:
    """A round's scores where both score: those of the test set from the coordinator, those of clients from clients.

    Args:
        by_coordinator: scores that the coordinator has found.
        by_clients: scores that the clients have found.
    """
    over_clients = {name: value for name, value in by_clients.line.items() if name.startswith("client_")}
    return Scores({**by_coordinator.line, **over_clients}, by_clients.clients)


class ClientScore(NamedTuple):
    """Score of a client's model, and the number of samples that it was scored on."""

    client: ClientId
    samples: int
    score: Score


def scores_over_clients(found: Sequence[ClientScore], metrics: Metrics) -> Scores:
    """The scores of clients: means weighted by samples, the spread over clients, and each one's own.

    A client for whose samples a metric is undefined, such as AUROC of one class, is left out of that metric's figures.

    Args:
        found: score of each client.
        metrics: metrics that were computed, by name.
    """
    # The keys are there all the same, so that every line of the metrics has the same columns.
    if not found:
        names = [NamedMetric(name).of_clients(figure) for name in metrics for figure in CLIENT_FIGURES]
        return Scores({**_test_line(None, metrics), **dict.fromkeys(names)})
    scores = [one.score for one in found]
    mean = _mean_score(scores, [one.samples for one in found])
    spread = _over_clients(scores, metrics)
    worst = {
        f"client_{name}_worst_decile": _worst_decile(_defined(scores, place), is_higher_better(metric))
        for place, (name, metric) in enumerate(metrics.items())
    }
    rows = [_client_line(one, metrics) for one in found]
    return Scores({**_test_line(mean, metrics), **spread, **worst}, rows)


def _test_line(score: Score | None, metrics: Metrics) -> dict[str, Any]:
    """The part of a round's line on one model's scores, the first metric first; ``test_accuracy`` is always there."""
    loss, values = score or (None, [None] * len(metrics))
    named = {f"test_{name}": value for name, value in zip(metrics, values, strict=True)}
    return {**named, "test_accuracy": named.get("test_accuracy"), "test_loss": loss}


def _client_line(one: ClientScore, metrics: Metrics) -> dict[str, Any]:
    """A client's line of the round, without its number."""
    named = dict(zip(metrics, one.score.metrics, strict=True))
    return {"client": one.client, "samples": one.samples, "loss": one.score.loss, **named}


def parts_of(recipe: Recipe, samples: int | None = None) -> list[tuple[int, int]]:
    """Beginnings and ends of the parts in which models are scored; none without a test set.

    Args:
        recipe: recipe with the test set.
        samples: number of samples that are scored; all of the test set unless given.
    """
    samples = _test_samples(recipe) if samples is None else samples
    # Metrics such as AUROC need all samples at once.
    part = _SAMPLES if recipe.scores_in_parts else max(samples, 1)
    return [(first, min(first + part, samples)) for first in range(0, samples, part)]


def _test_samples(recipe: Recipe) -> int:
    return recipe.test_size


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
        # NaN: measured, but of no value; None: not measured.
        undefined = math.nan if scores else None
        line[f"client_{name}_mean"] = statistics.fmean(values) if values else undefined
        line[f"client_{name}_std"] = statistics.pstdev(values) if is_finite else undefined
    return line


def _worst_decile(values: Sequence[float], is_higher_better: bool) -> float:
    """The mean over the worst tenth of the clients, rounded up to a whole client (Li et al. 2020, 1905.10497)."""
    in_order = sorted(values, reverse=not is_higher_better)
    return statistics.fmean(in_order[: -(-len(values) // 10)]) if values else math.nan
