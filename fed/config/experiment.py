"""Experiment: the validated description of a run, section by section."""

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
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
from fed.config.apps import AppSection
from fed.config.compatibility import Feature, check_combination, lacks
from fed.config.components import Component, Family
from fed.config.device_names import DeviceName
from fed.config.document import Document
from fed.config.hyperparameters import DecayRate
from fed.config.lr_schedules import Schedule
from fed.config.registry import DataSection
from fed.config.sections import AdversariesSection, FixedSection, MetricSection, ModelSection, TrackerSection
from fed.config.table import TableSection, check_standardizing
from fed.config.validation import Section
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams

__all__ = [
    "Checkpointing",
    "Execution",
    "Experiment",
    "Local",
    "check_given_once",
    "check_metric_names",
    "with_overrides",
]


class Local(Section):
    """Local training of a task: epochs, or steps, of an optimizer on the client's own data."""

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Rule of a step. Its state (momentum, moments) begins anew with every task."""
    lr: Annotated[float, Field(gt=0, le=1e38)] = 0.1  # float32 ends at 3.4e38
    """Step size η."""
    schedule: Annotated[Component, registry.SCHEDULES] = Field(default_factory=registry.SCHEDULES.make)
    """Course of η over the rounds."""
    scaling: Literal["none", "linear", "square_root"] = "none"
    """Growth of η with the cohort: linear multiplies η by cohort / base_cohort, square_root by its root."""
    base_cohort: PositiveInt = 1
    """Number of clients in a round for which lr is meant; used by scaling."""
    momentum: DecayRate = 0.0
    """Momentum ρ in [0, 1), for sgd only."""
    nesterov: bool = False
    """True for Nesterov's momentum, for sgd only."""
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.999), strict=False)
    """Decay rates of the two moments, for adam and adamw only."""
    eps: PositiveFloat = 1e-8
    """Number added to the root of the second moment, for adam and adamw only."""
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0
    """Weight decay λ: λx is added to the gradient; under adamw the decay is decoupled from the gradient."""
    batch_size: PositiveInt = 16
    """Samples in a batch; the last batch of an epoch may be shorter."""
    accumulate: PositiveInt = 1
    """Batches whose samples share one step: a step sees up to batch_size × accumulate samples."""
    epochs: PositiveInt | None = None
    """Passes over the client's data; 1 where neither epochs nor steps is given."""
    steps: PositiveInt | None = None
    """Optimizer steps, in place of epochs."""
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    """Arithmetic of forward and backward passes; float32 means the model's own type, so that float64 stays float64.
    tf32: float32 whose products GPUs may round to TF32, where they have it; elsewhere it is float32, which a run says.
    Evaluation is in float32."""
    devices: PositiveInt = 1
    """Number of devices that train one client together: GPUs where there are some, otherwise processes on the CPU."""
    parallel: Annotated[Component, registry.PARALLELS] | None = None
    """Way in which these devices share the work; null with several devices: ddp."""

    def lr_in(self, number: int, count: int, cohort: int) -> float:
        """Learning rate η in a round.

        Args:
            number: number of the round, from 1.
            count: number of rounds of the run.
            cohort: number of clients that take part.
        """
        scale = 1.0
        if self.scaling != "none":
            ratio = cohort / self.base_cohort
            scale = ratio if self.scaling == "linear" else math.sqrt(ratio)
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
        if self.parallel is not None and self.devices == 1:
            raise ValueError(
                f"parallel needs devices of 2 or more, got devices=1 and parallel={self.parallel.kind}: raise devices, "
                "or remove parallel"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0, got momentum=0: raise momentum or drop nesterov")
        return self


class Execution(Section):
    """Execution of a simulation. Batching and groups change results by rounding only, workers not at all."""

    batching: Literal["auto", "on", "off"] = "auto"
    """Training of clients in groups, one operation for a whole group; auto: where the model allows it and it pays."""
    group: PositiveInt | Literal["auto"] = "auto"
    """Largest number of clients in a group; fewer where smaller groups are faster, or where their models would not fit
    into the cache, or a fifth of a GPU's memory. With batching: on, a group that is given is that of the run. auto: 32
    on a CPU, 128 on GPUs. The run's experiment.yaml has the number, which stays when it is resumed."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """Number of processes that train, one thread each; 0: this process trains; auto: up to one for each core or GPU,
    where they make the run faster."""
    device: DeviceName = "auto"
    """Device that trains and evaluates: auto, cpu, cuda, a GPU such as cuda:1, or mps. auto: GPUs where there are any,
    else the CPU; with GPUs as with cuda workers are dealt all of them in turn."""
    deterministic: bool = True
    """True if GPUs compute by deterministic algorithms alone, so that a run repeats to the bit on GPUs of one kind; an
    operation that has none is refused. On a CPU nothing changes."""
    executor: Annotated[Component, registry.EXECUTORS] | None = None
    """Executor of the clients' work; null: in_process without workers, and workers with some. Where one is named,
    workers: auto means as many as cores or GPUs, whether they pay or not."""

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
    """Number of checkpoints that stay; older ones are deleted."""


def _ring_where_peers_mix(values: dict[str, Any]) -> Component | None:
    algorithm = values["algorithm"].make()
    # Rules that choose their own partners would ignore a graph.
    if lacks(algorithm, Feature.NEIGHBOURS) or lacks(algorithm, Feature.GIVEN_NEIGHBOURS):
        return None
    return registry.TOPOLOGIES.make(getattr(algorithm, "topology", "ring"))


def _rounds_of_the_algorithm(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return getattr(values["algorithm"].make(), "default_rounds", {}) if "algorithm" in values else {}


def _codecs_of_the_algorithm(key: str, values: dict[str, Any]) -> tuple[Component, ...]:
    return tuple(map(registry.CODECS.make, getattr(values["algorithm"].make(), key, ())))


def _clients_where_models_are_theirs(values: dict[str, Any]) -> Component:
    # Under masks no client tells a score of its own, and noise does not cover scores.
    is_open = values.get("secure_aggregation") is None and values.get("privacy") is None
    scores_itself = values.get("app") is not None and is_open
    are_theirs = scores_itself or lacks(values["algorithm"].make(), Feature.GLOBAL_MODEL)
    return registry.EVALUATIONS.make("clients" if are_theirs else "coordinator")


_METRICS_OF_LOSSES = {
    "cross_entropy": ("accuracy",),
    "bce": ("accuracy",),
    "mse": ("mae",),
    "huber": ("mae",),
    "cox": ("c_index",),
}

_TAKEN = ("loss", "round", "client", "samples", "variant", "seed", "fold")  # by other columns of results


def _of_no_app(family: Family[Any]) -> Callable[[dict[str, Any]], Any]:
    """Default of a section that an app takes the place of: the family's, or None where there is an app."""
    return lambda values: family.make() if values.get("app") is None else None


def _metrics_of_the_loss(values: Mapping[str, Any]) -> tuple[MetricSection, ...]:
    loss = values["loss"]
    # A loss of the user's own tells nothing of a metric: none is better than a wrong one.
    return tuple(map(registry.METRICS.make, _METRICS_OF_LOSSES.get(loss.kind, ()) if loss else ()))


class Experiment(Document):
    """The validated description of a run, YAML ⇄ Python.

    Every key has a default that :meth:`dump` shows. A ``kind`` is a built-in name or ``python:package.module:Name``.
    ``data``, ``model``, ``loss`` and ``metrics`` that :func:`fed.simulate` is given stand in the place of the defaults;
    one that the experiment names itself is not given twice.

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
    """Name of the run in reports and folders."""
    seed: NonNegativeInt = 0
    """Seed of every random draw."""
    data_seed: NonNegativeInt | None = None
    """Seed of the data, in place of seed: draws of a source, its partition, samples that are held out; null: seed."""
    app: AppSection | None = None
    """Clients that train with code of their own, in the place of data, model, loss and metrics; null for none."""
    data: Annotated[DataSection, registry.DATA] | None = Field(default_factory=_of_no_app(registry.DATA))
    """Samples to learn from, and their partition among clients; null where data are given in Python."""
    table: TableSection | None = None
    """Schema of the clients' tables, by which columns are found by name, on nodes too; null: every table has the same
    columns in the same order."""
    model: Annotated[ModelSection, registry.MODELS] | None = Field(default_factory=_of_no_app(registry.MODELS))
    """Model that is trained; null where a model is given in Python."""
    fixed: FixedSection | None = None
    """File of the parameters that are not trained; null: they are as the model makes them. Nodes name their own files,
    or are sent the server's once."""
    loss: Annotated[Component, registry.LOSSES] | None = Field(default_factory=_of_no_app(registry.LOSSES))
    """Function of (output, target) that training makes small; null where one is given in Python."""
    metrics: Annotated[tuple[Annotated[MetricSection, registry.METRICS], ...], Field(strict=False)] | None = Field(
        default_factory=_metrics_of_the_loss
    )
    """Metrics that evaluation computes beside the loss; reports compare runs by the first one. The default suits a
    built-in loss; null where metrics are given in Python."""
    collate: Annotated[Component, registry.COLLATES] | None = None
    """Function that makes a batch of a list of samples, such as pad; null where samples of one shape are stacked, or
    where data given in Python bring one."""
    local: Local = Local()
    """Local training: a client's work in a round."""
    algorithm: Annotated[Component, registry.ALGORITHMS] = Field(default_factory=registry.ALGORITHMS.make)
    """Algorithm that makes one model of the clients' work."""
    topology: Annotated[Component, registry.TOPOLOGIES] | None = Field(default_factory=_ring_where_peers_mix)
    """Graph that says who is whose neighbour, for algorithms over mix only; a ring unless given."""
    rounds: Annotated[Component, registry.ROUNDS] = Field(
        default_factory=lambda values: registry.ROUNDS.make(**_rounds_of_the_algorithm(values))
    )
    """Policy on who trains when, and how often; synchronous rounds of all clients unless the experiment or the
    algorithm says otherwise."""
    stages: Annotated[tuple[Annotated[Component, registry.STAGES], ...], Field(strict=False)] | None = None
    """Changes of clients' updates before they are encoded, and of their mean, first to last; null for none."""
    uplink: Annotated[tuple[Annotated[Component, registry.CODECS], ...], Field(strict=False)] = Field(
        default_factory=partial(_codecs_of_the_algorithm, "uplink")
    )
    """Chain of codecs for clients' messages, first to last; none unless the experiment or the algorithm names some."""
    error_feedback: Annotated[Component, registry.ERROR_FEEDBACKS] = Field(
        default_factory=registry.ERROR_FEEDBACKS.make
    )
    """Treatment of the error of a chain of codecs, the update minus the decoded update."""
    downlink: Annotated[tuple[Annotated[Component, registry.CODECS], ...], Field(strict=False)] = Field(
        default_factory=partial(_codecs_of_the_algorithm, "downlink")
    )
    """Chain of codecs for the model's move from round to round, sent to clients; none unless named, as for uplink."""
    secure_aggregation: Annotated[Component, registry.SECURE_AGGREGATIONS] | None = None
    """Masks by which the coordinator learns the sum of clients' messages alone; null for none."""
    privacy: Annotated[Component, registry.PRIVACIES] | None = None
    """Differential privacy: the bound on what a client changes, the noise, and the budget; null for none."""
    hierarchy: Annotated[Component, registry.HIERARCHIES] | None = None
    """Edge coordinators between clients and coordinator; null for none."""
    devices: Annotated[Component, registry.DEVICES] = Field(default_factory=registry.DEVICES.make)
    """Devices of simulated clients: their speed, their availability, and how often they fail."""
    evaluation: Annotated[Component, registry.EVALUATIONS] = Field(default_factory=_clients_where_models_are_theirs)
    """Scoring of models, by the coordinator on a test set or by clients; by the coordinator unless given, or by clients
    where the algorithm is for models of their own, or an app trains."""
    adversaries: Annotated[AdversariesSection, registry.ADVERSARIES] | None = None
    """Simulated clients that attack, and their attack; null for none."""
    checkpoints: Checkpointing = Checkpointing()
    """State from which an interrupted run resumes."""
    tracking: tuple[Annotated[TrackerSection, registry.TRACKERS], ...] | None = Field(None, strict=False)
    """Trackers that the run's numbers go to, such as mlflow; they change no result. null for none."""
    simulation: Execution = Execution()
    """Computation of a simulation: batching and worker processes."""

    if TYPE_CHECKING:  # sections are given as mappings, whatever type they become

        def __init__(self, **keys: Any) -> None: ...

    @field_validator("rounds", mode="wrap")
    @classmethod
    def _complete_rounds(cls, keys: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        defaults = _rounds_of_the_algorithm(info.data)
        # Keys of one kind of rounds mean nothing to another.
        if not defaults or not isinstance(keys, dict) or keys.get("kind", defaults["kind"]) != defaults["kind"]:
            return handler(keys)
        rounds = handler({**defaults, **keys})
        rounds.model_fields_set.difference_update(defaults.keys() - keys.keys())  # an override may change the algorithm
        return rounds

    @field_validator("tracking", mode="before")
    @classmethod
    def _refuse_trackers_themselves(cls, trackers: Any) -> Any:
        for tracker in trackers if isinstance(trackers, list | tuple) else ():
            if callable(getattr(tracker, "begin", None)) and callable(getattr(tracker, "log", None)):
                raise ValueError(
                    f"must name its trackers, got an object of {type(tracker).__name__}: give it to the run, as "
                    "observers=[fed.server.tracking.Tracking(logger)]"
                )
        return trackers

    @field_validator("app")
    @classmethod
    def _hold_metric_names(cls, app: AppSection | None) -> AppSection | None:
        if app is not None:
            check_metric_names(app.metrics)
        return app

    @field_validator("metrics")
    @classmethod
    def _hold_names(cls, metrics: tuple[MetricSection, ...] | None) -> tuple[MetricSection, ...] | None:
        if metrics is not None:
            check_metric_names([metric.called for metric in metrics])
        return metrics

    @model_validator(mode="after")
    def _hold_sections_to_each_other(self) -> Self:
        check_combination(self)
        check_standardizing(self)
        # Refused when the experiment is read, not after its data are loaded.
        if self.adversaries is not None and self.data is not None and isinstance(self.data.clients, int):
            self.adversaries.attackers_among(self.data.clients)
        return self

    @property
    def data_streams(self) -> Streams:
        """Streams of the data: draws of a source, its partition among clients, samples that are held out."""
        return Streams(self.seed if self.data_seed is None else self.data_seed)

    def override(self, values: dict[str, Any]) -> Self:
        """The same experiment with other values.

        Args:
            values: path of a key → its value, such as ``{"rounds.count": 5}``. A mapping replaces the whole section.

        Raises:
            InvalidExperiment: one line for each thing wrong.
        """
        return type(self)(**with_overrides(self.given_keys(), values))


def check_given_once(experiment: Experiment, given: Collection[str]) -> None:
    """Refuse parts that are given in Python and named in the experiment: one of the two would be left out.

    Args:
        experiment: experiment of a run.
        given: names of the parts that are given in Python: "data", "model", "loss", "metric", "app".

    Raises:
        InvalidExperiment: if the experiment names one of them itself.
    """
    for name in given:
        key = {"metric": "metrics", "app": "app.kind"}.get(name, name)
        named = _written(experiment.app, "kind") if name == "app" else _written(experiment, key)
        if named is not None:
            kinds = [str(getattr(part, "kind", part)) for part in (named if isinstance(named, tuple) else (named,))]
            freezes = ""
            if getattr(named, "train", None) is not None:
                freezes = ", and set requires_grad to False in the model itself in place of train"
            raise InvalidExperiment(
                f"{key} must be given once, got {', '.join(kinds) or 'none'} in the experiment and {name}= in Python: "
                f"leave out {name}=, or write {key}: null in the experiment, as experiment.override({{{key!r}: None}}) "
                f"does{freezes}"
            )


def _written(section: Section | None, key: str) -> Any:
    """The value of a key that was written; None where it is a default."""
    return getattr(section, key) if section is not None and key in section.model_fields_set else None


def check_metric_names(names: Sequence[str]) -> None:
    """Refuse metrics that results cannot tell apart by name.

    Raises:
        InvalidExperiment: if two have one name, or one has a name that is no key, or that of a deviation.
    """
    for number, name in enumerate(names):
        is_key = re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name, re.ASCII)
        # Results have the deviation of a value under its name and _std.
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
    # Copies, since variants of a comparison must not share a list.
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
