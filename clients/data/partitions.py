"""Who holds what: a partition names the holder of every sample, and so deals each out exactly once.

A partition is a function of ``samples``, ``clients`` (how many) and ``generator`` (its random stream), of which it
takes what it needs; its other parameters are the keys of its section. It returns an array [N]: the holder of each
sample, a number in 0 … clients − 1. One that does not take ``clients`` finds them in the samples and returns names.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt

from fed.clients.data.samples import Samples
from fed.errors import InvalidData

__all__ = ["Holders", "dirichlet", "iid", "natural"]

Holders: TypeAlias = NDArray[np.generic]

_DRAWS = 1000


def iid(samples: Samples, clients: int, generator: np.random.Generator) -> Holders:
    """Every client the same number of samples, give or take one, drawn at random."""
    return generator.permutation(np.arange(len(samples)) % clients)


def dirichlet(
    samples: Samples,
    clients: int,
    generator: np.random.Generator,
    alpha: PositiveFloat = 0.5,
    min_samples: PositiveInt = 2,
) -> Holders:
    r"""Label skew: the samples of each class are shared in random proportions (Yurochkin et al. 2019, 1905.12022).

    .. math::
        p_c \sim \mathrm{Dirichlet}(\alpha 1_K), \qquad n_{kc} \approx p_{ck} n_c

    Drawn again, from the same stream, until every client has ``min_samples``.

    Args:
        samples: what is dealt, N samples.
        clients: K.
        generator: the stream to draw from.
        alpha: α > 0. Small: a client holds few classes, and clients differ in size; large: all hold the same.
        min_samples: the fewest samples that a client may have.

    Raises:
        InvalidData: if targets are not one integer label a sample, or 1,000 draws leave some client too few samples.
    """
    labels_N = labels_of(samples, "dirichlet")
    for _ in range(_DRAWS):
        holders_N = np.empty(len(labels_N), dtype=np.int64)
        for label in np.unique(labels_N):
            members = generator.permutation(np.flatnonzero(labels_N == label))
            shares_K = generator.dirichlet(np.full(clients, alpha))
            ends_K = np.rint(np.cumsum(shares_K) * len(members)).astype(np.int64)
            holders_N[members] = np.searchsorted(ends_K[:-1], np.arange(len(members)), side="right")
        if np.bincount(holders_N, minlength=clients).min() >= min_samples:
            return holders_N
    raise InvalidData(
        f"dirichlet must leave every client at least min_samples={min_samples} samples, but {_DRAWS} draws at "
        f"alpha={alpha} of {len(samples)} samples over {clients} clients did not: "
        "raise data.partition.alpha, or lower data.clients or data.partition.min_samples"
    )


def natural(samples: Samples) -> Holders:
    """Each sample to the client that the source names, in its column ``client``.

    Raises:
        InvalidData: if the source names no clients.
    """
    return _column(samples, "client", "natural")


def labels_of(samples: Samples, partition: str) -> NDArray[np.int64]:
    """The label of each sample, for a partition by labels."""
    targets = samples.targets
    if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
        raise InvalidData(
            f"partition {partition} needs one integer label a sample, got targets of type {targets.dtype} and shape "
            f"{tuple(targets.shape)}: choose iid, quantity or natural"
        )
    return np.asarray(targets.numpy(), dtype=np.int64)


def _column(samples: Samples, name: str, partition: str) -> Holders:
    if name not in samples.columns:
        known = ", ".join(samples.columns) or "none"
        raise InvalidData(
            f"partition {partition} needs a source with the column {name}, got columns: {known}; "
            "choose a partition such as iid or dirichlet"
        )
    return samples.columns[name]
