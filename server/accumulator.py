"""Answers to tasks, checked and counted until the model moves by them.

Shapes: P, trainable parameters; V, the whole floating-point state; I, integers; S, replies; M, numbers of a client's
message and of its float buffers' update.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fed.errors import Diverged
from fed.reduction import WeightedMean
from fed.wire.messages import EdgeReply, Failure, GroupReply, Reply, Task, refusal

__all__ = ["OpenTask", "RoundStats", "Staleness", "UpdateAccumulator", "joined"]

_log = logging.getLogger(__name__)

Staleness = Callable[[int], float | None]
"""How many versions old an update's start is → the factor that the update is counted with; None: not at all."""


class RoundStats(NamedTuple):
    """What a round's exchange of models came to.

    Args:
        selected: clients that were asked.
        replied: answers that count.
        late: answers that came too late to count.
        failed: clients that failed, or whose answers were refused.
        bytes_up: from clients.
        bytes_down: to clients.
        train_loss: the replies' mean loss, weighted by samples; None without replies.
        staleness_mean: how many versions old the counted replies' starting points were.
    """

    selected: int
    replied: int
    late: int
    failed: int
    bytes_up: int
    bytes_down: int
    train_loss: float | None
    staleness_mean: float = 0.0


def joined(rounds_stats: Sequence[RoundStats]) -> RoundStats:
    """Several rounds as one."""
    counts = {
        name: sum(getattr(one, name) for one in rounds_stats)
        for name in ("selected", "replied", "late", "failed", "bytes_up", "bytes_down")
    }
    replied = [(one, one.replied) for one in rounds_stats if one.train_loss is not None]
    total = sum(weight for _, weight in replied)
    if not total:
        return RoundStats(**counts, train_loss=None)
    if len(replied) == 1:
        return replied[0][0]._replace(**counts)
    loss = math.fsum((one.train_loss or 0.0) * weight for one, weight in replied) / total
    staleness = sum(one.staleness_mean * weight for one, weight in replied) / total
    return RoundStats(**counts, train_loss=loss, staleness_mean=staleness)


class OpenTask(NamedTuple):
    """A task that is to be answered.

    Args:
        task: as it was sent.
        version: of the model that it was sent with: how often that had moved.
    """

    task: Task
    version: int


class UpdateAccumulator:
    """What came since the model last moved: the replies' weighted sum, in O(M) memory, or where that does not do each.

    Replies may come in any order and grouping: what is counted is the same, to the bit.

    Attributes:
        integers_I: of the replies' integers the largest.
        selected, replied, late, failed: tasks that were sent, and what became of them.
        bytes_up, bytes_down: what was moved for them.
        staleness: of each reply that counts, how many versions old its start was.
        losses: of each such reply (training loss, samples).
        loss_of: client → its training loss.

    Args:
        size: M.
        integers_I: the model's.
        message_bytes: of one client's answer.
        is_linear: whether the mean of messages will do.
        present_V: the model now, if it is to move towards clients' models, rather than by their updates.
    """

    def __init__(
        self, size: int, integers_I: Tensor, message_bytes: int, is_linear: bool, present_V: Tensor | None = None
    ) -> None:
        self.integers_I = integers_I
        self.selected = self.replied = self.late = self.failed = 0
        self.bytes_up = self.bytes_down = 0
        self.staleness: list[int] = []
        self.losses: list[tuple[float, int]] = []
        self.loss_of: dict[int | str, float] = {}
        self._mean = WeightedMean(size)
        self._message_bytes = message_bytes
        self._is_linear = is_linear
        self._present_V = present_V
        self._weight = 0.0
        self._single: dict[int, tuple[Tensor, float]] = {}
        self._diverged: list[Failure] = []

    def take(
        self,
        answer: Reply | GroupReply | EdgeReply | Failure,
        open_tasks: dict[int, OpenTask],
        version: int,
        weigh: Staleness,
    ) -> None:
        """Count an answer, if it may be, and close its tasks.

        Args:
            answer: from whoever sent it.
            open_tasks: by id; those that are answered leave.
            version: of the model now.
            weigh: what an answer counts by its staleness.
        """
        if isinstance(answer, GroupReply):
            self._take_group(answer, open_tasks, version, weigh)
        elif isinstance(answer, EdgeReply):
            self._take_edge(answer, open_tasks, version)
        elif isinstance(answer, Reply):
            self._take_reply(answer, open_tasks, version, weigh)
        elif answer.diverged:
            self._diverged.append(answer)
        elif open_tasks.pop(answer.task, None) is not None:
            _log.info("round %d: client %r failed: %s", answer.round, answer.client, answer.reason)
            self.failed += 1

    def raise_if_diverged(self) -> None:
        """Of several clients that diverged name the first, in whatever order they came.

        Raises:
            Diverged: if one did.
        """
        if self._diverged:
            first = min(self._diverged, key=lambda failure: failure.task)
            raise Diverged.of(first.round, first.client, first.reason)

    def mean(self) -> Tensor:
        """The weighted mean of the messages, [M]; to be asked for once, since it takes the sum's place."""
        return self._mean.finish(is_last=True)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The messages [S, M] and weights [S], in the order of their tasks."""
        messages, weights = zip(*(self._single[task] for task in sorted(self._single)), strict=True)
        return torch.stack(messages), torch.tensor(weights, dtype=torch.float64)

    @property
    def weight(self) -> float:
        """The sum of the replies' weights."""
        return self._weight

    def train_loss(self) -> float | None:
        """The replies' mean loss, weighted by samples."""
        if not self.losses:
            return None
        return math.fsum(loss * samples for loss, samples in self.losses) / sum(samples for _, samples in self.losses)

    def exchange(self) -> RoundStats:
        """What it came to."""
        return RoundStats(
            selected=self.selected,
            replied=self.replied,
            late=self.late,
            failed=self.failed,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            train_loss=self.train_loss(),
            staleness_mean=sum(self.staleness) / len(self.staleness) if self.staleness else 0.0,
        )

    def _take_reply(self, reply: Reply, open_tasks: dict[int, OpenTask], version: int, weigh: Staleness) -> None:
        self.bytes_up += reply.size_bytes()
        found = open_tasks.get(reply.task)
        if reason := refusal(reply, found.task if found else None):
            _log.warning("round %d: refused client %r: %s", reply.round, reply.client, reason)
            return
        assert found is not None
        del open_tasks[reply.task]
        self.loss_of[reply.client] = reply.train_loss
        message = reply.vector_V, float(reply.samples)
        start_V = found.task.vector_V
        self._count([found], message, reply.integers_I, (reply.train_loss,), (reply.samples,), version, weigh, start_V)

    def _take_group(self, reply: GroupReply, open_tasks: dict[int, OpenTask], version: int, weigh: Staleness) -> None:
        self.bytes_up += self._message_bytes * len(reply.tasks) if reply.size_bytes is None else reply.size_bytes
        asked = [open_tasks.get(task) for task in dict.fromkeys(reply.tasks)]
        senders = [found and (found.task.client, found.task.round) for found in asked]
        if not senders or senders != [(client, reply.round) for client in reply.clients]:
            _log.warning("round %d: refused clients %s: their tasks are not in flight", reply.round, reply.clients)
            return
        found = [open_tasks.pop(task) for task in reply.tasks]
        self.loss_of |= zip(reply.clients, reply.train_losses, strict=True)
        message = reply.mean_M, reply.weight
        self._count(found, message, reply.integers_I, reply.train_losses, reply.samples, version, weigh)

    def _take_edge(self, reply: EdgeReply, open_tasks: dict[int, OpenTask], version: int) -> None:
        """An edge's sum, with all that it counts; its message and the model that it got travel once."""
        found = [[open_tasks.pop(task) for task in part.tasks] for part in reply.replies]
        self.bytes_up += self._message_bytes * (1 + sum(map(len, found)))
        self.bytes_down += found[0][0].task.size_bytes()
        self._mean.merge(reply.sum)
        self._weight += float(reply.sum.weight)
        for part, tasks in zip(reply.replies, found, strict=True):
            self.loss_of |= zip(part.clients, part.train_losses, strict=True)
            self._note(tasks, part.integers_I, part.train_losses, part.samples, version - tasks[0].version)

    def _count(
        self,
        tasks: Sequence[OpenTask],
        message: tuple[Tensor, float],
        integers_I: Tensor,
        losses: Sequence[float],
        samples: Sequence[int],
        version: int,
        weigh: Staleness,
        start_V: Tensor | None = None,
    ) -> None:
        """Of tasks that started from one model; with that model the message is what it has become."""
        staleness = version - tasks[0].version
        factor = weigh(staleness)
        if factor is None:
            self.late += len(tasks)
            return
        mean_M, weight = message
        self._weight += weight
        if start_V is not None and (self._present_V is not None or not self._is_linear):
            mean_M, start_V = mean_M.double() - start_V.double(), None
        if self._present_V is not None:
            mean_M = mean_M + (tasks[0].task.vector_V - self._present_V)
        if self._is_linear:
            self._mean.add(mean_M, weight, factor, less_P=start_V)
        else:
            self._single[tasks[0].task.id] = mean_M * factor, weight
        self._note(tasks, integers_I, losses, samples, staleness)

    def _note(
        self,
        tasks: Sequence[OpenTask],
        integers_I: Tensor,
        losses: Sequence[float],
        samples: Sequence[int],
        staleness: int,
    ) -> None:
        """That these replies count."""
        if integers_I.numel():
            self.integers_I = torch.maximum(self.integers_I, integers_I)
        self.losses += zip(losses, samples, strict=True)
        self.staleness += [staleness] * len(tasks)
        self.replied += len(tasks)
