"""Algorithms over ``mean`` without a coordinator: every peer is a replica of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, cast

from fed.aggregators.base import Aggregator
from fed.config.compatibility import Feature, Term
from fed.config.components import Component
from fed.config.registry import RULES
from fed.errors import InvalidExperiment

__all__ = ["allreduce"]


class _Replicated(Aggregator):
    """Rule that each peer computes for itself."""

    is_replicated: ClassVar[bool] = True

    def __reduce__(self) -> tuple[Any, ...]:  # its class is made when it is asked for, and has no name to import
        return _replicated, (_as(type(self).__bases__[1], self),)

    def lacks(self) -> Sequence[Term]:
        """Features of a coordinator, of single updates, and of encoded ones."""
        way_out = "choose the rule itself as the algorithm"
        why = "whose peers find the sum of their updates in a ring"
        features = Feature.COORDINATOR, Feature.REPORTS, Feature.SINGLE_ANSWERS
        choco = Term(Feature.ENCODED, "choose an algorithm over mix such as choco", "whose sums are exact")
        return [*super().lacks(), *[Term(feature, way_out, why) for feature in features], choco]


def allreduce(rule: Annotated[Component, RULES] = RULES.make()) -> Aggregator:  # noqa: B008  # it is frozen
    r"""A rule without a coordinator: each peer applies it to the exact sum, found in a ring (Patarasuk & Yuan 2009).

    .. math:: Δ = \frac{\sum_i w_i (y_i - x)}{\sum_i w_i}, \qquad x ← \mathrm{apply}(x, Δ) \quad \text{at every peer}

    Each of N peers sends and receives 2(N − 1)/N of the sum, 16 bytes a number (doi 10.1016/j.jpdc.2008.09.002). All
    peers take part in each round, and end with the bits that a coordinator would have. The exact sum, which does not
    depend on the order of the ring, takes four times the bytes of one in float32.

    Args:
        rule: an algorithm over mean that needs only the mean of updates.

    Raises:
        InvalidExperiment: if the rule needs more than that mean.
    """
    made = rule.make()
    # A rule that needs single answers would need all peers' updates at every peer.
    if not isinstance(made, Aggregator) or not made.linear or made.pools_data or made.is_replicated:
        raise InvalidExperiment(
            f"algorithm allreduce needs a rule that applies the mean of all peers' updates, got {rule.kind}: choose "
            "one such as fedavg, bmuf, diloco or scaffold"
        )
    return _replicated(made)


def _replicated(rule: Aggregator) -> Aggregator:
    return _as(_class_of(type(rule)), rule)


def _as(its_class: type, rule: Aggregator) -> Aggregator:
    """A rule with the same attributes, of another class."""
    made: Aggregator = object.__new__(its_class)
    vars(made).update(vars(rule))
    return made


@cache
def _class_of(rule: type[Aggregator]) -> type[Aggregator]:
    # A class for each rule, so that its page stays as it is, and isinstance finds the rule's own class.
    made = type(f"Replicated{rule.__name__}", (_Replicated, rule), {"__doc__": rule.__doc__})
    return cast("type[Aggregator]", dataclass(frozen=True, kw_only=True)(made))
