"""Simulation: all parts of a simulated run, made and checked against each other before the first round."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fed.aggregators.base import Aggregator
from fed.aggregators.peer_rule import PeerRule
from fed.clients.apps.app import App
from fed.clients.apps.app_trainer import stand_in
from fed.clients.data import ClientId, FederatedData, Held, SamplesOnDemand, load
from fed.clients.data.held_out import no_held_out_samples
from fed.clients.data.sources.suggested_schema import note_on_inputs
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.measures import Loss, Metric, Metrics, takes_scores
from fed.clients.setup import Preparation
from fed.clients.training.batches import normalises_batches
from fed.clients.training.devices import device_of
from fed.clients.training.executor import Executor
from fed.clients.training.float32_products import note_without_tf32
from fed.clients.training.groups import Groups
from fed.clients.training.private_costs import noise_by_size
from fed.clients.training.work_items import Train, Wants
from fed.config.components import Component
from fed.config.experiment import Experiment, Local
from fed.errors import InvalidData, InvalidExperiment
from fed.privacy.noise_for_epsilon import with_noise
from fed.secure_aggregation.settings import settings_of
from fed.server.evaluation import check_scored_by_both
from fed.server.federation import Federation
from fed.server.hierarchy import HierarchicalFleet
from fed.server.mixing.message_sizes import sent_bytes
from fed.server.mixing.peers import Peers
from fed.server.mixing.primitives import LocalTraining, PeerCodec
from fed.server.rounds.coordinated import Coordinated, step_sizes
from fed.server.rounds.synchronous import Synchronous
from fed.server.secure_fleet import SecureFleet
from fed.server.telling import Observers
from fed.simulations.attacks import Attackers
from fed.simulations.batching import choose
from fed.simulations.devices import OnSite
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.neighbourhood import SimulatedNeighbourhood
from fed.simulations.resolved import resolved
from fed.simulations.ring import RingFleet
from fed.simulations.simulated_clients import SimulatedClients
from fed.vectors import trees
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, nn
from fed.wire.format import Format

if TYPE_CHECKING:
    from fed.server.fleet import Fleet
    from fed.topology import Topology

__all__ = ["Simulation", "topology_of"]

_log = logging.getLogger(__name__)
_MOST_HELD_BYTES = 2**30


class Simulation:
    """One experiment with its data and model, ready to run.

    Attributes:
        said: sentences that the run's log has said once, and says no more.
        device: device of the first worker.

    Args:
        experiment: description of the run.
        data: training data by client, in place of the experiment's.
        model: factory of modules, or a module to copy, in place of the experiment's.
        loss: (output, target) → scalar, in place of the experiment's.
        metric: (output, target) → number, or several by name, in place of the experiment's.
        app: class of a client, function that makes one, or Flower's ``ClientApp``, in place of the experiment's.

    Raises:
        InvalidInput: if the parts do not fit each other.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: FederatedData | None = None,
        model: "Callable[[], nn.Module] | None" = None,
        loss: Loss | None = None,
        metric: Metric | Metrics | None = None,
        app: object = None,
    ) -> None:
        self.said: set[str] = set()
        self.device = device_of(experiment.simulation.device)
        code = _app(experiment, app)
        data_of_clients = _data(experiment, data) if code is None else _clients_of(code)
        if experiment.table is not None and (unlike := note_on_inputs(data_of_clients, experiment.table)):
            _log.warning("%s", unlike)
        self.policy = experiment.rounds.make()
        self.policy.check(len(data_of_clients.clients))
        experiment = with_noise(experiment, len(data_of_clients.clients))
        self.prepared = Preparation(experiment, data_of_clients, model, loss, metric, code)
        self.streams = self.prepared.streams
        self.data = self.prepared.data
        if (of_samples := self.prepared.recipe.sample_privacy) is not None:
            noise_by_size(of_samples, map(self.data.size_of, self.data.clients))  # found once, for all processes
        self.held_out = self.prepared.held_out
        check_scored_by_both(experiment, has_test_set=self.prepared.recipe.test is not None)
        # Of clients on demand this is not known before they are read.
        if isinstance(self.held_out, dict) and not self.held_out:
            raise no_held_out_samples(self.population)
        self.algorithm = self.prepared.algorithm
        self.layout = self.prepared.layout
        if isinstance(self.algorithm, Aggregator):
            self.algorithm.check(self.policy.cohort_of(self.population))
        if self.is_replicated or (self.has_peers and self.algorithm.primitive == "mix"):
            self.policy.check_peers(self.population)
        self.attackers: Attackers | None = None
        if experiment.adversaries is not None:
            self.attackers = Attackers.recruited(experiment.adversaries, self.data.clients, self.streams)
            # After clients have held out their shares: attackers score on true labels.
            self.data = self.attackers.poisoned(self.data)
        if self.algorithm.pools_data:
            # Also after clients have held out their shares: each of them scores on its own samples.
            self.data = self.data.pooled()
        if self.algorithm.primitive == "mix" and self.data.is_on_demand:
            # All peers train in every round, and their models are in memory in any case.
            self.data = _held(self.data)
        self.message = None if self.has_peers else self._message(experiment)
        self.way_out = None if self.message is None else self.prepared.way_out(self.message)
        # Read anew, since data may have been poisoned, pooled or taken into memory above.
        recipe = replace(
            self.prepared.recipe,
            read=self.data.read,
            way_out=self.way_out,
            # Known once for all clients in memory: a look at each group's labels takes as long as a small step.
            may_ignore=self.prepared.collate is not None or self.data.may_hold_negative_labels(),
        )
        chosen = choose(
            experiment.simulation,
            recipe,
            samples=self.data.read(self.data.clients[0]),
            context=self.prepared.first_context(),
            trainees=self.trainees,
            client_steps=self.policy.count * self.trainees * self._steps(experiment.local),
            may_ignore=recipe.loss is not cross_entropy and self._may_hold_ignored(),
        )
        self.batching = replace(chosen, note=note_without_tf32(experiment.local, self.device))
        self.recipe = replace(recipe, is_batched=self.batching.is_batched)
        given = {"data": data, "model": model, "loss": loss, "metrics": metric, "app.kind": app}
        replaced = [name for name, part in given.items() if part is not None]
        self.experiment = resolved(experiment, replaced, self.batching, self.device)
        self.groups = self._groups(experiment.local, self.batching.group)
        self.topology = self._topology(experiment.topology) if self.has_peers else None
        self.peer_codec: PeerCodec | None = None
        if self.has_peers and self.algorithm.compresses:
            self.peer_codec = PeerCodec(self.prepared.peer_encoder(), self.streams)

    def _groups(self, local: Local, size: int) -> Groups:
        return Groups(local, size, normalises_batches(self.prepared.module), self.prepared.phases)

    def _steps(self, local: Local) -> int:
        """Number of optimizer steps of the first client's task."""
        return self._groups(local, size=1).steps(self.data.size_of(self.data.clients[0]))

    def _may_hold_ignored(self) -> bool:
        """True if targets may be labels that a loss of the user's own leaves out."""
        is_collated = self.prepared.collate is not None and not takes_scores(self.prepared.loss)
        return is_collated or self.data.may_hold_negative_labels()

    @cached_property
    def evaluation(self) -> Any:
        """Section ``evaluation`` as an object, made once: it is asked after each round."""
        return self.experiment.evaluation.make()

    @property
    def has_peers(self) -> bool:
        """True if clients keep models of their own and no coordinator has one."""
        return isinstance(self.algorithm, PeerRule)

    @property
    def is_replicated(self) -> bool:
        """True if every client is a replica of the coordinator."""
        return isinstance(self.algorithm, Aggregator) and self.algorithm.is_replicated

    @property
    def _deadline_s(self) -> float | None:
        return self.policy.deadline_s if isinstance(self.policy, Synchronous) else None

    @property
    def honest_peers(self) -> Sequence[ClientId]:
        """Peers that do not attack, whose models are measured."""
        attackers = self.attackers.clients if self.attackers else ()
        if not attackers:
            return self.data.clients
        return [client for client in self.data.clients if client not in attackers]

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.data.clients)

    @property
    def trainees(self) -> int:
        """Number of clients that train in a round."""
        return self.population if self.has_peers else self.policy.asked_of(self.population)

    @property
    def adds_in_groups(self) -> bool:
        """True if the messages of a group's clients are added where they train, so that their sum alone travels."""
        secure = settings_of(self.experiment)
        is_masked = secure is not None and secure.mode == "real"
        return self.algorithm.linear and self.experiment.hierarchy is None and self._forgers is None and not is_masked

    def _message(self, experiment: Experiment) -> Format:
        """Format of the messages of clients that report."""
        secure = settings_of(experiment)
        asked = self.policy.asked_of(self.population)
        if secure is None:
            return self.prepared.message_format(self.population, asked)
        secure.check(asked, self.policy.cohort_of(self.population))
        return self.prepared.message_format(self.population, asked, self.policy.most_asked(self.population))

    def first_task(self, clients: Sequence[ClientId]) -> tuple[Train, tuple[Tensor, ...]]:
        """Task of these clients in the first round, as one group; it wants what the simulated fleet wants."""
        first = self.layout.shared.pack(self.recipe.module)
        if self.has_peers:
            return Train(tuple(clients), 1, "models"), first
        broadcast = self.prepared.first_context().broadcast
        states = self.prepared.client_states(self.message)
        unreduced: Wants = "updates" if self._forgers is None else "reported"
        private = self.prepared.privacy
        train = Train(
            clients=tuple(clients),
            round=1,
            wants="mean" if self.adds_in_groups else unreduced,
            clip=private.first_clip if private is not None and private.has_bits else None,
            broadcast_count=len(broadcast),
            population=self.population,
            places=(0,) * len(clients) if self.algorithm.needs_fixed_members else (),
            state_names=states.names,
        )
        return train, (*first, *broadcast, *states.stacked(clients, [first] * len(clients)))

    def federation(self, executor: Executor, observers: Observers | None = None) -> Federation:
        """The clients with their coordinator, or as peers, before the first round.

        Args:
            executor: executor of ``recipe``, which does the clients' work.
            observers: observers that are told of tasks, and of clients that come and go; None for none.
        """
        observers = observers or Observers()
        pools_data = self.algorithm.pools_data
        devices = OnSite() if pools_data else self.experiment.devices.make()
        clients = SimulatedClients(self.data, self.groups, executor, devices, self.streams)
        if self.message is None or self.way_out is None:
            return self._peers(clients)
        states = self.prepared.client_states(self.message)
        edges = self.experiment.hierarchy.make() if self.experiment.hierarchy else None
        secure = settings_of(self.experiment)
        simulated = SimulatedFleet(
            replace(clients, have_links=not self.is_replicated),
            states=states,
            way_out=self.way_out,
            # An edge sums the answers of its own clients alone, and in a real session each client masks its own.
            reduces=self.adds_in_groups,
            looks_ahead=self.policy.keeps_late,
            places=self.algorithm.needs_fixed_members,
            attackers=self._forgers,
            drops_diverged=self.policy.drops_diverged or self.prepared.privacy is not None,
            observers=observers,
        )
        fleet: Fleet = simulated if edges is None else HierarchicalFleet(simulated, edges, self.message)
        if secure is not None and self.message.fixed is not None:
            from fed.simulations.secure import EmulatedSessions, RealSessions  # they import cryptography

            sessions = RealSessions if secure.mode == "real" else EmulatedSessions
            fixed = self.message.fixed
            fleet = SecureFleet(simulated, sessions(simulated, clients, secure, fixed), secure, fixed)
        # Pooled data are in one place: nothing is sent.
        moved_bytes = (lambda: (0, 0)) if pools_data else None
        if self.is_replicated:
            fleet = ring = RingFleet(simulated, clients, self.message)
            moved_bytes = lambda: (ring.moved_bytes, ring.moved_bytes)  # noqa: E731  # in place of the other one
        return Coordinated(
            experiment=self.experiment,
            prepared=self.prepared,
            policy=self.policy,
            fleet=fleet,
            message=self.message,
            states=states,
            moved_bytes=moved_bytes,
            occupation=simulated.occupation,
            observers=observers,
        )

    def _peers(self, clients: SimulatedClients) -> Peers:
        """Peers before the first round, on links of their own."""
        neighbourhood = SimulatedNeighbourhood(
            clients,
            self.topology,
            message_bytes=sent_bytes(self.algorithm, self.layout, self.peer_codec) if self.topology else 0,
            deadline_s=self._deadline_s,
            attackers=self._forgers,
            has_buffers=self.layout.size > self.layout.parameters,
            waits_alone=self.policy.waits_alone,
        )
        row_of = {client: row for row, client in enumerate(self.data.clients)}
        honest = [row_of[client] for client in self.honest_peers] if self.attackers else None
        training = LocalTraining(
            sizes=clients.sizes,
            groups=self.groups,
            executor=clients.executor,
            lr_in=step_sizes(self.experiment, self.policy),
            stages=self.prepared.update_stages(),
        )
        return Peers(
            self.algorithm,
            neighbourhood,
            training,
            layout=self.layout,
            first=self.layout.pack(self.recipe.module),
            codec=self.peer_codec,
            honest=honest,
        )

    @property
    def _forgers(self) -> Attackers | None:
        """Attackers that change what they send; None if there are none, or if they change their data alone."""
        return self.attackers if self.attackers and self.attackers.attack.forges else None

    def load_module(self, state: tuple[Tensor, Tensor]) -> "nn.Module":
        """New module with a given state, on the CPU and in evaluation mode."""
        module = copy.deepcopy(self.recipe.module).eval()
        self.layout.unpack(*state, module)
        return module

    def _topology(self, section: Component | None) -> "Topology | None":
        """Topology of the peers, held to the algorithm's needs; None if peers never meet.

        Raises:
            InvalidExperiment: if the algorithm needs other weights.
        """
        topology = topology_of(self.algorithm, section, self.population, self.streams)
        # Partners that the rule itself chooses fit it by construction.
        if topology is None or section is None:
            return topology
        self.algorithm.check_topology(topology)
        devices = self.experiment.devices.make()
        comes_and_goes = not devices.are_always_there or devices.failure or devices.interruption
        is_whole = not comes_and_goes and self._deadline_s is None
        if self.algorithm.corrects_weights or (topology.keeps_mean and (is_whole or not topology.is_directed)):
            return topology
        if not topology.keeps_mean:
            obstacle = ", whose weights do not keep the peers' mean"
        elif comes_and_goes:
            obstacle = " with devices that come and go"
        else:
            obstacle = " with rounds.deadline_s"
        raise InvalidExperiment(
            f"algorithm {self.experiment.algorithm.kind} needs weights that keep the peers' mean, got topology "
            f"{section.kind}{obstacle}: choose algorithm sgp, or an undirected topology"
        )


def topology_of(rule: PeerRule, section: Component | None, peers: int, streams: Streams) -> "Topology | None":
    """Topology of the section, or of the partners that the rule chooses; None if peers never meet.

    Args:
        rule: algorithm of the peers.
        section: section ``topology`` of the experiment; None if it has none.
        peers: number of peers.
        streams: random streams of the run.
    """
    from fed.topology import Topology  # imports networkx, which only runs with peers need

    if partners := rule.partners():
        return Topology(partners, partners, peers, streams)
    if section is None:
        return None
    rules = {name: getattr(section, name) for name in ("weights", "lazy") if hasattr(section, name)}
    return Topology(section.make, section.target, peers, streams, **rules)


def _held(data: FederatedData) -> FederatedData:
    """Data on demand in memory, unless they take more than a gigabyte."""
    held: dict[ClientId, Held] = {}
    size_bytes = 0
    for client in data.clients:
        held[client] = data.read(client)
        if isinstance(held[client], SamplesOnDemand):
            return data
        size_bytes += sum(leaf.nbytes for part in held[client] for leaf in trees.leaves(part))
        if size_bytes > _MOST_HELD_BYTES:
            return data
    return replace(data, train=held)


def _app(experiment: Experiment, given: object) -> App | None:
    """App of the experiment, or the one that is given in Python with the experiment's settings; None: fed trains."""
    section = experiment.app
    if section is None:
        if given is not None:
            raise InvalidExperiment(
                "an app needs the number of its clients, got an experiment without the section app: give "
                'fed.Experiment(app={"clients": 10}, …)'
            )
        return None
    return App(given if given is not None else section.kind, section)


def _clients_of(app: App) -> FederatedData:
    if app.section.clients is None:
        raise InvalidExperiment(
            "app.clients must say how many clients a simulation has, for their data are the app's own, got null: set it"
        )
    return stand_in(range(app.section.clients))


def _data(experiment: Experiment, data: FederatedData | None) -> FederatedData:
    if data is not None:
        if not isinstance(data, FederatedData):
            raise InvalidData(
                f"data must be a fed.FederatedData, got {type(data).__name__}: write "
                "fed.FederatedData({client: (inputs, targets), …}), or deal samples to clients with fed.partition"
            )
        if experiment.table is not None and data.table != experiment.table:
            raise InvalidExperiment(
                "table is the schema by which data are read, got data given in Python that were read "
                f"{'by another' if data.table else 'without it'}: give FederatedData(…, table=experiment.table), or "
                "remove the section"
            )
        return data
    if experiment.data is None:
        raise InvalidExperiment(
            "data: null needs data given in Python, fed.simulate(…, data=…), or real nodes, fed server: else name a "
            "source"
        )
    return load(experiment.data, experiment.data_streams, experiment.table)
