"""Small transformer that says which class a sequence of tokens is of; all sides build it from its weights.

Shapes: B, batch; T, tokens; D, width; H, heads; C, classes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

_HEAD = 64


class Transformer(nn.Module):
    """Encoder with pre-norm blocks, whose mean state is read out.

    Args:
        vocabulary: number of tokens.
        length: T, number of tokens of a sequence.
        width: D.
        layers: number of blocks.
        classes: C.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.read = nn.Linear(width, classes)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "Transformer":
        """New module of the shapes of weights."""
        vocabulary, width = weights["embedding.weight"].shape
        layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
        return cls(vocabulary, len(weights["position"]), width, layers, len(weights["read.weight"]))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Scores of the classes, [B, C]."""
        states_BTD = self.blocks(self.embedding(tokens_BT) + self.position)
        scores_BC: Tensor = self.read(self.norm(states_BTD).mean(1))
        return scores_BC


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // _HEAD)
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, states_BTD: Tensor) -> Tensor:
        parts = self.attend(self.before(states_BTD)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen_BTD = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        states_BTD = states_BTD + self.join(seen_BTD)
        out_BTD: Tensor = states_BTD + self.narrow(functional.gelu(self.widen(self.between(states_BTD))))
        return out_BTD
