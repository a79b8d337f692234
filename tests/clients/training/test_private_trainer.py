"""Tests of local training by DP-SGD."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch.func import functional_call

import fed
from fed.aggregators.base import Phase
from fed.aggregators.fedprox import FedProx
from fed.clients.models import char_gru, char_transformer, cnn, mlp
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training.draws import UnlikeDraws
from fed.clients.training.local_context import LocalContext
from fed.clients.training.private_trainer import ClientDraws, PrivateTrainer
from fed.clients.training.sample_gradients import clipped_sums, gradients_of_each
from fed.clients.training.work_items import Train
from fed.clients.training.worker import Work
from fed.config.experiment import Local
from fed.errors import InvalidModel
from fed.privacy.dp_sgd import Inclusion, SamplePrivacy
from fed.simulations.simulation import Simulation
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, nn, torch
from tests.devices import Current
from tests.simulations import users_parts

pytestmark = pytest.mark.usefixtures("device")

_CLASSES = 5


class _Branching(nn.Module):
    """A model in which layers share a parameter, and one is used by an operation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.last = nn.Linear(6, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.first(self.first(x).tanh() * self.scale).tanh())
        return scores


class _Shared(nn.Module):
    """A model in which a layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.first(self.norm(self.first(x).tanh())).tanh())
        return scores


class _Mixing(nn.Module):
    """A model that centres each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x - x.mean(0))
        return scores


def _frozen() -> nn.Module:
    module = mlp((6,), _CLASSES, hidden=(8, 7))
    next(module.parameters()).requires_grad_(False)
    return module


def _strided() -> nn.Module:
    convolutions = [nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 2, dilation=2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, _CLASSES))


_MODELS: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "mlp": (lambda: mlp((6,), _CLASSES, hidden=(8,)), (6,), False),
    "frozen": (_frozen, (6,), False),
    "shared": (_Shared, (6,), False),
    "branching": (_Branching, (6,), False),
    "cnn": (lambda: cnn((1, 8, 8), _CLASSES, channels=(8, 16), hidden=6), (1, 8, 8), False),
    "strided": (_strided, (4, 8, 8), False),
    "gru": (lambda: char_gru(_CLASSES, embedding=3, hidden=4), (4,), True),
    "transformer": (lambda: char_transformer((4,), _CLASSES, width=4, heads=2, layers=1), (4,), True),
}


def _samples(shape: tuple[int, ...], count: int, *, is_text: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if is_text:
        characters = torch.randint(_CLASSES, (2, count, *shape), generator=generator)
        return characters[0], characters[1]
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(_CLASSES, (count,), generator=generator)


def _made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    make, shape, is_text = _MODELS[name]
    torch.manual_seed(1)
    inputs, targets = _samples(shape, 12, is_text=is_text)
    return make().to(dtype), (inputs if is_text else inputs.to(dtype), targets)


def _trainer(module: nn.Module, *, phase: Phase | None = None, z: Any = 0.0, clip: float = 0.5, **local: Any) -> Any:
    return PrivateTrainer(
        module=copy.deepcopy(module),
        loss=cross_entropy,
        local=Local(**local),
        phase=phase or Phase(),
        device=Current.device,
        privacy=SamplePrivacy(clip=clip, noise_multiplier=z),
    )


def _start(trainer: Any) -> tuple[Tensor, Tensor]:
    """The trainer's own state, on the CPU."""
    vector_V, integers_I = trainer.layout.pack(trainer.module)
    return vector_V.cpu(), integers_I.cpu()


def _draws(client: int) -> ClientDraws:
    return ClientDraws(np.random.default_rng(client), np.random.default_rng(100 + client))


def _trained(
    trainer: Any, held: Sequence[tuple[Tensor, Tensor]], first: int = 0, context: LocalContext | None = None
) -> Tensor:
    start = _start(trainer)
    draws = [_draws(first + row) for row in range(len(held))]
    vectors: Tensor = trainer.train(*start, held, draws, context or LocalContext())[0]
    return vectors


def _oracle(module: nn.Module, held: tuple[Tensor, Tensor], places: Sequence[int], clip: float) -> Tensor:
    """Sum of clipped gradients [P], sample by sample."""
    total = torch.zeros(Layout.of(module).parameters, dtype=torch.float64)
    trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
    for place in places:
        loss = cross_entropy(functional_call(module, {}, (held[0][place : place + 1],)), held[1][place : place + 1])
        parts = torch.autograd.grad(loss, [*trained.values()], allow_unused=True, materialize_grads=True)
        by_name = dict(zip(trained, parts, strict=True))
        gradient = torch.cat([by_name[part.name].flatten() for part in Layout.of(module).trained])
        total += gradient * min(1.0, clip / float(gradient.norm()))
    return total


@pytest.mark.parametrize("name", _MODELS)
def test_step_without_noise_is_that_of_a_loop(name: str) -> None:
    """Held to 1e-12 in float64, which leaves room for sums in another order, and for the hair below the clip."""
    module, held = _made(name)
    clip = 0.4
    trainer = _trainer(module, clip=clip, batch_size=6, steps=1, lr=1.0)
    places = Inclusion(_draws(0).inclusion, samples=12, rate=0.5, steps=1).next()
    assert 0 < len(places) < 12
    start, _ = trainer.layout.pack(module)
    expected = start.clone()
    expected[: trainer.layout.parameters] -= _oracle(module, held, places.tolist(), clip) / 6
    assert torch.allclose(_trained(trainer, [held])[0], expected, rtol=0, atol=1e-12)


def test_layers_of_usual_models_need_no_gradients_of_samples() -> None:
    for name, is_tapped in {"mlp": True, "cnn": True, "shared": True, "branching": False}.items():
        module, held = _made(name)
        trainer = _trainer(module, batch_size=6, steps=1)
        _trained(trainer, [held])
        (way,) = trainer._gradients._ways.values()
        assert way.is_tapped is is_tapped


def test_sample_is_alone_in_a_model_that_mixes() -> None:
    """Its gradient is that of a batch of one, whose centre it is itself: only the bias moves."""
    torch.manual_seed(1)
    module = _Mixing().double()
    held = _samples((6,), 12, is_text=False)
    start, _ = Layout.of(module).pack(module)
    moved = _trained(_trainer(module, batch_size=6, steps=1, lr=1.0), [held])[0] - start
    parts = {part.name: part.view(moved) for part in Layout.of(module).trained}
    assert not parts["last.weight"].any()
    assert parts["last.bias"].any()


class _Attending(nn.Module):
    """A model in which each sample of a batch looks at all."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.first(x)) if self.dropout.p else self.first(x)
        scores: Tensor = self.last((hidden @ hidden.T).softmax(-1) @ hidden)
        return scores


@pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["beside equal samples", "beside dropout"])
def test_attention_over_a_batch_is_found(dropout: float) -> None:
    """A sample moves the sum by its own gradient at most, where the first ones are equal or the model draws, too."""
    torch.manual_seed(1)
    module = _Attending(dropout).double()
    inputs, targets = _samples((6,), 12, is_text=False)
    inputs[:3] = inputs[0]
    targets[:3] = targets[0]
    changed = inputs.clone()
    changed[9] *= 300
    clip = 0.5
    one, other = (
        _trained(_trainer(module, clip=clip, batch_size=12, steps=1, lr=1.0), [(held, targets)])[0]
        for held in (inputs, changed)
    )
    assert float((one - other).norm()) * 12 <= 2 * clip


class _BySize(nn.Module):
    """A model that centres large batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x - x.mean(0) if len(x) > 3 else x)
        return scores


class _UsedOtherwiseBySize(_BySize):
    """A model that uses a parameter otherwise in large batches."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x) if len(x) <= 3 else x @ self.last.weight.T
        return scores


@pytest.mark.parametrize("make", [_BySize, _UsedOtherwiseBySize])
def test_model_that_mixes_large_batches_is_refused(make: type[nn.Module]) -> None:
    held = _samples((6,), 12, is_text=False)
    with pytest.raises(InvalidModel, match="treat each sample as if it were alone, in a batch of any size"):
        _trained(_trainer(make().double(), batch_size=12, steps=1), [held])


class _Remembering(nn.Module):
    """A model that adds what it saw before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, _CLASSES)
        self.before = torch.zeros(_CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x) + self.before
        self.before = scores.detach().mean(0)
        return scores


class _Normalising(nn.Module):
    """A model that normalises batches by a function, which no batch of one sample goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(nn.functional.batch_norm(x, None, None, training=True))
        return scores


@pytest.mark.parametrize(
    ("make", "rule"), [(_Remembering, "computed anew each time"), (_Normalising, "more than 1 value per channel")]
)
def test_model_of_other_samples_is_refused(make: type[nn.Module], rule: str) -> None:
    held = _samples((6,), 12, is_text=False)
    with pytest.raises(InvalidModel, match=rule):
        _trained(_trainer(make().double(), batch_size=12, steps=1), [held])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", ["mlp", "cnn", "gru", "branching"])
def test_group_trains_as_its_clients_alone(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Noise included; a difference by rounding alone. Clients have other sizes, and so other numbers of steps."""
    module, (inputs, targets) = _made(name, dtype)
    held = [(inputs[:size], targets[:size]) for size in (5, 12, 3)]
    trainer = _trainer(module, z=0.3, batch_size=4, epochs=2, lr=0.05, momentum=0.5, weight_decay=0.01)
    together = _trained(trainer, held)
    alone = torch.cat([_trained(trainer, [pair], first=row) for row, pair in enumerate(held)])
    assert not torch.equal(together[0], together[1])
    assert torch.allclose(together, alone, rtol=0, atol=tolerance)


def test_rule_corrects_the_noised_gradient() -> None:
    """FedProx's pull towards the anchor is added as it is: on top of the same noise and the same samples."""
    module, held = _made("mlp")
    local: dict[str, Any] = {"batch_size": 6, "steps": 1, "lr": 0.5}
    start, _ = Layout.of(module).pack(module)
    context = LocalContext(anchor_P=torch.zeros(Layout.of(module).parameters, dtype=torch.float64))
    plain = _trained(_trainer(module, z=1.0, **local), [held])[0]
    rule = FedProx(mu=0.25)
    pulled = _trained(_trainer(module, z=1.0, phase=Phase(rule=rule), **local), [held], context=context)[0]
    assert torch.allclose(pulled, plain - 0.5 * 0.25 * start, rtol=0, atol=1e-12)


def _noise_of_steps(*, z: float, clip: float, steps: int, batch_size: int = 6) -> Tensor:
    """Noise of steps on samples without a gradient, as it moves the model: times the expected batch."""
    module = nn.Linear(6, _CLASSES).double()
    nn.init.zeros_(module.weight)
    held = (torch.zeros(12, 6, dtype=torch.float64), torch.zeros(12, dtype=torch.int64))
    with torch.no_grad():
        module.bias[0] = 1e6  # the right class for certain: no gradient
    trainer = _trainer(module, z=z, clip=clip, batch_size=batch_size, steps=1, lr=1.0)
    start, integers = trainer.layout.pack(module)
    draws = [_draws(1000 + number) for number in range(steps)]
    moved = trainer.train(start, integers, [held] * steps, draws)[0] - start
    noise: Tensor = -moved * min(batch_size, 12)
    return noise


def test_noise_of_a_step_is_gaussian() -> None:
    """Kolmogorov and Smirnov: D > √(ln(2 / α) / 2n) has probability α at most (Massart 1990), here α = 1e-9.

    The mean of n draws is within 6 σ / √n, and their variance within 6 √(2 / n) of it, but for probabilities of 2e-9.
    Biases stand beside 1e6 in float64, which rounds them by 1e-10.
    """
    z = 1.5
    clip = 0.3
    noise = _noise_of_steps(z=z, clip=clip, steps=200).flatten().sort().values / (z * clip)
    n = len(noise)
    below = 0.5 * (1 + torch.erf(noise / math.sqrt(2)))
    steps = torch.arange(n + 1) / n
    distance = max(float((steps[1:] - below).max()), float((below - steps[:-1]).max()))
    assert distance < math.sqrt(math.log(2 / 1e-9) / (2 * n))
    assert abs(float(noise.mean())) < 6 / math.sqrt(n)
    assert abs(float(noise.square().mean()) - 1) < 6 * math.sqrt(2 / n)


def test_clients_of_a_group_have_noise_by_their_sizes() -> None:
    module, (inputs, targets) = _made("mlp")
    sizes = (4, 12)
    held = [(inputs[:size], targets[:size]) for size in sizes]
    local: dict[str, Any] = {"batch_size": 2, "steps": 3, "lr": 1.0}
    together = _trained(_trainer(module, z=lambda samples: samples / 4, **local), held)
    for row, size in enumerate(sizes):
        alone = _trained(_trainer(module, z=size / 4, **local), [held[row]], first=row)[0]
        assert torch.allclose(together[row], alone, rtol=0, atol=1e-9)


def test_divisor_is_the_expected_batch() -> None:
    """The drawn size differs from client to client: with it as divisor, the same sum would move the model otherwise."""
    module, held = _made("mlp")
    for client in range(3):
        places = Inclusion(_draws(client).inclusion, samples=12, rate=0.5, steps=1).next()
        trainer = _trainer(module, clip=0.4, batch_size=3, accumulate=2, steps=1, lr=1.0)
        start, _ = trainer.layout.pack(module)
        moved = start - _trained(trainer, [held], first=client)[0]
        assert torch.allclose(moved * 6, _oracle(module, held, places.tolist(), 0.4), rtol=0, atol=1e-12)


def test_noise_alone_moves_the_model_where_a_batch_is_empty() -> None:
    module, held = _made("mlp")
    local: dict[str, Any] = {"batch_size": 1, "steps": 1, "lr": 1.0}
    empty = next(
        client for client in range(50) if not len(Inclusion(_draws(client).inclusion, 12, 1 / 12, steps=1).next())
    )
    start, _ = Layout.of(module).pack(module)
    assert torch.equal(_trained(_trainer(module, **local), [held], first=empty)[0], start)
    trainer = _trainer(module, z=1.0, **local)
    moved = _trained(trainer, [held], first=empty)[0] - start
    assert (moved != 0).all()
    stack = trainer._stack(1)
    places = stack.joined([torch.ones_like(part) for part in stack.tensors(1)])
    assert not stack.x_KQ[places == 0].any()


@pytest.mark.parametrize("broken", [[0], [0, 1, 2]], ids=["one", "all"])
def test_first_samples_may_be_without_finite_gradients(broken: list[int]) -> None:
    """By which the way to compute gradients is tried: they count as zero, like others."""
    module, (inputs, targets) = _made("mlp")
    rest = [place for place in range(12) if place not in broken]
    changed = inputs.clone()
    changed[broken] = math.inf
    start, _ = Layout.of(module).pack(module)
    found, expected = (
        (start - _trained(_trainer(module, batch_size=12, steps=1, lr=1.0), [held])[0]) * len(held[1])
        for held in ((changed, targets), (inputs[rest], targets[rest]))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn", "branching"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e12, -1e5, 0.0])
def test_one_sample_moves_the_sum_by_the_clip_at_most(name: str, value: float) -> None:
    """In float32, whose sums round: 1e-5 of the clip is room for that. A gradient that is not finite counts as zero."""
    module, (inputs, targets) = _made(name, torch.float32)
    clip = 0.7
    trainer = _trainer(module, clip=clip, batch_size=12, steps=1, lr=1.0)
    start, _ = trainer.layout.pack(module)

    def sums(places: Sequence[int], changed: Tensor) -> Tensor:
        # q = 1: all samples are in the batch, whose expected size is their number.
        held = changed[list(places)], targets[list(places)]
        sums: Tensor = (start - _trained(trainer, [held])[0]) * len(places)
        return sums

    changed = inputs.clone()
    changed[4] = value
    rest = [place for place in range(12) if place != 4]
    for one in (inputs, changed):
        moved = float((sums(range(12), one) - sums(rest, one)).norm())
        assert moved <= clip * (1 + 1e-5) + 1e-6
    assert torch.isfinite(sums(range(12), changed)).all()
    if not math.isfinite(value):
        assert torch.allclose(sums(range(12), changed), sums(rest, changed), rtol=0, atol=1e-5)
        assert torch.equal(sums([4], changed), torch.zeros_like(start))


class _Faint(nn.Module):
    """A model whose inputs' squares are no numbers, and whose gradient is one all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, _CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x * 1e-23) * 1e19
        return scores


@pytest.mark.parametrize("clip", [1e-5, 1e-20])
def test_faint_inputs_do_not_pass_a_small_clip(clip: float) -> None:
    module = _Faint()
    nn.init.zeros_(module.last.weight)
    inputs, targets = _samples((6,), 3, is_text=False)  # of one sample alone no rule of a layer is used
    trainer = _trainer(module, clip=clip, batch_size=3, steps=1, lr=1.0)
    assert float(_trained(trainer, [(inputs.float(), targets)]).double().norm()) <= clip


@pytest.mark.parametrize("numbers", [1, 1023, 1024, 5000, 3_000_000])
@pytest.mark.parametrize("value", [1e-3, 1e3])
def test_long_gradients_are_no_longer_than_the_clip(numbers: int, value: float) -> None:
    """Of equal numbers, whose sum of squares loses most to rounding in float32."""
    parameter = torch.zeros(1, numbers, requires_grad=True)
    gradients = gradients_of_each((value * parameter).sum(1), {0: parameter}, samples=1)
    sums, squares_KB = clipped_sums(gradients, torch.ones(1, 1), clip=min(0.5 * value, 1.0), finite_alone=False)
    assert sums[0].double().norm() <= min(0.5 * value, 1.0)
    assert float(squares_KB) == pytest.approx(numbers * value**2, rel=1e-5)


def test_number_of_steps_does_not_depend_on_draws() -> None:
    module, _ = _made("mlp")
    trainer = _trainer(module, z=1.0, batch_size=5, epochs=2, lr=0.1)
    assert [trainer._plan(size, None).steps for size in (3, 5, 12)] == [2, 2, 6]
    assert trainer._plan(12, 4).steps == 4
    assert trainer._plan(12, None).rate == 5 / 12


def test_model_that_draws_trains_alone() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, _CLASSES)).double()
    held = _samples((6,), 12, is_text=False)
    trainer = _trainer(module, batch_size=6, steps=2, lr=1.0)
    assert torch.equal(_trained(trainer, [held]), _trained(trainer, [held]))
    with pytest.raises(UnlikeDraws):
        _trained(trainer, [held, held])


def test_model_that_looks_at_numbers_is_refused() -> None:
    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    trainer = _trainer(Looking(6, _CLASSES).double(), batch_size=6, steps=1)
    with pytest.raises(InvalidModel, match="must be able to compute it under vmap"):
        _trained(trainer, [_samples((6,), 12, is_text=False)])


def test_work_is_the_same_batched_and_alone() -> None:
    """A whole task of two clients, in float32; another source of draws gives another result."""
    data = fed.FederatedData({name: users_parts.samples(20, number) for number, name in enumerate("ab")})
    keys = {"local": {"batch_size": 8, "epochs": 2}, "rounds": {"count": 1}, "simulation": {"batching": "off"}}
    simulation = Simulation(fed.Experiment(**keys), data, users_parts.small)
    privacy = SamplePrivacy(clip=0.5, noise_multiplier=1.0)
    state = simulation.layout.pack(simulation.recipe.module)
    found = []
    for changed in ({"is_batched": True}, {"is_batched": False}, {"private_source": Streams(7)}):
        work = Work(replace(simulation.recipe, sample_privacy=privacy, **changed), Current.device)
        trained, (vectors, *_) = work.train(Train(("a", "b"), 1, wants="models"), state)
        assert trained.train_losses == (0.0, 0.0)
        found.append(vectors)
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-6)
    assert not torch.allclose(found[0], found[2], rtol=0, atol=1e-3)
