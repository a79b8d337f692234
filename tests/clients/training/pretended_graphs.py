"""Pretended graphs: what is captured is noted, and done again on whatever its tensors hold by then."""

from collections.abc import Callable, Sequence

from torch import Tensor

from fed.clients.training.step_graphs import Captured

__all__ = ["PretendedGraphs"]

_Work = Callable[[], tuple[Tensor, ...]]


class PretendedGraphs:
    """Backend of graphs without a GPU, with what makes graphs of a GPU err.

    A capture does nothing, and results lie in the same memory after each replay.

    Attributes:
        done: "warm up", "capture", "replay" or "finish" for each thing that was done.

    Args:
        errors: errors that the first captures raise, in turn.
    """

    def __init__(self, errors: Sequence[Exception] = ()) -> None:
        self.done: list[str] = []
        self._errors = list(errors)

    def warm_up(self, work: _Work) -> tuple[Tensor, ...]:
        self.done.append("warm up")
        return work()

    def capture(self, work: _Work) -> Captured:
        self.done.append("capture")
        if self._errors:
            raise self._errors.pop(0)
        return _PretendedGraph(self, work)

    def finish(self) -> None:
        self.done.append("finish")


class _PretendedGraph:
    def __init__(self, backend: PretendedGraphs, work: _Work) -> None:
        self._backend = backend
        self._work = work
        self._results: tuple[Tensor, ...] = ()

    def replay(self) -> tuple[Tensor, ...]:
        self._backend.done.append("replay")
        found = self._work()
        if not self._results:
            self._results = tuple(result.clone() for result in found)
        for result, new in zip(self._results, found, strict=True):
            result.copy_(new)
        return self._results
