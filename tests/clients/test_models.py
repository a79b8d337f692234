"""The built-in models: shapes, sizes, what each position may see, and what cannot be built.

Shapes: B samples; T positions; C classes.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fed.aggregators.base import Phase
from fed.clients.models import char_gru, char_transformer, cnn, logistic, mlp
from fed.clients.training.trainer import Trainer
from fed.config.experiment import Local
from fed.errors import InvalidModel
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams

IMAGES = [(28, 28), (1, 28, 28), (3, 32, 32), (2, 5, 9)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def characters(count: int = 2, length: int = 9, vocabulary: int = 7) -> Tensor:
    return torch.randint(vocabulary, (count, length))


MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "logistic": (lambda: logistic((4, 3), 5), lambda count: torch.randn(count, 4, 3)),
    "mlp": (lambda: mlp((4, 3), 5, hidden=(8, 6)), lambda count: torch.randn(count, 4, 3)),
    "cnn": (lambda: cnn((1, 8, 8), 5), lambda count: torch.randn(count, 1, 8, 8)),
    "char_gru": (lambda: char_gru(5), lambda count: characters(count, 6, 5)),
    "char_transformer": (lambda: char_transformer((6,), 5, width=16), lambda count: characters(count, 6, 5)),
}
each_model = pytest.mark.parametrize("name", MAKERS)


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_have_every_class_and_the_models_type(name: str, dtype: torch.dtype) -> None:
    make, inputs = MAKERS[name]
    module, batch = make().to(dtype), inputs(3)
    scores = module(batch.to(dtype) if batch.is_floating_point() else batch)
    assert scores.shape == ((3, 5, 6) if name.startswith("char") else (3, 5))
    assert scores.dtype == dtype


@each_model
def test_a_sample_is_scored_alike_in_any_company(name: str) -> None:
    """Nothing is normalised over the batch: clients with unequal data could not agree about it."""
    make, inputs = MAKERS[name]
    module, batch = make().train(), inputs(4)
    torch.testing.assert_close(module(batch)[:1], module(batch[:1]), rtol=1e-5, atol=1e-6)
    assert Layout.of(module).averaged == Layout.of(module).integers == ()


@each_model
def test_the_seed_determines_the_initial_model(name: str) -> None:
    make, _ = MAKERS[name]
    packed = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        module = make()
        packed.append(Layout.of(module).pack(module)[0])
    assert torch.equal(packed[0], packed[1])
    assert not torch.equal(packed[0], packed[2])


@each_model
def test_an_untrained_model_scores_like_a_guess(name: str) -> None:
    """A loss of ln C: scores far from zero, sure of what they do not know, would first have to be unlearnt."""
    make, inputs = MAKERS[name]
    targets = torch.randint(5, (50, 6) if name.startswith("char") else (50,))
    loss = functional.cross_entropy(make()(inputs(50)), targets).item()
    assert loss == pytest.approx(math.log(5), rel=0.4)


@each_model
def test_every_parameter_is_used_and_can_learn(name: str) -> None:
    make, inputs = MAKERS[name]
    module, batch = make(), inputs(12)
    targets = torch.randint(5, (12, 6) if name.startswith("char") else (12,))
    local = Local(optimizer="adam", lr=0.02, steps=30, batch_size=12)
    trainer = Trainer(module, functional.cross_entropy, local, Phase(), torch.device("cpu"))
    start_V, integers_I = trainer.layout.pack(module)
    before = functional.cross_entropy(module(batch), targets).item()
    trained = trainer.train(start_V, integers_I, (batch, targets), order=Streams(0).generator("order"), seed=0)
    after = functional.cross_entropy(trainer.load(trained.params_V, integers_I)(batch), targets).item()
    assert after < 0.7 * before
    for part in trainer.layout.trained:
        assert not torch.equal(part.view(trained.params_V), part.view(start_V)), part.name


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 5), st.lists(st.integers(1, 9), max_size=3))
def test_a_perceptron_is_its_formula(shape: list[int], classes: int, hidden: list[int]) -> None:
    module, inputs = mlp(tuple(shape), classes, tuple(hidden)), torch.randn(3, *shape)
    state = inputs.reshape(3, -1)
    parameters = list(module.parameters())
    for index, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
        state = state @ weight.T + bias
        state = state.clamp(min=0) if index < len(hidden) else state
    torch.testing.assert_close(module(inputs), state)
    widths = [math.prod(shape), *hidden, classes]
    assert Layout.of(module).parameters == sum((above + 1) * below for above, below in pairwise(widths))


def test_logistic_regression_is_a_perceptron_without_hidden_layers() -> None:
    module, inputs = logistic((2, 3), 4), torch.randn(5, 2, 3)
    weight, bias = module.parameters()
    torch.testing.assert_close(module(inputs), inputs.flatten(1) @ weight.T + bias)


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize(("channels", "hidden"), [((16, 32), 128), ((5,), 3), ((), 4)])
def test_a_cnn_takes_images_of_any_size_and_depth(
    shape: tuple[int, ...], channels: tuple[int, ...], hidden: int
) -> None:
    module = cnn(shape, 10, channels, hidden)
    assert module(torch.randn(2, *shape)).shape == (2, 10)
    *depth, height, width = shape
    depths = [depth[0] if depth else 1, *channels]
    blocks = sum(9 * above * below + 3 * below for above, below in pairwise(depths))  # weights; bias, γ and β
    pooled = depths[-1] * (height // 2 ** len(channels)) * (width // 2 ** len(channels))
    assert Layout.of(module).parameters == blocks + (pooled + 1) * hidden + (hidden + 1) * 10


def test_a_cnn_is_its_formula() -> None:
    module, images = cnn((2, 6, 7), 3, channels=(16, 12), hidden=5), torch.randn(2, 2, 6, 7)
    p = [parameter.detach() for parameter in module.parameters()]
    state = images
    for block, groups in ((0, 2), (4, 1)):  # of 8 channels; of all 12
        kernel, bias, gamma, beta = p[block : block + 4]
        state = functional.conv2d(state, kernel, bias, padding=1)
        grouped = state.reshape(2, groups, -1)
        grouped = (grouped - grouped.mean(2, keepdim=True)) / (grouped.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
        state = grouped.reshape(state.shape) * gamma[:, None, None] + beta[:, None, None]
        state = functional.max_pool2d(state.clamp(min=0), 2)
    state = (state.flatten(1) @ p[8].T + p[9]).clamp(min=0)
    torch.testing.assert_close(module(images), state @ p[10].T + p[11], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "widths"),
    [
        (lambda: mlp((2, 3), 4, hidden=(5, 7), batch_norm=True), [5, 7]),
        (lambda: cnn((6, 6), 4, channels=(3, 8), hidden=5, batch_norm=True), [3, 8]),
    ],
    ids=["mlp", "cnn"],
)
def test_batch_norm_stands_before_each_relu_of_a_block(make: Callable[[], nn.Module], widths: list[int]) -> None:
    module = make()
    assert isinstance(module, nn.Sequential)
    parts = [part for part in module if not isinstance(part, nn.MaxPool2d | nn.Flatten | nn.Unflatten)]
    normed = [place for place, part in enumerate(parts) if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert [parts[place].num_features for place in normed] == widths
    assert all(isinstance(parts[place - 1], nn.Linear | nn.Conv2d) for place in normed)
    assert all(isinstance(parts[place + 1], nn.ReLU) for place in normed)
    assert isinstance(parts[-1], nn.Linear)
    assert not any(isinstance(part, nn.GroupNorm) for part in parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: char_gru(7, embedding=4, hidden=8, layers=2),
        lambda: char_transformer((9,), 7, width=8, heads=2, layers=2),
        lambda: char_transformer((9,), 7, width=6, heads=1, layers=1),
    ],
    ids=["gru", "transformer", "one head"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_model_of_characters_does_not_see_those_to_come(make: Callable[[], nn.Module], training: bool) -> None:
    module, text_BT = make().double().train(training), characters()
    before = module(text_BT)
    for changed in range(9):
        other_BT = text_BT.clone()
        other_BT[:, changed] = (other_BT[:, changed] + 1) % 7
        after = module(other_BT)
        torch.testing.assert_close(after[:, :, :changed], before[:, :, :changed], rtol=0, atol=1e-12)
        assert ((after - before).abs().amax((0, 1))[changed:] > 1e-9).all(), "all later positions know of it"
    torch.testing.assert_close(module(text_BT[:, :4]), before[:, :, :4], rtol=0, atol=1e-12)


def test_a_transformer_knows_where_a_character_stands() -> None:
    module = char_transformer((9,), 7, width=8, heads=2)
    scores = module(torch.full((1, 9), 3))
    assert (scores[:, :, 1:] - scores[:, :, :-1]).abs().amax((0, 1)).min() > 1e-4


def test_tied_weights_are_one() -> None:
    """V·W characters, T·W positions; a block: attention 4 W² + 4 W, two layers 8 W² + 5 W, two norms 4 W; 2 W; V."""
    vocabulary, length, width, layers = 7, 9, 8, 3
    module = char_transformer((length,), vocabulary, width=width, heads=2, layers=layers)
    block = 12 * width**2 + 13 * width
    expected = vocabulary * width + length * width + layers * block + 2 * width + vocabulary
    assert Layout.of(module).parameters == Layout.of(module).size == expected
    (gradient,) = torch.autograd.grad(module(characters()).logsumexp(1).sum(), [module.get_parameter("read.weight")])
    assert module.get_parameter("embed.weight") is module.get_parameter("read.weight")
    assert bool((gradient != 0).any())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: cnn((64,), 10), r"^model cnn needs images of shape .*, got \(64,\): choose mlp$"),
        (lambda: cnn((1, 1, 8, 8), 10), r"^model cnn needs images of shape .*, got \(1, 1, 8, 8\): choose mlp$"),
        (
            lambda: cnn((3, 3), 10),
            r"^model cnn halves an image 2 times, got 3×3: give fewer channels than \(16, 32\)$",
        ),
        (lambda: cnn((1, 28, 7), 10, channels=(4, 4, 4)), r"halves an image 3 times, got 28×7: give fewer channels"),
        (
            lambda: char_transformer((9,), 7, width=10, heads=4),
            r"^model char_transformer needs heads that divide width, got heads=4 and width=10$",
        ),
        (
            lambda: char_transformer((8, 8), 7),
            r"^model char_transformer needs sequences of characters, got inputs of shape \(8, 8\)$",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_line(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(InvalidModel, match=problem):
        make()


@pytest.mark.parametrize("shape", [(4, 4), (7, 4), (1, 4, 5)])
def test_smallest_image_of_a_cnn_is_pooled_to_one_pixel(shape: tuple[int, ...]) -> None:
    assert cnn(shape, 3)(torch.randn(1, *shape)).shape == (1, 3)
