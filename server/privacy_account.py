"""Account of a run's privacy: what its rounds have cost, and whether the budget allows one more."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fed.errors import BudgetSpent
from fed.privacy.accounting import Accountant, epsilon
from fed.privacy.kinds import Privacy
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.storage.checkpoints import Tree

__all__ = ["PrivacyAccount"]


@dataclass(eq=False)
class PrivacyAccount:
    """Cost of the rounds so far to the client that has lost most.

    Where chance hides who takes part, a round costs all clients the same. Elsewhere it costs those that were asked,
    whether they have answered or not.

    Attributes:
        expected: expected number of clients of the round that has begun.

    Args:
        privacy: settings of the experiment.
        fixed: fixed point of the messages under secure aggregation; None without.
    """

    privacy: Privacy
    fixed: FixedPoint | None = None
    expected: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Begin before the first round."""
        self._of_all = Accountant(self.privacy.delta)
        self._of_client: dict[int | str, Counter[Release]] = {}
        self._most: Mapping[Release, int] = {}  # of the client that has lost most in rounds of its own

    def begin(self, number: int, asked: Sequence[int | str], *, sampling: float, expected: float) -> None:
        """Account for a round before anything of it is released.

        Args:
            number: number of the round, from 1.
            asked: clients that are asked.
            sampling: q, as :meth:`fed.privacy.kinds.Privacy.amplified` says.
            expected: expected number of clients.

        Raises:
            BudgetSpent: if the round would cost more than the budget allows.
        """
        self.expected = expected
        releases = {self.privacy.release(sampling, self.fixed): 1}
        costs_all = sampling < 1
        charged = {client: self._of_client.get(client, Counter()) + Counter(releases) for client in asked}
        if costs_all:
            charged = {}
        most = max([self._most, *charged.values()], key=_cost)
        if not self._allows(releases if costs_all else {}, most):
            spent = self.epsilon()
            raise BudgetSpent(
                f"round {number} would pass privacy.budget_epsilon = {self.privacy.budget_epsilon:g}: the rounds "
                f"before it have cost {spent:.4g}"
            )
        self._of_client |= charged
        self._most = most
        if costs_all:
            self._of_all.add(releases)

    def _allows(self, releases: Mapping[Release, int], most: Mapping[Release, int]) -> bool:
        """True if the budget allows more releases about all, and what one client has in rounds of its own."""
        budget = self.privacy.budget_epsilon
        if budget is None:
            return True
        if not most:
            return self._of_all.affords(releases, budget)
        total = Counter(self._of_all.releases) + Counter(most) + Counter(releases)
        return epsilon(total, self.privacy.delta) <= budget

    def epsilon(self) -> float:
        """ε of the client that has lost most."""
        return epsilon(self._releases(), self.privacy.delta)

    def _releases(self) -> Counter[Release]:
        """Releases about the client that has lost most."""
        return Counter(self._of_all.releases) + Counter(self._most)

    def summary(self) -> dict[str, Any]:
        """Part of the summary: ε, δ, and the releases about the client that has lost most."""
        return {"epsilon": self.epsilon(), "delta": self.privacy.delta, "releases": _written(self._releases())}

    def estimate(self) -> float:
        """The same within 0.2 %, at a cost that no round feels."""
        return self.epsilon() if self._most else self._of_all.estimate()

    def state(self) -> Tree:
        """State for a checkpoint."""
        return {
            "of_all": _written(self._of_all.releases),
            "of_client": [[client, _written(counts)] for client, counts in self._of_client.items()],
        }

    def restore(self, state: Any) -> None:
        """Resume from what :meth:`state` wrote down."""
        self._of_all = Accountant(self.privacy.delta, _read(state["of_all"]))
        self._of_client = {client: Counter(_read(counts)) for client, counts in state["of_client"]}
        self._most = max(self._of_client.values(), key=_cost, default={})


def _cost(releases: Mapping[Release, int]) -> float:
    """Σ 1/z², by which the costs of releases without sampling are compared."""
    return math.fsum(count / release.noise_multiplier**2 for release, count in releases.items())


def _written(releases: Mapping[Release, int]) -> list[Any]:
    return [[release.keys(), count] for release, count in releases.items()]


def _read(written: Any) -> dict[Release, int]:
    return {Release.from_keys(keys): count for keys, count in written}
