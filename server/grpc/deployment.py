"""Deployment: one experiment on real nodes of any engine, from the first node that joins to the last round."""

import copy
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fed.clients.apps.app import App
from fed.clients.apps.app_trainer import stand_in
from fed.clients.apps.arrays import AppModel
from fed.clients.data import ClientId, FederatedData, load
from fed.clients.data.forms import DTYPES, zeros_of
from fed.clients.fingerprint import pair_sha256
from fed.clients.first_exchange import exchange_of, learned
from fed.clients.node.own_data import check_collate, signature_of_an_app, signature_of_data
from fed.clients.node.plans import part_of_nodes
from fed.clients.scoring.measures import Metrics, loss_in_force
from fed.clients.setup import Preparation
from fed.clients.training.devices import device_of
from fed.clients.training.evaluation import Score
from fed.clients.training.executor import InProcess
from fed.clients.training.parallel.parallel_trainer import ParallelTrainers
from fed.clients.training.work_items import Recipe
from fed.clients.training.worker import Work
from fed.compression.timing import facts_of
from fed.config.compatibility import check_deployment
from fed.config.evaluation import ByClients
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.privacy.entries import Head
from fed.privacy.ledger import LEDGER_FILE, Ledger, federation_of, ledger_folder
from fed.privacy.noise import SystemNoise
from fed.privacy.noise_for_epsilon import with_noise
from fed.protocol.protocol_pb2 import Joining, Plan, Signature
from fed.protocol.protocol_pb2 import Scores as NodeScores
from fed.quantities import counted
from fed.secure_aggregation.agreement import plan_digest
from fed.secure_aggregation.settings import settings_of
from fed.server.assembly import assembled
from fed.server.evaluation import (
    ClientScore,
    ScoringByCoordinator,
    check_scored_by_both,
    say_without_scores,
    scores_of_both,
    scores_over_clients,
)
from fed.server.federation import State
from fed.server.grpc.fleet import NodeFleet
from fed.server.grpc.sessions import NodeSessions
from fed.server.real_fleet import RealFleet
from fed.server.registry import NodeCounts
from fed.server.resume import Parts, newest_checkpoint, run_fingerprint
from fed.server.rounds.coordinated import Coordinated
from fed.server.rounds.first_exchange import exchanged, say_found
from fed.server.rounds.synchronous import Synchronous
from fed.server.secure_fleet import SecureFleet
from fed.server.telling import Observers
from fed.server.training_loop import Scores, Scoring, TrainingLoop
from fed.server.validation import refusal_of_signature
from fed.storage.checkpoints import Tree
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder
from fed.vectors.fixed_part import fixed_state
from fed.vectors.tensors import Tensor, nn, torch
from fed.wire.format import Format

if TYPE_CHECKING:
    from fed.identity.identities import SignedIdentities

__all__ = ["Deployment"]

_log = logging.getLogger(__name__)

_SCORED_WITHIN_S = 600.0  # seconds for nodes to score a model, where rounds have no deadline
_DTYPES: "dict[str, torch.dtype]" = {name: getattr(torch, name) for name in DTYPES}


class Deployment:
    """One experiment on real nodes, and the check of nodes that want to join it.

    Args:
        experiment: experiment to run.
        identities: function that returns the clients' signed identities as they are now; None where there are no
            credentials.
        device: name of the device that scores models.

    Raises:
        InvalidInput: if it cannot be deployed.
    """

    def __init__(
        self,
        experiment: Experiment,
        identities: "Callable[[], SignedIdentities] | None" = None,
        device: str = "auto",
    ) -> None:
        check_deployment(experiment)
        if experiment.secure_aggregation is not None:
            if identities is None:
                raise InvalidExperiment(
                    "secure_aggregation needs nodes that can hold a conversation, each with a key that an authority "
                    "has certified: use fed server --credentials, not --insecure and not Flower's engine"
                )
            identities()  # read now, so that unreadable ones are refused before any node dials
        self._identities = identities
        self._device = device_of(device)
        self._ledger: Ledger | None = None  # while it is kept
        self._run = ""  # name of the run, where it is not the fleet's
        self.experiment = experiment
        self._is_of_app = experiment.app is not None
        self._data = _data_of(experiment)
        if self._data is not None:
            check_collate(self._data)
        brings_test_set = self._data is not None and (self._data.test is not None or bool(self._data.client_tests))
        check_scored_by_both(experiment, has_test_set=brings_test_set)
        evaluation = experiment.evaluation.make()
        # The share that clients hold out to score models on; None where the coordinator scores them.
        self._held_out = evaluation.fraction if isinstance(evaluation, ByClients) else None
        if self._held_out is None and not brings_test_set:
            say_without_scores()
        self._signature: Signature | None = None
        self._missing: set[str] = set()  # metrics that were said to be missing
        # A loss that says its number of outputs needs no classes, even where targets are whole numbers, such as counts.
        self._has_classes = not self._is_of_app and not hasattr(loss_in_force(experiment, None), "outputs")
        if self._data is not None:
            classes = self._data.number_of_classes() if self._has_classes else None
            self._signature = signature_of_data(self._data, classes or 0)
        elif self._is_of_app:
            self._signature = signature_of_an_app()

    @contextmanager
    def keeping_ledger(self, folder: RunFolder, authority_pem: bytes | None, *, resume: bool) -> Iterator[None]:
        """Keep the ledger of what the federation has released, where the run promises privacy.

        Args:
            folder: folder of the run, which gets a copy.
            authority_pem: certificate of the authority of all nodes, which names the federation; None: there is none.
            resume: True if the run continues.

        Raises:
            InvalidLedger: if it has been cut or changed.
        """
        if self.experiment.privacy is None:
            yield
            return
        identity = federation_of(authority_pem)
        opened = Ledger.open(
            ledger_folder(identity),
            identity,
            run="",
            copy=folder.path / LEDGER_FILE,
            is_resumed=resume,
        )
        with opened as self._ledger:
            _log.info("entries in the ledger of privacy of %s: %d", identity, self._ledger.head.count)
            yield
        self._ledger = None

    def accepts(self, joining: Joining) -> str | None:
        """The reason why a node is refused, or None: it remembers another ledger, or its samples do not fit.

        A server without data takes the samples of the first node.
        """
        if self._ledger is not None and joining.HasField("ledger"):
            seen = Head(joining.ledger.count, joining.ledger.sha256.hex())
            if not self._ledger.holds(seen):
                return (
                    f"the server's ledger of privacy has {self._ledger.head.count} entries, and this node remembers "
                    f"another one with {seen.count}: put the newest ledger back at the server"
                )
        said = joining.signature
        is_app = said == signature_of_an_app()
        if is_app != self._is_of_app:
            if is_app:
                return "this node brings an app, and the run's experiment has no section app"
            return "the run's clients are an app's: start fed client with --app MODULE:NAME"
        for what, dtype in (("inputs", said.input_dtype), ("targets", said.target_dtype or "int64")):
            # A stand-in for the node's samples is made of it, before any of them is seen.
            if dtype not in _DTYPES and not said.form:
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
            # Where the server has no data, the first node's samples decide the shape of the model.
            fleet.await_nodes(1, wanted=min_nodes)
        assert self._signature is not None
        first_task = self._standardize(fleet, min_nodes, self._signature)
        self.experiment = with_noise(self.experiment, min_nodes)
        prepared = self._prepared()
        if self._data is not None and prepared.casting:
            _log.info("%s", prepared.casting)
        fingerprint = run_fingerprint(self.experiment, prepared.layout, None)
        kept = self._checkpoint(prepared, fingerprint, folder, resume=resume)
        if kept is not None:
            fleet.restore(kept[1]["federation"]["fleet"])  # before nodes are waited for: the run's members are known
        if self._ledger is not None:
            # Only now: a run that goes on shares noise with the rounds of that name, and one that begins with none.
            self._ledger.run = fleet.run
        self._gather(fleet, min_nodes, prepared, is_resumed=kept is not None)
        prepared.ledger = fleet.ledger = self._ledger
        federation = self._begun(fleet, prepared, observers, first_task)
        loop = self._loop(prepared, federation, fleet, fingerprint=fingerprint, folder=folder, observers=observers)
        if kept is not None:
            loop.restore(*kept)
        rounds_done = kept[0] if kept is not None else 0
        there = len(fleet.available())
        _log.info(
            "%s %s there: round %d begins", counted(there, "client"), "is" if there == 1 else "are", 1 + rounds_done
        )
        del kept  # its tensors are large
        fleet.observers = observers  # only now: clients that are there already are in the run's first event
        fleet.dispatch(list(federation.coordinator.open.values()))  # those that were open at the checkpoint
        return loop.run()

    def _prepared(self) -> Preparation:
        section = self.experiment.app
        if section is not None:
            return Preparation(self.experiment, stand_in([0]), app=App(section.kind, section), noise=SystemNoise())
        assert self._signature is not None
        samples = self._data or _stand_in(self._signature, self._held_out or 0.5)
        return Preparation(self.experiment, samples, noise=SystemNoise())

    def _checkpoint(
        self, prepared: Preparation, fingerprint: Mapping[str, Any], folder: RunFolder, *, resume: bool
    ) -> tuple[int, Tree] | None:
        """The checkpoint that the run resumes from; None where it begins, and its folder with it."""
        test = prepared.recipe.test
        parts = Parts(prepared, None if test is None else pair_sha256(test))
        kept = newest_checkpoint(fingerprint, folder, self.experiment.objects(), parts) if resume else None
        if kept is None:
            folder.begin(self.experiment, parts=parts.kept())
        return kept

    def _standardize(self, fleet: RealFleet, min_nodes: int, signature: Signature) -> int:
        """Have clients find what their tables are standardized by, where it is sought; returns the next task's id."""
        first_task = 0
        if self.experiment.table is None or not self.experiment.table.sought:
            return first_task
        while (table := self.experiment.table) is not None and table.sought:
            exchange = copy.copy(self)
            exchange.experiment = exchange_of(self.experiment)
            exchange._run = secrets.token_hex(16)  # nodes under secure aggregation reveal a round of a run once
            prepared = Preparation(exchange.experiment, _stand_in(signature, self._held_out or 0.5, len(table.sought)))
            exchange._gather(fleet, min_nodes, prepared, is_resumed=False)
            federation = exchange._begun(fleet, prepared, Observers(clock=fleet.time), first_task)
            self.experiment = learned(self.experiment, exchanged(federation))
            first_task = federation.coordinator.next_task
        say_found(table, len(fleet.registered()))
        fleet.counts = NodeCounts()  # of the run's rounds alone
        self._data = _data_of(self.experiment)
        return first_task

    def _begun(self, fleet: RealFleet, prepared: Preparation, observers: Observers, first_task: int = 0) -> Coordinated:
        """The federation of the nodes that are there, before its first round, once they are told the plan."""
        policy = self.experiment.rounds.make()
        message = self._message(prepared, policy, len(fleet.registered()))
        states = prepared.client_states(message)
        arrays = prepared.module.specs if isinstance(prepared.module, AppModel) else None
        plan = Plan(experiment=json.dumps(part_of_nodes(self.experiment, arrays)), signature=self._signature)
        if self.experiment.privacy is not None:
            plan.run = fleet.run  # by which nodes know the rounds that share noise
        seen = fleet if self.experiment.secure_aggregation is None else self._secured(fleet, message, plan)
        federation = Coordinated(
            experiment=self.experiment,
            prepared=prepared,
            policy=policy,
            fleet=seen,
            message=message,
            states=states,
            observers=observers,
            first_task=first_task,
        )
        fleet.begin(
            plan,
            message,
            prepared.streams,
            fixed_part=prepared.fixed_part(),
            keeps_states=bool(states.names),
            keeps_checkpoints=self.experiment.checkpoints.every is not None,
        )
        if isinstance(fleet, NodeFleet) and fleet.sessions is not None:
            # Only now: begin() has put the format into the plan, which clients sign.
            fleet.sessions.plan_sha256 = plan_digest(plan)
        return federation

    def _gather(self, fleet: RealFleet, min_nodes: int, prepared: Preparation, *, is_resumed: bool) -> None:
        """Wait for the run's nodes, and fix the members where the run depends on how many they are."""
        policy = self.experiment.rounds.make()
        is_secure = self.experiment.secure_aggregation is not None
        asks_place = prepared.algorithm.needs_fixed_members
        if is_resumed and asks_place:
            fleet.fix_registered()
            min_nodes = min(min_nodes, len(fleet.registered()))
        if is_secure:
            # Now, so that what would be refused below is refused before the wait for nodes.
            _warn_of_states(prepared, self._message(prepared, policy, max(min_nodes, len(fleet.registered()))))
        fleet.await_nodes(min_nodes)
        population = len(fleet.registered())
        policy.check(population)
        if asks_place or (is_secure and policy.most_asked(population) == population):
            fleet.fix_registered()  # how long a message is, or how many can be added, depends on how many they are

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
        plan.run = self._run or fleet.run
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

    def _missing_said(self, scores: Scores) -> Scores:
        """The scores; a metric of which no app has given a value is said, once a run."""
        names = self.experiment.app.metrics if self.experiment.app is not None else ()
        for name in names:
            value = scores.line.get(f"test_{name}")
            if value is not None and math.isnan(value) and name not in self._missing:
                self._missing.add(name)
                _log.warning(
                    "app.metrics names %s, and no client's evaluate has returned it: the nodes' logs say what it "
                    "returned",
                    name,
                )
        return scores

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
        executor = InProcess(_scoring(recipe) if recipe.test is not None else _no_work, [self._device])

        def by_nodes(number: int) -> Scoring:
            policy = federation.policy
            deadline_s = policy.deadline_s if isinstance(policy, Synchronous) else None
            scores = fleet.scores(federation.model(), deadline_s or _SCORED_WITHIN_S, number)
            return lambda: self._missing_said(_scored_by_nodes(scores, prepared.metrics))

        def begin_scoring(number: int, is_last: bool) -> Scoring:
            if self._held_out is None:
                return ScoringByCoordinator(recipe, federation, executor).scores
            if recipe.test is None:
                return by_nodes(number)
            nodes = by_nodes(number)
            # Without the clients' own models, which only their nodes have.
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
                **({} if federation.coordinator.account is None else federation.coordinator.account.summary()),
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
    # In a fixed order: a mean of floats depends on it.
    for client, one in sorted(scores.items(), key=lambda item: (isinstance(item[0], str), item[0])):
        if one.problem:
            _log.warning("client %r could not score the model: %s", client, one.problem)
        elif one.samples and len(one.metrics) != len(metrics):
            _log.warning(
                "client %r must score the model by %d metrics, got %d: its scores are left out",
                client,
                len(metrics),
                len(one.metrics),
            )
        elif one.samples:
            found.append(ClientScore(client, one.samples, Score(one.loss, tuple(one.metrics))))
    return scores_over_clients(found, metrics)


def _scoring(recipe: Recipe) -> Callable[["torch.device"], Work]:
    """A worker that trains nothing, and scores with a whole model on one device, whatever clients train with."""
    if isinstance(recipe.make_trainer, ParallelTrainers):
        recipe = replace(recipe, make_trainer=None)
    return partial(Work, recipe)


def _no_work(_: object) -> Callable[[object, Sequence[Tensor]], tuple[None, Sequence[Tensor]]]:
    """A worker without a copy of the model, for runs that score nothing."""
    return lambda content, tensors: (None, ())


def _free_memory(module: "nn.Module") -> Callable[[], None]:
    """Free the memory of a module's state but for its fixed part; the function returned allocates it again."""
    travelling = module.state_dict(keep_vars=True).keys() - fixed_state(module).keys()
    tensors = [tensor for name, tensor in (*module.named_parameters(), *module.named_buffers()) if name in travelling]
    # Tied tensors share a storage.
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    # Memory that PyTorch did not allocate is not its to free.
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
            "with the experiment's algorithm or error_feedback clients keep a state between tasks: under "
            "secure_aggregation nodes refuse such a run unless they are started with --allow-state"
        )


def _data_of(experiment: Experiment) -> FederatedData | None:
    """The server's own data, which give the test set, and what the model is made for."""
    if experiment.data is None:
        return None
    schema = None if experiment.table is None else experiment.table.before_exchange()
    return load(experiment.data, experiment.data_streams, schema, is_for_server=True)


def _stand_in(signature: Signature, held_out: float, sums: int | None = None) -> FederatedData:
    """Zeros in place of samples, by which a server without data makes the model; enough to hold a share of them out.

    Args:
        signature: signature of the nodes' samples.
        held_out: share of samples that is held out.
        sums: number of features whose sums clients find, in place of their inputs; None: their inputs.
    """
    samples = math.ceil(2 / min(held_out, 1 - held_out))
    if sums is not None:
        targets = torch.zeros(samples, *signature.target_shape, dtype=_DTYPES[signature.target_dtype or "int64"])
        summands = torch.zeros(samples, sums, dtype=torch.float64)
        return FederatedData({0: (summands, targets)}, None, signature.classes or None)
    if signature.form:
        return FederatedData({0: zeros_of(signature.form, samples)}, None, signature.classes or None)
    inputs = torch.zeros(samples, *signature.input_shape, dtype=_DTYPES[signature.input_dtype])
    targets = torch.zeros(samples, *signature.target_shape, dtype=_DTYPES[signature.target_dtype or "int64"])
    return FederatedData({0: (inputs, targets)}, None, signature.classes or None)
