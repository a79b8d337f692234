"""Hyper-parameters of an algorithm or a policy, checked against their annotations on construction."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, cast

from pydantic import Field, ValidationError

from fed.config.compatibility import Combinable
from fed.config.components import keys_of
from fed.config.validation import sentences
from fed.errors import ValueRange

__all__ = ["DecayRate", "Hyperparameters"]

DecayRate: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Share of its former value that a running mean or a momentum keeps in a step, in [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(Combinable):
    """Frozen dataclass whose annotations are checked on construction: ``rate: Annotated[float, Gt(0)] = 0.1``.

    Raises:
        ValueRange: on construction, if a field is of another type or outside the range of its annotation.

    Example:
        >>> from dataclasses import dataclass
        >>> from fed.config.hyperparameters import Hyperparameters
        >>> from pydantic import PositiveFloat
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Decay(Hyperparameters):
        ...     rate: PositiveFloat = 0.1
        >>> Decay(rate=-1.0)
        Traceback (most recent call last):
        fed.errors.ValueRange: Decay: rate must be greater than 0, got -1.0
    """

    def __post_init__(self) -> None:
        try:
            keys_of(cast(Any, type(self))).model_validate(vars(self))  # mypy takes the instance's hash for the class's
        except ValidationError as error:
            raise ValueRange(f"{type(self).__name__}: " + "; ".join(sentences(error))) from None
