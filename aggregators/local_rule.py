"""Changes that an algorithm makes to the local training of its clients.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import PositiveInt

from fed.aggregators.users_methods import explain_errors
from fed.config.experiment import Local
from fed.vectors.tensors import Tensor

__all__ = ["Broadcast", "LocalRule", "Phase"]

Broadcast: TypeAlias = tuple[Tensor, ...]
"""Tensors that go out to clients beside the model, [P] each where local steps use them."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a client's local training; the next phase starts from its end, with an optimizer of its own.

    Args:
        rule: local rule that corrects the gradient of the shared parameters or adds a term to the loss; None for
            neither.
        trains: parameters that move: all, or only the shared or the private ones.
        epochs: passes over the client's data, ≥ 1; None: as the section local says.
        is_personal: True if the phase trains the model that a client keeps for itself, not the one that it reports.
            The model of a client's first task is where its own model begins.
    """

    rule: "LocalRule | None" = None
    trains: Literal["all", "shared", "private"] = "all"
    epochs: PositiveInt | None = None
    is_personal: bool = False

    def local(self, local: Local) -> Local:
        """The experiment's section ``local`` with this phase's epochs."""
        # The key steps is removed, since it would count in place of the phase's epochs.
        return local if self.epochs is None else local.model_copy(update={"epochs": self.epochs, "steps": None})

    def steps(self, steps: int | None) -> int | None:
        """Number of steps in this phase; None: as many as :meth:`local` says."""
        return steps if self.epochs is None else None

    def moves(self, shared: int) -> slice:
        """Mask of the numbers of a parameter vector that move; its first ones are the ``shared`` parameters."""
        return {"all": slice(None), "shared": slice(shared), "private": slice(shared, None)}[self.trains]


class LocalRule:
    """Change of a client's local steps by an algorithm; one that overrides nothing leaves them plain.

    Rules compute elementwise in flat space, so that one client's [P] and many clients' [K, P] use the same code.
    """

    corrects: ClassVar[bool] = False
    """True if the class overrides :meth:`correct`."""
    contrasts: ClassVar[bool] = False
    """True if the class overrides :meth:`penalty`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        explain_errors(cls)
        cls.corrects = cls.correct is not LocalRule.correct
        cls.contrasts = cls.penalty is not LocalRule.penalty

    def correct(
        self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, client_state: Any, broadcast: Broadcast
    ) -> Tensor:
        """The gradient that the optimizer gets.

        Args:
            gradient_P: gradient of the client's loss at x_P.
            x_P: the client's model.
            anchor_P: the model that the task started from.
            client_state: state that the client keeps from task to task; its vectors have the shape of x_P.
            broadcast: tensors that came with the task beside the model.
        """
        return gradient_P

    def penalty(self, features_BF: Tensor, server_BF: Tensor, previous_BF: Tensor) -> Tensor:
        """Scalar added to a batch's loss, from the input of the model's last linear layer.

        An algorithm that has one keeps ``previous_P``, another model of the same parameters, as its client state.

        Args:
            features_BF: input of the layer in the model that is trained.
            server_BF: the same in the model that came with the task, which stays as it is.
            previous_BF: the same in the model that the client keeps.
        """
        return features_BF.new_zeros(())
