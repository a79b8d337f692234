"""Local steps and neighbourhoods for rules over ``mix``, in place of training and of a network."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fed.server.mixing.neighbourhood import EncodedRows
from fed.vectors.mixing import Weights


class Model(NamedTuple):
    """A model."""

    model_NP: Tensor


@dataclass(frozen=True)
class Quadratics:
    """Steps of gradient descent on f_i = ½ Σ a_i (x − b_i)², of some peers a row each."""

    curvature_NP: Tensor
    centre_NP: Tensor
    step_size: float
    steps: int = 1

    @classmethod
    def random(cls, peers: int, size: int, step_size: float, steps: int = 1) -> "Quadratics":
        generator = torch.Generator().manual_seed(peers)
        curvature_NP = 0.5 + torch.rand(peers, size, generator=generator, dtype=torch.float64)
        return cls(curvature_NP, torch.randn(peers, size, generator=generator, dtype=torch.float64), step_size, steps)

    @property
    def lr(self) -> float:
        return self.step_size * self.steps

    @property
    def optimum_P(self) -> Tensor:  # noqa: N802  # a shape suffix
        return (self.curvature_NP * self.centre_NP).sum(0) / self.curvature_NP.sum(0)

    def gradient(self, x_NP: Tensor) -> Tensor:
        return self.curvature_NP * (x_NP - self.centre_NP)

    def __call__(self, x_NP: Tensor) -> Tensor:
        for _ in range(self.steps):
            x_NP = x_NP - self.step_size * self.gradient(x_NP)
        return x_NP

    def of(self, row: int) -> "Quadratics":
        only = slice(row, row + 1)
        return Quadratics(self.curvature_NP[only], self.centre_NP[only], self.step_size, self.steps)


@dataclass
class Together:
    """All peers at once, whose messages are kept."""

    weights: Weights
    sent: list[tuple[tuple[Tensor, ...], EncodedRows | None]] = field(default_factory=list)

    def exchange(self, *parts_NM: Tensor, encoded: EncodedRows | None = None) -> tuple[Weights, tuple[Tensor, ...]]:
        self.sent.append((parts_NM, encoded))
        return self.weights, parts_NM if encoded is None else (*parts_NM, encoded.vectors_NM)


def row_alone(weights: Weights, row: int) -> tuple[Weights, Tensor]:
    """One row's weights, as the peer itself has them, and who its neighbours are."""
    is_its = weights.rows_X == row
    places_X, only = torch.arange(int(is_its.sum())), slice(row, row + 1)
    own = Weights(weights.own_N1[only], weights.degrees_N[only], places_X, weights.weights_X[is_its])
    return own, weights.senders_X[is_its]


class Alone:
    """One peer, that gets what its neighbours sent when all were together, and decodes what was encoded.

    Args:
        row: its place among all.
        together: all.
        number: the round.
        copies: of its neighbours' sums, in the order of the peers; moved.
    """

    def __init__(self, row: int, together: Together, number: int = 1, copies: Tensor | None = None) -> None:
        self.weights, self._neighbours = row_alone(together.weights, row)
        self._row, self._sent, self._number, self._copies = row, iter(together.sent), number, copies

    def exchange(self, *parts_NM: Tensor, encoded: EncodedRows | None = None) -> tuple[Weights, tuple[Tensor, ...]]:
        """Hold what it sends to what it sent among the others."""
        sent_parts, sent_encoded = next(self._sent)
        for part_NM, sent_NM in zip(parts_NM, sent_parts, strict=True):
            assert torch.equal(part_NM[0], sent_NM[self._row])
        received = tuple(sent_NM[self._neighbours] for sent_NM in sent_parts)
        if encoded is None or sent_encoded is None:
            assert encoded is sent_encoded
            return self.weights, received
        assert torch.equal(encoded.messages[0], sent_encoded.messages[self._row])
        theirs = self._neighbours.tolist()
        vectors_SM = encoded.decode([sent_encoded.messages[peer] for peer in theirs], theirs, self._number)
        if encoded.before_NM is not None:
            assert self._copies is not None
            self._copies[self._neighbours] += vectors_SM
            vectors_SM = self._copies[self._neighbours]
        return self.weights, (*received, vectors_SM)
