"""Context of a client's local training: what a task brings beside the model, and its use by a rule.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from fed.aggregators.base import Broadcast, LocalRule
from fed.aggregators.client_side import each_part
from fed.vectors.tensors import Tensor, torch

__all__ = ["LocalContext"]


class LocalContext(NamedTuple):
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

    def of(self, rows: int | slice | list[int]) -> "LocalContext":
        """Context of one client of the group, or of some, all with the group's step counts."""
        anchor_P = self.anchor_P if self.anchor_P is None or self.anchor_P.ndim == 1 else self.anchor_P[rows]
        return self._replace(client_state=each_part(self.client_state, itemgetter(rows)), anchor_P=anchor_P)

    def spread(self, spread: Callable[[Tensor], Tensor], began_Q: Tensor) -> "LocalContext":
        """Context in the form in which a trainer holds parameters.

        Args:
            spread: puts a vector into that form.
            began_Q: where training starts, in that form: the anchor, unless there is another.
        """
        state, broadcast = each_part(self.client_state, spread), tuple(map(spread, self.broadcast))
        anchor_Q = began_Q.clone() if self.anchor_P is None else spread(self.anchor_P)  # training moves in place
        return self._replace(client_state=state, broadcast=broadcast, anchor_P=anchor_Q)

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
