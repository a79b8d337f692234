"""Context of a client's local training: contents of a task beside the model, and their use by a rule.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from fed.aggregators.base import Broadcast, LocalRule
from fed.aggregators.client_side import each_part
from fed.clients.data import ClientId
from fed.vectors.tensors import Tensor, torch

__all__ = ["LocalContext"]


class LocalContext(NamedTuple):
    """Context of local training, of one client or of a group.

    Args:
        client_state: state of the client for the rule, a named tuple of tensors, of a group [K, ·] each; or None.
        broadcast: tensors that the rule sent beside the model.
        anchor_P: the model that the rule calls x, of a group one or [K, P]; None: the model where training starts.
        lr: step size, > 0; None: the section's.
        steps: number of steps of each client, None where the section or the phase decides; empty: it decides for all.
        client: id of the client, where it trains alone.
        round: number of the task's round, from 1, where it trains alone.
    """

    client_state: Any = None
    broadcast: Broadcast = ()
    anchor_P: Tensor | None = None
    lr: float | None = None
    steps: tuple[int | None, ...] = ()
    client: ClientId = 0
    round: int = 1

    def of(self, rows: int | slice | list[int]) -> "LocalContext":
        """Context of one client of the group, or of some, all with the group's step counts."""
        anchor_P = self.anchor_P if self.anchor_P is None or self.anchor_P.ndim == 1 else self.anchor_P[rows]
        return self._replace(client_state=each_part(self.client_state, itemgetter(rows)), anchor_P=anchor_P)

    def spread(self, spread: Callable[[Tensor], Tensor], began_Q: Tensor) -> "LocalContext":
        """Context in the form in which a trainer holds parameters.

        Args:
            spread: vector → the vector in that form.
            began_Q: parameters from which training starts, in that form: the anchor, unless there is another.
        """
        state = each_part(self.client_state, spread)
        broadcast = tuple(map(spread, self.broadcast))
        anchor_Q = began_Q.clone() if self.anchor_P is None else spread(self.anchor_P)  # training moves in place
        return self._replace(client_state=state, broadcast=broadcast, anchor_P=anchor_Q)

    def corrected(self, rule: LocalRule, gradient_Q: Tensor, x_Q: Tensor, shared: int) -> Tensor:
        """Gradient [Q] or [K, Q] as the rule corrects it; its last numbers, of parameters that are not shared, stay.

        Args:
            rule: local rule of the algorithm.
            gradient_Q: gradient of the loss.
            x_Q: the parameters.
            shared: the number of first parameters that the rule corrects.
        """
        assert self.anchor_P is not None
        if gradient_Q.shape[-1] == shared:
            return rule.correct(gradient_Q, x_Q, self.anchor_P, self.client_state, self.broadcast)
        gradient_P = gradient_Q[..., :shared]
        x_P = x_Q[..., :shared]
        corrected = rule.correct(gradient_P, x_P, self.anchor_P, self.client_state, self.broadcast)
        return torch.cat([corrected, gradient_Q[..., shared:]], -1)
