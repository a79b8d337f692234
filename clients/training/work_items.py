"""Work items of processes that work for clients, and their results.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from fed.aggregators.base import Aggregator, Phase
from fed.clients.data import ClientId, Held, SamplesOnDemand
from fed.clients.data.collate import Collating
from fed.clients.data.held import may_ignore, size_of
from fed.clients.scoring.measures import Loss, Metrics, is_mean_over_samples, is_over_counted
from fed.clients.training.evaluation import Score
from fed.clients.training.local_trainer import MakeTrainer
from fed.compression.codec import CodecState
from fed.config.experiment import Local
from fed.privacy.dp_sgd import SamplePrivacy
from fed.privacy.noise import NoiseSource
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, nn
from fed.vectors.trees import Tree
from fed.wire.messages import Task

__all__ = [
    "CountClasses",
    "Evaluate",
    "EvaluateByClients",
    "Evaluated",
    "Leaving",
    "Recipe",
    "Train",
    "Trained",
    "TrainedClients",
    "Wants",
    "label_of",
]

_Reader: TypeAlias = Callable[[ClientId], Held]

Wants: TypeAlias = Literal["models", "reported", "updates", "mean", "payload"]
"""Kinds of results of a group's training, as :class:`Train` describes them."""


@dataclass(frozen=True)
class Train:
    """Train a group.

    With it come the model or models to start from (vector [V] or [K, V], integers [I] or [K, I]), the broadcast's
    tensors, and the clients' states, [K, ·] each.

    The result is a :class:`Trained`, the wanted tensors, and the clients' new states. ``wants`` is one of

    - "models": the trained vectors [K, V], in the model's type, and integers [K, I];
    - "reported": the updates that clients report [K, M], in float64, before they are encoded, and integers [K, I];
    - "updates": the same as the coordinator decodes them;
    - "mean": their weighted mean [M], in float64, and the largest of the integers [I];
    - "payload": the tensors of one client's message, [1, ·] each, as they travel, integers last.

    Where codecs keep states, their states in case the messages are lost come after the new ones.

    Args:
        clients: the group.
        round: round of the task, from 1; with the client it names the random streams, unless ``keys`` do.
        wants: kind of result that is sent back.
        lr: step size, > 0; None: the experiment's.
        clip: clip of the round, in units of which messages are sent, where it moves; None: the experiment's.
        steps: number of optimizer steps of each client, None for the experiment's; empty: the experiment's for all.
        broadcast_count: number of tensors that the algorithm sends beside the model.
        population: number of all clients.
        places: each client's number among all clients, where the algorithm asks for it.
        keys: numbers that name each client's random streams, together with the client; empty: the round alone.
        state_names: names of the tensors of the clients' states, in their order.
    """

    clients: tuple[ClientId, ...]
    round: int
    wants: Wants
    lr: float | None = None
    clip: float | None = None
    steps: tuple[int | None, ...] = ()
    broadcast_count: int = 0
    population: int = 1
    places: tuple[int, ...] = ()
    keys: tuple[tuple[int, ...], ...] = ()
    state_names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tasks: Sequence[Task],
        *,
        wants: Wants,
        population: int,
        places: tuple[int, ...] = (),
        state_names: tuple[str, ...] = (),
        cuts: Mapping[int, int] | None = None,
    ) -> "Train":
        """The local training of tasks that share a step size and a broadcast.

        Args:
            tasks: a coordinator's tasks, one for each client of the group.
            wants: kind of result that is sent back.
            population: number of all clients.
            places: each client's number among all clients, where the algorithm asks for it.
            state_names: names of the tensors of the clients' states, in their order.
            cuts: id of a task → number of optimizer steps, where that is not the task's own.
        """
        cuts = cuts or {}
        first = tasks[0]
        return cls(
            clients=tuple(task.client for task in tasks),
            round=first.round,
            wants=wants,
            lr=first.lr,
            clip=first.clip,
            steps=tuple(cuts.get(task.id, task.steps) for task in tasks),
            broadcast_count=len(first.model.broadcast),
            population=population,
            places=places,
            keys=tuple((task.round, task.repeats) if task.repeats else (task.round,) for task in tasks),
            state_names=state_names,
        )

    @property
    def rounds(self) -> Sequence[int]:
        """The round of each client, which names the random streams with which it encodes."""
        return [key[0] for key in self.keys] or [self.round] * len(self.clients)

    @property
    def repeats(self) -> Sequence[int]:
        """Number of earlier tasks of each client in its round; empty: none had one."""
        repeats = [sum(key[1:]) for key in self.keys]
        return repeats if any(repeats) else ()

    def key_of(self, row: int) -> tuple[ClientId, ...]:
        """Key of a client's random streams."""
        return self.clients[row], *(self.keys[row] if self.keys else (self.round,))


@dataclass(frozen=True)
class Trained:
    """Result of training a group.

    Args:
        samples: number of samples of each client.
        train_losses: mean loss of each client over the samples trained on.
        weights: weight of each client in the mean.
        sizes: bytes of each client's message, where codecs decide on them; else empty.
        diverged: clients whose loss or model is no longer finite, each with a sentence that says so. If there is one,
            no tensors come with the result.
        failed: clients whose own code has failed, each with a sentence that says why; no tensors come with the result.
        metrics: further numbers of each client, where an app tells some; else empty.
        most_together: largest number of clients that fit into the device's memory together; None: a whole group.
        uncaptured: reason why steps are no CUDA graphs; empty where they are, or need not be.
    """

    samples: tuple[int, ...]
    train_losses: tuple[float, ...]
    weights: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    diverged: tuple[tuple[ClientId, str], ...] = ()
    failed: tuple[tuple[ClientId, str], ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    most_together: int | None = None
    uncaptured: str = ""


class TrainedClients(NamedTuple):
    """K clients after local training in which none has diverged, before anything leaves them.

    Args:
        task: task of the group.
        start: the model that came with the task, [V], or each client's own, [K, V].
        integers_I: integer buffers that came with the model.
        begin: model from which local steps began, [V], or each client's own, [K, V].
        params_KV: trained models, in the model's type; or in float64, where nothing but their mean is wanted.
        integers_KI: trained integer buffers.
        own: the models, or the private parts, that the clients keep for themselves, vectors [K, ·] and integers
            [K, ·]; None where they keep none.
        samples: number of samples of each client.
        train_losses: each client's mean loss over the samples trained on.
        client_state: the algorithm's state of the clients, a named tuple of [K, ·], or None.
        kept: states of the clients' codecs, [K, ·] each.
        facts: () → all else that :class:`fed.aggregators.base.ClientWork` has, for algorithms with a report of their
            own.
        metrics: further numbers of each client, where an app tells some; else empty.
        is_mean: True if ``params_KV`` is the models' mean [1, V] weighted by samples, in float64: all that is wanted.
    """

    task: Train
    start: Tensor
    integers_I: Tensor
    begin: Tensor
    params_KV: Tensor
    integers_KI: Tensor
    own: tuple[Tensor, Tensor] | None
    samples: tuple[int, ...]
    train_losses: tuple[float, ...]
    client_state: Any
    kept: CodecState
    facts: Callable[[], Mapping[str, Any]]
    metrics: tuple[Mapping[str, float], ...] = ()
    is_mean: bool = False


class Leaving(Protocol):
    """The way out of clients that report to a coordinator: :class:`fed.clients.way_out.WayOut`."""

    @property
    def averages_models(self) -> bool:
        """True if the mean of a group that started from one model is that of its models, weighted by samples."""

    def __call__(self, trained: TrainedClients) -> tuple[Trained, Sequence[Tensor]]:
        """The answer that a task wants of its trained clients."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate models (vectors [K, V], integers [K, I]) on the test samples ``first`` … ``last`` − 1.

    Args:
        first: place of the first sample in the test set.
        last: place behind the last sample.
        places: places of the samples in the test set; empty: ``first`` … ``last`` − 1 themselves.
    """

    first: int
    last: int
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class CountClasses:
    """Count the test samples ``first`` … ``last`` − 1 by true class and by the class that a model takes them for.

    The model is a vector [V] with integers [I]. The result has no content but the counts [C, C], or no tensor where
    :func:`fed.clients.training.evaluation.confusion_counts` gives none.
    """

    first: int
    last: int


@dataclass(frozen=True)
class EvaluateByClients:
    """Evaluate one model (vector [V], integers [I]), or each client's ([K, V], [K, I]), on their held-out samples.

    Args:
        clients: clients that evaluate.
        round: number of the round whose models they are, from 1, which an app is told.
    """

    clients: tuple[ClientId, ...]
    round: int = 1


@dataclass(frozen=True)
class Evaluated:
    """Each model's loss and metrics, with the number of samples that were scored.

    An :class:`EvaluateByClients` has a score for each client that holds samples out; ``clients`` names these clients,
    and ``failed`` those whose own code has failed, each with a sentence that says why. ``notes`` are sentences for the
    log.
    """

    scores: tuple[Score, ...]
    samples: tuple[int, ...]
    clients: tuple[ClientId, ...] = ()
    failed: tuple[tuple[ClientId, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """Everything that a process needs to do its part of the work; it can be pickled if the user's parts can.

    Args:
        module: the model.
        loss: (output, target) → scalar.
        metrics: name → (output, target) → number.
        local: the experiment's section of that name.
        aggregator: algorithm that clients report to; None where there is no coordinator.
        phases: phases of local training, one after another.
        private: names of the tensors that the model does not share.
        read: client → its samples.
        test: (inputs, targets) of the test set, or samples on demand, or None.
        streams: the run's random streams; a client's are named by client and round.
        secret_streams: streams of the clients' own draws, where nobody else may follow them; None: the run's.
        held_out: client → samples on which it scores models, where clients do.
        way_out: way out of the clients' messages; None where there is no coordinator, or nobody trains.
        is_batched: True if groups train as one computation.
        moved: names of the tensors that the coordinator alone moves.
        make_trainer: function that makes the trainer of single clients, where that is not PyTorch's own; clients then
            train one by one.
        collate: function that makes batches of samples; None: they are stacked.
        may_ignore: True if clients' targets may be labels that do not count, so that each group's are looked at.
        is_deterministic: True if GPUs compute by deterministic algorithms alone.
        sample_privacy: clip and noise of each step, where clients' samples are private; None: plain steps.
        make_private: function that makes the trainer of such clients, of the arguments of ``PrivateTrainer``; None:
            that class.
        private_source: source of these steps' draws, of the system's where nobody may follow them; None: the streams.
    """

    module: "nn.Module"
    loss: Loss
    metrics: Metrics
    local: Local
    aggregator: Aggregator | None
    phases: tuple[Phase, ...]
    private: frozenset[str]
    read: _Reader
    test: Iterable[Tree] | SamplesOnDemand | None
    streams: Streams
    secret_streams: Streams | None = None
    held_out: _Reader | None = None
    way_out: Leaving | None = None
    is_batched: bool = False
    moved: frozenset[str] = frozenset()
    make_trainer: MakeTrainer | None = None
    collate: Collating | None = None
    may_ignore: bool = True
    is_deterministic: bool = True
    sample_privacy: SamplePrivacy | None = None
    make_private: Callable[..., Any] | None = None
    private_source: NoiseSource | None = None

    @property
    def test_samples(self) -> Held:
        """The test set, (inputs, targets) or samples on demand."""
        return self.test if isinstance(self.test, SamplesOnDemand) else tuple(self.test or ())

    @property
    def test_size(self) -> int:
        """Number of test samples; 0 without a test set."""
        return 0 if self.test is None else size_of(self.test_samples)

    @property
    def own_streams(self) -> Streams:
        """The streams of the clients' own draws."""
        return self.secret_streams or self.streams

    @property
    def scores_in_parts(self) -> bool:
        """True where loss and metrics are means over samples, so that the test set may be cut into several items."""
        measures = (self.loss, *self.metrics.values())
        # Parts are weighted by their samples, and labels that do not count would give them other weights.
        if any(map(is_over_counted, measures)) and self.test is not None and self._test_may_ignore():
            return False
        return all(map(is_mean_over_samples, measures))

    def _test_may_ignore(self) -> bool:
        return may_ignore(self.test_samples, is_collated=self.collate is not None)


def label_of(task: Train) -> str:
    """Name of a group in a round, for people."""
    names = [repr(client) for client in task.clients[:8]]
    if len(task.clients) > 8:
        names.append(f"{len(task.clients) - 8} others")
    who = f"client {names[0]}"
    if len(names) > 1:
        who = f"clients {', '.join(names[:-1])} and {names[-1]}"
    return f"{who} of round {task.round}"
