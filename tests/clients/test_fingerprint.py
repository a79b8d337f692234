"""The fingerprint of data and code: the same for the same, another after any change."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.clients.fingerprint import EARLIER_MODULES, code_sha256, data_sha256, model_sha256, pair_sha256
from fed.clients.scoring.losses import cross_entropy, huber
from fed.clients.scoring.metrics import accuracy
from fed.clients.text_models import CharGRU
from tests.simulations.users_parts import samples, unequal

SOURCE = """
import torch
from torch import nn

def loss(output, target):
    return (output - target).square().mean()

def delta(width, scale=1.0):
    def huber(output, target):
        return nn.functional.huber_loss(output, target, delta=width) * scale
    return huber

class Weighted:
    def __init__(self, weights):
        self.weights = weights
    def __call__(self, output, target):
        return (self.weights * (output - target)).mean()

class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(4, width)
    def forward(self, x):
        return self.inner(x).relu()
"""


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., ModuleType]]:
    """Load a user's module from a source, each time as a process does that is started anew."""
    names: list[str] = []

    def loaded(source: str = SOURCE, name: str = "users_own_code") -> ModuleType:
        folder = tmp_path / str(len(names))
        folder.mkdir()
        (folder / f"{name}.py").write_text(source)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield loaded
    for name in set(names):
        del sys.modules[name]


MADE: dict[str, Callable[[Any], Any]] = {
    "function": lambda own: own.loss,
    "closure": lambda own: own.delta(0.5),
    "partial": lambda own: partial(own.loss, target=torch.ones(2)),
    "object": lambda own: own.Weighted(torch.tensor([1.0, 2.0])),
    "method": lambda own: own.Weighted(2.0).__call__,
    "PyTorch's": lambda own: nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 3.0])),
}


@pytest.mark.parametrize("kind", MADE)
def test_code_loaded_again_has_the_same_hash(kind: str, load: Callable[..., ModuleType]) -> None:
    assert code_sha256(MADE[kind](load())) == code_sha256(MADE[kind](load()))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("function", "(output - target).square()", "(output - target).abs()"),
        ("closure", "delta=width", "delta=2 * width"),
        ("closure", "scale=1.0", "scale=3.0"),
        ("object", "self.weights * (", "2 * self.weights * ("),
        ("method", "self.weights * (", "2 * self.weights * ("),
    ],
)
def test_changed_code_has_another_hash(kind: str, before: str, after: str, load: Callable[..., ModuleType]) -> None:
    assert before in SOURCE
    assert code_sha256(MADE[kind](load())) != code_sha256(MADE[kind](load(SOURCE.replace(before, after))))


def test_values_that_code_holds_count(load: Callable[..., ModuleType]) -> None:
    own = load()
    made = [
        own.delta(0.5),
        own.delta(0.25),
        partial(own.loss, target=torch.ones(2)),
        partial(own.loss, target=torch.zeros(2)),
        partial(own.loss, target=torch.zeros(2, dtype=torch.int32)),
        own.Weighted(1.0),
        own.Weighted([1.0, (2, "a")]),
        own.Weighted([1.0, (2, "b")]),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.ones(2)),
        nn.functional.mse_loss,
        nn.functional.l1_loss,
    ]
    assert len({*map(code_sha256, made)}) == len(made)


@pytest.mark.parametrize(
    "made",
    [
        lambda own: cross_entropy,
        lambda own: partial(huber, delta=2.0),
        lambda own: {"accuracy": accuracy, "own": own.loss},
        lambda own: own.holding(cross_entropy),
        lambda own: own.Weighted(cross_entropy),
    ],
    ids=["loss", "with keys", "metrics", "within a closure", "within an object"],
)
def test_own_code_of_the_package_may_move(
    made: Callable[[Any], Any], load: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE + "\ndef holding(inner):\n    return lambda output, target: inner(output, target)\n"
    before = code_sha256(made(load(source)))
    for function in (cross_entropy, huber, accuracy):
        monkeypatch.setattr(function, "__module__", "fed.clients.elsewhere")
    assert code_sha256(made(load(source))) == before
    assert code_sha256(made(load(source)), {"fed.clients.elsewhere": "fed.clients.there"}) != before


def test_own_functions_may_get_more_parameters() -> None:
    """An experiment gives a kind all its keys, those of a later version with their defaults."""

    def later(output: Tensor, target: Tensor, delta: float = 1.0, power: float = 2.0) -> Tensor:
        return huber(output, target, delta)

    later.__module__ = huber.__module__
    later.__qualname__ = huber.__qualname__
    assert code_sha256(later) == code_sha256(huber)
    assert code_sha256(partial(later, delta=2.0, power=2.0)) == code_sha256(partial(huber, delta=2.0))
    assert code_sha256(partial(later, delta=1.0, power=2.0)) == code_sha256(partial(huber, delta=1.0))
    others: list[Any] = [
        partial(later, power=3.0),
        partial(later, delta=2.0),
        partial(later, delta=1),
        partial(later, power=True),
    ]
    assert len({*map(code_sha256, [later, *others])}) == len(others) + 1
    earlier = EARLIER_MODULES[-1]
    assert code_sha256(huber, earlier) != code_sha256(later, earlier)  # earlier hashes are as they were


def test_classes_of_the_package_within_models_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CharGRU(8, 4, 6, layers=1)
    before = model_sha256(model)
    monkeypatch.setattr(CharGRU, "__module__", "fed.clients.elsewhere")
    assert model_sha256(model) == before


def test_code_without_source_goes_by_its_bytecode() -> None:
    def made(text: str) -> Any:
        return eval(text, {"__name__": "typed_in"})

    texts = ("lambda a, b: a + b", "lambda a, b: a - b", "lambda a, b: a + 2", "lambda a, b: a + 3", "lambda a, b: a.b")
    assert len({code_sha256(made(text)) for text in texts}) == len(texts)
    assert code_sha256(made(texts[0])) == code_sha256(made(texts[0]))


def test_a_wrapper_counts_beside_what_it_wraps(load: Callable[..., ModuleType]) -> None:
    own = load()

    @wraps(own.loss)
    def halved(output: Tensor, target: Tensor) -> Any:
        return own.loss(output, target) / 2

    assert code_sha256(halved) != code_sha256(own.loss)


def test_code_that_holds_itself_ends() -> None:
    def fold(n: int) -> int:
        return n and fold(n - 1)

    assert code_sha256(fold) == code_sha256(fold)


def test_models_differ_by_code_and_shape_alone(load: Callable[..., ModuleType]) -> None:
    own = load()
    first = model_sha256(own.Block())
    assert first == model_sha256(own.Block()), "whatever the weights"
    assert first == model_sha256(load().Block())
    assert first != model_sha256(load(SOURCE.replace(".relu()", ".tanh()")).Block())
    assert first != model_sha256(own.Block(5))
    assert first != model_sha256(own.Block().double())


def test_any_change_of_data_changes_their_hash() -> None:
    data = unequal()
    pair = data.train["c4"]
    moved = pair[0].clone()
    moved[3, 2] = torch.nextafter(moved[3, 2], torch.tensor(9.0))
    assert data.test is not None
    others = [
        fed.FederatedData({**data.train, "c4": (moved, pair[1])}, data.test, 3),
        fed.FederatedData({**data.train, "c4": (pair[0], pair[1].flip(0))}, data.test, 3),
        fed.FederatedData(dict(reversed([*data.train.items()])), data.test, 3),
        fed.FederatedData(data.train, (data.test[0], 2 - data.test[1]), 3),
        fed.FederatedData(data.train, None, 3),
        fed.FederatedData(
            {client: (inputs.double(), targets) for client, (inputs, targets) in data.train.items()}, None, 3
        ),
        fed.FederatedData({f"{client}x": pair for client, pair in data.train.items()}, data.test, 3),
    ]
    hashes = [data_sha256(one) for one in (data, *others)]
    assert len({*hashes}) == len(hashes)
    assert hashes[0] == data_sha256(unequal())
    assert hashes[0] == data_sha256(
        fed.FederatedData({**data.train, "c4": (pair[0].T.contiguous().T, pair[1])}, data.test, 3)
    )


def test_samples_hash_as_their_bytes() -> None:
    inputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4])
    expected = hashlib.sha256(b"torch.float32 (2, 1)")
    expected.update(inputs.numpy().tobytes() + b"torch.int64 (2,)" + targets.numpy().tobytes())
    assert pair_sha256((inputs, targets)) == expected.hexdigest()


def test_data_on_demand_are_read_for_one_client_alone() -> None:
    read: list[int] = []

    def make(client: int) -> Any:
        read.append(client)
        return samples(5, client)

    data = fed.FederatedData(fed.ClientsOnDemand(range(10**9), make, lambda client: 5), classes=3)
    del read[:]
    first = data_sha256(data)
    assert set(read) == {0}
    others = fed.ClientsOnDemand(range(10**9 - 1), make, lambda client: 5)
    assert first != data_sha256(fed.FederatedData(others, classes=3))
