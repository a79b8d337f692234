"""Contract of stages: changes of clients' updates before they are encoded, and of their mean.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fed.compression.codec import Draw
from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch

__all__ = ["Stage", "check_stage"]


@dataclass(frozen=True, kw_only=True)
class Stage(Hyperparameters):
    """Change of clients' updates, and of their mean, such as clipping and noise; one that overrides nothing is none.

    A row of updates is a client's whole message: the parts that the algorithm reports, then the update of the float
    buffers. Without a coordinator it is what a peer's local steps have added to its model. A row depends on itself and
    on its client's random stream alone, so that a client has the same bits in a group, alone, and on a node.

    Attributes:
        changes_updates: the class overrides :meth:`change_updates`.
        changes_mean: the class overrides :meth:`change_mean`.
        acts_alone: True if the mean is changed in rounds in which no update counts, too. It is 0 there, and the model
            moves by what the stage makes of it.
    """

    changes_updates: ClassVar[bool] = False
    changes_mean: ClassVar[bool] = False
    acts_alone: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.changes_updates = cls.change_updates is not Stage.change_updates
        cls.changes_mean = cls.change_mean is not Stage.change_mean

    def needs(self) -> Sequence[Term]:
        """Clients that send something; a coordinator, where the mean is changed."""
        features = [Feature.MESSAGES, *([Feature.REPORTS] if self.changes_mean else [])]
        return [Term(feature, "set stages to null") for feature in features]

    def change_updates(self, update_KM: Tensor, draw: Draw) -> Tensor:
        """Updates in place of those that the stage before has made, [K, M] in float64.

        Args:
            update_KM: finite rows, which stay as they are.
            draw: the random streams of this stage; row k is ``draw.clients[k]``'s.
        """
        return update_KM

    def change_mean(self, mean_M: Tensor, clients: int, draw: Draw) -> Tensor:
        """Mean in place of the one that the stage before has made, [M] in float64.

        Args:
            mean_M: the weighted mean of the updates that count, which stays as it is.
            clients: |S| ≥ 0, the number of clients in it.
            draw: the random streams of this stage, of one row.
        """
        return mean_M


def check_stage(stage: Stage, numbers: int) -> None:
    """Change updates of zeros, so that a stage that breaks its contract is named before the run.

    Args:
        stage: stage that an experiment has made.
        numbers: M ≥ 0 of a message.

    Raises:
        InvalidExperiment: if the stage fails, or gives other rows.
    """
    name = type(stage).__name__
    # Zeros, for a stage of the user's must not depend on the values to give rows of the right shape.
    zeros_1M = torch.zeros(1, numbers, dtype=torch.float64)
    draw = Draw(Streams(0), [1], [0], "stage")
    try:
        made = {
            "updates": (stage.change_updates(zeros_1M.clone(), draw), zeros_1M),
            "mean": (stage.change_mean(zeros_1M[0].clone(), 1, draw), zeros_1M[0]),
        }
        if stage.acts_alone:
            made["mean of nobody"] = stage.change_mean(zeros_1M[0].clone(), 0, draw), zeros_1M[0]
    except Exception as error:
        raise InvalidExperiment(
            f"stages' {name} must change {numbers} zeros, got {type(error).__name__}: {error}: correct {name}"
        ) from error
    for what, (changed, given) in made.items():
        said = _described(changed)
        expected = _described(given)
        if said != expected:
            raise InvalidExperiment(f"stages' {name} must give the {what} as {expected}, got {said}: correct {name}")


def _described(rows: object) -> str:
    if not isinstance(rows, Tensor):
        return type(rows).__name__
    return f"{str(rows.dtype).removeprefix('torch.')} {[*rows.shape]}"
