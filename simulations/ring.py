"""Ring of simulated peers, which sum their updates without a coordinator.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from fed.clients.data import ClientId
from fed.clients.data.holdings import in_order
from fed.server.hierarchy import FleetAbove, summed
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.simulated_clients import SimulatedClients
from fed.vectors.reduction import PACKED_BYTES
from fed.wire.format import Format
from fed.wire.messages import Answer, Task

__all__ = ["RingFleet", "ring_bytes"]


def ring_bytes(message: Format, peers: int) -> int:
    """Bytes that all peers of a ring send together: each of N sends 2(N − 1) messages with a chunk and the integers.

    Args:
        message: format of a client's message.
        peers: number N of peers, at least 1.
    """
    summed_bytes = PACKED_BYTES * sum(message.summed_sizes)
    integers_bytes = message.uplink[-1].size_bytes
    return 2 * (peers - 1) * (summed_bytes + peers * integers_bytes)


class RingFleet(FleetAbove):
    """Fleet of peers of which each is a replica of the coordinator.

    The peers train; those that are in time then sum their updates in a ring, in the order of clients. Each of 2(N − 1)
    steps takes as long as the slowest of its N links needs for a chunk, of which there are N. The outcome is at all
    peers when the last step ends.

    Attributes:
        moved_bytes: bytes that all peers together sent in the last round.

    Args:
        fleet: fleet of the peers that train, without links: nothing is sent to a coordinator.
        clients: the same peers with their links, over which the ring sums.
        message: format of clients' messages.
    """

    def __init__(self, fleet: SimulatedFleet, clients: SimulatedClients, message: Format) -> None:
        super().__init__(fleet, message)
        self._clients = clients
        self.moved_bytes = 0

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Let peers train: each has the model already."""
        self.moved_bytes = 0
        self._fleet.dispatch(tasks)

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        """The sum of all updates that are in time, as one answer; failures pass through."""
        updates = []
        # The fleet's clock does not know of the rings' time.
        for answer in self._fleet.collect(until - self._passed_s, enough):
            if answer.problem:
                yield answer
            else:
                updates.append(answer)
        if updates:
            # Sorted, so that the ring, and with it the time, does not depend on who came first.
            peers = in_order(chain.from_iterable(answer.clients for answer in updates))
            self.moved_bytes += ring_bytes(self._message, len(peers))
            self._passed_s += self._ring_s(peers)
            yield summed(updates, sum(self._message.summed_sizes), size_bytes=0, more_bytes_down=0)

    def _ring_s(self, peers: Sequence[ClientId]) -> float:
        """Seconds that a ring of these peers takes, in this order."""
        if len(peers) == 1:
            return 0.0
        chunk_bytes = ring_bytes(self._message, len(peers)) / (2 * (len(peers) - 1) * len(peers))
        devices = [self._clients.device_of(peer) for peer in peers]
        steps_s = [
            max(one.latency_s, after.latency_s) + chunk_bytes / min(one.up_bytes_per_s, after.down_bytes_per_s)
            for one, after in zip(devices, [*devices[1:], devices[0]], strict=True)
        ]
        return 2 * (len(peers) - 1) * max(steps_s)
