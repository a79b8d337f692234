"""Layer taps: gradients of single samples by the inputs and outputs of layers, in one backward pass.

In a linear layer, a convolution, a norm or an embedding, a sample's gradient follows from the layer's input a and from
the gradient δ of the loss with respect to its output. For a linear layer on vectors it is δ aᵀ, whose norm is ‖δ‖ ‖a‖:
neither gradients of single samples nor a second backward pass are needed (Goodfellow 2015, 1510.01799; Bu et al. 2022,
2210.00038).

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fed.clients.training.sample_gradients import SampleGradients, explicit_gradients, outer_gradients
from fed.vectors.tensors import Tensor, torch

__all__ = ["LayerTaps", "OtherUse", "gradients_by_layer", "seen_by_layers"]


class OtherUse(Exception):
    """A model's use of a parameter in which the gradient of a sample does not follow from a layer's rule."""


_Rule: TypeAlias = Callable[..., tuple[SampleGradients, ...]]
"""(a [K, B, ...], δ [K, B, ...], the layer's options) → gradients of its weight, and of its bias."""


def _linear(a: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    if a.ndim == 3:
        return outer_gradients(a, delta)
    a_KBTF = a.flatten(2, -2)
    delta_KBTD = delta.flatten(2, -2)
    return explicit_gradients((delta_KBTD.transpose(2, 3) @ a_KBTF).flatten(2)), explicit_gradients(delta_KBTD.sum(2))


def _convolution(a: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    clients, samples = a.shape[:2]
    count = clients * samples
    # Each sample is a group of channels: oneDNN then finds all samples' gradients in about the time of their sum.
    _, weights, _ = torch.ops.aten.convolution_backward(
        delta.reshape(1, -1, *delta.shape[3:]),
        a.reshape(1, -1, *a.shape[3:]),
        a.new_empty(1).expand(count * options["shape"][0], *options["shape"][1:]),
        None,
        stride=options["stride"],
        padding=options["padding"],
        dilation=options["dilation"],
        transposed=False,
        output_padding=[0, 0],
        groups=count * options["groups"],
        output_mask=[False, True, False],
    )
    return explicit_gradients(weights.view(clients, samples, -1)), explicit_gradients(delta.sum((3, 4)))


def _group_norm(a: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    clients, samples, channels = a.shape[:3]
    groups = options["groups"]
    count = clients * samples
    a_EFT = a.reshape(count, channels, -1).contiguous()
    delta_EFT = delta.reshape(count, channels, -1)
    _, means, scales = torch.native_group_norm(
        a_EFT, None, None, count, channels, a_EFT.shape[2], groups, options["eps"]
    )
    sums_EF = delta_EFT.sum(2)
    products_EF = (delta_EFT * a_EFT).sum(2)
    centre_EF = means.repeat_interleave(channels // groups, 1)
    weights_EF = (products_EF - centre_EF * sums_EF) * scales.repeat_interleave(channels // groups, 1)
    shape = (clients, samples, channels)
    return explicit_gradients(weights_EF.view(shape)), explicit_gradients(sums_EF.view(shape))


def _layer_norm(a: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    shape = options["shape"]
    normalised = functional.layer_norm(a, shape, None, None, options["eps"])
    numbers = math.prod(shape)
    clients, samples = a.shape[:2]
    products = (delta * normalised).reshape(clients, samples, -1, numbers).sum(2)
    return explicit_gradients(products), explicit_gradients(delta.reshape(clients, samples, -1, numbers).sum(2))


def _embedding(places: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    clients, samples = places.shape[:2]
    rows, width = options["table"]
    places_KBT1 = places.reshape(clients, samples, -1, 1)
    delta_KBTD = delta.reshape(clients, samples, -1, width)
    if (padding := options["padding"]) is not None:
        delta_KBTD = delta_KBTD.where(places_KBT1 != padding % rows, 0)
    table = delta.new_zeros(clients, samples, rows, width)
    return (explicit_gradients(table.scatter_add(2, places_KBT1.expand(-1, -1, -1, width), delta_KBTD).flatten(2)),)


class _Call(NamedTuple):
    """Call of a layer: its input, its parameters, its rule, and what else the rule needs."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    rule: _Rule
    options: Mapping[str, Any]


def _call_of_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Call:
    return _Call(x, weight, bias, _linear, {})


def _call_of_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Call:
    if isinstance(padding, str) or x.ndim != 4:
        raise OtherUse
    options = {
        "shape": tuple(weight.shape),
        "stride": _pair(stride),
        "padding": _pair(padding),
        "dilation": _pair(dilation),
        "groups": groups,
    }
    return _Call(x, weight, bias, _convolution, options)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value]


def _call_of_group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> _Call:
    return _Call(x, weight, bias, _group_norm, {"groups": num_groups, "eps": eps})


def _call_of_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> _Call:
    return _Call(x, weight, bias, _layer_norm, {"shape": tuple(normalized_shape), "eps": eps})


def _call_of_embedding(
    places: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: Any = None, *others: Any, **options: Any
) -> _Call:
    if max_norm is not None or any(others[1:]) or any(options.values()):
        raise OtherUse
    return _Call(places, weight, None, _embedding, {"table": tuple(weight.shape), "padding": padding_idx})


_CALLS: Mapping[Any, Callable[..., _Call]] = {
    functional.linear: _call_of_linear,
    torch.conv2d: _call_of_conv2d,
    **dict.fromkeys((functional.group_norm, torch.group_norm), _call_of_group_norm),
    **dict.fromkeys((functional.layer_norm, torch.layer_norm), _call_of_layer_norm),
    functional.embedding: _call_of_embedding,
}


class _Tapped(NamedTuple):
    """Call of a layer with all clients' numbers.

    Args:
        a: the layer's input, [K, B, ...].
        y: output of the layer, [K, B, ...], with respect to which the loss has a gradient.
        weight: place of the weight among the trained parameters; None: it is not trained.
        bias: place of the bias, or None.
        rule: rule of the layer.
        options: further arguments of the rule.
    """

    a: Tensor
    y: Tensor
    weight: int | None
    bias: int | None
    rule: _Rule
    options: Mapping[str, Any]


class LayerTaps(TorchFunctionMode):
    """Mode in which ``vmap`` notes input and output of each layer that has trained parameters.

    The parameters that it is given need no gradients of their own.

    Attributes:
        calls: the calls that are noted, in their order.

    Args:
        samples: number of samples of each client, which every layer must have as its first dimension.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.calls: list[_Tapped] = []
        self._samples = samples
        self._places: dict[int, int] = {}

    def trains(self, parameters: Mapping[int, Tensor]) -> None:
        """Take the trained parameters of a forward pass under ``vmap``, by their places."""
        self._places = {id(part): place for place, part in parameters.items()}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation, and note it if it is a layer with trained parameters.

        Raises:
            OtherUse: if another operation takes a trained parameter.
        """
        kwargs = kwargs or {}
        if not self._has_trained((*args, *kwargs.values())):
            return function(*args, **kwargs)
        if function not in _CALLS:
            result = function(*args, **kwargs)
            if isinstance(result, Tensor):
                raise OtherUse
            return result  # such as its shape
        call = _CALLS[function](*args, **kwargs)
        if self._has_trained((call.x,)) or call.x.shape[0] != self._samples:
            raise OtherUse
        y = function(*args, **kwargs)
        weight, bias = (None if part is None else self._places.get(id(part)) for part in (call.weight, call.bias))

        def note(a: Tensor, y: Tensor) -> None:
            self.calls.append(_Tapped(a=a, y=y, weight=weight, bias=bias, rule=call.rule, options=call.options))

        return _tap(note, call.x, y)

    def _has_trained(self, values: Sequence[Any]) -> bool:
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self._places:
                    return True
            elif isinstance(value, list | tuple) and self._has_trained(value):
                return True
        return False


class _Tap(torch.autograd.Function):
    """An output of a layer as it is; all clients' inputs and outputs are noted."""

    @staticmethod
    def forward(note: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor) -> Tensor:
        """Refuse a layer that no client has a part in."""
        raise OtherUse

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], note: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor
    ) -> tuple[Tensor, int]:
        """Note a layer's input and output, and give the output."""
        if dims[1] is None or dims[2] is None:
            raise OtherUse
        y = y.movedim(dims[2], 0)
        if not y.requires_grad:
            y = y.detach().requires_grad_()
        note(x.movedim(dims[1], 0).detach(), y)
        return y, 0


_tap: Callable[..., Tensor] = _Tap.apply


def gradients_by_layer(losses_KB: Tensor, calls: Sequence[_Tapped]) -> dict[int, SampleGradients]:
    """Gradients of each sample, by the layers that :class:`LayerTaps` has noted.

    Args:
        losses_KB: each sample's loss.
        calls: calls of layers.

    Returns:
        Place of a parameter → its gradients; those that the losses do not depend on are left out.
    """
    found: dict[int, list[SampleGradients]] = {}
    for call, delta in zip(calls, _deltas(losses_KB, calls), strict=True):
        if delta is None:
            continue
        for place, gradients in zip((call.weight, call.bias), call.rule(call.a, delta, call.options), strict=False):
            if place is not None:
                found.setdefault(place, []).append(gradients)
    return {place: _added(uses) for place, uses in found.items()}


def seen_by_layers(losses_KB: Tensor, calls: Sequence[_Tapped]) -> list[Tensor]:
    """Inputs of the layers that :class:`LayerTaps` has noted, and the gradients of their outputs, [K, B, ...].

    Args:
        losses_KB: each sample's loss.
        calls: calls of layers.
    """
    pairs = zip(calls, _deltas(losses_KB, calls), strict=True)
    return [part for call, delta in pairs if delta is not None for part in (call.a, delta)]


def _deltas(losses_KB: Tensor, calls: Sequence[_Tapped]) -> Sequence[Tensor | None]:
    """Gradients of the outputs of layers; None where the losses do not depend on one."""
    deltas: Sequence[Tensor | None] = torch.autograd.grad(
        losses_KB.sum(), [call.y for call in calls], allow_unused=True
    )
    return deltas


def _added(uses: Sequence[SampleGradients]) -> SampleGradients:
    """Gradients of a parameter that several layers share."""
    if len(uses) == 1:
        return uses[0]
    total = uses[0].each()
    for use in uses[1:]:
        total = total + use.each()
    return explicit_gradients(total)
