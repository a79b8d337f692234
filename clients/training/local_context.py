"""Context of a client's local training: what a task brings beside the model, and its use by a rule.

Shapes: see :mod:`fed.layout`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fed.aggregators.base import Broadcast, LocalRule

__all__ = ["Given"]


class Given(NamedTuple):
    """Context of local training, of one client or of a group.

    Args:
        client_state: what the client keeps for the rule: a named tuple of tensors, of a group [K, ·] each; or None.
        broadcast: what the rule sent along.
        anchor_P: the model that the rule calls x, of a group one or [K, P], if it is not where training starts.
        lr: the step size, if it is not the section's.
        steps: number of steps of each client, None where it is as the section or the phase says; all are where empty.
    """

    client_state: Any = None
    broadcast: Broadcast = ()
    anchor_P: Tensor | None = None
    lr: float | None = None
    steps: tuple[int | None, ...] = ()

    def of_row(self, row: int) -> "Given":
        """Context of one client of the group."""
        state = self.client_state and type(self.client_state)(*(part[row] for part in self.client_state))
        anchor_P = self.anchor_P if self.anchor_P is None or self.anchor_P.ndim == 1 else self.anchor_P[row]
        return self._replace(client_state=state, anchor_P=anchor_P, steps=self.steps[row : row + 1])

    def corrected(self, rule: LocalRule, gradient_Q: Tensor, x_Q: Tensor, shared: int) -> Tensor:
        """Gradient [Q] or [K, Q] as the rule corrects it; its last numbers, of parameters that are not shared, stay.

        Args:
            rule: the algorithm's.
            gradient_Q: of the loss.
            x_Q: the parameters.
            shared: the number of first parameters that the rule corrects.
        """
        assert self.anchor_P is not None
        beside = self.anchor_P, self.client_state, self.broadcast
        if gradient_Q.shape[-1] == shared:
            return rule.correct(gradient_Q, x_Q, *beside)
        corrected = rule.correct(gradient_Q[..., :shared], x_Q[..., :shared], *beside)
        return torch.cat([corrected, gradient_Q[..., shared:]], -1)
