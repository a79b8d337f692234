"""Trainer of an app's clients: each task is one call of the app's own ``fit``, each score one of its ``evaluate``.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import numpy as np

from fed.aggregators.base import Phase
from fed.clients.apps.app import App
from fed.clients.apps.arrays import AppModel, Array, arrays_in, as_array, state_of
from fed.clients.apps.flower import loss_among
from fed.clients.data import ClientId, FederatedData, Held
from fed.clients.scoring.measures import Loss, Metrics, declared
from fed.clients.training.evaluation import Score
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import LocalResult, LocalTrainer, ScoringTrainer
from fed.config.apps import AppSection, ArraySpec
from fed.config.experiment import Local
from fed.config.registry import METRICS
from fed.errors import AppFailed, InvalidModel
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, torch
from fed.wire.messages import LARGEST, METRIC_NAME, MOST_METRICS, MOST_SAMPLES

__all__ = ["AppTrainer", "AppTrainers", "metrics_of", "stand_in", "unmeasured"]

_SEEDS = 2**31
_LISTED = 8  # names in a sentence
# Values that Flower's clients may give beside numbers.
_OWN_METRICS = (bool, str, bytes, list, tuple)


@dataclass(frozen=True)
class AppTrainers:
    """Factory of an app's trainers, which can be pickled where the app can.

    Args:
        app: the app.
        specs: name, type and shape of each array of its model.
        local: the experiment's section of that name, which clients are told.
        told: hyper-parameters of the algorithm that clients are told.
    """

    app: App
    specs: tuple[ArraySpec, ...]
    local: Local
    told: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, phase: Phase, loss: Loss, device: "torch.device") -> "AppTrainer":
        """The trainer; phase and loss are the app's own."""
        return AppTrainer(self, device)


class AppTrainer(LocalTrainer, ScoringTrainer):
    """Trainer of an app's clients, one by one. A client is made anew for each call.

    Python's, NumPy's and PyTorch's global generators are seeded for each call, and restored afterwards, so that an app
    that draws from them has the same result wherever the task is done.

    Args:
        made_by: the factory, with all that a trainer needs.
        device: device whose generator is seeded too.
    """

    def __init__(self, made_by: AppTrainers, device: "torch.device") -> None:
        self._made_by = made_by
        self._device = device
        self._notes: dict[str, str] = {}  # metric that clients do not return → sentence
        self._noted: set[str] = set()

    @cached_property
    def layout(self) -> Layout:
        """Layout of the model's state."""
        return Layout.of(AppModel(self._made_by.specs))

    def steps(self, samples: int, steps: int | None) -> int:
        """One step, since the app's own are not counted."""
        return steps or 1

    def train(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        samples: Held,
        *,
        order: np.random.Generator,
        seed: int,
        context: LocalContext,
    ) -> LocalResult:
        """Have a client fit the arrays of a state: on samples and in an order of its own, not on those given here.

        Raises:
            AppFailed: if it raises, or returns something else than arrays, a number of samples, and metrics.
        """
        client = context.client
        specs = self._made_by.specs
        config = self._config(seed, context)
        with self._made_by.app.seeded(seed, self._device):
            made = self._made_by.app.client(client, [spec.name for spec in specs])
            found = made.call("fit", client, arrays_in(vector_V, integers_I, specs), config)
        what = f"fit of client {client!r}"
        given, count, metrics = _parts(found, what, "arrays, samples, metrics")
        arrays = _as_arrays(given, what)
        try:
            params_V, integers_I = state_of(arrays, specs, vector_V.dtype)
        except AppFailed as error:
            raise AppFailed(f"{what} {error}") from None
        numbers = _metrics(metrics, what)
        loss = loss_among(numbers, ("train_loss", "loss"))
        if loss is not None:
            numbers["train_loss"] = loss
        return LocalResult(params_V, integers_I, loss or 0.0, _samples(count, what, least=1), numbers)

    def evaluate(
        self, client: ClientId, vector_V: Tensor, integers_I: Tensor, *, seed: int, round_number: int
    ) -> tuple[Score, int]:
        """Have a client evaluate the arrays of a state.

        Returns:
            The score, with the metrics that the experiment names, NaN where the client gave none; and the number of
            samples, 0 where the client evaluates nothing.

        Raises:
            AppFailed: if it raises, or returns something else than a loss, a number of samples, and metrics.
        """
        specs = self._made_by.specs
        section = self._made_by.app.section
        with self._made_by.app.seeded(seed, self._device):
            made = self._made_by.app.client(client, [spec.name for spec in specs])
            if not callable(getattr(made.client, "evaluate", None)):
                return Score(0.0), 0
            config = {"round": round_number, "seed": seed % _SEEDS, **section.config}
            found = made.call("evaluate", client, arrays_in(vector_V, integers_I, specs), config)
        what = f"evaluate of client {client!r}"
        loss, count, metrics = _parts(found, what, "loss, samples, metrics")
        samples = _samples(count, what, least=0)
        if not samples:
            return Score(0.0), 0
        number = _number(loss)
        if number is None or not abs(number) <= LARGEST:
            raise AppFailed(
                f"{what} must return a finite loss, got {loss!r}: return 0 samples where there is nothing to score"
            )
        numbers = _metrics(metrics, what)
        self._note_missing(metrics)
        return Score(number, tuple(numbers.get(name, math.nan) for name in section.metrics)), samples

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on metrics that the experiment names and no client returns; each is given once."""
        notes = tuple(self._notes.values())
        self._noted |= self._notes.keys()
        self._notes.clear()
        return notes

    def _note_missing(self, metrics: Mapping[str, Any]) -> None:
        """Note each metric that the experiment names, and a client did not return; NaN counts as returned."""
        returned = sorted(_key(said) for said, value in metrics.items() if _number(value) is not None)
        others = ", ".join(returned[:_LISTED]) or "no number"
        for name in self._made_by.app.section.metrics:
            if name not in returned and name not in self._noted:
                self._notes[name] = (
                    f"app.metrics names {name}, and a client's evaluate returned {others} in its place: the client has "
                    f"no part in test_{name}; have evaluate return it, or name another in app.metrics"
                )

    def measure(
        self, vector_V: Tensor, integers_I: Tensor, samples: Held, seed: int, *, gradient: bool
    ) -> tuple[float, Tensor]:
        """Refuse: an app computes neither a loss nor a gradient here.

        Raises:
            InvalidModel: always.
        """
        raise InvalidModel("an app's clients tell neither the loss nor the gradient of a model: choose fedavg")

    def load(self, vector_V: Tensor, integers_I: Tensor) -> AppModel:
        """A module of the arrays."""
        specs = self._made_by.specs
        names = [spec.name for spec in specs]
        arrays = arrays_in(vector_V.cpu(), integers_I.cpu(), specs)
        return AppModel(specs, dict(zip(names, arrays, strict=True)))

    def _config(self, seed: int, context: LocalContext) -> dict[str, Any]:
        """All that a client is told with a task: what its run says, and over it what ``app.config`` says."""
        local = self._made_by.local
        steps = context.steps[0] if context.steps else None
        config: dict[str, Any] = {
            "round": context.round,
            "seed": seed % _SEEDS,
            "lr": local.lr if context.lr is None else context.lr,
            "batch_size": local.batch_size,
        }
        steps = local.steps if steps is None else steps
        length = {"epochs": local.epochs} if steps is None else {"steps": steps}
        return {**config, **length, **self._made_by.told, **self._made_by.app.section.config}


def stand_in(clients: Sequence[ClientId]) -> FederatedData:
    """Data in the place of those that an app keeps to itself: one sample of nothing for each client."""
    # Of types and shapes by which a server tells an app's node from one with samples.
    pair = torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1)
    return FederatedData(dict.fromkeys(clients, pair))


def unmeasured(output: Any, target: Any) -> Any:
    """Stand in the place of a loss or a metric, which an app's clients compute themselves.

    Raises:
        InvalidModel: always.
    """
    raise InvalidModel("an app's clients compute loss and metrics themselves, and nothing else does")


def metrics_of(section: AppSection) -> Metrics:
    """Metrics of an app by name, as results have them; built-in names have the direction of the built-in metric."""
    lower = {name for name in section.metrics if name in METRICS.builtin and METRICS.make(name).best == "min"}
    return {name: _error if name in lower else unmeasured for name in section.metrics}


@declared(higher_is_better=False)
def _error(output: Any, target: Any) -> Any:
    return unmeasured(output, target)


def _parts(found: Any, what: str, expected: str) -> tuple[Any, Any, Any]:
    if not isinstance(found, tuple | list) or len(found) != 3:
        got = f"{len(found)} parts" if isinstance(found, tuple | list) else type(found).__name__
        raise AppFailed(f"{what} must return ({expected}), got {got}: return all three")
    first, second, third = found
    return first, second, third


def _as_arrays(given: Any, what: str) -> list[Array]:
    if not isinstance(given, tuple | list):
        raise AppFailed(
            f"{what} must return its arrays as a list, got {type(given).__name__}: give them in the order received"
        )
    try:
        return [as_array(part, f"array {number} of {what}") for number, part in enumerate(given)]
    except InvalidModel as error:
        raise AppFailed(str(error)) from None


def _samples(count: Any, what: str, least: int) -> int:
    if not isinstance(count, Integral) or isinstance(count, bool) or not least <= int(count) <= MOST_SAMPLES:
        raise AppFailed(
            f"{what} must return a whole number of samples, at least {least}, got {count!r}: return how many it used"
        )
    return int(count)


def _metrics(metrics: Any, what: str) -> dict[str, float]:
    """Finite numbers among an app's metrics, under names that are keys of results; texts and lists are its own."""
    if not isinstance(metrics, Mapping):
        raise AppFailed(
            f"{what} must return its metrics as a mapping, got {type(metrics).__name__}: return {{}} for none"
        )
    found: dict[str, float] = {}
    for said, value in metrics.items():
        name = _key(said)
        number = _number(value)
        if number is None and not isinstance(value, _OWN_METRICS):
            raise AppFailed(
                f"{what} must return metrics that are numbers, got {type(value).__name__} for {said}: convert it with "
                "float(…), or leave it out"
            )
        if not METRIC_NAME.fullmatch(name):
            raise AppFailed(f"{what} must name its metrics by at most 60 letters, got {name[:70]!r}: rename it")
        if number is not None and abs(number) <= LARGEST:
            found[name] = number
    if len(found) > MOST_METRICS:
        raise AppFailed(f"{what} must return at most {MOST_METRICS} metrics, got {len(found)}: leave some out")
    return dict(sorted(found.items()))


def _key(said: Any) -> str:
    """Name of a metric as a key of results."""
    return re.sub("[^A-Za-z0-9_]", "_", str(said))


def _number(value: Any) -> float | None:
    """A real number, of Python or in an array of one; None for anything else."""
    if isinstance(value, bool | str | bytes):
        return None
    if isinstance(value, Real):
        return float(value)
    try:
        return float(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
