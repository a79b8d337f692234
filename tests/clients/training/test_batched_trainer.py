"""Groups of clients trained as one computation against the same clients trained one after another.

Shapes: K, clients of a group; B, samples of a batch; D, numbers of a sample; T, positions of a sequence; C, classes; V,
a client's floating-point state; I, its integers; P, trainable parameters.
"""

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fed.aggregators.base import LocalRule, Phase
from fed.aggregators.fedprox import FedProx
from fed.clients.models import char_gru, char_transformer, cnn, logistic, mlp
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.measures import Loss
from fed.clients.training import batches as group_steps
from fed.clients.training.batched_trainer import BatchedTrainer
from fed.clients.training.local_context import LocalContext
from fed.clients.training.trainer import Trainer
from fed.clients.training.worker import on_device
from fed.config.experiment import Local
from fed.errors import InvalidModel
from fed.vectors.layout import Layout
from tests.clients.training.client_groups import of_a_small_device
from tests.devices import Current
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

CPU = torch.device("cpu")
Pair = tuple[Tensor, Tensor]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
UNEQUAL = (1, 12, 20, 13, 9)
"""Samples of clients. With batches of 8 they take one, two, three, two and two steps an epoch, the last ones short."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def local(**keys: Any) -> Local:
    return Local(**{"batch_size": 8, "epochs": None if "steps" in keys else 2, "lr": 0.1, **keys})


def samples(counts: Sequence[int], shape: tuple[int, ...] = (5,), classes: int = 3, seed: int = 1) -> list[Pair]:
    """Of clients who disagree: each has a bias of its own."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for count in counts:
        inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, classes, (count,), generator=generator)
        pairs.append((inputs + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64), labels))
    return pairs


def texts(counts: Sequence[int], length: int = 6, characters: int = 7) -> list[Pair]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, characters, (count, length + 1), generator=generator) for count in counts]
    return [(part[:, :-1], part[:, 1:]) for part in drawn]


class TrainedGroup(NamedTuple):
    """Trained states and mean losses of K clients."""

    params_KV: Tensor
    integers_KI: Tensor
    train_losses: list[float]


@dataclass
class Task:
    """What a group trains, and where from."""

    module: nn.Module
    pairs: list[Pair]
    local: Local
    loss: Loss = cross_entropy
    rule: LocalRule | None = None
    broadcast: tuple[Tensor, ...] = ()
    own_starts: bool = True
    seed: int = 0
    draws_from: Sequence[int] = ()
    trains: Literal["all", "shared", "private"] = "all"
    private: tuple[str, ...] = ()

    def phase(self) -> Phase:
        return Phase(rule=self.rule, trains=self.trains)

    def starts(self) -> tuple[Tensor, Tensor]:
        """One state for all; or each client's own, a little away from the others'."""
        start_V, integers_I = Layout.of(self.module, self.private).pack(self.module)
        if not self.own_starts:
            return start_V, integers_I
        clients = len(self.pairs)
        generator = torch.Generator().manual_seed(5)
        away_KV = 0.1 * torch.randn(clients, len(start_V), generator=generator, dtype=start_V.dtype)
        return start_V + away_KV, integers_I + torch.arange(clients)[:, None]

    def seeds(self) -> Sequence[int]:
        """Each client's seed of what the model draws."""
        return self.draws_from or range(100, 100 + len(self.pairs))

    def in_a_group(self, by: BatchedTrainer | None = None) -> TrainedGroup:
        """Trained as one computation."""
        by = by or self.group_trainer()
        orders = [partial(np.random.default_rng, [self.seed, number]) for number in range(len(self.pairs))]
        seeds = [partial(int, seed) for seed in self.seeds()]
        states, losses = by.train(*self.starts(), self.pairs, orders, LocalContext(broadcast=self.broadcast), seeds)
        return TrainedGroup(*states, losses)

    def group_trainer(self, device: torch.device | None = None) -> BatchedTrainer:
        """A trainer of groups, with a module of its own, on the test's device unless another is given."""
        device = device or Current.device
        loss = on_device(self.loss, device)
        return BatchedTrainer(copy.deepcopy(self.module), loss, self.local, self.phase(), device, self.private)

    def one_by_one(self) -> TrainedGroup:
        """Trained one client after another."""
        by = Trainer(copy.deepcopy(self.module), self.loss, self.local, self.phase(), CPU, self.private)
        rows = zip(*(part.expand(len(self.pairs), -1) for part in self.starts()), self.pairs, strict=True)
        trained = [
            by.train(
                start_V,
                integers_I,
                pair,
                order=np.random.default_rng([self.seed, number]),
                seed=seed,
                context=LocalContext(broadcast=self.broadcast),
            )
            for number, ((start_V, integers_I, pair), seed) in enumerate(zip(rows, self.seeds(), strict=True))
        ]
        return TrainedGroup(
            torch.stack([one.params_V for one in trained]),
            torch.stack([one.integers_I for one in trained]),
            [one.train_loss for one in trained],
        )


def assert_agree(got: TrainedGroup, expected: TrainedGroup, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got.params_KV, expected.params_KV, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(got.integers_KI, expected.integers_KI)
    assert got.train_losses == pytest.approx(expected.train_losses, rel=tolerance, abs=tolerance, nan_ok=True)


def assert_trains_alike(task: Task, tolerance: float = 1e-10) -> TrainedGroup:
    """In a group and one by one; and the training is one: everybody has moved."""
    got = task.in_a_group()
    assert_agree(got, task.one_by_one(), tolerance)
    assert bool((got.params_KV != task.starts()[0]).any(1).all())
    return got


class Drifting(LocalRule):
    """Adds what was sent along, and draws towards the anchor by a number for every parameter."""

    def correct(self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, _: object, sent: tuple[Tensor, ...]) -> Tensor:
        return gradient_P + sent[0] + sent[1] * (x_P - anchor_P)


class Clipping(LocalRule):
    """Shortens gradients to length 0.1: each client's its own."""

    def correct(self, gradient_P: Tensor, *_: object) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(gradient_P, dim=-1, keepdim=True)
        return gradient_P / (lengths / 0.1).clamp(min=1)


class Overwriting(LocalRule):
    """Writes its correction into the gradient, and looks at the group as a whole in no way."""

    def correct(self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, *_: object) -> Tensor:
        return gradient_P.add_(x_P - anchor_P, alpha=0.3).mul_(0.5)


RULES: dict[str, LocalRule | None] = {
    "no rule": None,
    "fedprox": FedProx(mu=0.7),
    "drifting": Drifting(),
    "clipping": Clipping(),
    "overwriting": Overwriting(),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_under_every_rule(optimizer: dict[str, Any], rule: LocalRule | None) -> None:
    """Over clients of two, four and six steps, so that states of optimizers are dropped as clients finish."""
    module = small()
    parameters = Layout.of(module).parameters
    sent = (torch.linspace(-0.1, 0.1, parameters).double(), torch.linspace(0, 1, parameters).double())
    assert_trains_alike(Task(module, samples(UNEQUAL), local(**optimizer), rule=rule, broadcast=sent))


class Made(nn.Module):
    """A model of a function of itself and the inputs, with a linear layer ``read`` and what else it is given."""

    def __init__(
        self,
        function: Callable[[Any, Tensor], Tensor],
        buffers: dict[str, Tensor] | None = None,
        unsaved: dict[str, Tensor] | None = None,
        **parameters: Tensor | nn.Module,
    ) -> None:
        super().__init__()
        self.read = nn.Linear(5, 3)
        self._function = function
        for name, part in parameters.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part))
        for saved, parts in ((True, buffers), (False, unsaved)):
            for name, part in (parts or {}).items():
                self.register_buffer(name, part, persistent=saved)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(self, inputs)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 5))
        self.norm = nn.LayerNorm(5)
        self.read = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        states = inputs
        for _ in range(2):
            states = states + self.inner(self.norm(states))
        scores: Tensor = self.read(states.relu_())
        return scores


class Recurrent(nn.LSTM):
    """The last outputs, of both directions."""

    def __init__(self) -> None:
        super().__init__(5, 4, batch_first=True, bidirectional=True)

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        outputs: Tensor = super().forward(inputs)[0]
        return outputs[:, -1]


class Embedded(nn.Module):
    """Reads out by the weights that it reads in by, and scales by a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.read = nn.Linear(4, 7)
        self.read.weight = self.embed.weight

    def forward(self, characters_BT: Tensor) -> Tensor:
        scores_BCT: Tensor = self.read(self.embed(characters_BT) * self.scale).transpose(1, 2)
        return scores_BCT


def frozen() -> nn.Module:
    module = small()
    module.get_submodule("0").requires_grad_(False)
    return module


def with_constants(m: Any, x: Tensor) -> Tensor:
    scores: Tensor = m.read(x * torch.arange(5.0, device=x.device))
    return scores + torch.tensor([1.0, 2.0, 3.0], device=x.device)


def writes_its_inputs(model: Any, inputs: Tensor) -> Tensor:
    scores: Tensor = model.read(inputs.mul_(0.5).add_(1.0))
    return scores


def spectral(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1, stride=2, bias=False), nn.GroupNorm(2, channels), nn.SiLU(inplace=True)
    )


R = torch.randn
VECTORS, IMAGES, TEXTS = samples(UNEQUAL), samples(UNEQUAL, (2, 6, 6)), texts(UNEQUAL)
MODELS: dict[str, tuple[Callable[[], nn.Module], list[Pair]]] = {
    "logistic": (lambda: logistic((5,), 3), VECTORS),
    "mlp": (lambda: mlp((5,), 3, (6, 4)), VECTORS),
    "single tensor": (lambda: nn.Linear(5, 3, bias=False), VECTORS),
    "cnn": (lambda: cnn((2, 6, 6), 3, (4,), 8), IMAGES),
    "cnn of one channel": (lambda: cnn((6, 6), 3, (2, 4), 8), samples(UNEQUAL, (6, 6))),
    "char_transformer": (lambda: char_transformer((6,), 7, width=8, heads=2, layers=1), TEXTS),
    "char_gru": (lambda: char_gru(7, 4, 4, 2), TEXTS),
    "lstm": (lambda: nn.Sequential(Recurrent(), nn.Linear(8, 3)), samples(UNEQUAL, (6, 5))),
    "residual, in place": (Residual, VECTORS),
    "embedding, tied, frozen": (Embedded, TEXTS),
    "padded embedding": (lambda: embedded(padding_idx=2), TEXTS),
    "embedding padded from the end": (lambda: embedded(padding_idx=-1), TEXTS),
    "convolution with stride": (lambda: nn.Sequential(spectral(4), nn.Flatten(), nn.Linear(36, 3)), IMAGES),
    "frozen layer": (frozen, VECTORS),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))),
        VECTORS,
    ),
    "float buffer": (lambda: Made(lambda m, x: m.read(x) * m.scale, {"scale": R(3), "other": R(2, 2)}), VECTORS),
    "buffer of a narrower type": (lambda: Made(lambda m, x: m.read(x) * m.scale, {"scale": R(3).half()}), VECTORS),
    "integer and boolean buffers": (
        lambda: Made(
            lambda m, x: m.read(torch.where(m.mask, x, 1.0)) * m.count,
            {"count": torch.tensor(3), "mask": torch.tensor([True, False, True, True, False])},
        ),
        VECTORS,
    ),
    "shape in place": (lambda: Made(lambda m, x: m.read((x * 1).unsqueeze_(1)).squeeze(1)), VECTORS),
    "unsaved buffer": (lambda: Made(lambda m, x: m.read(x) + m.shift, unsaved={"shift": R(3)}), VECTORS),
    "unused parameters": (lambda: Made(lambda m, x: m.read(x), unused=R(2, 3), number=R(())), VECTORS),
    "parameters of no dimension": (
        lambda: Made(lambda m, x: m.read(x * m.scale) + m.shift, scale=R(()), shift=R(())),
        VECTORS,
    ),
    "parameter without numbers": (lambda: Made(lambda m, x: m.read(x) + m.none.sum(), none=R(0)), VECTORS),
    "product of parameters": (lambda: Made(lambda m, x: x @ (m.a @ m.b), a=R(5, 2), b=R(2, 3)), VECTORS),
    "parameter by itself": (lambda: Made(lambda m, x: m.read(x @ (m.a @ m.a.T)), a=R(5, 5) / 3), VECTORS),
    "parameter as the output": (lambda: Made(lambda m, x: m.a + 0 * m.read(x), a=R(3)), VECTORS),
    "layer used twice": (lambda: Made(lambda m, x: m.read(m.layer(m.layer(x).tanh())), layer=nn.Linear(5, 5)), VECTORS),
    "inputs overwritten": (lambda: Made(writes_its_inputs), VECTORS),
    "detached": (lambda: Made(lambda m, x: m.read(x) * m.read.weight.detach().sum()), VECTORS),
    "constants": (lambda: Made(with_constants), VECTORS),
    "no gradient inside": (lambda: Made(without_gradient), VECTORS),
}


def without_gradient(model: Any, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.read(inputs).abs().amax(1, keepdim=True)
    scores: Tensor = model.read(inputs) / scale
    return scores


@pytest.mark.parametrize(
    ("name", "optimizer"),
    thinned([(name, optimizer) for name in MODELS for optimizer in ("sgd", "nesterov")], quick=31),
)
def test_every_model(name: str, optimizer: str) -> None:
    """Moved in place, and by vectors of all parameters; each client from a state and buffers of its own."""
    make, pairs = MODELS[name]
    assert_trains_alike(Task(make().double(), pairs, local(**OPTIMIZERS[optimizer])))


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "keys", [{"batch_size": 3, "epochs": 4}, {"batch_size": 2, "steps": 11}, {"epochs": 5}], ids=str
)
def test_steps_are_taken_some_at_a_time(keys: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are cut: within an epoch, between two, or after all of some client's."""
    monkeypatch.setattr(group_steps, "_STEPS_AT_ONCE", at_once)
    assert_trains_alike(Task(small(), samples((7, 2, 9)), local(**keys)))


tasks = st.fixed_dictionaries(
    {
        "counts": st.lists(st.integers(1, 30), min_size=1, max_size=6),
        "width": st.integers(1, 5),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "rule": st.sampled_from(sorted(RULES)),
        "keys": st.fixed_dictionaries(
            {"batch_size": st.integers(1, 12), "accumulate": st.integers(1, 3)},
            optional={"epochs": st.integers(1, 3), "steps": st.integers(1, 9)},
        ).filter(lambda keys: len(keys) == 3),
        "own_starts": st.booleans(),
        "trains": st.sampled_from(["all", "shared", "private"]),
        "private": st.sampled_from([(), ("2.weight", "2.bias"), ("0.bias", "2.weight")]),
        "seed": st.integers(0, 99),
    }
).filter(lambda task: task["private"] or task["trains"] != "private")


@given(tasks)
def test_any_task(task: dict[str, Any]) -> None:
    torch.manual_seed(task["seed"])
    module = nn.Sequential(nn.Linear(2, task["width"]), nn.Tanh(), nn.Linear(task["width"], 3)).double()
    shared = Layout.of(module, task["private"]).shared.parameters
    sent = tuple(torch.rand(2, shared, dtype=torch.float64) / 10)
    pairs = samples(task["counts"], (2,), seed=task["seed"])
    keys = {"epochs": None, **OPTIMIZERS[task["optimizer"]], **task["keys"]}
    both_ways = Task(
        module,
        pairs,
        Local(**keys),
        rule=RULES[task["rule"]],
        broadcast=sent,
        own_starts=task["own_starts"],
        trains=task["trains"],
        private=task["private"],
        seed=task["seed"],
    )
    assert_trains_alike(both_ways)


def quartic(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 4).mean() + 0.1 * output.abs().sum(1).mean()


def written_into(output: Tensor, target: Tensor) -> Tensor:
    return output.sub(0.0).sub_(target).square_().mean()


REGRESSION = [(inputs, inputs[:, :3] * 0.5 + 0.1) for inputs, _ in VECTORS]
LOSSES: dict[str, tuple[Loss, list[Pair]]] = {
    "cross_entropy of torch": (functional.cross_entropy, VECTORS),
    "CrossEntropyLoss, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), VECTORS),
    "MultiMarginLoss": (lambda output, target: functional.nll_loss(output.log_softmax(1), target), VECTORS),
    "MSELoss": (nn.MSELoss(), REGRESSION),
    "SmoothL1Loss": (nn.SmoothL1Loss(), REGRESSION),
    "HuberLoss": (nn.HuberLoss(delta=0.1), REGRESSION),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), [(inputs, (target > 0.1).double()) for inputs, target in REGRESSION]),
    "BCELoss": (
        lambda output, target: functional.binary_cross_entropy(output.sigmoid(), target.sigmoid()),
        REGRESSION,
    ),
    "a function": (quartic, REGRESSION),
    "a function that writes": (written_into, REGRESSION),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_that_is_a_mean(name: str) -> None:
    loss, pairs = LOSSES[name]
    assert_trains_alike(Task(small(), pairs, local(), loss))


@pytest.mark.parametrize("loss", [cross_entropy, functional.cross_entropy, nn.CrossEntropyLoss()])
def test_losses_over_sequences(loss: Loss) -> None:
    """Scores [B, C, T] against labels [B, T]."""
    assert_trains_alike(Task(Embedded().double(), TEXTS, local(), loss))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_float32_agrees_within_rounding(optimizer: str) -> None:
    """A step adds up some dozens of products, each rounded by 2^-24; six steps of them, and Adam's quotients."""
    pairs = [(inputs.float(), labels) for inputs, labels in VECTORS]
    assert_trains_alike(Task(small(torch.float32), pairs, local(**OPTIMIZERS[optimizer])), tolerance=2e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn", "char_transformer"])
@pytest.mark.parametrize("keys", thinned([{}, {"momentum": 0.9}], quick=1), ids=str)
@pytest.mark.parametrize("loss", thinned([cross_entropy, functional.cross_entropy], quick=1))
def test_bfloat16_agrees_loosely(name: str, keys: dict[str, Any], loss: Loss) -> None:
    """To a tenth of what is learned; and is not float32.

    Numbers are rounded by 2^-8, and convolutions of many clients at once add up in another order, so that the largest
    of four may be another.
    """
    make, pairs = MODELS[name]
    pairs = [(inputs.float() if inputs.is_floating_point() else inputs, labels) for inputs, labels in pairs]
    task = Task(make(), pairs, local(precision="bfloat16", **keys), loss, own_starts=False)
    got, expected = task.in_a_group(), task.one_by_one()
    moved_KV = expected.params_KV - task.starts()[0]
    assert float((got.params_KV - expected.params_KV).norm()) < 0.1 * float(moved_KV.norm())
    assert got.train_losses == pytest.approx(expected.train_losses, rel=0.01)
    in_full = Task(task.module, pairs, local(**keys), loss, own_starts=False).in_a_group()
    assert got.params_KV.dtype == torch.float32
    assert not torch.allclose(got.params_KV, in_full.params_KV, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("keys", [{}, {"optimizer": "adam"}, {"batch_size": 64}], ids=str)
def test_the_same_group_gives_the_same_bits(keys: dict[str, Any]) -> None:
    """Whatever the trainer did in between, and of another trainer."""
    task = Task(small(torch.float32), [(inputs.float(), labels) for inputs, labels in VECTORS], local(**keys))
    by = task.group_trainer()
    first = task.in_a_group(by)
    other = Task(task.module, list(reversed(task.pairs)), task.local, seed=1).in_a_group(by)
    assert not torch.equal(first.params_KV, other.params_KV.flip(0))
    for again in (task.in_a_group(by), task.in_a_group()):
        assert torch.equal(again.params_KV, first.params_KV)
        assert again.train_losses == first.train_losses


def test_wider_results_are_the_same_numbers() -> None:
    pairs = [(inputs.float(), targets) for inputs, targets in samples((3, 9))]
    task = Task(MODELS["float buffer"][0](), pairs, local())
    orders = [partial(np.random.default_rng, number) for number in range(2)]
    by = task.group_trainer()
    (params_KV, _), losses = by.train(*task.starts(), task.pairs, orders)
    (wide_KV, _), again = by.train(*task.starts(), task.pairs, orders, dtype=torch.float64)
    assert params_KV.dtype is torch.float32
    assert wide_KV.dtype is torch.float64
    assert torch.equal(wide_KV, params_KV.double())
    assert again == losses


@pytest.mark.parametrize("name", ["mlp", "single tensor", "float buffer", "integer and boolean buffers"])
@pytest.mark.parametrize("counts", [(8, 8), (8,), (3, 9)], ids=str)
@pytest.mark.parametrize("own_starts", [True, False])
def test_results_belong_to_the_caller(name: str, counts: tuple[int, ...], own_starts: bool) -> None:
    """What is trained next changes none, nor does changing them; starts, samples and module stay as they are."""
    module = MODELS[name][0]().double()
    task = Task(module, samples(counts), local(), own_starts=own_starts)
    by, inputs = task.group_trainer(), [part for pair in task.pairs for part in pair]
    before = [part.clone() for part in (*inputs, *by.module.state_dict().values())]
    start_V, integers_I = task.starts()
    orders = [partial(np.random.default_rng, number) for number in range(len(counts))]
    first, _ = by.train(start_V, integers_I, task.pairs, orders)
    assert all(map(torch.equal, (start_V, integers_I), task.starts()))
    kept = copy.deepcopy(first)
    start_V += 1
    by.train(start_V, integers_I, samples(counts, seed=9), orders)
    assert all(map(torch.equal, first, kept))
    for part in first:
        part.zero_()
    again, _ = by.train(*task.starts(), task.pairs, orders)
    assert all(map(torch.equal, again, kept))
    assert all(map(torch.equal, (*inputs, *by.module.state_dict().values()), before))


@pytest.mark.parametrize(
    "keys", [{}, {"momentum": 0.9}, {"accumulate": 4, "batch_size": 4}, {"batch_size": 64}], ids=str
)
def test_a_trainer_serves_groups_of_any_sizes_one_after_another(keys: dict[str, Any]) -> None:
    by = Task(small(), [], local(**keys)).group_trainer()
    groups = [(4, 3), (20, 30, 7), (20, 30, 7), (1,), (4, 3), (3, 4), (16, 16, 16), (20, 7, 30), (33, 2)]
    for number, counts in enumerate(groups):
        task = Task(small(), samples(counts, seed=number), local(**keys), own_starts=bool(number % 2), seed=number)
        assert_agree(task.in_a_group(by), task.one_by_one())


def test_a_trainer_serves_samples_of_any_type_and_shape() -> None:
    module = Made(lambda m, x: m.read(x.double().flatten(1)[:, -5:])).double()
    by = Task(module, [], local()).group_trainer()
    bytes_ = [((inputs * 50).abs().to(torch.uint8), labels) for inputs, labels in VECTORS]
    halves = [(inputs.half(), labels.to(torch.int32)) for inputs, labels in VECTORS]
    for pairs in (VECTORS, bytes_, halves, samples((3, 9), (2, 7)), samples((3, 9), (7, 2))):
        task = Task(module, pairs, local())
        assert_agree(task.in_a_group(by), task.one_by_one())


def test_no_order_is_drawn_for_full_batches() -> None:
    def refused() -> np.random.Generator:
        raise AssertionError("a stream was made for nothing")

    task = Task(small(), samples((8, 3)), local())
    by = task.group_trainer()
    states, losses = by.train(*task.starts(), task.pairs, [refused, refused])
    assert_agree(TrainedGroup(*states, losses), task.one_by_one())
    drawn = Task(small(), samples((8, 9)), local())
    order = partial(np.random.default_rng, [drawn.seed, 1])
    states, losses = by.train(*drawn.starts(), drawn.pairs, [refused, order])
    assert_agree(TrainedGroup(*states, losses), drawn.one_by_one())


def test_nan_stays_with_the_client_that_has_it() -> None:
    """Also with those in the middle, whose places another client's samples must not fill, and with finished ones."""
    pairs = samples((40, 20, 3, 12))
    for broken in (0, 1, 2):
        broken_pairs = [(inputs.clone(), labels) for inputs, labels in pairs]
        broken_pairs[broken][0][0, 0] = math.nan
        for keys in ({}, {"momentum": 0.9}, {"batch_size": 4, "accumulate": 3}):
            got = assert_trains_alike(Task(small(), broken_pairs, local(**keys)))
            assert got.params_KV.isfinite().all(1).tolist() == [row != broken for row in range(4)]
            assert [math.isfinite(loss) for loss in got.train_losses] == [row != broken for row in range(4)]


def test_finished_client_is_unchanged_though_another_step_would_overflow() -> None:
    """What it computes there is more than float64 holds, and weights of 0 times that are no number."""
    module = Made(lambda m, x: m.read(x) ** 2)
    one, *others = samples((1, 40, 30, 40))
    task = Task(module.double(), [(one[0] * 1e60, one[1]), *others], local(lr=1e-3, epochs=1), own_starts=False)
    got = assert_trains_alike(task)
    assert not (module.read.weight.detach() * 1e60).square().isinf().any()
    assert float(got.params_KV[0].abs().max()) > 1e100
    assert got.params_KV.isfinite().all()


def changing(
    change: Callable[[Any, Tensor], object],
    buffers: dict[str, Tensor] | None = None,
    unsaved: dict[str, Tensor] | None = None,
) -> nn.Module:
    """A model whose forward pass does something before it reads."""

    def forward(model: Any, inputs: Tensor) -> Tensor:
        change(model, inputs)
        scores: Tensor = model.read(inputs)
        return scores

    return Made(forward, buffers, unsaved)


def without_tracking(change: Callable[[Any], object]) -> Callable[[Any, Tensor], None]:
    def changed(model: Any, _: Tensor) -> None:
        with torch.no_grad():
            change(model)

    return changed


def counts_up(model: Any, _: Tensor) -> None:
    model.count = model.count + 1


COUNT = {"count": torch.zeros(())}
OF_NUMPY = np.random.default_rng(0)
UNFIT: dict[str, Callable[[], nn.Module]] = {
    "permutation": lambda: Made(lambda m, x: m.read(x[:, torch.randperm(5)])),
    "chance": lambda: Made(lambda m, x: m.read(x) if torch.rand(()) > 0.5 else -m.read(x)),
    "noise of the batch": lambda: Made(lambda m, x: m.read(x + x.mean(0) * torch.rand_like(x))),
    "noise of a generator": lambda: Made(lambda m, x: m.read(x + torch.rand(5, generator=torch.Generator()))),
    "noise of NumPy": lambda: Made(lambda m, x: m.read(x) * float(OF_NUMPY.random())),
    "branches": lambda: Made(lambda m, x: m.read(x) if x.sum() > 0 else -m.read(x)),
    "branches by weights": lambda: Made(lambda m, x: m.read(x) if m.read.weight.norm() > 1 else -m.read(x)),
    "numbers": lambda: Made(lambda m, x: m.read(x) * x.abs().max().item()),
    "NumPy": lambda: Made(lambda m, x: m.read(x) * float(x.detach().numpy().max())),
    "lists": lambda: Made(lambda m, x: m.read(x) * x.tolist()[0][0]),
    "masks": lambda: Made(lambda m, x: m.read(x) + x[x > 0].sum()),
    "BatchNorm": lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)),
    "BatchNorm, cumulative": lambda: nn.Sequential(nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)),
    "BatchNorm of the batch": lambda: nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)),
    "mean of the batch": lambda: Made(lambda m, x: m.read(x - x.mean(0))),
    "size of the batch": lambda: Made(lambda m, x: m.read(x) * len(x)),
    "neighbours": lambda: Made(lambda m, x: m.read(x + x.roll(1, 0))),
    "buffer that counts": lambda: changing(lambda m, _: m.count.add_(1), buffers=COUNT),
    "buffer that counts, unsaved": lambda: changing(lambda m, _: m.count.add_(1), unsaved=COUNT),
    "buffer set": lambda: changing(counts_up, buffers=COUNT),
    "buffer set, unsaved": lambda: changing(counts_up, unsaved=COUNT),
    "buffer of statistics": lambda: changing(
        without_tracking(lambda m: m.count.copy_(m.read.weight.max())), buffers=COUNT
    ),
    "weights shrunk": lambda: changing(without_tracking(lambda m: m.read.weight.mul_(0.9))),
    "weights renormed": lambda: changing(without_tracking(lambda m: m.read.weight.renorm_(2, 0, 0.5))),
    "data of weights": lambda: changing(lambda m, _: m.read.weight.data.mul_(0.9)),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))),
    "outputs without scores": lambda: Made(lambda m, x: {"read": m.read(x)}),  # type: ignore[arg-type,return-value]
    "samples second": lambda: Made(lambda m, x: m.read(x).T),
}


@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9}], ids=str)
@pytest.mark.parametrize("name", UNFIT)
def test_a_model_that_cannot_be_batched_raises_an_error(name: str, keys: dict[str, Any]) -> None:
    """On the first step, whatever else the group would do."""
    with pytest.raises((RuntimeError, InvalidModel, AttributeError, TypeError)):
        Task(UNFIT[name]().double(), samples((7, 2, 20)), local(**keys)).in_a_group()


def embedded(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 7, **options), nn.Linear(7, 7), Transposed())


class Transposed(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states.transpose(1, 2)


@pytest.mark.parametrize(
    "module",
    [
        lambda: embedded(sparse=True),
        lambda: embedded(max_norm=0.5),
        lambda: embedded(scale_grad_by_freq=True),
    ],
    ids=["sparse", "max_norm", "scale_grad_by_freq"],
)
def test_text_model_that_cannot_be_batched_raises_an_error(module: Callable[[], nn.Module]) -> None:
    """vmap applies frequencies of words to all clients together."""
    with pytest.raises((RuntimeError, InvalidModel)):
        Task(module().double(), TEXTS, local()).in_a_group()


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64))
UNFIT_LOSSES: dict[str, tuple[Loss, list[Pair]]] = {
    "classes that weigh": (WEIGHTED, VECTORS),
    "classes left out": (nn.CrossEntropyLoss(ignore_index=0), VECTORS),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), VECTORS),
    "root of a mean": (lambda output, target: functional.mse_loss(output, target).sqrt(), REGRESSION),
    "largest": (lambda output, target: (output - target).abs().max(), REGRESSION),
    "contrast": (lambda output, target: ((output - output.mean(0)) - target).square().mean(), REGRESSION),
}


@pytest.mark.parametrize("name", UNFIT_LOSSES)
def test_a_loss_that_is_no_mean_raises_an_error(name: str) -> None:
    loss, pairs = UNFIT_LOSSES[name]
    with pytest.raises(InvalidModel, match="mean of its samples"):
        Task(small(), pairs, local(), loss).in_a_group()


def test_mixing_hidden_by_single_samples_raises_an_error_later() -> None:
    for module, loss in ((UNFIT["BatchNorm of the batch"](), cross_entropy), (small(), WEIGHTED)):
        by = Task(module.double(), [], local(), loss).group_trainer()
        if loss is WEIGHTED:
            Task(module, samples((1, 1)), local(), loss).in_a_group(by)
        with pytest.raises(InvalidModel):
            Task(module, samples((4, 4)), local(), loss).in_a_group(by)


def test_float16_is_refused() -> None:
    with pytest.raises(InvalidModel, match="float16"):
        Task(small(), VECTORS, local(precision="float16")).group_trainer()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_what_can_be_batched_is_not_refused_at_any_scale(scale: float) -> None:
    pairs = [(inputs.float(), (inputs[:, :3] * scale).float()) for inputs, _ in VECTORS]
    module = small(torch.float32)
    for part in module.parameters():
        part.data *= scale
    assert Task(module, pairs, local(lr=1e-3), nn.MSELoss()).in_a_group().params_KV.isfinite().all()


@pytest.mark.parametrize("loss", [cross_entropy, functional.cross_entropy])
@pytest.mark.parametrize("likely", [0, 25, 49])
def test_what_is_nearly_sure_of_its_labels_is_not_refused(likely: int, loss: Loss) -> None:
    """49 numbers e^-17 added to 1 one after another are nothing in float32, and 2e-6 if they are added up first."""
    module = nn.Linear(5, 50)
    module.weight.data *= 1e-3
    module.bias.data.zero_()[likely] = 17.0
    pairs = [(inputs.float(), torch.full_like(labels, likely)) for inputs, labels in VECTORS]
    assert max(Task(module, pairs, local(), loss, own_starts=False).in_a_group().train_losses) < 1e-5


@pytest.mark.long
def test_training_a_group_needs_no_compiler() -> None:
    """Whose import takes seconds. In a process of its own, for others may have imported it here."""
    code = """
import sys, torch
from fed.aggregators.base import Phase
from fed.clients.training.batched_trainer import BatchedTrainer
from fed.clients.scoring.losses import cross_entropy
from fed.clients.models import mlp
from fed.config.experiment import Local
by = BatchedTrainer(mlp((3,), 2, (4,)), cross_entropy, Local(), Phase(), torch.device("cpu"))
pairs = [(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))] * 2
by.train(torch.ones(by.layout.size), torch.zeros(0, dtype=torch.int64), pairs, [None, None])
print(sorted({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@needs_gpu
@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9}, {"precision": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "char_transformer", "float buffer"])
def test_a_gpu_trains_what_a_cpu_trains(name: str, keys: dict[str, Any]) -> None:
    make, pairs = MODELS[name]
    full = torch.float32 if "precision" in keys else torch.float64
    pairs = [(inputs.to(full) if inputs.is_floating_point() else inputs, labels) for inputs, labels in pairs]
    task = Task(make().to(full), pairs, local(**keys))
    on_gpu = task.in_a_group(task.group_trainer(torch.device("cuda")))
    assert on_gpu.params_KV.device == CPU
    assert_agree(on_gpu, task.one_by_one(), 1e-9 if full is torch.float64 else 5e-2)


@pytest.mark.parametrize("own_starts", [True, False])
def test_a_group_that_does_not_fit_is_computed_in_halves(own_starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(small(), samples(UNEQUAL), local(momentum=0.9), rule=FedProx(mu=0.7), own_starts=own_starts)
    tried = of_a_small_device(monkeypatch, room=2)
    trainer = task.group_trainer()
    assert_agree(task.in_a_group(trainer), task.one_by_one())
    assert (tried, trainer.most_together) == ([5, 2, 3, 1, 2], 2)
    tried.clear()
    assert_agree(task.in_a_group(trainer), task.one_by_one())
    assert tried == [1, 2, 2]


def test_own_steps_and_states_stay_with_halved_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(small(), samples(UNEQUAL), local(steps=3))
    steps = (4, 1, None, 5, 2)
    kept = Kept(torch.arange(5.0).double()[:, None].expand(5, Layout.of(task.module).parameters))
    task.rule = Offset()

    def trained(room: int) -> TrainedGroup:
        of_a_small_device(monkeypatch, room)
        orders = [partial(np.random.default_rng, number) for number in range(5)]
        context = LocalContext(client_state=kept, steps=steps)
        states, losses = task.group_trainer().train(*task.starts(), task.pairs, orders, context)
        monkeypatch.undo()
        return TrainedGroup(*states, losses)

    assert_agree(trained(room=1), trained(room=5))


class Kept(NamedTuple):
    offset: Tensor


class Offset(LocalRule):
    """Adds what each client has kept."""

    def correct(self, gradient_P: Tensor, _x: Tensor, _anchor: Tensor, kept: Kept, _sent: object) -> Tensor:
        return gradient_P + 0.01 * kept.offset


def test_one_client_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_small_device(monkeypatch, room=0)
    with pytest.raises(torch.OutOfMemoryError):
        Task(small(), samples([9, 9]), local()).in_a_group()
