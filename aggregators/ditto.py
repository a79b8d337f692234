"""Personal models that are drawn towards a shared one.

Li et al., "Ditto: fair and robust federated learning through personalization", ICML 2021, arXiv 2012.04221,
algorithm 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from fed.aggregators.base import Phase
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.fedprox import FedProx

__all__ = ["Ditto"]


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    r"""FedAvg, and each client keeps a model of its own, tied to the shared one (Li et al. 2021, 2012.04221).

    .. math::
        v_i ← v_i - η (∇f_i(v_i) + λ (v_i - x)), \qquad x ← x + \sum_{i ∈ S} p_i (y_i - x)

    y_i is where the local steps of FedAvg lead from x; v_i is the client's own model, which it trains on from task to
    task, towards the x that came with the task. With λ = 0 clients learn alone; as λ grows their models become the
    shared one. A client that was never asked has the shared model.

    A task takes two trainings; what travels is FedAvg's.

    Args:
        strength: λ ≥ 0, the pull of a client's own model towards x; η λ should stay below 1, or steps overshoot x.
        personal_epochs: passes over a client's data in which its own model moves, ≥ 1; as the section local says unless
            given.
    """

    personal: ClassVar[bool] = True

    strength: NonNegativeFloat = 0.1
    personal_epochs: PositiveInt | None = None

    def phases(self) -> tuple[Phase, ...]:
        """The shared model, then the client's own."""
        own = Phase(rule=FedProx(mu=self.strength), epochs=self.personal_epochs, is_personal=True)
        # The shared model first, as in algorithm 1; the own one is drawn to the x that came, not to y_i.
        return Phase(), own
