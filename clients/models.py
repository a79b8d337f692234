"""Built-in models: factories of ``torch.nn.Module``, initialised by PyTorch's own rules unless stated.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from itertools import pairwise
from typing import Annotated

from pydantic import Field, PositiveInt

from fed.errors import InvalidModel
from fed.vectors.tensors import nn

__all__ = ["char_gru", "char_transformer", "cnn", "logistic", "mlp"]

_Widths = Annotated[tuple[PositiveInt, ...], Field(strict=False)]


def logistic(input_shape: tuple[int, ...], classes: int) -> "nn.Module":
    """Multinomial logistic regression: one linear layer on the flattened input.

    Args:
        input_shape: shape of one sample.
        classes: C, the number of classes.

    Returns:
        A module [B, *input_shape] → [B, C].
    """
    return mlp(input_shape, classes, hidden=())


def mlp(input_shape: tuple[int, ...], classes: int, hidden: _Widths = (128,), batch_norm: bool = False) -> "nn.Module":
    """A perceptron with ReLU between its layers, on the flattened input.

    Args:
        input_shape: shape of one sample.
        classes: C, the number of classes.
        hidden: widths of the hidden layers.
        batch_norm: True for BatchNorm before each ReLU.

    Returns:
        A module [B, *input_shape] → [B, C].
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise((math.prod(input_shape), *hidden, classes)):
        layers += [nn.Linear(inputs, outputs), *([nn.BatchNorm1d(outputs)] if batch_norm else []), nn.ReLU()]
    # Neither norm nor ReLU after the last layer.
    return nn.Sequential(*layers[: -2 if batch_norm else -1])


def cnn(
    input_shape: tuple[int, ...],
    classes: int,
    channels: _Widths = (16, 32),
    hidden: PositiveInt = 128,
    batch_norm: bool = False,
) -> "nn.Module":
    """Blocks of 3×3 convolution, GroupNorm, ReLU and 2×2 pooling, then one hidden layer.

    GroupNorm keeps no statistics, so that clients with unequal data do not disagree about them. Its groups are of 8
    channels, which a processor computes as one vector, or of all where those are no multiple of 8.

    Args:
        input_shape: (channels, height, width) or (height, width) of one image.
        classes: C, the number of classes.
        channels: number of channels of each block.
        hidden: width of the layer before the classes.
        batch_norm: True for BatchNorm in the place of GroupNorm.

    Returns:
        A module [B, *input_shape] → [B, C].

    Raises:
        InvalidModel: if the input is no image, or is too small for the number of blocks.
    """
    if len(input_shape) not in (2, 3):
        raise InvalidModel(f"model cnn needs images of shape (channels, height, width), got {input_shape}: choose mlp")
    *depth, height, width = input_shape
    if min(height, width) < 2 ** len(channels):
        raise InvalidModel(
            f"model cnn halves an image {len(channels)} times, got {height}×{width}: "
            f"give fewer channels than {channels}"
        )
    # Images without channels get one.
    layers: list[nn.Module] = [] if depth else [nn.Unflatten(1, (1, height))]
    widths = (depth[0] if depth else 1, *channels)
    for inputs, outputs in pairwise(widths):
        groups = outputs // 8 if outputs % 8 == 0 else 1
        norm = nn.BatchNorm2d(outputs) if batch_norm else nn.GroupNorm(groups, outputs)
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]
    area = (height >> len(channels)) * (width >> len(channels))
    layers += [nn.Flatten(), nn.Linear(widths[-1] * area, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


def char_gru(
    classes: int, embedding: PositiveInt = 16, hidden: PositiveInt = 128, layers: PositiveInt = 1
) -> "nn.Module":
    """Gated recurrent units over characters: at each position, the next character.

    Args:
        classes: V, the number of characters.
        embedding: width of a character's vector.
        hidden: width of the state.
        layers: number of stacked layers.

    Returns:
        A module [B, T] (int64) → [B, C, T].
    """
    from fed.clients.text_models import CharGRU

    return CharGRU(classes, embedding, hidden, layers)


def char_transformer(
    input_shape: tuple[int, ...],
    classes: int,
    width: PositiveInt = 64,
    heads: PositiveInt = 4,
    layers: PositiveInt = 2,
) -> "nn.Module":
    """A causal transformer over characters (pre-norm, no dropout, input and output weights tied).

    Args:
        input_shape: (T,), the longest sequence.
        classes: V, the number of characters.
        width: width of the states.
        heads: number of heads of attention, a divisor of the width.
        layers: number of blocks.

    Returns:
        A module [B, T] (int64) → [B, C, T].

    Raises:
        InvalidModel: if the heads do not divide the width, or the input is no sequence.
    """
    if width % heads:
        raise InvalidModel(f"model char_transformer needs heads that divide width, got heads={heads} and width={width}")
    if len(input_shape) != 1:
        raise InvalidModel(f"model char_transformer needs sequences of characters, got inputs of shape {input_shape}")
    from fed.clients.text_models import CharTransformer

    return CharTransformer(classes, input_shape[0], width, heads, layers)
