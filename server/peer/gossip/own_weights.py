"""Weights of a round at one peer: its row and its column of W, by the names of its neighbours.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fed.vectors.mixing import Weights
from fed.vectors.tensors import Tensor, torch

__all__ = ["OwnWeights"]


@dataclass(frozen=True)
class OwnWeights:
    """Row and column of W that are one peer's.

    Args:
        own: W_ii, the weight of its own vector.
        of_senders: W_ij of each neighbour j that sends to it, in the order of the members.
        of_receivers: W_ji of each neighbour j that it sends to.
    """

    own: float = 1.0
    of_senders: Mapping[str, float] = field(default_factory=dict)
    of_receivers: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, matrix_NN: Tensor, names: Sequence[str], own: str) -> "OwnWeights":
        """Weights of one peer in a sparse matrix.

        Args:
            matrix_NN: matrix W of the members.
            names: names of the members, in the order of its rows.
            own: name of the peer.
        """
        matrix_NN = matrix_NN.coalesce()
        rows_X, senders_X = matrix_NN.indices()
        weights_X = matrix_NN.values()
        row = rows_X == names.index(own)
        column = senders_X == names.index(own)
        return cls(
            own=float(weights_X[row & column].sum()),
            of_senders=_by_name(names, senders_X[row & ~column], weights_X[row & ~column]),
            of_receivers=_by_name(names, rows_X[column & ~row], weights_X[column & ~row]),
        )

    @property
    def neighbours(self) -> frozenset[str]:
        """Names of those that send to this peer, and of those that it sends to."""
        return frozenset(self.of_senders) | frozenset(self.of_receivers)

    def after(self, received: Collection[str], reached: Collection[str], *, pushes: bool) -> Weights:
        """Weights of the vectors of an exchange; this peer keeps the weight of vectors that did not arrive.

        Args:
            received: names of the senders whose vectors count here.
            reached: names of the receivers at which this peer's vectors count.
            pushes: True if the column of W must still sum to 1, and with it the mass of all peers stays; else the row.
        """
        here = [name for name in self.of_senders if name in received]
        if pushes:
            kept = sum(weight for name, weight in self.of_receivers.items() if name not in reached)
        else:
            kept = sum(self.of_senders[name] for name in sorted(self.of_senders.keys() - {*received}))
        return Weights(
            own_N1=torch.full((1, 1), self.own + kept, dtype=torch.float64),
            degrees_N=torch.tensor([len(here)]),
            senders_X=torch.arange(len(here)),
            weights_X=torch.tensor([self.of_senders[name] for name in here], dtype=torch.float64),
        )


def _by_name(names: Sequence[str], places_X: Tensor, weights_X: Tensor) -> dict[str, float]:
    return {names[place]: weight for place, weight in zip(places_X.tolist(), weights_X.tolist(), strict=True)}
