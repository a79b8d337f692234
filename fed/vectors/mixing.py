"""Weighted averages over neighbours: W as each row's neighbours and weights, and W x by one kernel.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Weights"]

_NUMBERS_AT_ONCE = 2**18
"""Products in flight, 2 MiB of them: about a core's second-level cache."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The rows of a mixing matrix W that are here: all simulated peers', or a single peer's.

    Args:
        own_N1: W_ii, the weight of each row's own vector.
        degrees_N: number of neighbours of each row.
        senders_X: place of each neighbour among the vectors that were sent, ascending within a row.
        weights_X: W_ij, the weight of each neighbour.

    Example:
        >>> weights = Weights.of(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]))
        >>> x_NM = torch.tensor([[4.0], [0.0], [8.0]], dtype=torch.float64)
        >>> weights.mixed(x_NM, x_NM)[:, 0].tolist()
        [2.0, 4.0, 6.0]
    """

    own_N1: Tensor
    degrees_N: Tensor
    senders_X: Tensor
    weights_X: Tensor

    @classmethod
    def of(cls, matrix_NN: Tensor) -> "Weights":
        """The rows of a whole matrix, dense or sparse; column j has the weights of the vector that j sends."""
        # Coalesced indices ascend, which fixes the order of the sums.
        matrix_NN = (matrix_NN if matrix_NN.is_sparse else matrix_NN.to_sparse()).coalesce()
        rows_X, senders_X = matrix_NN.indices()
        weights_X = matrix_NN.values().double()
        is_own = rows_X == senders_X
        own_N1 = torch.zeros(len(matrix_NN), 1, dtype=torch.float64)
        own_N1[rows_X[is_own], 0] = weights_X[is_own]
        degrees_N = torch.bincount(rows_X[~is_own], minlength=len(matrix_NN))
        return cls(
            own_N1=own_N1,
            degrees_N=degrees_N,
            senders_X=senders_X[~is_own],
            weights_X=weights_X[~is_own],
        )

    @cached_property
    def rows_X(self) -> Tensor:  # noqa: N802  # a shape suffix
        """Each pair's row."""
        return torch.repeat_interleave(torch.arange(len(self.degrees_N)), self.degrees_N)

    def among(self, present_N: Tensor) -> "Weights":
        """The rows of the present peers, from a whole matrix; weight that they would send to absent ones they keep.

        Columns keep their sums, and a symmetric matrix its rows' too: doubly stochastic weights stay so.
        """
        is_sent = present_N[self.senders_X]
        is_received = present_N[self.rows_X]
        kept = is_sent & ~is_received
        stays = is_sent & is_received
        own_N1 = self.own_N1.index_add(0, self.senders_X[kept], self.weights_X[kept, None])
        degrees_N = torch.bincount(self.rows_X[stays], minlength=len(present_N))
        # Present peers alone send vectors, in the same order: the places of absent ones are left out.
        places_N = present_N.cumsum(0) - 1
        return Weights(
            own_N1=own_N1[present_N],
            degrees_N=degrees_N[present_N],
            senders_X=places_N[self.senders_X[stays]],
            weights_X=self.weights_X[stays],
        )

    def without(self, left_out_X: Tensor) -> "Weights":
        """The same rows without some pairs, from a whole matrix; the senders of these pairs keep their weight."""
        own_N1 = self.own_N1.index_add(0, self.senders_X[left_out_X], self.weights_X[left_out_X, None])
        degrees_N = torch.bincount(self.rows_X[~left_out_X], minlength=len(self.degrees_N))
        return Weights(
            own_N1=own_N1,
            degrees_N=degrees_N,
            senders_X=self.senders_X[~left_out_X],
            weights_X=self.weights_X[~left_out_X],
        )

    def mixed(self, own_NM: Tensor, sent_SM: Tensor) -> Tensor:
        r"""W x in float64, whose rows have the same bits whichever others are computed with them.

        .. math:: (W x)_i = (\dots (W_{ij} x_j + W_{ik} x_k) + \dots) + W_{ii} x_i, \qquad j < k < \dots

        Each product and each sum is rounded by itself, in this order. A product that is fused into a sum is rounded
        once with it, and whether it is fused depends on the place in memory: so do the last bits of a sparse product.

        Args:
            own_NM: own vectors of the rows.
            sent_SM: vectors that the neighbours sent, in any floating type.
        """
        width = max(8, _NUMBERS_AT_ONCE // max(1, len(self._products[0])))  # 8 numbers of float64 are a cache line
        if own_NM.shape[1] <= width:
            return self._mixed(own_NM, sent_SM)
        mixed_NM = torch.empty(own_NM.shape, dtype=torch.float64)
        for first in range(0, own_NM.shape[1], width):
            columns = slice(first, first + width)
            mixed_NM[:, columns] = self._mixed(own_NM[:, columns], sent_SM[:, columns])
        return mixed_NM

    def _mixed(self, own_NM: Tensor, sent_SM: Tensor) -> Tensor:
        senders_Y, weights_Y1, products_X = self._products
        if not torch.equal(senders_Y, torch.arange(len(sent_SM))):  # as they are where each has one weight for all
            sent_SM = sent_SM.index_select(0, senders_Y)
        # Weights are float64: float32 vectors are widened before the product. The sum has no product to be fused with.
        sums_NM = nn.functional.embedding_bag(products_X, sent_SM * weights_Y1, self._firsts_N, mode="sum")
        return sums_NM.add_(own_NM * self.own_N1)

    def by_neighbour(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Every row's first neighbour, then the second of those rows that have one, and so on.

        Yields:
            The rows [K], the neighbours' places among the vectors that were sent [K], and their weights [K, 1].
        """
        for number in range(int(self.degrees_N.max())):
            rows_K = (self.degrees_N > number).nonzero()[:, 0]
            pairs_K = self._firsts_N[rows_K] + number
            yield rows_K, self.senders_X[pairs_K], self.weights_X[pairs_K, None]

    @cached_property
    def _firsts_N(self) -> Tensor:  # noqa: N802
        """The place of each row's first pair."""
        return self.degrees_N.cumsum(0) - self.degrees_N

    @cached_property
    def _products(self) -> tuple[Tensor, Tensor, Tensor]:
        """Senders [Y] and weights [Y, 1] of the products that there are, and each pair's product [X].

        Rows share those in which a sender has the same weight.
        """
        # NumPy orders complex numbers by sender, then by weight.
        pairs_X = self.senders_X.numpy() + 1j * self.weights_X.numpy()
        pairs_Y, products_X = np.unique(pairs_X, return_inverse=True)
        # A strided view would keep the complex numbers in memory.
        weights_Y1 = torch.from_numpy(pairs_Y.imag.copy()).unsqueeze(1)
        return torch.from_numpy(pairs_Y.real.astype(np.int64)), weights_Y1, torch.from_numpy(products_X)
