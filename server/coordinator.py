"""One model, moved by one aggregator, over any fleet.

Shapes: P, trainable parameters; V, the whole floating-point state; B = V − P; I, integers; S, replies of a round; M,
numbers of a client's message and its B.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fed.aggregators.contracts import Aggregator, Reduced
from fed.aggregators.reporting import message_sizes
from fed.errors import Diverged, InvalidExperiment
from fed.layout import Layout
from fed.messages import Failure, GroupReply, Reply, Task, refusal
from fed.randomness import Streams
from fed.reduction import WeightedMean
from fed.server.fleet import Fleet

__all__ = ["Coordinator", "Exchange"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exchange:
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


class Coordinator:
    """Keeps the model and the aggregator's state, in float64; hands out tasks and counts their answers.

    Attributes:
        fleet: the clients.
        streams: the run's random streams.
        losses: the last training loss of each client that has answered.

    Args:
        aggregator: how the mean update moves the model.
        fleet: the clients.
        layout: the model's.
        vector_V: the first model.
        integers_I: its integer buffers.
        streams: the run's random streams.
        lr_in: (round, clients asked) → step size of local steps; None: the clients know it.

    Raises:
        InvalidExperiment: if the aggregator's state does not hold the model.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        fleet: Fleet,
        layout: Layout,
        vector_V: Tensor,
        integers_I: Tensor,
        streams: Streams,
        lr_in: Callable[[int, int], float] | None = None,
    ) -> None:
        self.fleet = fleet
        self.streams = streams
        self.losses: dict[int | str, float] = {}
        self._lr_in = lr_in
        self._aggregator = aggregator
        self._layout = layout
        self._state: Any = aggregator.init(vector_V[: layout.parameters].double())
        model_P = getattr(self._state, "model_P", None)
        if not isinstance(model_P, Tensor) or model_P.shape != (layout.parameters,):
            raise InvalidExperiment(
                f"the state of {type(aggregator).__name__} must be a named tuple whose model_P is the model, of shape "
                f"({layout.parameters},), got {type(self._state).__name__}: see fed.aggregators.fedavg"
            )
        self._averaged_B = vector_V[layout.parameters :].double()
        params_P = vector_V[: layout.parameters].double()
        self._sizes = [*message_sizes(aggregator, params_P, len(fleet.nodes())), layout.size - layout.parameters]
        self._integers_I = integers_I
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        self._tasks = 0

    def model(self) -> tuple[Tensor, Tensor]:
        """The model that users evaluate: (vector [V], integers [I])."""
        return self._vector(self._state.model_P), self._integers_I

    def exchange(self, number: int, clients: Sequence[int | str]) -> Exchange:
        """Send the model to clients, gather their models, and move ours by the mean of their updates.

        Replies may come in any order: the outcome is the same, to the bit. Where fewer come than the aggregator needs,
        as under a sampling whose cohorts vary, the model stays as it was.

        Args:
            number: of the round, from 1.
            clients: who is asked.

        Raises:
            Diverged: if a client's loss or model is no longer finite; the model stays as it was.
        """
        start_V = self._vector(self._aggregator.start(self._state))
        broadcast = tuple(part.to(self._layout.dtype) for part in self._aggregator.broadcast(self._state))
        steps = self._aggregator.steps(self._state)
        lr = self._lr_in(number, len(clients)) if self._lr_in else None
        first, self._tasks = self._tasks, self._tasks + len(clients)
        tasks = {
            first + index: Task(first + index, number, client, start_V, self._integers_I, broadcast, lr, steps)
            for index, client in enumerate(clients)
        }
        bytes_down = sum(task.size_bytes() for task in list(tasks.values())[:1]) * len(tasks)
        self.fleet.dispatch(tasks.values())
        gathered = _Gathered(start_V, self._integers_I, sum(self._sizes), self.answer_bytes, self._aggregator.linear)
        gathered.count(self.fleet.collect(), tasks)
        self.losses |= gathered.loss_of
        if gathered.losses and self._suffice(len(gathered.losses), number):
            self._apply(gathered, number)
        return Exchange(
            selected=len(clients),
            replied=len(gathered.losses),
            late=0,
            failed=len(clients) - len(gathered.losses),
            bytes_up=gathered.bytes_up,
            bytes_down=bytes_down,
            train_loss=gathered.train_loss(),
        )

    @property
    def answer_bytes(self) -> int:
        """Bytes of a client's message and integers as they travel."""
        return sum(self._sizes) * self._layout.dtype.itemsize + self._integers_I.nbytes

    def _suffice(self, replies: int, number: int) -> bool:
        try:
            self._aggregator.check(replies)
        except InvalidExperiment as error:
            _log.warning("round %d: the model stays as it was: %s", number, error)
            return False
        return True

    def _apply(self, gathered: "_Gathered", number: int) -> None:
        if self._aggregator.linear:
            state, mean_M = self._state, gathered.mean.finish()
        else:
            stream = self.streams.generator("combine", number)
            state, mean_M = self._aggregator.combine(self._state, *gathered.rows(), stream)
        *mean, averaged_B = mean_M.split_with_sizes(self._sizes)
        reduced = Reduced(tuple(mean), len(gathered.losses), len(self.fleet.nodes()))
        state = self._aggregator.apply(state, reduced)
        averaged_B = self._averaged_B + averaged_B
        # At once, so that an interruption finds the model of one round or of the other.
        self._state, self._averaged_B, self._integers_I = state, averaged_B, gathered.integers_I

    def _vector(self, params_P: Tensor) -> Tensor:
        """The whole vector as it travels; of the same parameters the same one."""
        if self._kept is None or self._kept[0] is not params_P or self._kept[1] is not self._averaged_B:
            vector_V = torch.cat([params_P, self._averaged_B]).to(self._layout.dtype)
            self._kept = params_P, self._averaged_B, vector_V
        return self._kept[2]


class _Gathered:
    """A round's replies: their weighted sum, in O(M) memory, or where that does not do each of them."""

    def __init__(self, start_V: Tensor, integers_I: Tensor, size: int, message_bytes: int, is_linear: bool) -> None:
        self.mean = WeightedMean(size)
        self.integers_I = integers_I
        self.losses: list[tuple[float, int]] = []
        self.bytes_up = 0
        self._start_V = start_V
        self._message_bytes = message_bytes
        self._is_linear = is_linear
        self.loss_of: dict[int | str, float] = {}
        self._single: dict[int, tuple[Tensor, float]] = {}

    def rows(self) -> tuple[Tensor, Tensor]:
        """The messages [S, M] and weights [S], in the order of their tasks."""
        messages, weights = zip(*(self._single[task] for task in sorted(self._single)), strict=True)
        return torch.stack(messages), torch.tensor(weights, dtype=torch.float64)

    def count(self, answers: Iterable[Reply | GroupReply | Failure], tasks: dict[int, Task]) -> None:
        open_tasks = dict(tasks)
        diverged: list[Failure] = []
        for answer in answers:
            if isinstance(answer, GroupReply):
                self._add_group(answer, open_tasks)
            elif isinstance(answer, Reply):
                self._add(answer, open_tasks)
            elif answer.diverged:
                diverged.append(answer)
            else:
                _log.warning("round %d: client %r failed: %s", answer.round, answer.client, answer.reason)
                open_tasks.pop(answer.task, None)
        if diverged:  # of several the first, in whatever order they came
            first = min(diverged, key=lambda failure: failure.task)
            raise Diverged.of(first.round, first.client, first.reason)

    def train_loss(self) -> float | None:
        if not self.losses:
            return None
        return math.fsum(loss * samples for loss, samples in self.losses) / sum(samples for _, samples in self.losses)

    def _add(self, reply: Reply, open_tasks: dict[int, Task]) -> None:
        self.bytes_up += reply.size_bytes()
        if reason := refusal(reply, open_tasks.get(reply.task)):
            _log.warning("round %d: refused client %r: %s", reply.round, reply.client, reason)
            return
        del open_tasks[reply.task]
        update_V = reply.vector_V.double() - self._start_V.double()
        self.loss_of[reply.client] = reply.train_loss
        self._count(reply.task, update_V, reply.samples, reply.integers_I, (reply.train_loss,), (reply.samples,))

    def _add_group(self, reply: GroupReply, open_tasks: dict[int, Task]) -> None:
        self.bytes_up += self._message_bytes * len(reply.tasks)
        senders = [(client, reply.round) for client in reply.clients]
        asked = [open_tasks.get(task) for task in dict.fromkeys(reply.tasks)]
        if not senders or senders != [task and (task.client, task.round) for task in asked]:
            _log.warning("round %d: refused clients %s: their tasks are not in flight", reply.round, reply.clients)
            return
        for task in reply.tasks:
            del open_tasks[task]
        self.loss_of |= zip(reply.clients, reply.train_losses, strict=True)
        self._count(reply.tasks[0], reply.mean_M, reply.weight, reply.integers_I, reply.train_losses, reply.samples)

    def _count(
        self,
        task: int,
        mean_M: Tensor,
        weight: float,
        integers_I: Tensor,
        losses: Sequence[float],
        samples: Sequence[int],
    ) -> None:
        if self._is_linear:
            self.mean.add(mean_M, weight)
        else:
            self._single[task] = mean_M, weight
        self.integers_I = torch.maximum(self.integers_I, integers_I)
        self.losses += zip(losses, samples, strict=True)
