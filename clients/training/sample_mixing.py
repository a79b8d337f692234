"""Trial of a model that must treat each sample of a batch as if it were alone.

Some samples of a batch are exchanged for others. What layers see of the rest, their inputs and the gradients of the
loss with respect to their outputs, must stay as it was. A model that draws random numbers draws the same ones each
time.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Sequence

from fed.clients.data import Pair
from fed.clients.training.devices import uploaded
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Tree

__all__ = ["mixes_samples"]


def mixes_samples(seen: Callable[[Pair], Sequence[Tensor]], batch: Pair) -> bool:
    """True if a sample of this batch changes what layers see of others.

    Args:
        seen: function from a batch to inputs of layers and gradients of their outputs, each [K, B, ...]. It may change
            the batch that it gets.
        batch: inputs and targets with leaves [K, B, ...], of which B ≥ 2.
    """
    first = trees.leaves(batch[0])[0]
    samples = first.shape[1]
    generator = torch.Generator().manual_seed(0)
    expected = seen(_copied(batch))
    for exchanged in (_shuffled, _of_the_largest):
        order_B = uploaded(torch.randperm(samples, generator=generator), first.device)
        others = order_B[: samples // 2]
        kept = order_B[samples // 2 :]
        inputs, targets = _copied(batch)
        for leaf in trees.leaves(inputs):
            leaf[:, others] = exchanged(leaf[:, others], leaf, generator)
        for leaf in trees.leaves(targets):
            leaf[:, others] = leaf[:, others.flip(0)]
        found = seen((inputs, targets))
        pairs = zip(expected, found, strict=True)
        if not all(_is_as_it_was(one[:, kept], other[:, kept]) for one, other in pairs):
            return True
    return False


def _copied(batch: Pair) -> tuple[Tree, Tree]:
    inputs, targets = batch
    return trees.mapped(torch.clone, inputs), trees.mapped(torch.clone, targets)


# No sample has a number that the batch has not: models may refuse others, as embeddings do.
def _shuffled(part: Tensor, whole: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of the batch at random places, in the form of a part of it."""
    places = torch.randint(whole.numel(), part.shape, generator=generator)
    return whole.flatten()[uploaded(places, whole.device)]


def _of_the_largest(part: Tensor, whole: Tensor, generator: torch.Generator) -> Tensor:
    """The largest number of the batch everywhere."""
    numbers = whole.flatten()
    sizes = numbers.abs() if numbers.is_floating_point() or numbers.is_complex() else numbers.int()
    return numbers[sizes.argmax()].expand(part.shape)


def _is_as_it_was(expected: Tensor, found: Tensor) -> bool:
    """True if tensors are equal but for rounding."""
    is_finite = expected.isfinite()
    if not torch.equal(is_finite, found.isfinite()):
        return False
    expected = expected[is_finite]
    if not expected.numel():
        return True
    return torch.allclose(expected, found[is_finite], rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
