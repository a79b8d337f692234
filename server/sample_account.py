"""Account of a run whose clients' samples are private: what each client's own steps have cost its samples."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

from fed.errors import BudgetSpent
from fed.privacy.accounting import epsilon, epsilon_rdp, most_costly
from fed.privacy.entries import Cost
from fed.privacy.releases import Release
from fed.server.privacy_account import PrivacyAccount, in_order

__all__ = ["SampleAccount"]


@dataclass(eq=False)
class SampleAccount(PrivacyAccount):
    """Cost of the rounds so far to the samples of each client.

    A sample is in the batches of its own client alone: rounds cost the clients that were asked, each by its own number
    of samples, whether they have answered or not. A client that cannot afford another task is not asked any more.

    Args:
        size_of: client → number of its samples.
        releases_of: number of samples → releases of one task.
    """

    _: KW_ONLY
    size_of: Callable[[int | str], int]
    releases_of: Callable[[int], Mapping[Release, int]]

    def __post_init__(self) -> None:
        """Begin before the first round."""
        self._task = cache(self.releases_of)
        super().__post_init__()

    def allowed(self, number: int, asked: Sequence[int | str], registered: Iterable[int | str]) -> list[int | str]:
        """Clients that may be asked, of those that were drawn.

        Args:
            number: number of the round, from 1.
            asked: clients that were drawn.
            registered: all clients.

        Raises:
            BudgetSpent: if no client may be asked any more.
        """
        may = [client for client in asked if self._has_left(client)]
        if not may and not any(map(self._has_left, registered)):
            raise BudgetSpent(
                f"in round {number} every client would pass privacy.budget_epsilon = {self.privacy.budget_epsilon:g}: "
                f"the rounds before it have cost up to {self.epsilon():.4g}"
            )
        return may

    def estimate(self) -> float:
        """The same: it is computed for the few clients that may have lost most."""
        return self.epsilon()

    def summary(self) -> dict[str, Any]:
        """Part of the summary: ε, δ and the releases of the client that has lost most, and each client's own ε."""
        by_client = {client: epsilon(self._borne_by(client), self.privacy.delta) for client in self._of_client}
        return {**super().summary(), "epsilon_by_client": {str(client): by_client[client] for client in by_client}}

    def _costs_of(self, asked: Iterable[int | str], sampling: float, *, number: int, is_repeated: bool) -> list[Cost]:
        """Costs of a round, one for the clients of each number of samples."""
        by_size: dict[int, list[int | str]] = {}
        for client in in_order(asked):
            by_size.setdefault(self.size_of(client), []).append(client)
        return [Cost(releases=self._task(size), clients=by_size[size]) for size in sorted(by_size)]

    def _affords(self, costs: Sequence[Cost], budget: float) -> bool:
        """True: clients without means are not asked."""
        return True

    def _has_left(self, client: int | str) -> bool:
        """True if a client can afford another task."""
        budget = self.privacy.budget_epsilon
        if budget is None:
            return True
        after = self._borne_by(client) + Counter(self._task(self.size_of(client)))
        # Rényi's bound is cheap, and never below ε.
        return epsilon_rdp(after, self.privacy.delta) <= budget or epsilon(after, self.privacy.delta) <= budget

    def _borne_by(self, client: int | str) -> Counter[Release]:
        """Releases about a client: its own, and those about all clients, of other runs of the federation."""
        return Counter(self._of_all.releases) + self._of_client.get(client, Counter())

    def _releases(self) -> Counter[Release]:
        """Releases of the client that has lost most."""
        of_all = Counter(self._of_all.releases)
        borne = [of_all, *(of_all + counts for counts in self._of_client.values())]
        different = {frozenset(counts.items()): counts for counts in borne}
        return different[most_costly(different, self.privacy.delta)]
