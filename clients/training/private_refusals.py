"""Refusals of what cannot train by DP-SGD, each with its reason and the way out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fed.aggregators.base import Aggregator, Phase
from fed.clients.scoring.losses import model_loss
from fed.clients.scoring.measures import Loss, is_mean_over_samples
from fed.clients.training.batches import normalises_batches
from fed.config.experiment import Local
from fed.errors import InvalidExperiment, InvalidModel

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["check_private"]


def check_private(
    *,
    module: "nn.Module",
    loss: Loss,
    local: Local,
    algorithm: Aggregator,
    phases: Iterable[Phase],
    is_collated: bool,
) -> None:
    """Check that nothing but noised gradients tells of a client's samples.

    Args:
        module: the model.
        loss: (output, target) → scalar.
        local: the experiment's section of that name.
        algorithm: algorithm of the run.
        phases: phases of local training.
        is_collated: True if a collate makes batches.

    Raises:
        InvalidExperiment: if the algorithm, the loss or a collate looks at samples beside these gradients.
        InvalidModel: if the model mixes the samples of a batch.
    """
    name = type(algorithm).__name__
    for phase in phases:
        if phase.rule is not None and phase.rule.contrasts:
            raise InvalidExperiment(
                f"privacy.unit sample needs a loss of samples alone, got {name}, whose further term compares models "
                "on a whole batch: choose another algorithm, or unit: client"
            )
    if asked := sorted(algorithm.asks & {"loss", "gradient"}):
        raise InvalidExperiment(
            f"privacy.unit sample needs clients that tell nothing but what noised steps leave, got {name}, which asks "
            f"each for its {asked[0]}: choose another algorithm, or unit: client"
        )
    if type(algorithm).steps is not Aggregator.steps:
        raise InvalidExperiment(
            f"privacy.unit sample needs steps whose number is known before a run, got {name}, which changes it: choose "
            "another algorithm, or unit: client"
        )
    if local.precision != "float32" or local.devices > 1:
        raise InvalidExperiment(
            f"privacy.unit sample needs local.precision: float32 and local.devices: 1, got {local.precision} and "
            f"{local.devices}: set them, for a norm that is rounded does not bound a gradient"
        )
    if is_collated:
        raise InvalidExperiment(
            "privacy.unit sample needs samples of one form, got a collate, by which a batch's samples change each "
            "other: give samples of one length, and remove it"
        )
    if loss is model_loss or not is_mean_over_samples(loss):
        raise InvalidExperiment(
            f"privacy.unit sample needs a loss that is a mean over samples, got {getattr(loss, '__name__', loss)}, "
            "which does not say so: give it the attribute mean_over_samples = True if it is one, or write unit: client"
        )
    if normalises_batches(module):
        raise InvalidModel(
            "privacy.unit sample needs a model that treats each sample by itself, got batch normalisation: use "
            "GroupNorm or LayerNorm"
        )
