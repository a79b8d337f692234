"""Refusals of what several devices cannot train as one does, each with its reason and the way out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.nn.utils.parametrize import is_parametrized

from fed.aggregators.base import Phase
from fed.clients.scoring.losses import model_loss
from fed.clients.scoring.measures import Loss
from fed.clients.training.batches import normalises_batches
from fed.clients.training.parallel.layers import unit_names
from fed.clients.training.parallel.plans import plan_for
from fed.clients.training.parallel.splits import can_split
from fed.clients.training.parallel.stages import check_stages
from fed.config.parallel import FSDP, Parallel, Pipeline, TensorParallel
from fed.errors import InvalidExperiment, InvalidModel

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["check_parallel"]


def check_parallel(kind: Parallel, devices: int, module: "nn.Module", loss: Loss, phases: Iterable[Phase]) -> None:
    """Check that several devices compute what one does.

    Args:
        kind: way in which they share the work.
        devices: number of devices.
        module: the model.
        loss: (output, target) → scalar.
        phases: phases of local training.

    Raises:
        InvalidExperiment: if a term of the loss compares whole models, or the loss of a batch is not known from those
            of its parts.
        InvalidModel: if the model normalises over the batch, and the devices split it, if some layer's gradients are
            sparse, and they cannot be summed, or if its parameters are computed from others.
    """
    for name, layer in module.named_modules():
        if is_parametrized(layer):
            raise InvalidModel(
                "a model with parametrised layers, such as those of weight_norm, cannot be sent to the processes of "
                f"local.devices, got {name or type(layer).__name__}: set local.devices to 1, or use layers without them"
            )
    for phase in phases:
        if phase.rule is not None and phase.rule.contrasts:
            raise InvalidExperiment(
                f"{type(phase.rule).__name__} compares the representations of three whole models in each step, which "
                "no device of several has: set local.devices to 1, or choose another algorithm"
            )
    if isinstance(kind, FSDP):
        unit_names(kind.units, module)
        for name, layer in module.named_modules():
            if getattr(layer, "sparse", False):
                raise InvalidModel(
                    f"local.parallel: fsdp sums no sparse gradients, got {name or type(layer).__name__}: make it with "
                    "sparse=False, or use another local.parallel"
                )
    if isinstance(kind, TensorParallel):
        plan_for(module, kind.plan)
    if isinstance(kind, Pipeline):
        check_stages(kind.stages, module, devices)
    if not kind.splits_batches:
        return
    name = type(kind).__name__.lower()
    if normalises_batches(module):
        raise InvalidModel(
            f"a model with batch normalisation cannot be trained with local.parallel: {name}, for each device or "
            "micro-batch would take the statistics of its own share of a batch: use GroupNorm or LayerNorm, "
            "local.parallel: tensor, or one device"
        )
    if loss is model_loss:
        raise InvalidExperiment(
            f"loss: model cannot be trained with local.parallel: {name}, which splits batches, for the model alone "
            "knows the weight of each part in its loss: give targets and another loss, such as cross_entropy, or use "
            "local.parallel: tensor"
        )
    if not can_split(loss):
        raise InvalidExperiment(
            f"local.parallel: {name} splits batches, so that the loss must be a mean over samples, got "
            f"{getattr(loss, '__name__', type(loss).__name__)}, which does not say so: give it the attribute "
            "mean_over_samples = True if it is one, or use local.parallel: tensor"
        )
