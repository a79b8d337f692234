"""Models with low-rank adapters, without a library for them."""

import torch
from torch import Tensor, nn

__all__ = ["INPUTS", "OUTPUTS", "Adapted", "adapted"]

INPUTS, OUTPUTS = 64, 10


class Adapted(nn.Module):
    """A linear layer with an adapter, as the library peft names its parts.

    Args:
        base: the layer that is adapted.
        rank: of the adapter.
        scaling: of its product.
    """

    def __init__(self, base: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": scaling}
        nn.init.zeros_(self.lora_B["default"].get_parameter("weight"))

    def forward(self, inputs: Tensor) -> Tensor:
        adapter: Tensor = self.lora_B["default"](self.lora_A["default"](inputs))
        outputs: Tensor = self.base_layer(inputs) + self.scaling["default"] * adapter
        return outputs


def adapted(input_shape: tuple[int, ...] = (INPUTS,), classes: int = OUTPUTS, rank: int = 3) -> nn.Module:
    """Two layers with adapters of a rank, and a trained bias between them; the same numbers wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        first = Adapted(nn.Linear(INPUTS, 12), rank, scaling=2.0)
        second = Adapted(nn.Linear(12, classes), rank, scaling=0.5)
        return nn.Sequential(nn.Flatten(), first, nn.LayerNorm(12), nn.ReLU(), second)
