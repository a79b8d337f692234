"""Real peer that mixes with its neighbours."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fed.clients.training.batches import normalises_batches
from fed.clients.training.groups import Groups
from fed.config.registry import TOPOLOGIES
from fed.errors import InvalidExperiment, InvalidPayload
from fed.server.mixing.message_sizes import exchange_specs
from fed.server.mixing.peers import Peers
from fed.server.mixing.primitives import LocalTraining, PeerCodec
from fed.server.peer.gossip.exchange import ExchangeKey
from fed.server.peer.gossip.gossip_service import GossipService
from fed.server.peer.gossip.meeting import await_members, is_late
from fed.server.peer.gossip.real_neighbourhood import RealNeighbourhood
from fed.server.peer.members.member import Member
from fed.server.peer.reachability import reachable_graph
from fed.server.peer.real_peer import PeerParts, RealPeer
from fed.server.rounds.coordinated import step_sizes
from fed.storage.checkpoints import Tree
from fed.topology import Topology
from fed.vectors.tensors import torch
from fed.wire.messages import client_id_of
from fed.wire.payloads import TensorSpec

if TYPE_CHECKING:
    import networkx as nx

    from fed.aggregators.peer_rule import PeerRule

__all__ = ["GossipPeer"]

_log = logging.getLogger(__name__)
_AHEAD = 2  # rounds that another may be ahead, beside those between two checkpoints
_COPY_WITHIN_S = 60.0


class GossipPeer(RealPeer[GossipService]):
    """Peer of a rule over ``mix``."""

    def __init__(self, parts: PeerParts) -> None:
        super().__init__(parts)
        experiment = parts.experiment
        prepared = parts.prepared
        rule: PeerRule = prepared.algorithm
        self._rule = rule
        layout = prepared.layout
        every = experiment.checkpoints.every
        self._keeps_checkpoints = every is not None
        codec = PeerCodec(prepared.peer_encoder(), prepared.streams) if rule.compresses else None
        service = GossipService(
            **self.service_arguments(is_ready=parts.is_resumed, gone_after_s=self.deadline_s),
            specs=exchange_specs(rule, layout, codec),
            copied=(),
            # A peer that resumes runs all rounds since its checkpoint once more.
            ahead=_AHEAD + (every or 0),
            snapshot=lambda: self._peers.copied,
            check=None if codec is None else partial(_check, codec),
            conserves_sum=rule.conserves_sum,
        )
        self._neighbourhood = RealNeighbourhood(
            service,
            self._topology_or_ring,
            pushes=rule.corrects_weights,
            deadline_s=self.deadline_s,
            waits_alone=self.policy.waits_alone,
            observers=self.observers,
        )
        self.thread = self._neighbourhood.thread
        groups = Groups(
            experiment.local,
            size=1,
            never_single=normalises_batches(prepared.module),
            phases=prepared.phases,
        )
        training = LocalTraining(
            sizes=[self.size],
            groups=groups,
            executor=self.executor,
            lr_in=step_sizes(experiment, self.policy),
            stages=prepared.update_stages(),
        )
        self._peers = Peers(
            rule,
            self._neighbourhood,
            training,
            layout=layout,
            first=layout.pack(prepared.module),
            codec=codec,
        )
        service.copied = tuple(TensorSpec(part.dtype, part.numel()) for part in self._peers.copy())
        # Fails at once where it cannot be made, rather than after the others have come.
        self._topology((Member(parts.setup.name, "-", 0),) * parts.setup.min_peers)

    @property
    def federation(self) -> Peers:
        """Model of this peer, and its neighbours."""
        return self._peers

    @property
    def is_behind(self) -> bool:
        """True while rounds pass in which this peer takes no part."""
        return self._neighbourhood.skips_to > self.service.round

    def resume(self, kept: tuple[int, Tree] | None) -> None:
        """Take up the messages that are on disk."""
        state = None if kept is None else kept[1]["federation"]["neighbourhood"]
        number = 0 if kept is None else kept[0]
        self._neighbourhood.resume(number, state, keeps_checkpoints=self._keeps_checkpoints)

    def resume_end(self) -> None:
        """Say from now on that this peer has ended; it keeps nothing that others need."""
        self.thread.call(self.service.restore, self.policy.count, {})
        self._end_again()

    def meet(self) -> int:
        """Wait for the others, or join them where they have begun; returns how many there are with this one."""
        if not self._is_resumed and is_late(self.thread):
            self._join()
            # An earlier life of this peer may have taken its share of a sum along.
            self.thread.call(self.service.begin_generation)
        self.thread.call(self.service.members.make_ready)
        return await_members(self.thread, self.setup.min_peers, self._neighbourhood.last_names, self.deadline_s)

    def graph(self) -> "nx.Graph[str]":
        """Graph of this peer's own neighbours."""
        return self._neighbourhood.graph()

    def _join(self) -> None:
        """Begin from a copy of another peer's state, or from the first model where none gives one."""
        found = self.thread.wait_for(self.service.copy(_COPY_WITHIN_S))
        if found is None:
            _log.warning("no peer gave a copy of its model: this one begins with the first model")
            return
        number, tensors = found
        self._peers.adopt(tensors)
        self._neighbourhood.skips_to = number + 1
        _log.info("joined after round %d, with a copy of another peer's model", number)

    def _topology_or_ring(self, members: Sequence[Member]) -> Topology:
        """The topology of these members; a lazy ring where it cannot be made of their number."""
        try:
            return self._topology(members)
        except InvalidExperiment as error:
            _log.warning("%d peers mix over a ring until others come or go: %s", len(members), error)
        # A ring can be made of any number of peers.
        ring = TOPOLOGIES.make("ring")
        make = partial(_made_reachable, members, ring.make)
        return Topology(make, kind=ring.target, peers=len(members), streams=self.prepared.streams, lazy=True)

    def _topology(self, members: Sequence[Member]) -> Topology:
        section = self.experiment.topology
        partners = self._rule.partners()
        rules = {name: getattr(section, name) for name in ("weights", "lazy") if hasattr(section, name)}
        kind = section.target if section is not None else partners
        made = section.make if section is not None else partners
        assert kind is not None
        assert made is not None
        topology = Topology(
            partial(_made_reachable, members, made),
            kind=kind,
            peers=len(members),
            streams=self.prepared.streams,
            **rules,
        )
        self._rule.check_topology(topology)
        if self._rule.corrects_weights or (topology.keeps_mean and not topology.is_directed):
            return topology
        raise InvalidExperiment(
            f"algorithm {self.experiment.algorithm.kind} needs an undirected topology, for real peers come and go, "
            f"got {section.kind if section else 'directed partners'}: choose algorithm sgp, or another topology"
        )


def _made_reachable(members: Sequence[Member], make: "Callable[..., nx.Graph[int]]", **given: Any) -> "nx.Graph[int]":
    return reachable_graph(members, make(**given))


def _check(codec: PeerCodec, key: ExchangeKey, name: str, tensors: "Sequence[torch.Tensor]") -> None:
    """Decode another's message, so that one that cannot be decoded is refused when it comes.

    Raises:
        InvalidPayload: if it cannot be decoded, or to numbers that are not finite.
    """
    message = next((tensor for tensor in tensors if tensor.dtype == torch.uint8), None)
    if message is not None and not codec.decode([message], [client_id_of(name)], key.round).isfinite().all():
        raise InvalidPayload("its vectors must be finite")
