"""Account of a run's privacy: what its rounds have cost, and whether the budget allows one more."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fed.errors import BudgetSpent
from fed.privacy.accounting import Accountant, epsilon
from fed.privacy.entries import Cost, Head, uncontained
from fed.privacy.kinds import Privacy
from fed.privacy.ledger import Ledger
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor

__all__ = ["PrivacyAccount", "in_order"]


@dataclass(eq=False)
class PrivacyAccount:
    """Cost of the rounds so far to the client that has lost most.

    Where chance hides who takes part, a round costs all clients the same. Elsewhere it costs those that were asked,
    whether they have answered or not.

    The costs are those of the ledger, and a checkpoint has no say in them. With fresh noise all entries count, of other
    runs too, and a round's entry is written before its tasks are sent. In a simulation, whose noise is repeated, the
    entries of rounds that are still to come belong to an earlier run of the same experiment: each counts once its round
    has come, and an entry is written before the model moves.

    Attributes:
        expected: expected number of clients of the round that has begun.
        hides_cohorts: True if the promise rests on nobody's knowing who takes part in it.

    Args:
        privacy: settings of the experiment.
        ledger: ledger of what is released.
        rounds: number of rounds of the run.
        fixed: fixed point of the messages under secure aggregation; None without.
    """

    privacy: Privacy
    ledger: Ledger
    rounds: int
    fixed: FixedPoint | None = None
    expected: float = field(default=0.0, init=False)
    hides_cohorts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Begin before the first round."""
        self.ledger.begin_unit(self.privacy.unit)
        self._costs: list[Cost] = []  # of the round
        self._costs_again: Callable[[], list[Cost]] = list  # those of the round where it has been released before
        self._count_until(0)

    def allowed(self, number: int, asked: Sequence[int | str], registered: Iterable[int | str]) -> list[int | str]:
        """Clients that may be asked: all that were drawn.

        Args:
            number: number of the round, from 1.
            asked: clients that were drawn.
            registered: all clients.
        """
        return list(asked)

    def begin(self, number: int, asked: Sequence[int | str], *, sampling: float, expected: float) -> None:
        """Account for a round before anything of it is released.

        Args:
            number: number of the round, from 1.
            asked: clients that are asked.
            sampling: q, as :meth:`fed.privacy.kinds.Privacy.amplified` says.
            expected: expected number of clients.

        Raises:
            BudgetSpent: if the round would cost more than the budget allows.
            LedgerFailed: if it cannot be written down.
        """
        self.expected = expected
        self.hides_cohorts = sampling < 1
        self._round = number
        self._costs = self._costs_of(asked, sampling, number=number, is_repeated=False)
        self._costs_again = partial(self._costs_of, asked, sampling, number=number, is_repeated=True)
        earlier = self.ledger.of_round(number)
        if not self.ledger.repeats_noise:
            costs = self._costs_again() if earlier else self._costs
            self._charge(number, costs)
            self.ledger.append(number, costs)
            return
        costs = [cost for entry in earlier for cost in entry.costs]
        self._charge(number, costs if earlier else self._costs)

    def _costs_of(self, asked: Iterable[int | str], sampling: float, *, number: int, is_repeated: bool) -> list[Cost]:
        """Costs of a round; none where it costs nothing."""
        releases = self.privacy.releases(
            sampling, self.fixed, number=number, rounds=self.rounds, is_repeated=is_repeated
        )
        # Who was drawn must stay a secret where the promise rests on it.
        clients = None if self.privacy.costs_all(sampling) else in_order(asked)
        return [Cost(releases=releases, clients=clients)] if releases else []

    def release(self, number: int, make: Callable[[int], Tensor]) -> Tensor:
        """Make what a round releases, once it is written down.

        Args:
            number: number of the round, from 1.
            make: function from the number of other sums that the round has released before to the release.

        Raises:
            BudgetSpent: if the budget does not allow what the round releases beside its earlier releases.
            LedgerFailed: if it cannot be written down.
        """
        if not self.ledger.repeats_noise:
            return make(0)  # with noise that is never drawn again
        attempts = self.ledger.attempts(number)
        costs_again = self._costs_again() if attempts else None

        def made(attempt: int) -> tuple[Tensor, str | None]:
            if attempt == attempts and costs_again is not None:  # it is none of the earlier ones
                self._charge(number, costs_again)
            found = make(attempt)
            content = found.cpu().numpy().data if self.ledger.is_kept else None
            return found, None if content is None else hashlib.sha256(content).hexdigest()

        return self.ledger.record(number, self._costs, made, costs_again=costs_again)

    def release_nothing(self, number: int) -> None:
        """Write down a round in which the model does not move: who was asked is told all the same.

        Args:
            number: number of the round, from 1.
        """
        if self.ledger.repeats_noise:
            nothing = hashlib.sha256(b"nothing").hexdigest()
            costs_again = self._costs_again() if self.ledger.attempts(number) else None
            self.ledger.record(number, self._costs, lambda _: (None, nothing), costs_again=costs_again)

    def epsilon(self) -> float:
        """ε of the client that has lost most."""
        return epsilon(self._releases(), self.privacy.delta)

    def _releases(self) -> Counter[Release]:
        """Releases about the client that has lost most."""
        of_all = self._of_all.releases
        most = self._most if _are_in_order(self._kinds) else self._worst(self._of_client.values())
        return Counter(of_all) + most if of_all else most

    def summary(self) -> dict[str, Any]:
        """Part of the summary: ε, δ, and the releases about the client that has lost most."""
        return {"epsilon": self.epsilon(), "delta": self.privacy.delta, "releases": _written(self._releases())}

    def estimate(self) -> float:
        """The same within 0.2 %, at a cost that no round feels."""
        return self.epsilon() if self._most else self._of_all.estimate()

    def state(self) -> Tree:
        """The last round, and the head of the ledger, for a checkpoint."""
        head = self.ledger.head
        return {"round": self._round, "ledger": [head.count, head.sha256]}

    def restore(self, state: Any) -> None:
        """Resume from what :meth:`state` wrote down.

        Raises:
            InvalidLedger: if the ledger is older than the checkpoint.
        """
        count, sha256 = state["ledger"]
        self.ledger.check(Head(count, sha256), f"the checkpoint of round {state['round']}")
        self._count_until(state["round"])

    def _count_until(self, number: int) -> None:
        """Count the ledger's entries, in a simulation those until this round alone."""
        self._round = number
        self._of_all = Accountant(self.privacy.delta)
        self._of_client: dict[int | str, Counter[Release]] = {}
        self._weights: dict[int | str, float] = {}
        self._kinds: set[Release] = set()  # that clients bear in rounds of their own
        self._most: Counter[Release] = Counter()  # of the client that has lost most in such rounds, by its weight
        self._most_weight = 0.0
        costs = [
            cost
            for entry in self.ledger.entries
            if not self.ledger.repeats_noise or entry.round <= number
            for cost in entry.costs
        ]
        self._add(costs)

    def _charge(self, number: int, costs: Sequence[Cost]) -> None:
        """Count costs, if the budget allows them.

        Raises:
            BudgetSpent: if it does not.
        """
        budget = self.privacy.budget_epsilon
        if budget is not None and not self._affords(costs, budget):
            raise BudgetSpent(
                f"round {number} would pass privacy.budget_epsilon = {budget:g}: what was released before it has cost "
                f"{self.epsilon():.4g}"
            )
        self._add(costs)

    def _affords(self, costs: Sequence[Cost], budget: float) -> bool:
        of_all: Counter[Release] = Counter()
        charged: dict[int | str, Counter[Release]] = {}
        for cost in costs:
            if cost.clients is None:
                of_all.update(cost.releases)
                continue
            for client in cost.clients:
                before = charged.get(client) or self._of_client.get(client, Counter())
                charged[client] = before + Counter(cost.releases)
        if _are_in_order(self._kinds.union(*charged.values())):
            most = max([self._most, *charged.values()], key=_weight)
        else:
            most = self._worst([*self._of_client.values(), *charged.values()])
        if not most:
            return self._of_all.affords(of_all, budget)
        total = Counter(self._of_all.releases) + of_all + most
        return epsilon(total, self.privacy.delta) <= budget

    def _worst(self, borne: Iterable[Counter[Release]]) -> Counter[Release]:
        """Releases that cost most, of those that clients bear; none of no clients."""
        of_all = Counter(self._of_all.releases)
        return max(uncontained(borne), key=lambda own: epsilon(of_all + own, self.privacy.delta), default=Counter())

    def _add(self, costs: Sequence[Cost]) -> None:
        for cost in costs:
            if cost.clients is None:
                self._of_all.add(cost.releases)
                continue
            self._kinds.update(cost.releases)
            added = _weight(cost.releases)
            for client in cost.clients:
                counts = self._of_client.setdefault(client, Counter())
                for release, count in cost.releases.items():
                    counts[release] += count
                weight = self._weights[client] = self._weights.get(client, 0.0) + added
                if weight > self._most_weight:
                    self._most_weight = weight
                    self._most = counts


def in_order(clients: Iterable[int | str]) -> list[int | str]:
    """Clients as the ledger names them."""
    return sorted(clients, key=lambda client: (isinstance(client, str), client))


def _are_in_order(kinds: Collection[Release]) -> bool:
    """True if what costs more has the larger weight, which with Skellam noise holds for releases of one kind alone."""
    return len(kinds) <= 1 or all(release.skellam_l2 is None for release in kinds)


def _weight(releases: Mapping[Release, int]) -> float:
    """Σ 1/z², by which the costs of releases without sampling are compared."""
    return math.fsum(count / release.noise_multiplier**2 for release, count in releases.items())


def _written(releases: Mapping[Release, int]) -> list[Any]:
    return [[release.keys(), count] for release, count in releases.items()]
