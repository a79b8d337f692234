"""Evaluation: by the coordinator on a test set, or by the clients on their own samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters

__all__ = ["ByClients", "ByCoordinator"]


@dataclass(frozen=True, kw_only=True)
class ByCoordinator(Hyperparameters):
    """The coordinator scores the global model on the data's test set, on which no client trains."""

    def needs(self) -> Sequence[Term]:
        """A global model."""
        return (Term(Feature.GLOBAL_MODEL, "write evaluation: clients"),)


@dataclass(frozen=True, kw_only=True)
class ByClients(Hyperparameters):
    """Each client scores a model on a share of its own samples, and trains on the others.

    The model is the client's own where the algorithm lets clients keep whole ones, otherwise the coordinator's.

    Args:
        fraction: of a client's samples to hold out, in (0, 1), to the nearest whole sample; one at least is trained on.
    """

    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
