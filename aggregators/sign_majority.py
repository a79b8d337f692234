"""Majority vote of signs: one bit a parameter from every client, and one bit a parameter back.

Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018, arXiv 1802.04434; "signSGD with
majority vote is communication efficient and fault tolerant", ICLR 2019, arXiv 1810.05291.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.config.compatibility import Feature, Sections, Term
from fed.errors import InvalidExperiment
from fed.vectors.tensors import Tensor, torch

__all__ = ["SignMajority", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor


@dataclass(frozen=True, kw_only=True)
class SignMajority(Aggregator):
    r"""Steps of one length, in the directions that most clients vote for (Bernstein et al. 2019, 1810.05291).

    .. math:: x ← x + η_s \operatorname{sign} \sum_{i ∈ S} \operatorname{sign}(y_i - x)

    A zero votes +1, and a tie goes by the round's random stream. All clients count alike, and of a message its signs
    alone, so that none can outvote two others. Unless the experiment names codecs, ``uplink`` and ``downlink`` are
    ``[sign]``: a bit a parameter each way, exact where every move is sent (not under ``bounded_staleness``). With one
    local step the votes are on the gradient, as in the paper.

    Args:
        server_lr: η_s > 0, the length of a step in each coordinate.
    """

    votes: ClassVar[bool] = True
    uplink: ClassVar[tuple[str, ...]] = ("sign",)
    downlink: ClassVar[tuple[str, ...]] = ("sign",)

    server_lr: PositiveFloat = 0.003

    def needs(self) -> Sequence[Term]:
        """Whole updates: no vote counts in part."""
        return [*super().needs(), Term(Feature.WHOLE_UPDATES, "choose fedavg", "each of which has one vote")]

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse codecs of clients' votes that are not exact, and votes that come back."""
        super().check_experiment(experiment)
        if experiment.error_feedback.kind != "none":
            raise InvalidExperiment(
                f"algorithm sign_majority needs error_feedback none, since votes have no errors, got "
                f"{experiment.error_feedback.kind}: leave error_feedback out"
            )
        if (kinds := [codec.kind for codec in experiment.uplink]) not in ([], ["sign"], ["sign", "zstd"]):
            raise InvalidExperiment(
                f"algorithm sign_majority needs an uplink that leaves signs as they are, got {', '.join(kinds)}: leave "
                "uplink out, which is [sign] then"
            )

    def init(self, params_P: Tensor) -> State:
        """The model."""
        return State(params_P)

    def report(self, work: ClientWork) -> Report:
        """The signs of the update."""
        # Not sign(): a zero must vote, or a message would need a third value.
        return Report((torch.where(work.update_KP >= 0, 1.0, -1.0).double(),), torch.ones_like(work.samples_K1))

    def apply(self, state: State, reduced: Reduced) -> State:
        """A step by the majority."""
        votes_P = torch.round(reduced.update_P * reduced.clients)  # whole numbers: a mean of thirds is none
        ties_T = (votes_P == 0).nonzero().view(-1)
        votes_P[ties_T] = torch.from_numpy(2.0 * reduced.stream().integers(2, size=len(ties_T)) - 1)
        return State(state.model_P + self.server_lr * votes_P.sign())
