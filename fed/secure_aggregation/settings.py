"""Settings of secure aggregation: the section of an experiment, and the checks that both sides make."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from fed.config.compatibility import Feature, Term
from fed.config.components import Component
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.graph import Degree, complete_degree, harary_degree

__all__ = ["SecureAggregation", "settings_of"]

_LARGEST_AUTO = 100  # clients up to which graph: auto is complete
_SESSIONS_TRIED = 100
_MOST_NEIGHBOURS = 511  # whose shares fit into a message


def _check_clip(value: object, check: Callable[[object], Any]) -> Any:
    with contextlib.suppress(ValidationError):
        return check(value)
    raise PydanticCustomError("clip", "Input should be a number above 0, or a list of such numbers")


_Clip: TypeAlias = Annotated[
    PositiveFloat | Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=1)], WrapValidator(_check_clip)
]


@dataclass(frozen=True, kw_only=True)
class SecureAggregation(Hyperparameters):
    """Secure aggregation: the coordinator learns the sum of the clients' messages, and nothing else of them.

    Bonawitz et al. 2017 (1611.04482) with the round that makes a coordinator consistent; above 100 clients the graph of
    Bell et al. 2020. Numbers travel in fixed point, modulo 2^bits.

    Args:
        threshold: number t of shares that recover a secret: t clients must stay to a round's end; auto: from the cohort
            and corrupt.
        clip: bound on each number's absolute value: one for all, or one for each part of a message, the float buffers
            last.
        bits: number R of bits of each number on the wire; fewer bits leave fewer levels.
        max_weight: largest weight of a client, above which it is capped; auto: 1, where the algorithm weighs clients
            alike.
        minimum_cohort: smallest number of clients in a sum; each client refuses to reveal a sum of fewer.
        max_drop_out: share δ of a cohort that may drop out of a round, in [0, 1).
        corrupt: share γ of a cohort, in [0, 1) and rounded up to whole clients, that may collude with the coordinator
            and learn nothing more.
        graph: graph of the clients that agree on masks; auto: complete up to 100 clients, a random sparse one above.
        randomness: source of a real client's own draws, such as the order of its batches and the rounding: the seed,
            which the coordinator knows, for the bits of the simulation; or the client's system, which nobody else can
            follow.
        mode: way in which simulations compute it: the protocol itself (real), or its arithmetic alone, to the same bits
            (emulated).
    """

    threshold: PositiveInt | Literal["auto"] = "auto"
    clip: _Clip = 8.0
    bits: Literal[16, 32, 64] = 32
    max_weight: PositiveInt | Literal["auto"] = "auto"
    minimum_cohort: Annotated[int, Field(ge=2)] = 5
    max_drop_out: Annotated[float, Field(ge=0, lt=1)] = 0.2
    corrupt: Annotated[float, Field(ge=0, lt=1)] = 0.1
    graph: Literal["auto", "complete", "harary"] = "auto"
    randomness: Literal["seed", "system"] = "seed"
    mode: Literal["emulated", "real"] = "emulated"

    def needs(self) -> Sequence[Term]:
        """Clients that report sums, in rounds that wait for a cohort, encoded alike."""
        whole = "because masks cancel in the sum of a cohort alone"
        return (
            _term(Feature.REPORTS),
            _term(Feature.COHORTS, whole),
            _term(Feature.FIXED_COHORTS, whole),
            _term(Feature.DIRECT_MESSAGES),
            _term(Feature.COMMON_ENCODING, "because masked messages are added before they are decoded"),
            _term(Feature.ANONYMOUS_SUMS),
        )

    def lacks(self) -> Sequence[Term]:
        """Features that read a single client's message or numbers."""
        why = "which hides them from the coordinator"
        hidden = "which hides them from everybody"
        return (
            _term(Feature.SINGLE_ANSWERS, why),
            _term(Feature.CLIENT_NUMBERS, why),
            _term(Feature.LEGIBLE_MESSAGES, hidden),
        )

    def colluders(self, clients: int) -> int:
        """A = ⌈γn⌉, the clients of a session that may collude with the coordinator.

        Args:
            clients: n, number of clients of the session.
        """
        # 0.07 · 100 is 7.000000000000001 in float64, and tolerates 7.
        return math.ceil(round(self.corrupt * clients, 9))

    def degree(self, clients: int, *, is_begun: bool = False) -> Degree:
        """The graph's degree and threshold in a session of this many clients.

        Args:
            clients: n, number of clients that are asked, or that have sent keys.
            is_begun: True if some of the clients that were asked may have dropped out already, so that the others need
                not tolerate the loss of ``max_drop_out`` once more.

        Raises:
            InvalidExperiment: if no degree is safe, or too few clients would be left once ``max_drop_out`` have dropped
                out.
        """
        if clients < self.minimum_cohort:
            raise InvalidExperiment(
                f"a secure round must ask at least secure_aggregation.minimum_cohort = {self.minimum_cohort} clients, "
                f"got {clients}: raise rounds.cohort, or fed server's --min-nodes, or lower minimum_cohort"
            )
        degree = self._degree(clients, is_begun=is_begun)
        if degree.neighbours > _MOST_NEIGHBOURS:
            raise InvalidExperiment(
                f"secure_aggregation lets a client share its secrets with {_MOST_NEIGHBOURS} others at most, got "
                f"{degree.neighbours} of {clients} clients: write graph: auto, or lower corrupt, max_drop_out or "
                "rounds.cohort"
            )
        return degree

    def _degree(self, clients: int, *, is_begun: bool) -> Degree:
        given = None if self.threshold == "auto" else self.threshold
        if self.graph == "complete" or (self.graph == "auto" and clients <= _LARGEST_AUTO):
            degree = complete_degree(clients, self.colluders(clients), given)
            left = clients - math.floor(self.max_drop_out * clients)
            # At the beginning alone: later some of the allowed drop-outs have already happened.
            if left < degree.threshold and not is_begun:
                way_out = "lower max_drop_out or corrupt" if given is None else "lower it or max_drop_out"
                raise InvalidExperiment(
                    f"secure_aggregation.threshold must be at most {left}, the clients that are left when "
                    f"max_drop_out = {self.max_drop_out} of {clients} have dropped out, got {degree.threshold}"
                    f"{' by auto' if given is None else ''}: {way_out}"
                )
            return degree
        degree = harary_degree(clients, self.colluders(clients), self.max_drop_out)
        if given is None:
            return degree
        if not degree.threshold <= given <= degree.neighbours:
            raise InvalidExperiment(
                f"secure_aggregation.threshold must be from {degree.threshold} to {degree.neighbours} in a sparse "
                f"graph of {clients} clients, got {given}: change it, or write auto"
            )
        return degree._replace(threshold=given)

    def least_asked(self, most: int) -> int:
        """Smallest number of clients that can hold a session, if none of them drops out.

        Args:
            most: largest number of clients that a round asks, which can hold a session.
        """
        # In turn: safety does not grow with the number, since degrees are even and shares are rounded.
        for clients in range(self.minimum_cohort, most):
            with contextlib.suppress(InvalidExperiment):
                self.degree(clients, is_begun=True)
                return clients
        return most

    def least_survivors(self, clients: int) -> int:
        """Smallest number of survivors whose sum a session reveals.

        A sparse graph is made for ⌊δn⌋ drop-outs: with more, honest survivors may fall apart into groups, and the
        coordinator would learn the sum of each.

        Args:
            clients: n, number of clients of the session.
        """
        degree = self.degree(clients, is_begun=True)
        least = degree.threshold if degree.is_complete else clients - math.floor(self.max_drop_out * clients)
        return max(self.minimum_cohort, least)

    def least_honest(self) -> int:
        """Smallest number h of honest clients in a sum that clients reveal, whatever cohort the coordinator chooses.

        It is that of the smallest sessions: in larger ones more survivors are needed than may collude in addition.
        """
        found = []
        for clients in range(self.minimum_cohort, self.minimum_cohort + _SESSIONS_TRIED):
            with contextlib.suppress(InvalidExperiment):
                found.append(self.least_survivors(clients) - self.colluders(clients))
        return max(min(found, default=1), 1)

    def facts(self, fixed: FixedPoint) -> dict[str, float]:
        """Figures of the largest sessions of a run, for its log and its summary.

        Args:
            fixed: fixed point of the run's messages.
        """
        degree = self.degree(fixed.most_clients, is_begun=True)
        return {
            "clients": fixed.most_clients,
            "neighbours": degree.neighbours,
            "threshold": degree.threshold,
            "least_survivors": self.least_survivors(fixed.most_clients),
            "corrupt_clients": self.colluders(fixed.most_clients),
            "levels": fixed.levels,
            "largest_rounding": max(fixed.error_bounds),
        }

    def heaviest(self, *, weighs_samples: bool) -> int:
        """Largest weight of a client, w_max.

        Args:
            weighs_samples: True if the algorithm weighs clients by their samples, False if it weighs them alike.

        Raises:
            InvalidExperiment: if the weight depends on samples and is not given.
        """
        if self.max_weight != "auto":
            return self.max_weight
        if weighs_samples:
            raise InvalidExperiment(
                "secure_aggregation.max_weight must be given where the algorithm weighs clients by their samples, got "
                "auto: write the most samples that a client may count with, or choose algorithm: local_sgd, which "
                "weighs clients alike"
            )
        return 1

    def check(self, asked: int, cohort: int) -> None:
        """Refuse rounds in which no session could succeed, or only a second one.

        Args:
            asked: number of clients that a round asks.
            cohort: number of clients whose answers end the round.

        Raises:
            InvalidExperiment: if no session could succeed.
        """
        # For its errors: a session must be possible at all.
        self.degree(asked)
        left = asked - math.floor(self.max_drop_out * asked)
        if left < self.minimum_cohort:
            raise InvalidExperiment(
                f"secure_aggregation.minimum_cohort must be at most {left}, the clients that are left when "
                f"max_drop_out = {self.max_drop_out} of {asked} have dropped out, got {self.minimum_cohort}: lower "
                "it, or raise rounds.cohort"
            )
        if cohort < (least := self.least_survivors(asked)):
            raise InvalidExperiment(
                f"rounds.over_selection asks {asked} clients for {cohort} answers, too few for the sum of a session of "
                f"{asked} clients, which needs {least}: lower over_selection"
            )
        weight = 1 if self.max_weight == "auto" else self.max_weight
        # Refused where so many clients with such weights leave no level.
        FixedPoint(bits=self.bits, parts=(1,), clips=(1.0,), most_clients=asked, max_weight=weight)


def _term(feature: Feature, why: str = "") -> Term:
    return Term(feature, way_out="set secure_aggregation to null", why=why, subject="secure_aggregation")


class _Hidden(Protocol):
    @property
    def secure_aggregation(self) -> Component | None: ...


def settings_of(experiment: _Hidden) -> SecureAggregation | None:
    """Settings of an experiment's secure aggregation; None where it has none."""
    section = experiment.secure_aggregation
    if section is None:
        return None
    settings: SecureAggregation = section.make()
    return settings
