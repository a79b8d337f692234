"""Sample gradients: gradients of single samples, and their sums with each cut to a norm.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fed.vectors.tensors import Tensor, torch

__all__ = ["SampleGradients", "clipped_sums", "explicit_gradients", "gradients_of_each", "outer_gradients"]

_ADDED_AT_ONCE = 1 << 10  # numbers whose squares float32 adds up to within a millionth


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


def outer_gradients(a_KBI: Tensor, delta_KBO: Tensor) -> tuple[SampleGradients, SampleGradients]:
    """Gradients δ aᵀ of the weight of a linear layer that sees one vector a sample, and δ of the bias beside it.

    Args:
        a_KBI: a, the layer's input.
        delta_KBO: δ, gradient of the loss with respect to its output.
    """
    norms_KB = _norms(delta_KBO)
    return _Outer(a_KBI, delta_KBO, norms_KB), _OfBias(delta_KBO, norms_KB)


def explicit_gradients(gradients_KBJ: Tensor) -> SampleGradients:
    """Gradients that are there sample by sample."""
    return _Each(gradients_KBJ)


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
