"""How long a simulated client takes: time from the work it does and the bytes it moves."""

import math
from dataclasses import dataclass

__all__ = ["Device"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A client's hardware and connection; every simulated client has the default one.

    .. math:: t = 2 latency + bytes_{down} / down + samples / speed + bytes_{up} / up

    Args:
        samples_per_s: forward and backward passes over one sample in a second.
        down_bytes_per_s: towards the client; 5 MB/s is a common home connection's 40 Mbit/s.
        up_bytes_per_s: from the client; 1.25 MB/s is 10 Mbit/s.
        latency_s: of one message.

    Example:
        >>> round(Device().exchange_s(bytes_down=5_000_000, samples=1000, bytes_up=1_250_000), 9)
        3.1
    """

    samples_per_s: float = 1000.0
    down_bytes_per_s: float = 5e6
    up_bytes_per_s: float = 1.25e6
    latency_s: float = 0.05

    @classmethod
    def without_network(cls) -> "Device":
        """A device on which the data already are: nothing is sent."""
        return cls(down_bytes_per_s=math.inf, up_bytes_per_s=math.inf, latency_s=0.0)

    def exchange_s(self, *, bytes_down: int, samples: int, bytes_up: int) -> float:
        """Seconds from a task's dispatch to its answer's arrival."""
        down_s = self.latency_s + bytes_down / self.down_bytes_per_s
        up_s = self.latency_s + bytes_up / self.up_bytes_per_s
        return down_s + samples / self.samples_per_s + up_s

    def gossip_s(self, *, samples: int, bytes_each_way: int) -> float:
        """Seconds of a round among peers: the work, then models to and from all neighbours at once."""
        slower_bytes_per_s = min(self.down_bytes_per_s, self.up_bytes_per_s)
        moved_s = self.latency_s + bytes_each_way / slower_bytes_per_s if bytes_each_way else 0.0
        return samples / self.samples_per_s + moved_s
