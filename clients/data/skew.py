"""Partitions that differ in labels or in size. Shapes: N samples, K clients, C classes."""

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt

from fed.clients.data.samples import Samples
from fed.clients.data.scores import labels
from fed.errors import InvalidData

__all__ = ["dirichlet", "quantity", "shards"]

_DRAWS = 1000


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
        samples: what is dealt.
        clients: K.
        generator: the stream to draw from.
        alpha: α > 0. Small: a client holds few classes, and clients differ in size; large: all hold the same.
        min_samples: the fewest samples that a client may have.

    Raises:
        InvalidData: if targets are not one integer label a sample, or 1,000 draws leave some client too few samples.
    """
    labels_N = labels(samples, "dirichlet")
    members = [np.flatnonzero(labels_N == label) for label in np.unique(labels_N)]
    holders_N = np.empty_like(labels_N)
    if len(samples) >= clients * min_samples:
        for _ in range(_DRAWS):
            for indices in members:
                sizes_K = _sizes(len(indices), generator.dirichlet(np.full(clients, alpha)))
                holders_N[generator.permutation(indices)] = np.repeat(np.arange(clients), sizes_K)
            if np.bincount(holders_N, minlength=clients).min() >= min_samples:
                return holders_N
    raise InvalidData(
        f"dirichlet must leave every client at least min_samples={min_samples} samples, but {_DRAWS} draws at "
        f"alpha={alpha} of {len(samples)} samples over {clients} clients did not: "
        "raise data.partition.alpha, or lower data.clients or data.partition.min_samples"
    )


def shards(
    samples: Samples, clients: int, generator: np.random.Generator, classes_per_client: PositiveInt = 2
) -> NDArray[np.int64]:
    """Every client sees so many classes, drawn at random, and about as many samples as any other.

    Each class is cut into shards in proportion to its size, and a client gets shards of different classes. (McMahan et
    al. 2017, 1602.05629, cut all samples, sorted by label, into equal shards; one that straddles two classes gives its
    client one more.)

    Args:
        samples: what is dealt.
        clients: K.
        generator: the stream to draw from.
        classes_per_client: how many classes a client sees, at most C and at least C/K.

    Raises:
        InvalidData: if targets are not one integer label a sample, or so many shards cannot be cut from the classes.
    """
    _, classes_N, sizes_C = np.unique(labels(samples, "shards"), return_inverse=True, return_counts=True)
    shards_C = _shards(sizes_C, clients, classes_per_client)
    holders_N = np.empty_like(classes_N)
    left_K = np.full(clients, classes_per_client)
    for label in generator.permutation(len(sizes_C)):
        # To those that still lack the most classes, ties at random: so the last classes find enough clients.
        takers = np.lexsort((generator.random(clients), -left_K))[: shards_C[label]]
        left_K[takers] -= 1
        members = generator.permutation(np.flatnonzero(classes_N == label))
        holders_N[members] = takers[np.arange(len(members)) % len(takers)]
    return holders_N


def _shards(sizes_C: NDArray[np.int64], clients: int, classes_per_client: int) -> NDArray[np.int64]:
    """Into how many shards each class is cut: again and again one more where shards are the largest."""
    total = clients * classes_per_client
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


def quantity(
    samples: Samples,
    clients: int,
    generator: np.random.Generator,
    alpha: PositiveFloat = 0.5,
    min_samples: PositiveInt = 1,
) -> NDArray[np.int64]:
    r"""Size skew: clients differ in how many samples they have, not in which.

    .. math::
        q \sim \mathrm{Dirichlet}(\alpha 1_K), \qquad n_k \approx n_{\min} + q_k (N - K n_{\min})

    Args:
        samples: what is dealt.
        clients: K.
        generator: the stream to draw from.
        alpha: α > 0. Small: few clients hold most samples; large: all hold as many.
        min_samples: the fewest samples that a client has.

    Raises:
        InvalidData: if there are not so many samples.
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
    ends_K = np.rint(np.cumsum(shares_K) * total).astype(np.int64)
    ends_K[-1] = total
    sizes_K: NDArray[np.int64] = np.diff(ends_K, prepend=np.int64(0))
    return sizes_K
