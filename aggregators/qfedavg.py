"""Fair averaging: clients with larger losses have larger weights.

Li et al., "Fair resource allocation in federated learning", ICLR 2020, arXiv 1905.10497.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat

from fed.aggregators.base import ClientWork, Reduced, Report
from fed.aggregators.fedavg import FedAvg, State
from fed.config.experiment import Local
from fed.errors import InvalidExperiment
from fed.vectors.tensors import torch

__all__ = ["QFedAvg"]

_LEAST_LOSS = 1e-10
"""Smallest loss that is used, since the power q − 1 may be below 0."""


@dataclass(frozen=True, kw_only=True)
class QFedAvg(FedAvg):
    r"""Descends the mean of powers of the clients' losses, so that these become alike (Li et al. 2020, 1905.10497).

    .. math::
        w_i = L (x - y_i), \qquad h_i = q f_i(x)^{q-1} ‖w_i‖^2 + L f_i(x)^q, \qquad
        x ← x - \sum_{i ∈ S} f_i(x)^q w_i / \sum_{i ∈ S} h_i

    f_i(x) is the loss of all of a client's samples at the model that its task came with. Clients are otherwise alike,
    however many samples they hold; the authors draw them in proportion to these, as ``sampling: weighted`` does.
    h_i bounds how curved :math:`f_i^{q+1}/(q+1)` is, so that the step shortens itself as q grows.

    Args:
        q: fairness, ≥ 0. 0: FedAvg of clients that count alike; the larger q, the more the worst losses count. Each
            problem needs its own; the authors' example has 5.
        lipschitz: L > 0, the curvature of the clients' losses; 1/η of the local steps unless given, as in the authors'
            code.
    """

    asks: ClassVar[frozenset[str]] = frozenset({"loss"})

    q: NonNegativeFloat = 1.0
    lipschitz: PositiveFloat | None = None

    def check_local(self, local: Local) -> None:
        """Steps of sgd, or any local training where q is 0.

        Raises:
            InvalidExperiment: under adam and adamw unless q is 0. Each coordinate of their steps is about η, whatever
                the gradient, so that w_i is none, and ‖w_i‖² outgrows all else in h_i.
        """
        if self.q and local.optimizer != "sgd":
            raise InvalidExperiment(
                "qfedavg with q above 0 needs local.optimizer sgd, for it treats an update divided by η as a gradient, "
                f"got {local.optimizer}: choose sgd, or afl, which takes any"
            )

    def report(self, work: ClientWork) -> Report:
        """A client's terms of the numerator, −f^q w [P], and of the denominator [1], and a 1; weighted alike."""
        assert work.start_loss_K1 is not None
        # Where a schedule ends at a step size of 0 the update is 0, whatever it is multiplied by.
        lipschitz = self.lipschitz or (1 / work.lr if work.lr else 1.0)
        # The paper's w_i is −ascent: signs are turned here, so that the coordinator adds.
        loss_K1 = work.start_loss_K1.clamp(min=_LEAST_LOSS)
        ascent_KP = lipschitz * work.update_KP
        square_K1 = (ascent_KP**2).sum(1, keepdim=True)
        curvature_K1 = self.q * loss_K1 ** (self.q - 1) * square_K1 + lipschitz * loss_K1**self.q
        counted_K1 = torch.ones_like(curvature_K1)
        return Report((loss_K1**self.q * ascent_KP, curvature_K1, counted_K1), torch.ones_like(work.samples_K1))

    def apply(self, state: State, reduced: Reduced) -> State:
        """The quotient of the sums, which is that of the means; staleness discounts it."""
        numerator_P, denominator_1, counted_1 = reduced.mean
        if not bool(denominator_1 > 0):  # losses so small that their powers are 0 leave nothing to learn
            return state
        return State(state.model_P + counted_1 * numerator_P / denominator_1)
