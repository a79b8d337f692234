"""A model with its loss as one module.

Shapes: see :mod:`fed.vectors.layout`.
"""

from fed.clients.scoring.measures import Loss
from fed.clients.training.reading import called
from fed.vectors.tensors import Tensor, nn
from fed.vectors.trees import Tree

__all__ = ["WithLoss"]


class WithLoss(nn.Module):
    """A model whose output is its loss, one tensor, whatever the model's own output is.

    Args:
        module: the model.
    """

    def __init__(self, module: "nn.Module") -> None:
        super().__init__()
        self.module = module

    def forward(self, loss: Loss, inputs: Tree, targets: Tree) -> Tensor:
        """The loss of a batch."""
        return loss(called(self.module, inputs), targets)
