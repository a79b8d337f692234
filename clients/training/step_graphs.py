"""Step graphs: a group's step is captured once as a CUDA graph, and then asked of the GPU in one call.

A step is many small operations, and a GPU does one in less time than the program takes to ask for it.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

from fed.clients.training.interpreted import Function
from fed.errors import first_line
from fed.vectors.tensors import Tensor, torch

__all__ = ["Captured", "CudaGraphs", "GraphBackend", "StepGraphs", "graphs_on"]

_WARM_UPS = 3
"""Number of times that a step is done before it is captured: libraries choose kernels and ask for memory by then."""
_MOST_GRAPHS = 64

_Work: TypeAlias = Callable[[], tuple[Tensor, ...]]


class Captured(Protocol):
    """Work that was captured."""

    def replay(self) -> tuple[Tensor, ...]:
        """Do the work on what its tensors hold now; its results have the same memory each time."""


class GraphBackend(Protocol):
    """Device that captures work."""

    def warm_up(self, work: _Work) -> tuple[Tensor, ...]:
        """Do work that is to be captured later."""

    def capture(self, work: _Work) -> Captured:
        """Capture work, which is not done.

        Raises:
            RuntimeError: if it cannot be captured.
            torch.OutOfMemoryError: if there is too little memory.
        """

    def finish(self) -> None:
        """Wait until nothing that was captured is being done."""


class CudaGraphs:
    """Graphs of a GPU, which share one pool of memory, for none is needed while another one runs.

    Args:
        device: the GPU.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, work: _Work) -> tuple[Tensor, ...]:
        """Do work on the stream on which it is captured, with all else before or behind it."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            results = work()
        computing.wait_stream(self._stream)
        for result in results:
            result.record_stream(computing)
        return results

    def capture(self, work: _Work) -> Captured:
        """Capture work as a graph."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # a graph's pool cannot take what is cached for other work
        # Not torch.cuda.graph, which would leave the stream current where the end of a capture fails.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # Other threads may go on: a user's may pin memory, for instance.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = work()
            finally:
                self._end(graph)
        return _CudaGraph(graph, results)

    def _end(self, graph: "torch.cuda.CUDAGraph") -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # PyTorch's allocator would take the capture to go on, and free no memory that several streams have used.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise

    def finish(self) -> None:
        """Wait for the stream that computes."""
        torch.cuda.current_stream(self._device).synchronize()


class _CudaGraph:
    def __init__(self, graph: "torch.cuda.CUDAGraph", results: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self._results = results

    def replay(self) -> tuple[Tensor, ...]:
        self._graph.replay()
        return self._results


def graphs_on(device: "torch.device") -> GraphBackend | None:
    """Backend of a device; None where work cannot be captured."""
    return CudaGraphs(device) if device.type == "cuda" else None


class StepGraphs:
    """Does steps, of which each is captured once it has been done a few times.

    Args:
        backend: device that captures.

    Attributes:
        problem: reason why a step is done without a graph; empty while all can be captured.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._done: dict[Hashable, int] = {}
        self._refused: set[Hashable] = set()
        self._graphs: dict[Hashable, _StepGraph] = {}
        self.problem = ""

    def run(
        self,
        key: Hashable,
        step: Function,
        *,
        state: list[Tensor],
        inputs: Sequence[Tensor],
        numbers: tuple[float, ...],
        lasting: int,
    ) -> tuple[Tensor, ...]:
        """Results of a step.

        Args:
            key: name of the step; the same one has inputs of the same shapes and types.
            step: (state, inputs, numbers) → its results; it may change the state.
            state: tensors that stay where they are: the same list is in the same memory.
            inputs: tensors that may be others each time.
            numbers: numbers, which are part of what is captured.
            lasting: number of results, the last ones, that are kept; the others change with the next step.

        Raises:
            torch.OutOfMemoryError: if there is too little memory.
        """
        if key in self._refused:
            return step(*state, *inputs, *numbers)
        done = self._done.get(key, 0)
        if done < _WARM_UPS:
            self._done[key] = done + 1
            return self._backend.warm_up(lambda: step(*state, *inputs, *numbers))
        place = (key, id(state), numbers)
        graph = self._graphs.get(place)
        if graph is None:
            if len(self._graphs) >= _MOST_GRAPHS:
                self.clear()
            try:
                graph = _StepGraph(self._backend, step, state, inputs, numbers)
            except RuntimeError as error:
                cause = _first_of(error)
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                self._refused.add(key)
                self.problem = self.problem or first_line(cause)
                return step(*state, *inputs, *numbers)
            self._graphs[place] = graph
        return graph(inputs, lasting)

    def clear(self) -> None:
        """Drop all graphs, with the states and the memory that they hold."""
        if self._graphs:
            self._backend.finish()
            self._graphs.clear()


class _StepGraph:
    """A captured step, with buffers into which its inputs are copied."""

    def __init__(
        self,
        backend: GraphBackend,
        step: Function,
        state: list[Tensor],
        inputs: Sequence[Tensor],
        numbers: tuple[float, ...],
    ) -> None:
        self._state = state  # while it is held, nothing else can have its memory, nor its identity
        self._inputs = [torch.empty_like(part) for part in inputs]
        buffers = self._inputs
        self._captured = backend.capture(lambda: step(*state, *buffers, *numbers))

    def __call__(self, inputs: Sequence[Tensor], lasting: int) -> tuple[Tensor, ...]:
        torch._foreach_copy_(self._inputs, list(inputs))
        results = self._captured.replay()
        first = len(results) - lasting
        return (*results[:first], *(result.clone() for result in results[first:]))


def _first_of(error: BaseException) -> BaseException:
    """The error that came first: that of an operation is followed by that of the capture's end."""
    while error.__context__ is not None:
        error = error.__context__
    return error
