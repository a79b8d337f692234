"""Neighbourhood of simulated peers: their clocks, their links, and when they are present.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fed.errors import RunFailed
from fed.server.mixing.neighbourhood import Attendance, EncodedRows
from fed.simulations.attacks import Attackers
from fed.simulations.availability import Spell
from fed.simulations.simulated_clients import SimulatedClients
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from fed.topology import Topology
    from fed.vectors.mixing import Weights

__all__ = ["SimulatedNeighbourhood"]


class SimulatedNeighbourhood:
    """A :class:`fed.server.mixing.neighbourhood.Neighbourhood` of all peers at once, each with a clock of its own.

    A peer that takes part in an exchange goes on when it has sent and received all its messages: it waits for its
    neighbours, and for no other. With a deadline it waits at most so long after it is ready. A neighbour whose message
    comes later is left out at both ends: each keeps the weight that it would have given the other. A peer takes no part
    in a round if it is away when its round begins, leaves before it could have trained and sent its messages, or breaks
    down by then. Its neighbours do not wait for it. It begins the next round together with the latest of its
    neighbours, and not before the first of all peers has ended this one. Where neighbours keep copies of each other, it
    gets what it missed with their next messages. A peer that is away and never comes back has gone for good: all others
    know it at once, and begin anew with the next round in which they take part.

    Attributes:
        left_out: peers whose messages came too late for a neighbour in this round.
        gone: places of peers that have gone for good.

    Args:
        clients: peers, with their data and devices.
        topology: neighbours of each peer in each round; None if peers never meet.
        message_bytes: size of all messages that a peer sends to one neighbour in a round.
        deadline_s: seconds that a peer waits in each exchange; None: it waits for its neighbours, however slow.
        attackers: peers that forge the vectors that they send; None for none.
        has_buffers: True if a round's first exchange begins with buffers, which attackers do not forge.
        waits_alone: True if a round waits until two peers are there, in a run of two or more; otherwise one is enough.
    """

    def __init__(
        self,
        clients: SimulatedClients,
        topology: "Topology | None",
        message_bytes: int,
        deadline_s: float | None = None,
        attackers: Attackers | None = None,
        *,
        has_buffers: bool = False,
        waits_alone: bool = True,
    ) -> None:
        self.clock = 0.0
        self._attackers = attackers
        self._has_buffers = has_buffers
        self._number = self._exchange = 0
        self.left_out: set[int | str] = set()
        self._deadline_s = deadline_s
        self.bytes_sent = self.bytes_received = 0
        self._topology = topology
        self.weights = self._whole = topology.weights(1) if topology else None
        self.members: Sequence[int | str] = clients.data.clients
        self._clients = clients
        self._message_bytes = message_bytes
        self._devices = [clients.device_of(member) for member in self.members]
        self._fewest = 2 if waits_alone and topology and len(self.members) > 1 else 1
        self._has_mixed_S = np.zeros(len(self.members), bool)
        self._spells = [clients.spells.get(member) for member in self.members]
        sources = clients.devices
        self._all_take_part = sources.are_always_there and not sources.failure and not sources.interruption
        self._ready_s_N = np.zeros(len(self.members))
        self._missed_bytes_X = np.zeros(len(self._whole.senders_X) if self._whole else 0, np.int64)
        self._rows_S = np.arange(len(self.members))
        self._links: tuple[Weights, tuple[np.ndarray, ...]] | None = None
        self.gone: set[int] = set()
        self._generations_N = np.zeros(len(self.members), np.int64)  # departures after which each peer has begun anew

    def begin(self, number: int) -> Attendance:
        """Find out who takes part in a round, numbered from 1.

        Raises:
            RunFailed: if too few peers are available, and no more ever will be.
        """
        self.bytes_sent = self.bytes_received = 0
        self.left_out = set()
        self._number = number
        self._exchange = 0
        self.weights = self._whole = self._topology.weights(number) if self._topology else None
        self._has_mixed_S = np.zeros(len(self.members), bool)
        if self._all_take_part:  # no peer can be away or fail, so nothing is drawn
            return Attendance(torch.from_numpy(self._rows_S), [None] * len(self.members))
        self._await_peer(number)
        attendance = self._attendance(number)
        self._rows_S = attendance.rows_S.numpy()
        self._has_mixed_S = np.zeros(len(self._rows_S), bool)
        if self._whole and len(self._rows_S) < len(self.members):
            self.weights = self._whole.among(torch.from_numpy(self._takes_part_N))
        return attendance

    def train(self, samples_seen_S: Sequence[int]) -> None:
        """Move the clock of each peer that takes part by the time of training on this many samples."""
        speeds_S = [self._devices[row].samples_per_s for row in self._rows_S]
        self._ready_s_N[self._rows_S] += np.divide(samples_seen_S, speeds_S)

    def exchange(
        self, *tensors_SM: Tensor, encoded: EncodedRows | None = None
    ) -> tuple["Weights | None", tuple[Tensor, ...]]:
        """Send each row's message to its peer's neighbours, which receive what was sent: all rows are here."""
        received = tensors_SM if encoded is None else (*tensors_SM, encoded.vectors_NM)
        if self.weights is None:
            return None, received
        if self._attackers is not None:
            received = self._attacked(received)
        self._exchange += 1
        receivers_X, senders_X, latency_s_X, s_per_byte_X = self._links_of_round()
        size_bytes_X = np.full(len(senders_X), sum(tensor_SM.shape[1] * tensor_SM.itemsize for tensor_SM in tensors_SM))
        if encoded is not None:
            size_bytes_X += self._encoded_bytes(encoded, senders_X)
        self.bytes_sent += int(size_bytes_X.sum())
        self.bytes_received = self.bytes_sent
        ready_s_S = self._ready_s_N[self._rows_S]
        arrives_s_X = ready_s_S[senders_X] + latency_s_X + size_bytes_X * s_per_byte_X
        weights = self.weights
        counts_X = np.ones(len(senders_X), bool)
        if self._deadline_s is not None:
            until_s_X = ready_s_S[receivers_X] + self._deadline_s
            is_late_X = arrives_s_X > until_s_X
            if is_late_X.any():
                # Both directions are left out: weights of one way alone would not keep the peers' mean.
                counts_X = ~_either_way(is_late_X, receivers_X, senders_X)
                weights = weights.without(torch.from_numpy(~counts_X))
                self.left_out |= {self.members[row] for row in self._rows_S[senders_X[is_late_X]].tolist()}
                np.maximum.at(ready_s_S, receivers_X[is_late_X], until_s_X[is_late_X])
        for ends_X in (receivers_X, senders_X):
            # Assignment by index would keep one of several messages to a peer, not the latest.
            np.maximum.at(ready_s_S, ends_X[counts_X], arrives_s_X[counts_X])
        self._ready_s_N[self._rows_S] = ready_s_S
        self._has_mixed_S[receivers_X[counts_X]] = True
        return weights, received

    def _attacked(self, sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Parts of messages as neighbours receive them."""
        assert self._attackers is not None
        senders = [self.members[row] for row in self._rows_S.tolist()]
        honest = 1 if self._has_buffers and not self._exchange else 0
        parts = list(sent[:honest])
        for part_SM in sent[honest:]:
            is_number = part_SM.shape[1] == 1  # such as a weight of push-sum, which attackers send as it is
            parts.append(
                part_SM if is_number else self._attackers.forged(part_SM, senders, self._number, self._exchange)
            )
        return tuple(parts)

    def _encoded_bytes(self, encoded: EncodedRows, senders_X: np.ndarray) -> np.ndarray:
        """Bytes of the message between each pair that takes part, with those that its receiver missed.

        A receiver that missed messages gets them with the next, or the sender's sum if that is shorter.
        """
        size_bytes_S: np.ndarray = np.array([len(message) for message in encoded.messages])
        if encoded.before_NM is None or self._all_take_part:
            return np.take(size_bytes_S, senders_X)
        assert self._whole is not None
        all_receivers_X = self._whole.rows_X.numpy()
        all_senders_X = self._whole.senders_X.numpy()
        size_bytes_N = np.zeros(len(self.members), np.int64)
        size_bytes_N[self._rows_S] = size_bytes_S
        takes_part_N = self._takes_part_N
        is_sent_X = takes_part_N[all_senders_X]
        is_received_X = takes_part_N[all_receivers_X]
        size_bytes_X = size_bytes_N[all_senders_X]
        sum_bytes = encoded.vectors_NM[0].nbytes
        due_bytes_X = np.minimum(self._missed_bytes_X + size_bytes_X, np.maximum(sum_bytes, size_bytes_X))
        missed_bytes_X = np.where(is_sent_X, due_bytes_X, self._missed_bytes_X)
        arrives_X = is_sent_X & is_received_X
        self._missed_bytes_X = np.where(arrives_X, 0, missed_bytes_X)
        return np.compress(arrives_X, due_bytes_X)

    def end(self) -> None:
        """Move the run's clock to the slowest peer of the round, and the others' clocks to their neighbours'."""
        ready_s_N = self._ready_s_N
        finished_s_S = ready_s_N[self._rows_S]
        if not len(finished_s_S):
            return
        self.clock = max(self.clock, float(finished_s_S.max()))
        if len(finished_s_S) < len(ready_s_N):
            takes_part_N = self._takes_part_N
            # The others wait for the first peer that has finished, and for the latest of their neighbours.
            ready_s_N[~takes_part_N] = np.maximum(ready_s_N[~takes_part_N], finished_s_S.min())
            if self._whole:
                rows_X = self._whole.rows_X.numpy()
                senders_X = self._whole.senders_X.numpy()
                follows_X = ~takes_part_N[rows_X] & takes_part_N[senders_X]
                np.maximum.at(ready_s_N, rows_X[follows_X], ready_s_N[senders_X[follows_X]])

    def measures(self) -> dict[str, float]:
        """Number of peers that took part and mixed with nobody; empty if peers never meet."""
        if not self._topology:
            return {}
        alone = int((~self._has_mixed_S).sum()) if self._exchange else 0
        return {"alone": alone}

    def state(self) -> Tree:
        """All clocks, the bytes that peers missed, and the peers that have gone for good, for a checkpoint."""
        return {
            "clock": self.clock,
            "ready_s": self._ready_s_N.tolist(),
            "missed_bytes": self._missed_bytes_X.tolist(),
            "gone": sorted(self.gone),
            "generations": self._generations_N.tolist(),
        }

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self.clock = state["clock"]
        self._ready_s_N = np.array(state["ready_s"])
        self._missed_bytes_X = np.array(state["missed_bytes"], np.int64)
        self.gone = set(state["gone"])
        self._generations_N = np.array(state["generations"], np.int64)

    @property
    def _takes_part_N(self) -> np.ndarray:  # noqa: N802  # a shape suffix
        takes_part_N = np.zeros(len(self.members), bool)
        takes_part_N[self._rows_S] = True
        return takes_part_N

    def _spell(self, row: int) -> Spell:
        spells = self._spells[row]
        return spells.at(float(self._ready_s_N[row])) if spells else Spell(True, math.inf)

    def _await_peer(self, number: int) -> None:
        """Move all clocks to the next return of a peer, until enough peers are available."""
        spells = list(map(self._spell, range(len(self.members))))
        while (there := sum(spell.is_there for spell in spells)) < self._fewest:
            returns_s = min((spell.until_s for spell in spells if not spell.is_there), default=math.inf)
            if math.isinf(returns_s):
                raise RunFailed(_nobody_else(number, there))
            # All clocks move, since peers that wait for company do not train meanwhile.
            self._ready_s_N = np.maximum(self._ready_s_N, returns_s)
            spells = list(map(self._spell, range(len(self.members))))

    def _attendance(self, number: int) -> Attendance:
        """Decide which peers take part and how many steps each makes, before any of them trains."""
        degrees_N = self._whole.degrees_N.tolist() if self._whole else [0] * len(self.members)
        groups = self._clients.groups
        rows_S: list[int] = []
        steps_S: list[int | None] = []
        failed: list[int | str] = []
        for row, degree in enumerate(degrees_N):
            is_there, until_s, _ = self._spell(row)
            if not is_there:
                if math.isinf(until_s):  # it never comes back
                    self.gone.add(row)
                continue
            samples = self._clients.sizes[row]
            steps, breaks_at = self._clients.fate(samples, None, self.members[row], number)
            sent_bytes = degree * self._message_bytes
            takes_s = self._devices[row].gossip_s(samples=groups.seen(samples, steps), bytes_each_way=sent_bytes)
            ends_s = self._ready_s_N[row] + takes_s * (1.0 if breaks_at is None else breaks_at)
            if breaks_at is not None or ends_s > until_s:
                # The time until it broke down has passed for it, as for any other peer.
                self._ready_s_N[row] = min(ends_s, until_s)
                failed.append(self.members[row])
            else:
                rows_S.append(row)
                steps_S.append(steps)
        # Peers that have not taken part since the last departure begin anew.
        anew_S = np.flatnonzero(self._generations_N[rows_S] < len(self.gone)).tolist()
        self._generations_N[rows_S] = len(self.gone)
        return Attendance(torch.tensor(rows_S, dtype=torch.int64), steps_S, failed, anew_S)

    def _links_of_round(self) -> tuple[np.ndarray, ...]:
        """Receivers and senders as places among the peers that take part, latencies, and seconds per byte.

        A message takes the larger latency of the two ends, and then the time of its bytes on the slower of two links.
        One is the sender's share of its uplink, which all its receivers divide; the other the receiver's share of its
        downlink, which all its senders divide.
        """
        weights = self.weights
        assert weights is not None
        if self._links is None or self._links[0] is not weights:
            receivers_X = weights.rows_X.numpy()
            senders_X = weights.senders_X.numpy()
            devices = [self._devices[row] for row in self._rows_S]
            latency_s_S = np.array([device.latency_s for device in devices])
            up_s_S = np.bincount(senders_X, minlength=len(devices)) / [device.up_bytes_per_s for device in devices]
            down_s_S = weights.degrees_N.numpy() / [device.down_bytes_per_s for device in devices]
            latency_s_X = np.maximum(latency_s_S[receivers_X], latency_s_S[senders_X])
            s_per_byte_X = np.maximum(down_s_S[receivers_X], up_s_S[senders_X])
            self._links = (weights, (receivers_X, senders_X, latency_s_X, s_per_byte_X))
        return self._links[1]


def _nobody_else(number: int, there: int) -> str:
    remedy = "let peers come more often, as devices.availability says"
    if there:
        needs = "another peer, because a peer alone waits"
        remedy = f"{remedy}, or write rounds.alone: go_on"
    else:
        needs = "a peer"
    return f"round {number} needs {needs}, and none will ever be there again: {remedy}"


def _either_way(chosen_X: np.ndarray, receivers_X: np.ndarray, senders_X: np.ndarray) -> np.ndarray:
    """True for each chosen pair, and for the pair of the same two peers in the other direction."""
    peers = 1 + max(receivers_X.max(), senders_X.max())
    # One number for each ordered pair.
    there_X = receivers_X * peers + senders_X
    back_X = senders_X * peers + receivers_X
    either_X: np.ndarray = chosen_X | np.isin(back_X, there_X[chosen_X])
    return either_X
