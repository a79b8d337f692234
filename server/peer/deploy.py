"""Run of one experiment at a real peer, among others that run the same, with the results that a simulation writes."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fed.aggregators.peer_rule import PeerRule
from fed.clients.data import ClientId, FederatedData, load
from fed.clients.node.own_data import samples_of
from fed.clients.setup import Preparation
from fed.clients.training.batches import normalises_batches
from fed.clients.training.executor import InProcess
from fed.clients.training.groups import Groups
from fed.clients.training.worker import Work
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import InvalidExperiment, InvalidPayload
from fed.identity.credentials import PeerCredentials
from fed.randomness import Streams
from fed.reports.html import run_report
from fed.server.evaluation import ScoringByClients, ScoringByCoordinator
from fed.server.federation import State, step_sizes
from fed.server.peer.links import StreamPatience
from fed.server.peer.membership import Member, Timing
from fed.server.peer.neighbourhood import PeerCodec
from fed.server.peer.network import PeerNetwork, meeting
from fed.server.peer.outbox import Key
from fed.server.peer.peers import Peers, exchange_specs
from fed.server.peer.service import PeerService
from fed.server.resume import newest_checkpoint, run_fingerprint
from fed.server.rounds.synchronous import Synchronous
from fed.server.training_loop import Scoring, TrainingLoop
from fed.storage.run_folder import Run, RunFolder
from fed.topology import Topology
from fed.wire.messages import client_id_of
from fed.wire.payloads import TensorSpec
from fed.wire.rate_limits import Refusals

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["PeerSetup", "take_part"]

_log = logging.getLogger(__name__)
_DEADLINE_S = 60.0  # where rounds have none
_AHEAD = 2  # rounds, beside those between two checkpoints
_AGREED = ("seed", "model", "local", "algorithm", "topology", "rounds", "uplink", "error_feedback", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class PeerSetup:
    """Setup of a peer among others.

    Args:
        name: of its certificate, or where there is none what it is to be called.
        listen: HOST:PORT; port 0 takes a free one; None: it only dials.
        join: addresses of other peers.
        credentials: of the peer; None: no encryption, for loopback alone.
        advertise: HOST:PORT at which others reach it; as it listens unless given.
        min_peers: the number of peers to wait for before the first round.
    """

    name: str
    listen: str | None
    join: Sequence[str] = ()
    credentials: PeerCredentials | None = None
    advertise: str | None = None
    min_peers: int = 2


def take_part(
    experiment: Experiment,
    own: NodeData,
    setup: PeerSetup,
    *,
    output: Path,
    overwrite: bool = False,
    resume: bool = False,
    on_listen: Callable[[int | None], None] | None = None,
    after_round: Callable[[Mapping[str, Any]], None] | None = None,
) -> Run:
    """Run an experiment at one peer.

    Args:
        experiment: to run, the same at all peers.
        own: what this peer trains on.
        setup: how it meets the others.
        output: the run's folder.
        overwrite: replace a run that the folder holds.
        resume: continue the run that the folder holds, from its newest whole checkpoint.
        on_listen: called with the port.
        after_round: called after each round with its line of the metrics.

    Returns:
        The run, with this peer's model.

    Raises:
        InvalidInput: if the experiment cannot run among peers, or nothing can listen there.
        RunFailed: if the run cannot go on.
    """
    folder = RunFolder.existing(output) if resume else RunFolder(output, overwrite=overwrite)
    client = client_id_of(setup.name)
    prepared = Preparation(experiment, _data(experiment, own, client))
    rule = prepared.algorithm
    if not isinstance(rule, PeerRule) or (experiment.topology is None and rule.partners() is None):
        raise InvalidExperiment(
            f"fed peer needs an algorithm over mix, got {experiment.algorithm.kind}: choose one such as dpsgd, or "
            "coordinate the clients with fed server"
        )
    if rule.needs_fixed_graph:
        raise InvalidExperiment(
            f"fed peer cannot run {experiment.algorithm.kind}, for real peers come and go, and miss what their "
            "neighbours' copies need: choose an algorithm such as deepsqueeze, or simulate it"
        )
    if experiment.adversaries is not None:
        raise InvalidExperiment(
            f"fed peer needs adversaries null, for attackers are simulated, got {experiment.adversaries.kind}: set it "
            "to null, or simulate the experiment"
        )
    fingerprint = run_fingerprint(experiment, prepared.layout, None)
    with folder.held():
        kept = newest_checkpoint(fingerprint, folder, experiment.objects()) if resume else None
        if kept is None:
            folder.begin(experiment)
        peer = _Peer(experiment, prepared, rule, client, setup, output, is_resumed=kept is not None)
        state = None if kept is None else kept[1]["federation"]["neighbourhood"]
        network, every = peer.network, experiment.checkpoints.every
        network.resume(0 if kept is None else kept[0], state, keeps_checkpoints=every is not None)
        is_over = False
        try:
            port = network.listen(setup.listen, setup.advertise)
            if on_listen is not None:
                on_listen(port)
            loop = peer.loop(fingerprint, folder, after_round)
            if kept is not None:
                loop.restore(*kept)
            elif network.is_late():
                peer.join()
            network.make_ready()
            standing = network.await_members(setup.min_peers)
            _log.info("%d peers are there: round %d begins", len(standing.present), 1 + (kept[0] if kept else 0))
            run = loop.run()
            is_over = True
        finally:
            network.close("the run is over" if is_over else "this peer stops for now", lingers=is_over)
    return run


class _Peer:
    """Parts of a peer's run."""

    def __init__(
        self,
        experiment: Experiment,
        prepared: Preparation,
        rule: PeerRule,
        client: ClientId,
        setup: PeerSetup,
        output: Path,
        *,
        is_resumed: bool,
    ) -> None:
        self._experiment, self._prepared, self._rule = experiment, prepared, rule
        policy = experiment.rounds.make()
        if isinstance(policy, Synchronous):
            policy.check_peers(setup.min_peers)
        deadline_s = (policy.deadline_s if isinstance(policy, Synchronous) else None) or _DEADLINE_S
        size = prepared.data.size_of(client)
        first = prepared.layout.pack(prepared.module)
        phases, batch_norm = prepared.phases, normalises_batches(prepared.module)
        self._executor = InProcess(partial(Work, prepared.recipe))
        codec = PeerCodec(prepared.peer_encoder(), prepared.streams) if rule.compresses else None
        service = PeerService(
            own=Member(setup.name, "", time.time_ns(), samples=size, is_ready=is_resumed),
            experiment=_hash(run_fingerprint(experiment, prepared.layout, None)),
            introducers=tuple(setup.join),
            folder=output.with_name(f".{output.name}.messages"),
            specs=exchange_specs(rule, prepared.layout, codec),
            copied=(),
            ahead=_AHEAD + (experiment.checkpoints.every or 0),
            credentials=setup.credentials,
            timing=Timing(suspect_after_s=min(2.5, deadline_s), gone_after_s=deadline_s),
            patience=StreamPatience(silence_s=max(2.5, min(10.0, deadline_s / 2))),
            refusals=Refusals(),
            snapshot=self._snapshot,
            check=partial(_check, codec),
        )
        self.network = PeerNetwork(service, self._topology, pushes=rule.corrects_weights, deadline_s=deadline_s)
        groups = Groups(experiment.local, 1, batch_norm, phases)
        lr_in = step_sizes(experiment, policy)
        self.peers = Peers(rule, self.network, [size], groups, self._executor, prepared.layout, first, lr_in, codec)
        service.copied = tuple(TensorSpec(part.dtype, part.numel()) for part in self.peers.copy())
        self._copied: tuple[int, Sequence[torch.Tensor]] | None = None
        self._topology((Member(setup.name, "-", 0),) * setup.min_peers)  # what cannot be made is said at once

    def join(self) -> None:
        """Begin from a copy of another peer's state, where one gives it."""
        found = self.network.copy()
        if found is None:
            _log.warning("no peer gave a copy of its model: this one begins with the first model")
            return
        number, tensors = found
        self.peers.adopt(tensors)
        self.network.skips_to = number + 1
        _log.info("joined after round %d, with a copy of another peer's model", number)

    def loop(
        self,
        fingerprint: Mapping[str, Any],
        folder: RunFolder,
        after_round: Callable[[Mapping[str, Any]], None] | None,
    ) -> TrainingLoop:
        """The training loop of this peer."""
        prepared, held_out = self._prepared, self._prepared.held_out

        def begin_scoring() -> Scoring:
            if self.network.skips_to > self.network.service.round:
                return lambda: {"test_accuracy": None, "test_loss": None}
            if held_out is not None:
                return ScoringByClients(held_out, self.peers, self._executor).line
            return ScoringByCoordinator(prepared.recipe, self.peers, self._executor, only_own=True).line

        def load_module(state: State) -> nn.Module:
            prepared.layout.unpack(*state, prepared.module)
            return prepared.module.eval()

        service = self.network.service
        return TrainingLoop(
            self._experiment,
            self.peers,
            begin_scoring=begin_scoring,
            has_scores=held_out is not None or prepared.recipe.test is not None,
            scores_meanwhile=False,
            load_module=load_module,
            facts=lambda: {
                "peer": service.own.name,
                "clients": len(service.standing().present),
                "parameters": prepared.layout.parameters,
                "refused": service.refusals.count,
            },
            report=lambda run: run_report(run, None),
            fingerprint=fingerprint,
            folder=folder,
            after_round=after_round,
        )

    def _snapshot(self) -> tuple[int, Sequence[torch.Tensor]] | None:
        number = self.network.service.round - 1
        return None if number < 1 else (number, self.peers.copy())

    def _topology(self, members: Sequence[Member]) -> Topology:
        section, partners = self._experiment.topology, self._rule.partners()
        rules = {name: getattr(section, name) for name in ("weights", "lazy") if hasattr(section, name)}
        kind, made = (section.target, section.make) if section is not None else (partners, partners)
        assert kind is not None
        assert made is not None

        def make(**given: Any) -> "nx.Graph[int]":
            return meeting(members, made(**given))

        topology = Topology(make, kind, len(members), self._prepared.streams, **rules)
        self._rule.check_topology(topology)
        if self._rule.corrects_weights or (topology.keeps_mean and not topology.is_directed):
            return topology
        raise InvalidExperiment(
            f"algorithm {self._experiment.algorithm.kind} needs an undirected topology, for real peers come and go, "
            f"got {section.kind if section else 'directed partners'}: choose algorithm sgp, or another topology"
        )


def _check(codec: PeerCodec | None, key: Key, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Decode another's message, so that one that cannot be decoded is refused when it comes.

    Raises:
        InvalidPayload: if it cannot be decoded, or to numbers that are not finite.
    """
    if codec is None or tensors[-1].dtype != torch.uint8:
        return
    if not codec.decode([tensors[-1]], [client_id_of(name)], key.round).isfinite().all():
        raise InvalidPayload("its vectors must be finite")


def _data(experiment: Experiment, own: NodeData, client: ClientId) -> FederatedData:
    """Samples of this peer, beside the experiment's test set."""
    pair, _ = samples_of(own)
    data = load(experiment.data, Streams(experiment.seed)) if experiment.data is not None else None
    if data is None:
        return FederatedData({client: pair})
    return FederatedData({client: pair}, data.test, data.number_of_classes())


def _hash(fingerprint: Mapping[str, Any]) -> str:
    """Hash of what peers must agree on."""
    keys = fingerprint["experiment"]
    agreed = {**{key: keys[key] for key in _AGREED}, "shapes": fingerprint["shapes"]}
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()
