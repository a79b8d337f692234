"""Agnostic averaging: the model is made for the worst mixture of the clients.

Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019, arXiv 1902.00146.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.base import Aggregator, Broadcast, ClientWork, Reduced, Report
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["AFL", "State", "onto_simplex"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    mixture_N: Tensor  # λ; empty before the first round, where all clients are alike


def onto_simplex(point_N: Tensor) -> Tensor:
    r"""The nearest point of the probability simplex.

    .. math:: \arg\min_{λ ≥ 0, \; Σ λ = 1} ‖λ - v‖_2 = \max(v - θ, 0)

    θ is such that the sum is 1. Sorted downwards, the first ρ numbers stay above 0, where ρ is the last j with
    :math:`v_j > (\sum_{r ≤ j} v_r - 1) / j`.

    Args:
        point_N: v, any finite numbers.

    Example:
        >>> onto_simplex(torch.tensor([0.5, 1.0, -3.0]))
        tensor([0.2500, 0.7500, 0.0000])

    Reference:
        Duchi et al., "Efficient projections onto the l1-ball for learning in high dimensions", ICML 2008, figure 1.
    """
    sorted_N = point_N.sort(descending=True).values
    count_N = torch.arange(1, len(point_N) + 1, dtype=point_N.dtype)
    threshold_N = (sorted_N.cumsum(0) - 1) / count_N
    last = int((sorted_N > threshold_N).sum()) - 1
    return (point_N - threshold_N[last]).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class AFL(Aggregator):
    r"""Descends in the model and ascends in the mixture of the clients' losses (Mohri et al. 2019, 1902.00146).

    .. math::
        x ← x + \sum_i λ_i (y_i - x), \qquad λ ← \mathrm{Proj}_{Δ} (λ + γ F(x)), \qquad F_i(x) = f_i(x)

    Δ is the simplex of mixtures, λ ≥ 0 and Σ λ = 1, which begins uniform. With one local step of the whole of a
    client's samples this is the paper's step; local steps take the place of its gradient as in FedAvg.

    In a round of a cohort S the model's step is :math:`\sum_S λ_i (y_i - x) / \sum_S λ_i`, and the ascent uses only
    differences within the cohort: F_i is f_i less its mean over S, and 0 for all other clients, whose λ changes by the
    projection alone. (A constant added to F changes no projection, so with all clients it is the paper's.) A cohort of
    one moves no λ.

    Both steps start from the x and λ of the round's beginning, as in the paper. Each client receives x and all of λ, N
    numbers (none in the first round, where λ is uniform), and reads its own: clients see each other's shares. It sends
    λ_i N (y_i - x) and, in its place among N each, its loss at x and a 1. That is a model and 2 N numbers; the
    coordinator learns each client's loss from them.

    Args:
        mixture_lr: γ > 0, the step of λ. A client whose loss is higher by 1 gains that much a round, of shares that
            begin at 1/N.
    """

    asks: ClassVar[frozenset[str]] = frozenset({"loss", "place"})

    mixture_lr: PositiveFloat = 0.01

    def init(self, params_P: Tensor) -> State:
        """The model; the number of clients is known once some have answered."""
        return State(params_P, params_P.new_zeros(0))

    def broadcast(self, state: State) -> Broadcast:
        """The mixture λ."""
        return (state.mixture_N,)

    def report(self, work: ClientWork) -> Report:
        """λ_i N (y − x), the loss in the client's place of N, and a 1 there; weighted alike."""
        assert work.places_K is not None
        assert work.start_loss_K1 is not None
        share_K1 = self._mixture(work.broadcast[0], work.population)[work.places_K].unsqueeze(1)
        here_KN = nn.functional.one_hot(work.places_K, work.population).to(work.update_KP.dtype)
        # Times N, since λ_i N is about 1: the part has the size of an update, however many clients there are.
        message = (share_K1 * work.population) * work.update_KP, work.start_loss_K1 * here_KN, here_KN
        return Report(message, torch.ones_like(work.samples_K1))

    def apply(self, state: State, reduced: Reduced) -> State:
        """Descend by the mixture of the cohort, then ascend in it."""
        # A mean times the number of clients is a sum: in the mean, a client's loss is thinned by the zeros of others.
        update_P, losses_N, here_N = (part * reduced.clients for part in reduced.mean)
        mixture_N = self._mixture(state.mixture_N, reduced.population)
        if not reduced.clients:  # nobody's losses are known: λ stays, and what stages add moves the model
            return State(state.model_P + reduced.mean[0], mixture_N)
        counted = float(here_N.sum())
        share = float(mixture_N @ here_N) * reduced.clients / counted  # as of answers that count in full
        # The projection may have left none of the cohort a share.
        step_P = update_P / (reduced.population * share) if share > 0 else torch.zeros_like(update_P)
        # Less the cohort's mean, or being asked at all would raise a client's share.
        advantage_N = losses_N - here_N * (losses_N.sum() / counted)
        return State(state.model_P + step_P, onto_simplex(mixture_N + self.mixture_lr * advantage_N))

    @staticmethod
    def _mixture(mixture_N: Tensor, population: int) -> Tensor:
        return mixture_N if mixture_N.numel() else mixture_N.new_full((population,), 1 / population)
