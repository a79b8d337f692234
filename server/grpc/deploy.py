"""Deployment of one experiment on real nodes, with the results that a simulation of it writes."""

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.clients.data import ClientId, FederatedData, load
from fed.clients.fingerprint import pair_sha256
from fed.clients.node.own_data import signature_of
from fed.clients.node.plans import part_of_nodes
from fed.clients.scoring.measures import Metrics, loss_in_force
from fed.clients.setup import Preparation
from fed.clients.training.devices import devices_of
from fed.clients.training.evaluation import Score
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.compression.timing import facts_of
from fed.config.compatibility import check_deployment
from fed.config.evaluation import ByClients
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.protocol.protocol_pb2 import Joining, Plan, Signature
from fed.protocol.protocol_pb2 import Scores as NodeScores
from fed.secure_aggregation.agreement import plan_digest
from fed.secure_aggregation.settings import settings_of
from fed.server.assembly import assembled
from fed.server.evaluation import (
    ClientScore,
    ScoringByCoordinator,
    check_scored_by_both,
    scores_of_both,
    scores_over_clients,
)
from fed.server.federation import State
from fed.server.grpc.fleet import NodeFleet
from fed.server.grpc.service import Patience
from fed.server.grpc.sessions import NodeSessions
from fed.server.observer import Essential, Observer
from fed.server.real_fleet import RealFleet
from fed.server.resume import Parts, newest_checkpoint, run_fingerprint
from fed.server.rounds.coordinated import Coordinated
from fed.server.rounds.synchronous import Synchronous
from fed.server.secure_fleet import SecureFleet
from fed.server.telling import Observers
from fed.server.training_loop import Scores, Scoring, TrainingLoop
from fed.server.validation import refusal_of_signature
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder
from fed.storage.run_reader import summary_of
from fed.vectors.tensors import Tensor, nn, torch
from fed.wire.dialling import DialPatience
from fed.wire.format import Format

if TYPE_CHECKING:
    from fed.identity.credentials import ServerCredentials
    from fed.identity.identities import SignedIdentities

__all__ = ["Deployment", "dismiss_nodes", "serve"]

_log = logging.getLogger(__name__)

_OVER = "the run is over"
_DIALLED_WITHIN_S = 1.6 * DialPatience().most_backoff_s  # a node's longest pause is 1.5 times that
_SCORED_WITHIN_S = 600.0  # seconds for nodes to score a model, where rounds have no deadline
_TYPES = ("float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")
_DTYPES: "dict[str, torch.dtype]" = {name: getattr(torch, name) for name in _TYPES}


def serve(
    experiment: Experiment,
    *,
    listen: str,
    output: Path,
    credentials: "ServerCredentials | None" = None,
    min_nodes: int = 1,
    overwrite: bool = False,
    resume: bool = False,
    patience: Patience | None = None,
    clock: Clock = SYSTEM_CLOCK,
    on_listen: Callable[[int], None] | None = None,
    observers: Iterable[Observer | Essential] = (),
) -> Run:
    """Coordinate an experiment over nodes that dial in.

    Args:
        experiment: experiment to run. Its data give the test set and the model's inputs. Where they are null, the first
            node to join gives the inputs, and only clients can score models.
        listen: address, HOST:PORT; port 0 takes a free one.
        output: folder of the run.
        credentials: credentials of the server; None: no encryption, on loopback only.
        min_nodes: number of nodes to wait for before the first round, and after a resumption.
        overwrite: True to replace a run that the folder holds.
        resume: True to continue the run that the folder holds, from its newest whole checkpoint.
        patience: time limits; None: the usual ones.
        clock: time, by which it waits.
        on_listen: function that is called with the port once the server listens.
        observers: listeners to the run's events (:mod:`fed.server.observer`), each in a thread of its own, so that a
            slow or failing one costs nothing; one that is wrapped as ``Essential`` is called in line.

    Returns:
        The run.

    Raises:
        InvalidInput: if the experiment cannot be deployed, or nothing can listen there.
        RunFailed: if the run cannot go on.
    """
    folder = RunFolder.existing(output) if resume else RunFolder(output, overwrite=overwrite)
    deployment = Deployment(experiment, credentials.identities if credentials else None)
    with folder.held():
        fleet = NodeFleet(
            listen,
            folder.spool,
            credentials=credentials,
            accepts=deployment.accepts,
            clock=clock,
            patience=patience,
        )
        try:
            if on_listen is not None:
                on_listen(fleet.port)
            run = deployment.run(fleet, min_nodes, folder, resume=resume, observers=Observers(observers, clock))
        except BaseException:  # Ctrl-C too: nodes are told to dial again
            fleet.close("the server stops for now", is_final=False)
            raise
        fleet.close(_OVER, is_final=True)
    return run


def dismiss_nodes(
    output: Path,
    *,
    listen: str,
    credentials: "ServerCredentials | None" = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Tell nodes that dial that a finished run is over, until all of its nodes have heard it, or for 24 s.

    For a run whose server was killed before it had told them: they dial again and again, with 22.5 s between two
    attempts at most.

    Args:
        output: folder of the run.
        listen: address, HOST:PORT.
        credentials: credentials of the server; None: no encryption, on loopback only.
        clock: time, by which it waits.

    Raises:
        InvalidInput: if nothing can listen there.
    """
    folder = RunFolder.existing(output)
    nodes = (summary_of(output) or {}).get("clients", 0)
    told: list[str] = []
    are_told = threading.Event()

    def refuse(joining: Joining) -> str:
        told.append(joining.name)
        if len(told) >= nodes:
            are_told.set()
        return _OVER

    with folder.held():
        fleet = NodeFleet(listen, folder.spool, credentials=credentials, accepts=refuse, clock=clock)
        try:
            clock.wait(_DIALLED_WITHIN_S, are_told)
        finally:
            fleet.close(_OVER, is_final=True)


class Deployment:
    """One experiment on real nodes, and the check of nodes that want to join it.

    Args:
        experiment: experiment to run.
        identities: function that returns the clients' signed identities as they are now; None where there are no
            credentials.

    Raises:
        InvalidInput: if it cannot be deployed.
    """

    def __init__(self, experiment: Experiment, identities: "Callable[[], SignedIdentities] | None" = None) -> None:
        check_deployment(experiment)
        if experiment.secure_aggregation is not None:
            if identities is None:
                raise InvalidExperiment(
                    "secure_aggregation needs nodes that can hold a conversation, each with a key that an authority "
                    "has certified: use fed server --credentials, not --insecure and not Flower's engine"
                )
            identities()  # now, so that unreadable ones are refused before any node dials
        self._identities = identities
        self.experiment = experiment
        self._data = load(experiment.data, experiment.data_streams) if experiment.data is not None else None
        brings_test_set = self._data is not None and (self._data.test is not None or bool(self._data.client_tests))
        check_scored_by_both(experiment, has_test_set=brings_test_set)
        evaluation = experiment.evaluation.make()
        # the share that clients hold out to score models; None: the coordinator scores them
        self._held_out = evaluation.fraction if isinstance(evaluation, ByClients) else None
        self._signature: Signature | None = None
        # None of a loss whose outputs are as many as a sample's targets, such as counts, whatever these are.
        self._has_classes = not hasattr(loss_in_force(experiment, None), "outputs")
        if self._data is not None:
            classes = self._data.number_of_classes() if self._has_classes else None
            self._signature = signature_of(self._data.read(self._data.clients[0]), classes or 0, self._data.names)

    def accepts(self, joining: Joining) -> str | None:
        """The reason that a node's samples do not fit, or None. A server without data takes those of the first node."""
        said = joining.signature
        for what, dtype in (("inputs", said.input_dtype), ("targets", said.target_dtype or "int64")):
            if dtype not in _DTYPES:
                return f"{what} must be of one of {', '.join(_DTYPES)}, got {dtype[:20]!r}"
        if joining.hides_numbers != (self.experiment.secure_aggregation is not None):
            if joining.hides_numbers:
                return (
                    "the run has no secure_aggregation, and this node takes part under it alone (--secure): add the "
                    "section to the server's experiment"
                )
            return "the run hides clients' numbers by secure_aggregation: start fed client with --secure"
        if self._signature is None:
            if joining.hides_numbers and self._has_classes and "float" not in said.target_dtype and not said.labels:
                return (
                    "the server must know the number of classes, which nodes under --secure do not tell: give its "
                    "experiment a data section"
                )
            self._signature = said
            if joining.hides_numbers:
                self._signature.classes = len(said.labels)
            if not self._has_classes:
                self._signature.classes = 0
        return refusal_of_signature(said, self._signature)

    def run(
        self,
        fleet: RealFleet,
        min_nodes: int,
        folder: RunFolder,
        *,
        resume: bool,
        observers: Observers | None = None,
    ) -> Run:
        """Wait for nodes, then run all rounds.

        Args:
            fleet: fleet of the nodes.
            min_nodes: number of nodes to wait for.
            folder: folder of the run.
            resume: True to continue the run that the folder holds.
            observers: observers that are told of the run's events; None: nobody is told.
        """
        observers = observers or Observers(clock=fleet.time)
        if self._signature is None:
            fleet.await_nodes(1)
        assert self._signature is not None
        prepared = Preparation(self.experiment, self._data or _stand_in(self._signature, self._held_out or 0.5))
        algorithm = prepared.algorithm
        fingerprint = run_fingerprint(self.experiment, prepared.layout, None)
        test = prepared.recipe.test
        parts = Parts(prepared, None if test is None else pair_sha256(test))
        kept = newest_checkpoint(fingerprint, folder, self.experiment.objects(), parts) if resume else None
        policy = self.experiment.rounds.make()
        asks_place = algorithm.needs_fixed_members
        if kept is None:
            folder.begin(self.experiment, parts=parts.kept())
        else:
            fleet.restore(kept[1]["federation"]["fleet"])  # before nodes are waited for: the run's members are known
        if kept is not None and asks_place:
            fleet.fix_registered()
            min_nodes = min(min_nodes, len(fleet.registered()))
        secure = settings_of(self.experiment)
        if secure is not None:
            # now, so that what would be refused below is refused before the wait for nodes
            _warn_of_states(prepared, self._message(prepared, policy, max(min_nodes, len(fleet.registered()))))
        fleet.await_nodes(min_nodes)
        policy.check(len(fleet.registered()))
        if asks_place or (secure is not None and policy.most_asked(len(fleet.registered())) == len(fleet.registered())):
            fleet.fix_registered()  # how long a message is, or how many can be added, depends on how many they are
        message = self._message(prepared, policy, len(fleet.registered()))
        states = prepared.client_states(message)
        plan = Plan(experiment=json.dumps(part_of_nodes(self.experiment)), signature=self._signature)
        seen = fleet if secure is None else self._secured(fleet, message, plan)
        federation = Coordinated(
            experiment=self.experiment,
            prepared=prepared,
            policy=policy,
            fleet=seen,
            message=message,
            states=states,
            observers=observers,
        )
        fleet.begin(
            plan,
            message,
            prepared.streams,
            keeps_states=bool(states.names),
            keeps_checkpoints=self.experiment.checkpoints.every is not None,
        )
        if isinstance(fleet, NodeFleet) and fleet.sessions is not None:
            fleet.sessions.plan_sha256 = plan_digest(plan)
        loop = self._loop(prepared, federation, fleet, fingerprint=fingerprint, folder=folder, observers=observers)
        if kept is not None:
            loop.restore(*kept)
        rounds_done = kept[0] if kept is not None else 0
        _log.info("%d clients are there: round %d begins", len(fleet.available()), 1 + rounds_done)
        del kept  # its tensors are large
        fleet.observers = observers  # only now: clients that are there already are in the run's first event
        fleet.dispatch(list(federation.coordinator.open.values()))  # those that were open at the checkpoint
        return loop.run()

    def _message(self, prepared: Preparation, policy: Any, population: int) -> Format:
        secure = settings_of(self.experiment)
        if secure is None:
            return prepared.message_format(population)
        asked = policy.asked_of(population)
        most = policy.most_asked(population)
        secure.check(asked, policy.cohort_of(population))
        return prepared.message_format(population, asked, most)

    def _secured(self, fleet: RealFleet, message: Format, plan: Plan) -> SecureFleet:
        """The fleet whose messages are masked, in sessions of a run that the plan names."""
        secure = settings_of(self.experiment)
        assert isinstance(fleet, NodeFleet)
        assert self._identities is not None
        assert secure is not None
        assert message.fixed is not None
        identities = self._identities
        plan.run = fleet.run
        plan.identities = identities().content
        fleet.sessions = NodeSessions(
            fleet=fleet,
            settings=secure,
            fixed=message.fixed,
            run=plan.run,
            identities=identities,
            patience_s=fleet.patience.session_s,
        )
        return SecureFleet(fleet, sessions=fleet.sessions, settings=secure, fixed=message.fixed)

    def _loop(
        self,
        prepared: Preparation,
        federation: Coordinated,
        fleet: RealFleet,
        *,
        fingerprint: Mapping[str, Any],
        folder: RunFolder,
        observers: Observers,
    ) -> TrainingLoop:
        recipe = prepared.recipe
        executor = InProcess(partial(Work, recipe) if recipe.test is not None else _no_work, devices_of(1))

        def by_nodes() -> Scoring:
            policy = federation.policy
            deadline_s = policy.deadline_s if isinstance(policy, Synchronous) else None
            scores = fleet.scores(federation.model(), deadline_s or _SCORED_WITHIN_S)
            return partial(_scored_by_nodes, scores, prepared.metrics)

        def begin_scoring(is_last: bool) -> Scoring:
            if self._held_out is None:
                return ScoringByCoordinator(recipe, federation, executor).scores
            if recipe.test is None:
                return by_nodes()
            nodes = by_nodes()
            here = ScoringByCoordinator(recipe, federation, executor, own=()).scores
            return lambda: scores_of_both(here(), nodes())

        restore_memory = _free_memory(prepared.module)
        secure = settings_of(self.experiment)
        fixed = federation.coordinator.message.fixed
        sessions = {"secure_aggregation": secure.facts(fixed)} if secure and fixed else {}

        def load_module(state: State) -> "nn.Module":
            restore_memory()
            prepared.layout.unpack(*state, prepared.module)
            return prepared.module.eval()

        return assembled(
            self.experiment,
            prepared,
            federation,
            executor,
            begin_scoring=begin_scoring,
            is_scored_by_clients=self._held_out is not None,
            facts=lambda: {
                "clients": len(fleet.registered()),
                "parameters": prepared.layout.parameters,
                "refused": fleet.counts.refused,
                "nodes": fleet.counts.lines(),
                **facts_of(federation.coordinator.message.encoder),
                **sessions,
            },
            fingerprint=fingerprint,
            clock=fleet.time,
            observers=observers,
            folder=folder,
            load_module=load_module,
        )


def _scored_by_nodes(scores: Mapping[ClientId, NodeScores], metrics: Metrics) -> Scores:
    """The mean over clients, weighted by their held-out samples, the spread over clients, and each client's."""
    found = []
    for client, one in sorted(scores.items(), key=lambda item: (isinstance(item[0], str), item[0])):
        if one.problem:
            _log.warning("client %r could not score the model: %s", client, one.problem)
        elif one.samples and len(one.metrics) != len(metrics):
            _log.warning("client %r must score the model by %d metrics, got %d", client, len(metrics), len(one.metrics))
        elif one.samples:
            found.append(ClientScore(client, one.samples, Score(one.loss, tuple(one.metrics))))
    return scores_over_clients(found, metrics)


def _no_work(_: object) -> Callable[[object, Sequence[Tensor]], tuple[None, Sequence[Tensor]]]:
    """A worker without a copy of the model, for runs that score nothing."""
    return lambda content, tensors: (None, ())


def _free_memory(module: "nn.Module") -> Callable[[], None]:
    """Free the memory of a module's state; the function returned allocates it again."""
    saved = module.state_dict(keep_vars=True).keys()
    tensors = [tensor for name, tensor in (*module.named_parameters(), *module.named_buffers()) if name in saved]
    # tied tensors share a storage
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    # memory that PyTorch did not allocate is not its to free
    sizes = [(storage, storage.nbytes()) for storage in storages.values() if storage.resizable()]
    for storage, _ in sizes:
        storage.resize_(0)

    def restore_memory() -> None:
        for storage, size_bytes in sizes:
            storage.resize_(size_bytes)

    return restore_memory


def _warn_of_states(prepared: Preparation, message: Format) -> None:
    """Say that nodes refuse to keep something between the tasks of secure aggregation, unless their owners allow it."""
    if prepared.client_states(message).names:
        _log.warning(
            "the experiment's algorithm or error_feedback has clients keep something between tasks: under "
            "secure_aggregation nodes refuse that unless they are started with --allow-state"
        )


def _stand_in(signature: Signature, held_out: float) -> FederatedData:
    """Zeros in place of samples, by which a server without data makes the model; enough to hold a share of them out."""
    samples = math.ceil(2 / min(held_out, 1 - held_out))
    inputs = torch.zeros(samples, *signature.input_shape, dtype=_DTYPES[signature.input_dtype])
    targets = torch.zeros(samples, *signature.target_shape, dtype=_DTYPES[signature.target_dtype or "int64"])
    return FederatedData({0: (inputs, targets)}, None, signature.classes or None)
