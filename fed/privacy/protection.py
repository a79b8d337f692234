"""Protection of clients' messages: the clip, and noise of the client's own.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fed.errors import InvalidPayload
from fed.privacy.clipping import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    bits_behind,
    clipped,
    grid_step,
    mean_of_clipped,
)
from fed.privacy.noise import NoiseSource, deviations_in_steps, gaussian_units
from fed.vectors.tensors import Tensor, torch

__all__ = ["Protection", "told_clip"]


@dataclass(frozen=True)
class Protection:
    r"""Protection of a client's whole message before it is encoded.

    .. math:: u ← u \min(1, \tfrac{C}{‖u‖}) + N(0, z² C² I)

    Where the clip moves from round to round, a message is sent in units of the round's, so that C is 1, and the number
    b − ½ follows it: b is 1 where it was not clipped. One noise covers both, as
    :class:`fed.privacy.adaptive_clip.AdaptiveClip` says.

    Args:
        clip: C > 0, largest L2 norm of a message as it is sent.
        noise_multiplier: z ≥ 0; 0 where the client adds no noise.
        source: source of the noise; None where there is none.
        bit_weight: β > 0, weight of the bit where the clip moves; 0 where it does not.
    """

    clip: float
    noise_multiplier: float = 0.0
    source: NoiseSource | None = None
    bit_weight: float = 0.0

    def __call__(
        self,
        update_KM: Tensor,
        rounds: Sequence[int],
        clients: Sequence[int | str],
        repeats: Sequence[int] = (),
        clip: float | None = None,
    ) -> Tensor:
        """Messages as they may leave clients, in float64; with noise they are on the grid.

        Args:
            update_KM: messages of K clients, [K, M] in float64.
            rounds: the round of each row, from 1.
            clients: the client of each row.
            repeats: number of earlier tasks of each row's client in that round; empty: none had one.
            clip: clip of the round, where it moves.

        Raises:
            InvalidPayload: if it moves, and the task does not say it.
        """
        unit = self._unit(clip)
        clipped_KM = clipped(update_KM, self.clip, unit)
        if self.bit_weight:
            clipped_KM = torch.cat([clipped_KM, bits_behind(update_KM, unit)], 1)
        if self.source is None:
            return clipped_KM
        step = grid_step(self.clip)
        deviation, bit_deviation = deviations_in_steps(self.noise_multiplier, self.clip, self.bit_weight)
        numbers = clipped_KM.shape[1]
        for row, (client, number) in enumerate(zip(clients, rounds, strict=True)):
            generator = self.source.generator("of a client", client, number, repeats[row] if repeats else 0)
            noise_M = gaussian_units(generator, numbers, deviation, bit_deviation)
            clipped_KM[row] = clipped_KM[row].div_(step).round_().add_(noise_M).mul_(step)
        return clipped_KM

    @property
    def adds_noise(self) -> bool:
        """True if the client adds noise of its own."""
        return self.source is not None

    def mean(self, update_KM: Tensor, clip: float | None = None) -> Tensor:
        """The mean of the messages of clients that add no noise, without those messages.

        Args:
            update_KM: finite messages of K clients, [K, M] in float64.
            clip: clip of the round, where it moves.
        """
        unit = self._unit(clip)
        mean_M = mean_of_clipped(update_KM, self.clip, unit)
        return torch.cat([mean_M, bits_behind(update_KM, unit).mean(0)]) if self.bit_weight else mean_M

    def _unit(self, clip: float | None) -> float:
        """Value of 1 in a message."""
        return told_clip(clip) if self.bit_weight else 1.0


def told_clip(clip: float | None) -> float:
    """The round's clip that a task says, where it moves.

    Args:
        clip: clip of the task, untrusted; None where it says none.

    Raises:
        InvalidPayload: if no clip has such a value.
    """
    if clip is None or not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
        raise InvalidPayload(
            f"a task must say the round's clip, from {SMALLEST_CLIP:g} to {LARGEST_CLIP:g}, under privacy.clip "
            f"adaptive, got {clip}"
        )
    return clip
