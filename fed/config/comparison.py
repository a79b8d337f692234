"""Comparison: variants of an experiment, each run with every seed, as one validated description."""

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, NonNegativeInt, PositiveInt, PrivateAttr, model_validator
from pydantic_core import CoreSchema

from fed.config.document import Document
from fed.config.experiment import Experiment, with_overrides
from fed.config.validation import Section
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams

__all__ = [
    "Comparison",
    "Distribution",
    "Random",
    "Repetition",
    "Variant",
    "repetition_of",
    "repetition_text",
    "seed_of",
]

Repetition: TypeAlias = int | tuple[int, int]
"""Seed of a run; in a comparison with folds a pair (seed, fold)."""
_SEEDS = ("seed", "data_seed")
_BOUNDS = ("centralized", "local")
"""Algorithms that bound what the others can do."""
_Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]


class _ExperimentKeys:
    """Mark of a mapping that holds an experiment's keys, for the JSON schema."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(Experiment.__pydantic_core_schema__)


class Variant(Section):
    """Named variant: every other key replaces a section of the base, or the value at its dotted path."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    """Name of the variant in tables, curves and folders."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = handler.resolve_ref_schema(handler(schema))
        experiment = handler.resolve_ref_schema(handler(Experiment.__pydantic_core_schema__))
        own["properties"] = {**experiment["properties"], **own["properties"]}
        del own["properties"]["seed"]  # the comparison's seeds decide
        # Pydantic takes any key here, and the variant's experiment checks it: an editor should mark a slip at once.
        own["additionalProperties"] = False
        own["patternProperties"] = {r"\.": {"description": "A dotted path such as rounds.count"}}
        return own


class Distribution(Section):
    """Source of a random value: exactly one of these."""

    choice: Annotated[list[Any], Field(min_length=1)] | None = None
    """Values to draw from, each equally likely."""
    uniform: _Bounds | None = None
    """Bounds [low, high) of a number."""
    log_uniform: _Bounds | None = None
    """Bounds [low, high), low > 0, of a number whose logarithm is uniform."""
    integer: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """Bounds [low, high] of a whole number, both included."""

    @model_validator(mode="after")
    def _hold_bounds(self) -> Self:
        given = {name: value for name, value in self if value is not None}
        if len(given) != 1:
            raise ValueError(f"must hold exactly one of choice, uniform, log_uniform and integer, got {list(given)}")
        name, value = next(iter(given.items()))
        if name != "choice" and value[0] >= value[1]:
            raise ValueError(f"{name} must be [low, high] with low < high, got {value}")
        if name == "log_uniform" and value[0] <= 0:
            raise ValueError(f"log_uniform must be [low, high] with low > 0, got {value}")
        return self

    def draw(self, streams: Streams, *name: object) -> Any:
        """Value from the stream of that name; numbers have five significant digits, so that names show them whole."""
        generator = streams.generator("comparison", *name)
        if self.choice is not None:
            # Variants must not share a list.
            return copy.deepcopy(self.choice[int(generator.integers(len(self.choice)))])
        if self.integer is not None:
            return int(generator.integers(self.integer[0], self.integer[1], endpoint=True))
        low, high = self.uniform or self.log_uniform or [0.0, 1.0]
        share = generator.random()
        value = low + share * (high - low) if self.uniform else low * (high / low) ** share
        # The value itself is rounded, so that a run can be repeated from the name in a table.
        return float(f"{value:.5g}")


class Random(Section):
    """Random variants, each with its own draw of every key."""

    trials: PositiveInt
    """Number of variants."""
    seed: NonNegativeInt = 0
    """Seed of the draws only; a trial's values depend neither on the number of trials nor on other keys."""
    keys: Annotated[dict[str, Distribution], Field(min_length=1)]
    """Dotted path of a key → distribution of its value."""


def _seeds_of_the_base(values: dict[str, Any]) -> list[int]:
    seed = values.get("base", {}).get("seed")
    # A wrong seed has a sentence of its own, from the base; True is an int, and no seed.
    return [seed] if type(seed) is int and seed >= 0 else [0]


class Comparison(Document):
    """The validated description of a comparison, YAML ⇄ Python.

    ``base`` holds an experiment's keys. Exactly one of ``compare``, ``grid`` and ``random`` says how the variants
    differ from it, with the semantics of :meth:`Experiment.override`: a mapping replaces the whole section.

    Raises:
        InvalidExperiment: on construction, one line for each thing wrong, in whichever variant it is.

    Example:
        >>> comparison = Comparison(
        ...     base={"rounds": {"count": 5}},
        ...     compare=[{"name": "FedAvg"}, {"name": "FedProx", "algorithm": {"kind": "fedprox", "mu": 0.1}}],
        ... )
        >>> comparison.variants()["FedProx"].algorithm.mu
        0.1
        >>> list(Comparison(grid={"local.lr": [0.1, 0.01], "rounds.count": [5]}).variants())
        ['local.lr=0.1, rounds.count=5', 'local.lr=0.01, rounds.count=5']
    """

    name: Annotated[str, Field(min_length=1)] = "comparison"
    """Title of the report."""
    base: Annotated[dict[str, Any], _ExperimentKeys()] = Field(default_factory=dict)
    """Keys of an experiment that the variants have in common."""
    compare: Annotated[list[Variant], Field(min_length=1)] | None = None
    """Variants by name, each with the keys that it changes."""
    grid: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)] | None = None
    """Dotted path of a key → its values; every combination is a variant."""
    random: Random | None = None
    """Variants whose values are drawn at random."""
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = Field(default_factory=_seeds_of_the_base)
    """Seeds that every variant is run with, once each; the base's own seed unless given."""
    vary: Literal["both", "training", "data"] = "both"
    """Randomness that the seeds set: training (data_seed stays the base's), data (seed stays the base's), or both."""
    folds: Annotated[int, Field(ge=2)] | None = None
    """Number K of folds of a cross-validation over each client's samples: K runs for each variant and seed; null for
    none."""
    baseline: str | None = None
    """Variant that differences are taken to; the first that is neither centralized nor local, unless given."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Rate at which intervals of differences cover the true one."""
    target: float | None = None
    """Value of the first metric on test data; rounds, bytes and time are counted until it is reached; null for none."""
    jobs: PositiveInt | Literal["auto"] | None = None
    """Number of runs side by side, which changes no bit of a result; auto: one for each core; null: whoever starts the
    comparison decides."""

    _variants: dict[str, Experiment] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _take_an_experiment_as_base(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and isinstance(keys.get("base"), Experiment):
            return {**keys, "base": keys["base"].given_keys()}
        return keys

    @model_validator(mode="after")
    def _hold_every_variant(self) -> Self:
        given = [name for name in ("compare", "grid", "random") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"must hold exactly one of compare, grid and random, got {given or 'none of them'}")
        for key, values in (self.grid or {}).items():
            # As texts, for lists and mappings have no hash.
            _hold_distinct(f"grid.{key}", [json.dumps(value, sort_keys=True, default=str) for value in values])
        # One seed twice would count as two independent runs.
        _hold_distinct("seeds", self.seeds)
        _hold_distinct("names of variants", [name for _, name, _ in self._changes()])
        self._variants.update(self._validated())
        return self

    def variants(self) -> dict[str, Experiment]:
        """Name → the experiment in force; its seed is the first of ``seeds``."""
        return dict(self._variants)

    def repetitions(self) -> list[Repetition]:
        """Seeds that each variant is run with; with folds pairs (seed, fold), folds from 1."""
        if self.folds is None:
            return list(self.seeds)
        return [(seed, fold) for seed in self.seeds for fold in range(1, self.folds + 1)]

    def repeated(self, variant: Experiment, repetition: Repetition) -> Experiment:
        """The experiment of one run.

        Args:
            variant: one of :meth:`variants`.
            repetition: one of :meth:`repetitions`.
        """
        return variant.override(self._keys_of(repetition))

    def in_force(self) -> dict[str, Any]:
        """Every value in force, as a document that means the same.

        ``base`` holds all sections of the base, or of the first variant where the base is no experiment by itself. Each
        variant holds the sections that differ from it, whole.
        """
        variants = [experiment.dump() for experiment in self._variants.values()]
        for variant in variants:
            del variant["data_seed" if self.vary == "data" else "seed"]  # the comparison's seeds decide
        first = variants[0]
        made, _ = _made(self.base)
        of_the_base = first if made is None else made.dump()
        base = {key: first[key] if key in _SEEDS else of_the_base[key] for key in first if key != "name"}
        return {
            "name": self.name,
            "base": base,
            "compare": [
                {key: value for key, value in one.items() if key not in base or base[key] != value} for one in variants
            ],
            **{key: getattr(self, key) for key in ("seeds", "vary", "folds", "confidence", "target", "jobs")},
            "baseline": self.baseline_in_force(),
        }

    def baseline_in_force(self) -> str:
        """Name of the variant that differences are taken to."""
        if self.baseline is not None:
            return self.baseline
        names = [name for name, variant in self._variants.items() if variant.algorithm.kind not in _BOUNDS]
        # A bound is no baseline: nearly everything differs from it significantly.
        return (names or list(self._variants))[0]

    def _keys_of(self, repetition: Repetition) -> dict[str, Any]:
        """Path of a key → the value that a repetition gives it."""
        seed, fold = repetition if isinstance(repetition, tuple) else (repetition, None)
        keys: dict[str, Any] = {"data_seed" if self.vary == "data" else "seed": seed}
        return keys if fold is None else {**keys, "data.fold": {"number": fold, "of": self.folds}}

    def _seeds_that_stay(self) -> dict[str, int]:
        seed = _seeds_of_the_base({"base": self.base})[0]
        data_seed = self.base.get("data_seed")
        kept = {"training": {"data_seed": seed if data_seed is None else data_seed}, "data": {"seed": seed}}
        return kept.get(self.vary, {})

    def _validated(self) -> dict[str, Experiment]:
        variants: dict[str, Experiment] = {}
        problems = self._problems_of_the_base()
        # The base is made alone as well: an error of its own is then told once, and not for every variant.
        of_the_base = _made(self.base)[1]
        of_the_seeds = self._seeds_that_stay() | {"seed" if self.vary != "data" else "data_seed": self.seeds[0]}
        for place, name, changes in self._changes():
            if "seed" in changes:
                problems.append(f"{place}: seed: a comparison runs every variant with all of its seeds: remove it")
            if "data_seed" in changes:
                problems.append(f"{place}: data_seed: a comparison deals the same data to every variant: remove it")
            made, found = _made(with_overrides(self.base, changes) | {"name": name, **of_the_seeds})
            problems += [f"base: {line}" if line in of_the_base else f"{place}: {line}" for line in found]
            if made is not None and self.folds is not None:
                problems += [f"{place}: {line}" for line in self._problems_of_folds(made)]
            variants |= {} if made is None else {name: made}
        if self.baseline is not None and self.baseline not in variants and not problems:
            problems.append(
                f"baseline must be the name of a variant, one of {', '.join(variants)}, got {self.baseline}: "
                "correct it, or leave it out"
            )
        if problems:
            raise InvalidExperiment("\n".join(dict.fromkeys(problems)))
        return variants

    def _problems_of_the_base(self) -> list[str]:
        data_seed = self.base.get("data_seed")
        if self.vary == "training" or data_seed is None:
            return []
        remedy = "remove it, or write vary: training"
        return [f"base: data_seed: the comparison's seeds set it with vary: {self.vary}, got {data_seed}: {remedy}"]

    def _problems_of_folds(self, variant: Experiment) -> list[str]:
        """Sentences on why a variant cannot be run fold by fold."""
        if variant.data is None:
            return ["folds need data that the experiment names, got data: null: name a source, as python:module:name"]
        if variant.data.fold is not None:
            return ["data.fold: the comparison's folds set it: remove it, or remove folds"]
        return _made(with_overrides(variant.given_keys(), self._keys_of(self.repetitions()[0])))[1]

    def _changes(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Place, name and changes of each variant."""
        for index, variant in enumerate(self.compare or ()):
            yield f"compare[{index}] {variant.name}", variant.name, variant.model_extra or {}
        if self.grid is not None:
            for values in product(*self.grid.values()):
                cell = dict(zip(self.grid, values, strict=True))
                yield f"grid {_named(cell)}", _named(cell), cell
        if self.random is not None:
            streams = Streams(self.random.seed)
            keys = self.random.keys
            for trial in range(self.random.trials):
                # The key is part of the stream's name: a key more leaves the other draws as they were.
                drawn = {key: keys[key].draw(streams, key, trial) for key in keys}
                name = f"trial {trial + 1}: {_named(drawn)}"
                yield f"random {name}", name, drawn


def _made(keys: dict[str, Any]) -> tuple[Experiment | None, list[str]]:
    """The experiment of these keys, or the sentences on their errors."""
    try:
        return Experiment(**{str(key): value for key, value in keys.items()}), []
    except InvalidExperiment as error:
        return None, str(error).splitlines()


def seed_of(repetition: Repetition) -> int:
    """Seed of a repetition."""
    return repetition[0] if isinstance(repetition, tuple) else repetition


def repetition_text(repetition: Repetition, joint: str = "-") -> str:
    """A repetition in words.

    Args:
        repetition: seed, or (seed, fold).
        joint: text between its words.

    Example:
        >>> repetition_text(3), repetition_text((3, 1), " ")
        ('3', '3 fold 1')
    """
    if isinstance(repetition, int):
        return f"{repetition}"
    return joint.join((f"{repetition[0]}", "fold", f"{repetition[1]}"))


def repetition_of(text: str) -> Repetition:
    """A repetition from its words.

    Example:
        >>> repetition_of("3"), repetition_of(repetition_text((3, 1)))
        (3, (3, 1))
    """
    seed, _, fold = text.partition("-fold-")
    return (int(seed), int(fold)) if fold else int(seed)


def _hold_distinct(what: str, values: list[Any]) -> None:
    twice = [value for value, times in Counter(values).items() if times > 1]
    if twice:
        raise ValueError(f"{what} must be distinct, got {twice[0]} more than once")


def _named(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_readable(value)}" for key, value in changes.items()) or "base"


def _readable(value: Any) -> str:
    """A value in a name: ``0.1``, ``fedavg``, ``fedprox(mu=0.1)``."""
    if isinstance(value, dict) and isinstance(value.get("kind"), str):
        others = {key: inner for key, inner in value.items() if key != "kind"}
        return f"{value['kind']}({_named(others)})" if others else str(value["kind"])
    return value if isinstance(value, str) else json.dumps(value, default=str)
