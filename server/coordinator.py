"""One model, moved by one aggregator, over any fleet.

Shapes: P, trainable parameters; V, the whole floating-point state; B = V − P; I, integers; S, replies of a round; M,
numbers of a client's message and its B.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fed.aggregators.base import Aggregator, Reduced
from fed.aggregators.client_side import message_sizes
from fed.errors import InvalidExperiment
from fed.layout import Layout
from fed.randomness import Streams
from fed.server.accumulator import OpenTask, RoundStats, Staleness, UpdateAccumulator
from fed.server.fleet import Fleet
from fed.server.parameter_store import ParameterStore
from fed.storage.checkpoints import Tree, plain, refilled
from fed.wire.messages import Task

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)


def _alike(staleness: int) -> float:
    return 1.0


class _Offer(NamedTuple):
    """What goes out with every task for as long as the model stays."""

    start_V: Tensor
    broadcast: tuple[Tensor, ...]
    steps: int | None


class Coordinator:
    """Keeps the model and the aggregator's state, in float64; hands out tasks and counts their answers.

    Attributes:
        fleet: the clients.
        streams: the run's random streams.
        losses: the last training loss of each client that has answered.
        version: how often the model has moved.
        open: the tasks that are to be answered, by id.
        parts: of a client's message, beside its float buffers' update.
        message_size: M.

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
        self.version = 0
        self.open: dict[int, OpenTask] = {}
        self._clocks: ParameterStore | None = None
        self._lr_in = lr_in
        self._aggregator = aggregator
        self._layout = layout
        self._state: Any = aggregator.init(vector_V[: layout.parameters].double())
        aggregator.check_state(self._state, layout.parameters, "init")
        self._averaged_B = vector_V[layout.parameters :].double()
        params_P = vector_V[: layout.parameters].double()
        self._sizes = [*message_sizes(aggregator, params_P, len(fleet.registered())), layout.size - layout.parameters]
        self.parts, self.message_size = len(self._sizes) - 1, sum(self._sizes)
        self._integers_I = integers_I
        self._answer_bytes = self.message_size * layout.dtype.itemsize + integers_I.nbytes
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        self._tasks = 0
        self._offered: _Offer | None = None
        self._asked: dict[int, dict[int | str, int]] = {}  # round → client → how often; of rounds that are not over

    def model(self) -> tuple[Tensor, Tensor]:
        """The model that users evaluate: (vector [V], integers [I])."""
        return self._vector(self._state.model_P), self._integers_I

    def exchange(self, number: int, clients: Sequence[int | str]) -> RoundStats:
        """Send the model to clients, gather their models, and move ours by the mean of their updates.

        Replies may come in any order: the outcome is the same, to the bit. Where fewer come than the aggregator needs,
        as under a sampling whose cohorts vary, the model stays as it was.

        Args:
            number: of the round, from 1.
            clients: who is asked.

        Raises:
            Diverged: if a client's loss or model is no longer finite; the model stays as it was.
        """
        accumulator = self.new_accumulator()
        self.dispatch(accumulator, number, clients)
        self.collect(accumulator)
        self.cancel(accumulator, are_late=False)
        return self.step(accumulator, number)

    def clocks(self, bound: float) -> ParameterStore:
        """The clients' clocks, for rounds in which nobody runs further ahead than a bound; the same ones every time."""
        if self._clocks is None:
            self._clocks = ParameterStore(bound=bound)
        return self._clocks

    def new_accumulator(self, *, mixes: bool = False) -> UpdateAccumulator:
        """Nothing yet, of what is to move the model next.

        Args:
            mixes: whether it moves towards clients' models, rather than by their updates.
        """
        present_V = self._whole(self._aggregator.model_to_send(self._state)) if mixes else None
        message = self.message_size, self._integers_I, self._answer_bytes
        return UpdateAccumulator(*message, self._aggregator.linear, present_V)

    def dispatch(
        self,
        accumulator: UpdateAccumulator,
        number: int,
        clients: Sequence[int | str],
        *,
        cohort: int | None = None,
        deadline_s: float | None = None,
        takes_parts: bool = False,
    ) -> None:
        """Send the model as it is now to clients.

        Args:
            accumulator: counts them.
            number: of the round, from 1.
            clients: who is asked, none of whom has a task.
            cohort: how many the step size is scaled for; as many as are asked unless given.
            deadline_s: how long after this an answer must be there.
            takes_parts: whether a client may answer with a part of its work.
        """
        start_V, broadcast, steps = self._offer()
        lr = self._lr_in(number, cohort or len(clients)) if self._lr_in else None
        model = start_V, self._integers_I, broadcast, lr, steps
        tasks = [
            Task(self._tasks + place, number, client, *model, self._repeats(client, number), deadline_s, takes_parts)
            for place, client in enumerate(clients)
        ]
        self._tasks += len(tasks)
        for task in tasks:
            self.open[task.id] = OpenTask(task, self.version)
        accumulator.selected += len(tasks)
        accumulator.bytes_down += sum([task.size_bytes() for task in tasks[:1]]) * len(tasks)
        self.fleet.dispatch(tasks)

    def collect(
        self,
        accumulator: UpdateAccumulator,
        *,
        until: float = math.inf,
        enough: int | None = None,
        weigh: Staleness = _alike,
    ) -> None:
        """Count answers as they arrive.

        Args:
            accumulator: counts them.
            until: the clock at which to stop.
            enough: the number of replies after which to stop, counted from now; all of one instant are taken.
            weigh: what an answer counts by its staleness.

        Raises:
            Diverged: if a client's loss or model is no longer finite.
        """
        for answer in self.fleet.collect(until, enough):
            accumulator.take(answer, self.open, self.version, weigh)
            del answer  # it may be large, and the next is on its way
        accumulator.raise_if_diverged()

    def cancel(self, accumulator: UpdateAccumulator, *, are_late: bool) -> None:
        """Count no more on the tasks that are open: they are late, or else have failed.

        Answers that their clients know to be there are none of them.
        """
        self.fleet.cancel(list(self.open))
        self.collect(accumulator, until=self.fleet.clock)
        accumulator.late += len(self.open) if are_late else 0
        accumulator.failed += 0 if are_late else len(self.open)
        self.open.clear()

    def step(self, accumulator: UpdateAccumulator, number: int, share: float | None = None) -> RoundStats:
        """Move the model by what was gathered.

        Args:
            accumulator: of replies.
            number: of the round, from 1; nobody is asked any more in those before.
            share: of all members, where their mean is wanted: of the messages, those of who has not answered being 0.
        """
        self.losses |= accumulator.loss_of
        if accumulator.replied and self._suffice(accumulator.replied, number):
            self._apply(accumulator, number, share)
            self.version += 1
        for over in [earlier for earlier in self._asked if earlier < number]:
            del self._asked[over]
        return accumulator.exchange()

    def _repeats(self, client: int | str, number: int) -> int:
        """How many tasks a client has had in a round before."""
        asked = self._asked.setdefault(number, {})
        asked[client] = asked.get(client, -1) + 1
        return asked[client]

    def state(self) -> Tree:
        """All that it will go on with, for a checkpoint."""
        return {
            "aggregator": plain(self._state),
            "averaged": self._averaged_B,
            "integers": self._integers_I,
            "version": self.version,
            "tasks": self._tasks,
            "losses": self.losses,
            "asked": self._asked,
            "open": [{"version": found.version, "task": plain(found.task)} for found in self.open.values()],
            "clocks": plain(self._clocks.state()) if self._clocks else None,
        }

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said.

        Raises:
            InvalidCheckpoint: if it is the state of another algorithm or model.
        """
        self._state = refilled(self._state, state["aggregator"])
        self._averaged_B, self._integers_I = state["averaged"], state["integers"]
        self.version, self._tasks = state["version"], state["tasks"]
        self.losses, self._asked = state["losses"], state["asked"]
        self._offered = None
        tasks = [(Task(**found["task"]), found["version"]) for found in state["open"]]
        self.open = {task.id: OpenTask(task, version) for task, version in tasks}
        self._clocks = ParameterStore.restore(state["clocks"]) if state["clocks"] else None

    def _suffice(self, replies: int, number: int) -> bool:
        try:
            self._aggregator.check(replies)
        except InvalidExperiment as error:
            _log.warning("round %d: the model stays as it was: %s", number, error)
            return False
        return True

    def _apply(self, accumulator: UpdateAccumulator, number: int, share: float | None) -> None:
        if self._aggregator.linear:
            state, mean_M = self._state, accumulator.mean()
        else:
            stream = self.streams.generator("combine", number)
            state, mean_M = self._aggregator.combine(self._state, *accumulator.rows(), stream)
        members = len(self.fleet.registered())
        mean_M = mean_M if share is None or share == 1.0 else mean_M * share
        *mean, averaged_B = mean_M.split_with_sizes(self._sizes)
        reduced = Reduced(tuple(mean), accumulator.replied if share is None else members, members)
        state = self._aggregator.apply(state, reduced)
        self._aggregator.check_state(state, self._layout.parameters, "apply")
        averaged_B = self._averaged_B + averaged_B if self._sizes[-1] else self._averaged_B
        # At once, so that an interruption finds the model of one round or of the other.
        self._state, self._averaged_B, self._integers_I, self._offered = state, averaged_B, accumulator.integers_I, None

    def _offer(self) -> _Offer:
        if self._offered is None:
            start_V = self._vector(self._aggregator.model_to_send(self._state))
            broadcast = tuple(part.to(self._layout.dtype) for part in self._aggregator.broadcast(self._state))
            self._offered = _Offer(start_V, broadcast, self._aggregator.steps(self._state))
        return self._offered

    def _vector(self, params_P: Tensor) -> Tensor:
        """The whole vector as it travels; of the same parameters the same one."""
        if self._kept is None or self._kept[0] is not params_P or self._kept[1] is not self._averaged_B:
            vector_V = self._whole(params_P).to(self._layout.dtype, copy=True)
            self._kept = params_P, self._averaged_B, vector_V
        return self._kept[2]

    def _whole(self, params_P: Tensor) -> Tensor:
        return torch.cat([params_P, self._averaged_B]) if self._sizes[-1] else params_P
