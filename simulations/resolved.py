"""Experiment in force: what a run has chosen by its model and its machine is written down, and kept when it goes on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fed.config.experiment import Experiment
from fed.simulations.batching import Batching

if TYPE_CHECKING:
    from fed.vectors.tensors import torch

__all__ = ["as_chosen", "chooses_alike", "resolved"]

_CHOSEN = ("device", "batching", "group")
"""Keys of the section ``simulation`` that say auto until a run has chosen. Each changes results by rounding."""


def resolved(experiment: Experiment, replaced: Sequence[str], batching: Batching, device: "torch.device") -> Experiment:
    """The experiment as it is run: sections replaced by Python objects are null, and choices are written down.

    Args:
        experiment: experiment as it is given.
        replaced: names of these sections.
        batching: choice of how clients train.
        device: device of the first worker.
    """
    given: dict[str, Any] = dict.fromkeys(replaced)
    # On another kind of device the choice might differ, and batching changes results by rounding.
    if experiment.simulation.device == "auto":
        given["simulation.device"] = device.type
    given["simulation.batching"] = "on" if batching.is_batched else "off"
    if batching.is_batched:
        given["simulation.group"] = batching.group
    return experiment.override(given)


def chooses_alike(experiment: Experiment, begun: Experiment) -> bool:
    """True if a run has chosen as the one that it goes on with.

    Args:
        experiment: experiment in force of this run.
        begun: experiment in force of the run that it goes on with.
    """
    return all(getattr(experiment.simulation, key) == getattr(begun.simulation, key) for key in _CHOSEN)


def as_chosen(experiment: Experiment, begun: Experiment) -> Experiment:
    """The experiment with the choices of the run that it goes on with, made on a machine that may have been another.

    Args:
        experiment: experiment as it is given; where it says auto the run's choice takes the place.
        begun: experiment in force of the run.
    """
    given = experiment.simulation
    kept = {key: getattr(begun.simulation, key) for key in _CHOSEN if getattr(given, key) == "auto"}
    return experiment.override({f"simulation.{key}": value for key, value in kept.items()}) if kept else experiment
