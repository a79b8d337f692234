"""Data sets whose samples are read as they are needed: PyTorch's map-style ones, and those of Hugging Face.

A data set is anything with a length whose samples are found by their number. It is never read as a whole: training and
evaluation read the samples of a batch when it is their turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np

from fed.clients.data.arrays import tensor_of
from fed.clients.data.frames import is_column, is_frame
from fed.clients.data.held import Held, Pair, SamplesOnDemand, as_sample
from fed.config.validation import nearest
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Tree

__all__ = ["DatasetSamples", "is_dataset", "samples_of_dataset", "targets_of_dataset"]


@dataclass(frozen=True)
class DatasetSamples(SamplesOnDemand):
    """Samples of a data set, each read when it is needed.

    A sample is a pair (inputs, target), or a dictionary: then ``targets`` names its targets, and all else is its
    inputs; where that is one value, the inputs are this value.

    Args:
        dataset: data set with a length, whose samples are found by their number.
        owner: name of the holder in errors, such as "client 3".
        targets: key of the targets in a dictionary, or a list of several; None: dictionaries are inputs alone, and all
            else is pairs.
    """

    dataset: Any
    owner: str
    targets: str | Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, place: int) -> Pair:
        """One sample: inputs and targets as trees of tensors."""
        sample = self.dataset[place]
        if isinstance(sample, Mapping) and self.targets is not None:
            sample = self._parted(sample)
        elif isinstance(sample, tuple | list) and len(sample) != 2 and not trees.is_named_tuple(sample):
            raise InvalidData(
                f"a sample of {self.owner} must be a pair (inputs, target), or a dictionary, got {len(sample)} parts: "
                "put the inputs together in a tuple or a dictionary"
            )
        inputs, targets = as_sample(sample)
        where = f"of sample {place} of {self.owner}"
        return _tensors(inputs, f"inputs {where}"), _tensors(targets, f"targets {where}", are_targets=True)

    def _parted(self, sample: Mapping[str, Any]) -> tuple[Any, Any]:
        """Inputs and targets of a dictionary, by their names."""
        aims = _aims(self.targets)
        for name in aims:
            if name not in sample:
                known = nearest(name, [*map(str, sample)])
                raise InvalidData(f"targets must name a value of the samples of {self.owner}, got {name!r}{known}")
        inputs = {name: value for name, value in sample.items() if name not in aims}
        if not inputs:
            raise InvalidData(f"samples of {self.owner} must have a value beside {aims}, their targets: add one")
        alone = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        if isinstance(self.targets, str):
            return alone, sample[self.targets]
        return alone, torch.stack([torch.as_tensor(sample[name]) for name in aims])


def is_dataset(brought: object) -> bool:
    """True for an object whose samples are found by their number, and that is no array, list, frame or mapping.

    Raises:
        InvalidData: if samples are only found one after another, as those of an ``IterableDataset``.
    """
    names = {kind.__name__ for kind in type(brought).__mro__}
    if "IterableDataset" in names:
        raise InvalidData(
            f"samples must be found by their number, got {type(brought).__name__}, which only gives one after another: "
            "give a map-style data set, or a list of its samples, list(dataset)"
        )
    others = (Tensor, np.ndarray, np.generic, list, tuple, str, bytes, Mapping, SamplesOnDemand)
    if isinstance(brought, others) or is_frame(brought) or is_column(brought) or hasattr(brought, "__array__"):
        return False
    return hasattr(brought, "__getitem__") and hasattr(brought, "__len__")


def samples_of_dataset(dataset: Any, owner: str, targets: str | Sequence[str] | None = None) -> Held:
    """Samples of a data set: in memory where its tensors are, as a ``TensorDataset``'s, else read as they are needed.

    Args:
        dataset: the data set.
        owner: name of the holder in errors, such as "client 3".
        targets: key of the targets where a sample is a dictionary, or a list of several.

    Example:
        >>> from torch.utils.data import Subset, TensorDataset
        >>> dataset = TensorDataset(torch.eye(3), torch.arange(3))
        >>> samples_of_dataset(Subset(dataset, [2]), "client 3")
        (tensor([[0., 0., 1.]]), tensor([2]))
    """
    return _in_memory(dataset) or DatasetSamples(dataset, owner, targets)


def targets_of_dataset(samples: DatasetSamples) -> Tree:
    """The targets of all samples, without their inputs where the data set keeps targets apart.

    Targets are apart in a column of a Hugging Face data set, and in the attribute ``targets`` of torchvision's. Of all
    others each sample is read once; its inputs are not kept. None where a target has several lengths.
    """
    dataset = samples.dataset
    named = samples.targets
    if isinstance(named, str) and hasattr(dataset, "column_names") and named in dataset.column_names:
        return tensor_of(np.asarray(dataset[named]), f"targets of {samples.owner}", are_targets=True)
    apart = getattr(dataset, "targets", None)
    if named is None and isinstance(apart, list | Tensor | np.ndarray) and len(apart) == len(dataset):
        return tensor_of(apart, f"targets of {samples.owner}", are_targets=True)
    targets = [samples.read(place)[1] for place in range(len(samples))]
    if targets and len({trees.shapes(one) for one in targets}) > 1:
        return None  # of several lengths: they are no labels to deal by
    return trees.stacked(targets)


def _in_memory(dataset: Any) -> Pair | None:
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2 and all(isinstance(part, Tensor) for part in tensors):
        is_plain = type(dataset) is torch.utils.data.TensorDataset  # another may change samples as it reads them
        return tensors if is_plain else None
    if type(dataset) is torch.utils.data.Subset and (whole := _in_memory(dataset.dataset)) is not None:
        at = torch.as_tensor(dataset.indices)
        return whole[0][at], whole[1][at]
    return None


def _aims(targets: str | Sequence[str] | None) -> list[str]:
    return [targets] if isinstance(targets, str) else [*(targets or ())]


def _tensors(tree: Tree, owner: str, *, are_targets: bool = False) -> Tree:
    """A tree of a sample's values as tensors."""
    return trees.mapped(lambda value: _tensor(value, owner, are_targets=are_targets), tree)


def _tensor(value: Any, owner: str, *, are_targets: bool) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Number | np.number | np.bool_):
        return torch.as_tensor(value)
    if any(kind.__module__.startswith("PIL.") for kind in type(value).__mro__):
        raise InvalidData(
            f"{owner} must be numbers, got an image: give the data set a transform to tensors, such as torchvision's "
            "ToTensor, or with_transform of a Hugging Face data set"
        )
    if isinstance(value, str | bytes | np.generic):
        remedy = "number the classes" if are_targets else "make numbers of it"
        raise InvalidData(f"{owner} must be numbers, got {str(value)[:40]!r}: {remedy} where the data set reads it")
    return tensor_of(value, owner, are_targets=are_targets)
