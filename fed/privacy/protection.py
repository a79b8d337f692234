"""Protection of clients' messages: the clip, and noise of the client's own.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fed.errors import InvalidPayload
from fed.privacy.clipping import clipped, grid_step, mean_of_clipped, were_short
from fed.privacy.noise import NoiseSource, gaussian_units
from fed.vectors.tensors import Tensor, torch

__all__ = ["Protection"]


@dataclass(frozen=True)
class Protection:
    r"""Protection of a client's whole message before it is encoded.

    .. math:: u ← u \min(1, \tfrac{C}{‖u‖}) + N(0, z² C² I)

    Where the clip moves from round to round, the number b − ½ follows a message: b is 1 where it was not clipped.

    Args:
        clip: C > 0, largest L2 norm of a message; None: each task says it.
        noise_multiplier: z ≥ 0; 0 where the client adds no noise.
        source: source of the noise; None where there is none.
    """

    clip: float | None
    noise_multiplier: float = 0.0
    source: NoiseSource | None = None

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
            clip: C of the round, where it moves.

        Raises:
            InvalidPayload: if it moves, and the task does not say it.
        """
        if self.clip is None:
            clip = _told(clip)
            return torch.cat([clipped(update_KM, clip), were_short(update_KM, clip)], 1)
        clipped_KM = clipped(update_KM, self.clip)
        if self.source is None:
            return clipped_KM
        step = grid_step(self.clip)
        deviation = self.noise_multiplier * self.clip / step
        numbers = update_KM.shape[1]
        for row, (client, number) in enumerate(zip(clients, rounds, strict=True)):
            generator = self.source.generator("of a client", client, number, repeats[row] if repeats else 0)
            noise_M = gaussian_units(generator, numbers, deviation)
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
            clip: C of the round, where it moves.
        """
        if self.clip is not None:
            return mean_of_clipped(update_KM, self.clip)
        clip = _told(clip)
        return torch.cat([mean_of_clipped(update_KM, clip), were_short(update_KM, clip).mean(0)])


def _told(clip: float | None) -> float:
    """The clip that a task says."""
    if clip is None or not 0 < clip < math.inf:
        raise InvalidPayload(f"a task must say the round's clip, above 0, under privacy.clip adaptive, got {clip}")
    return clip
