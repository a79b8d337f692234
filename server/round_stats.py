"""The counts of a round: who was asked, who replied, bytes and losses."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from fed.clients.data.holdings import in_order

__all__ = ["Participation", "RoundStats", "joined", "mean_loss", "mean_metrics"]


class Participation(NamedTuple):
    """The clients of a round, by what became of their tasks; one that had several tasks occurs as often.

    Args:
        asked: clients that tasks were sent to.
        replied: clients whose updates count.
        late: clients whose updates came too late to count.
        failed: clients whose tasks failed, or whose answers were refused.
    """

    asked: Sequence[int | str] = ()
    replied: Sequence[int | str] = ()
    late: Sequence[int | str] = ()
    failed: Sequence[int | str] = ()

    def line(self, number: int) -> dict[str, Any]:
        """A round's line of ``participation.jsonl``: ids in order, without empty lists but ``asked``."""
        clients = {name: in_order(ids) for name, ids in self._asdict().items() if ids or name == "asked"}
        return {"round": number, **clients}


class RoundStats(NamedTuple):
    """The counts of a round.

    Args:
        selected: number of tasks that were sent.
        replied: number of updates that count.
        late: number of updates that came too late to count.
        failed: number of tasks that failed, or whose answers were refused.
        bytes_up: bytes from clients.
        bytes_down: bytes to clients.
        train_loss: mean training loss of the clients, weighted by samples; None without updates.
        staleness_mean: mean staleness of the counted updates, in versions of the model since their tasks were sent.
        clipped_share: share of clipped coordinates, in [0, 1], of all that were added under secure aggregation; None
            without a sum of it.
        capped_weights: number of clients in that sum whose weight was capped; None without such a sum.
        diverged: number of failed tasks whose numbers were not finite; None where such a client ends the run.
        participation: clients that are counted here.
        metrics: further numbers that an app's clients tell of their training, by name: the mean over those that tell
            it, weighted by samples.
    """

    selected: int
    replied: int
    late: int
    failed: int
    bytes_up: int
    bytes_down: int
    train_loss: float | None
    staleness_mean: float = 0.0
    clipped_share: float | None = None
    capped_weights: int | None = None
    diverged: int | None = None
    participation: Participation = Participation()
    metrics: Mapping[str, float] = MappingProxyType({})

    def measured(self, *, is_of_app: bool = False) -> dict[str, Any]:
        """The counts as a part of the round's metrics, without those that are not measured.

        Args:
            is_of_app: True if an app trains, whose training loss is one of its metrics, or not known.
        """
        values = self._asdict()
        optional = ("clipped_share", "capped_weights", "diverged")
        del values["participation"]
        del values["metrics"]
        # No other client tells some, whatever a node may send.
        told = dict(self.metrics) if is_of_app else {}
        if is_of_app:
            values["train_loss"] = told.pop("train_loss", None)
        measured = {name: value for name, value in values.items() if name not in optional or value is not None}
        return {**measured, **{f"fit_{name}": value for name, value in told.items()}}


def joined(rounds_stats: Sequence[RoundStats]) -> RoundStats:
    """Several rounds as one."""
    counts = {
        name: sum(getattr(one, name) for one in rounds_stats)
        for name in ("selected", "replied", "late", "failed", "bytes_up", "bytes_down")
    }
    lists = zip(*(one.participation for one in rounds_stats), strict=True)
    who = Participation(*(tuple(chain.from_iterable(ids)) for ids in lists))
    replied = [one for one in rounds_stats if one.train_loss is not None]
    if len(replied) == 1:  # it keeps its figures to the bit
        return replied[0]._replace(**counts, participation=who)
    loss = mean_loss([(one.train_loss or 0.0, one.replied) for one in replied])
    metrics = mean_metrics([(one.metrics, one.replied) for one in replied])
    staleness = sum(one.staleness_mean * one.replied for one in replied) / max(counts["replied"], 1)
    return RoundStats(**counts, train_loss=loss, staleness_mean=staleness, participation=who, metrics=metrics)


def mean_metrics(told: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """The mean of each metric over those that tell it, weighted by samples, to the bit in any order.

    Args:
        told: metrics by name, and the number of samples, of each client.
    """
    found: dict[str, float] = {}
    if not told:  # as in most runs
        return found
    for name in sorted({name for numbers, _ in told for name in numbers}):
        mean = mean_loss([(numbers[name], samples) for numbers, samples in told if name in numbers])
        assert mean is not None
        found[name] = mean
    return found


def mean_loss(losses: Sequence[tuple[float, int]]) -> float | None:
    """The mean of (training loss, samples), weighted by samples, to the bit in any order; None without any."""
    if not losses:
        return None
    total = sum(samples for _, samples in losses)
    with suppress(OverflowError, ValueError):  # of huge losses, and of infinite ones
        # fsum is exact, so that the order of arrival changes nothing.
        mean = math.fsum([loss * samples for loss, samples in losses]) / total
        if math.isfinite(mean):
            return mean
    if not all(math.isfinite(loss) for loss, _ in losses):
        return sum(loss * samples for loss, samples in losses) / total
    # The sum of huge losses, which soon diverge, leaves float64's range, but their mean may not.
    return float(sum(Fraction(loss) * samples for loss, samples in losses) / total)
