"""Splits of batches among ranks or into micro-batches, weighted so that their losses add up to the whole batch's mean.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence

from fed.clients.scoring.losses import counted, model_loss
from fed.clients.scoring.measures import Loss, is_mean_over_samples, is_over_counted
from fed.clients.training.parallel.setup import BatchPart
from fed.clients.training.reading import Batch
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import Tensor

__all__ = ["can_split", "each_share", "even_sizes", "whole_part"]


def can_split(loss: Loss) -> bool:
    """True for a loss whose mean over a batch is known from those of its parts.

    Example:
        >>> from fed.clients.scoring.losses import cox, mse
        >>> can_split(mse), can_split(cox), can_split(model_loss)
        (True, False, False)
    """
    # Labels that do not count are the model's own affair, so that nobody else knows the weights of parts.
    return is_mean_over_samples(loss) and loss is not model_loss


def even_sizes(samples: int, parts: int) -> list[int]:
    """Numbers of samples of parts as equal as can be, the larger ones first.

    Example:
        >>> even_sizes(7, 3), even_sizes(1, 3)
        ([3, 2, 2], [1, 0, 0])
    """
    least, more = divmod(samples, parts)
    return [least + 1] * more + [least] * (parts - more)


def each_share(batch: Batch, loss: Loss, ranks: int, weight: float) -> list[BatchPart]:
    """BatchPart of each rank of a batch that is split.

    A rank for which there is no sample takes the first one with a share of 0: all ranks must compute alike.

    Args:
        batch: the batch.
        loss: loss in force.
        ranks: number of ranks.
        weight: weight of the batch in its step.
    """
    _check(batch)
    sizes = even_sizes(batch.samples, ranks)
    shares = _shares(batch, loss, sizes)
    parts = []
    begin = 0
    for size, share in zip(sizes, shares, strict=True):
        its = slice(begin, begin + size) if size else slice(1)
        parts.append(
            BatchPart(
                inputs=trees.take(batch.inputs, its),
                targets=trees.take(batch.targets, its),
                shares=(share,),
                sizes=(its.stop - (its.start or 0),),
                weight=weight,
                samples=batch.samples,
            )
        )
        begin += size
    return parts


def whole_part(batch: Batch, loss: Loss, micro_batches: int, weight: float) -> BatchPart:
    """A whole batch, in micro-batches; fewer where there are fewer samples.

    Args:
        batch: the batch.
        loss: loss in force.
        micro_batches: number of micro-batches; 1: none.
        weight: weight of the batch in its step.
    """
    sizes = [batch.samples]
    shares = [1.0]
    if micro_batches > 1:
        _check(batch)
        sizes = even_sizes(batch.samples, min(micro_batches, batch.samples))
        shares = _shares(batch, loss, sizes)
    return BatchPart(
        inputs=batch.inputs,
        targets=batch.targets,
        shares=tuple(shares),
        sizes=tuple(sizes),
        weight=weight,
        samples=batch.samples,
    )


def _shares(batch: Batch, loss: Loss, sizes: Sequence[int]) -> list[float]:
    """Share of each part in the batch's mean loss, which is over labels that count where the loss is."""
    if is_over_counted(loss) and isinstance(batch.targets, Tensor):
        counts = [float(counted(part).sum()) for part in batch.targets.split_with_sizes(list(sizes))]
    else:
        counts = [float(size) for size in sizes]
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def _check(batch: Batch) -> None:
    for name, tree in (("inputs", batch.inputs), ("targets", batch.targets)):
        for leaf in trees.leaves(tree):
            if not leaf.ndim or len(leaf) != batch.samples:
                raise InvalidData(
                    f"a batch that local.parallel splits must have a row for each sample in all of its tensors, got "
                    f"shape {tuple(leaf.shape)} among the {name} of {batch.samples} samples: have collate make such a "
                    "batch, or use local.parallel: tensor, which splits none"
                )
