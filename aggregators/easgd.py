"""Elastic averaging: workers keep models of their own, tied to a centre by springs, and perhaps a velocity.

Zhang, Choromanska & LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015, arXiv 1412.6651.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field, PositiveInt

from fed.aggregators.base import ClientWork, Reduced, Report
from fed.aggregators.fedavg import FedAvg, State
from fed.config.hyperparameters import DecayRate
from fed.vectors.tensors import Tensor, torch

__all__ = ["EAMSGD", "EASGD", "ClientState", "MovingState"]

_ELASTICITY_OF_ALL = 0.9
"""β = N α, the paper's elasticity of all clients together."""


class ClientState(NamedTuple):
    """Client state, kept from task to task."""

    model_P: Tensor  # x_i


class MovingState(NamedTuple):
    """Client state of EAMSGD."""

    model_P: Tensor  # x_i
    velocity_P: Tensor  # v_i


@dataclass(frozen=True, kw_only=True)
class EASGD(FedAvg):
    r"""Clients and centre are drawn towards each other after every τ steps (Zhang et al. 2015, 1412.6651).

    .. math::
        x_i ← \text{τ steps from } x_i, \qquad
        x_i ← x_i - α (x_i - c), \qquad c ← c + α \sum_{i ∈ S} (x_i - c)

    Both differences are those before either moved. A client resumes from its own x_i in its next task, so that clients
    explore; a client that does not take part stays where it is. The centre is the global model. Clients count alike.

    The paper takes gradient and differences at the same x_i; here the differences are those after the steps. So with
    one step x_i moves by −(1 − α) η ∇f_i(x_i) − α (x_i − c), where the paper's moves by −η ∇f_i(x_i) − α (x_i − c).

    Args:
        elasticity: α in (0, 1), the pull between a client and the centre. The default is 0.9/N for N clients in all,
            which is the paper's β = N α = 0.9. In a round of |S| clients the centre goes α |S| of the way to their
            mean: more than 1 overshoots, and with all clients α (1 + N) > 2 diverges.
        period: τ ≥ 1, local steps from one exchange to the next; as many as the section local says unless given. The
            paper has 10.
    """

    elasticity: Annotated[float, Field(gt=0, lt=1)] | None = None
    period: PositiveInt | None = None

    def steps(self, state: State) -> int | None:
        """The period."""
        return self.period

    def init_client(self, params_P: Tensor) -> ClientState:
        """The centre, where every client begins."""
        return ClientState(params_P)

    def local_start(self, anchor_P: Tensor, client_state: ClientState, places_K: Tensor | None = None) -> Tensor:
        """The client's own model."""
        return client_state.model_P

    def report(self, work: ClientWork) -> Report:
        """The pull α (x_i − c), by which the client moves back; weighted alike."""
        # The trained model is told from where the steps began, the client's own model, not from the anchor.
        trained_KP = work.began_KP + work.update_KP
        pull_KP = self.elasticity_among(work.population) * (trained_KP - work.anchor_P)
        return Report((pull_KP,), torch.ones_like(work.samples_K1), ClientState(trained_KP - pull_KP))

    def apply(self, state: State, reduced: Reduced) -> State:
        """Add the sum of the pulls, their mean times their number."""
        # A sum, as in the paper: the fewer clients answer, the less the centre moves; of nobody it is what stages add.
        return State(state.model_P + max(reduced.clients, 1) * reduced.update_P)

    def elasticity_among(self, population: int) -> float:
        """Elasticity α for a population of this size."""
        return _ELASTICITY_OF_ALL / population if self.elasticity is None else self.elasticity


@dataclass(frozen=True, kw_only=True)
class EAMSGD(EASGD):
    r"""Elastic averaging of clients that descend with Nesterov's momentum (Zhang et al. 2015, 1412.6651).

    .. math::
        v_i ← δ v_i + d(x_i + δ v_i), \qquad x_i ← x_i + v_i, \qquad
        x_i ← x_i - α (x_i - c), \qquad c ← c + α \sum_{i ∈ S} (x_i - c)

    d(x̂) is the movement of a period's local steps from x̂. With one step, d(x̂) = −η ∇f_i(x̂), and this is the paper's
    rule, but that the differences are those after the step, as in :class:`EASGD`. With τ steps we deviate
    further: the paper's velocity changes after every step, ours after every period, because the optimizer's own
    momentum restarts with every task. ``local.momentum`` would come on top of it.

    Args:
        momentum: δ in [0, 1), the share that stays from one exchange to the next. The paper has 0.99 from
            one step to the next, which over a period of τ = 10 steps decays to 0.99¹⁰ ≈ 0.9. In the long run clients
            move 1/(1 − δ) times as far as those of EASGD: take local.lr shorter by as much.
    """

    momentum: DecayRate = 0.9

    def init_client(self, params_P: Tensor) -> MovingState:  # type: ignore[override]  # it keeps more
        """The centre, at rest, where every client begins."""
        return MovingState(params_P, torch.zeros_like(params_P))

    def local_start(self, anchor_P: Tensor, client_state: MovingState) -> Tensor:  # type: ignore[override]  # as above
        """Start one momentum step ahead of the client's own model: x_i + δ v_i."""
        return client_state.model_P + self.momentum * client_state.velocity_P

    def report(self, work: ClientWork) -> Report:
        """The pull α (x_i − c) after the velocity's step; the client keeps the velocity."""
        velocity_KP = self.momentum * work.client_state.velocity_P + work.update_KP
        trained_KP = work.client_state.model_P + velocity_KP
        # Unlike the paper's, the difference after the step.
        pull_KP = self.elasticity_among(work.population) * (trained_KP - work.anchor_P)
        return Report((pull_KP,), torch.ones_like(work.samples_K1), MovingState(trained_KP - pull_KP, velocity_KP))
