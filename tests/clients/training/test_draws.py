"""What clients draw in a group against what they draw alone.

Shapes: K, clients of a group; B, samples of a batch; D, numbers of a sample; T, positions of a sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fed.clients.training.draws import UnlikeDraws
from tests.clients.training.test_batched_trainer import (
    IMAGES,
    OPTIMIZERS,
    UNEQUAL,
    VECTORS,
    Made,
    Pair,
    Task,
    assert_trains_alike,
    local,
    samples,
)
from tests.thinned import thinned

SEQUENCES = samples(UNEQUAL, (4, 5))
VOLUMES = samples(UNEQUAL, (2, 3, 3, 3))


class Attending(nn.Module):
    """Self-attention, with samples or positions first."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=batch_first)
        self.read = nn.Linear(6, 3)
        self.batch_first = batch_first

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.enter(inputs)
        states = states if self.batch_first else states.transpose(0, 1)
        seen, _ = self.attend(states, states, states)
        scores: Tensor = self.read(seen.mean(1 if self.batch_first else 0))
        return scores


class Remembering(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = layer(5, 6, 3, dropout=0.4, batch_first=True)
        self.read = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.read(self.layer(inputs)[0][:, -1])
        return scores


def convolving() -> nn.Module:
    """Images have their channels last in memory where a client trains alone."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.4), nn.Conv2d(4, 4, 3), nn.Dropout(0.3)),
        *(nn.Flatten(), nn.Linear(64, 3)),
    )


def read_out(layer: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(size, 3))


def attended(model: Any, x: Tensor) -> Tensor:
    seen = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.4)
    scores: Tensor = model.read(seen.mean(1))
    return scores


def skipped(model: Any, x: Tensor) -> Tensor:
    """Stochastic depth, as torchvision writes it."""
    kept = torch.empty((len(x), 1), dtype=x.dtype, device=x.device).bernoulli_(0.8)
    scores: Tensor = model.read(x + kept / 0.8 * model.layer(x))
    return scores


def without_gradient(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        noise = torch.randn_like(x)
    scores: Tensor = model.read(x + noise)
    return scores


def unused(model: Any, x: Tensor) -> Tensor:
    """Its first numbers are dropped, and its stream has moved on."""
    torch.rand(3)
    scores: Tensor = model.read(functional.dropout(x, 0.3))
    return scores


def positions_first(model: Any, x: Tensor) -> Tensor:
    """Positions and samples are one dimension when it draws, and the samples stand side by side in it."""
    dropped_TBD = functional.dropout(x.transpose(0, 1).reshape(-1, 5), 0.4).view(4, -1, 5)
    scores: Tensor = model.read(dropped_TBD.mean(0))
    return scores


def samples_first(model: Any, x: Tensor) -> Tensor:
    dropped_BTD = functional.dropout(x.reshape(-1, 5), 0.4).view(-1, 4, 5)
    scores: Tensor = model.read(dropped_BTD.mean(1))
    return scores


F = functional
FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Pair]]] = {
    "alpha dropout": (lambda m, x: m.read(F.alpha_dropout(x, 0.3, True)), VECTORS),
    "dropout1d": (lambda m, x: m.read(F.dropout1d(x, 0.3).sum(1)), SEQUENCES),
    "attention": (attended, SEQUENCES),
    "weights dropped": (lambda m, x: F.linear(x, F.dropout(m.read.weight, 0.4), m.read.bias), VECTORS),
    "randn": (lambda m, x: m.read(x + torch.randn(x.shape)), VECTORS),
    "randn_like": (lambda m, x: m.read(x + torch.randn_like(x)), VECTORS),
    "randn_like in another order": (lambda m, x: m.read(x + torch.randn_like(x.t()).t()), VECTORS),
    "rand for all samples": (lambda m, x: m.read(x) * torch.rand(3), VECTORS),
    "rand_like": (lambda m, x: m.read(x * torch.rand_like(x)), VECTORS),
    "randint": (lambda m, x: m.read(x + torch.randint(2, 5, x.shape)), VECTORS),
    "randint_like": (lambda m, x: m.read(x + torch.randint_like(x, 5)), VECTORS),
    "bernoulli": (lambda m, x: m.read(x) * (1 + torch.bernoulli(x.mean(1, keepdim=True).sigmoid())), VECTORS),
    "bernoulli_ of a parameter": (
        lambda m, x: m.read(x * torch.empty_like(x).bernoulli_(m.read.bias.mean().sigmoid())),
        VECTORS,
    ),
    "normal_": (lambda m, x: m.read(x + x.new_empty(x.shape).normal_(1.0, 2.0)), VECTORS),
    "uniform_": (lambda m, x: m.read(x + torch.empty_like(x).uniform_(-1, 1)), VECTORS),
    "normal": (lambda m, x: m.read(torch.normal(x, 0.5)), VECTORS),
    "exponential_": (lambda m, x: F.gumbel_softmax(m.read(x)), VECTORS),
    "poisson": (lambda m, x: m.read(torch.poisson(x.exp())), VECTORS),
    "multinomial": (
        lambda m, x: m.read(x) * (1 + torch.multinomial(x.softmax(1), 2).sum(1, keepdim=True)),
        VECTORS,
    ),
    "multinomial for all samples": (
        lambda m, x: m.read(x) * (1 + torch.multinomial(m.read.bias.softmax(0), 2).sum()),
        VECTORS,
    ),
    "stochastic depth": (skipped, VECTORS),
    "without gradient": (without_gradient, VECTORS),
    "unused": (unused, VECTORS),
    "positions first": (positions_first, SEQUENCES),
    "samples first": (samples_first, SEQUENCES),
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], list[Pair]]] = {
    "dropout": (
        lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 9), nn.Dropout(0.5, inplace=True), nn.Linear(9, 3)),
        VECTORS,
    ),
    "feature alpha dropout": (lambda: read_out(nn.FeatureAlphaDropout(0.4), 72), IMAGES),
    "dropout2d among convolutions": (convolving, IMAGES),
    "dropout3d": (lambda: read_out(nn.Dropout3d(0.4), 54), VOLUMES),
    "attention layer": (lambda: Attending(batch_first=True), SEQUENCES),
    "attention layer, positions first": (lambda: Attending(batch_first=False), SEQUENCES),
    "encoder": (lambda: read_out(nn.TransformerEncoderLayer(5, 1, 8, batch_first=True), 20), SEQUENCES),
    "lstm": (lambda: Remembering(nn.LSTM), SEQUENCES),
    "gru": (lambda: Remembering(nn.GRU), SEQUENCES),
}


def made(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Made(function, layer=nn.Linear(5, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Pair]]] = {
    **{name: (partial(made, function), pairs) for name, (function, pairs) in FUNCTIONS.items()},
    **LAYERS,
}
ACCUMULATING = {"accumulate": 2, "batch_size": 3, "momentum": 0.9}


@pytest.mark.parametrize("name", thinned(MODELS, quick=17))
def test_every_model_that_draws(name: str) -> None:
    """Clients of unequal numbers of samples and steps, each from a stream of its own."""
    make, pairs = MODELS[name]
    assert_trains_alike(Task(make().double(), pairs, local()))


@pytest.mark.long
@pytest.mark.parametrize("keys", [ACCUMULATING, {"batch_size": 5, "epochs": 3}, OPTIMIZERS["adam"]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_that_draws_however_it_steps(name: str, keys: dict[str, Any]) -> None:
    make, pairs = MODELS[name]
    assert_trains_alike(Task(make().double(), pairs, local(**keys)), 1e-8)


class Telling(nn.Module):
    """Its gradient is the mask of the dropout: sample i, which is a row of the identity, has row i of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_BD = nn.Parameter(torch.zeros(8, 6))

    def forward(self, row_B: Tensor) -> Tensor:
        return functional.dropout(row_B @ self.weight_BD, 0.5).sum(1)


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def told_samples(count: int) -> Pair:
    return torch.eye(8)[:count], torch.zeros(count)


@pytest.mark.parametrize("place", [0, 3, -1])
@pytest.mark.parametrize("clients", [1, 5, 32])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_masks_are_the_same_in_a_group_of_any_size(count: int, clients: int, place: int) -> None:
    """And are those that PyTorch's dropout draws from the client's seed, step after step."""
    others = [1 + number % 8 for number in range(clients)]
    sizes = [*others[:-1], count] if place == -1 else others
    place = place % clients
    sizes[place] = count
    seeds = [1000 + number for number in range(clients)]
    seeds[place] = 7
    pairs = [told_samples(size) for size in sizes]
    task = Task(Telling(), pairs, local(lr=1.0, epochs=3), mean, own_starts=False, draws_from=seeds)
    told_BD = -task.in_a_group().params_KV[place].view(8, 6)[:count] * count
    torch.manual_seed(7)
    expected_BD = torch.stack([functional.dropout(torch.ones(count, 6), 0.5) for _ in range(3)]).sum(0)
    assert torch.equal(told_BD.round(decimals=3), expected_BD)


def test_the_users_own_generator_stays_as_it_is() -> None:
    task = Task(nn.Sequential(nn.Linear(5, 3), nn.Dropout()).double(), VECTORS, local())
    before = torch.get_rng_state()
    task.in_a_group()
    assert torch.equal(before, torch.get_rng_state())


def drawing_more_alone(model: Any, x: Tensor) -> Tensor:
    dropped = x if torch.compiler.is_compiling() else functional.dropout(x)
    scores: Tensor = model.read(functional.dropout(dropped))
    return scores


def drawing_otherwise_alone(model: Any, x: Tensor) -> Tensor:
    draw = torch.rand_like if torch.compiler.is_compiling() else torch.randn_like
    scores: Tensor = model.read(x + draw(x))
    return scores


UNLIKE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a generator of its own": lambda m, x: m.read(x + torch.rand(5, generator=torch.Generator())),
    "randperm": lambda m, x: m.read(x[:, torch.randperm(5)]),
    "more alone": drawing_more_alone,
    "otherwise alone": drawing_otherwise_alone,
    "for pairs of samples": lambda m, x: m.read(x + torch.rand(len(x), len(x)).mean()),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_draws_that_differ_in_a_group_raise_an_error(name: str) -> None:
    with pytest.raises(UnlikeDraws):
        Task(Made(UNLIKE[name]).double(), VECTORS, local()).in_a_group()
