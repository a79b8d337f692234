"""Batches that are trees: what is trained in groups agrees with what is trained alone, and both with plain tensors."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.clients.data import FederatedData

WORDS = 11
CLASSES = 3


class Said(NamedTuple):
    words: Tensor
    mask: Tensor


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


def reader(**keys: Any) -> Any:
    def make() -> nn.Module:
        return Reader(**keys).double()

    return make


def trained(data: FederatedData, model: Any, **keys: Any) -> fed.Run:
    sections: dict[str, Any] = {
        "model": None,
        "collate": {"kind": "pad", "mask": "attention_mask"},
        "local": {"lr": 0.1, "batch_size": 4, "epochs": 2},
        "rounds": {"count": 2},
    }
    return fed.simulate(fed.Experiment(**{**sections, **keys}), data=data, model=model)


def difference(one: fed.Run, other: fed.Run) -> float:
    theirs = other.model.state_dict()
    return max(float((part - theirs[name]).abs().max()) for name, part in one.model.state_dict().items())


@pytest.mark.parametrize("per_word", [False, True], ids=["a label a sample", "a label a word"])
def test_padded_dictionaries_train_in_groups_as_alone(per_word: bool) -> None:
    """Clients of several sizes and lengths; labels of padding are −100. Equal up to the rounding of float64."""
    sizes = [9, 3, 6, 9]
    train = {client: classified(client, size) for client, size in enumerate(sizes)}
    test = classified(100, 20)
    if per_word:
        train = {client: (inputs, inputs["input_ids"]) for client, (inputs, _) in train.items()}
        test = (test[0], test[0]["input_ids"])
    data = FederatedData(train, test)
    runs = [trained(data, reader(per_word=per_word), simulation={"batching": how}) for how in ("on", "off")]
    assert difference(*runs) < 1e-10
    for key in ("final_test_loss", "final_test_accuracy"):
        assert runs[0].summary[key] == pytest.approx(runs[1].summary[key], abs=1e-10)
    assert runs[0].metrics[-1]["train_loss"] == pytest.approx(runs[1].metrics[-1]["train_loss"], abs=1e-10)


def test_a_model_may_find_its_loss_itself() -> None:
    """With labels among the inputs the loss is the model's, and the same as that of targets."""
    words = {client: sentences(client) for client in range(3)}
    itself = FederatedData({client: {"input_ids": said, "labels": said} for client, said in words.items()})
    given = FederatedData({client: ({"input_ids": said}, said) for client, said in words.items()})
    runs = [
        trained(itself, reader(per_word=True), loss="model", evaluation="coordinator"),
        trained(given, reader(per_word=True), evaluation="coordinator"),
    ]
    assert difference(*runs) < 1e-10
