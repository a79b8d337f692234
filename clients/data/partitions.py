"""Partitions, which deal a data set's samples to clients: at random, by a key, by label skew or by size skew.

A partition is a function of ``samples``, ``clients`` (how many) and ``generator`` (its random stream), of which it
takes what it needs; its other parameters are the keys of its section. It returns an array [E]: the holder of each
sample, a number in 0 … clients − 1. One that does not take ``clients`` finds them in the samples and returns names.

Shapes: see :mod:`fed.vectors.layout`.
"""

import hashlib
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt

from fed.clients.data.held import SamplesOnDemand, is_real
from fed.clients.data.samples import Samples
from fed.config.validation import nearest
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import torch

__all__ = ["by_hash", "by_range", "dirichlet", "file", "iid", "natural", "quantity", "rank", "shards", "similarity"]

_DRAWS = 1000
_OF_ALL = ("index", "label", "mean")


def iid(samples: Samples, clients: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Deal as many samples to every client, give or take one, drawn at random.

    Args:
        samples: samples to deal.
        clients: the number of clients.
        generator: the stream to draw from.
    """
    return generator.permutation(np.arange(len(samples)) % clients)


def by_range(samples: Samples, clients: int, by: str = "index") -> NDArray[np.int64]:
    """Sort samples, then cut them into ranges of equal size, give or take one: the first to client 0, and so on.

    Args:
        samples: samples to deal.
        clients: number of ranges, one for each client.
        by: key to sort by, ties in their order: a column; ``index``, the order of the source; ``label``; ``mean``, the
            mean of a sample's inputs.

    Raises:
        InvalidData: if there is no such column.
    """
    order = np.argsort(_values(samples, by, "range"), kind="stable")
    return _dealt(order, np.arange(len(samples)) * clients // len(samples))


def by_hash(samples: Samples, clients: int, by: str = "content") -> NDArray[np.int64]:
    """Deal a sample by the hash of a key, the same in every run: BLAKE2b of the key, modulo the number of clients.

    Args:
        samples: samples to deal.
        clients: the modulus.
        by: key to hash: a column, so that equal values stay together; ``content``, the sample itself; ``index``;
            ``label``; ``mean``.

    Raises:
        InvalidData: if there is no such column.
    """
    if by == "content" and by not in samples.columns:
        # Content and label together, for one image may stand under two labels.
        _check_in_memory(samples, by)
        columns = [_rows(leaf) for leaf in (*trees.leaves(samples.inputs), *trees.leaves(samples.targets))]
        texts = list(map(b"".join, zip(*columns, strict=True)))
    else:
        texts = [str(value).encode() for value in _values(samples, by, "hash").tolist()]
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    # Little-endian on every machine.
    return (np.frombuffer(digests, dtype="<u8") % np.uint64(clients)).astype(np.int64)


def rank(samples: Samples, clients: int, by: str = "mean") -> NDArray[np.int64]:
    """Deal samples like cards from the highest score down, there and back, so that no client gets all of the top.

    Of any first m samples by rank, two clients hold numbers that differ by one at most.

    Args:
        samples: samples to deal.
        clients: number of hands, one for each client.
        by: score to sort by: a column of numbers; ``mean``, the mean of a sample's inputs; ``label``; ``index``.

    Raises:
        InvalidData: if there is no such column, or it holds anything but numbers.
    """
    column = _values(samples, by, "rank")
    try:
        scores_E = column.astype(np.float64)
    except (TypeError, ValueError):
        raise InvalidData(
            f"partition rank needs a column of numbers, got {column[:1].tolist()} in {by}: name another"
        ) from None
    order = np.argsort(-scores_E, kind="stable")
    turn_E, seat_E = np.divmod(np.arange(len(samples)), clients)
    # Every second turn goes back, so that the first client does not always choose first.
    return _dealt(order, np.where(turn_E % 2 == 0, seat_E, clients - 1 - seat_E))


def file(samples: Samples) -> NDArray[np.generic]:
    """Give each file's samples to one client, named like the file without its ending.

    Raises:
        InvalidData: if the source does not read files whose samples it tells apart.
    """
    return _column(samples, "file", "file", "a folder of csv, npz or text")


def natural(samples: Samples) -> NDArray[np.generic]:
    """Give each sample to the client that the source names.

    Raises:
        InvalidData: if the source names none.
    """
    return _column(samples, "client", "natural", "synthetic, text, or csv and npz with the key data.client")


def dirichlet(
    samples: Samples,
    clients: int,
    generator: np.random.Generator,
    alpha: PositiveFloat = 0.5,
    min_samples: PositiveInt = 2,
) -> NDArray[np.int64]:
    r"""Label skew: the samples of each class are shared in random proportions (Yurochkin et al. 2019, 1905.12022).

    .. math::
        p_c \sim \mathrm{Dirichlet}(\alpha 1_K), \qquad n_{kc} \approx p_{ck} n_c

    Drawn again, from the same stream, until every client has ``min_samples``.

    Args:
        samples: samples to deal.
        clients: K.
        generator: the stream to draw from.
        alpha: α > 0, the evenness of the proportions. Small: a client holds few classes, and clients differ in size;
            large: all hold the same.
        min_samples: smallest number of samples of a client.

    Raises:
        InvalidData: if targets are not one integer label a sample, or 1,000 draws leave some client too few samples.
    """
    labels_E = _labels(samples, "dirichlet")
    members = [np.flatnonzero(labels_E == label) for label in np.unique(labels_E)]
    holders_E = np.empty_like(labels_E)
    # Without enough samples no draw can succeed, and a thousand would be made in vain.
    if len(samples) >= clients * min_samples:
        for _ in range(_DRAWS):
            for indices in members:
                sizes_K = _sizes(len(indices), generator.dirichlet(np.full(clients, alpha)))
                holders_E[generator.permutation(indices)] = np.repeat(np.arange(clients), sizes_K)
            if np.bincount(holders_E, minlength=clients).min() >= min_samples:
                return holders_E
    raise InvalidData(
        f"dirichlet must leave every client at least min_samples={min_samples} samples, but {_DRAWS} draws at "
        f"alpha={alpha} of {len(samples)} samples over {clients} clients did not: "
        "raise data.partition.alpha, or lower data.clients or data.partition.min_samples"
    )


def shards(
    samples: Samples, clients: int, generator: np.random.Generator, classes_per_client: PositiveInt = 2
) -> NDArray[np.int64]:
    """Give every client the same number of classes, drawn at random, and about as many samples as any other.

    Each class is cut into shards in proportion to its size, and a client gets shards of different classes. (McMahan et
    al. 2017, 1602.05629, cut all samples, sorted by label, into equal shards; one that straddles two classes gives its
    client one more.)

    Args:
        samples: samples to deal.
        clients: K.
        generator: the stream to draw from.
        classes_per_client: number of classes that a client sees, from C/K to C.

    Raises:
        InvalidData: if targets are not one integer label a sample, or the classes cannot be cut into enough shards.
    """
    _, classes_E, sizes_C = np.unique(_labels(samples, "shards"), return_inverse=True, return_counts=True)
    shards_C = _shards(sizes_C, clients, classes_per_client)
    holders_E = np.empty_like(classes_E)
    left_K = np.full(clients, classes_per_client)
    for label in generator.permutation(len(sizes_C)):
        # Clients that still lack the most classes come first, ties at random: so the last classes find enough clients.
        takers = np.lexsort((generator.random(clients), -left_K))[: shards_C[label]]
        left_K[takers] -= 1
        members = generator.permutation(np.flatnonzero(classes_E == label))
        holders_E[members] = takers[np.arange(len(members)) % len(takers)]
    return holders_E


def _shards(sizes_C: NDArray[np.int64], clients: int, classes_per_client: int) -> NDArray[np.int64]:
    """Number of shards of each class: one each, then one more where shards are the largest, until all are given."""
    total = clients * classes_per_client
    # A shard has a sample at least, and a client no two shards of one class.
    most_C = np.minimum(sizes_C, clients)
    if not len(sizes_C) <= total <= most_C.sum() or classes_per_client > len(sizes_C):
        raise InvalidData(
            f"shards must give each of {clients} clients {classes_per_client} different classes and leave none over, "
            f"got {len(sizes_C)} classes of {sizes_C.min()} to {sizes_C.max()} samples: change "
            "data.partition.classes_per_client or data.clients"
        )
    shards_C = np.ones_like(sizes_C)
    for _ in range(total - len(sizes_C)):
        shards_C[np.argmax(np.where(shards_C < most_C, sizes_C / shards_C, -1.0))] += 1
    return shards_C


def similarity(
    samples: Samples,
    clients: int,
    generator: np.random.Generator,
    percent: Annotated[float, Field(ge=0, le=100)] = 10.0,
) -> NDArray[np.int64]:
    """Deal a share of the samples at random, and the rest sorted by label, a range for each client.

    All clients have as many samples, give or take two. (Karimireddy et al. 2020, 1910.06378, section 7, from Hsu et al.
    2019, 1909.06335: "s % similarity".)

    Args:
        samples: samples to deal.
        clients: K.
        generator: the stream to draw from.
        percent: s in [0, 100], the share that is dealt at random. 100: independent and identically distributed; 0: a
            client holds few labels.

    Raises:
        InvalidData: if targets are not one integer label a sample.
    """
    labels_E = _labels(samples, "similarity")
    order = generator.permutation(len(samples))
    alike, rest = np.split(order, [round(len(samples) * percent / 100)])
    # Stable, after a permutation: which samples of a label go where is random, and the same everywhere.
    rest = rest[np.argsort(labels_E[rest], kind="stable")]
    ranges = np.arange(len(rest)) * clients // max(len(rest), 1)
    return _dealt(np.concatenate([alike, rest]), np.concatenate([np.arange(len(alike)) % clients, ranges]))


def quantity(
    samples: Samples,
    clients: int,
    generator: np.random.Generator,
    alpha: PositiveFloat = 0.5,
    min_samples: PositiveInt = 1,
) -> NDArray[np.int64]:
    r"""Size skew: clients differ in the number of their samples, not in their labels.

    .. math::
        q \sim \mathrm{Dirichlet}(\alpha 1_K), \qquad n_k \approx n_{\min} + q_k (E - K n_{\min})

    Args:
        samples: samples to deal.
        clients: K.
        generator: the stream to draw from.
        alpha: α > 0, the evenness of the sizes. Small: few clients hold most samples; large: all hold as many.
        min_samples: smallest number of samples of a client.

    Raises:
        InvalidData: if there are fewer samples.
    """
    left_over = len(samples) - clients * min_samples
    if left_over < 0:
        raise InvalidData(
            f"quantity must leave every client at least min_samples={min_samples} samples, got {len(samples)} samples "
            f"and {clients} clients: lower data.clients or data.partition.min_samples"
        )
    sizes_K = min_samples + _sizes(left_over, generator.dirichlet(np.full(clients, alpha)))
    return generator.permutation(np.repeat(np.arange(clients), sizes_K))


def _sizes(total: int, shares_K: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers in proportion to shares that sum to 1; their sum is the total."""
    # Ends are rounded, not sizes: sizes rounded one by one need not add up to the total.
    ends_K = np.rint(np.cumsum(shares_K) * total).astype(np.int64)
    ends_K[-1] = total  # shares sum to 1 but for rounding
    sizes_K: NDArray[np.int64] = np.diff(ends_K, prepend=np.int64(0))
    return sizes_K


def _dealt(order: NDArray[np.int64], holders_E: NDArray[np.int64]) -> NDArray[np.int64]:
    dealt_E = np.empty_like(holders_E)
    dealt_E[order] = holders_E
    return dealt_E


def _column(samples: Samples, name: str, partition: str, sources: str) -> NDArray[np.generic]:
    if name not in samples.columns:
        raise InvalidData(
            f"partition {partition} needs a source that knows the {name} of each sample, {sources}; this one does not: "
            "choose another data.partition"
        )
    return samples.columns[name]


def _labels(samples: Samples, partition: str) -> NDArray[np.int64]:
    """Label of each sample.

    Args:
        samples: samples with the labels.
        partition: kind of partition, named in the error.

    Raises:
        InvalidData: if targets are not one integer a sample.
    """
    targets = samples.targets
    if not isinstance(targets, torch.Tensor) or targets.ndim != 1 or is_real(targets):
        got = trees.outline(targets)
        if isinstance(targets, torch.Tensor):
            got = f"{targets.dtype} and shape {tuple(targets.shape)}"
        raise InvalidData(
            f"partition {partition} needs one integer label a sample, got targets of {got}: choose iid, quantity or "
            "natural"
        )
    return np.asarray(targets.numpy(), dtype=np.int64)


def _values(samples: Samples, by: str, partition: str) -> NDArray[np.generic]:
    """Value of each sample: a column; or ``index``, its place; ``label``; ``mean``, the mean of its inputs.

    Args:
        samples: samples with the values.
        by: name of the column, or one of the words above.
        partition: kind of partition, named in the error.

    Raises:
        InvalidData: if there is no such column.
    """
    if by in samples.columns:
        return samples.columns[by]
    if by == "index":
        return np.arange(len(samples))
    if by == "label":
        return _labels(samples, partition)
    if by == "mean":
        _check_in_memory(samples, by)
        if not isinstance(samples.inputs, torch.Tensor):
            raise InvalidData(
                f"data.partition.by: mean needs inputs of one tensor, got {trees.outline(samples.inputs)}: name a "
                "column"
            )
        # In float64: ties and order must not depend on how a machine adds float32.
        return np.asarray(samples.inputs.reshape(len(samples), -1).to(torch.float64).mean(dim=1).numpy())
    known = [*_OF_ALL, *(name for name in samples.columns if name not in _OF_ALL)]
    raise InvalidData(f"data.partition.by must name a column of the source, got {by!r}{nearest(by, known)}")


def _check_in_memory(samples: Samples, by: str) -> None:
    if isinstance(samples.inputs, SamplesOnDemand):
        raise InvalidData(
            f"data.partition.by must not be {by} where samples are read as they are needed, for it reads all of them: "
            "write by: index or label, or name a column"
        )


def _rows(tensor: "trees.Leaf") -> list[bytes]:
    """Bytes of each sample."""
    if isinstance(tensor, trees.Ragged):
        return [sample.contiguous().view(torch.uint8).numpy().tobytes() for sample in tensor]
    rows = tensor.contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
    return [row.tobytes() for row in rows]
