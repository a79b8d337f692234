"""Graphs of secure aggregation: who shares secrets with whom, and how many shares recover one.

Bell et al. 2020, "Secure single-server aggregation with (poly)logarithmic overhead", doi 10.1145/3372297.3417885.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from fed.errors import InvalidExperiment

__all__ = ["Degree", "SessionGraph", "complete_degree", "harary_degree"]

_SECURITY_BITS = 40  # σ of the paper: an attack succeeds with a probability of 2⁻⁴⁰ at most
_CORRECTNESS_BITS = 20  # η: a session fails by the graph's fault with a probability of 2⁻²⁰ at most


class Degree(NamedTuple):
    """Size of a session's graph.

    Args:
        neighbours: k, number of clients with which a client agrees on masks.
        threshold: t, number of shares that recover a secret.
        is_complete: True if every client is every other's mask partner, and keeps a share of its own secrets, too.
    """

    neighbours: int
    threshold: int
    is_complete: bool

    @property
    def holders(self) -> int:
        """The number of clients that hold a share of one secret."""
        return self.neighbours + self.is_complete


def complete_degree(clients: int, colluders: int, threshold: int | None = None) -> Degree:
    """The complete graph: every client shares with all, itself too.

    .. math:: 2t > n + A

    With such a threshold a coordinator that tells two groups of honest clients different survivors cannot recover both
    secrets of one client: at least one group is too small. Up to n − t clients may drop out.

    Args:
        clients: n ≥ 2, the number of clients.
        colluders: A in [0, n), the number of clients that collude with the coordinator.
        threshold: t, number of shares that recover a secret; None: the larger of ⌊2n/3⌋ + 1 and the least that is
            allowed.

    Raises:
        InvalidExperiment: if a threshold is given that is too low, or more than there are clients.

    Example:
        >>> complete_degree(10, 1)
        Degree(neighbours=9, threshold=7, is_complete=True)
    """
    least = (clients + colluders) // 2 + 1
    if threshold is None:
        return Degree(clients - 1, max(2 * clients // 3 + 1, least), True)
    if not least <= threshold <= clients:
        raise InvalidExperiment(
            f"secure_aggregation.threshold must be from {least} to {clients} with {clients} clients, got {threshold}: "
            "change it, or write auto"
        )
    return Degree(clients - 1, threshold, True)


@lru_cache(maxsize=64)
def harary_degree(clients: int, colluders: int, dropped: float, *, is_semi_honest: bool = False) -> Degree:
    r"""The smallest even degree k of a random Harary graph that is safe, and its threshold t.

    Of the clients A are corrupt, B = A + ⌊δn⌋ are corrupt or drop out, and S = ⌈(1−δ)n⌉ stay. With a probability
    of 1 − 2⁻⁴⁰ at least, the honest clients that stay are connected and no client has t corrupt mask partners. With a
    probability of 1 − 2⁻²⁰ at least, each client has t mask partners that stay:

    .. math::
        \ln\left[\tfrac{n(n-k-1)}{2} \tfrac{B!\,(n-k)!}{n!\,(B-k)!}\right] < -41 \ln 2, \qquad
        P[\mathrm{Hyp}(n, A, k) > t_1] ≤ 2^{-41}/n, \qquad t_2 = \mathrm{quantile}_{2^{-20}/n}\,\mathrm{Hyp}(n, S, k)

    Against a coordinator that lies about who dropped out, t₁ becomes ⌈(t₁ + k − 1.25)/2⌉. It must be below t₂, and
    t = max(t₁ + 1, 2).

    Args:
        clients: n, the number of clients.
        colluders: A in [0, n), the number of clients that collude with the coordinator.
        dropped: δ in [0, 1), the largest share of clients that drops out.
        is_semi_honest: True if the coordinator is trusted to follow the protocol.

    Raises:
        InvalidExperiment: if no degree below n is safe.

    Example:
        >>> harary_degree(1000, 100, 0.1)
        Degree(neighbours=96, threshold=67, is_complete=False)
    """
    low = 1  # bounds of half the degree
    high = (clients - 1) // 2
    if high < 1 or _threshold(clients, 2 * high, colluders, dropped, is_semi_honest) is None:
        raise InvalidExperiment(
            f"secure_aggregation: no sparse graph of {clients} clients is safe with {colluders} colluders (corrupt) "
            f"and max_drop_out {dropped}: ask more clients a round, lower one of the two, or choose graph: complete"
        )
    # A larger degree is safe where a smaller one is: halving finds the smallest.
    while low < high:
        middle = (low + high) // 2
        if _threshold(clients, 2 * middle, colluders, dropped, is_semi_honest) is not None:
            high = middle
        else:
            low = middle + 1
    threshold = _threshold(clients, 2 * low, colluders, dropped, is_semi_honest)
    assert threshold is not None
    return Degree(2 * low, threshold, False)


def _threshold(clients: int, degree: int, colluders: int, dropped: float, is_semi_honest: bool) -> int | None:
    """The threshold t of a degree; None if the degree is not safe."""
    from scipy.stats import hypergeom  # which takes a second to load

    # Drop-outs cut the graph of masks just as corrupt clients do.
    lost = colluders + math.floor(dropped * clients)
    staying = math.ceil((1 - dropped) * clients)
    if degree <= lost:  # with fewer lost clients than mask partners none is cut off
        pairs = math.log(clients) + math.log(clients - degree - 1) - math.log(2) if clients > degree + 1 else -math.inf
        # Logarithms, since the factorials of many clients leave float64's range.
        ways = math.lgamma(lost + 1) + math.lgamma(clients - degree + 1)
        ways -= math.lgamma(clients + 1) + math.lgamma(lost - degree + 1)
        if pairs + ways >= -(_SECURITY_BITS + 1) * math.log(2):
            return None
    of_corrupt = hypergeom(clients, colluders, degree)
    # Half of the failure probability for each of two events, and a union bound over the clients.
    most = 2.0 ** -(_SECURITY_BITS + 1) / clients
    corrupt_most = next(t for t in range(degree + 1) if of_corrupt.sf(t) <= most)
    if not is_semi_honest:
        corrupt_most = math.ceil((corrupt_most + degree - 1.25) / 2)
    staying_least = int(hypergeom(clients, staying, degree).ppf(2.0**-_CORRECTNESS_BITS / clients))
    return max(corrupt_most + 1, 2) if staying_least > corrupt_most else None


@dataclass(frozen=True)
class SessionGraph:
    """Graph of mask partners in a session: a circle in an order that the list of all keys decides.

    Clients are named by their places in that list. In the circle each has k/2 mask partners on either side.

    Args:
        clients: n, the number of clients.
        degree: degree of the graph.
        digest: digest of the list of keys, which decides the order.

    Example:
        >>> SessionGraph(4, complete_degree(4, 0.0), b"").neighbours(1)
        (0, 2, 3)
    """

    clients: int
    degree: Degree
    digest: bytes
    _known: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def neighbours(self, place: int) -> tuple[int, ...]:
        """The places with which a client agrees on masks, in ascending order."""
        if place not in self._known:
            self._known[place] = self._neighbours(place)
        return self._known[place]

    def _neighbours(self, place: int) -> tuple[int, ...]:
        if self.degree.is_complete:
            return tuple(other for other in range(self.clients) if other != place)
        half = self.degree.neighbours // 2
        first = (self._place_of[place] - half) % self.clients
        # Twice around, so that a window needs no modulo.
        window = self._circle_twice[first : first + 2 * half + 1]
        window.remove(place)
        return tuple(sorted(window))

    def holders(self, place: int) -> tuple[int, ...]:
        """The places that hold shares of a client's secrets, in ascending order."""
        return tuple(range(self.clients)) if self.degree.is_complete else self.neighbours(place)

    @cached_property
    def _order(self) -> Sequence[int]:
        return sorted(
            range(self.clients), key=lambda place: hashlib.sha256(self.digest + place.to_bytes(4, "big")).digest()
        )

    @cached_property
    def _circle_twice(self) -> list[int]:
        return [*self._order, *self._order]

    @cached_property
    def _place_of(self) -> Sequence[int]:
        places = [0] * self.clients
        for at, place in enumerate(self._order):
            places[place] = at
        return places
