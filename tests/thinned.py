"""Parameters of which ``make test`` tries some, spread evenly, and ``make test-all`` every one."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["thinned"]


def thinned(parameters: Iterable[Any], quick: int) -> list[Any]:
    """All parameters; all but ``quick`` of them are marked long.

    Args:
        parameters: values of one argument, or tuples of several ones' values.
        quick: number of those that ``make test`` tries, at least 1: the first, and others at equal distances.
    """
    given = list(parameters)
    tried = {round(place * len(given) / quick) for place in range(quick)}
    return [one if place in tried else _long(one) for place, one in enumerate(given)]


def _long(parameter: Any) -> Any:
    values = parameter if isinstance(parameter, tuple) else (parameter,)
    return pytest.param(*values, marks=pytest.mark.long)
