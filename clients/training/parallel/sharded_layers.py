"""Layers of which each rank has a share: how each style of a plan cuts parameters, and computes with its share.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fed.clients.training.parallel.exchanged import copied, gathered, scattered, share_of, summed
from fed.config.parallel import Style
from fed.errors import InvalidModel
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Cut", "computes_alone", "cuts_of"]

_ALL = slice(None)


@dataclass(frozen=True)
class Cut:
    """Share of a rank in a parameter.

    Args:
        layer: module that holds the parameter.
        key: name of the parameter there.
        shape: shape of the whole parameter in which ``index`` counts.
        index: slice of each dimension.
        local: shape of the share in the module.
    """

    layer: "nn.Module"
    key: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    local: tuple[int, ...]


def cuts_of(layer: Any, style: Style) -> Iterator[Cut]:
    """Shares of this rank in a module's parameters; those that all ranks hold are left out.

    Args:
        layer: the module.
        style: style of the plan.
    """
    if style == "heads":
        yield from _cuts_of_heads(layer)
    elif isinstance(layer, nn.Embedding) or style in ("column", "gather"):
        its = share_of(layer.weight.shape[0])
        for key, part in layer.named_parameters(recurse=False):
            shape = tuple(part.shape)
            yield Cut(layer, key, shape, (its,), (its.stop - its.start, *shape[1:]))
    elif style == "row":
        its = share_of(layer.weight.shape[1])
        shape = tuple(layer.weight.shape)
        yield Cut(layer, "weight", shape, (_ALL, its), (shape[0], its.stop - its.start))


def _cuts_of_heads(layer: "nn.MultiheadAttention") -> Iterator[Cut]:
    heads = layer.num_heads
    size = layer.head_dim
    width = layer.embed_dim
    its = share_of(heads)
    numbers = (its.stop - its.start) * size
    yield Cut(layer, "in_proj_weight", (3, heads, size, width), (_ALL, its), (3 * numbers, width))
    if layer.in_proj_bias is not None:
        yield Cut(layer, "in_proj_bias", (3, heads, size), (_ALL, its), (3 * numbers,))
    yield Cut(layer.out_proj, "weight", (width, heads, size), (_ALL, its), (width, numbers))


def computes_alone(layer: Any, style: Style) -> None:
    """Give a module a forward pass with this rank's share of its parameters.

    Args:
        layer: the module, whose parameters are cut.
        style: style of the plan.
    """
    if style == "partial":
        return
    forwards: dict[Style, Callable[[Any], Callable[..., Any]]] = {
        "column": _column,
        "row": _row_of_embedding if isinstance(layer, nn.Embedding) else _row,
        "gather": _gather,
        "heads": _heads,
        "sequence": _sequence,
    }
    layer.forward = forwards[style](layer)


def _column(layer: "nn.Linear") -> Callable[[Tensor], Tensor]:
    return lambda inputs: nn.functional.linear(copied(inputs), layer.weight, layer.bias)


def _gather(layer: "nn.Linear") -> Callable[[Tensor], Tensor]:
    column = _column(layer)
    return lambda inputs: gathered(column(inputs), -1, layer.out_features)


def _row(layer: "nn.Linear") -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        outputs = summed(nn.functional.linear(inputs, layer.weight))
        return outputs if layer.bias is None else outputs + layer.bias  # added once, not by each rank

    return forward


def _row_of_embedding(layer: "nn.Embedding") -> Callable[[Tensor], Tensor]:
    its = share_of(layer.num_embeddings)

    def forward(places: Tensor) -> Tensor:
        is_here = (places >= its.start) & (places < its.stop)
        if its.stop == its.start:
            nothing = layer.weight.sum()  # 0, and on the way of the gradient
            return summed(nothing.expand(*places.shape, layer.embedding_dim))
        rows = nn.functional.embedding((places - its.start).clamp(0, its.stop - its.start - 1), layer.weight)
        return summed(rows * is_here.unsqueeze(-1))

    return forward


def _sequence(layer: "nn.Module") -> Callable[[Tensor], Tensor]:
    whole: Callable[[Tensor], Tensor] = layer.forward

    def forward(inputs: Tensor) -> Tensor:
        if inputs.ndim < 3:
            raise InvalidModel(
                f"a module of the style sequence must have inputs [samples, places, ...], got shape "
                f"{tuple(inputs.shape)}: leave it out of local.parallel.plan"
            )
        return gathered(whole(scattered(inputs, 1)), 1, inputs.shape[1])

    return forward


def _heads(layer: "nn.MultiheadAttention") -> Callable[..., tuple[Tensor, None]]:
    """Attention of the heads that this rank has, as :class:`torch.nn.MultiheadAttention` is called."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if need_weights:
            raise InvalidModel(
                "attention whose heads are shared out must be called with need_weights=False, for no device has the "
                "weights of all: say so, or leave it out of local.parallel.plan"
            )
        is_batched = query.ndim == 3
        given = [copied(part) for part in _each_once(query, key, value)]
        states = [given[min(place, len(given) - 1)] for place in range(3)]
        if is_batched and not layer.batch_first:
            states = [part.transpose(0, 1) for part in states]
        if not is_batched:
            states = [part.unsqueeze(0) for part in states]
        weights = layer.in_proj_weight.chunk(3)
        biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        projected = [
            _of_heads(nn.functional.linear(part, weight, bias), layer.head_dim)
            for part, weight, bias in zip(states, weights, biases, strict=True)
        ]
        queries, keys, values = projected
        mask = _mask(attn_mask, key_padding_mask, queries, layer.num_heads)
        dropout = layer.dropout if layer.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
        outputs = summed(nn.functional.linear(mixed.transpose(1, 2).flatten(2), layer.out_proj.weight))
        if layer.out_proj.bias is not None:
            outputs = outputs + layer.out_proj.bias
        if not is_batched:
            return outputs.squeeze(0), None
        return outputs if layer.batch_first else outputs.transpose(0, 1), None

    return forward


def _of_heads(states: Tensor, size: int) -> Tensor:
    """States [B, T, heads · D] as [B, heads, T, D]."""
    return states.view(*states.shape[:-1], -1, size).transpose(1, 2)


def _each_once(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """One tensor for self-attention, so that its gradient is exchanged once."""
    return [query] if query is key and key is value else [query, key, value]


def _mask(attention: Tensor | None, padding: Tensor | None, states: Tensor, heads: int) -> Tensor | None:
    """Numbers that are added to the scores of the heads here: −∞ for places that are left out.

    Args:
        attention: mask [T, S] or [B · heads, T, S], true or −∞ where a place is left out; or None.
        padding: mask [B, S] of the keys, likewise; or None.
        states: queries [B, heads here, T, D].
        heads: number of all heads.
    """
    masks = []
    if attention is not None:
        numbers = _as_numbers(attention, states.dtype)
        if numbers.ndim == 3:
            numbers = numbers.view(-1, heads, *numbers.shape[1:])[:, share_of(heads)]
        masks.append(numbers)
    if padding is not None:
        numbers = _as_numbers(padding, states.dtype)
        masks.append(numbers.reshape(-1, 1, 1, numbers.shape[-1]))
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _as_numbers(mask: Tensor, dtype: "torch.dtype") -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
