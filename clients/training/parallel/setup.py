"""Setup of the ranks of one client's training: all that each of them is told before the first task."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

from fed.aggregators.base import Phase
from fed.clients.scoring.measures import Loss
from fed.clients.training.local_context import LocalContext
from fed.config.experiment import Local
from fed.config.parallel import Parallel
from fed.errors import InvalidExperiment, first_line
from fed.vectors.layout import Layout
from fed.vectors.shared_memory import Place, SharedMemory, packed
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["BatchPart", "Begin", "End", "RankSetup", "SharedSetup", "TakeStep"]


@dataclass(frozen=True)
class RankSetup:
    """Parts of a run that a rank needs.

    Args:
        module: the model, its parameters without memory; buffers are as they are.
        loss: (output, target) → scalar.
        local: the experiment's section of that name, with the epochs of the phase.
        phase: trained parameters, rule and length of this phase.
        layout: layout of the whole model.
        kind: way in which the ranks share the work.
        fixed: places of the parameters that are not part of the state, by name, in the memory of the setup.
        settings: settings of PyTorch in the parent.
        example: inputs of a batch of one or two samples.
    """

    module: "nn.Module"
    loss: Loss
    local: Local
    phase: Phase
    layout: Layout
    kind: Parallel
    fixed: dict[str, Place]
    settings: list[Any]
    example: Tree


class SharedSetup:
    """Setup in memory that all ranks see, its fixed parameters beside it: nothing is copied for each.

    Args:
        module: the model with its parameters.
        others: all other arguments of :class:`RankSetup`.

    Raises:
        InvalidExperiment: if a part cannot be pickled.
    """

    def __init__(self, module: "nn.Module", **others: Any) -> None:
        layout: Layout = others["layout"]
        in_state = {part.name for part in layout.parts}
        fixed = {name: part.detach() for name, part in module.named_parameters() if name not in in_state}
        places, self._fixed_bytes = packed(list(fixed.values()))
        setup = RankSetup(module=_without_memory(module), fixed=dict(zip(fixed, places, strict=True)), **others)
        try:
            pickled = pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise InvalidExperiment(
                f"model, loss and algorithm must be picklable to go to the processes of local.devices, got "
                f"{first_line(error)}: define them at the top of a module"
            ) from None
        self._size = len(pickled)
        self._memory = SharedMemory(self._fixed_bytes + self._size)
        for place, part in zip(places, fixed.values(), strict=True):
            place.in_(self._memory.all_bytes).copy_(part)
        self._memory.mapped[self._fixed_bytes : self._fixed_bytes + self._size] = pickled

    def read(self) -> RankSetup:
        """The setup, in a rank."""
        setup: RankSetup = pickle.loads(self._memory.mapped[self._fixed_bytes : self._fixed_bytes + self._size])  # noqa: S301  # from the parent
        return setup

    def fixed(self, place: Place) -> Tensor:
        """A fixed parameter, which no rank changes."""
        return place.in_(self._memory.all_bytes)


def _without_memory(module: "nn.Module") -> "nn.Module":
    """Copy of a module whose parameters are on the device "meta"."""
    memo: dict[int, Any] = {}
    for part in module.parameters():
        empty = torch.empty(part.shape, dtype=part.dtype, device="meta")
        memo[id(part)] = nn.Parameter(empty, requires_grad=part.requires_grad)
    return copy.deepcopy(module, memo)


@dataclass(frozen=True)
class Begin:
    """Begin a task: its model lies in the shared memory.

    Args:
        lr: step size, > 0.
        seed: seed of the module's own draws.
        context: context of the task, with a place in the shared memory for each tensor.
        counts: True if labels that do not count may leave a batch without any.
        measures: True if the gradient is wanted, and no step taken.
    """

    lr: float
    seed: int
    context: LocalContext
    counts: bool
    measures: bool


@dataclass(frozen=True)
class BatchPart:
    """A rank's part of a batch.

    Args:
        inputs: inputs of the part.
        targets: targets of the part.
        shares: share of each micro-batch, or of the whole part, in the batch's mean loss, in [0, 1].
        sizes: number of samples of each of them.
        weight: weight of the batch in the mean loss of its step, in (0, 1].
        samples: number of samples of the whole batch.
    """

    inputs: Tree
    targets: Tree
    shares: tuple[float, ...]
    sizes: tuple[int, ...]
    weight: float
    samples: int


@dataclass(frozen=True)
class TakeStep:
    """Take a step: a part of each of its batches."""

    parts: tuple[BatchPart, ...]


@dataclass(frozen=True)
class End:
    """End the task: write the trained model into the shared memory, and tell the sum of losses."""
