"""One client's training against loops written by hand, and what of a client must stay with it.

Shapes: N samples; B, those of a step; P parameters.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fed.aggregators.base import LocalRule, Phase
from fed.aggregators.fedprox import FedProx
from fed.clients.training.batches import Batches
from fed.clients.training.flat import FlatParameters
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import LocalResult
from fed.clients.training.trainer import Trainer, _LossScale
from fed.config.experiment import Local
from fed.vectors.layout import Layout
from tests.devices import Current

pytestmark = pytest.mark.usefixtures("device")

CPU = torch.device("cpu")
Pair = tuple[Tensor, Tensor]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def samples(count: int = 50, dtype: torch.dtype = torch.float32, seed: int = 1) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    inputs_ND = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return inputs_ND.to(dtype), (inputs_ND[:, 0] + inputs_ND[:, 1] > 0).long()


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def local(**keys: Any) -> Local:
    return Local(**{"batch_size": 7, **keys})


def trainer(
    module: nn.Module,
    loss: Any = functional.cross_entropy,
    rule: Any = None,
    device: Any = None,
    **keys: Any,
) -> Trainer:
    """A trainer of a copy, on the test's device unless another is given."""
    return Trainer(copy.deepcopy(module), loss, local(**keys), Phase(rule=rule), device or Current.device)


def train(by: Trainer, start: nn.Module, on: Pair, *, order: int = 5, seed: int = 0, **more: Any) -> LocalResult:
    """From a module's state, with streams of these seeds."""
    return by.train(*by.layout.pack(start), on, order=np.random.default_rng(order), seed=seed, **more)


def state_of(by: Trainer, trained: LocalResult) -> dict[str, Tensor]:
    return {
        name: part.cpu().clone() for name, part in by.load(trained.params_V, trained.integers_I).state_dict().items()
    }


def steps_by_hand(count: int, size: int, epochs: int, order: int = 5) -> Iterator[list[int]]:
    """The samples of each step, as the stream shuffles them."""
    stream = np.random.default_rng(order)
    for _ in range(epochs):
        shuffled = stream.permutation(count).tolist()
        yield from (shuffled[begin : begin + size] for begin in range(0, count, size))


def loop(
    module: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], steps: Iterable[list[int]], on: Pair
) -> tuple[nn.Module, float]:
    """Training as everybody writes it, and the mean loss over the samples."""
    module = copy.deepcopy(module).train()
    stepping = optimizer(module.parameters())
    losses = []
    for chosen in steps:
        stepping.zero_grad()
        loss = functional.cross_entropy(module(on[0][chosen]), on[1][chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        stepping.step()
        losses += [loss.item()] * len(chosen)
    return module, math.fsum(losses) / len(losses)


def same_bits(state: dict[str, Tensor], module: nn.Module) -> bool:
    """True if a state is a module's; on a GPU, whose sums have another order, but for rounding."""
    expected = module.state_dict()
    same = partial(torch.allclose, rtol=1e-4, atol=1e-5) if Current.device.type == "cuda" else torch.equal
    return state.keys() == expected.keys() and all(same(state[name], part) for name, part in expected.items())


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_is_a_loop_over_torchs_sgd_to_the_bit(keys: dict[str, Any], dtype: torch.dtype) -> None:
    module, on = mlp(dtype), samples(dtype=dtype)
    by = trainer(module, lr=0.3, epochs=3, **keys)
    trained = train(by, module, on)
    expected, loss = loop(module, lambda p: torch.optim.SGD(p, 0.3, **keys), steps_by_hand(50, 7, 3), on)
    assert same_bits(state_of(by, trained), expected)
    assert trained.params_V.dtype == dtype
    assert trained.train_loss == pytest.approx(loss, rel=1e-6)  # float32 rounds a loss times its samples by 2^-24


class Counting(LocalRule):
    """A rule that counts the steps and lets gradients be."""

    steps = 0

    def correct(self, gradient_P: Tensor, *_: object) -> Tensor:
        self.steps += 1
        return gradient_P


@pytest.mark.parametrize(("batch_size", "accumulate"), [(3, 4), (1, 12), (5, 2), (7, 2), (3, 5)])
def test_accumulated_batches_are_one_large_batch(batch_size: int, accumulate: int) -> None:
    """Also in the last step, whose last batch is shorter: every sample weighs the same."""
    module, on = mlp(torch.float64), samples(dtype=torch.float64)
    accumulated, large = (
        train(trainer(module, lr=0.5, epochs=3, momentum=0.5, **keys), module, on)
        for keys in (
            {"batch_size": batch_size, "accumulate": accumulate},
            {"batch_size": batch_size * accumulate, "accumulate": 1},
        )
    )
    torch.testing.assert_close(accumulated.params_V, large.params_V, rtol=1e-12, atol=1e-13)
    assert accumulated.train_loss == pytest.approx(large.train_loss, rel=1e-12)


class Point(nn.Module):
    """y, which inputs are subtracted from: with half the mean square, f(y) = ½ (y − b)² + const, b the inputs' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        difference: Tensor = self.y - inputs
        return difference


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output * target).square().sum(1).mean()


@pytest.mark.parametrize("mu", [0.0, 0.5, 4.0])
def test_a_proximal_term_has_its_closed_form(mu: float) -> None:
    """y_K = x − (1 − (1 − η(a + μ))^K) a (x − b)/(a + μ), coordinate by coordinate, with curvatures a = 1 and 9."""
    eta, steps, a = 0.05, 6, torch.tensor([1.0, 9.0], dtype=torch.float64)
    inputs = torch.randn(10, 2, dtype=torch.float64)
    module, rule = Point(), FedProx(mu=mu)
    by = trainer(module, half_square, rule, lr=eta, steps=steps, batch_size=10)
    trained = train(by, module, (inputs, a.sqrt().expand(10, 2)))
    x, b = module.y.detach(), inputs.mean(0)
    expected = x - (1 - (1 - eta * (a + mu)) ** steps) * a * (x - b) / (a + mu)
    torch.testing.assert_close(trained.params_V, expected, rtol=1e-13, atol=0)


class Kept(NamedTuple):
    """What a client keeps for a rule."""

    control_P: Tensor


def test_a_correction_sees_gradient_model_anchor_state_and_broadcast() -> None:
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    sent = (torch.ones(2, dtype=torch.float64),)
    kept = Kept(torch.arange(2.0, dtype=torch.float64))

    class Rule(LocalRule):
        def correct(self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, state: object, broadcast: Any) -> Tensor:
            assert isinstance(state, Kept)
            assert torch.equal(state.control_P.cpu(), kept.control_P)
            assert torch.equal(broadcast[0].cpu(), sent[0])
            seen.append((gradient_P.cpu().clone(), x_P.cpu().clone(), anchor_P.cpu().clone()))
            sent_P: Tensor = broadcast[0]
            return gradient_P + sent_P

    module, inputs = Point(), torch.zeros(4, 2, dtype=torch.float64)
    by = trainer(module, half_square, Rule(), lr=0.1, steps=3, batch_size=4)
    trained = train(
        by,
        module,
        (inputs, torch.ones(4, 2, dtype=torch.float64)),
        context=LocalContext(client_state=kept, broadcast=sent),
    )
    x_P = module.y.detach()
    for gradient_P, at_P, anchor_P in seen:
        torch.testing.assert_close(gradient_P, x_P)  # of ½ y² at b = 0
        assert torch.equal(at_P, x_P)
        assert torch.equal(anchor_P, module.y)
        x_P = x_P - 0.1 * (x_P + 1)
    torch.testing.assert_close(trained.params_V, x_P)


def test_a_rule_that_changes_nothing_changes_no_bit() -> None:
    module, on = mlp(), samples()
    without, with_rule = (train(trainer(module, rule=rule), module, on) for rule in (None, Counting()))
    assert torch.equal(without.params_V, with_rule.params_V)


def test_batch_norm_trains_like_a_loop_with_its_statistics() -> None:
    """9 samples in batches of 4: the last, single one joins the batch before it."""
    module, on = normed(), samples(9)
    by = trainer(module, lr=0.2, batch_size=4, epochs=3)
    steps = list(steps_by_hand(9, 4, 3))
    joined = [[*steps[i + 1], *steps[i + 2]] if part else steps[i] for i in range(0, 9, 3) for part in (0, 1)]
    assert [len(step) for step in joined] == [4, 5] * 3
    state = state_of(by, train(by, module, on))
    assert same_bits(state, loop(module, lambda p: torch.optim.SGD(p, 0.2), joined, on)[0])
    assert int(state["1.num_batches_tracked"]) == 6
    assert Batches(local(batch_size=4, epochs=3), 9, never_single=True).steps == 6


@pytest.mark.parametrize("count", [2, 127, 129, 257, 129 * 128 + 1])
def test_no_measured_batch_under_batch_norm_has_a_single_sample(count: int) -> None:
    seen: list[int] = []

    def noting(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        return functional.cross_entropy(output, target)

    by = trainer(normed(), noting)
    loss, _ = by.measure(*by.layout.pack(normed()), samples(count), 0, gradient=False)
    assert min(seen) >= 2
    assert max(seen) < 2 * 128 + 1
    assert sum(seen) == count
    assert math.isfinite(loss)


def test_last_single_sample_stays_alone_without_batch_norm() -> None:
    module, on = nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Linear(6, 2)), samples(9)
    by = trainer(module, lr=0.2, batch_size=4)
    expected, _ = loop(module, lambda p: torch.optim.SGD(p, 0.2), steps_by_hand(9, 4, 1), on)
    assert same_bits(state_of(by, train(by, module, on)), expected)


def test_loss_and_gradient_are_measured_over_all_samples() -> None:
    module, on = mlp(torch.float64), samples(300, torch.float64)
    by = trainer(module)
    loss, gradient_P = by.measure(*by.layout.pack(module), on, 0, gradient=True)
    whole = functional.cross_entropy(module(on[0]), on[1])
    parts = torch.autograd.grad(whole, list(module.parameters()))
    assert loss == pytest.approx(whole.item(), rel=1e-13)
    torch.testing.assert_close(gradient_P, torch.cat([part.flatten() for part in parts]), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("make", [mlp, normed])
def test_nothing_of_one_client_reaches_the_next(make: Callable[[], nn.Module]) -> None:
    module, mine, theirs = make(), samples(20, seed=2), samples(20, seed=3)
    keys: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "epochs": 2}
    alone_by, after_by = trainer(module, **keys), trainer(module, **keys)
    alone = train(alone_by, module, mine)
    other = train(after_by, module, theirs)
    kept = other.params_V.clone()
    after = train(after_by, module, mine)
    assert torch.equal(after.params_V, alone.params_V)
    assert torch.equal(after.integers_I, alone.integers_I)
    assert after.train_loss == alone.train_loss
    assert not torch.equal(other.params_V, alone.params_V)
    assert torch.equal(other.params_V, kept), "what one client sent does not change while the next one trains"


def test_start_and_data_stay_as_they_are() -> None:
    module, on = normed(), samples(20)
    by = trainer(module, epochs=2)
    start_V, integers_I = by.layout.pack(module)
    before = [part.clone() for part in (start_V, integers_I, *on)]
    trained = by.train(start_V, integers_I, on, order=np.random.default_rng(0), seed=0)
    assert all(map(torch.equal, before, (start_V, integers_I, *on)))
    assert not torch.equal(trained.params_V, start_V)


def test_a_modules_draws_come_from_its_own_stream_alone() -> None:
    module, on = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.5), nn.Linear(9, 2)), samples()
    by = trainer(module)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = train(by, module, on, seed=1)
    assert torch.equal(torch.rand(1), expected), "the global generator is where it was"
    torch.manual_seed(8)
    assert torch.equal(train(by, module, on, seed=1).params_V, first.params_V)
    assert not torch.equal(train(by, module, on, seed=2).params_V, first.params_V)


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_frozen_parameters_stay_and_unused_ones_have_no_gradient(weight_decay: float) -> None:
    module = mlp()
    module.get_submodule("0").requires_grad_(False)
    module.register_parameter("unused", nn.Parameter(torch.tensor([2.0, -3.0])))
    by = trainer(module, lr=0.5, steps=4, weight_decay=weight_decay)
    state = state_of(by, train(by, module, samples()))
    for name in ("0.weight", "0.bias"):
        assert torch.equal(state[name], module.state_dict()[name])
    torch.testing.assert_close(state["unused"], torch.tensor([2.0, -3.0]) * (1 - 0.5 * weight_decay) ** 4)
    assert not torch.equal(state["2.weight"], module.state_dict()["2.weight"])


def test_infinite_loss_is_reported_as_it_is() -> None:
    assert not math.isfinite(train(trainer(mlp(), lr=1e38, epochs=5), mlp(), samples()).train_loss)
    module, (inputs, labels) = mlp(), samples()
    inputs[3, 0] = math.nan
    assert math.isnan(train(trainer(module, lr=1e-9), module, (inputs, labels)).train_loss)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_a_model_that_stays_in_its_own(precision: str) -> None:
    seen: set[torch.dtype] = set()

    def watched(output: Tensor, target: Tensor) -> Tensor:
        seen.add(output.dtype)
        return functional.cross_entropy(output, target)

    module, on = mlp(), samples()
    by = trainer(module, watched, precision=precision, lr=0.5, epochs=20)
    trained = train(by, module, on)
    assert seen == {getattr(torch, precision)}
    assert trained.params_V.dtype == torch.float32
    in_full = train(trainer(module, lr=0.5, epochs=20), module, on)
    before = functional.cross_entropy(module(on[0]), on[1]).item()
    module.load_state_dict(state_of(by, trained))
    assert functional.cross_entropy(module(on[0]), on[1]).item() < 0.3 * before
    assert trained.train_loss == pytest.approx(in_full.train_loss, rel=0.05)
    assert trained.train_loss != in_full.train_loss


def scaled_square(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: scale * (output.float().squeeze(1) - target).square().mean()


@pytest.mark.parametrize("scale", [1.0, 1e-7, 300.0, 1e4])
def test_float16_gradient_is_the_float32_one_for_every_scale(scale: float) -> None:
    """One step of least squares with rate 1/scale: y = x − ∇/scale.

    Inputs, weights, outputs and what flows back are rounded to 11 bits each, so that the gradient, the mean of
    2 (w·x − t) x, is off by at most 2^-11 of 2 (|w|·|x| + |w·x − t|) |x| for each of four roundings, 2^-9 together. At
    1e-7 what flows back, 1e-8 a sample, is below float16's smallest number, 6e-8, unless the loss is scaled up; at 300
    and 1e4 it overflows unless it is scaled less.
    """
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(16, 8, generator=generator), torch.randn(16, generator=generator)
    module = nn.Linear(8, 1, bias=False)
    half, full = (
        train(
            trainer(module, scaled_square(scale), precision=precision, lr=1 / scale, steps=1, batch_size=16),
            module,
            (inputs, targets),
        ).params_V
        for precision in ("float16", "float32")
    )
    w = module.weight.detach()[0]
    flowing_back = (inputs.abs() @ w.abs()) + (inputs @ w - targets).abs()
    bound = 2**-9 * (2 * flowing_back[:, None] * inputs.abs()).mean(0)
    assert bool(((half - full).abs() <= bound).all())
    assert not torch.equal(half, full)


def flat_of(w: nn.Parameter) -> FlatParameters:
    module = nn.Module()
    module.register_parameter("w", w)
    return FlatParameters(module, Layout.of(module))


def test_an_overflow_halves_the_scale_and_no_batch_is_lost() -> None:
    """∂/∂w of 8 w is 8, which at scale 2^16 is 2^19, too much for float16; at 2^12 it fits, 2^15."""
    w, scaler = nn.Parameter(torch.ones(1, dtype=torch.float16)), _LossScale()
    flat = flat_of(w)
    passes = 0

    def counted(gradient: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return gradient

    w.register_hook(counted)  # type: ignore[no-untyped-call]
    assert scaler.gradient((8 * w).float().sum(), flat).tolist() == [8.0]
    assert (scaler._scale, passes) == (2.0**12, 5)
    assert scaler.gradient((8 * w).float().sum(), flat).tolist() == [8.0]
    assert (scaler._scale, passes) == (2.0**12, 6), "a scale that is too large is tried once"


@pytest.mark.parametrize("loss", [torch.sqrt, lambda w: w + math.inf, lambda w: w * math.nan])
def test_gradient_infinite_at_every_scale_is_returned_unchanged(loss: Callable[[Tensor], Tensor]) -> None:
    """Also where the loss itself is finite, as the root is at 0."""
    w, scaler = nn.Parameter(torch.zeros(1, dtype=torch.float16)), _LossScale()
    gradient_P = scaler.gradient(loss(w.float()).sum() * 1e5, flat_of(w))
    assert not bool(torch.isfinite(gradient_P).any())


def images(dtype: torch.dtype = torch.float64, channels: int = 1, count: int = 20) -> Pair:
    generator = torch.Generator().manual_seed(4)
    inputs_N = torch.randn(count, channels, 8, 6, generator=generator, dtype=torch.float64)
    return inputs_N.to(dtype), torch.randint(0, 3, (count,), generator=generator)


def convolutional(channels: int = 1) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, (3, 2), bias=False), nn.BatchNorm2d(6), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(24, 3)),
    ).double()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"accumulate": 2}], ids=str)
def test_convolutions_train_as_in_a_loop(channels: int, keys: dict[str, Any]) -> None:
    """On the CPU channels last, whose sums are of the same terms in another order: 2⁻⁵³ a rounding of about 1."""
    module, on = convolutional(channels), images(channels=channels)
    if keys.pop("accumulate", 1) == 2:
        module[5] = nn.Identity()  # for it would normalise over smaller batches
        by = trainer(module, lr=0.3, epochs=3, batch_size=2, accumulate=2, **keys)
    else:
        by = trainer(module, lr=0.3, epochs=3, batch_size=4, **keys)
    expected, loss = loop(module, lambda p: torch.optim.SGD(p, 0.3, **keys), steps_by_hand(20, 4, 3), on)
    trained, weight = train(by, module, on), by.module.get_parameter("0.weight")
    is_last = weight.stride() == (9 * channels, 1, 3 * channels, channels)
    assert is_last or Current.device != CPU
    state = state_of(by, trained)
    for name, part in expected.state_dict().items():
        torch.testing.assert_close(state[name], part, rtol=1e-12, atol=1e-12)
    assert trained.train_loss == pytest.approx(loss, rel=1e-12)
    assert weight.is_contiguous(), "whoever evaluates finds tensors in the order that the model was given"


class Pulling(FedProx):
    """FedProx, plus a vector that came with the task."""

    def correct(self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, state: object, broadcast: Any) -> Tensor:
        sent_P: Tensor = broadcast[0]
        return super().correct(gradient_P, x_P, anchor_P, state, broadcast) + sent_P


def test_rules_and_what_they_send_meet_convolutions_number_by_number() -> None:
    """Against a loop that has every parameter's own part of what was sent."""
    module, on = convolutional(), images()
    by = trainer(module, rule=Pulling(mu=0.5), lr=0.2, epochs=2, batch_size=4)
    sent_P = torch.randn(by.layout.parameters, dtype=torch.float64)
    trained = train(by, module, on, context=LocalContext(broadcast=(sent_P,)))
    expected = copy.deepcopy(module).train()
    anchors = [part.detach().clone() for part in expected.parameters()]
    for chosen in steps_by_hand(20, 4, 2):
        loss = functional.cross_entropy(expected(on[0][chosen]), on[1][chosen])
        gradients = torch.autograd.grad(loss, list(expected.parameters()))
        moved = zip(expected.parameters(), gradients, anchors, by.layout.trained, strict=True)
        with torch.no_grad():
            for part, gradient, anchor, place in moved:
                part.sub_(0.2 * (gradient + 0.5 * (part - anchor) + place.view(sent_P)))
    torch.testing.assert_close(trained.params_V, by.layout.pack(expected)[0], rtol=1e-12, atol=1e-12)


class Viewing(nn.Module):
    """A network that, as many do, takes for granted that channels come first in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.read = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 48, 3)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.read(self.convolve(images).relu().view(len(images), -1))
        return scores


def test_module_that_views_convolutions_keeps_its_usual_order() -> None:
    module, on = Viewing(), images(torch.float32)
    by = trainer(module, lr=0.3, epochs=2)
    for order in (5, 6):
        trained = train(by, module, on, order=order)
        expected, _ = loop(module, lambda p: torch.optim.SGD(p, 0.3), steps_by_hand(20, 7, 2, order), on)
        assert same_bits(state_of(by, trained), expected)


def test_channels_last_is_tried_once_for_each_input_shape() -> None:
    """And not once for each trainer, so that what other clients' samples were like changes nothing."""
    in_usual_order: list[bool] = []

    class Either(Viewing):
        def forward(self, images: Tensor) -> Tensor:
            in_usual_order.append(self.convolve(images).is_contiguous())
            if images.shape[-1] == 6:
                return super().forward(images)
            means: Tensor = self.convolve(images).mean((2, 3))[:, :3]
            return means

    module, (inputs, labels) = Either(), images(torch.float32)
    by = trainer(module, device=CPU, steps=1)
    for on in ((inputs, labels), (inputs[..., :5], labels), (inputs, labels), (inputs[..., :5], labels)):
        train(by, module, on)
    assert in_usual_order == [False, True, False, True, False]
    train(by, module, (inputs[:-1], labels[:-1]))  # fewer samples, of which a view may be one that works
    assert in_usual_order[5:] == [False, True]


@pytest.mark.parametrize(
    ("normalise", "precision", "is_last"),
    [
        (nn.GroupNorm(2, 4), "float32", True),
        (nn.GroupNorm(4, 4), "float32", False),
        (nn.InstanceNorm2d(4), "float32", False),
        (nn.GroupNorm(2, 4), "bfloat16", False),
    ],
    ids=str,
)
def test_channels_come_last_only_where_that_is_fast(normalise: nn.Module, precision: str, is_last: bool) -> None:
    module = convolutional(3).float()
    module[1] = normalise
    by = trainer(module, device=CPU, precision=precision, steps=1)
    train(by, module, images(torch.float32, channels=3))
    assert by.module.get_parameter("0.weight").is_contiguous() is not is_last


def test_what_goes_wrong_in_a_convolution_is_met_once() -> None:
    calls = []

    def fails(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        train(trainer(convolutional(), fails), convolutional(), images())
    assert calls == [7]


class MaxNorm(nn.Module):
    """Puts weights that have grown longer than 1 back on the ball, as a new tensor, in some steps and not in others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.puts = 0

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.layer.get_parameter("weight")
        if weight.norm() > 1:
            self.puts += 1
            weight.data = weight.data / weight.data.norm()
        output: Tensor = self.layer(inputs)
        return output


@pytest.mark.parametrize("keys", [{}, {"momentum": 0.5}], ids=str)
@pytest.mark.parametrize("convolves", [False, True])
def test_parameters_that_a_forward_pass_puts_elsewhere_train_from_there(convolves: bool, keys: dict[str, Any]) -> None:
    torch.manual_seed(3)
    layer: nn.Module = nn.Conv2d(1, 3, (8, 6)) if convolves else nn.Linear(48, 3)
    with torch.no_grad():
        layer.get_parameter("weight").mul_(0.5)
    module = nn.Sequential(nn.Identity() if convolves else nn.Flatten(), MaxNorm(layer), nn.Flatten()).double()
    by = trainer(module, lr=0.2, epochs=4, batch_size=4, **keys)
    expected, _ = loop(module, lambda p: torch.optim.SGD(p, 0.2, **keys), steps_by_hand(20, 4, 4), images())
    state = state_of(by, train(by, module, images()))
    for name, part in expected.state_dict().items():
        torch.testing.assert_close(state[name], part, rtol=1e-12, atol=1e-13)
    assert 0 < expected.get_submodule("1").puts < 20  # type: ignore[operator]  # a MaxNorm


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_gpu_trains_what_a_cpu_trains(precision: str) -> None:
    module, on = normed(), samples()
    on_cpu = train(trainer(module, device=CPU, lr=0.1, epochs=2, precision=precision), module, on)
    by = trainer(module, device=torch.device("cuda"), lr=0.1, epochs=2, precision=precision)
    start_V, integers_I = trainer(module).layout.pack(module)
    on_gpu = by.train(start_V, integers_I, on, order=np.random.default_rng(5), seed=0)
    assert on_gpu.params_V.device.type == on_gpu.integers_I.device.type == "cpu"
    tolerance = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}[precision]  # rounding, through 16 steps
    torch.testing.assert_close(on_gpu.params_V, on_cpu.params_V, rtol=tolerance, atol=tolerance)
    assert torch.equal(on_gpu.integers_I, on_cpu.integers_I)
