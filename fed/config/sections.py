"""Sections of an experiment that have keys beside those of their kind.

:class:`fed.config.registry.DataSection` holds a section of another family, and so stands beside the families.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from fed.config.components import Component
from fed.config.validation import Section
from fed.errors import InvalidExperiment

__all__ = [
    "AdversariesSection",
    "FixedSection",
    "FoldSection",
    "MetricSection",
    "ModelSection",
    "PartitionSection",
    "TopologySection",
    "TrackerSection",
]


class PartitionSection(Component):
    """Partition: deals samples to clients."""

    overlap: NonNegativeFloat = 0.0
    """Number of additional holders of a sample, on average. 0: none; 1: each sample has two holders."""


class FoldSection(Section):
    """One fold of a K-fold cross-validation: held out of each client's samples, to test on."""

    number: PositiveInt
    """Number of the fold, from 1 to K."""
    of: Annotated[int, Field(ge=2)]
    """K, the number of folds."""

    @model_validator(mode="after")
    def _hold_number(self) -> Self:
        if self.number > self.of:
            raise ValueError(f"number must be at most the number of folds, got number={self.number} of {self.of}")
        return self


class ModelSection(Component):
    """Model that is trained, or parts of it."""

    train: Annotated[list[str], Field(min_length=1)] | None = None
    """Shell patterns of the names of the parameters to train, such as ``head.*``: others are fixed, and never travel;
    null for those that the model itself wants a gradient of."""


class FixedSection(Section):
    """The parameters of a model that are not trained."""

    path: Annotated[str, Field(min_length=1)]
    """Path of a safetensors file of this machine with these parameters by name, and maybe with others."""


class MetricSection(Component):
    """Metric: a number that evaluation computes from outputs and targets."""

    name: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_]*$")] | None = None
    """Name of the metric in results: letters, digits and _; the kind's name unless given."""

    @property
    def called(self) -> str:
        """The name under which results have it."""
        return self.name or re.split(r"[.:]", self.kind)[-1]

    @property
    def best(self) -> Literal["max", "min"]:
        """Direction of better values, "max" or "min"."""
        return "min" if getattr(self.make(), "higher_is_better", True) is False else "max"


class TopologySection(Component):
    """Topology: each peer's neighbours."""

    weights: Literal["metropolis", "uniform", "laplacian", "column_stochastic"] | None = None
    """Rule of the neighbours' weights; null: metropolis, and on directed graphs uniform or column_stochastic, whichever
    the algorithm needs."""
    lazy: bool = False
    """True if a peer keeps half of its own vector, (I + W)/2, so that no eigenvalue is below 0."""


class AdversariesSection(Component):
    """Clients that attack."""

    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of all clients that attack, rounded to whole clients; the same ones in every round."""

    def attackers_among(self, clients: int) -> int:
        """Number of attackers among this many clients.

        Raises:
            InvalidExperiment: if none or all clients attack.
        """
        count = round(self.fraction * clients)
        if not 0 < count < clients:
            raise InvalidExperiment(
                f"adversaries.fraction must leave at least one attacker and one honest client, got {self.fraction} of "
                f"{clients} clients, which is {count}: change it, or set adversaries to null (or data, where data are "
                "given in Python)"
            )
        return count


class TrackerSection(Component):
    """Tracker that a run's numbers go to, beside the run's own files."""

    wait_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds that a run waits at its end for the tracker to take the rest."""
    report: bool = True
    """True if the report of a finished run with a folder is drawn, which takes a few seconds, and kept with it."""
