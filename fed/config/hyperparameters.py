"""Hyper-parameters of an algorithm or a policy, checked against their annotations on construction."""

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, cast

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from fed.config.compatibility import Combinable
from fed.config.components import bounded, keys_of
from fed.config.validation import sentences
from fed.errors import ValueRange

__all__ = ["DecayRate", "Hyperparameters"]

DecayRate: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Share of its former value that a running mean or a momentum keeps in a step, in [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(Combinable):
    """Frozen dataclass whose annotations are checked on construction.

    ``rate: Annotated[float, Field(gt=0)] = 0.1`` and ``rate: float = Field(0.1, gt=0)`` are the same.

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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Before the class becomes a dataclass, which would take the whole Field for the default.
        for name, info in [item for item in vars(cls).items() if isinstance(item[1], FieldInfo)]:
            _move_into_annotation(cls, name, info)

    def __post_init__(self) -> None:
        try:
            keys_of(cast(Any, type(self))).model_validate(vars(self))  # mypy takes the instance's hash for the class's
        except ValidationError as error:
            raise ValueRange(f"{type(self).__name__}: " + "; ".join(sentences(error))) from None


def _move_into_annotation(cls: type, name: str, info: FieldInfo) -> None:
    """Give a class's field the plain default that a Field holds, and the annotation its bounds."""
    annotations: dict[str, Any] = inspect.get_annotations(cls)
    annotation = annotations.get(name, Any)
    cls.__annotations__ = {**annotations, name: bounded(annotation, info)}
    if info.is_required():
        delattr(cls, name)
    elif info.default_factory is not None:
        setattr(cls, name, dataclasses.field(default_factory=cast(Any, info.default_factory)))
    else:
        setattr(cls, name, info.default)
