"""Ways in which several devices train one client: kinds of ``local.parallel``."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt

from fed.config.hyperparameters import Hyperparameters

__all__ = ["DDP", "FSDP", "Parallel", "Pipeline", "Style", "TensorParallel"]

Style: TypeAlias = Literal["column", "row", "gather", "heads", "sequence", "partial"]
"""Share of a device in a module's work."""


@dataclass(frozen=True, kw_only=True)
class Parallel(Hyperparameters):
    """Way in which several devices share the training of one client."""

    @property
    def splits_batches(self) -> bool:
        """True if a device, or a micro-batch, has a share of a batch, so that a loss must be a mean over samples."""
        return True

    @property
    def shares_batches(self) -> bool:
        """True if each device has a share of each batch of its own."""
        return True

    @property
    def parts_of_batch(self) -> int:
        """Number of micro-batches of a batch that goes to all devices."""
        return 1


@dataclass(frozen=True, kw_only=True)
class DDP(Parallel):
    """Each device holds the whole model and takes a share of each batch; gradients are summed over the devices.

    By PyTorch's DistributedDataParallel (Li et al. 2020, 2006.15704).
    """


@dataclass(frozen=True, kw_only=True)
class FSDP(Parallel):
    """Each device holds a share of every parameter, and takes a share of each batch; a unit is gathered to compute.

    By PyTorch's ``fully_shard`` (Zhao et al. 2023, 2304.11277).

    Args:
        units: names of the modules that are gathered one by one; null: the layers that the model's lists and sequences
            of modules hold. The rest of the model is one unit more.
    """

    units: Annotated[tuple[str, ...], Field(strict=False)] | None = None


@dataclass(frozen=True, kw_only=True)
class Pipeline(Parallel):
    """Each device holds a stage of the model; micro-batches of each batch pass through the stages.

    Args:
        stages: names of the modules at which the second stage and all later ones begin; null: at layers that the
            model's lists and sequences of modules hold, so that stages have as many parameters.
        micro_batches: number of micro-batches of a batch, ≥ 1; fewer where it has fewer samples.
        schedule: 1f1b, in which a stage has no more micro-batches in work than there are stages, or gpipe, in which it
            has all of them.
    """

    stages: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    micro_batches: PositiveInt = 4
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    @property
    def shares_batches(self) -> bool:
        """False: all devices see all of a batch."""
        return False

    @property
    def parts_of_batch(self) -> int:
        """Number of micro-batches."""
        return self.micro_batches


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Parallel):
    """Each device holds a share of the layers' parameters, and computes that share of their outputs for whole batches.

    Megatron's way (Shoeybi et al. 2019, 1909.08053).

    Args:
        plan: shell pattern of modules' names → style. column: share of a linear layer's outputs, which stay apart; row:
            share of the inputs that a column layer left apart, or of an embedding's rows; gather: column, with the
            outputs joined; heads: share of attention's heads; sequence: all parameters, and a share of the places of
            inputs [samples, places, ...]; partial: all parameters, between column and row. null: as a model of
            transformers says, or as PyTorch's own layers allow.
    """

    plan: dict[str, Style] | None = None

    @property
    def splits_batches(self) -> bool:
        """False: all devices see whole batches."""
        return False

    @property
    def shares_batches(self) -> bool:
        """False: all devices see whole batches."""
        return False
