"""Batches that are trees: what is trained in groups agrees with what is trained alone, and both with plain tensors."""

from collections import UserDict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.clients.data import FederatedData, SamplesOnDemand
from fed.clients.data.held import samples_at
from fed.errors import InvalidData, InvalidExperiment, InvalidModel
from tests.clients.training.readers import WORDS, augmented, classified, reader, sentences

pytestmark = pytest.mark.usefixtures("device")

PAD = {"kind": "pad", "mask": "attention_mask", "multiple": 8}


def trained(data: FederatedData, model: Any, **keys: Any) -> fed.Run:
    sections: dict[str, Any] = {
        "model": None,
        "collate": PAD,
        "local": {"lr": 0.1, "batch_size": 4, "epochs": 2},
        "rounds": {"count": 2},
    }
    return fed.simulate(fed.Experiment(**{**sections, **keys}), data=data, model=model)


def difference(one: fed.Run, other: fed.Run) -> float:
    theirs = other.model.state_dict()
    return max(float((part - theirs[name]).abs().max()) for name, part in one.model.state_dict().items())


def in_groups_and_alone(data: FederatedData, model: Any, **keys: Any) -> list[fed.Run]:
    return [trained(data, model, **keys, simulation={"batching": batching}) for batching in ("on", "off")]


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "accumulate": 2}], ids=["sgd", "two batches a step"])
@pytest.mark.parametrize("per_word", [False, True], ids=["a label a sample", "a label a word"])
def test_padded_dictionaries_train_in_groups_as_alone(per_word: bool, local: dict[str, Any]) -> None:
    """Clients of several sizes and lengths; labels of padding are −100. Equal up to the rounding of float64."""
    train = {client: classified(client, size) for client, size in enumerate([9, 3, 6, 9])}
    test = classified(100, 20)
    if per_word:
        train = {client: (inputs, inputs["input_ids"]) for client, (inputs, _) in train.items()}
        test = (test[0], test[0]["input_ids"])
    keys = {"lr": 0.1, "batch_size": 4, "epochs": 2, **local}
    runs = in_groups_and_alone(FederatedData(train, test), partial(reader, per_word=per_word), local=keys)
    assert difference(*runs) < 1e-10
    for key in ("final_test_loss", "final_test_accuracy"):
        assert runs[0].summary[key] == pytest.approx(runs[1].summary[key], abs=1e-10)
    assert runs[0].metrics[-1]["train_loss"] == pytest.approx(runs[1].metrics[-1]["train_loss"], abs=1e-10)


def test_a_tokenizers_own_mask_is_the_one_that_pad_adds() -> None:
    def tokenized(client: int) -> tuple[Any, Tensor]:
        inputs, targets = classified(client)
        ids = [words.tolist() for words in inputs["input_ids"]]
        # As a BatchEncoding of transformers is.
        return UserDict(input_ids=ids, attention_mask=[[1] * len(words) for words in ids]), targets

    runs = [
        trained(FederatedData({client: made(client) for client in range(3)}), reader)
        for made in (tokenized, classified)
    ]
    assert difference(*runs) == 0


def test_draws_of_a_collate_are_the_same_in_groups() -> None:
    data = FederatedData({client: classified(client) for client in range(3)})
    runs = in_groups_and_alone(data, reader, collate=augmented)
    assert difference(*runs) < 1e-10
    plain = trained(data, reader, collate=lambda samples: augmented(samples, np.random.default_rng(), training=False))
    assert difference(runs[1], plain) > 1e-3, "or nothing was drawn"


@pytest.mark.processes
@pytest.mark.long  # two processes begin
def test_draws_of_a_collate_are_the_same_in_workers() -> None:
    data = FederatedData({client: classified(client) for client in range(3)}, classified(7))
    keys: dict[str, Any] = {"collate": {"kind": f"python:{augmented.__module__}:augmented", "length": 9}}
    runs = [trained(data, reader, **keys, simulation={"batching": "off", "workers": workers}) for workers in (0, 2)]
    assert difference(*runs) == 0


class Named(NamedTuple):
    first: Tensor
    second: Tensor


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 3).double()
        self.other = nn.Linear(2, 3, bias=False).double()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        sums: Tensor = self.one(first) + self.other(second)
        return sums


class Joined(Sum):
    def forward(self, both: Tensor) -> Tensor:  # type: ignore[override]  # the same model of one tensor
        return super().forward(both[:, :2], both[:, 2:])


@pytest.mark.parametrize("make", [Named, lambda *parts: parts, lambda a, b: {"second": b, "first": a}])
@pytest.mark.parametrize("batching", ["on", "off"])
def test_a_tree_of_tensors_trains_as_one_tensor(make: Any, batching: str) -> None:
    """A model of two inputs is one of their columns side by side, to the bit."""
    torch.manual_seed(0)
    pairs = {client: (torch.randn(8, 4).double(), torch.arange(8) % 3) for client in range(3)}
    split = {client: (make(x[:, :2].clone(), x[:, 2:].clone()), y) for client, (x, y) in pairs.items()}
    keys: dict[str, Any] = {"collate": None, "simulation": {"batching": batching}}
    runs = [
        trained(FederatedData(pairs, pairs[0]), Joined, **keys),
        trained(FederatedData(split, split[0]), Sum, **keys),
    ]
    assert difference(*runs) < 1e-15
    assert runs[0].summary["final_test_loss"] == pytest.approx(runs[1].summary["final_test_loss"], abs=1e-14)


def test_a_model_may_find_its_loss_itself() -> None:
    """With labels among the inputs the loss is the model's, and the same as that of targets."""
    words = {client: sentences(client) for client in range(3)}
    itself = FederatedData({client: {"input_ids": said, "labels": said} for client, said in words.items()})
    given = FederatedData({client: ({"input_ids": said}, said) for client, said in words.items()})
    model = partial(reader, per_word=True)
    runs = [trained(itself, model, loss="model"), trained(given, model, simulation={"batching": "off"})]
    assert difference(*runs) < 1e-12


def test_labels_that_do_not_count_change_nothing() -> None:
    """A sequence with words whose labels are −100 trains and scores as the labels that count do alone."""
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    labels = torch.tensor([[1, -100, 3, -100], [-100, -100, 7, -100]])
    data = FederatedData({0: ({"input_ids": ids}, labels)}, ({"input_ids": ids}, labels))
    run = trained(data, lambda: Words(), collate=None, local={"lr": 0.5, "batch_size": 2, "steps": 3})
    counted = FederatedData({0: (torch.tensor([1, 3, 7]), torch.tensor([1, 3, 7]))})
    alone = trained(counted, lambda: Words(), collate=None, local={"lr": 0.5, "batch_size": 3, "steps": 3})
    assert difference(run, alone) < 1e-12
    assert run.metrics[-1]["train_loss"] == pytest.approx(alone.metrics[-1]["train_loss"], abs=1e-12)
    scores = nn.functional.cross_entropy(run.model(ids)["logits"].flatten(0, 1), labels.flatten())
    assert run.summary["final_test_loss"] == pytest.approx(float(scores.detach()), abs=1e-12)


class Words(nn.Module):
    """Scores of each word by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(WORDS, WORDS).double()

    def forward(self, input_ids: Tensor) -> Any:
        scores = self.read(input_ids)
        return {"logits": scores} if input_ids.ndim > 1 else scores


def per_place() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 5), nn.Flatten(1), nn.Linear(20, 12), nn.Unflatten(1, (3, 4)))


@pytest.mark.parametrize("batching", ["on", "off"])
def test_a_batch_without_labels_that_count_moves_nothing(batching: str) -> None:
    labels = torch.full((2, 4), -100)
    data = FederatedData({client: (torch.ones(2, 4, dtype=torch.int64), labels) for client in range(2)})
    keys: dict[str, Any] = {"collate": None, "simulation": {"batching": batching}}
    run = trained(data, per_place, **keys)
    assert difference(run, trained(data, per_place, **keys, local={"lr": 1e-30})) == 0
    assert run.metrics[-1]["train_loss"] == 0


class Read(SamplesOnDemand):
    """Samples of a pair, one by one."""

    def __init__(self, pair: Any) -> None:
        self.pair = FederatedData({0: pair}).read(0)

    def __len__(self) -> int:
        return len(self.pair[1])

    def read(self, place: int) -> Any:
        return samples_at(self.pair, [place])[0]


@pytest.mark.parametrize("batching", ["on", "off"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=[pytest.mark.long, pytest.mark.processes])])
def test_samples_on_demand_train_as_those_in_memory(batching: str, workers: int) -> None:
    pairs = {client: classified(client, 9 - client) for client in range(3)}
    keys: dict[str, Any] = {"simulation": {"batching": batching, "workers": workers}}
    on_demand = {client: Read(pair) for client, pair in pairs.items()}
    runs = [
        trained(FederatedData(pairs, classified(9)), reader, **keys),
        trained(FederatedData(on_demand, Read(classified(9)), classes=3), reader, **keys),
    ]
    assert difference(*runs) == 0
    assert runs[0].summary["final_test_loss"] == runs[1].summary["final_test_loss"]


@pytest.mark.parametrize(
    ("given", "keys", "said"),
    [
        (classified(0), {"collate": None}, r"a list in inputs\['input_ids'\] and no collate: write collate: pad"),
        ({"input_ids": sentences(0)}, {}, "cross_entropy needs targets, got inputs alone: write loss: model"),
        ({"input_ids": sentences(0)}, {"loss": "model", "metrics": ["accuracy"]}, "metrics need targets"),
        (
            {"input_ids": sentences(0)},
            {"loss": "model"},
            "takes the loss that the model returns, got Output without one",
        ),
        (({"word": sentences(0)}, [0] * 9), {}, "unexpected keyword argument 'word'"),
        (classified(0), {"collate": {"kind": "pad", "length": 2}}, "input_ids'] must be at most collate.length=2 long"),
        (
            classified(0),
            {"collate": lambda samples: 3},
            "collate must give tensors with a row for each sample, got int",
        ),
        (classified(0), {"collate": {"kind": "pad", "multiple": 0}}, "multiple must be greater than 0"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(given: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidData, InvalidExperiment, InvalidModel), match=said):
        trained(FederatedData({0: given}), reader, **keys)


def test_a_collate_is_given_once() -> None:
    data = FederatedData({0: classified(0)}, collate=augmented)
    assert len(trained(data, reader, collate=None).metrics) == 2
    with pytest.raises(InvalidExperiment, match="collate must be given once"):
        trained(data, reader)


def test_samples_must_be_alike_leaf_by_leaf() -> None:
    one = ({"a": torch.zeros(2, 3), "b": [[1], [2, 3]]}, None)
    for other, said in [
        ({"a": torch.zeros(2, 3)}, r"inputs of client 1 must be like those of client 0, \{'a': tensor, 'b': samples"),
        ({"a": torch.zeros(2, 4), "b": [[1], [2]]}, r"inputs\['a'\] of client 1 must be like those of client 0"),
        ({"a": torch.zeros(2, 3), "b": [[1.0], [2.0]]}, r"inputs\['b'\] of client 1 must be like .* got torch.float32"),
        ({"a": torch.zeros(2, 3), "b": [[1]]}, r"as many values in inputs\['b'\] as in inputs\['a'\]"),
        ({"a": torch.tensor([[0.0, torch.nan, 0]] * 2), "b": [[1], [2]]}, r"inputs\['a'\] of client 1 must be finite"),
        ({"a": torch.zeros(2, 3), "b": "words"}, "inputs.* of client 1 must be a tensor.* got 'words'"),
    ]:
        with pytest.raises(InvalidData, match=said):
            FederatedData({0: one, 1: other})
