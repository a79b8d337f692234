"""Synchronous rounds: dispatch to a cohort, wait for all or enough of its answers, and apply the mean."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, PositiveFloat, PositiveInt

from fed.aggregators.base import Aggregator
from fed.aggregators.client_side import weighs_samples
from fed.config.compatibility import Feature, Sections, Term
from fed.config.components import Component
from fed.config.hyperparameters import Hyperparameters
from fed.config.registry import SAMPLINGS
from fed.errors import InvalidExperiment, RunFailed
from fed.quantities import counted
from fed.secure_aggregation.settings import settings_of
from fed.server.eligible_clients import EligibleClients
from fed.server.rounds.sampling import CohortDraw, Sampling

if TYPE_CHECKING:
    from fed.server.coordinator import Coordinator
    from fed.server.fleet import Fleet
    from fed.server.round_stats import RoundStats
    from fed.server.way_in import UpdateAccumulator

__all__ = ["STAY_LONGER", "Rounds", "Synchronous", "WithoutCohorts", "await_clients", "fail_if_stalled"]

_log = logging.getLogger(__name__)
STAY_LONGER = (
    "let clients stay for longer or come more often, as devices.staying_s and devices.availability say in a simulation"
)
"""Remedy, in errors, where no client will ever be there again."""
# Devices are there at night: within a day each has had its chance.
_DAY_S = 86400.0
_LONGEST_S = 7 * _DAY_S


@dataclass(frozen=True, kw_only=True)
class Rounds(Hyperparameters, ABC):
    """Base of all policies of rounds.

    Args:
        count: number of rounds, each of which moves the model once.
        sampling: rule that draws the clients of a round: uniform, weighted, round_robin, poisson or power_of_choice.
        evaluate_every: rounds from one evaluation to the next; the last round is always evaluated.
        diverged: effect of a simulated client whose loss or update is not finite: ``stop`` ends the run; with ``drop``
            the client fails its task, is counted as ``diverged`` and named in the log. A real node that reports it
            fails its task in either case.
    """

    keeps_late: ClassVar[bool] = False
    """True if answers count, however late they come."""

    count: PositiveInt = 50
    sampling: Annotated[Component, SAMPLINGS] = field(default_factory=lambda: SAMPLINGS.validate({}))
    evaluate_every: PositiveInt = 1
    diverged: Literal["stop", "drop"] = "stop"

    @property
    def waits_alone(self) -> bool:
        """True if a peer waits in rounds in which all others are away."""
        return True

    @property
    def drops_diverged(self) -> bool:
        """True if a client that diverges has failed, rather than the run."""
        return self.diverged == "drop"

    def needs(self) -> Sequence[Term]:
        """Features that the sampling needs, and clients without which a round can end where they drop out."""
        if not self.drops_diverged:
            return self.rule.needs()
        features = Feature.REPORTS, Feature.MEAN_OF_ANSWERS
        terms = [Term(feature, "write rounds.diverged: stop", subject="rounds.diverged drop") for feature in features]
        return [*self.rule.needs(), *terms]

    def init(self) -> Any:
        """State of the policy before the first round; None: it keeps nothing between rounds.

        A checkpoint holds what its method ``state`` gives, from which its class method ``restore`` makes it again.
        """
        return None

    @abstractmethod
    def round(self, coordinator: "Coordinator", number: int, state: Any) -> "RoundStats":
        """Run a round, until the global model moves.

        Args:
            coordinator: coordinator that dispatches tasks and collects updates.
            number: number of the round, from 1.
            state: state from :meth:`init`, which the policy changes.
        """

    def evaluates(self, number: int) -> bool:
        """True if the model is evaluated after a round."""
        return number % self.evaluate_every == 0 or number == self.count

    def draw(self, coordinator: "Coordinator", number: int, count: int, again: int = 0) -> list[int | str]:
        """Draw available clients, or all where there are fewer, by the sampling rule of the section.

        Args:
            coordinator: coordinator of the clients.
            number: number of the round, from 1.
            count: number of clients to draw.
            again: number of clients that have already been drawn for this round.
        """
        fleet = coordinator.fleet
        record = coordinator.participations
        if record is not None:
            fleet = cast("Fleet", EligibleClients(fleet, record, number))
            record.say_if_few(len(fleet.available()), count, number)
        if not count or not fleet.available():
            return []
        draw = CohortDraw(
            fleet=fleet,
            number=number,
            cohort=count,
            streams=coordinator.cohort_streams or coordinator.streams,
            losses=coordinator.losses,
            again=again,
        )
        drawn = self.rule.sample(draw)
        # A user's sampling may draw from elsewhere than from the clients that are available.
        return drawn if record is None else [client for client in dict.fromkeys(drawn) if record.allows(client, number)]

    @cached_property
    def rule(self) -> Sampling:
        """Sampling rule."""
        rule: Sampling = SAMPLINGS.validate(self.sampling).make()
        return rule


class WithoutCohorts(Rounds):
    """Base of policies that wait for no cohort."""

    keeps_late: ClassVar[bool] = True

    def needs(self) -> Sequence[Term]:
        """A coordinator."""
        return [*super().needs(), Term(Feature.COORDINATOR, "choose synchronous rounds")]

    def lacks(self) -> Sequence[Term]:
        """Cohorts."""
        return (Term(Feature.COHORTS, "choose synchronous rounds", "which wait for nobody"),)


@dataclass(frozen=True, kw_only=True)
class Synchronous(Rounds):
    """Each round a random cohort trains from the same model, and the round ends when all have answered.

    A round may ask more clients than it needs, and end at a deadline; clients that have not answered then are
    stragglers, counted late, and are not waited for. Before a round begins it waits until the cohort is available, or
    all members where they are fewer, for at most a day.

    Args:
        cohort: number of clients of a round, or ``all``. Algorithms over mix take only ``all``; for the baselines,
            whose clients always take part, it has no effect.
        over_selection: number of clients that are asked, as a multiple of the cohort, ≥ 1; a round ends with the
            cohort's number of replies. Google's system asks 1.3 times as many (Bonawitz et al. 2019, 1902.01046).
        deadline_s: seconds after its beginning at which a round ends with the replies that are there; never unless
            given.
        quorum: smallest share of the cohort whose replies move the model, deadline or not; other clients are asked in
            place of those that fail. A round that can ask nobody else for a day ends, and the model stays as it was.
        partial_work: answer of a client that cannot finish by the deadline, or is cut off: with ``accept`` the steps
            that it has taken, with ``drop`` none.
        backup_after_s: seconds after its beginning at which a round asks another client in place of each that has not
            answered; the first answer counts. Never unless given.
        alone: behaviour of a peer that all others have left, in rounds of an algorithm over mix: ``wait`` until another
            is there, or ``go_on`` alone.
    """

    cohort: PositiveInt | Literal["all"] = "all"
    over_selection: Annotated[float, Field(ge=1)] = 1.0
    deadline_s: PositiveFloat | None = None
    quorum: Annotated[float, Field(ge=0, le=1)] = 0.0
    partial_work: Literal["accept", "drop"] = "accept"
    backup_after_s: PositiveFloat | None = None
    alone: Literal["wait", "go_on"] = "wait"

    @property
    def waits_alone(self) -> bool:
        """True if a peer waits in rounds in which all others are away."""
        return self.alone == "wait"

    def needs(self) -> Sequence[Term]:
        """Neighbours, where peers go on without any."""
        if self.waits_alone:
            return super().needs()
        neighbours = Term(Feature.NEIGHBOURS, "leave rounds.alone out", subject="rounds.alone go_on")
        return [*super().needs(), neighbours]

    def check(self, population: int) -> None:
        """Check the policy against the number of clients.

        Raises:
            InvalidExperiment: if the cohort is larger than the population, or than the sampling can draw, or backups
                would come after the deadline.
        """
        if self.cohort != "all" and self.cohort > population:
            raise InvalidExperiment(
                f"rounds.cohort must be at most {population}, the number of clients, got {self.cohort}: "
                "lower it, or write all"
            )
        self.rule.check(self.asked_of(population))
        if self.backup_after_s and self.deadline_s and self.backup_after_s >= self.deadline_s:
            raise InvalidExperiment(
                f"rounds.backup_after_s must be below the deadline of {self.deadline_s} s, got {self.backup_after_s}: "
                "lower it, or drop one of them"
            )

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse cohorts whose sum could not be revealed under secure aggregation, and weights without a bound."""
        secure = settings_of(experiment)
        algorithm = experiment.algorithm.make()
        if secure is None or not isinstance(algorithm, Aggregator):
            return
        # For its error, where no bound follows from the algorithm's weights.
        if secure.max_weight == "auto" and experiment.privacy is None:  # under privacy all weigh 1
            secure.heaviest(weighs_samples=weighs_samples(algorithm))
        if self.cohort != "all":
            secure.check(math.ceil(self.cohort * self.over_selection), self.cohort)

    def check_peers(self, population: int) -> None:
        """Check the policy for peers, who all take part in every round.

        Raises:
            InvalidExperiment: if it chooses among them, or says how a coordinator waits.
        """
        if self.cohort not in ("all", population):
            raise InvalidExperiment(
                f"rounds.cohort must be {population}, the number of peers, without a coordinator, got {self.cohort}: "
                "leave it out, or write all"
            )
        coordinators = {
            "sampling": ("uniform", SAMPLINGS.validate(self.sampling).kind),
            "over_selection": (1.0, self.over_selection),
            "quorum": (0.0, self.quorum),
            "backup_after_s": (None, self.backup_after_s),
            "partial_work": ("accept", self.partial_work),
        }
        for key, (default, value) in coordinators.items():
            if value != default:
                raise InvalidExperiment(
                    f"rounds.{key} needs a coordinator that asks clients, got {value} among peers, who all train in "
                    "every round: leave it out, or choose an algorithm over mean such as fedavg"
                )

    def lacks(self) -> Sequence[Term]:
        """Fixed cohorts, where others are asked for clients that fail or are slow."""
        found = [("quorum", "0", self.quorum)] if self.quorum else []
        found += [("backup_after_s", "null", self.backup_after_s)] if self.backup_after_s is not None else []
        return [
            Term(Feature.FIXED_COHORTS, f"write rounds.{key}: {plain}", subject=f"rounds.{key} {value}")
            for key, plain, value in found
        ]

    def most_asked(self, population: int) -> int:
        """Largest number of clients that get a task in a round."""
        return self.rule.most(self.asked_of(population), population)

    def cohort_of(self, population: int) -> int:
        """Number of clients that are to answer in a round."""
        return population if self.cohort == "all" else min(self.cohort, population)

    def asked_of(self, population: int) -> int:
        """Number of clients that get a task in a round."""
        return min(math.ceil(self.cohort_of(population) * self.over_selection), population)

    def round(self, coordinator: "Coordinator", number: int, state: None) -> "RoundStats":
        """Run one round, numbered from 1."""
        fleet = coordinator.fleet
        # A round of all takes whoever is there; one of a cohort waits until the cohort can be filled.
        members = 1 if self.cohort == "all" else self.cohort_of(len(fleet.registered()))
        await_clients(coordinator, number, max(members, 1))  # 0 where nobody has registered yet
        # Only now: clients may have registered during the wait.
        cohort = self.cohort_of(len(fleet.registered()))
        asked = self.asked_of(len(fleet.registered()))
        begins_s = fleet.clock
        until = math.inf if self.deadline_s is None else begins_s + self.deadline_s
        accumulator = coordinator.new_accumulator()
        account = coordinator.account
        # Before the draw: a client that registers meanwhile makes the others' chances smaller, and not larger.
        sampling = 1.0 if account is None else account.privacy.amplified(self, len(fleet.registered()))
        chosen = self.draw(coordinator, number, asked)
        if account is not None:
            chosen = account.allowed(number, chosen, fleet.registered())
            account.begin(number, chosen, sampling=sampling, expected=cohort)
        self._ask(coordinator, accumulator, number, chosen, until)
        enough = cohort if asked > cohort else None
        if self.backup_after_s is not None:
            # Fewer may have been there than the cohort has.
            enough = min(cohort, len(chosen))
            coordinator.collect(accumulator, until=begins_s + self.backup_after_s, enough=enough)
            # One backup for each task that is still open.
            slow = len(coordinator.open) if len(accumulator.replied) < enough else 0
            backups = self.draw(coordinator, number, slow, again=len(accumulator.asked))
            self._ask(coordinator, accumulator, number, backups, until)
        missing = None if enough is None else enough - len(accumulator.replied)
        coordinator.collect(accumulator, until=until, enough=missing)
        quorum = math.ceil(self.quorum * min(cohort, len(chosen)))
        self._reach_quorum(coordinator, accumulator, number, quorum)
        # In a round without a limit nothing is late.
        coordinator.cancel(accumulator, are_late=enough is not None or self.deadline_s is not None)
        return coordinator.step(accumulator, number, quorum=quorum)

    def _ask(
        self,
        coordinator: "Coordinator",
        accumulator: "UpdateAccumulator",
        number: int,
        clients: list[int | str],
        until: float = math.inf,
    ) -> None:
        # Backups have what is left of the deadline.
        left_s = None if math.isinf(until) else max(until - coordinator.fleet.clock, 0.0)
        cohort = self.cohort_of(len(coordinator.fleet.registered()))
        # Under privacy the number that was drawn must not show in the others' steps.
        is_cohort = not accumulator.asked and self.over_selection == 1 and coordinator.account is None
        coordinator.dispatch(
            accumulator,
            number,
            clients,
            cohort=None if is_cohort else cohort,  # the step size is scaled for the cohort, not for the backups
            deadline_s=left_s,
            takes_parts=self.partial_work == "accept",
        )

    def _reach_quorum(
        self, coordinator: "Coordinator", accumulator: "UpdateAccumulator", number: int, quorum: int
    ) -> None:
        """Wait past the deadline until the quorum has answered; dispatch to others where too few are left.

        The wait ends below the quorum where for a day nobody can be asked: clients have left, or keep states and await
        the verdict on what they have sent. So it does where the sampling draws nobody.
        """
        begins_s = coordinator.fleet.clock
        while len(accumulator.replied) < quorum:
            fail_if_stalled(coordinator, number, begins_s)
            missing = quorum - len(accumulator.replied)
            _log.info("round %d waits for its quorum: %d of %d have replied", number, len(accumulator.replied), quorum)
            lacking = missing - len(coordinator.open)
            if lacking > 0:
                _wait_a_day(coordinator, number, lacking)
                if not coordinator.fleet.available() and not coordinator.open:
                    return
                clients = self.draw(coordinator, number, lacking, again=len(accumulator.asked))
                if not clients and not coordinator.open:
                    return  # a sampling that may draw nobody would draw nobody again, for no time has passed
                self._ask(coordinator, accumulator, number, clients)
            coordinator.collect(accumulator, enough=missing)


def fail_if_stalled(coordinator: "Coordinator", number: int, begins_s: float) -> None:
    """Fail if a round has waited for a week of the clients' time.

    Args:
        coordinator: coordinator of the round.
        number: number of the round, from 1.
        begins_s: time at which it began, in seconds of the fleet's clock.

    Raises:
        RunFailed: if it has not come to its end by then, as where no client stays for as long as its task takes.
    """
    if coordinator.fleet.clock > begins_s + _LONGEST_S:
        waiting = [task.client for task in coordinator.open.values()]
        reason = f"it waits for {waiting[:3]}" if waiting else "those that it asks fail or are away"
        raise RunFailed(
            f"round {number} has not ended within a week of the clients' time; {reason}: give tasks less to do, ask "
            "fewer clients, or lower a quorum or a buffer"
        )


def await_clients(coordinator: "Coordinator", number: int, count: int) -> None:
    """Wait until this many clients are available, or an answer has arrived; after a day one is enough.

    Args:
        coordinator: coordinator of the clients.
        number: number of the round, for the message.
        count: number of clients to wait for.

    Raises:
        RunFailed: if no client ever will, or none has for a week of the clients' time.
    """
    fleet = coordinator.fleet
    begins_s = fleet.clock
    _wait_a_day(coordinator, number, count)
    while not fleet.available() and not coordinator.open:
        if fleet.clock > begins_s + _LONGEST_S:
            raise RunFailed(
                f"round {number} has waited for a week of the clients' time, and at no time were there as many clients "
                f"as it needs: {STAY_LONGER}, or lower secure_aggregation.minimum_cohort where there is one"
            )
        if not fleet.wait():
            raise RunFailed(f"round {number} needs a client, and none will ever be there again: {STAY_LONGER}")


def _wait_a_day(coordinator: "Coordinator", number: int, count: int) -> None:
    """Wait for clients for at most a day, or until an answer has arrived."""
    fleet = coordinator.fleet
    limit_s = fleet.clock + _DAY_S
    is_said = False
    while (there := len(fleet.available())) < count and fleet.clock < limit_s:
        if not is_said:
            _log.info("round %d waits for %s, of whom %d can take a task", number, counted(count, "client"), there)
            is_said = True
        if not fleet.wait(limit_s):
            break
