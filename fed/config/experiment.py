"""Experiment: the validated description of a run, section by section."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from fed.config import registry
from fed.config.compatibility import Feature, check_combination, lacks
from fed.config.components import Component
from fed.config.document import Document
from fed.config.hyperparameters import DecayRate
from fed.config.lr_schedules import Schedule
from fed.config.registry import AdversariesSection, DataSection, MetricSection
from fed.config.validation import Section
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams

__all__ = ["Checkpointing", "Execution", "Experiment", "Local", "check_metric_names", "with_overrides"]


class Local(Section):
    """Local training of a task: epochs, or steps, of an optimizer on the client's own data."""

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """The rule of a step. Its state (momentum, moments) begins anew with every task."""
    lr: Annotated[float, Field(gt=0, le=1e38)] = 0.1  # float32 ends at 3.4e38
    """Step size η."""
    schedule: Annotated[Component, registry.SCHEDULES] = Field(default_factory=registry.SCHEDULES.make)
    """How η goes over the rounds."""
    scaling: Literal["none", "linear", "square_root"] = "none"
    """How η grows with the cohort: as cohort / base_cohort, or as the root of that."""
    base_cohort: PositiveInt = 1
    """The cohort for which η is meant, of scaling."""
    momentum: DecayRate = 0.0
    """ρ in [0, 1), of sgd."""
    nesterov: bool = False
    """Nesterov's momentum, of sgd."""
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.999), strict=False)
    """Decay of the two moments, of adam and adamw."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment, of adam and adamw."""
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0
    """λ: added to the gradient as λx; decoupled from it under adamw."""
    batch_size: PositiveInt = 16
    """Samples in a batch; the last batch of an epoch may be shorter."""
    accumulate: PositiveInt = 1
    """Batches whose samples share one step: a step sees up to batch_size × accumulate samples."""
    epochs: PositiveInt | None = None
    """Passes over the client's data; 1 where neither epochs nor steps is given."""
    steps: PositiveInt | None = None
    """Optimizer steps, in place of epochs."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Arithmetic of forward and backward passes; float32 means the model's own type, so that float64 stays float64."""

    def lr_in(self, number: int, count: int, cohort: int) -> float:
        """Learning rate η in a round.

        Args:
            number: of the round, from 1.
            count: how many rounds there are.
            cohort: how many clients take part.
        """
        ratio = cohort / self.base_cohort
        scale = 1.0 if self.scaling == "none" else ratio if self.scaling == "linear" else math.sqrt(ratio)
        return self.lr * scale * self._schedule.factor(number, count)

    @cached_property
    def _schedule(self) -> Schedule:
        schedule: Schedule = self.schedule.make()
        return schedule

    @model_validator(mode="wrap")
    @classmethod
    def _one_epoch_by_default(cls, keys: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(keys, dict) or keys.get("epochs") is not None or keys.get("steps") is not None:
            return handler(keys)
        local = handler({**keys, "epochs": 1})
        local.model_fields_set.discard("epochs")  # so that an override with steps need not take it back
        return local

    @model_validator(mode="after")
    def _hold_what_spans_keys(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"give epochs or steps, not both, got epochs={self.epochs} and steps={self.steps}: set one to null"
            )
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(
                f"momentum and nesterov belong to sgd, got optimizer={self.optimizer}: remove them, or use sgd"
            )
        defaults = Local.model_fields
        if self.optimizer == "sgd" and any(getattr(self, key) != defaults[key].default for key in ("betas", "eps")):
            raise ValueError("betas and eps belong to adam and adamw, got optimizer=sgd: remove them, or use adam")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0, got momentum=0: raise momentum or drop nesterov")
        return self


class Execution(Section):
    """Execution of a simulation. Batching and groups change results by rounding only, workers not at all."""

    batching: Literal["auto", "on", "off"] = "auto"
    """Train clients in groups, one operation for all of a group; auto: where the model allows it and it pays."""
    group: PositiveInt = 32
    """The most clients of a group; fewer where their models would not fit into the cache, or the GPU's memory."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """Processes that train, one thread each; 0: this one; auto: as many as cores or GPUs, where a run takes long."""
    executor: Annotated[Component, registry.EXECUTORS] | None = None
    """Executor of the clients' work; null: in_process without workers, and workers with some. Where one is named,
    workers: auto means as many as cores or GPUs, however long a run takes."""

    @model_validator(mode="after")
    def _hold_workers_to_the_executor(self) -> Self:
        if self.executor is None or self.workers == "auto":
            return self
        is_parallel = getattr(self.executor.target, "is_parallel", True)
        if is_parallel and not self.workers:
            raise ValueError(
                f"workers must be at least 1 with executor {self.executor.kind}, got 0: raise it, or set executor to "
                "in_process"
            )
        if self.workers and not is_parallel:
            raise ValueError(
                f"workers must be 0 with executor {self.executor.kind}, which works in one process alone, got "
                f"{self.workers}: lower it, or set executor to workers"
            )
        return self


class Checkpointing(Section):
    """Checkpoints of a run that is written to a folder: model, states, streams, clock, open tasks."""

    every: PositiveInt | None = 5
    """Rounds from one checkpoint to the next; null for none."""
    keep: PositiveInt = 3
    """How many stay."""


def _ring_where_peers_mix(values: dict[str, Any]) -> Component | None:
    algorithm = values["algorithm"].make()
    if lacks(algorithm, Feature.NEIGHBOURS) or lacks(algorithm, Feature.GIVEN_NEIGHBOURS):
        return None
    return registry.TOPOLOGIES.make(getattr(algorithm, "topology", "ring"))


def _rounds_of_the_algorithm(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return getattr(values["algorithm"].make(), "default_rounds", {}) if "algorithm" in values else {}


def _codecs_of_the_algorithm(key: str, values: dict[str, Any]) -> tuple[Component, ...]:
    return tuple(map(registry.CODECS.make, getattr(values["algorithm"].make(), key, ())))


def _clients_where_models_are_theirs(values: dict[str, Any]) -> Component:
    are_theirs = lacks(values["algorithm"].make(), Feature.GLOBAL_MODEL)
    return registry.EVALUATIONS.make("clients" if are_theirs else "coordinator")


_METRICS_OF_LOSSES = {
    "cross_entropy": ("accuracy",),
    "bce": ("accuracy",),
    "mse": ("mae",),
    "huber": ("mae",),
    "cox": ("c_index",),
}

_TAKEN = ("loss", "round", "client", "samples", "variant", "seed", "fold")  # by other columns of results


def _metrics_of_the_loss(values: Mapping[str, Any]) -> tuple[MetricSection, ...]:
    loss = values["loss"]
    return tuple(map(registry.METRICS.make, _METRICS_OF_LOSSES.get(loss.kind, ()) if loss else ()))


class Experiment(Document):
    """The validated description of a run, YAML ⇄ Python.

    Every key has a default that :meth:`dump` shows. A ``kind`` is a built-in name or ``python:package.module:Name``.
    ``data``, ``model``, ``loss`` and ``metrics`` count only where :func:`fed.simulate` is not given others.

    Raises:
        InvalidExperiment: on construction, one line for each key that is unknown, of another type or out of its range.

    Example:
        >>> experiment = Experiment(algorithm={"kind": "fedprox", "mu": 0.1}, local={"lr": 0.05})
        >>> experiment.algorithm.mu, experiment.local.epochs
        (0.1, 1)
        >>> experiment.override({"rounds.count": 5}).rounds.count
        5
    """

    name: Annotated[str, Field(min_length=1)] = "experiment"
    """What reports and folders call this run."""
    seed: NonNegativeInt = 0
    """Every random draw is a function of this."""
    data_seed: NonNegativeInt | None = None
    """In place of seed for the data: what a source draws, who holds what, what is held out; null: seed."""
    data: Annotated[DataSection, registry.DATA] | None = Field(default_factory=registry.DATA.make)
    """What is learned from, and how clients share it; null where data are given in Python."""
    model: Annotated[Component, registry.MODELS] | None = Field(default_factory=registry.MODELS.make)
    """What is trained; null where a model is given in Python."""
    loss: Annotated[Component, registry.LOSSES] | None = Field(default_factory=registry.LOSSES.make)
    """What training makes small: a function of (output, target); null where one is given in Python."""
    metrics: Annotated[tuple[Annotated[MetricSection, registry.METRICS], ...], Field(strict=False)] | None = Field(
        default_factory=_metrics_of_the_loss
    )
    """What evaluation computes beside the loss, first what is reported as best: unless given, what suits a built-in
    loss; null where they are given in Python."""
    local: Local = Local()
    """A client's work in a round."""
    algorithm: Annotated[Component, registry.ALGORITHMS] = Field(default_factory=registry.ALGORITHMS.make)
    """How clients' work becomes one model."""
    topology: Annotated[Component, registry.TOPOLOGIES] | None = Field(default_factory=_ring_where_peers_mix)
    """Who is whose neighbour; of algorithms over mix alone, where it is a ring unless given."""
    rounds: Annotated[Component, registry.ROUNDS] = Field(
        default_factory=lambda values: registry.ROUNDS.make(**_rounds_of_the_algorithm(values))
    )
    """Who trains when, and how often; synchronous rounds of all clients, unless given or of the algorithm."""
    stages: Annotated[tuple[Annotated[Component, registry.STAGES], ...], Field(strict=False)] | None = None
    """Changes of clients' updates before they are encoded, and of their mean, first to last; null for none."""
    uplink: Annotated[tuple[Annotated[Component, registry.CODECS], ...], Field(strict=False)] = Field(
        default_factory=partial(_codecs_of_the_algorithm, "uplink")
    )
    """The chain of codecs that encodes what clients send, first to last; none unless given or of the algorithm."""
    error_feedback: Annotated[Component, registry.ERROR_FEEDBACKS] = Field(
        default_factory=registry.ERROR_FEEDBACKS.make
    )
    """What becomes of the difference between an update and what the codecs make of it."""
    downlink: Annotated[tuple[Annotated[Component, registry.CODECS], ...], Field(strict=False)] = Field(
        default_factory=partial(_codecs_of_the_algorithm, "downlink")
    )
    """The chain that encodes by how much the model has moved, likewise."""
    secure_aggregation: Annotated[Component, registry.SECURE_AGGREGATIONS] | None = None
    """Masks by which the coordinator learns the sum of clients' messages alone; null for none."""
    hierarchy: Annotated[Component, registry.HIERARCHIES] | None = None
    """Edge coordinators between clients and coordinator; null for none."""
    devices: Annotated[Component, registry.DEVICES] = Field(default_factory=registry.DEVICES.make)
    """What simulated clients run on: how fast they are, when they are there, how often they fail."""
    evaluation: Annotated[Component, registry.EVALUATIONS] = Field(default_factory=_clients_where_models_are_theirs)
    """Who scores models: the coordinator on a test set, unless given or the algorithm is for clients' own models."""
    adversaries: Annotated[AdversariesSection, registry.ADVERSARIES] | None = None
    """Simulated clients that attack, and how; null for none."""
    checkpoints: Checkpointing = Checkpointing()
    """State from which an interrupted run resumes."""
    simulation: Execution = Execution()
    """How a simulation is computed."""

    if TYPE_CHECKING:  # sections are given as mappings, whatever type they become

        def __init__(self, **keys: Any) -> None: ...

    @field_validator("rounds", mode="wrap")
    @classmethod
    def _complete_rounds(cls, keys: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        defaults = _rounds_of_the_algorithm(info.data)
        if not defaults or not isinstance(keys, dict) or keys.get("kind", defaults["kind"]) != defaults["kind"]:
            return handler(keys)
        rounds = handler({**defaults, **keys})
        rounds.model_fields_set.difference_update(defaults.keys() - keys.keys())  # an override may change the algorithm
        return rounds

    @field_validator("metrics")
    @classmethod
    def _hold_names(cls, metrics: tuple[MetricSection, ...] | None) -> tuple[MetricSection, ...] | None:
        if metrics is not None:
            check_metric_names([metric.called for metric in metrics])
        return metrics

    @model_validator(mode="after")
    def _hold_sections_to_each_other(self) -> Self:
        check_combination(self)
        if self.adversaries is not None and self.data is not None and isinstance(self.data.clients, int):
            self.adversaries.attackers_among(self.data.clients)
        return self

    @property
    def data_streams(self) -> Streams:
        """Streams of the data: what a source draws, who holds what, what is held out."""
        return Streams(self.seed if self.data_seed is None else self.data_seed)

    def override(self, values: dict[str, Any]) -> Self:
        """The same experiment with other values.

        Args:
            values: path of a key → its value, as ``{"rounds.count": 5}``. A mapping replaces the whole section.

        Raises:
            InvalidExperiment: one line for each thing wrong.
        """
        return type(self)(**with_overrides(self.given_keys(), values))


def check_metric_names(names: Sequence[str]) -> None:
    """Refuse metrics that results cannot tell apart by name.

    Raises:
        InvalidExperiment: if two have one name, or one has a name that is no key, or that of a deviation.
    """
    for number, name in enumerate(names):
        is_key = re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name, re.ASCII)
        if not is_key or name in _TAKEN or name.endswith("_std"):
            raise InvalidExperiment(
                f"a metric's name must be letters, digits and _, without _std at its end, and none of "
                f"{', '.join(_TAKEN)}, got {name}: give it another by the key name, or in Python as "
                "metric={name: function}"
            )
        if name in names[:number]:
            raise InvalidExperiment(f"metrics must have names of their own, got {name} twice: give one the key name")


def with_overrides(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested mappings with some values replaced; sections on the way to a value are created.

    A text on the way is a section's kind, written short, and stays its kind.

    Args:
        document: a document's keys and values.
        values: dotted path of a key → its value; a mapping replaces the whole section.

    Example:
        >>> with_overrides({"local": {"lr": 0.1}}, {"local.steps": 3, "topology.kind": "ring"})
        {'local': {'lr': 0.1, 'steps': 3}, 'topology': {'kind': 'ring'}}
        >>> with_overrides({"evaluation": "clients"}, {"evaluation.fraction": 0.5})
        {'evaluation': {'kind': 'clients', 'fraction': 0.5}}
    """
    changed = copy.deepcopy(dict(document))
    for path, value in values.items():
        *sections, key = path.split(".")
        place = changed
        for name in sections:
            section = place.get(name)
            if not isinstance(section, dict):
                place[name] = {"kind": section} if isinstance(section, str) else {}
            place = place[name]
        place[key] = copy.deepcopy(value)
    return changed
