"""Local SGD: workers take steps by themselves, and average their models periodically.

Stich, "Local SGD converges fast and communicates little", ICLR 2019, arXiv 1805.09767.
"""

from dataclasses import dataclass

from fed.aggregators.transforms import Composed, Transform, Weigh

__all__ = ["LocalSGD"]


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Composed):
    r"""Periodic averaging: the next model is the mean of all models, each counting alike (Stich 2019, 1805.09767).

    .. math:: x ← \frac{1}{|S|} \sum_{i ∈ S} y_i

    The period H between averages is ``local.steps``. From FedAvg it differs in the weights, which there are the
    clients' samples: H steps of one worker are worth as much as those of another.
    """

    def transforms(self) -> tuple[Transform, ...]:
        """Equal weights."""
        return (Weigh(by="clients"),)
