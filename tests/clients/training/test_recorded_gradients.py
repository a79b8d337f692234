"""Recorded gradients against the passes that they stand for, to the bit, and models that are never recorded."""

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fed.aggregators.base import Phase
from fed.clients.models import char_gru, char_transformer
from fed.clients.scoring.losses import bce, counted_cross_entropy, cross_entropy, mse
from fed.clients.training import recorded_gradients
from fed.clients.training.flat import FlatParameters
from fed.clients.training.op_graphs import record
from fed.clients.training.reading import Batch
from fed.clients.training.recorded_gradients import RecordedGradients, is_recordable
from fed.clients.training.trainer import Trainer
from fed.config.experiment import Local
from fed.vectors.layout import Layout

CPU = torch.device("cpu")
SAMPLES = 22

IN_ROWS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(12, 3),
    "activations": lambda: nn.Sequential(
        *(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        *(nn.SiLU(), nn.Sigmoid(), nn.Softplus(), nn.LeakyReLU(), nn.ELU(), nn.Mish(), nn.Hardswish(), nn.ReLU6()),
        *(nn.SELU(), nn.Hardtanh(), nn.Identity(), nn.Softmax(1), nn.Linear(8, 3)),
    ),
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    "layer norm": lambda: nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU("tanh"), nn.Linear(8, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(12, 8), nn.Dropout(0.5, inplace=True), nn.Linear(8, 3)),
    "one dimension": lambda: nn.Sequential(
        *(nn.Unflatten(1, (2, 6)), nn.Conv1d(2, 4, 3), nn.Dropout1d(), nn.MaxPool1d(2), nn.AvgPool1d(2)),
        *(nn.Flatten(), nn.Linear(4, 3)),
    ),
}
OF_IMAGES: Mapping[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)),
        *(nn.GroupNorm(2, 8), nn.Dropout2d(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
    ),
    "means of images": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ),
    "each channel by itself": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4), nn.Flatten(), nn.Linear(144, 3)
    ),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_gradients, "RECORDED_AFTER", 2)


def trained(module: nn.Module, inputs: Tensor, targets: Tensor, *, records: bool, **keys: Any) -> list[Tensor]:
    """State and mean loss after four tasks, one after another, and the next draw of PyTorch's generator."""
    loss = keys.pop("loss", cross_entropy)
    replays = keys.pop("replays", True)
    trainer = Trainer(copy.deepcopy(module), loss, Local(**{"batch_size": 8, "epochs": 2, **keys}), Phase(), CPU)
    assert trainer._recorded is not None
    programs = trainer._recorded._programs
    if not records:
        trainer._recorded = None
    state = trainer.layout.pack(module)
    found = []
    for seed in range(4):
        order = np.random.default_rng(seed)
        result = trainer.train(*state, (inputs, targets), order=order, seed=seed)
        state = result.params_V, result.integers_I
        found += [*state, torch.tensor(result.train_loss, dtype=torch.float64)]
    assert len(programs) == (2 if records else 0)  # of whole batches, and of the last one
    assert all((program is not None) == replays for program in programs.values())
    return [*found, torch.rand(1)]


def assert_same_bits(module: nn.Module, inputs: Tensor, targets: Tensor, **keys: Any) -> None:
    torch.manual_seed(0)
    plain = trained(module, inputs, targets, records=False, **keys)
    torch.manual_seed(0)
    replayed = trained(module, inputs, targets, records=True, **keys)
    for ours, theirs in zip(replayed, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", IN_ROWS)
def test_layers_of_rows_train_with_the_same_bits(kind: str) -> None:
    torch.manual_seed(1)
    assert_same_bits(IN_ROWS[kind](), torch.randn(SAMPLES, 12), torch.randint(3, (SAMPLES,)), lr=0.1)


@pytest.mark.parametrize("kind", OF_IMAGES)
def test_layers_of_images_train_with_the_same_bits(kind: str) -> None:
    torch.manual_seed(1)
    assert_same_bits(OF_IMAGES[kind](), torch.randn(SAMPLES, 3, 8, 8), torch.randint(3, (SAMPLES,)), lr=0.1)


@pytest.mark.parametrize(
    "keys",
    [
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.01, "optimizer": "adam"},
        {"lr": 0.1, "batch_size": 4, "accumulate": 2},
    ],
    ids=["nesterov", "adam", "accumulation"],
)
def test_optimizers_take_the_same_steps(keys: dict[str, Any]) -> None:
    torch.manual_seed(1)
    assert_same_bits(IN_ROWS["dropout"](), torch.randn(SAMPLES, 12), torch.randint(3, (SAMPLES,)), **keys)


@pytest.mark.parametrize("loss", [mse, bce, counted_cross_entropy])
def test_losses_are_the_same(loss: Any) -> None:
    torch.manual_seed(1)
    targets = torch.randint(3, (SAMPLES,)) if loss is counted_cross_entropy else torch.rand(SAMPLES, 3)
    if loss is counted_cross_entropy:
        targets[::3] = -100
    assert_same_bits(IN_ROWS["layer norm"](), torch.randn(SAMPLES, 12), targets, loss=loss, lr=0.1)


def test_a_fixed_part_stays_as_it_is() -> None:
    torch.manual_seed(1)
    module = IN_ROWS["batch norm"]()
    for layer in list(module.children())[:2]:
        layer.requires_grad_(False)
    assert_same_bits(module, torch.randn(SAMPLES, 12), torch.randint(3, (SAMPLES,)), lr=0.1)


class _Recurrent(nn.Module):
    is_recordable = True

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(7, 4), kind(4, 6, num_layers=2, dropout=0.2), nn.Linear(6, 7)])

    def forward(self, letters: Tensor) -> Tensor:
        states, _ = self.layers[1](self.layers[0](letters).transpose(0, 1))
        scores: Tensor = self.layers[2](states).permute(1, 2, 0)
        return scores


OF_LETTERS: Mapping[str, Callable[[], nn.Module]] = {
    "transformer": lambda: char_transformer((5,), 7, width=8, heads=2, layers=1),
    "letters' GRU": lambda: char_gru(7, embedding=4, hidden=6),
    "RNN": lambda: _Recurrent(nn.RNN),
    "GRU": lambda: _Recurrent(nn.GRU),
}


@pytest.mark.parametrize("kind", OF_LETTERS)
def test_models_of_letters_train_with_the_same_bits(kind: str) -> None:
    torch.manual_seed(1)
    letters = torch.randint(7, (SAMPLES, 6))
    assert_same_bits(OF_LETTERS[kind](), letters[:, :-1].contiguous(), letters[:, 1:].contiguous(), lr=0.1)


class _Declared(nn.Module):
    is_recordable = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 3)])

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers[1](self.layers[0](inputs).tanh() + inputs)
        return scores


class _LooksAtNumbers(_Declared):
    is_recordable = True

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (2 if inputs.sum() > 0 else 1)


class _HasAShapeOfNumbers(_Declared):
    is_recordable = True

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + inputs[inputs > 0].mean()


class _PacksSequences(_Declared):
    is_recordable = True

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = 1 + (inputs[:, 0] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return super().forward(inputs) + packed.data.mean()


class _LeavesOneOut(_Declared):
    is_recordable = True

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers[1](inputs)
        return scores


class _Derived(_Declared):
    pass


@pytest.mark.parametrize(
    ("module", "replays"),
    [
        (_Declared, True),
        *((other, False) for other in (_LooksAtNumbers, _HasAShapeOfNumbers, _PacksSequences, _LeavesOneOut)),
    ],
)
def test_classes_say_that_they_are_recordable(module: Callable[[], nn.Module], replays: bool) -> None:
    """One that says so wrongly is trained as it is, if it looks at numbers or does not use a layer."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(SAMPLES, 12), torch.randint(3, (SAMPLES,))
    assert_same_bits(module(), inputs, targets, lr=0.1, replays=replays)


class _Own(nn.Linear):
    pass


def _hooked() -> nn.Module:
    module = nn.Linear(2, 3)
    module.register_forward_hook(lambda *_: None)
    return module


def _with_a_forward_of_its_own() -> nn.Module:
    module = nn.Linear(2, 3)
    module.forward = torch.relu  # type: ignore[method-assign]  # as users do
    return module


def _with_a_hooked_parameter() -> nn.Module:
    module = nn.Linear(2, 3)
    module.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]  # PyTorch has no types
    return module


NOT_RECORDED: Mapping[str, Callable[[], nn.Module]] = {
    "subclass": lambda: _Own(2, 3),
    "derived": _Derived,
    "within": lambda: nn.Sequential(nn.Linear(2, 3), _Own(3, 3)),
    "hook": _hooked,
    "forward": _with_a_forward_of_its_own,
    "hook of a parameter": _with_a_hooked_parameter,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    "counting": lambda: nn.BatchNorm1d(3, momentum=None),
    "drawing slopes": nn.RReLU,
    "LSTM": lambda: nn.LSTM(2, 3),
    "scaled rows": lambda: nn.Embedding(2, 3, max_norm=1.0),
    "sparse": lambda: nn.Embedding(2, 3, sparse=True),
    "activation": lambda: nn.TransformerEncoderLayer(2, 1, activation=torch.sin),
}


@pytest.mark.parametrize("kind", NOT_RECORDED)
def test_models_with_code_of_their_own_are_not_recorded(kind: str) -> None:
    assert not is_recordable(NOT_RECORDED[kind]())


def test_labels_outside_of_the_classes_are_refused_in_a_replay() -> None:
    torch.manual_seed(1)
    with pytest.raises(IndexError, match="out of bounds"):
        trained(nn.Linear(12, 3), torch.randn(SAMPLES, 12), torch.full((SAMPLES,), 3), records=True, lr=0.1)


def test_a_program_with_other_bits_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    module, inputs, targets = nn.Linear(12, 3), torch.randn(SAMPLES, 12), torch.randint(3, (SAMPLES,))
    plain = trained(module, inputs, targets, records=False, lr=0.1)

    def doubled(function: Callable[..., Any], examples: list[Tensor]) -> Any:
        return record(lambda *tensors: [2 * part for part in function(*tensors)], examples)

    monkeypatch.setattr(recorded_gradients, "record", doubled)
    again = trained(module, inputs, targets, records=True, lr=0.1, replays=False)
    assert all(map(torch.equal, again[:-1], plain[:-1]))


def test_without_pytorchs_interpreter_nothing_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_create_function_from_graph")  # as a later version may have it
    torch.manual_seed(1)
    module, inputs, targets = nn.Linear(12, 3), torch.randn(SAMPLES, 12), torch.randint(3, (SAMPLES,))
    assert_same_bits(module, inputs, targets, lr=0.1, replays=False)


def test_steps_that_are_timed_are_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_gradients, "RECORDED_AFTER", 100)
    trainer = Trainer(nn.Linear(12, 3), cross_entropy, Local(batch_size=SAMPLES, epochs=1), Phase(), CPU)
    samples = (torch.randn(SAMPLES, 12), torch.randint(3, (SAMPLES,)))
    assert trainer._recorded is not None
    for programs in (0, 1):
        trainer.train(*trainer.layout.pack(trainer.module), samples, order=np.random.default_rng(0), seed=0)
        assert len(trainer._recorded._programs) == programs
        trainer.record_at_once()


def test_views_of_other_tensors_are_not_replayed() -> None:
    """A flattening is recorded as a view, which a batch with other strides would not have."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    recorded = RecordedGradients(module, FlatParameters(module, Layout.of(module)))
    targets = torch.randint(3, (5,))
    for _ in range(3):
        found = recorded.of(cross_entropy, Batch(torch.randn(5, 3, 4), targets, 5))
    assert found is not None
    assert recorded.of(cross_entropy, Batch(torch.randn(5, 4, 3).transpose(1, 2), targets, 5)) is None


@pytest.mark.long
def test_recording_needs_no_compiler() -> None:
    """Whose import takes longer than many small runs. In a process of its own, for others may have imported it here."""
    code = """
import sys, torch
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training import recorded_gradients
from fed.clients.training.flat import FlatParameters
from fed.clients.training.reading import Batch
from fed.vectors.layout import Layout
recorded_gradients.RECORDED_AFTER = 0
module = torch.nn.Linear(3, 2)
recorded = recorded_gradients.RecordedGradients(module, FlatParameters(module, Layout.of(module)))
assert recorded.of(cross_entropy, Batch(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]), 5)) is not None
print(sorted({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
