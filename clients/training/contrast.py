"""Contrast: the representations of three models on one batch, for rules that compare them.

Shapes: see :mod:`fed.vectors.layout`.
"""

from typing import Any

from fed.aggregators.base import LocalRule
from fed.clients.training.reading import with_parameters
from fed.errors import InvalidModel
from fed.vectors import trees
from fed.vectors.fixed_part import in_training
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["Contrast"]


class Contrast:
    """Captures the input of a module's last linear layer, with its own parameters and with others.

    Args:
        module: the model that is trained.
        rule: the rule that compares representations.

    Raises:
        InvalidModel: if there is no such layer.
    """

    def __init__(self, module: "nn.Module", rule: LocalRule) -> None:
        layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
        if not layers:
            raise InvalidModel(
                f"a model must have a torch.nn.Linear for {type(rule).__name__}, which compares the inputs of the last "
                "one, got none: add one, or choose another algorithm"
            )
        self._module = module
        self._rule = rule
        self._seen: list[Tensor] = []
        self._others: tuple[dict[str, Tensor], ...] = ()
        layers[-1].register_forward_pre_hook(self._see)

    def hold(self, server: dict[str, Tensor], previous: dict[str, Tensor]) -> None:
        """Set the two models to compare with: parameters by name, and the module's present buffers."""
        # Training changes the module's own in place.
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        self._others = {**buffers, **server}, {**buffers, **previous}

    def penalty(self, inputs_B: Tree) -> Tensor:
        """Term of the rule for the batch that the module was last called with."""
        features_BF = self._seen[-1].flatten(1)
        self._seen = []
        self._module.eval()  # so that batch normalisation keeps its statistics
        with torch.no_grad():
            for parameters in self._others:
                own = trees.mapped(torch.clone, inputs_B)  # a model may change its inputs in place
                with_parameters(self._module, parameters, own)
        in_training(self._module)
        server_BF, previous_BF = (seen.flatten(1) for seen in self._seen)
        self._seen = []
        return self._rule.penalty(features_BF, server_BF, previous_BF)

    def _see(self, layer: "nn.Module", given: tuple[Any, ...]) -> None:
        self._seen = [*self._seen[-1:], given[0]]
