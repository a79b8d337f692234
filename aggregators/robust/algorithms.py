"""Robust algorithms: federated averaging with a mean that attackers cannot move far; each is a chain of pieces.

Clients count alike unless told otherwise, for an attacker may claim any number of samples: where ``weights`` are
``samples``, an attacker's influence grows with its claim, and a bound on the number of attackers bounds nothing.
"""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fed.aggregators.robust.centres import CenteredClipping, Median, NormBound, TrimmedMean
from fed.aggregators.robust.distances import Bucketing, Bulyan, GeometricMedian, Krum, MultiKrum, NearestNeighbourMixing
from fed.aggregators.transforms import Composed, Reducer, Transform, Weigh
from fed.errors import ValueRange

__all__ = [
    "FedBulyan",
    "FedCenteredClipping",
    "FedGeometricMedian",
    "FedKrum",
    "FedMedian",
    "FedMultiKrum",
    "FedNormBound",
    "FedTrimmedMean",
    "Robust",
]


@dataclass(frozen=True, kw_only=True)
class Robust(Composed):
    """Robust rule in place of the mean, with optional pre-aggregation before it.

    Args:
        weights: rule of the weights. clients: all clients count alike; samples: a client counts by the number of
            samples that it claims, and an attacker can claim any number.
        bucketing: s ≥ 1, size of the random buckets of clients, each replaced by its mean (Karimireddy et al. 2022,
            2006.09365), so that the rule sees ⌈n/s⌉ messages. 1: no buckets.
        nearest_neighbour_mixing: True if each message is replaced by the mean of its n − f nearest ones (Allouah et al.
            2023, 2302.01772), after the bucketing.
    """

    rule: ClassVar[type[Reducer]]
    """The transform in place of the mean."""
    is_mean: ClassVar[bool] = False
    """True if the rule ends in a mean, in which each bucket counts by its number of clients."""

    attackers: NonNegativeInt = 0
    weights: Literal["clients", "samples"] = "clients"
    bucketing: PositiveInt = 1
    nearest_neighbour_mixing: bool = False

    def __post_init__(self) -> None:
        """Check keys against each other."""
        super().__post_init__()
        if self.nearest_neighbour_mixing and not self.attackers:
            raise ValueRange(
                f"{type(self).__name__}: attackers must be 1 or more for nearest_neighbour_mixing, got 0, with which "
                "every message would become the mean of all: say how many attackers to expect, or leave the mixing out"
            )

    def transforms(self) -> tuple[Transform, ...]:
        """Weights, bucketing, mixing and the rule, which has the hyper-parameters of the same names."""
        # Buckets come before the mixing, so that the n − f nearest are counted among what the rule sees.
        chain: list[Transform] = [Weigh(by=self.weights)]
        if self.bucketing > 1:
            chain.append(Bucketing(size=self.bucketing, counts_clients=self.is_mean))
        if self.nearest_neighbour_mixing:
            chain.append(NearestNeighbourMixing(attackers=self.attackers))
        own = vars(self)
        given = {field.name: own[field.name] for field in fields(self.rule) if field.name in own}
        return *chain, self.rule(**given)


@dataclass(frozen=True, kw_only=True)
class FedMedian(Robust):
    r"""Each coordinate moves by the updates' median (Yin et al. 2018, 1803.01498).

    .. math:: x_c ← x_c + \mathrm{med}_{i ∈ S} (y_{i,c} - x_c)

    Breaks down at half: with f < n/2 attackers each coordinate stays within the honest values. Where clients' data
    differ the median is no estimate of the mean, and learns what most clients know.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 replies. Only the mixing uses f;
            the rule itself needs none.
    """

    rule: ClassVar[type[Reducer]] = Median


@dataclass(frozen=True, kw_only=True)
class FedTrimmedMean(Robust):
    r"""Each coordinate moves by the updates' mean without the f largest and f smallest (Yin et al. 2018, 1803.01498).

    .. math:: x_c ← x_c + \frac 1 {n - 2f} \sum_{k = f+1}^{n-f} Δ_{(k),c}, \qquad Δ_{(1),c} ≤ … ≤ Δ_{(n),c}

    Breaks down at f + 1: up to f attackers leave each coordinate within the honest values. With samples as weights,
    the share f/n of their sum is cut at either end.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 replies.
    """

    rule: ClassVar[type[Reducer]] = TrimmedMean

    attackers: NonNegativeInt = 1


@dataclass(frozen=True, kw_only=True)
class _Unweighted(Robust):
    """Rule whose guarantee holds for equal weights alone.

    Args:
        weights: rule of the weights. clients: all clients count alike; the algorithm chooses among clients, and refuses
            samples.
    """

    attackers: NonNegativeInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights != "clients":
            raise ValueRange(
                f"{type(self).__name__}: weights must be clients, for the rule chooses among clients and counts each "
                f"as one, got {self.weights}: use median, trimmed_mean or geometric_median to weigh by samples"
            )


@dataclass(frozen=True, kw_only=True)
class FedKrum(_Unweighted):
    r"""The model moves by the one update that is nearest to its n − f − 2 nearest others (Blanchard et al. 2017).

    .. math:: x ← x + Δ_k, \qquad k = \arg\min_i \sum_{j ∈ N_i} ‖Δ_i - Δ_j‖^2

    "Machine learning with adversaries: Byzantine tolerant gradient descent", NeurIPS 2017 (1703.02757). Breaks down
    at f + 1. One client's update is as noisy as that client's data are few.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 3 replies.
    """

    rule: ClassVar[type[Reducer]] = Krum


@dataclass(frozen=True, kw_only=True)
class FedMultiKrum(_Unweighted):
    r"""The model moves by the mean of the m updates with the best scores of Krum (Blanchard et al. 2017, 1703.02757).

    .. math:: x ← x + \frac 1 m \sum_{k ∈ K} Δ_k, \qquad
        K = \text{the } m \text{ with the least } \sum_{j ∈ N_i} ‖Δ_i - Δ_j‖^2

    Breaks down at f + 1. The larger m, the less noise, and the more an attacker that is chosen counts for.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 3 replies.
        selected: m, number of updates in the mean, from 1 (Krum) to n − f − 2 (the default).
    """

    rule: ClassVar[type[Reducer]] = MultiKrum

    selected: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class FedBulyan(_Unweighted):
    r"""The mean of n − 4f about the median of n − 2f that Krum chooses (El Mhamdi et al. 2018, 1802.07927).

    .. math:: x_c ← x_c + \frac 1 {n - 4f} \sum_{i ∈ B_c} Δ_{i,c}, \qquad
        B_c = \text{the } n - 4f \text{ nearest to the median of } c \text{ among those chosen}

    Breaks down at f + 1. It closes the way by which a single coordinate hides in Krum's distances.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 4f + 3 replies.
    """

    rule: ClassVar[type[Reducer]] = Bulyan


@dataclass(frozen=True, kw_only=True)
class FedGeometricMedian(Robust):
    r"""The model moves to where distances to the clients' models have the least sum (Pillutla et al. 2022, 1912.13445).

    .. math:: x ← x + \arg\min_v \sum_{i ∈ S} p_i ‖Δ_i - v‖, \qquad \text{by } v ← \sum_i β_i Δ_i / \sum_i β_i,
        \quad β_i = p_i / \max(ν, ‖Δ_i - v‖)

    RFA. Breaks down at half: attackers with a share α < 1/2 of the weight move it by no more than 2/(1 − 2α) times
    the largest honest distance.

    Args:
        nu: ν > 0, the distance below which an update attracts no more strongly.
        iterations: largest number of steps of Weiszfeld's algorithm, ≥ 1; they end earlier once the point hardly moves.
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 replies. Only the mixing uses f;
            the rule itself needs none.
    """

    rule: ClassVar[type[Reducer]] = GeometricMedian

    nu: PositiveFloat = 1e-6
    iterations: PositiveInt = 1000


@dataclass(frozen=True, kw_only=True)
class FedCenteredClipping(Robust):
    r"""The model moves by a centre that no update draws further than a radius (Karimireddy et al. 2021, 2012.10333).

    .. math:: v ← v + \sum_{i ∈ S} p_i (Δ_i - v) \min(1, τ / ‖Δ_i - v‖), \qquad x ← x + v

    v stays from round to round: honest updates, which are alike over time, add up in it, and those of attackers do not.
    The damage is bounded rather than prevented: attackers with a share α of the weight move v by no more than α τ a
    step.

    Args:
        radius: τ > 0, about the distance of honest updates from their mean; with a smaller radius v follows slowly.
        iterations: steps of v in a round, ≥ 1.
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 replies. Only the mixing uses f;
            the rule itself needs none.
    """

    rule: ClassVar[type[Reducer]] = CenteredClipping

    radius: PositiveFloat = 1.0
    iterations: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class FedNormBound(Robust):
    r"""The model moves by the mean of the updates, each shortened to a norm (Sun et al. 2019, 1911.07963).

    .. math:: x ← x + \sum_{i ∈ S} p_i Δ_i \min(1, M / ‖Δ_i‖)

    Bounded rather than unbroken: attackers with a share α of the weight move the mean by no more than α M, each round
    anew. It keeps single updates from ruining the model; many small ones in one direction pass.

    Args:
        norm: M > 0, the largest norm of an update.
        attackers: f ≥ 0, the number of attackers that the mixing expects; the rule itself needs none.
    """

    rule: ClassVar[type[Reducer]] = NormBound
    is_mean: ClassVar[bool] = True

    norm: PositiveFloat = 1.0
