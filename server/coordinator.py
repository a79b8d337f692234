"""The coordinator: one global model, moved by one aggregator, over any fleet.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from fed.aggregators.base import Aggregator
from fed.compression.stage import Stage
from fed.errors import Diverged, InvalidExperiment
from fed.privacy.adaptive_clip import AdaptiveClip
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.participation import ParticipationRule, Participations
from fed.server.downlink import Downlink
from fed.server.fleet import Fleet
from fed.server.observer import TaskFailed, TaskLate, TaskSent, TaskSettled
from fed.server.privacy_account import PrivacyAccount
from fed.server.round_stats import RoundStats
from fed.server.telling import Observers
from fed.server.way_in import Staleness, UpdateAccumulator, WayIn
from fed.storage.checkpoints import Tree, plain, refilled
from fed.vectors.layout import Layout, leading
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format
from fed.wire.messages import Failure, GlobalModel, Task, task_of

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)
_MOST_TO_SQUARE = 1e150  # the square of much more is no float64
_NOT_AWAITED = "the round has ended without it"


@dataclass(eq=False)
class Coordinator:
    """Keeps the global model and the aggregator's state, in float64; dispatches tasks and counts their answers.

    Attributes:
        losses: last training loss of each client that has answered.
        version: number of times that the model has moved.
        open: tasks that are not answered yet, by id.
        participations: record of who has been asked, by which a rule is kept; None: anybody may be asked at any time.
        keeps_states: True if clients keep a state; then they take no task until the verdict on their last one.

    Args:
        aggregator: algorithm that moves the model by the mean update.
        fleet: fleet of the clients.
        layout: layout of the parameters and buffers that leave a client.
        message: format of the run's messages.
        vector_V: parameters and float buffers of the first model.
        integers_I: integer buffers of the first model.
        streams: random streams of the run.
        lr_in: function from (round, clients asked) to the step size of local steps; None: the clients know it.
        drops_diverged: True if a client that diverges has failed; otherwise it ends the run.
        stages: changes of the mean update.
        noisy_sum: noise on the sum, under differential privacy with a trusted coordinator; None without.
        adaptive_clip: clip that moves from round to round under differential privacy; None where none does.
        cohort_streams: random streams of the draws of cohorts; None: those of the run.
        account: account of the run's privacy; None where it promises none.
        participation: rule of who may be asked; None: anybody at any time.
        observers: observers that are told of tasks.
        first_task: id of the first task, where the fleet has had others before.

    Raises:
        InvalidExperiment: if the aggregator's state does not hold the model.
    """

    aggregator: Aggregator
    fleet: Fleet
    layout: Layout
    message: Format
    vector_V: InitVar[Tensor]
    integers_I: InitVar[Tensor]
    streams: Streams
    lr_in: Callable[[int, int], float] | None = None
    drops_diverged: bool = False
    stages: InitVar[tuple[Stage, ...]] = ()
    noisy_sum: InitVar[NoisySum | None] = None
    adaptive_clip: AdaptiveClip | None = None
    cohort_streams: Streams | None = None
    account: PrivacyAccount | None = None
    participation: InitVar[ParticipationRule | None] = None
    observers: Observers = field(default_factory=Observers)
    first_task: int = 0

    def __post_init__(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        stages: tuple[Stage, ...],
        noisy_sum: NoisySum | None,
        participation: ParticipationRule | None,
    ) -> None:
        """Begin with the aggregator's state of the first model."""
        self.losses: dict[int | str, float] = {}
        self.version = 0
        self.open: dict[int, Task] = {}
        parameters = self.layout.parameters
        rule = self.aggregator
        has_own = rule.keeps_private or any(phase.is_personal for phase in rule.phases())
        self.keeps_states = rule.keeps_client_state or has_own
        # In float64 an update far below a parameter is not rounded away.
        self._state: Any = rule.init(vector_V[:parameters].double())
        rule.check_state(self._state, parameters, "init")
        returned = self.layout.returned_size
        self._buffers_R = vector_V[parameters:returned].double()
        self._first_J = vector_V[returned:].double()  # what the aggregator moves by itself, before it has
        self._integers_I = integers_I
        self._largest = torch.finfo(self.layout.dtype).max
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None  # parameters, buffers, and the vector made of them
        self._tasks = self.first_task
        self._population = 0
        self._sent: tuple[GlobalModel, int | None] | None = None
        self._way_in = WayIn(
            aggregator=rule,
            fleet=self.fleet,
            message=self.message,
            streams=self.streams,
            stages=stages,
            noisy_sum=noisy_sum,
            adaptive_clip=self.adaptive_clip,
        )
        self.participations = None if participation is None else Participations(participation)
        self._noisy_sum = noisy_sum
        self._sent_sum = self._way_in.sent_sum
        sends_differences = self.message.sends_differences
        self._downlink = Downlink(self.message, self.streams, rule.movement) if sends_differences else None
        self._too_few: Counter[str] = Counter()  # reason → how often
        self._asked: dict[int, dict[int | str, int]] = {}  # round → client → how often; of rounds that are not over

    def model(self) -> tuple[Tensor, Tensor]:
        """The global model that users evaluate: (vector [V], integers [I])."""
        return self._vector(self._state.model_P), self._integers_I

    @property
    def next_task(self) -> int:
        """Id of the next task."""
        return self._tasks

    @property
    def clip(self) -> float | None:
        """Clip of the round's messages, where it moves from round to round; else None."""
        return None if self.adaptive_clip is None else self.adaptive_clip.clip

    def new_accumulator(self, *, mixes: bool = False) -> UpdateAccumulator:
        """An empty accumulator, for the updates that move the model next.

        Args:
            mixes: True if the model moves towards clients' models, rather than by their updates.
        """
        present_V = None
        if mixes:
            present_V = leading(self._whole(self.aggregator.model_to_send(self._state)), self.layout.returned_size)
        return UpdateAccumulator(
            size=sum(self.message.summed_sizes),
            integers_I=self._integers_I,
            is_linear=self.aggregator.linear,
            present_V=present_V,
            drops_diverged=self.drops_diverged,
            observers=self.observers,
            hides_numbers=self.message.hides_numbers,
        )

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
            accumulator: accumulator that counts the tasks.
            number: number of the round, from 1.
            clients: clients that train, none of which has a task.
            cohort: number of clients that the step size is scaled for; that of ``clients`` unless given.
            deadline_s: seconds from now in which an answer must arrive; None: no deadline.
            takes_parts: True if a client may answer with fewer steps; under secure aggregation none may.
        """
        if self.participations is not None:
            self.participations.note(clients, number)
        model, steps = self._model_to_send()
        lr = self.lr_in(number, cohort or len(clients)) if self.lr_in else None
        takes_parts = takes_parts and self.message.fixed is None  # else a deadline would decide whose message counts
        places, numbers = self._numbered(clients)
        tasks = [
            Task(
                id=self._tasks + place,
                round=number,
                client=client,
                model=model,
                lr=lr,
                steps=steps,
                repeats=self._repeats(client, number),
                deadline_s=deadline_s,
                takes_parts=takes_parts,
                differences=self._downlink.missing(client) if self._downlink else None,
                clip=self.clip,
            )
            for place, client in zip(places, clients, strict=True)
        ]
        self._tasks += numbers
        self.open.update((task.id, task) for task in tasks)
        accumulator.asked += clients
        sizes: dict[object, int] = {}  # tasks with the same content have one size, which is found once
        for task in tasks:
            if (content := task.content) not in sizes:
                sizes[content] = task.size_bytes()
            accumulator.bytes_down += sizes[content]
        if self.observers.want(TaskSent):  # a large cohort has many events, which may be for nobody
            for task in tasks:
                self.observers.tell(TaskSent(number, task.client, task.id))
        self.fleet.dispatch(tasks)

    def collect(
        self,
        accumulator: UpdateAccumulator,
        *,
        until: float = math.inf,
        enough: int | None = None,
        weigh: Staleness = lambda staleness: 1.0,
    ) -> None:
        """Count answers as they arrive.

        Args:
            accumulator: accumulator that counts them.
            until: time at which to stop, in seconds of the fleet's clock.
            enough: number of updates after which to stop, counted from now; all of one instant are taken. None: stop
                when no task is left.
            weigh: function from an update's staleness to its factor; None: the update is too late to count.

        Raises:
            Diverged: if a client's loss or model is no longer finite; where such clients are dropped, if a round waits
                for none but them.
        """
        for answer in self.fleet.collect(until, enough):
            # A client that has failed may never have got the model of its task.
            if self._downlink is not None and not isinstance(answer.content, Failure):
                self._downlink.note(answer, self.open)
            accumulator.take(answer, self.open, version=self.version, weigh=weigh)
            del answer  # it may be large, and the next is on its way
        # After all answers of the instant: the order of arrival must not choose the client that is named.
        if accumulator.diverged and (not self.drops_diverged or self._awaits_diverged_alone(accumulator)):
            first = min(accumulator.diverged, key=lambda answer: answer.tasks)
            raise Diverged.of(first.round, first.clients[0], first.problem)

    def _tell_verdict(self, accumulator: UpdateAccumulator, number: int, counted: Mapping[int, float]) -> None:
        """Tell observers which of the updates that were collected have moved the model."""
        if not self.observers.want(TaskSettled):
            return
        # In the order of the tasks, whatever the order of arrival.
        for task, client in sorted(zip(accumulator.counted, accumulator.replied, strict=True)):
            self.observers.tell(TaskSettled(number, client, task, discount=counted.get(task, 0.0)))

    def _awaits_diverged_alone(self, accumulator: UpdateAccumulator) -> bool:
        """True if each client has answered or diverged, some again and again, and no other has a task."""
        members = self.fleet.registered()
        if len(accumulator.diverged) <= len(members):
            return False
        diverged = {answer.clients[0] for answer in accumulator.diverged}
        is_awaited = any(task.client not in diverged for task in self.open.values())
        return not is_awaited and all(client in diverged or client in accumulator.loss_of for client in members)

    def cancel(self, accumulator: UpdateAccumulator, *, are_late: bool) -> None:
        """Wait no longer for open tasks: they are late, or else have failed.

        Answers that their clients know to have arrived still count.
        """
        self.fleet.cancel(list(self.open))
        self.collect(accumulator, until=self.fleet.clock)
        unanswered = accumulator.late if are_late else accumulator.failed
        unanswered += [task.client for task in self.open.values()]
        for task in self.open.values():
            if are_late:
                self.observers.tell(TaskLate(task.round, task.client, task.id))
            else:
                self.observers.tell(TaskFailed(task.round, task.client, task.id, reason=_NOT_AWAITED))
        self.open.clear()

    def step(
        self, accumulator: UpdateAccumulator, number: int, share: float | None = None, quorum: int = 1
    ) -> RoundStats:
        """Move the model by the updates collected, and tell the fleet which of them counted.

        Args:
            accumulator: accumulator of the updates.
            number: number of the round, from 1; no task of an earlier round is sent any more.
            share: share of all clients that the updates come from, where the mean over all is wanted, in which the
                updates of the others are 0; None: the mean of the updates that came.
            quorum: number of updates below which none moves the model.
        """
        # Samplings by loss use these, whether the updates suffice or not.
        self.losses |= accumulator.loss_of
        suffice = bool(accumulator.replied) and self._suffice(len(accumulator.replied), quorum, number)
        counted = accumulator.counted if suffice else {}
        if suffice or self._way_in.acts_alone:
            self._apply(accumulator if suffice else None, number, share)
            self.version += 1
        elif self.account is not None:
            self.account.release_nothing(number)
        self.fleet.settle(counted)  # after the model has moved: client states follow what counted
        self._tell_verdict(accumulator, number, counted)
        for over in [earlier for earlier in self._asked if earlier < number]:
            del self._asked[over]
        return accumulator.stats()

    def state(self) -> Tree:
        """All that a resumed run needs, for a checkpoint."""
        return {
            "aggregator": plain(self._state),
            "averaged": self._buffers_R,
            "integers": self._integers_I,
            "version": self.version,
            "tasks": self._tasks,
            "population": self._population,
            "losses": self.losses,
            "asked": self._asked,
            "privacy": self.account and self.account.state(),
            "noise": self._noisy_sum and self._noisy_sum.state(),
            "clip": self.adaptive_clip and self.adaptive_clip.state(),
            "participations": self.participations and self.participations.state(),
            "sent_sum": self._sent_sum and self._sent_sum.state(),
            "downlink": self._downlink and self._downlink.state(),
            "open": [plain(task) for task in self.open.values()],
        }

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down.

        Raises:
            InvalidCheckpoint: if it is the state of another algorithm or model.
        """
        self._state = refilled(self._state, state["aggregator"])
        self._buffers_R = state["averaged"]
        self._integers_I = state["integers"]
        self.version = state["version"]
        self._tasks = state["tasks"]
        self._population = state["population"]
        self.losses = state["losses"]
        self._asked = state["asked"]
        if self.account is not None:
            self.account.restore(state["privacy"])
        if self._noisy_sum is not None:
            self._noisy_sum.restore(state["noise"])
        if self.adaptive_clip is not None:
            self.adaptive_clip.restore(state["clip"])
        if self.participations is not None:
            self.participations.restore(state["participations"])
        # What is kept for sending is of the time before the resume.
        self._sent = None
        if self._sent_sum is not None:
            self._sent_sum.restore(state["sent_sum"])
        if self._downlink is not None:
            self._downlink.restore(state["downlink"])
        self.open = {task.id: task for task in map(task_of, state["open"])}

    def _numbered(self, clients: Sequence[int | str]) -> tuple[Sequence[int], int]:
        """Numbers of clients' tasks, from 0, and how many numbers are used up.

        Where chance hides who takes part, a client's number follows from the roster alone: from consecutive numbers it
        could tell how many are asked, and its neighbours who is.
        """
        if self.account is None or not self.account.hides_cohorts:
            return range(len(clients)), len(clients)
        members = self.fleet.registered()
        place_of = {client: place for place, client in enumerate(members)}
        return [place_of[client] for client in clients], len(members)

    def _repeats(self, client: int | str, number: int) -> int:
        """The number of tasks that a client has had in a round before."""
        asked = self._asked.setdefault(number, {})
        asked[client] = repeats = asked.get(client, -1) + 1
        return repeats

    def _suffice(self, replies: int, quorum: int, number: int) -> bool:
        if replies < quorum:
            self._say_too_few(number, f"{replies} of a quorum of {quorum} have replied, and nobody else can be asked")
            return False
        try:
            self.aggregator.check(replies)
        except InvalidExperiment as error:
            self._say_too_few(number, str(error))
            return False
        return True

    def _say_too_few(self, number: int, reason: str) -> None:
        """Warn that updates are too few, each time that this has happened ten times as often as at the last warning."""
        self._too_few[reason] += 1
        times = self._too_few[reason]
        # At the 1st, 10th, 100th time and so on: a long run must not fill its log.
        if str(times).strip("0") != "1":
            return
        often = f", for the {times}th time" if times > 1 else ""
        _log.warning("round %d: no update moves the model%s: %s", number, often, reason)

    def _apply(self, accumulator: UpdateAccumulator | None, number: int, share: float | None) -> None:
        """Move the model by the updates that count; None: by what the stages alone add."""
        state = self._state
        population = self.fleet.population()
        if self._population not in (0, population):  # 0: no update yet, and no sums over clients
            state = self.aggregator.resized(state, self._population, population)
        expected = 0.0 if self.account is None else self.account.expected
        state, mean_R = self._way_in.apply(
            state,
            accumulator,
            number=number,
            population=population,
            share=share,
            expected=expected,
            account=self.account,
        )
        self.aggregator.check_state(state, self.layout.parameters, "apply")
        self._check_numbers(state.model_P, number)
        if self.message.moved:
            self._check_numbers(self.aggregator.moved(state), number, "what the algorithm moves by itself becomes")
        buffers_R = self._buffers_R
        if self.message.buffers:
            buffers_R = buffers_R + mean_R
            self._check_numbers(buffers_R, number, "the model's float buffers become")
        integers_I = self._integers_I if accumulator is None else accumulator.integers_I
        # Nothing is called between these lines, so that an interruption, which Python delivers at a call or a jump,
        # finds the model of one round or of the other.
        self._state = state
        self._buffers_R = buffers_R
        self._integers_I = integers_I
        self._sent = None
        self._population = population

    def _check_numbers(self, numbers_N: Tensor, number: int, what: str = "the model becomes") -> None:
        if torch.dot(numbers_N, numbers_N).item() <= min(self._largest, _MOST_TO_SQUARE) ** 2:
            return  # most models are far below, and one number says so
        largest = max(map(abs, map(float, torch.aminmax(numbers_N))))
        if not largest <= self._largest:  # so written, NaN is refused
            raise Diverged(
                f"round {number}: {what} {largest:.3g}; the last good model is kept: lower the step sizes of algorithm "
                "and local, or correct a stage that changes the mean"
            )

    def _model_to_send(self) -> tuple[GlobalModel, int | None]:
        """The model that tasks bring until it moves, and the number of their local steps; None: the experiment's."""
        if self._sent is None:
            params_V = self._vector(self.aggregator.model_to_send(self._state))
            broadcast = tuple(part.to(self.layout.dtype) for part in self.aggregator.broadcast(self._state))
            model = GlobalModel(self.version, params_V, self._integers_I, broadcast)
            if self._downlink is not None:
                model = self._downlink.model(model, self.aggregator.factors(self._state))
            self._sent = model, self.aggregator.steps(self._state)
        return self._sent

    def _vector(self, params_P: Tensor) -> Tensor:
        """The whole vector as it travels; the same tensor for the same parameters."""
        # By identity: comparing the numbers would cost more than the copy.
        if self._kept is None or self._kept[0] is not params_P or self._kept[1] is not self._buffers_R:
            whole_V = self._whole(params_P)
            vector_V = whole_V.clone() if whole_V.dtype == self.layout.dtype else whole_V.type(self.layout.dtype)
            self._kept = params_P, self._buffers_R, vector_V
        return self._kept[2]

    def _whole(self, params_P: Tensor) -> Tensor:
        if not self.message.buffers and not self.message.moved:
            return params_P
        if not self.message.moved:
            return torch.cat([params_P, self._buffers_R])
        return torch.cat([params_P, self._buffers_R, self._first_J + self.aggregator.moved(self._state)])
