"""A tiny model with the interface of those of ``transformers``, and samples of several lengths for it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["CLASSES", "WORDS", "Output", "Reader", "augmented", "classified", "reader", "sentences"]

WORDS = 11
CLASSES = 3


class Output:
    """What a model of transformers returns: values by attribute."""

    def __init__(self, **parts: Tensor) -> None:
        self.__dict__.update(parts)


class Reader(nn.Module):
    """A tiny encoder with the interface of BERT: dictionaries in, logits out; positions are a view of a buffer."""

    def __init__(self, dropout: float = 0.0, per_word: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.places = nn.Embedding(16, 8)
        self.register_buffer("position_ids", torch.arange(16).expand((1, -1)), persistent=False)
        self.attend = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.read = nn.Linear(8, WORDS if per_word else CLASSES)
        self.per_word = per_word

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        length = input_ids.shape[1]
        states = self.embed(input_ids) + self.places(self.get_buffer("position_ids")[:, :length])
        hidden = torch.zeros_like(attention_mask, dtype=states.dtype).masked_fill(attention_mask == 0, -1e9)
        hidden = hidden[:, None, :].expand(-1, length, -1).repeat_interleave(2, 0)
        seen, _ = self.attend(states, states, states, attn_mask=hidden, need_weights=False)
        states = self.drop(states + seen)
        if not self.per_word:
            weights = attention_mask[..., None].to(states.dtype)
            states = (states * weights).sum(1) / weights.sum(1)
        logits = self.read(states)
        if labels is None:
            return Output(logits=logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return Output(loss=loss, logits=logits)


def sentences(client: int, size: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(client)
    lengths = torch.randint(2, 9, (size,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def classified(client: int, size: int = 9) -> Any:
    words = sentences(client, size)
    return {"input_ids": words}, torch.stack([one.sum() % CLASSES for one in words])


def reader(dropout: float = 0.0, per_word: bool = False) -> nn.Module:
    """In float64, so that groups and single clients agree but for its rounding."""
    return Reader(dropout, per_word).double()


def augmented(
    samples: list[Any], generator: np.random.Generator, training: bool, length: int = 10, is_alone: bool = True
) -> Any:
    """Pads to one length; in training words are hidden at random, by NumPy's stream and by PyTorch's.

    PyTorch's generator belongs to the process: where nodes are threads of one, ``is_alone`` must be False.
    """
    targets = torch.stack([target for _, target in samples])
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, (inputs, _) in enumerate(samples):
        ids[row, : len(inputs["input_ids"])] = inputs["input_ids"]
    mask = (ids > 0).long()
    if training:
        mask[:, 1:] *= torch.from_numpy(generator.random((len(samples), length - 1)) > 0.1)
    if training and is_alone:
        mask[:, 1:] *= (torch.rand(len(samples), length - 1) > 0.1).long()
    return {"input_ids": ids, "attention_mask": mask}, targets
