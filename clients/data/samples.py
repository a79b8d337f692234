"""Samples as a source yields them, before they are dealt to clients. Shapes: N samples; n, some of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fed.clients.data.pairs import Pair
from fed.errors import InvalidData

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

    Raises:
        InvalidData: if inputs, targets and columns differ in their number of samples.

    Example:
        >>> import torch
        >>> samples = Samples(torch.zeros(3, 2), torch.tensor([0, 1, 1]), columns={"client": np.array(["a", "b", "b"])})
        >>> samples.take(np.array([1, 2])).columns["client"].tolist()
        ['b', 'b']
    """

    inputs: Tensor
    targets: Tensor
    test: Pair | None = None
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    classes: int | None = None

    def __post_init__(self) -> None:
        shapes = {"targets": tuple(self.targets.shape[:1])}
        shapes |= {f"column {name}": tuple(np.shape(column)) for name, column in self.columns.items()}
        for name, shape in shapes.items():
            if self.inputs.ndim == 0 or shape != (len(self.inputs),):
                raise InvalidData(
                    f"inputs, targets and columns must have one value a sample, got inputs of shape "
                    f"{tuple(self.inputs.shape)} and {name} of shape {shape}: give as many of each"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices_n: NDArray[np.int64]) -> "Samples":
        """The samples at these indices, in that order; the test set stays."""
        at = torch.from_numpy(indices_n)
        columns = {name: column[indices_n] for name, column in self.columns.items()}
        return replace(self, inputs=self.inputs[at], targets=self.targets[at], columns=columns)
