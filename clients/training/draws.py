"""Draws: the operations of a model that draw random numbers, as a client computes them alone.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fed.clients.training.dispatch_mode import DispatchMode
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "RandomDraw",
    "UnlikeDraws",
    "computed",
    "draw_of",
    "draws_of",
    "is_draw",
    "is_in_place",
    "may_draw",
    "tensors_of",
]

_ATEN = torch.ops.aten


class UnlikeDraws(RuntimeError):
    """Draws that a group cannot make as its clients make them one by one; the message is a clause that says why."""


class RandomDraw(NamedTuple):
    """An operation that draws numbers.

    Args:
        function: method that fills a tensor; or operation that returns what it draws.
        fills: True if it is such a method.
        arguments: arguments of the function but for the filled tensor; None in the place of each tensor.
        given: shapes of the tensors among the arguments.
        shape: shape of the numbers.
        stride: stride of the numbers, for some are drawn in the order of the memory.
        dtype: type of the numbers.
    """

    function: Callable[..., Tensor]
    fills: bool
    arguments: tuple[Any, ...]
    given: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: "torch.dtype"

    def memory(self, count: int) -> Tensor:
        """Memory for the numbers of several clients, [K, ...], each client's with this stride."""
        each = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return torch.empty_strided((count, *self.shape), (each, *self.stride), dtype=self.dtype)

    def fill(self, memory: Tensor, tensors: Sequence[Tensor], generator: "torch.Generator") -> None:
        """Draw into memory that has the shape and stride.

        Args:
            memory: numbers to be overwritten.
            tensors: tensors among the arguments.
            generator: stream to draw from.
        """
        arguments = self.arguments
        if tensors:
            rest = iter(tensors)
            arguments = tuple([next(rest) if argument is None else argument for argument in arguments])
        if self.fills:
            self.function(memory, *arguments, generator=generator)
        else:
            memory.copy_(self.function(*arguments, generator=generator))

    @property
    def stands_flat(self) -> bool:
        """True if numbers of several clients stand in one row: [K · B, ...] instead of [K, B, ...]."""
        return self.function is _ATEN.multinomial.default and len(self.shape) == 2

    def is_like(self, other: "RandomDraw", clients: int | None = None) -> bool:
        """True if another draw draws in the same way.

        Args:
            other: draw of one client, whose shape may differ in its sizes; or of several, where it may not.
            clients: number of clients of the other draw; None: it is of one.
        """
        ours = self.function, self.arguments, self.dtype, len(self.given)
        theirs = other.function, other.arguments, other.dtype, len(other.given)
        if ours != theirs:
            return False
        if clients is None:
            return len(self.shape) == len(other.shape)
        flat = (clients * self.shape[0], *self.shape[1:]) if self.stands_flat else (clients, *self.shape)
        return other.shape == flat


def may_draw(operation: Any) -> bool:
    """True if an operation draws, or does so with some arguments; those of attention do with dropout alone."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def is_draw(operation: Any) -> bool:
    """True if clients in a group can draw by an operation."""
    return operation in _FILLS or operation in _RETURNING


def is_in_place(operation: Any) -> bool:
    """True if an operation writes what it draws into its first argument."""
    return bool(operation._schema.is_mutable)


def draws_of(forward: Callable[[], object]) -> list[RandomDraw]:
    """All that is drawn on the CPU in a forward pass, in its order.

    Raises:
        UnlikeDraws: if clients in a group cannot draw it.
    """
    noting = _Noting()
    # The global generator stays as it is.
    with seeded_torch(0, torch.device("cpu")), noting:
        forward()
    return noting.draws


def tensors_of(operation: Any, args: Sequence[Any]) -> list[Tensor]:
    """Tensors among the arguments of a draw, but for the one that is filled."""
    return [argument for argument in _arguments(operation, args) if isinstance(argument, Tensor)]


def draw_of(operation: Any, args: Sequence[Any], numbers: Tensor) -> RandomDraw:
    """An operation that has been computed, as a draw.

    Args:
        operation: operation, for which :func:`is_draw` holds.
        args: arguments of the operation.
        numbers: result of the operation.
    """
    arguments = _arguments(operation, args)
    fills = operation in _FILLS
    return RandomDraw(
        function=getattr(torch.Tensor, _FILLS[operation][0]) if fills else operation,
        fills=fills,
        arguments=tuple(None if isinstance(argument, Tensor) else argument for argument in arguments),
        given=tuple(tuple(argument.shape) for argument in arguments if isinstance(argument, Tensor)),
        shape=tuple(numbers.shape),
        stride=numbers.stride(),
        dtype=numbers.dtype,
    )


def _arguments(operation: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a draw's function, but for the tensor that it fills and the generator."""
    described = [one for one in operation._schema.arguments if not one.kwarg_only and one.name != "generator"]
    given = (*args[: len(described)], *(one.default_value for one in described[len(args) :]))
    return _FILLS[operation][1](*given) if operation in _FILLS else given


class _Noting(DispatchMode):
    """Notes all draws.

    Attributes:
        draws: draws until now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[RandomDraw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        result = computed(func, args, kwargs)
        if is_draw(func):
            self.draws.append(draw_of(func, args, result))
        return result


def computed(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Result of an operation that may draw.

    Args:
        operation: operation, for which :func:`may_draw` holds.
        args: arguments of the operation.
        kwargs: arguments of the operation by name.

    Raises:
        UnlikeDraws: if clients in a group cannot draw by it, or it draws from a generator of its own.
    """
    if kwargs.get("generator") is not None or any(isinstance(argument, torch.Generator) for argument in args):
        raise UnlikeDraws("it draws from a generator of its own")
    if is_draw(operation):
        return operation(*args, **kwargs)
    before = torch.default_generator.get_state()
    result = operation(*args, **kwargs)
    if not torch.equal(before, torch.default_generator.get_state()):
        raise UnlikeDraws(f"it draws by {operation.overloadpacket.__name__}, which clients in a group cannot")
    return result


_FILLS: Mapping[Any, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    _ATEN.bernoulli.default: ("bernoulli_", lambda chances: (chances,)),
    _ATEN.bernoulli.p: ("bernoulli_", lambda _, chance: (chance,)),
    _ATEN.bernoulli_.float: ("bernoulli_", lambda _, chance: (chance,)),
    _ATEN.bernoulli_.Tensor: ("bernoulli_", lambda _, chances: (chances,)),
    _ATEN.rand.default: ("uniform_", lambda _: (0.0, 1.0)),
    _ATEN.rand_like.default: ("uniform_", lambda _: (0.0, 1.0)),
    _ATEN.randn.default: ("normal_", lambda _: (0.0, 1.0)),
    _ATEN.randn_like.default: ("normal_", lambda _: (0.0, 1.0)),
    _ATEN.normal.float_float: ("normal_", lambda mean, deviation, _: (mean, deviation)),
    _ATEN.randint.default: ("random_", lambda high, _: (0, high)),
    _ATEN.randint.low: ("random_", lambda low, high, _: (low, high)),
    _ATEN.randint_like.default: ("random_", lambda _, high: (0, high)),
    _ATEN.randint_like.low_dtype: ("random_", lambda _, low, high: (low, high)),
    **{
        operation: (operation.overloadpacket.__name__, lambda _, *arguments: arguments)
        for operation in (
            _ATEN.random_.default,
            _ATEN.random_.to,
            getattr(_ATEN.random_, "from"),
            _ATEN.normal_.default,
            _ATEN.uniform_.default,
            _ATEN.exponential_.default,
            _ATEN.cauchy_.default,
            _ATEN.log_normal_.default,
            _ATEN.geometric_.default,
        )
    },
}
"""Operation → method that fills a tensor in the same way, and its arguments from those of the operation."""

_RETURNING = frozenset(
    {
        _ATEN.multinomial.default,
        _ATEN.normal.Tensor_float,
        _ATEN.normal.float_Tensor,
        _ATEN.normal.Tensor_Tensor,
        _ATEN.poisson.default,
        _ATEN.binomial.default,
        _ATEN._standard_gamma.default,
        _ATEN._sample_dirichlet.default,
    }
)
"""Operations that draw by tensors which they are given."""
