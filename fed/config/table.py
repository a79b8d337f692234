"""Schema of a table: its columns by name with their types, its target, and what stands for a cell that is empty."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, model_validator

from fed.config.compatibility import Feature, Sections, lacks
from fed.config.validation import Section
from fed.errors import InvalidExperiment
from fed.quantities import counted

__all__ = ["ColumnSection", "TableSection", "check_standardizing"]

_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Moments: TypeAlias = Annotated[
    tuple[_Real, Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None], Field(strict=False)
]


class ColumnSection(Section):
    """One feature of a table: a real number, or one of some categories."""

    values: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Categories in their order; each is a feature that is 1 or 0. null: the column holds real numbers."""
    missing: float | str | None = None
    """Number, or category, that an empty cell stands for; null: the section's rule holds."""
    bounds: Annotated[tuple[_Real, _Real], Field(strict=False)] | None = None
    """Lowest and highest number that a cell may hold; null: any. Needed for standardize: federated under secure
    aggregation."""

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, keys: Any) -> Any:
        """Take ``real`` and a list of categories as a whole column."""
        if keys == "real":
            return {}
        if isinstance(keys, list | tuple):
            keys = {"values": keys}
        if not isinstance(keys, dict):
            raise ValueError(f"must be real, a list of categories, or a mapping with bounds or values, got {keys!r}")
        return {**keys, "values": _as_texts(keys["values"])} if keys.get("values") is not None else keys

    @model_validator(mode="after")
    def _hold_what_spans_keys(self) -> Self:
        if self.values is None:
            if isinstance(self.missing, str):
                raise ValueError(f"missing must be a number where the column holds numbers, got {self.missing!r}")
            if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
                raise ValueError(f"bounds must be the lowest number and a higher one, got {list(self.bounds)}")
            return self
        _check_once("values", self.values)
        if self.bounds is not None:
            raise ValueError("bounds are of numbers, and values of categories: give one of them")
        if self.missing is not None and self.missing not in self.values:
            raise ValueError(f"missing must be one of the categories {', '.join(self.values)}, got {self.missing!r}")
        return self


class TableSection(Section):
    """Schema of the tables of all clients: columns are found by name, wherever they stand."""

    features: Annotated[dict[_Name, ColumnSection], Field(min_length=1)]
    """Features in their order: name of the column → real, its list of categories, or a mapping with more."""
    target: _Name | Annotated[tuple[_Name, ...], Field(strict=False, min_length=1)] = "label"
    """Column to predict, or a list of several with real numbers, such as a survival's time and event."""
    classes: Annotated[tuple[str, ...], Field(strict=False, min_length=2)] | None = None
    """Classes of the target in their order, as its cells name them; null: the target holds real numbers."""
    missing: Literal["refuse", "drop"] = "refuse"
    """Rule for empty cells that no feature's own missing covers: refuse the table, or drop the row."""
    standardize: Literal["federated"] | dict[str, _Moments] | None = None
    """Mean and standard deviation of each real feature to standardize; federated: those over all clients, of all real
    features, found before the first round; null: none. A deviation of null is found likewise, around the mean."""

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, keys: Any) -> Any:
        if not isinstance(keys, dict) or keys.get("classes") is None:
            return keys
        return {**keys, "classes": _as_texts(keys["classes"])}

    @model_validator(mode="after")
    def _hold_what_spans_keys(self) -> Self:
        targets = self.targets
        _check_once("target", targets)
        if self.classes is not None:
            _check_once("classes", self.classes)
            if not isinstance(self.target, str):
                raise ValueError("classes are of one target, got a list of several: name one, or remove classes")
        for name in targets:
            if name in self.features:
                raise ValueError(f"target must be no feature, got {name!r} as both: remove it from features")
        for name in self.standardize if isinstance(self.standardize, dict) else ():
            if name not in self.reals:
                raise ValueError(f"standardize must name features of real numbers, got {name!r}: remove it")
        if self.standardize == "federated" and not self.reals:
            raise ValueError("standardize: federated is of real numbers, got categories alone: remove it")
        return self

    @property
    def reals(self) -> tuple[str, ...]:
        """Names of the features that are numbers, in their order."""
        return tuple(name for name, column in self.features.items() if column.values is None)

    @property
    def moments(self) -> dict[str, tuple[float | None, float | None]]:
        """Feature to standardize → its mean and its deviation, each None where clients have yet to find it."""
        if self.standardize == "federated":
            return dict.fromkeys(self.reals, (None, None))
        given = self.standardize or {}
        return {name: given[name] for name in self.reals if name in given}

    @property
    def sought(self) -> tuple[str, ...]:
        """Names of the features whose mean or deviation clients have yet to find, in their order."""
        return tuple(name for name, (_, deviation) in self.moments.items() if deviation is None)

    @property
    def sought_in_words(self) -> str:
        """Numbers that clients are asked for next, such as "the mean of 3 columns"; empty where there are none."""
        missing = [self.moments[name] for name in self.sought]
        if not missing:
            return ""
        what = "mean" if any(mean is None for mean, _ in missing) else "standard deviation"
        return f"the {what} of {counted(len(missing), 'column')}"

    def unscaled(self) -> "TableSection":
        """The same schema without what it says on standardizing."""
        return self.model_copy(update={"standardize": None})

    def before_exchange(self) -> "TableSection":
        """The same schema, or one that standardizes nothing where clients have yet to find by what."""
        return self.unscaled() if self.sought else self

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the columns to predict."""
        return (self.target,) if isinstance(self.target, str) else self.target

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of a model's inputs in their order: a real column's own, and column=category of each category."""
        return tuple(
            name if column.values is None else f"{name}={value}"
            for name, column in self.features.items()
            for value in (column.values or (None,))
        )


def check_standardizing(experiment: Sections) -> None:
    """Refuse to have clients find means and deviations where their exact sums have no place.

    Raises:
        InvalidExperiment: if there is no coordinator, sums would be noisy, attacked, or without bounds in fixed point.
    """
    table = experiment.table
    if table is None or not table.sought:
        return
    problem = ""
    if experiment.app is not None:
        problem = "clients whose tables fed reads, got an app, which reads its own"
    elif lacks(experiment.algorithm.make(), Feature.COORDINATOR):
        problem = f"a coordinator that adds up what clients find, got algorithm {experiment.algorithm.kind}"
    elif experiment.privacy is not None:
        problem = "clients' sums as they are, got privacy, whose noise does not cover them"
    elif experiment.stages:
        problem = "clients' sums as they are, got stages, which would not change them"
    elif experiment.adversaries is not None:
        problem = "honest clients, for any of them can shift a sum, got adversaries"
    if problem:
        raise InvalidExperiment(
            f"table.standardize: federated needs {problem}: write means and deviations, such as {{age: [40, 12]}}"
        )
    unbounded = [name for name in table.sought if table.features[name].bounds is None]
    if experiment.secure_aggregation is not None and unbounded:
        raise InvalidExperiment(
            "table.standardize: federated needs bounds of each real feature under secure_aggregation, whose sums "
            f"have a range, got none of {unbounded[0]!r}: write {{bounds: [lowest, highest]}}"
        )


def _as_texts(names: Any) -> Any:
    """Names as the cells of a table have them: YAML reads a class 1 as a number."""
    if not isinstance(names, list | tuple):
        return names
    return [str(name) if type(name) is int else name for name in names]


def _check_once(key: str, names: Sequence[str]) -> None:
    stripped = [name.strip() for name in names]
    if stripped != list(names) or len(set(names)) < len(names):
        raise ValueError(f"{key} must name each once, without blanks around the name, got {list(names)}")
