"""Simulated devices: compute speed, bandwidth, availability and failures of clients.

Time comes from the work that is done and the bytes that are moved. Nothing sleeps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fed.clients.data import ClientId
from fed.config.compatibility import Feature, Term
from fed.config.components import Component
from fed.config.hyperparameters import Hyperparameters
from fed.config.registry import AVAILABILITIES
from fed.errors import InvalidData
from fed.simulations.availability import Availability, Membership, Spells, of_trace, read_table
from fed.vectors.randomness import Streams

__all__ = ["Device", "Devices", "Lognormal", "Mobile", "OnSite", "TraceDevices", "UniformDevices"]

_Chance = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A client's hardware and connection.

    .. math:: t = 2 latency + bytes_{down} / down + samples / speed + bytes_{up} / up

    The connection is a common one of a home unless given: 40 Mbit/s down and 10 Mbit/s up.

    Args:
        samples_per_s: number of forward and backward passes over one sample in a second.
        down_bytes_per_s: bandwidth towards the client, in bytes a second.
        up_bytes_per_s: bandwidth from the client, in bytes a second.
        latency_s: seconds of latency of one message.

    Example:
        >>> round(Device().task_s(bytes_down=5_000_000, samples=1000, bytes_up=1_250_000), 9)
        3.1
    """

    samples_per_s: PositiveFloat = 1000.0
    down_bytes_per_s: PositiveFloat = 5e6
    up_bytes_per_s: PositiveFloat = 1.25e6
    latency_s: NonNegativeFloat = 0.05

    @classmethod
    def on_site(cls, samples_per_s: float) -> "Device":
        """Device that needs to send nothing."""
        links = {"down_bytes_per_s": math.inf, "up_bytes_per_s": math.inf, "latency_s": 0.0}
        return Device(samples_per_s=samples_per_s, **links)

    def task_s(self, *, bytes_down: int, samples: int, bytes_up: int) -> float:
        """Seconds from a task's dispatch to its answer's arrival.

        Args:
            bytes_down: size of the task's message.
            samples: number of samples trained on, each counted as often as it is seen.
            bytes_up: size of the answer's message.
        """
        down_s = self.latency_s + bytes_down / self.down_bytes_per_s
        up_s = self.latency_s + bytes_up / self.up_bytes_per_s
        return down_s + samples / self.samples_per_s + up_s

    def gossip_s(self, *, samples: int, bytes_each_way: int) -> float:
        """Seconds of a round among peers: local training, then models to and from all neighbours at once."""
        slower_bytes_per_s = min(self.down_bytes_per_s, self.up_bytes_per_s)
        # Both ways at once, so that the slower link decides.
        moved_s = self.latency_s + bytes_each_way / slower_bytes_per_s if bytes_each_way else 0.0
        return samples / self.samples_per_s + moved_s

    def samples_in(self, time_s: float, *, bytes_down: int, bytes_up: int) -> float:
        """Number of samples that it can train on and still answer in time; below 0: none.

        Args:
            time_s: seconds from the task's dispatch to the answer's arrival.
            bytes_down: size of the task's message.
            bytes_up: size of the answer's message.
        """
        moving_s = self.task_s(bytes_down=bytes_down, samples=0, bytes_up=bytes_up)
        return (time_s - moving_s) * self.samples_per_s


@dataclass(frozen=True, kw_only=True)
class Devices(Hyperparameters, ABC):
    """Devices of all clients.

    Args:
        availability: rule on the times at which clients are available; a client that becomes unavailable during a task
            has failed it.
        failure: probability that a task fails, at a time that is uniform over its length.
        interruption: probability that a client is cut off in its local steps, after a part of them that is uniform.
        joining_s: seconds over which clients register, each at a uniformly drawn time; 0: all at the beginning.
        staying_s: mean of the exponentially distributed seconds that a client stays before it leaves for good; for ever
            unless given.
    """

    availability: Annotated[Component, AVAILABILITIES] = field(default_factory=lambda: AVAILABILITIES.validate({}))
    failure: _Chance = 0.0
    interruption: Annotated[float, Field(ge=0, le=1)] = 0.0
    joining_s: NonNegativeFloat = 0.0
    staying_s: PositiveFloat | None = None

    def lacks(self) -> Sequence[Term]:
        """Fixed members, where clients register or leave during a run."""
        found = [(f"joining_s {self.joining_s}", "joining_s: 0.0")] if self.joining_s else []
        found += [(f"staying_s {self.staying_s}", "staying_s: null")] if self.staying_s is not None else []
        return [
            Term(Feature.FIXED_MEMBERS, f"write devices.{plain}", subject=f"devices.{subject}")
            for subject, plain in found
        ]

    @abstractmethod
    def device(self, client: ClientId, streams: Streams) -> Device:
        """Device of a client; the same whenever it is asked for."""

    def spells(self, client: ClientId, streams: Streams) -> Spells | None:
        """Availability of a client over time; None: always available."""
        spells = self._availability.of(client, streams)
        if self.are_members_for_ever:
            return spells
        joins_s, leaves_s = self.membership(client, streams)
        return Membership(joins_s, leaves_s, spells)

    def membership(self, client: ClientId, streams: Streams) -> tuple[float, float]:
        """Times at which a client registers, and at which it leaves for good."""
        joins, stays, *_ = streams.uniforms("membership", client)
        joins_s = joins * self.joining_s
        # The inverse of the exponential distribution; stays is below 1, so the logarithm is finite.
        stays_s = math.inf if self.staying_s is None else -self.staying_s * math.log1p(-stays)
        return joins_s, joins_s + stays_s

    @property
    def are_members_for_ever(self) -> bool:
        """True if no client registers or leaves during a run."""
        return self.joining_s == 0 and self.staying_s is None

    @property
    def are_always_there(self) -> bool:
        """True if every client is always available."""
        return self.are_members_for_ever and AVAILABILITIES.validate(self.availability).kind == "always"

    @cached_property
    def _availability(self) -> Availability:
        availability: Availability = AVAILABILITIES.validate(self.availability).make()
        return availability


@dataclass(frozen=True, kw_only=True)
class UniformDevices(Device, Devices):
    """All devices are alike."""

    def device(self, client: ClientId, streams: Streams) -> Device:  # noqa: D102
        return self


@dataclass(frozen=True, kw_only=True)
class OnSite(Devices):
    """One device where all the data are already: nothing is sent."""

    def device(self, client: ClientId, streams: Streams) -> Device:  # noqa: D102
        return Device.on_site(Device().samples_per_s)


@dataclass(frozen=True, kw_only=True)
class Lognormal(UniformDevices):
    r"""Devices differ by factors whose logarithm is normal; what is said of all is the median.

    .. math:: speed_i = speed \cdot e^{σ z_i}, \qquad down_i / down = up_i / up = e^{σ_b w_i}, \qquad z_i, w_i ∼ N(0, 1)

    Args:
        sigma: σ ≥ 0, the spread of speeds. With 1 the fastest tenth is 13 times as fast as the slowest tenth or more,
            with 1.5 it is 47 times.
        bandwidth_sigma: σ_b ≥ 0, the spread of both bandwidths alike.
    """

    sigma: NonNegativeFloat = 1.0
    bandwidth_sigma: NonNegativeFloat = 0.0

    def device(self, client: ClientId, streams: Streams) -> Device:  # noqa: D102
        # Drawn together in this order: a device does not depend on which of the two spreads is 0.
        z, w = streams.normals("device", client)
        factor = math.exp(self.bandwidth_sigma * w)
        return Device(
            samples_per_s=self.samples_per_s * math.exp(self.sigma * z),
            down_bytes_per_s=self.down_bytes_per_s * factor,
            up_bytes_per_s=self.up_bytes_per_s * factor,
            latency_s=self.latency_s,
        )


@dataclass(frozen=True, kw_only=True)
class Mobile(Lognormal):
    """Phones: devices and connections that differ by a factor of ten and more, available by night, and unreliable.

    The chance to fail is in the middle of the 6 to 10 % of phones that drop out of a round in Google's system, which
    also sees them come by night (Bonawitz et al. 2019, 1902.01046). Speeds and bandwidths are assumptions, of the width
    that public traces of phones have (Lai et al. 2022, 2105.11367): replace them by a trace of yours if you have one.
    """

    samples_per_s: PositiveFloat = 200.0
    down_bytes_per_s: PositiveFloat = 2e6
    up_bytes_per_s: PositiveFloat = 5e5
    latency_s: NonNegativeFloat = 0.1
    sigma: NonNegativeFloat = 1.0
    bandwidth_sigma: NonNegativeFloat = 1.0
    failure: _Chance = 0.08
    availability: Annotated[Component, AVAILABILITIES] = field(
        default_factory=lambda: AVAILABILITIES.validate({"kind": "daily"})
    )


@dataclass(frozen=True, kw_only=True)
class TraceDevices(Devices):
    """Devices from a file with the columns client, samples_per_s, down_bytes_per_s, up_bytes_per_s and latency_s.

    A client that the file names has its own device; any other draws one of those that it has.

    Args:
        path: path of the CSV file.

    Raises:
        InvalidData: if there is no such table, a number is out of range, or a client has two rows.
    """

    path: str

    def device(self, client: ClientId, streams: Streams) -> Device:  # noqa: D102
        return of_trace(self._devices, client, streams, "device")

    @cached_property
    def _devices(self) -> dict[str, Device]:
        devices: dict[str, Device] = {}
        for name, device in read_table(self.path, Device):
            if name in devices:
                raise InvalidData(f"{self.path} must have one row for each client, got two for client {name}")
            devices[name] = device
        return devices
