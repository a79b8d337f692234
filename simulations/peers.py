"""Simulated peers: every peer's model at once, moved by a rule over ``mix``.

Shapes: N peers; P, trainable parameters; V, the whole floating-point state; B = V − P; I, integers.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fed.aggregators.contracts import PeerRule
from fed.clients.data import ClientId
from fed.errors import Diverged, InvalidExperiment
from fed.layout import Layout
from fed.server.coordinator import Exchange
from fed.simulations.devices import Device
from fed.simulations.in_process import InProcessClients

__all__ = ["SimulatedPeers"]


class SimulatedPeers:
    """Peers that all start from one model, train on their own data and mix with their neighbours.

    Trainable parameters follow the rule. Float buffers are mixed as they are after training, integer buffers stay each
    peer's own. The mean over peers is the plain one, as doubly stochastic mixing keeps it.

    Args:
        rule: what a peer does in a round.
        mixing_NN: W, sparse, float64; None where peers never meet.
        clients: who trains.
        layout: the model's.
        vector_V: every peer's first model.
        integers_I: its integer buffers.
        device: every peer's.
    """

    def __init__(
        self,
        rule: PeerRule,
        mixing_NN: Tensor | None,
        clients: InProcessClients,
        layout: Layout,
        vector_V: Tensor,
        integers_I: Tensor,
        device: Device,
    ) -> None:
        self.clock = 0.0
        self._rule = rule
        self._mixing_NN = mixing_NN
        self._clients = clients
        self._layout = layout
        self._nodes = list(clients.data.train)
        self._x_NV = vector_V.repeat(len(self._nodes), 1)
        self._integers_NI = integers_I.repeat(len(self._nodes), 1)
        self._device = device

    @property
    def trainees(self) -> int:
        """How many peers train in a round: all."""
        return len(self._nodes)

    @property
    def bytes_each_way(self) -> int:
        """What a round with one mix sends: a model to every neighbour."""
        return sum(self._sent_bytes(mixes=1))

    def _sent_bytes(self, mixes: int) -> list[int]:
        """What each peer sends in so many mixes, and receives."""
        if self._mixing_NN is None:
            return [0] * len(self._nodes)
        to, source = self._mixing_NN.indices()
        degrees = torch.bincount(to[to != source], minlength=len(self._nodes)).tolist()
        return [mixes * degree * self._layout.size * self._layout.dtype.itemsize for degree in degrees]

    def model(self) -> tuple[Tensor, Tensor]:
        """The peers' mean: (vector [V], integers [I]), of integers the largest."""
        integers_I = self._integers_NI.amax(0) if self._integers_NI.numel() else self._integers_NI[0]
        return self._x_NV.double().mean(0).to(self._layout.dtype), integers_I

    def models(self) -> Mapping[ClientId, tuple[Tensor, Tensor]]:
        """Each peer's own model."""
        return dict(zip(self._nodes, zip(self._x_NV, self._integers_NI, strict=True), strict=True))

    def round(self, number: int) -> Exchange:
        """Everybody trains, and mixes where the rule says so.

        Raises:
            Diverged: if a peer's loss or model is no longer finite; all models stay as they were.
        """
        params = self._layout.parameters
        work = _Round(number, self._clients, self._mixing_NN, self._x_NV[:, params:], self._integers_NI)
        x_NP = self._rule.step(self._x_NV[:, :params], work.descend, work.mix)
        averaged_NB = work.mixed(work.averaged_NB) if work.mixes else work.averaged_NB
        self._x_NV = torch.cat([x_NP, averaged_NB], 1)
        self._integers_NI = work.integers_NI
        sent_bytes = self._sent_bytes(work.mixes)
        self.clock += self._device.gossip_s(samples=max(work.samples_seen), bytes_each_way=max(sent_bytes))
        return Exchange(
            selected=len(self._nodes),
            replied=len(self._nodes),
            late=0,
            failed=0,
            bytes_up=sum(sent_bytes),
            bytes_down=sum(sent_bytes),
            train_loss=work.train_loss(),
        )


class _Round:
    """One round's local steps and exchanges, which the rule calls as ``descend`` and ``mix``."""

    def __init__(
        self,
        number: int,
        clients: InProcessClients,
        mixing_NN: Tensor | None,
        averaged_NB: Tensor,
        integers_NI: Tensor,
    ) -> None:
        self.averaged_NB = averaged_NB
        self.integers_NI = integers_NI
        self.mixes = 0
        self.samples_seen: list[int] = []
        self._number = number
        self._clients = clients
        self._mixing_NN = mixing_NN
        self._losses: list[float] = []

    def descend(self, x_NP: Tensor) -> Tensor:
        """Every peer's local steps."""
        start_NV = torch.cat([x_NP, self.averaged_NB], 1)
        trained_NV, integers_NI = torch.empty_like(start_NV), torch.empty_like(self.integers_NI)
        for row, client in enumerate(self._clients.data.train):
            try:
                trained = self._clients.train(client, self._number, start_NV[row], self.integers_NI[row])
            except Diverged as error:
                raise Diverged.of(self._number, client, str(error)) from None
            trained_NV[row], integers_NI[row] = trained.vector_V, trained.integers_I
            self._losses.append(trained.train_loss)
            self.samples_seen.append(trained.samples_seen)
        self.averaged_NB, self.integers_NI = trained_NV[:, x_NP.shape[1] :], integers_NI
        return trained_NV[:, : x_NP.shape[1]]

    def mix(self, x_NP: Tensor) -> Tensor:
        """W x, and a message to every neighbour."""
        self.mixes += 1
        return self.mixed(x_NP)

    def mixed(self, x_NP: Tensor) -> Tensor:
        """W x, summed in float64 in the neighbours' order."""
        if self._mixing_NN is None:
            raise InvalidExperiment(
                "a rule that mixes must have the primitive mix, so that its peers get a topology, got none: "
                'give the class primitive = "mix"'
            )
        mixed_NP: Tensor = torch.sparse.mm(self._mixing_NN, x_NP.double())
        return mixed_NP.to(x_NP.dtype)

    def train_loss(self) -> float:
        """The mean of the peers' losses, weighted by their samples."""
        sizes = self._clients.data.sizes.values()
        return math.fsum(loss * size for loss, size in zip(self._losses, sizes, strict=True)) / sum(sizes)
