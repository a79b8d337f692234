"""Simulated peers: every peer's model at once, moved by a rule over ``mix``.

Shapes: N peers; P, trainable parameters; V, the whole floating-point state; B = V − P; I, integers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fed.aggregators.base import PeerRule
from fed.clients.data import ClientId
from fed.clients.training.executor import Item
from fed.clients.training.work_items import Train, label_of
from fed.errors import Diverged, InvalidExperiment
from fed.layout import Layout
from fed.server.accumulator import RoundStats
from fed.simulations.simulated_clients import SimulatedClients
from fed.storage.checkpoints import Tree

__all__ = ["SimulatedPeers", "degrees"]


class SimulatedPeers:
    """Peers that all start from one model, train on their own data and mix with their neighbours.

    Trainable parameters follow the rule. Float buffers are mixed as they are after training, integer buffers stay each
    peer's own. The mean over peers is the plain one, as doubly stochastic mixing keeps it.

    Args:
        rule: what a peer does in a round.
        mixing_NN: W, sparse, float64; None where peers never meet.
        peers: who trains on what.
        layout: the model's.
        first: every peer's first model: (vector [V], integers [I]).
        lr_in: (round, peers) → step size of local steps.
    """

    def __init__(
        self,
        rule: PeerRule,
        mixing_NN: Tensor | None,
        peers: SimulatedClients,
        layout: Layout,
        first: tuple[Tensor, Tensor],
        lr_in: Callable[[int, int], float],
    ) -> None:
        self.clock = 0.0
        self._rule = rule
        self._mixing_NN = mixing_NN
        self._peers = peers
        self._layout = layout
        self._nodes = list(peers.data.clients)
        self._x_NV, self._integers_NI = (part.repeat(len(self._nodes), 1) for part in first)
        self._lr_in = lr_in

    def model(self) -> tuple[Tensor, Tensor]:
        """The peers' mean: (vector [V], integers [I]), of integers the largest."""
        integers_I = self._integers_NI.amax(0) if self._integers_NI.numel() else self._integers_NI[0]
        return self._x_NV.double().mean(0).to(self._layout.dtype), integers_I

    def models(self) -> Mapping[ClientId, tuple[Tensor, Tensor]]:
        """Each peer's own model."""
        return dict(zip(self._nodes, zip(self._x_NV, self._integers_NI, strict=True), strict=True))

    def occupation(self) -> dict[str, Any]:
        """Nothing: peers are in step."""
        return {}

    def state(self) -> Tree:
        """All models, and the clock."""
        return {"clock": self.clock, "vectors": self._x_NV, "integers": self._integers_NI}

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said."""
        self.clock, self._x_NV, self._integers_NI = state["clock"], state["vectors"], state["integers"]

    def round(self, number: int) -> RoundStats:
        """Everybody trains, and mixes where the rule says so.

        Raises:
            Diverged: if a peer's loss or model is no longer finite; all models stay as they were.
        """
        params = self._layout.parameters
        lr = self._lr_in(number, len(self._nodes))
        work = _Round(number, lr, self._peers, self._mixing_NN, self._x_NV[:, params:], self._integers_NI)
        x_NP = self._rule.step(self._x_NV[:, :params], work.descend, work.mix)
        averaged_NB = work.mixed(work.averaged_NB) if work.mixes else work.averaged_NB
        self._x_NV = torch.cat([x_NP, averaged_NB], 1)
        self._integers_NI = work.integers_NI
        model_bytes = self._layout.size * self._layout.dtype.itemsize
        sent_bytes = [work.mixes * degree * model_bytes for degree in degrees(self._mixing_NN, len(self._nodes))]
        seen = [self._peers.groups.seen(size) for size in self._peers.sizes]
        devices = map(self._peers.device_of, self._nodes)
        self.clock += max(
            device.gossip_s(samples=samples, bytes_each_way=size_bytes)
            for device, samples, size_bytes in zip(devices, seen, sent_bytes, strict=True)
        )
        return RoundStats(
            selected=len(self._nodes),
            replied=len(self._nodes),
            late=0,
            failed=0,
            bytes_up=sum(sent_bytes),
            bytes_down=sum(sent_bytes),
            train_loss=work.train_loss(),
        )


def degrees(mixing_NN: Tensor | None, peers: int) -> list[int]:
    """How many neighbours each peer has."""
    if mixing_NN is None:
        return [0] * peers
    to, source = mixing_NN.indices()
    return torch.bincount(to[to != source], minlength=peers).tolist()


@dataclass
class _Round:
    """One round's local steps and exchanges, which the rule calls as ``descend`` and ``mix``."""

    number: int
    lr: float
    peers: SimulatedClients
    mixing_NN: Tensor | None
    averaged_NB: Tensor
    integers_NI: Tensor
    mixes: int = 0
    samples_seen: list[int] = field(default_factory=list)
    losses: list[tuple[float, int]] = field(default_factory=list)

    def descend(self, x_NP: Tensor) -> Tensor:
        """Every peer's local steps."""
        start_NV = torch.cat([x_NP, self.averaged_NB], 1)
        trained_NV, integers_NI = torch.empty_like(start_NV), torch.empty_like(self.integers_NI)
        diverged: list[tuple[int, ClientId, str]] = []
        rows_of = {self._submit(rows, start_NV): rows for rows in self.peers.groups.of(self.peers.sizes)}
        for ticket, rows in rows_of.items():  # in turn, so that of several errors the same one is raised everywhere
            for _, trained, tensors in self.peers.executor.results([ticket]):
                if trained.diverged is not None:
                    client, reason = trained.diverged
                    diverged.append((self.peers.data.clients.index(client), client, reason))
                    continue
                trained_NV[rows], integers_NI[rows] = tensors
                self.losses += zip(trained.train_losses, trained.samples, strict=True)
                self.samples_seen += trained.seen
        if diverged:
            _, client, reason = min(diverged)
            raise Diverged.of(self.number, client, reason)
        self.averaged_NB, self.integers_NI = trained_NV[:, x_NP.shape[1] :], integers_NI
        return trained_NV[:, : x_NP.shape[1]]

    def _submit(self, rows: list[int], start_NV: Tensor) -> int:
        train = Train(tuple(self.peers.data.clients[row] for row in rows), self.number, wants="models", lr=self.lr)
        seen = sum(self.peers.groups.seen(self.peers.sizes[row]) for row in rows)
        return self.peers.executor.submit(
            Item(train, (start_NV[rows], self.integers_NI[rows]), label_of(train), cost=seen)
        )

    def mix(self, x_NP: Tensor) -> Tensor:
        """W x, and a message to every neighbour."""
        self.mixes += 1
        return self.mixed(x_NP)

    def mixed(self, x_NP: Tensor) -> Tensor:
        """W x, summed in float64 in the neighbours' order."""
        if self.mixing_NN is None:
            raise InvalidExperiment(
                "a rule that mixes must have the primitive mix, so that its peers get a topology, got none: "
                'give the class primitive = "mix"'
            )
        mixed_NP: Tensor = torch.sparse.mm(self.mixing_NN, x_NP.double())
        return mixed_NP.to(x_NP.dtype)

    def train_loss(self) -> float:
        """The mean of the peers' losses, weighted by their samples."""
        return math.fsum(loss * size for loss, size in self.losses) / sum(size for _, size in self.losses)
