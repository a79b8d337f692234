"""Observers for tests."""

from collections.abc import Callable, Mapping
from typing import Any

from fed.server.observer import Essential, Event, Kinds, RoundEnded

__all__ = ["AfterRound", "Trial", "after_round"]


class AfterRound:
    """Calls a function with each round's line of the metrics."""

    kinds: Kinds = (RoundEnded,)

    def __init__(self, then: Callable[[Mapping[str, Any]], object]) -> None:
        self._then = then

    def observe(self, event: Event) -> None:
        assert isinstance(event, RoundEnded)
        self._then(event.line)


def after_round(then: Callable[[Mapping[str, Any]], object]) -> Essential:
    """Have a function called in line after each round."""
    return Essential(AfterRound(then))


class Trial:
    """Keeps all that it is told: an observer is one class with one method."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)
