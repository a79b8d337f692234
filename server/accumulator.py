"""Client updates, counted and summed until the global model moves by them.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from fed.clients.data.holdings import in_order
from fed.vectors.reduction import WeightedMean
from fed.vectors.tensors import Tensor, torch
from fed.wire.messages import Answer, PartialSum, RevealedSum, Task, TrainedModel, Update

if TYPE_CHECKING:
    from fed.secure_aggregation.fixed_point import SumOfClients

__all__ = ["Participation", "RoundStats", "Staleness", "TaskEnd", "UpdateAccumulator", "joined", "mean_loss"]

_log = logging.getLogger(__name__)

Staleness = Callable[[int], float | None]
"""Function from an update's staleness to the factor that it is counted with; None: it does not count.

The staleness is the number of versions by which the model has moved since the update's start.
"""


class TaskEnd(Enum):
    """End of the tasks that an answer names."""

    ANSWERED = "their updates count"
    LATE = "their updates came too late to count"
    FAILED = "there are no updates, or they were refused"
    IGNORED = "they were not in flight, or the run ends because of them"


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

    def measured(self) -> dict[str, Any]:
        """The counts as a part of the round's metrics, without those that are not measured."""
        values = self._asdict()
        optional = ("clipped_share", "capped_weights", "diverged")
        del values["participation"]
        return {name: value for name, value in values.items() if name not in optional or value is not None}


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
    staleness = sum(one.staleness_mean * one.replied for one in replied) / max(counts["replied"], 1)
    return RoundStats(**counts, train_loss=loss, staleness_mean=staleness, participation=who)


def mean_loss(losses: Sequence[tuple[float, int]]) -> float | None:
    """The mean of (training loss, samples), weighted by samples, to the bit in any order; None without any."""
    if not losses:
        return None
    total = sum(samples for _, samples in losses)
    if not all(math.isfinite(loss) for loss, _ in losses):
        return sum(loss * samples for loss, samples in losses) / total
    with suppress(OverflowError):
        # exact, whatever the order of arrival
        mean = math.fsum(loss * samples for loss, samples in losses) / total
        if math.isfinite(mean):
            return mean
    # losses that are about to diverge have a mean, too
    return float(sum(Fraction(loss) * samples for loss, samples in losses) / total)


class UpdateAccumulator:
    """The updates since the global model last moved: their weighted sum, or each where a rule needs it.

    Answers may come in any order and grouping: what is counted is the same, to the bit.

    Attributes:
        integers_I: largest integers of the updates that count.
        asked, replied, late, failed: the clients of tasks that were sent, and of what became of them, one a task.
        bytes_up, bytes_down: bytes from clients, and to them.
        counted: task → the factor that its update was counted with.
        staleness: staleness of each update that counts, in versions.
        losses: (training loss, samples) of each update that counts.
        loss_of: client → its training loss.
        samples_of: client → its number of samples, of those whose updates count.
        hidden: the sum of the round's clients under secure aggregation, which tells nothing of one of them.
        diverged: list of answers whose numbers were not finite.

    Args:
        size: number M of values in an update.
        integers_I: integer buffers of the model.
        is_linear: True if the rule needs the mean of the updates alone, rather than each update.
        present_V: present global model, if it moves towards clients' models; None: it moves by their updates.
        drops_diverged: True if a client whose numbers are not finite has failed, rather than the run.
    """

    def __init__(
        self,
        size: int,
        integers_I: Tensor,
        is_linear: bool,
        present_V: Tensor | None = None,
        *,
        drops_diverged: bool = False,
    ) -> None:
        self.integers_I = integers_I
        self.asked: list[int | str] = []
        self.replied: list[int | str] = []
        self.late: list[int | str] = []
        self.failed: list[int | str] = []
        self.bytes_up = self.bytes_down = 0
        self.counted: dict[int, float] = {}
        self.staleness: list[int] = []
        self.losses: list[tuple[float, int]] = []
        self.loss_of: dict[int | str, float] = {}
        self.samples_of: dict[int | str, int] = {}
        self.hidden: SumOfClients | None = None
        # exact: the order of arrival must not change a bit of the model
        self._mean = WeightedMean(size)
        self._is_linear = is_linear
        self._present_V = present_V
        self._single: dict[int, tuple[Tensor, float]] = {}
        self.diverged: list[Answer] = []
        self._drops_diverged = drops_diverged

    def take(self, answer: Answer, open_tasks: dict[int, Task], version: int, weigh: Staleness) -> TaskEnd:
        """Count an answer, if it may count, and close its tasks; returns the end of its tasks.

        Args:
            answer: answer from a fleet, which has checked what clients say.
            open_tasks: open tasks by id; those that are answered are removed.
            version: version of the global model now.
            weigh: function from an update's staleness to its factor; None: the update is too late to count.
        """
        if answer.has_diverged:  # raised after all answers have come, so that the order does not choose whose
            self.diverged.append(answer)
            if not self._drops_diverged:
                return TaskEnd.IGNORED
        # what does not count has travelled, too
        self.bytes_up += answer.size_bytes
        self.bytes_down += answer.more_bytes_down
        # a failure that comes twice, or after a cancellation, counts once
        if answer.problem:
            if open_tasks.pop(answer.tasks[0], None) is None:
                return TaskEnd.IGNORED
            self.failed.append(answer.clients[0])
            return TaskEnd.FAILED
        # a task named twice makes the lists unequal
        asked = [open_tasks.get(task) for task in dict.fromkeys(answer.tasks)]
        senders = [task and (task.client, task.round) for task in asked]
        # an answer for a task of another client must not move the model in its name
        if not senders or senders != [(client, answer.round) for client in answer.clients]:
            _log.warning("round %d: refused clients %s: their tasks are not in flight", answer.round, answer.clients)
            return TaskEnd.IGNORED
        tasks = [open_tasks.pop(task) for task in answer.tasks]
        if isinstance(answer.content, RevealedSum):  # it tells nothing of single clients
            self.hidden = answer.content.of_clients
            self.counted |= dict.fromkeys(answer.tasks, 1.0)
            self.staleness += [0] * len(tasks)
            self.replied += answer.clients
            return TaskEnd.ANSWERED
        # the loss of a late client is known all the same, and samplings by loss use it
        self.loss_of |= zip(answer.clients, answer.train_losses, strict=True)
        staleness = version - tasks[0].model.version  # all tasks of an answer started from one version
        factor = weigh(staleness)
        if factor is None:
            self.late += answer.clients
            return TaskEnd.LATE
        self._add(answer, tasks[0], factor)
        self.samples_of |= zip(answer.clients, answer.samples, strict=True)
        self.counted |= dict.fromkeys(answer.tasks, factor)
        if answer.integers_I.numel():
            # counters, such as numbers of batches: the furthest stands for all
            self.integers_I = torch.maximum(self.integers_I, answer.integers_I)
        self.losses += zip(answer.train_losses, answer.samples, strict=True)
        self.staleness += [staleness] * len(tasks)
        self.replied += answer.clients
        return TaskEnd.ANSWERED

    @property
    def weight(self) -> int | Fraction:
        """The sum of the weights of the updates, exact."""
        return self.hidden.weight if self.hidden else self._mean.weight

    def mean(self) -> Tensor:
        """The weighted mean of the updates, [M]; to be asked for once, since it takes the sum's place."""
        return self.hidden.mean_M if self.hidden else self._mean.finish(is_last=True)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The updates [S, M] and weights [S], in the order of their tasks; to be asked for once, as :meth:`mean`."""
        # the order of arrival must not change the rule's sums
        tasks = sorted(self._single)
        weights_S = torch.tensor([self._single[task][1] for task in tasks], dtype=torch.float64)
        updates_SM = torch.empty(len(tasks), self._mean.size, dtype=torch.float64)
        for row_M, task in zip(updates_SM, tasks, strict=True):
            row_M.copy_(self._single.pop(task)[0])
        return updates_SM, weights_S

    def stats(self) -> RoundStats:
        """The counts of the round."""
        hidden = self.hidden
        return RoundStats(
            selected=len(self.asked),
            replied=len(self.replied),
            late=len(self.late),
            failed=len(self.failed),
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            # under secure aggregation the sum alone has a loss
            train_loss=hidden.train_loss if hidden else mean_loss(self.losses),
            staleness_mean=sum(self.staleness) / len(self.staleness) if self.staleness else 0.0,
            clipped_share=hidden.clipped / (len(hidden.mean_M) * hidden.clients) if hidden else None,
            capped_weights=hidden.capped if hidden else None,
            diverged=len(self.diverged) if self._drops_diverged else None,
            participation=Participation(asked=self.asked, replied=self.replied, late=self.late, failed=self.failed),
        )

    def _add(self, answer: Answer, task: Task, factor: float) -> None:
        """Add an answer to the sum, or keep it where the rule needs each."""
        content = answer.content
        if isinstance(content, PartialSum):
            self._mean.merge(content.total)
            return
        if isinstance(content, TrainedModel):
            if self._is_linear and self._present_V is None:
                # the difference is taken inside the sum, without another vector of the model's size
                self._mean.add(content.params_V, content.weight, factor, less_P=content.start_V)
                return
            content = content.update()
        assert isinstance(content, Update)
        update_M = content.mean_update_M
        if self._present_V is not None:
            update_M = update_M + (task.model.params_V - self._present_V)
        if self._is_linear:
            self._mean.add(update_M, content.weight, factor)
        else:
            # the discount is on the update, for rules such as the median ignore weights
            self._single[task.id] = update_M.double() * factor, content.weight
