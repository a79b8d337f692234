"""D²: decentralised training over data that differ between peers.

Tang et al., "D²: decentralized training over decentralized data", ICML 2018, arXiv 1803.07068.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.errors import InvalidExperiment
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from fed.topology import Topology

__all__ = ["D2", "State"]

_LEAST = -1 / 3
_ROUNDING = 1e-9  # of an eigenvalue


class State(NamedTuple):
    """Every peer's model, the model one round before, and the last round's step η G."""

    model_NP: Tensor
    last_NP: Tensor
    step_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class D2(PeerRule):
    r"""D-PSGD, corrected by the last round's step for the bias of unequal data (Tang et al. 2018, 1803.07068).

    .. math:: X_{t+1} = W (2 X_t - X_{t-1} - η_t G_t + η_{t-1} G_{t-1}), \qquad X_1 = W (X_0 - η_0 G_0)

    Each step has its own η, so that the mean follows the mean gradient under any schedule; the paper's is constant.
    It converges to the optimum of the peers' mean loss where W is symmetric, the same in every round, and its smallest
    eigenvalue above −1/3. An even ring with Metropolis–Hastings weights is at −1/3: ``topology: {kind: ring, lazy:
    true}`` mixes by (I + W)/2. Graphs that are directed or change with the round are refused, since it diverges on
    some. Peers that are away or late change W as well: on a lazy ring of eight it bore half of them in a round, and
    diverged where each was away, or each message late, four times in five.

    Conserved is Σ (X_{t+1} − X_t + η_t G_t) = 0 over the members. One that goes for good takes its share along, by
    which the mean of the others would move in each round for ever: they begin anew at rest, X_t = X_{t+1} and G_t = 0.
    """

    needs_gradient: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = True

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model, at rest."""
        return State(params_NP, params_NP, torch.zeros_like(params_NP))

    def joined(self, state: State) -> State:
        """Another's model, at rest: its last step is not this peer's."""
        return self.init(state.model_NP)

    def renewed(self, state: State) -> State:
        """Own models, at rest."""
        return self.init(state.model_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """A gradient, and one exchange."""
        x_NP = state.model_NP
        step_NP = x_NP - descend(x_NP)
        moved_NP = 2 * x_NP - state.last_NP - (step_NP - state.step_NP)
        return State(mix(moved_NP), x_NP, step_NP)

    def check_topology(self, topology: "Topology") -> None:
        """Refuse weights that are not symmetric or change, and those with an eigenvalue of −1/3 or less."""
        super().check_topology(topology)
        if topology.changes or topology.is_directed:
            got = "one that changes with the round" if topology.changes else "a directed one"
            raise InvalidExperiment(
                "algorithm d2 needs a fixed graph whose messages go both ways, because its correction may diverge "
                f"under other weights, got {got}: choose a topology such as ring with lazy: true, or algorithm "
                "gradient_tracking"
            )
        # Not eigvalsh, since the weights of a user's own topology need not be symmetric to the bit.
        least = float(torch.linalg.eigvals(topology.matrix(1).to_dense()).real.min())
        if least <= _LEAST + _ROUNDING:
            raise InvalidExperiment(
                f"algorithm d2 needs weights whose smallest eigenvalue is above −1/3, got {least:.4f}: write "
                "topology.lazy: true, which mixes by (I + W)/2, or choose another topology"
            )
