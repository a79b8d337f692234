"""What a partition can go by: a column of the samples under its name, or something that all samples have."""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from fed.clients.data.samples import Samples
from fed.config.validation import nearest
from fed.errors import InvalidData

__all__ = ["hashes", "labels", "scores", "values"]

_OF_ALL = ("index", "label", "mean")


def labels(samples: Samples, partition: str) -> NDArray[np.int64]:
    """The label of each sample.

    Args:
        samples: whose labels.
        partition: the kind that asks, for the message.

    Raises:
        InvalidData: if targets are not one integer a sample.
    """
    targets = samples.targets
    if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
        raise InvalidData(
            f"partition {partition} needs one integer label a sample, got targets of {targets.dtype} and shape "
            f"{tuple(targets.shape)}: choose iid, quantity or natural"
        )
    return np.asarray(targets.numpy(), dtype=np.int64)


def values(samples: Samples, by: str, partition: str) -> NDArray[np.generic]:
    """One value a sample: a column; or ``index``, its place; ``label``; ``mean``, that of its inputs.

    Args:
        samples: whose values.
        by: the name.
        partition: the kind that asks, for the message.

    Raises:
        InvalidData: if there is no such column.
    """
    if by in samples.columns:
        return samples.columns[by]
    if by == "index":
        return np.arange(len(samples))
    if by == "label":
        return labels(samples, partition)
    if by == "mean":
        return np.asarray(samples.inputs.reshape(len(samples), -1).to(torch.float64).mean(dim=1).numpy())
    known = [*_OF_ALL, *(name for name in samples.columns if name not in _OF_ALL)]
    raise InvalidData(f"data.partition.by must name a column of the source, got {by!r}{nearest(by, known)}")


def scores(samples: Samples, by: str, partition: str) -> NDArray[np.float64]:
    """The same as :func:`values`, as numbers.

    Raises:
        InvalidData: if the column holds anything else.
    """
    column = values(samples, by, partition)
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        raise InvalidData(
            f"partition {partition} needs a column of numbers, got {column[:1].tolist()} in {by}: name another"
        ) from None


def hashes(samples: Samples, by: str, partition: str) -> NDArray[np.uint64]:
    """64 bits of BLAKE2b of each value, written as text, or of the sample itself where ``by`` is ``content``.

    They are the same on every machine and in every run; the experiment's seed has no part in them.
    """
    if by == "content" and by not in samples.columns:
        texts = [x + y for x, y in zip(_rows(samples.inputs), _rows(samples.targets), strict=True)]
    else:
        texts = [str(value).encode() for value in values(samples, by, partition).tolist()]
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def _rows(tensor: torch.Tensor) -> list[bytes]:
    rows = tensor.contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
    return [row.tobytes() for row in rows]
