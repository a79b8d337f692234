"""Samples as a source yields them, before they are dealt to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fed.clients.data.federated import Pair

__all__ = ["Samples"]


@dataclass(frozen=True)
class Samples:
    """What a source knows of its samples, N of them; the source of a user's own may return one of these.

    Args:
        inputs: [N, ...], of any floating type, or integers such as characters.
        targets: [N, ...], integers.
        test: a test set of the source's own; without one a share of the samples is held out.
        columns: further values of each sample, [N] each, by name. ``client`` names its holder, for the partition
            ``natural``; ``file`` the file it came from, for ``file``; any other serves ``hash`` and ``rank``.
        classes: how many classes there are, where the labels seen may not show it.
    """

    inputs: Tensor
    targets: Tensor
    test: Pair | None = None
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    classes: int | None = None
