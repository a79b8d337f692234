"""Stateless model: outputs of a module as a function of its state, as ``vmap`` computes them of many states."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fed.clients.scoring.measures import Loss, scores_of, takes_scores
from fed.clients.training.reading import with_parameters
from fed.errors import InvalidModel
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor
from fed.vectors.trees import Tree

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["StatelessModel"]


class StatelessModel:
    """Outputs of a module whose tensors are given, and which it does not change.

    Args:
        module: the model, which is only read.
        layout: layout of its state.
        loss: loss of the outputs; where it takes scores, these are the outputs.
        unfit: sentence on a rule that the model breaks → the error.
    """

    def __init__(self, module: "nn.Module", layout: Layout, loss: Loss, unfit: Callable[[str], InvalidModel]) -> None:
        self._module = module
        self._names = [part.name for part in layout.parts]
        self._constants = {name: part for name, part in module.named_buffers() if name not in self._names}
        self._takes_scores = takes_scores(loss)
        self._unfit = unfit

    def __call__(self, state: tuple[Tensor, ...], inputs: Tree) -> Tensor:
        """Output of the model.

        Args:
            state: a tensor for each part of the layout.
            inputs: inputs of a batch.

        Raises:
            InvalidModel: if the forward pass sets a parameter or buffer, or its output is no tensor.
        """
        given = self._constants | dict(zip(self._names, state, strict=True))
        after = dict(given)
        # functional_call writes into ``after`` whatever the module has set.
        output = with_parameters(self._module, after, inputs)
        if any(after[name] is not part for name, part in given.items()):
            raise self._unfit("a model's forward pass must not set its parameters or buffers")
        if self._takes_scores:
            output = scores_of(output)
        if not isinstance(output, Tensor):
            raise self._unfit(f"a model must return a tensor to a loss of your own, got {type(output).__name__}")
        return output
