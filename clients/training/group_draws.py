"""Group draws: random numbers of a group's clients side by side, each client's from its own stream as if it were alone.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from torch.overrides import TorchFunctionMode

from fed.clients.training.dispatch_mode import DispatchMode
from fed.clients.training.draws import (
    RandomDraw,
    UnlikeDraws,
    computed,
    draw_of,
    is_draw,
    is_in_place,
    may_draw,
    tensors_of,
)
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, torch

__all__ = ["ClientStreams", "Drawing", "GroupDraws", "MemoryOfClients"]


class ClientStreams:
    """Streams of a group's clients, from which their models draw.

    Attributes:
        samples_K: number of samples of each client in the batch that is computed. A client without any draws nothing.
        samples_first: True if dimensions that samples share with something else, such as positions, have side by side
            what is of one sample; False if they have the samples side by side.
    """

    def __init__(self) -> None:
        self.samples_K: Sequence[int] = ()
        self.samples_first = True
        self._seeds: Sequence[Callable[[], int]] = ()
        self._generators: list[torch.Generator] = []
        self._have_begun = False

    def begin(self, seeds: Sequence[Callable[[], int]]) -> None:
        """Begin all streams.

        Args:
            seeds: seed of each client's stream, made when something is drawn.
        """
        self._seeds = seeds
        self._have_begun = False

    def generators(self) -> list["torch.Generator"]:
        """Generator of each client, and perhaps more."""
        if not self._have_begun:
            self._have_begun = True
            self._generators += [torch.Generator() for _ in range(len(self._seeds) - len(self._generators))]
            for generator, seed in zip(self._generators, self._seeds, strict=False):
                generator.manual_seed(seed())
        return self._generators

    @contextmanager
    def rehearsed(self, samples_K: Sequence[int]) -> Iterator[None]:
        """Block in which clients with batches of these sizes draw from streams that do not count."""
        before = self.samples_K, self._generators, self._have_begun
        self.samples_K = samples_K
        self._generators = [torch.Generator().manual_seed(number) for number in range(len(samples_K))]
        self._have_begun = True
        try:
            yield
        finally:
            self.samples_K, self._generators, self._have_begun = before


class _Places(NamedTuple):
    """Places of a client's own numbers among those of a batch that is filled up.

    Args:
        dim: dimension of the samples.
        own: place of each of the client's own numbers.
        filled: number of the client's own that each place holds; that of the last sample fills the rest.
    """

    dim: int
    own: Tensor
    filled: Tensor


_Part: TypeAlias = tuple[RandomDraw, _Places | None, list[_Places | None]]
"""Draw of a client with fewer samples, and the places of its numbers and of those that it depends on."""


class GroupDraws:
    """All draws of a forward pass of a group.

    Clients with a smaller batch draw in the shapes that they have alone. The places that are left get the numbers of
    their last sample, as its inputs fill them too.

    Args:
        streams: streams of the clients.
        alone: number of samples → all draws of a client that is alone, for a batch of so many.
        clients: number of clients.
        samples: number of places for each client's samples in a batch.
    """

    def __init__(
        self, streams: ClientStreams, alone: Callable[[int], list[RandomDraw]], clients: int, samples: int
    ) -> None:
        self._streams = streams
        self._alone = alone
        self._clients = clients
        self._samples = samples
        self._whole = alone(samples)
        self._nobody = torch.Generator()
        self._noted = 0
        self._parts = cache(self._parts_of)  # by the number of samples

    @contextmanager
    def rehearsed(self, samples: int | None = None) -> Iterator[None]:
        """Block of one forward pass, which is told to :meth:`noted`, and whose draws do not count.

        Args:
            samples: number of samples of each client; None: there are no places to be filled.

        Raises:
            UnlikeDraws: if a client alone draws more.
        """
        self._noted = 0
        if samples is not None:
            # Now, for the client alone must not be computed amid the group's operations.
            self._parts.cache_clear()
            self._parts(samples)
        sizes_K = [samples or self._samples] * self._clients
        with self._streams.rehearsed(sizes_K), seeded_torch(0, torch.device("cpu")):
            yield
        if self._noted != len(self._whole):
            raise UnlikeDraws(_UNLIKE)

    def noted(self, operation: Any, args: Sequence[Any], result: Tensor) -> int:
        """Number of a draw in the forward pass.

        Args:
            operation: operation that draws for all clients side by side.
            args: arguments of the operation.
            result: result of the operation.

        Raises:
            UnlikeDraws: if a client alone draws something else.
        """
        number = self._noted
        self._noted += 1
        draw = draw_of(operation, args, result)
        if number >= len(self._whole) or not self._whole[number].is_like(draw, self._clients):
            raise UnlikeDraws(_UNLIKE)
        return number

    def take(self, number: int, *tensors: Tensor) -> Tensor:
        """Draw, for all clients side by side.

        Args:
            number: number of the draw in the forward pass.
            tensors: tensors on which it depends, of all clients.
        """
        whole = self._whole[number]
        generators = self._streams.generators()
        numbers_K = whole.memory(self._clients)
        given = [_rows(tensor, self._clients, shape) for tensor, shape in zip(tensors, whole.given, strict=True)]
        for row, (size, memory) in enumerate(zip(self._streams.samples_K, numbers_K.unbind(), strict=True)):
            own = [rows_K[row] for rows_K in given]
            if size == self._samples:
                whole.fill(memory, own, generators[row])
            elif size:
                self._fill_partly(memory, number, size, own, generators[row])
            else:
                whole.fill(memory, own, self._nobody)
        return numbers_K.flatten(0, 1) if whole.stands_flat else numbers_K

    def _fill_partly(
        self, memory: Tensor, number: int, size: int, given: Sequence[Tensor], generator: "torch.Generator"
    ) -> None:
        """Draw for a client whose batch has fewer samples than others'."""
        whole = self._whole[number]
        part, places, places_given = self._parts(size)[number]
        own = [
            tensor if its is None else tensor.index_select(its.dim, its.own)
            for tensor, its in zip(given, places_given, strict=True)
        ]
        if places is None:
            whole.fill(memory, own, generator)
            return
        numbers = part.memory(1)[0]
        part.fill(numbers, own, generator)
        memory.copy_(numbers.index_select(places.dim, places.filled))

    def _parts_of(self, size: int) -> list[_Part]:
        """Each draw of a client with fewer samples, and the places of its numbers and of those it depends on."""
        draws = self._alone(size)
        if len(draws) != len(self._whole):
            raise UnlikeDraws(_UNLIKE)
        return [self._part_of(draw, whole, size) for draw, whole in zip(draws, self._whole, strict=True)]

    def _part_of(
        self, draw: RandomDraw, whole: RandomDraw, size: int
    ) -> tuple[RandomDraw, _Places | None, list[_Places | None]]:
        if not whole.is_like(draw):
            raise UnlikeDraws(_UNLIKE)
        given = [self._places(its, of_all, size) for its, of_all in zip(draw.given, whole.given, strict=True)]
        return draw, self._places(draw.shape, whole.shape, size), given

    def _places(self, shape: Sequence[int], whole: Sequence[int], size: int) -> _Places | None:
        """Places of a client's numbers in a given shape among those of a batch filled up; None if they are all."""
        differing = [dim for dim, (its, of_all) in enumerate(zip(shape, whole, strict=True)) if its != of_all]
        if not differing:
            return None
        dim = differing[0]
        each = whole[dim] // self._samples
        if len(differing) > 1 or (shape[dim], whole[dim]) != (each * size, each * self._samples):
            raise UnlikeDraws("it draws numbers of which it cannot be told whose samples they are for")
        filled_B = torch.arange(self._samples).clamp(max=size - 1)
        if self._streams.samples_first:
            filled = filled_B[:, None] * each + torch.arange(each)
            own = torch.arange(each * size)
        else:
            filled = filled_B + torch.arange(each)[:, None] * size
            own = torch.arange(size) + torch.arange(each)[:, None] * self._samples
        return _Places(dim, own.flatten(), filled.flatten())


def _rows(tensor: Tensor, clients: int, shape: Sequence[int]) -> Tensor:
    """Numbers [K, ...] of clients, each of a shape, of which there may be one for all."""
    if tensor.numel() == clients * math.prod(shape):
        return tensor.reshape(clients, *shape)
    return tensor.reshape(shape).expand(clients, *shape)


class Drawing(DispatchMode):
    """Mode in which clients of a group draw each from its own stream in a forward pass."""

    def __init__(self, draws: GroupDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        result = computed(func, args, kwargs)
        if not is_draw(func):
            return result
        numbers = self._draws.take(self._draws.noted(func, args, result), *tensors_of(func, args))
        return args[0].copy_(numbers) if is_in_place(func) else numbers


class MemoryOfClients(TorchFunctionMode):
    """Mode in which ``vmap`` gives each client memory of its own where a model asks for some to draw into."""

    def __init__(self, of_client: Tensor) -> None:
        super().__init__()
        self._of_client = of_client

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation."""
        kwargs = dict(kwargs or {})
        if function is torch.empty and kwargs.keys() <= {"dtype", "device"}:
            kwargs.setdefault("dtype", torch.get_default_dtype())
            kwargs.setdefault("device", torch.get_default_device())
            return self._of_client.new_empty(*args, **kwargs)
        return function(*args, **kwargs)


_UNLIKE = "it draws other numbers in a group than alone"
