"""Section ``app``: clients that train with code of their own, in any framework."""

from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from fed.config.validation import Section

__all__ = ["AppSection", "ArraySpec"]

_PYTHON = "^python:[^:]+:[^:]+$"


class ArraySpec(Section):
    """Name, type and shape of one array of an app's model."""

    name: str
    """Name of the array; of a list's arrays their numbers, from 0."""
    dtype: Annotated[str, Field(pattern="^(float(16|32|64)|u?int(8|16|32|64)|bool)$")]
    """Type of its numbers, by NumPy's name."""
    shape: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
    """Length of each dimension; empty for a single number."""


class AppSection(Section):
    """Clients that train with code of their own, in any framework, on data of their own."""

    kind: Annotated[str, Field(pattern=_PYTHON)] | None = None
    """Class of a client, function that makes one, or ClientApp of Flower, as python:package.module:Name; null where one
    is given in Python, or each node names its own."""
    clients: PositiveInt | None = None
    """Number of clients: a simulation has clients 0, 1, …; nodes are told the number as num-partitions."""
    config: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Values that each client is told with every task, beside those of the run; Flower's run_config."""
    metrics: Annotated[tuple[str, ...], Field(strict=False)] = ("accuracy",)
    """Names of the metrics in the answers of evaluate; results are compared by the first one."""
    initial: str | None = None
    """First arrays: a file (.npz, .safetensors), or python:package.module:Name of a function or class that makes arrays
    or a model; null for those of the first client's initial() or get_parameters(config)."""
    arrays: Annotated[tuple[ArraySpec, ...], Field(strict=False)] | None = None
    """Name, type and shape of each array; null for those of the first arrays. A server tells them to its nodes."""

    @model_validator(mode="before")
    @classmethod
    def _take_a_name_for_a_kind(cls, keys: Any) -> Any:
        return {"kind": keys} if isinstance(keys, str) else keys

    @field_validator("initial")
    @classmethod
    def _hold_initial(cls, initial: str | None) -> str | None:
        if initial is not None and not initial.startswith("python:") and not initial.endswith((".npz", ".safetensors")):
            raise ValueError(
                "must be a file whose name ends in .npz or .safetensors, or python:package.module:Name, got "
                f"{initial!r}"
            )
        return initial
