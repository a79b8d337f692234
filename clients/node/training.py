"""Training at a node: tasks and scores, from files and into files, and the client's state between tasks.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fed.clients.apps.app import App
from fed.clients.casting import in_type, what_was_cast
from fed.clients.data import FederatedData
from fed.clients.data.samples import pattern_of
from fed.clients.node.fixed_part import FIXED_PART, hold_to_plan
from fed.clients.node.kept_states import KeptStates
from fed.clients.node.pace import Pace
from fed.clients.node.reference import KeptReference
from fed.clients.setup import Preparation
from fed.clients.training.client_states import ClientState, ClientStates, client_state, codec_state
from fed.clients.training.devices import device_of
from fed.clients.training.float32_products import note_without_tf32
from fed.clients.training.work_items import EvaluateByClients, Evaluated, Train, Trained
from fed.clients.training.worker import Work
from fed.clients.way_out import Rows, UpdateStages
from fed.config.experiment import Experiment
from fed.errors import InvalidInput, InvalidPayload, RunFailed, error_with_line, os_errors_as
from fed.privacy.noise import SystemNoise
from fed.privacy.protection import told_clip
from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import digests_of, model_digest
from fed.secure_aggregation.fixed_point import ClientNumbers, FixedPoint
from fed.secure_aggregation.reasons import ClientRefusal, Reason
from fed.secure_aggregation.settings import SecureAggregation
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.agreed_format import MOST_CLIENTS, agreed
from fed.wire.format import TaskSpec
from fed.wire.messages import GlobalModel, Task
from fed.wire.payloads import TensorSpec, read, written

__all__ = ["STATE_LOST", "Hidden", "NodeTraining"]

STATE_LOST = (
    "what this node kept between tasks is gone from its folder, or damaged; it resumes from its initial client state, "
    "and tells the server"
)
"""Log line of a node whose state between tasks is lost."""

_log = logging.getLogger(__name__)
_MODEL_LOST = "the model that the differences are added to is not in this node's folder"
_REFERENCE = "reference"


class Hidden(NamedTuple):
    """The answer of a client under secure aggregation, before its message is masked: it is in memory alone.

    Args:
        answer: answer without its message.
        lanes: the message, signed integers of R bits.
        problem: the reason why the message adds nothing to the sum, for the node's log; empty where it does.
    """

    answer: pb.Answer
    lanes: Tensor
    problem: str = ""


class NodeTraining:
    """One node's part of an experiment.

    Args:
        data: the data of this one client.
        experiment: the sections that concern it.
        plan: the server's plan.
        folder: the folder of all that the client keeps between tasks.
        clock: time, by which tasks have deadlines.
        fixed_part: file of the model's fixed part that the server has sent, which is moved to the folder; None: it has
            sent none.
        node_config: facts of the node that an app is told.
        device: name of the device that computes.

    Attributes:
        casting: sentence on the types to which samples were cast; empty where none was.
        note: clause on a precision that the device does not have; empty where it has it.

    Raises:
        FixedPartMissing: if the server must send the model's fixed part.
        InvalidInput: if data, model and algorithm do not fit each other.
        InvalidPayload: if the server's model is another.
    """

    def __init__(
        self,
        data: FederatedData,
        experiment: Experiment,
        plan: pb.Plan,
        folder: Path,
        clock: Clock,
        fixed_part: Path | None = None,
        node_config: Mapping[str, Any] = MappingProxyType({}),
        device: str = "auto",
    ) -> None:
        self._clock = clock
        (self._client,) = data.clients
        self._plan = plan
        self._folder = folder
        with os_errors_as(InvalidInput, f"{folder} cannot be written to", "give another --state"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A folder that is there already keeps its mode, whatever mkdir is told.
            folder.chmod(0o700)
        section = experiment.app
        app = None if section is None else App(section.kind, section, dict(node_config))
        if app is None:
            is_exchange = experiment.table is not None and bool(experiment.table.sought)  # whose sums are of float64
            held = data if is_exchange else in_type(data, plan.signature.input_dtype)
            asked = replace(held, classes=plan.signature.classes or None)
            # A built-in model has the plan's type, whatever the node's own samples are made of.
            self._prepared = Preparation(experiment, replace(asked, is_from_arrays=False), noise=SystemNoise())
        else:
            self._prepared = Preparation(experiment, data, app=app, noise=SystemNoise())
        self.casting = what_was_cast(*(pattern_of(held.read(self._client)) for held in (data, self._prepared.data)))
        if plan.HasField("format"):
            hold_to_plan(self._prepared.module, plan, folder, fixed_part)
        own = self._prepared.message_format(1)
        self._message = agreed(plan.format, own) if plan.HasField("format") else own  # before there is a plan
        secret_streams = _secret_streams(self._prepared.secure_aggregation)
        self._way_out = self._prepared.way_out(self._message, secret_streams)
        self._recipe = replace(self._prepared.recipe, way_out=self._way_out, secret_streams=secret_streams)
        self._work = Work(self._recipe, device_of(device))
        self.note = note_without_tf32(experiment.local, device_of(device))
        rule = self._recipe.aggregator
        movement = None if rule is None else rule.movement
        self._reference = KeptReference(self._message, self._prepared.streams, folder / _REFERENCE, movement)
        self._pace = Pace(self._recipe, self._prepared.data.size_of(self._client), clock)
        self._states = KeptStates(
            folder,
            self._client,
            partial(self._prepared.client_states, self._message),
            beside=[_REFERENCE, FIXED_PART],
        )

    @property
    def keeps_states(self) -> bool:
        """True if the client keeps something from task to task, for the algorithm or for codecs."""
        return self._states.is_needed

    @property
    def fixed(self) -> FixedPoint | None:
        """Fixed point of the node's messages; None without secure aggregation."""
        return self._message.fixed

    def forget(self) -> None:
        """Remove all that the client keeps between tasks."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def spec(self) -> TaskSpec:
        """The types and lengths of a task's tensors."""
        message = self._message
        most = max(MOST_CLIENTS, message.parameters)  # some broadcasts have a number for each client

        def lenient(parts: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
            model = parts[:2]
            broadcast = parts[2:]
            return (*model, *(part._replace(numbers=most, may_be_shorter=True) for part in broadcast))

        return TaskSpec(lenient(message.downlink), message.difference, lenient(message.beside))

    def train(
        self, assignment: pb.Assignment, path: Path, until_s: float | None = None
    ) -> pb.Answer | pb.Failed | Hidden:
        """Do a task; the answer's tensors overwrite those of the task in its file.

        Under secure aggregation the message stays in memory: it is on no disk before it is masked.

        Args:
            assignment: the task, as the server told it.
            path: the file of its payload.
            until_s: time by which it must be done, if need be with fewer steps, by its clock; None: no limit.

        Raises:
            InvalidPayload: if it says no clip where the clip moves, or one that is none.
        """
        if self._message.has_bits:  # before it trains: what fails later is answered by noise alone
            told_clip(assignment.clip if assignment.HasField("clip") else None)
        own_sha256 = digests_of(self._plan, assignment).own.hex()
        if self.fixed is not None:
            self._states.refuse_another(assignment.task, own_sha256)
        if assignment.durable_after.start:
            self._states.forget_before(assignment.durable_after)
        found = self._reference.model(assignment, read(path, assignment.payload))
        if found is None:
            return pb.Failed(task=assignment.task, reason=_MODEL_LOST, lacks_model=True)
        # A model for this client alone would mark its update in the sum.
        if self.fixed is not None and model_digest(found) != assignment.model_sha256:
            raise ClientRefusal(
                "the model must be the one that the round's clients have agreed on, got another", Reason.OTHER_MODEL
            )
        states, are_lost = self._states.resumed(assignment)
        model = (found[0], found[1])  # the other tensors are broadcast
        given = [*found, *states.stacked([self._client], [model])]
        train = self._work_item(assignment, found, states)
        train, trained, tensors = self._tried(train, given, until_s)
        before = states.of(self._client, model)
        answer = pb.Answer(task=assignment.task, began_anew=are_lost and bool(states.names))
        if trained.diverged or trained.failed:
            ((_, reason),) = trained.diverged or trained.failed
            if not self._hides_failures:
                return pb.Failed(task=assignment.task, reason=reason, diverged=bool(trained.diverged))
            counted = lost = before
            message: Sequence[Tensor] = ()
            if self._adds_own_noise:  # under masks too: the sum of the weights would tell how many trained
                _log.warning("task %d adds noise alone: %s", assignment.task.number, reason)
                message, counted, lost = self._noise_alone(train, before)
            # A state that is gone, or stays as it was, would show in the next task that this one gave no message.
            rows = [*(counted[name] for name in states.names), *(lost[name] for name in states.codec_names)]
            self._states.keep(assignment.task, own_sha256, before, states=states, rows=rows, are_lost=are_lost)
            if self._adds_own_noise:
                return self._completed(answer, Trained((1,), (0.0,), (1.0,)), message, path=path)
            assert self.fixed is not None
            path.unlink(missing_ok=True)
            return Hidden(answer, self.fixed.nothing(SystemNoise().generator("in lanes")), reason)
        count = len(self._message.uplink)
        # Before the answer goes, which the server may count at once.
        rows = [part[0].clone() for part in tensors[count:]]
        self._states.keep(assignment.task, own_sha256, before, states=states, rows=rows, are_lost=are_lost)
        return self._completed(answer, trained, tensors[:count], path=path)

    def score(self, examination: pb.Examination, path: Path) -> tuple[pb.Scores, Sequence[str]]:
        """Score a model, or the client's own, on the client's held-out samples.

        Returns:
            The scores, and sentences for the node's own log.

        Raises:
            RunFailed: if the client's own is lost.
        """
        if self._client not in (self._prepared.held_out or ()):
            return pb.Scores(id=examination.id), ()
        vector_V, integers_I = read(path, examination.payload)
        states, are_lost = self._states.resumed(examination)
        models = states.models((vector_V, integers_I))
        if models and are_lost:
            raise RunFailed("the client's own model is lost or damaged: it scores none until it has trained again")
        model = models[self._client] if models else (vector_V, integers_I)
        rows = tuple(part.unsqueeze(0) for part in model)
        found, _ = self._work(EvaluateByClients((self._client,), examination.round), rows)
        assert isinstance(found, Evaluated)
        if found.failed:
            return pb.Scores(id=examination.id, problem=found.failed[0][1]), ()
        if not found.samples:
            return pb.Scores(id=examination.id), ()
        loss, metrics = found.scores[0]
        return pb.Scores(id=examination.id, samples=found.samples[0], loss=loss, metrics=metrics), found.notes

    def _work_item(self, assignment: pb.Assignment, found: Sequence[Tensor], states: ClientStates) -> Train:
        """The local training that a task asks for."""
        params_V, integers_I, *broadcast = found
        if len(broadcast) != assignment.broadcast_count:
            raise InvalidPayload(
                f"a task must come with the {assignment.broadcast_count} tensors beside the model that it names, got "
                f"{len(broadcast)}"
            )
        task = Task(
            id=assignment.task.number,
            round=assignment.round,
            client=self._client,
            model=GlobalModel(version=0, params_V=params_V, integers_I=integers_I, broadcast=tuple(broadcast)),
            lr=assignment.lr if assignment.HasField("lr") else None,
            clip=assignment.clip if assignment.HasField("clip") else None,
            steps=assignment.steps if assignment.HasField("steps") else None,
            repeats=assignment.repeats,
        )
        return Train.of(
            [task],
            wants="payload",
            population=assignment.population,
            places=(assignment.place,) if assignment.HasField("place") else (),
            state_names=states.names,
        )

    def _completed(
        self, answer: pb.Answer, trained: Trained, tensors: Sequence[Tensor], *, path: Path
    ) -> pb.Answer | Hidden:
        """The answer with its message, in the model's file, or under secure aggregation in memory alone."""
        if self.fixed is not None:
            path.unlink(missing_ok=True)  # the model, which is not needed any more
            return Hidden(answer, tensors[0][0].clone())
        answer.payload.CopyFrom(written(path, [part[0] for part in tensors]))
        answer.weight = trained.weights[0]
        answer.samples = trained.samples[0]
        answer.train_loss = trained.train_losses[0]
        for name, value in trained.metrics[0].items() if trained.metrics else ():
            answer.metrics.add(name=name, value=value)
        return answer

    @property
    def _hides_failures(self) -> bool:
        """True if a task that fails has an answer like any other: masks hide it, or the client's own noise."""
        return self.fixed is not None or self._adds_own_noise

    @property
    def _adds_own_noise(self) -> bool:
        """True if each message has all the noise that it needs from its client."""
        protection = self._way_out.protection
        return protection is not None and protection.adds_noise

    def _noise_alone(self, train: Train, before: ClientState) -> tuple[Sequence[Tensor], ClientState, ClientState]:
        """The message of a client that has nothing to add but its noise.

        Args:
            train: task.
            before: state of the client.

        Returns:
            The message; and the client's state once it counts, and if it is lost: codecs keep what they leave of the
            noise.
        """
        nothing_1M = torch.zeros(1, self._message.numbers - self._message.has_bits, dtype=torch.float64)
        rows = Rows(nothing_1M, ClientNumbers(weights=(1.0,), samples=(1,), losses=(0.0,)))
        kept = {name: part[None] for name, part in codec_state(before).items()}
        # Stages have had their part in what went wrong.
        way_out = replace(self._way_out, stages=UpdateStages((), self._prepared.streams))
        sent = way_out.leave(rows, kept, train.rounds, clients=train.clients, repeats=train.repeats, clip=train.clip)
        counted, lost = (
            {**before, **client_state(None, (), {name: part[0] for name, part in state.items()})}
            for state in (sent.counted, sent.lost)
        )
        payload = [part[None] for part in sent.payloads[0]]
        return [*payload, torch.zeros(1, 0, dtype=torch.int64)], counted, lost

    def _tried(
        self, train: Train, given: Sequence[Tensor], until_s: float | None
    ) -> tuple[Train, Trained, Sequence[Tensor]]:
        """Train; where no answer may show what went wrong, training that fails counts as training that diverges.

        An error may follow from the samples, and would tell the server one bit of them with each task that it designs
        for that. Without one the client adds nothing to the sum, or noise alone.

        Args:
            train: task.
            given: tensors of the task.
            until_s: time by which it must be done, if need be with fewer steps; None: no limit.

        Returns:
            The task with the steps that there was time for, and its result.
        """
        try:
            if until_s is not None:
                train = self._pace.in_time(train, until_s, lambda shorter: self._work.train(shorter, given))
            began_s = self._clock.monotonic_s()
            trained, tensors = self._work.train(train, given)
        except Exception as error:
            if not self._hides_failures:
                raise
            reason = f"its training has failed: {error_with_line(error)}"
            return train, Trained((), (), diverged=((self._client, reason),)), ()
        if not trained.diverged and not trained.failed:
            self._pace.note(train, self._clock.monotonic_s() - began_s)
        return train, trained, tensors


def _secret_streams(settings: SecureAggregation | None) -> Streams | None:
    """Streams that nobody else can follow, where the experiment asks for them."""
    if settings is None or settings.randomness == "seed":
        return None
    return Streams(secrets.randbits(256))
