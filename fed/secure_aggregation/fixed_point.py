"""Fixed point: clients' messages as integers modulo 2ᴿ, whose sum the coordinator reads.

A lane is an integer of R bits. A message's M numbers, times the client's weight, have one lane each. The weight has
the next. Then come, in digits with the lowest first, the number of samples (54 bits), the loss times the samples in
units of 2⁻¹⁶ plus 2⁶³ (64 bits), the number of clipped coordinates (54 bits), and 1 if the weight was capped (1 bit). A
digit has as many bits, 32 at most, as leave the sum of all clients' digits within a lane.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fed.errors import InvalidExperiment, InvalidInput, InvalidPayload
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.vectors.tensors import Tensor, torch

__all__ = ["ClientNumbers", "FixedPoint", "Quantised", "SecureSum", "SumOfClients"]

_MOST_LEVELS = 2**40  # beyond them float64 has too few bits left to round by chance
_MOST_SAMPLES = 2**53
_COUNT_BITS = 54  # of numbers of samples, and of clipped coordinates
_LOSS_BITS = 64
_LOSS_UNIT = 2.0**-16
_LARGEST_LOSS = 2.0**46  # of a client's loss times its samples: in units of 2⁻¹⁶ below 2⁶³
# Without any number of a client, since the sentence may leave it.
_TOO_LARGE = "training loss times its samples is beyond the range of the sum, 7e13: scale the loss"


class ClientNumbers(NamedTuple):
    """Numbers of K clients that are summed beside their messages.

    Args:
        weights: weight of each client, a whole number ≥ 0.
        samples: number of samples of each client, from 0 to 2⁵³.
        losses: mean training loss of each client; its absolute value times the samples is below 2⁴⁶.
    """

    weights: Sequence[float]
    samples: Sequence[int]
    losses: Sequence[float]


class Quantised(NamedTuple):
    """Messages of K clients in fixed point.

    Args:
        lanes: K rows of signed integers of R bits.
        values_KM: the clipped and rounded messages, without weights, in float64.
    """

    lanes: Tensor
    values_KM: Tensor


class SumOfClients(NamedTuple):
    """Result of a session.

    Args:
        mean_M: the weighted mean of the messages, in float64.
        clients: the number of clients in it.
        weight: the sum of their weights.
        samples: the sum of their samples.
        train_loss: the mean of their losses, weighted by samples.
        clipped: the number of coordinates that were clipped, of all clients together.
        capped: the number of clients whose weight was capped.
    """

    mean_M: Tensor
    clients: int
    weight: int
    samples: int
    train_loss: float
    clipped: int
    capped: int


@dataclass(frozen=True)
class FixedPoint:
    r"""Numbers in fixed point, with a public clip C for each part of a message.

    .. math::
        L = ⌊\frac{2^{R-1} - 1}{n \, w_\max}⌋, \qquad
        q = \left⌊ \frac{L}{C} \operatorname{clip}(x, ±C) + u \right⌋, \quad u \sim U[0, 1), \qquad
        \frac{\sum_i w_i x_i}{\sum_i w_i} ≈ \frac{C}{L} \frac{\sum_i w_i q_i}{\sum_i w_i}

    L is 2⁴⁰ at most. The rounding is unbiased and moves a number, and so a mean, by less than C/L. The sum of n
    clients' lanes stays within ±(2ᴿ⁻¹ − 1), so that it never wraps.

    Args:
        bits: R, the bits of a lane: 16, 32 or 64.
        parts: number of values in each part of a message.
        clips: C > 0, the clip of each part.
        most_clients: n, the largest number of clients in a session.
        max_weight: w_max ≥ 1, the largest weight; larger ones are capped.
        noise: clip and noise of each message under differential privacy, in the place of the parts' clips and of u;
            None without.

    Raises:
        InvalidExperiment: if so many clients with such weights leave no level.

    Example:
        >>> fixed = FixedPoint(32, (2,), (8.0,), most_clients=10, max_weight=1)
        >>> fixed.levels, fixed.error_bounds
        (214748364, (3.725290312339702e-08,))
    """

    bits: int
    parts: tuple[int, ...]
    clips: tuple[float, ...]
    most_clients: int
    max_weight: int = 1
    noise: LaneNoise | None = None

    def __post_init__(self) -> None:
        """Check that there is a level."""
        if not self.levels:
            raise InvalidExperiment(
                f"secure_aggregation: {self.most_clients} clients of weight {self.max_weight} do not fit into "
                f"{self.bits} bits: raise bits, or lower max_weight"
            )
        if self.noise is not None and not self.noise.fits(self.l2_units):
            raise InvalidExperiment(
                f"secure_aggregation: the noise of {self.most_clients} clients leaves no room for their messages in "
                f"{self.bits} bits: raise bits, or lower privacy.noise_multiplier"
            )

    @cached_property
    def levels(self) -> int:
        """L, the number of levels on either side of 0."""
        largest = (1 << (self.bits - 1)) - 1
        return min(largest // (self.most_clients * self.max_weight), _MOST_LEVELS)

    @cached_property
    def l2_units(self) -> float:
        """Δ₂, the largest L2 norm of a message in units, with its bit, under differential privacy."""
        assert self.noise is not None
        return self.noise.l2_units(self.levels, self.most_clients)

    @property
    def l1_units(self) -> float:
        """Δ₁, the largest L1 norm of a message in units, whose numbers are whole."""
        return min(math.sqrt(self.numbers) * self.l2_units, self.l2_units**2)

    @property
    def error_bounds(self) -> tuple[float, ...]:
        """C/L of each part: the mean differs from that of the clipped messages by less than this."""
        if self.noise is not None:
            return (self.noise.clip / self.noise.clip_units(self.l2_units),) * len(self.clips)
        return tuple(clip / self.levels for clip in self.clips)

    @property
    def numbers(self) -> int:
        """M, the numbers of a message."""
        return sum(self.parts)

    @cached_property
    def lanes(self) -> int:
        """Number of lanes of a message, with those of the client's numbers."""
        return self.numbers + 1 + sum(self._digits(bits) for bits in self._beside)

    @property
    def dtype(self) -> "torch.dtype":
        """Type of a lane on the wire: a signed integer of R bits, which wraps modulo 2ᴿ."""
        return {16: torch.int16, 32: torch.int32, 64: torch.int64}[self.bits]

    def quantise(
        self, message_KM: Tensor, beside: ClientNumbers, generators: Sequence[np.random.Generator]
    ) -> Quantised:
        """Messages as lanes.

        Args:
            message_KM: finite numbers of any floating type.
            beside: numbers of the clients that are summed beside their messages.
            generators: random generator of each client, which draws u, or its noise.

        Raises:
            InvalidInput: if a number of a message is not finite.
            InvalidExperiment: if one of the clients' numbers is out of its range.
        """
        if not torch.isfinite(message_KM).all():
            # A constant: a client's numbers belong in no sentence.
            raise InvalidInput("all numbers of a message must be finite, got NaN or infinity")
        rows = [
            self._row(message_M, weight, samples, loss, generator)
            for message_M, weight, samples, loss, generator in zip(message_KM, *beside, generators, strict=True)
        ]
        lanes, values = zip(*rows, strict=True)
        return Quantised(torch.stack(lanes), torch.stack(values))

    def nothing(self, generator: np.random.Generator) -> Tensor:
        """Lanes of a client without a message, such as one whose training diverged.

        Weight and numbers are 0. Under differential privacy it weighs 1, as all do, and adds its noise.

        Args:
            generator: random generator of the client's noise.
        """
        zeros_1M = torch.zeros(1, self.numbers)
        is_private = self.noise is not None
        beside = ClientNumbers(weights=(float(is_private),), samples=(int(is_private),), losses=(0.0,))
        return self.quantise(zeros_1M, beside, [generator]).lanes[0]

    def adds_nothing(self, lanes: Tensor) -> bool:
        """True if a message adds nothing of its client's data to a sum: all its numbers are 0, and its weight is.

        Under differential privacy all clients weigh 1, and the weight is not looked at.

        Args:
            lanes: the message, before it is masked.
        """
        weighs_by_data = self.noise is None and bool(lanes[self.numbers])
        return not weighs_by_data and not lanes[: self.numbers].any()

    def too_large_losses(self, beside: ClientNumbers) -> dict[int, str]:
        """Row → why its client's training loss does not fit into its lanes."""
        losses = enumerate(zip(beside.losses, beside.samples, strict=True))
        return {row: f"its {_TOO_LARGE}" for row, (loss, samples) in losses if not _fits(loss, samples)}

    def read(self, total: "SecureSum") -> SumOfClients:
        """Mean and sums of the clients, from the sum of their lanes.

        Args:
            total: the unmasked sum.

        Raises:
            InvalidPayload: if its weight or its number of samples is impossible.
        """
        lanes = total.lanes.view(self._signed)
        if self.noise is not None:
            return self._read_private(self.noise, lanes[: self.numbers], total.clients)
        weight = int(lanes[self.numbers])
        samples, loss, clipped, capped = self._read_beside(lanes[self.numbers + 1 :])
        # Each client has added 2⁶³, since digits have no sign.
        loss -= total.clients << (_LOSS_BITS - 1)
        if not weight and not samples:
            raise InvalidPayload(
                f"none of the {total.clients} clients has added anything: training has diverged or failed on all of "
                "them, and their logs have the reasons"
            )
        if not (0 < weight <= total.clients * self.max_weight and samples > 0):
            raise InvalidPayload(
                f"the sum of {total.clients} clients must have a weight from 1 to {total.clients * self.max_weight} "
                f"and samples, got {weight} and {samples}: a client has sent lanes that are no message"
            )
        units_M = torch.from_numpy(lanes[: self.numbers].astype(np.float64))
        mean_M = units_M.mul_(self._steps_M).div_(weight)
        return SumOfClients(
            mean_M=mean_M,
            clients=total.clients,
            weight=weight,
            samples=samples,
            train_loss=loss * _LOSS_UNIT / samples,
            clipped=clipped,
            capped=capped,
        )

    def _read_private(self, noise: LaneNoise, lanes_M: np.ndarray, clients: int) -> SumOfClients:
        """Mean under differential privacy, where each client weighs 1: by its word one could outweigh the noise."""
        units_M = torch.from_numpy(noise.folded(lanes_M, self.l2_units, self.most_clients))
        return SumOfClients(
            mean_M=units_M.mul_(self._steps_M).div_(clients),
            clients=clients,
            weight=clients,
            samples=clients,
            train_loss=0.0,
            clipped=0,
            capped=0,
        )

    def _row(
        self, message_M: Tensor, weight: float, samples: int, loss: float, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        if not (weight >= 0 and float(weight).is_integer()):
            raise InvalidExperiment(
                f"a client's weight must be a whole number under secure_aggregation, got {weight}: correct the "
                "algorithm's report"
            )
        if not 0 <= samples <= _MOST_SAMPLES:
            raise InvalidExperiment(f"a client must have at most {_MOST_SAMPLES} samples, got {samples}")
        if not _fits(loss, samples):
            raise InvalidExperiment(f"a client's {_TOO_LARGE}")
        numbers_M = message_M.double().numpy()
        counted = min(int(weight), self.max_weight)
        if self.noise is not None:
            units_M = self.noise.units(numbers_M, self.l2_units, generator)
            return self._lanes(units_M, counted, samples=samples, loss=loss, clipped=0, capped=0)
        clipped_M = np.clip(numbers_M, -self._clips_M, self._clips_M)
        # floor(x + u) is right on average: rounding to the nearest would bias the mean of small updates to 0.
        units_M = np.floor(clipped_M * (self.levels / self._clips_M) + generator.random(len(numbers_M)))
        np.clip(units_M, -self.levels, self.levels, out=units_M)  # a product may be rounded beyond the last level
        return self._lanes(
            units_M,
            counted,
            samples=samples,
            loss=loss,
            clipped=int(np.count_nonzero(clipped_M != numbers_M)),
            capped=int(weight > self.max_weight),
        )

    def _lanes(
        self, units_M: np.ndarray, counted: int, *, samples: int, loss: float, clipped: int, capped: int
    ) -> tuple[Tensor, Tensor]:
        """Lanes of a message in units, and the numbers that they stand for."""
        beside = (samples, round(loss * samples / _LOSS_UNIT) + (1 << (_LOSS_BITS - 1)), clipped, capped)
        lanes = np.empty(self.lanes, self._signed)
        # Modulo 2ᴿ: noise of one client may be larger than a lane is wide.
        lanes[: self.numbers] = (units_M.astype(np.int64) * counted).astype(self._signed)
        lanes[self.numbers] = counted
        lanes[self.numbers + 1 :] = [*self._written(beside)]
        return torch.from_numpy(lanes), torch.from_numpy(units_M).double().mul_(self._steps_M)

    def _written(self, beside: Sequence[int]) -> list[int]:
        """Digits of a client's numbers, lowest first."""
        base = 1 << self._digit_bits
        return [
            number >> (self._digit_bits * place) & (base - 1)
            for number, bits in zip(beside, self._beside, strict=True)
            for place in range(self._digits(bits))
        ]

    def _read_beside(self, lanes: np.ndarray) -> list[int]:
        """Sums of the clients' numbers, from the sums of their digits."""
        digits = iter(lanes.view(f"u{self.bits // 8}").tolist())
        return [
            sum(next(digits) << (self._digit_bits * place) for place in range(self._digits(bits)))
            for bits in self._beside
        ]

    @property
    def _beside(self) -> tuple[int, ...]:
        """Bits of the numbers of samples, the loss, the clipped coordinates and the capped weight."""
        return _COUNT_BITS, _LOSS_BITS, _COUNT_BITS, 1

    @cached_property
    def _digit_bits(self) -> int:
        """Bits of a digit: the sum of n clients' digits stays within a lane."""
        return min(self.bits - math.ceil(math.log2(self.most_clients + 1)), 32)

    def _digits(self, bits: int) -> int:
        return -(-bits // self._digit_bits)

    @property
    def _signed(self) -> np.dtype:
        return np.dtype(f"i{self.bits // 8}")

    @cached_property
    def _clips_M(self) -> np.ndarray:  # noqa: N802  # a shape suffix
        """C at each number."""
        return np.repeat(self.clips, self.parts)

    @cached_property
    def _steps_M(self) -> Tensor:  # noqa: N802  # a shape suffix
        """Value of a unit at each number: C/L, or under differential privacy C/Δ₂; of a bit ½ is k units."""
        if self.noise is None:
            return torch.from_numpy(self._clips_M / self.levels)
        value = self.noise.clip / self.noise.clip_units(self.l2_units)
        steps_M = torch.full((self.numbers,), value, dtype=torch.float64)
        if half_bit := self.noise.bit_units(self.l2_units):
            steps_M[-1] = 0.5 / half_bit
        return steps_M


class SecureSum:
    """A commutative monoid over lanes: sums modulo 2ᴿ, of masked messages or of plain ones.

    Args:
        bits: R, the bits of a lane.
        lanes: number of lanes of a message.

    Attributes:
        clients: the number of clients whose messages are in the sum.
        lanes: the sum, unsigned integers of R bits.

    Example:
        >>> total = SecureSum(16, 1)
        >>> total.add(torch.tensor([30000], dtype=torch.int16)), total.add(torch.tensor([30000], dtype=torch.int16))
        (None, None)
        >>> total.lanes, total.clients
        (array([60000], dtype=uint16), 2)
    """

    def __init__(self, bits: int, lanes: int) -> None:
        self.clients = 0
        self.lanes = np.zeros(lanes, np.dtype(f"u{bits // 8}"))

    def add(self, lanes: Tensor, clients: int = 1) -> None:
        """Add a message, or the sum of several.

        Args:
            lanes: signed integers of R bits.
            clients: the number of clients in it.

        Raises:
            InvalidPayload: if the type or the number of lanes differs.
        """
        numbers = lanes.numpy()
        if numbers.shape != self.lanes.shape or numbers.itemsize != self.lanes.itemsize or numbers.dtype.kind != "i":
            raise InvalidPayload(
                f"a masked message must have {len(self.lanes)} integers of {8 * self.lanes.itemsize} bits, got "
                f"{[*numbers.shape]} of {numbers.dtype}"
            )
        self.lanes += numbers.view(self.lanes.dtype)
        self.clients += clients

    def merge(self, other: "SecureSum") -> None:
        """Add all that another sum has added.

        Raises:
            InvalidPayload: if the type or the number of lanes differs.
        """
        self.add(torch.from_numpy(other.lanes.view(f"i{other.lanes.itemsize}")), other.clients)


def _fits(loss: float, samples: int) -> bool:
    return abs(loss) * samples < _LARGEST_LOSS
