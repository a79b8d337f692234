"""Protection of clients' messages: the clip, and noise of the client's own.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fed.privacy.clipping import clipped, grid_step
from fed.privacy.noise import NoiseSource, gaussian_units
from fed.vectors.tensors import Tensor

__all__ = ["Protection"]


@dataclass(frozen=True)
class Protection:
    r"""Protection of a client's whole message before it is encoded.

    .. math:: u ← u \min(1, \tfrac{C}{‖u‖}) + N(0, z² C² I)

    Args:
        clip: C > 0, largest L2 norm of a message.
        noise_multiplier: z ≥ 0; 0 where the client adds no noise.
        source: source of the noise; None where there is none.
    """

    clip: float
    noise_multiplier: float = 0.0
    source: NoiseSource | None = None

    def __call__(
        self, update_KM: Tensor, rounds: Sequence[int], clients: Sequence[int | str], repeats: Sequence[int] = ()
    ) -> Tensor:
        """Messages as they may leave clients, on the grid, in float64.

        Args:
            update_KM: messages of K clients, [K, M] in float64.
            rounds: the round of each row, from 1.
            clients: the client of each row.
            repeats: number of earlier tasks of each row's client in that round; empty: none had one.
        """
        clipped_KM = clipped(update_KM, self.clip)
        if self.source is None:
            return clipped_KM
        step = grid_step(self.clip)
        deviation = self.noise_multiplier * self.clip / step
        numbers = update_KM.shape[1]
        for row, (client, number) in enumerate(zip(clients, rounds, strict=True)):
            generator = self.source.generator("of a client", client, number, repeats[row] if repeats else 0)
            noise_M = gaussian_units(generator, numbers, deviation)
            clipped_KM[row] += noise_M.mul_(step)
        return clipped_KM
