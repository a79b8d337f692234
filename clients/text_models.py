"""Modules of the built-in models over characters.

Shapes: see :mod:`fed.vectors.layout`.
"""

import torch
from torch import Tensor, nn

__all__ = ["CharGRU", "CharTransformer"]


class CharGRU(nn.Module):
    """Gated recurrent units over characters."""

    is_recordable = True

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, embedding)
        self.recurrent = nn.GRU(embedding, hidden, layers, batch_first=True)
        self.read = nn.Linear(hidden, classes)

    def forward(self, characters_BT: Tensor) -> Tensor:
        """Scores of the next character, [B, C, T]."""
        states_BTD, _ = self.recurrent(self.embed(characters_BT))
        scores_BCT: Tensor = self.read(states_BTD).transpose(1, 2)
        return scores_BCT


class CharTransformer(nn.Module):
    """Causal transformer over characters."""

    is_recordable = True

    def __init__(self, classes: int, longest: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        # 0.02 as in GPT-2 (Radford et al. 2019): small beside the embedding, so that letters count first.
        self.position = nn.Parameter(torch.randn(longest, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        # PyTorch warns of nested tensors, which norm_first does not allow.
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.read = nn.Linear(width, classes)
        # Tied weights (Press & Wolf 2017): fewer parameters travel.
        self.read.weight = self.embed.weight
        # Read out by a width of numbers about 1, PyTorch's embedding would begin with scores of ± √width.
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        # Not persistent: a constant, which need not travel.
        self.register_buffer("later", torch.triu(torch.ones(longest, longest, dtype=torch.bool), 1), persistent=False)

    def forward(self, characters_BT: Tensor) -> Tensor:
        """Scores of the next character, [B, C, T]."""
        length = characters_BT.shape[1]
        states_BTD = self.embed(characters_BT) + self.position[:length]
        later_TT = self.get_buffer("later")[:length, :length]
        scores_BCT: Tensor = self.read(self.blocks(states_BTD, mask=later_TT, is_causal=True)).transpose(1, 2)
        return scores_BCT
