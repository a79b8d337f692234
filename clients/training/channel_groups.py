"""Convolutions, pools and group norms of many clients as one: each client's channels are a group of them.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fed.vectors.tensors import Tensor, torch

__all__ = ["ChannelGroups"]

_Dims: TypeAlias = tuple[int | None, ...]


class ChannelGroups(TorchFunctionMode):
    r"""Mode in which ``vmap`` computes operations that keep channels apart on all clients' channels side by side.

    .. math:: x_{k,b,c,\dots} → x_{b,\,(k,c),\dots}

    PyTorch's own rules want clients before samples for some of these operations and after them for others, and copy in
    between. Here all results have the clients second. Elementwise operations keep that order, so that nothing is
    copied. On a CPU images have their channels last in memory, as its convolutions are fastest. A maximum is taken
    before a ReLU rather than after it, which is the same, and so is its gradient.
    """

    _relu: tuple[Tensor | None, Tensor | None] = None, None  # the output and the input of the last operation, if a ReLU

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation, in groups of channels if it is one of those."""
        kwargs = kwargs or {}
        output, before = self._relu
        self._relu = (None, None)
        dims, rule = _RULES.get(function, ((), function))
        if args and isinstance(args[0], Tensor) and args[0].ndim in dims:
            if function in _MAXIMA and args[0] is output:
                return torch.relu(rule(before, *args[1:], **kwargs))
            return rule(*args, **kwargs)
        result = function(*args, **kwargs)
        if function in _RELUS and args:
            self._relu = result, args[0]
        return result


class _OfGroup(torch.autograd.Function):
    """An operation with a rule for ``vmap``: rule(clients, the clients' dimension in each tensor, *tensors)."""

    @staticmethod
    def forward(rule: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """Compute it for tensors that belong to no client."""
        return rule(1, (None,) * len(tensors), *tensors)

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Keep nothing: tensors that belong to no client need no gradient."""

    @staticmethod
    def vmap(info: Any, dims: _Dims, rule: Callable[..., Tensor], *tensors: Any) -> tuple[Tensor, int]:
        """Compute it for all clients, which are second in the result."""
        return torch.unflatten(rule(info.batch_size, dims[1:], *tensors), 1, (info.batch_size, -1)), 1


_of_group: Callable[..., Tensor] = _OfGroup.apply


def _convolution(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    def rule(clients: int, dims: _Dims, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_common = dims[0] is None and groups == 1  # all clients read the same channels
        x = x if is_common else _channels(x, dims[0], clients)
        weights = _rows(weight, dims[1], clients)
        biases = _rows(bias, dims[2], clients)
        all_groups = 1 if is_common else groups * clients
        return function(x, weights, biases, stride, padding, dilation, all_groups)

    return _of_group(rule, x, weight, bias)


def _pool(function: Callable[..., Tensor], x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    if options.get("return_indices"):
        return function(x, *arguments, **options)

    def rule(clients: int, dims: _Dims, x: Tensor) -> Tensor:
        return function(_channels(x, dims[0], clients), *arguments, **options)

    return _of_group(rule, x)


def _adaptive_pool(function: Callable[..., Tensor], x: Tensor, output_size: Any) -> Tensor:
    sizes = output_size if isinstance(output_size, tuple | list) else [output_size]
    if {*sizes} == {1}:
        return x.mean([*range(2, x.ndim)], keepdim=True)
    return _pool(function, x, output_size)


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    def rule(clients: int, dims: _Dims, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weights = _rows(weight, dims[1], clients)
        biases = _rows(bias, dims[2], clients)
        return torch.group_norm(_channels(x, dims[0], clients), num_groups * clients, weights, biases, eps)

    return _of_group(rule, x, weight, bias)


def _channels(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """[B, K·C, ...] of a tensor that has the clients at ``dim``, or is the same for all."""
    x_BKC = x.unsqueeze(1).expand(-1, clients, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
    if x_BKC.ndim != 5 or x.device.type != "cpu":
        return x_BKC.flatten(1, 2)
    # Channels last in memory: with them a CPU's convolutions are fastest.
    return x_BKC.permute(0, 3, 4, 1, 2).flatten(3).contiguous().permute(0, 3, 1, 2)


def _rows(part: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """[K·C, ...] of a parameter [C, ...] of each client, or of one for all."""
    if part is None:
        return None
    return (part.expand(clients, *part.shape) if dim is None else part.movedim(dim, 0)).flatten(0, 1)


_BY_DIMENSIONS: Mapping[int, tuple[Callable[..., Any], ...]] = {
    3: (torch.conv1d, functional.adaptive_avg_pool1d, functional.avg_pool1d, torch.max_pool1d, functional.max_pool1d),
    4: (torch.conv2d, functional.adaptive_avg_pool2d, functional.avg_pool2d, torch.max_pool2d, functional.max_pool2d),
    5: (torch.conv3d, functional.adaptive_avg_pool3d, functional.avg_pool3d, torch.max_pool3d, functional.max_pool3d),
}
"""Dimensions of a client's input → operations."""
_WAYS: Sequence[Callable[..., Tensor]] = (_convolution, _adaptive_pool, _pool, _pool, _pool)
_RULES: Mapping[Any, tuple[Sequence[int], Callable[..., Any]]] = {
    **{
        function: ([dims], partial(way, function))
        for dims, functions in _BY_DIMENSIONS.items()
        for function, way in zip(functions, _WAYS, strict=True)
    },
    **dict.fromkeys((torch.group_norm, functional.group_norm), ((3, 4, 5), _group_norm)),
}
"""Operation → dimensions of a client's input, and its way in groups."""
_MAXIMA = {maximum for functions in _BY_DIMENSIONS.values() for maximum in functions[3:]}
_RELUS = {torch.relu, functional.relu, torch.Tensor.relu}
