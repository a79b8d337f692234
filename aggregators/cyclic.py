"""Cyclic weight transfer: the model visits the clients in turn.

Chang et al., "Distributed deep learning networks among institutions for medical imaging", JAMIA 2018, doi
10.1093/jamia/ocy017.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fed.aggregators.fedavg import FedAvg
from fed.config.compatibility import Sections
from fed.errors import InvalidExperiment

__all__ = ["Cyclic"]


@dataclass(frozen=True, kw_only=True)
class Cyclic(FedAvg):
    r"""One client after another trains the model, in an order that stays (Chang et al. 2018, 10.1093/jamia/ocy017).

    .. math:: x ← y_i, \qquad i = π(t mod N)

    A round is one visit: its rounds have ``cohort: 1`` and ``sampling: round_robin`` unless given. A cycle is N rounds.
    A client whose visit fails is left out of that cycle.
    """

    default_rounds: ClassVar[Mapping[str, Any]] = {"kind": "synchronous", "cohort": 1, "sampling": "round_robin"}

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse rounds in which another number of clients trains, or others than those whose turn it is."""
        super().check_experiment(experiment)
        rounds = experiment.rounds.make()
        got = {
            "kind": experiment.rounds.kind,
            "cohort": getattr(rounds, "cohort", None),
            "over_selection": getattr(rounds, "over_selection", 1.0),
            "sampling": rounds.sampling.kind,
        }
        # Nor over_selection: of two clients that are asked, only the faster one would be visited.
        for key, value in {**self.default_rounds, "over_selection": 1.0}.items():
            if got[key] != value:
                raise InvalidExperiment(
                    f"rounds.{key} must be {value} with algorithm cyclic, whose model visits one client after another, "
                    f"got {got[key]}: write rounds: {{cohort: 1, sampling: round_robin}}"
                )
