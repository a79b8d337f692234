"""Low-rank adapters whose factors are averaged, with what the product of the means lacks added to the adapted matrix.

Singhal, Ponkshe & Vepakomma, "FedEx-LoRA: exact aggregation for federated and efficient fine-tuning of large language
models", ACL 2025, arXiv 2410.09432, section 4.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass

from fed.aggregators.adapters import AdaptedLayer, OverAdapters, State
from fed.vectors.tensors import Tensor

__all__ = ["FedExLoRA"]


@dataclass(frozen=True, kw_only=True)
class FedExLoRA(OverAdapters):
    r"""Adapters' factors are averaged, and W takes what that leaves out (Singhal et al. 2024, 2410.09432).

    .. math::
        B ← \bar B, \quad A ← \bar A, \quad W ← W + s \Big( \sum_{i ∈ S} p_i B_i A_i - \bar B \bar A \Big)
          = W + s \sum_{i ∈ S} p_i (B_i - \bar B)(A_i - \bar A)

    So the model is that of the mean of the clients' products, exactly, although a product of means is no mean of
    products. The residual is the covariance of the factors over clients: 0 where one client answers, or where all have
    one A or one B. s is the adapter's scale. Other parameters that the model trains are averaged as in FedAvg.

    Of n clients it is a product of rank (n − 1) r, found as Welford (1962) adds a covariance up, client by client:

    .. math:: \sum_{k=2}^{n} \frac{p_k P_{k-1}}{P_k} (B_k - \bar B_{k-1})(A_k - \bar A_{k-1}),
        \qquad P_k = \sum_{i ≤ k} p_i

    The server needs each client's factors. With each task it sends those of the residuals that the client lacks, or
    the matrices W where these are fewer bytes.
    """

    def terms(self, messages: int) -> int:
        """One fewer than there are clients."""
        return max(messages - 1, 0)

    def stacked(
        self, layer: AdaptedLayer, state: State, messages_SM: Tensor, shares_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Factors of the covariance of the clients' factors."""
        # Factors and their changes have one covariance, for the clients began at the same factors.
        ups, downs = self.pair(layer, messages_SM)
        sums_S = shares_S.cumsum(0)
        weights = shares_S[1:] * sums_S[:-1] / sums_S[1:]
        return _from_earlier_means(ups, shares_S), weights[:, None, None] * _from_earlier_means(downs, shares_S)


def _from_earlier_means(rows_S: Tensor, shares_S: Tensor) -> Tensor:
    """Rows but the first, each less the weighted mean of those before it, [S - 1, ...]."""
    shares = shares_S[:, None, None]
    means = (shares * rows_S).cumsum(0) / shares.cumsum(0)
    return rows_S[1:] - means[:-1]
