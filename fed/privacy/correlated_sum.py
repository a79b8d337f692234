"""Noise on the sums of clients' messages that is correlated over rounds, so that the model carries little of it.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fed.errors import InvalidCheckpoint, RunFailed
from fed.privacy.matrix_mechanism import MatrixMechanism
from fed.privacy.noisy_sum import NoisySum
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor, torch

__all__ = ["CorrelatedSum"]

_SHOWN = 8  # coefficients in a checkpoint: others of these are another mechanism
_CLOSE = 1e-6  # another machine finds the same coefficients but for rounding


@dataclass(frozen=True, eq=False)
class CorrelatedSum(NoisySum):
    r"""The mean of a cohort with the noise that a matrix mechanism prescribes for its round.

    .. math:: \frac{1}{m} \left( \sum_{k ∈ S} u_k + (C^{-1} z)_t \right), \qquad z_t ∼ N(0, z² C² I)

    The sum of the first t rounds then carries (B z)_t. Noise is drawn once a round, also where nobody has replied, and
    what correlates it is kept in float64, before it is rounded onto the grid. Whoever reads what is kept, in the
    coordinator's memory or in its checkpoints, can take noise off again.

    Args:
        mechanism: matrix mechanism.
        rounds: number of rounds that it is made for.
    """

    mechanism: MatrixMechanism
    rounds: int
    _kept: dict[str, Any] = field(default_factory=lambda: {"number": 0, "rows_DM": None, "before_DM": None}, init=False)

    def noise_units(self, numbers: int, number: int, attempt: int = 0) -> Tensor:
        """Row (C⁻¹ z)_t, in whole steps of the grid [M].

        Args:
            numbers: M.
            number: t, number of the round, from 1.
            attempt: number of other sums that the round has released before; nothing of them is handed out again.

        Raises:
            RunFailed: if it does not follow the round before, or is beyond the last.
        """
        if attempt and number == self._kept["number"]:
            self._kept["rows_DM"][self.mechanism.changed_rows(number)] = self._kept["before_DM"]
            self._kept["number"] = number - 1
        if number != self._kept["number"] + 1 or number > self.rounds:
            raise RunFailed(
                f"the noise of dp_ftrl must be drawn once for each of its {self.rounds} rounds, one after the other, "
                f"got round {number} after round {self._kept['number']}: begin a new run"
            )
        if self._kept["rows_DM"] is None:
            self._kept["rows_DM"] = torch.zeros(self.mechanism.rows, numbers, dtype=torch.float64)
        self._kept["before_DM"] = self._kept["rows_DM"][self.mechanism.changed_rows(number)].clone()
        generator = self.source.generator("of the sum", number, *([attempt] if attempt else []))
        noise_M = torch.from_numpy(generator.standard_normal(numbers)).mul_(self.deviation)
        correlated_M = self.mechanism.step(self._kept["rows_DM"], noise_M, number)
        self._kept["number"] = number
        return correlated_M.round_()

    def state(self) -> Tree:
        """State for a checkpoint: the last round, the rows that are kept, and the first coefficients of C."""
        rows_DM = self._kept["rows_DM"]
        return {
            "number": self._kept["number"],
            "rows": None if rows_DM is None else rows_DM.clone(),  # the next round changes them in place
            "column": self.mechanism.column(self.rounds)[:_SHOWN].tolist(),
        }

    def restore(self, state: Any) -> None:
        """Resume from what :meth:`state` wrote down.

        Raises:
            InvalidCheckpoint: if it is of another mechanism.
        """
        column = self.mechanism.column(self.rounds)[:_SHOWN]
        if len(column) != len(state["column"]) or not np.allclose(column, state["column"], rtol=0, atol=_CLOSE):
            raise InvalidCheckpoint(
                "the checkpoint's noise is correlated by another mechanism than that of dp_ftrl now: resume with the "
                "mechanism, the rounds and the participation that the run began with"
            )
        self._kept.update(number=state["number"], rows_DM=None if state["rows"] is None else state["rows"].clone())
