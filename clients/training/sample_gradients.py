"""Sample gradients: gradients of single samples, and their sums with each cut to a norm, in one backward pass.

In a linear layer, a convolution, a norm or an embedding, a sample's gradient follows from the layer's input a and from
the gradient δ of the loss with respect to its output. For a linear layer on vectors it is δ aᵀ, whose norm is ‖δ‖ ‖a‖:
neither gradients of single samples nor a second backward pass are needed (Goodfellow 2015, 1510.01799; Bu et al. 2022,
2210.00038). Where a model uses its parameters otherwise, each sample trains as a client of its own (``vmap``).

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fed.vectors.tensors import Tensor, torch

__all__ = [
    "LayerTaps",
    "OtherUse",
    "SampleGradients",
    "clipped_sums",
    "gradients_by_layer",
    "gradients_of_each",
    "seen_by_layers",
]


_ADDED_AT_ONCE = 1 << 10  # numbers whose squares float32 adds up to within a millionth


class OtherUse(Exception):
    """A model's use of a parameter in which the gradient of a sample does not follow from a layer's rule."""


class SampleGradients(Protocol):
    """Gradients of one parameter, of every sample."""

    @property
    def held(self) -> int:
        """Number of numbers that are held for each sample."""

    def squares(self) -> Tensor:
        """Squared norm of each sample's gradient, [K, B]."""

    def weighted(self, factors_KB: Tensor) -> Tensor:
        """Each client's weighted sum, [K, J]."""

    def only(self, counts_KB1: Tensor) -> "SampleGradients":
        """The same gradients, but for zeros in the place of samples that do not count."""

    def each(self) -> Tensor:
        """Each sample's gradient, [K, B, J]."""


class _Outer(NamedTuple):
    """Gradients δ aᵀ of a linear layer that sees one vector a sample: a is [K, B, I] and δ is [K, B, O].

    Args:
        a: the layer's input.
        delta: δ.
        delta_norms: norms of δ, [K, B].
    """

    a: Tensor
    delta: Tensor
    delta_norms: Tensor

    @property
    def held(self) -> int:
        return self.a.shape[-1] + self.delta.shape[-1]

    def squares(self) -> Tensor:
        # Norms before squares: the square of a small one is zero, and a large one beside it would count for nothing.
        return (_norms(self.a) * self.delta_norms).square()

    def weighted(self, factors_KB: Tensor) -> Tensor:
        return ((self.delta * factors_KB.unsqueeze(-1)).transpose(1, 2) @ self.a).flatten(1)

    def only(self, counts_KB1: Tensor) -> "SampleGradients":
        return self._replace(a=self.a.where(counts_KB1, 0), delta=self.delta.where(counts_KB1, 0))

    def each(self) -> Tensor:
        return (self.delta.unsqueeze(-1) * self.a.unsqueeze(-2)).flatten(2)


class _OfBias(NamedTuple):
    """Gradients δ of the bias beside it."""

    delta: Tensor
    delta_norms: Tensor

    @property
    def held(self) -> int:
        return self.delta.shape[-1]

    def squares(self) -> Tensor:
        return self.delta_norms.square()

    def weighted(self, factors_KB: Tensor) -> Tensor:
        return (factors_KB.unsqueeze(1) @ self.delta).squeeze(1)

    def only(self, counts_KB1: Tensor) -> "SampleGradients":
        return self._replace(delta=self.delta.where(counts_KB1, 0))

    def each(self) -> Tensor:
        return self.delta


class _Each(NamedTuple):
    """Gradients that are there sample by sample, [K, B, J]."""

    gradients_KBJ: Tensor

    @property
    def held(self) -> int:
        return self.gradients_KBJ.shape[-1]

    def squares(self) -> Tensor:
        return _squares(self.gradients_KBJ)

    def weighted(self, factors_KB: Tensor) -> Tensor:
        return (factors_KB.unsqueeze(1) @ self.gradients_KBJ).squeeze(1)

    def only(self, counts_KB1: Tensor) -> "SampleGradients":
        return _Each(self.gradients_KBJ.where(counts_KB1, 0))

    def each(self) -> Tensor:
        return self.gradients_KBJ


def _squares(vectors: Tensor) -> Tensor:
    """Squared norms of the last dimension."""
    return _norms(vectors).square()


def _norms(vectors: Tensor) -> Tensor:
    """Norms of the last dimension, never too small, as PyTorch's own norm of float32 numbers may be.

    Of ten million equal numbers that lacks two thousandths, and a gradient would be longer than the clip by as much: it
    is found part by part. Numbers whose squares float32 does not hold count for nothing: as much is added as they may
    be, which is nothing beside usual ones.
    """
    numbers = vectors.shape[-1]
    whole = numbers // _ADDED_AT_ONCE * _ADDED_AT_ONCE
    if whole == 0:
        norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return norms.add_(math.sqrt(numbers * torch.finfo(vectors.dtype).tiny))
    parts = vectors[..., :whole].reshape(*vectors.shape[:-1], -1, _ADDED_AT_ONCE)
    return torch.hypot(_norms(torch.linalg.vector_norm(parts, dim=-1)), _norms(vectors[..., whole:]))


_Rule: TypeAlias = Callable[..., tuple[SampleGradients, ...]]
"""(a [K, B, ...], δ [K, B, ...], the layer's options) → gradients of its weight, and of its bias."""


def _linear(a: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    if a.ndim == 3:
        norms_KB = _norms(delta)
        return _Outer(a, delta, norms_KB), _OfBias(delta, norms_KB)
    a_KBTF = a.flatten(2, -2)
    delta_KBTD = delta.flatten(2, -2)
    return _Each((delta_KBTD.transpose(2, 3) @ a_KBTF).flatten(2)), _Each(delta_KBTD.sum(2))


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
    return _Each(weights.view(clients, samples, -1)), _Each(delta.sum((3, 4)))


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
    return _Each(weights_EF.view(clients, samples, channels)), _Each(sums_EF.view(clients, samples, channels))


def _layer_norm(a: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    shape = options["shape"]
    normalised = functional.layer_norm(a, shape, None, None, options["eps"])
    numbers = math.prod(shape)
    clients, samples = a.shape[:2]
    products = (delta * normalised).reshape(clients, samples, -1, numbers).sum(2)
    return _Each(products), _Each(delta.reshape(clients, samples, -1, numbers).sum(2))


def _embedding(places: Tensor, delta: Tensor, options: Mapping[str, Any]) -> tuple[SampleGradients, ...]:
    clients, samples = places.shape[:2]
    rows, width = options["table"]
    places_KBT1 = places.reshape(clients, samples, -1, 1)
    delta_KBTD = delta.reshape(clients, samples, -1, width)
    if (padding := options["padding"]) is not None:
        delta_KBTD = delta_KBTD.where(places_KBT1 != padding % rows, 0)
    table = delta.new_zeros(clients, samples, rows, width)
    return (_Each(table.scatter_add(2, places_KBT1.expand(-1, -1, -1, width), delta_KBTD).flatten(2)),)


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
    return {place: _joined(uses) for place, uses in found.items()}


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


def gradients_of_each(losses: Tensor, parameters: Mapping[int, Tensor], samples: int) -> dict[int, SampleGradients]:
    """Gradients of samples that have parameters of their own.

    Args:
        losses: [K · B], each sample's loss.
        parameters: place of a parameter → each sample's own, [K · B, ...].
        samples: B, the number of samples of each client.

    Returns:
        Place of a parameter → its gradients; those that the losses do not depend on are left out.
    """
    gradients = torch.autograd.grad(losses.sum(), [*parameters.values()], allow_unused=True)
    return {
        place: _Each(part.reshape(-1, samples, part[0].numel()))
        for place, part in zip(parameters, gradients, strict=True)
        if part is not None
    }


def clipped_sums(
    gradients: Mapping[int, SampleGradients], mask_KB: Tensor, clip: float, *, finite_alone: bool
) -> tuple[dict[int, Tensor], Tensor]:
    r"""Sums of clipped gradients, :math:`\sum_b m_b \, g_b \min(1, C / ‖g_b‖)`.

    Args:
        gradients: place of a parameter → its gradients. The norm is over all of them together.
        mask_KB: m, 1 for each sample that counts, 0 for the others.
        clip: C > 0.
        finite_alone: True if a gradient that is not finite counts as zero, for which all others are read once more;
            False if it makes its client's sum no number.

    Returns:
        Place of a parameter → its sum [K, J]; and each sample's squared norm [K, B].
    """
    squares = [of_parameter.squares() for of_parameter in gradients.values()]
    squares_KB = torch.stack(squares).sum(0) if squares else torch.zeros_like(mask_KB)
    # A hair below the clip, so that rounding in the norm does not pass it.
    limit = clip * (1 - 64 * torch.finfo(mask_KB.dtype).eps)
    if finite_alone:
        # Zero times infinity is not a number.
        is_finite_KB = squares_KB.isfinite()
        gradients = {place: of_parameter.only(is_finite_KB.unsqueeze(-1)) for place, of_parameter in gradients.items()}
        squares_KB = squares_KB.where(is_finite_KB, 0)
    factors_KB = mask_KB * (limit / squares_KB.sqrt().clamp(min=limit))
    return {place: of_parameter.weighted(factors_KB) for place, of_parameter in gradients.items()}, squares_KB


def _joined(uses: Sequence[SampleGradients]) -> SampleGradients:
    """Gradients of a parameter that several layers share."""
    if len(uses) == 1:
        return uses[0]
    total = uses[0].each()
    for use in uses[1:]:
        total = total + use.each()
    return _Each(total)
