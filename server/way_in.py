"""The way in at the server: what becomes of clients' messages until they move the model, as one pipeline.

    validate → decode, or unmask → mean → noise → clip → stages → apply

It is the mirror of :mod:`fed.clients.way_out`.

- *validate*, *decode*: what real nodes send (:func:`received`); simulated messages are decoded where they are encoded.
- *unmask*: under secure aggregation a session gives the sum alone (:class:`fed.server.secure_fleet.SecureFleet`).
- *mean*: of the updates that count (:class:`UpdateAccumulator`), or what a rule that sees each
  of them makes of them; codecs that leave it to the end read it.
- *noise*: differential privacy with a trusted coordinator adds noise to the sum, where nobody has replied too
  (:class:`fed.privacy.noisy_sum.NoisySum`).
- *clip*: a clip that moves from round to round does so by the share of messages that were not clipped, which is taken
  off the mean (:class:`fed.privacy.adaptive_clip.AdaptiveClip`).
- *stages*: the experiment's ``stages``, such as noise, change the mean. Those that act alone do so in rounds in which
  no update counts, too.
- *apply*: the algorithm moves the model.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fed.aggregators.base import Aggregator, Reduced
from fed.compression.codec import Draw
from fed.compression.stage import Stage
from fed.errors import InvalidPayload
from fed.privacy.adaptive_clip import AdaptiveClip
from fed.privacy.clipping import is_within
from fed.privacy.noisy_sum import NoisySum
from fed.protocol.protocol_pb2 import Answer as AnswerHeader
from fed.server.fleet import Fleet
from fed.server.observer import TaskAnswered, TaskFailed, TaskLate
from fed.server.privacy_account import PrivacyAccount
from fed.server.round_stats import Participation, RoundStats, mean_loss, mean_metrics
from fed.server.sent_sum import SentSum
from fed.server.telling import Observers
from fed.vectors.layout import leading
from fed.vectors.randomness import Streams
from fed.vectors.reduction import WeightedMean
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format
from fed.wire.messages import (
    LARGEST,
    Answer,
    Failure,
    Lanes,
    PartialSum,
    RevealedSum,
    Task,
    TrainedModel,
    Update,
    one_line,
    refusal_of_metrics,
    refusal_of_numbers,
)
from fed.wire.payloads import check_tensors, type_name

if TYPE_CHECKING:
    from fed.secure_aggregation.fixed_point import SumOfClients

__all__ = ["Staleness", "UpdateAccumulator", "WayIn", "received"]

_log = logging.getLogger(__name__)


Staleness = Callable[[int], float | None]
"""Function from an update's staleness to the factor that it is counted with; None: it does not count.

The staleness is the number of versions by which the model has moved since the update's start.
"""


def received(task: Task, header: AnswerHeader, tensors: Sequence[Tensor], message: Format, streams: Streams) -> Answer:
    """Validate and decode what a client sent.

    A trained model stays as it came, so that no copy of it is made.

    Args:
        task: task that the message answers.
        header: numbers that came with the tensors.
        tensors: tensors of the message, integers last.
        message: format of clients' messages.
        streams: random streams of the run, for codecs.

    Returns:
        The update as it is counted.

    Raises:
        InvalidPayload: if it must not touch the model.
    """
    check_tensors([(type_name(tensor.dtype), tensor.numel()) for tensor in tensors], message.uplink)
    # before any tensor is looked at: numbers cost nothing to check
    if reason := refusal_of_numbers(header.samples, header.weight, header.train_loss):
        raise InvalidPayload(reason)
    _refuse_claim(header, message)
    told = {one.name: one.value for one in header.metrics}
    if reason := refusal_of_metrics(told, len(header.metrics)):
        raise InvalidPayload(reason)
    # before anything is decoded: codecs rely on finite numbers
    for tensor in tensors:
        _refuse_unusable(tensor)
    answer = Answer(
        tasks=(task.id,),
        round=task.round,
        clients=(task.client,),
        content=_content(task, header, tensors[:-1], message, streams),
        integers_I=tensors[-1],
        size_bytes=sum(tensor.nbytes for tensor in tensors),
    )
    if message.fixed is not None:  # masked: there is nothing to be known of one client
        return answer
    metrics = (told,) if told else ()
    return answer._replace(samples=(header.samples,), train_losses=(header.train_loss,), metrics=metrics)


def _content(
    task: Task, header: AnswerHeader, tensors: Sequence[Tensor], message: Format, streams: Streams
) -> Lanes | TrainedModel | Update:
    """Content of a client's tensors without the integers."""
    if message.fixed is not None:
        return Lanes(tensors[0])
    if message.sends_models:
        return TrainedModel(tensors[0], task.model.params_V, header.weight)
    draw = Draw(streams, [task.round], [task.client])
    try:
        update_M = message.decode(tensors, draw)
    except Exception as error:  # a codec may trip over values that nobody would encode
        reason = f"the payload cannot be decoded: {type(error).__name__}: {one_line(str(error))}"
        raise InvalidPayload(reason) from error
    if message.encoder:
        _refuse_unusable(update_M)  # what a codec makes of finite numbers may not be finite
    _refuse_longer(update_M, message)
    return Update(update_M, 1.0 if message.votes else header.weight)


def _refuse_longer(update_M: Tensor, message: Format) -> None:
    """Refuse a message that is longer than the clip, whatever the client says of it."""
    if message.clip is None:
        return
    if message.has_bits:
        if abs(float(update_M[-1])) != 0.5:
            raise InvalidPayload(f"the number behind a message must be ½ or −½, got {float(update_M[-1]):g}")
        update_M = update_M[:-1]
    if not is_within(update_M, message.clip):
        raise InvalidPayload(f"the message must be clipped to {message.clip:g}, got a longer one")


def _refuse_claim(header: AnswerHeader, message: Format) -> None:
    """Refuse a weight that the algorithm gives no client with so many samples: one client's word must not outweigh all.

    A masked message has its weight in its lanes, and of votes none counts.
    """
    if message.fixed is not None or message.votes:
        return
    expected = header.samples if message.weighs_samples else 1
    is_known = message.weighs_samples or message.weighs_alike or message.error_feedback.adds_up
    if is_known and header.weight != expected:
        rule = "its number of samples" if message.weighs_samples else "that of all clients"
        raise InvalidPayload(f"the weight must be {rule}, {expected}, got {header.weight:g}")


def _refuse_unusable(tensor: Tensor) -> None:
    """Refuse numbers that must not touch the model."""
    if not tensor.numel() or not tensor.is_floating_point():
        return
    lowest, highest = torch.aminmax(tensor)  # both are NaN where one number is
    largest = max(-float(lowest), float(highest))
    if not largest <= LARGEST:  # so written, NaN is refused
        raise InvalidPayload(f"the vector must be finite and within ±{LARGEST:.0e}, got {largest}")


@dataclass(eq=False)
class UpdateAccumulator:
    """The updates since the global model last moved: their weighted sum, or each where a rule needs it.

    Answers may come in any order and grouping: what is counted is the same, to the bit.

    Attributes:
        asked, replied, late, failed: the clients of tasks that were sent, and of what became of them, one a task.
        bytes_up, bytes_down: bytes from clients, and to them.
        counted: task → the factor that its update was counted with.
        staleness: staleness of each update that counts, in versions.
        losses: (training loss, samples) of each update that counts.
        metrics: (further numbers by name, samples) of each update that counts, where an app tells some.
        loss_of: client → its training loss.
        samples_of: client → its number of samples, of those whose updates count.
        hidden: the sum of the round's clients under secure aggregation, which tells nothing of one of them.
        diverged: list of answers whose numbers were not finite.

    Args:
        size: number M of values in an update.
        integers_I: integer buffers of the model, then the largest ones of the updates that count.
        is_linear: True if the rule needs the mean of the updates alone, rather than each update.
        present_V: present global model, if it moves towards clients' models; None: it moves by their updates.
        drops_diverged: True if a client whose numbers are not finite has failed, rather than the run.
        observers: observers that are told what becomes of tasks.
        hides_numbers: True if clients tell no losses.
    """

    size: int
    integers_I: Tensor
    is_linear: bool
    present_V: Tensor | None = None
    _: KW_ONLY
    drops_diverged: bool = False
    observers: Observers = field(default_factory=Observers)
    hides_numbers: bool = False

    def __post_init__(self) -> None:
        """Begin without updates."""
        self.asked: list[int | str] = []
        self.replied: list[int | str] = []
        self.late: list[int | str] = []
        self.failed: list[int | str] = []
        self.bytes_up = self.bytes_down = 0
        self.counted: dict[int, float] = {}
        self.staleness: list[int] = []
        self.losses: list[tuple[float, int]] = []
        self.metrics: list[tuple[Mapping[str, float], int]] = []
        self.loss_of: dict[int | str, float] = {}
        self.samples_of: dict[int | str, int] = {}
        self.hidden: SumOfClients | None = None
        self.diverged: list[Answer] = []
        # exact: the order of arrival must not change a bit of the model
        self._mean = WeightedMean(self.size)
        self._single: dict[int, tuple[Tensor, float]] = {}

    def take(self, answer: Answer, open_tasks: dict[int, Task], version: int, weigh: Staleness) -> None:
        """Count an answer, if it may count, close its tasks, and tell observers what has become of them.

        Args:
            answer: answer from a fleet, which has checked what clients say.
            open_tasks: open tasks by id; those that are answered are removed.
            version: version of the global model now.
            weigh: function from an update's staleness to its factor; None: the update is too late to count.
        """
        content = answer.content
        if isinstance(content, Failure):
            self._take_failure(answer, content, open_tasks)
            return
        # what does not count has travelled, too
        self.bytes_up += answer.size_bytes
        self.bytes_down += answer.more_bytes_down
        # a task named twice, or one that is not open, makes the lists unequal
        tasks = [open_tasks[task] for task in dict.fromkeys(answer.tasks) if task in open_tasks]
        are_open = 0 < len(tasks) == len(answer.tasks)
        # an answer for a task of another client must not move the model in its name
        asked = [(task.client, task.round) for task in tasks]
        if not are_open or asked != [(client, answer.round) for client in answer.clients]:
            _log.warning("round %d: refused clients %s: their tasks are not in flight", answer.round, answer.clients)
            return
        for task in tasks:
            del open_tasks[task.id]
        if isinstance(content, RevealedSum):  # it tells nothing of single clients
            self.hidden = content.of_clients
            self.counted |= dict.fromkeys(answer.tasks, 1.0)
            self.staleness += [0] * len(tasks)
            self._note_end(answer, self.replied, TaskAnswered)
            return
        # the loss of a late client is known all the same, and samplings by loss use it
        self.loss_of |= zip(answer.clients, answer.train_losses, strict=True)
        staleness = version - tasks[0].model.version  # all tasks of an answer started from one version
        factor = weigh(staleness)
        if factor is None:
            self._note_end(answer, self.late, TaskLate)
            return
        self._add(answer, tasks[0], factor)
        self.samples_of |= zip(answer.clients, answer.samples, strict=True)
        self.counted |= dict.fromkeys(answer.tasks, factor)
        if answer.integers_I.numel():
            # counters, such as numbers of batches: the furthest stands for all
            self.integers_I = torch.maximum(self.integers_I, answer.integers_I)
        if not self.hides_numbers:
            self.losses += zip(answer.train_losses, answer.samples, strict=True)
        if answer.metrics:  # of all its clients, or of none
            self.metrics += zip(answer.metrics, answer.samples, strict=True)
        self.staleness += [staleness] * len(tasks)
        self._note_end(answer, self.replied, TaskAnswered)

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
            train_loss=hidden.train_loss if hidden and not self.hides_numbers else mean_loss(self.losses),
            metrics=mean_metrics(self.metrics),
            staleness_mean=sum(self.staleness) / len(self.staleness) if self.staleness else 0.0,
            clipped_share=hidden.clipped / (len(hidden.mean_M) * hidden.clients) if hidden else None,
            capped_weights=hidden.capped if hidden else None,
            diverged=len(self.diverged) if self.drops_diverged else None,
            participation=Participation(asked=self.asked, replied=self.replied, late=self.late, failed=self.failed),
        )

    def _take_failure(self, answer: Answer, failure: Failure, open_tasks: dict[int, Task]) -> None:
        """Note that the client of a task has no update, or one that is refused, and close the task."""
        if failure.has_diverged:
            # raised after all answers have come, so that the order does not choose whose
            self.diverged.append(answer)
            if not self.drops_diverged:
                return
        # what it has sent has travelled, too
        self.bytes_up += answer.size_bytes
        self.bytes_down += answer.more_bytes_down
        if open_tasks.pop(answer.tasks[0], None) is None:
            return
        client = answer.clients[0]
        self.failed.append(client)
        self.observers.tell(
            TaskFailed(
                round=answer.round,
                client=client,
                task=answer.tasks[0],
                reason=failure.reason,
                has_diverged=failure.has_diverged,
            )
        )

    def _note_end(self, answer: Answer, clients: list[int | str], kind: type[TaskAnswered | TaskLate]) -> None:
        """Note the end of an answer's tasks.

        Args:
            answer: answer to the tasks.
            clients: list of the clients whose tasks have ended so.
            kind: event that observers are told, for each task.
        """
        clients += answer.clients
        if not self.observers.want(kind):  # a large cohort has many events, which may be for nobody
            return
        for client, task in zip(answer.clients, answer.tasks, strict=True):
            self.observers.tell(kind(answer.round, client, task))

    def _add(self, answer: Answer, task: Task, factor: float) -> None:
        """Add an answer to the sum, or keep it where the rule needs each."""
        content = answer.content
        if isinstance(content, PartialSum):
            self._mean.merge(content.total)
            return
        if isinstance(content, TrainedModel):
            if self.is_linear and self.present_V is None:
                # the difference is taken inside the sum, without another vector of the model's size
                self._mean.add(content.params_V, content.weight, factor, less_P=content.start_V)
                return
            content = content.update()
        assert isinstance(content, Update)
        update_M = content.update_M
        if self.present_V is not None:
            update_M = update_M + (leading(task.model.params_V, self.present_V.numel()) - self.present_V)
        if self.is_linear:
            self._mean.add(update_M, content.weight, factor)
        else:
            # the discount is on the update, for rules such as the median ignore weights
            self._single[task.id] = update_M.double() * factor, content.weight


@dataclass(eq=False)
class WayIn:
    """The way in from the updates that count to the model, composed once when a run is prepared.

    Attributes:
        sent_sum: sum of all that clients have sent, where messages say how updates have changed; else None.

    Args:
        aggregator: algorithm, which moves the model.
        fleet: fleet of the clients.
        message: format of clients' messages.
        streams: random streams of the run.
        stages: changes of the mean; stages that change updates alone are left out.
        noisy_sum: noise on the sum, under differential privacy with a trusted coordinator; None without.
        adaptive_clip: clip that moves from round to round under differential privacy; None where none does.
    """

    aggregator: Aggregator
    fleet: Fleet
    message: Format
    streams: Streams
    stages: tuple[Stage, ...] = ()
    noisy_sum: NoisySum | None = None
    adaptive_clip: AdaptiveClip | None = None

    def __post_init__(self) -> None:
        """Begin before the first round."""
        self._round = 0
        self._moves = 0  # of the model in this round, before this one
        self.stages = tuple(stage for stage in self.stages if stage.changes_mean)
        self.sent_sum = SentSum(self.message) if self.message.error_feedback.adds_up else None

    @property
    def acts_alone(self) -> bool:
        """True if the model moves in rounds in which no update counts, too."""
        return self.noisy_sum is not None or any(stage.acts_alone for stage in self.stages)

    def apply(
        self,
        state: Any,
        accumulator: UpdateAccumulator | None,
        number: int,
        population: int,
        share: float | None,
        expected: float = 0.0,
        account: PrivacyAccount | None = None,
    ) -> tuple[Any, Tensor]:
        """Make the mean of the updates that count, change it, and apply it.

        Args:
            state: state of the algorithm.
            accumulator: accumulator of the updates; None where none counts: their mean is 0.
            number: number of the round, from 1.
            population: number N of clients that have ever registered.
            share: share of all clients that the updates come from, where the mean over all is wanted, in which the
                updates of the others are 0; None: the mean of the updates that came.
            expected: expected number of updates, by which a sum with noise is divided.
            account: account of the run's privacy, which writes down what is released; None where it promises none.

        Returns:
            The algorithm's next state, and the mean update of the float buffers, of which there may be none.
        """
        if accumulator is None:
            update_M = torch.zeros(self.message.numbers, dtype=torch.float64)
            replied = 0
        else:
            state, update_M = self._mean(state, accumulator, number=number, share=share)
            replied = len(accumulator.replied)
        clients = replied if share is None else len(self.fleet.registered())  # that the mean is over
        if account is not None:
            # Everything that follows is computed from what is written down here.
            make = partial(self._protected, update_M, clients, expected, number)
            update_M = account.release(number, make)
        if self.adaptive_clip is not None:
            update_M = self.adaptive_clip(update_M)
        if self.noisy_sum is not None:
            clients = round(expected)  # how many have answered is not to be told
        if self.stages:
            update_M = self._changed(update_M, clients, number)
        parts = len(self.message.parts)
        is_one = parts == 1 and not self.message.buffers
        mean = (update_M,) if is_one else update_M.split_with_sizes(self.message.part_sizes)
        reduced = Reduced(mean[:parts], clients=clients, population=population, stream=partial(self._stream, number))
        return self.aggregator.apply(state, reduced), mean[-1]

    def _protected(self, mean_M: Tensor, clients: int, expected: float, number: int, attempt: int) -> Tensor:
        """The mean as it may be published: with noise, where the coordinator adds some."""
        if self.noisy_sum is None:
            return mean_M
        return self.noisy_sum(mean_M, clients, expected=expected, number=number, attempt=attempt)

    def _changed(self, mean_M: Tensor, clients: int, number: int) -> Tensor:
        """The mean as the last stage leaves it; each move of the model has draws of its own."""
        self._moves = self._moves + 1 if number == self._round else 0
        self._round = number
        move = f", move {self._moves}" if self._moves else ""
        for place, stage in enumerate(self.stages):
            purpose = f"stage {place} of the mean{move}"
            draw = Draw(self.streams, rounds=[number], clients=[0], purpose=purpose)
            mean_M = stage.change_mean(mean_M, clients, draw)
        return mean_M

    def _mean(self, state: Any, accumulator: UpdateAccumulator, number: int, share: float | None) -> tuple[Any, Tensor]:
        """The state that a rule which sees each update leaves, and the mean update [M]."""
        if self.aggregator.linear:
            update_M = accumulator.mean()
        else:
            state, update_M = self.aggregator.combine(state, *accumulator.rows(), self._stream(number))
        if share is not None and share != 1.0:  # a product with 1 would be a copy of the model
            update_M = update_M * share
        if self.sent_sum is not None:
            update_M = self.sent_sum.add(update_M, accumulator.samples_of, accumulator.weight, self.fleet)
        if self.message.encoder is not None:
            update_M = self.message.read(update_M, self.streams, number)
        return state, update_M

    def _stream(self, number: int) -> np.random.Generator:
        return self.streams.generator("combine", number)
