"""A representation that clients share, under a head of each client's own that is fitted to it first.

Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021, arXiv 2102.07078,
algorithm 1.
"""

from dataclasses import dataclass

from pydantic import PositiveInt

from fed.aggregators.base import Phase
from fed.aggregators.fedper import FedPer

__all__ = ["FedRep"]


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    r"""Clients fit their own heads, then take local steps of the shared body (Collins et al. 2021, 2102.07078).

    .. math::
        v_i^+ = \text{steps of the head from } v_i \text{ at } x, \qquad
        y_i = \text{steps of the body from } x \text{ at } v_i^+, \qquad
        x ← x + \sum_{i ∈ S} p_i (y_i - x)

    v_i is the head of client i, as FedPer's. The section local says how many steps the body takes.

    Args:
        head_epochs: passes over a client's data in which its head moves and the body rests, ≥ 1.
    """

    head_epochs: PositiveInt = 10

    def phases(self) -> tuple[Phase, ...]:
        """The head, then the body."""
        return Phase(trains="private", epochs=self.head_epochs), Phase(trains="shared")
