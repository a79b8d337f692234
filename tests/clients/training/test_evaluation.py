"""Scores of a model in batches are those over all samples at once, in evaluation mode, and leave no trace.

Shapes: N samples; C classes; T positions.
"""

import copy
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.measures import Loss, Metric
from fed.clients.scoring.metrics import accuracy
from fed.clients.training.evaluation import BatchedEvaluator, Score, evaluate
from fed.vectors.layout import Layout
from tests.devices import Current
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")

ACCURACY = {"accuracy": accuracy}
Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def samples(count: int) -> Pair:
    inputs = torch.randn(count, 3, dtype=torch.float64)
    return inputs, (inputs.sum(1) > 0).long()


def scored(module: nn.Module, loss: Loss, metrics: Mapping[str, Metric], on: Any) -> Score:
    """Score of a copy on the test's device."""
    return evaluate(copy.deepcopy(module).to(Current.device), loss, metrics, on, Current.device)


def numbers(score: Score) -> tuple[float, ...]:
    return score.loss, *score.metrics


def linear() -> nn.Module:
    return nn.Linear(3, 2).double()


def right(module: nn.Module, on: Pair) -> Fraction:
    """The share of labels that score highest, sample by sample."""
    hits = [int(module(x[None])[0].argmax()) == int(y) for x, y in zip(*on, strict=True)]
    return Fraction(sum(hits), len(hits))


@pytest.mark.parametrize("count", [1, 127, 128, 129, 257, 700])
def test_scores_are_those_of_all_samples_at_once(count: int) -> None:
    """The last batch is shorter: each of its samples weighs as much as any."""
    module, on = linear(), samples(count)
    on[0][-1] *= 1000  # which a mean over batches would weigh differently
    score = scored(module, functional.cross_entropy, ACCURACY, on)
    assert score.loss == pytest.approx(functional.cross_entropy(module(on[0]), on[1]).item(), rel=1e-12)
    assert score.metrics[0] == pytest.approx(float(right(module, on)), rel=1e-15)


def test_sequences_are_scored_at_every_position() -> None:
    scores, labels = torch.randn(130, 5, 7), torch.randint(5, (130, 7))
    score = scored(nn.Identity(), functional.cross_entropy, ACCURACY, (scores, labels))
    flat_scores, flat_labels = scores.transpose(1, 2).reshape(-1, 5), labels.reshape(-1)
    assert score.loss == pytest.approx(functional.cross_entropy(flat_scores, flat_labels).item(), rel=1e-5)
    assert score.metrics[0] == pytest.approx((flat_scores.argmax(1) == flat_labels).double().mean().item(), rel=1e-14)


@pytest.mark.parametrize(
    ("output", "target", "share"),
    [
        ([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], [1, 0, 0], 2 / 3),
        ([[-5.0, -6.0]], [0], 1.0),
        ([[[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]], [[1, 0, 0]], 2 / 3),
    ],
)
def test_accuracy_is_the_share_of_labels_that_score_highest(
    output: list[object], target: list[int], share: float
) -> None:
    assert float(accuracy(torch.tensor(output), torch.tensor(target))) == share


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_users_metric_replaces_accuracy(as_tensor: bool) -> None:
    def absolute_error(output: Tensor, target: Tensor) -> Tensor | float:
        error = (output - target).abs().mean()
        return error if as_tensor else error.item()

    inputs, targets = torch.randn(1500, 2, dtype=torch.float64), torch.randn(1500, 2, dtype=torch.float64)
    score = scored(nn.Identity(), functional.mse_loss, {"error": absolute_error}, (inputs, targets))
    assert score.loss == pytest.approx((inputs - targets).square().mean().item(), rel=1e-12)
    assert score.metrics[0] == pytest.approx((inputs - targets).abs().mean().item(), rel=1e-12)


def test_without_a_metric_there_is_a_loss_alone() -> None:
    inputs = torch.ones(5, 2)
    assert scored(nn.Identity(), functional.mse_loss, {}, (inputs, inputs + 2)) == Score(4.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_what_it_is(value: float) -> None:
    inputs = torch.ones(5, 2)
    inputs[3, 1] = value
    score = scored(nn.Identity(), functional.mse_loss, {}, (inputs, torch.ones(5, 2)))
    assert score.loss is not None
    assert not math.isfinite(score.loss)


def test_what_streams_is_given_batches_alone() -> None:
    """So that memory does not grow with the test set; what does not is given all outputs once."""
    sizes: dict[str, list[int]] = {"streams": [], "whole": []}

    def noting(name: str) -> Metric:
        def metric(output: Tensor, target: Tensor) -> float:
            sizes[name].append(len(target))
            return 0.0

        metric.mean_over_samples = name == "streams"  # type: ignore[attr-defined]  # as a user marks it
        return metric

    scored(linear(), cross_entropy, {name: noting(name) for name in sizes}, samples(300))
    assert sizes == {"streams": [128, 128, 44], "whole": [300]}


def test_float32_losses_are_summed_in_float64() -> None:
    """2^24 and 2^-12 stand side by side in float64 alone."""

    def streamed(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    streamed.mean_over_samples = True  # type: ignore[attr-defined]  # as a user marks it
    inputs = torch.cat([torch.full((128, 1), 2.0**12), torch.full((128, 1), 2.0**-6)])
    score = scored(nn.Identity(), streamed, {}, (inputs, inputs))
    assert score.loss == (2.0**24 + 2.0**-12) / 2


def test_evaluation_is_in_evaluation_mode_and_leaves_the_state_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).double().train()
    on = samples(30)
    expected = functional.cross_entropy(copy.deepcopy(module).eval()(on[0]), on[1]).item()
    module.to(Current.device)
    before = copy.deepcopy(module.state_dict())
    generator = torch.get_rng_state()
    score = evaluate(module, functional.cross_entropy, ACCURACY, on, Current.device)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(part, before[name]) for name, part in module.state_dict().items())
    assert score == evaluate(module, functional.cross_entropy, ACCURACY, on, Current.device)
    assert score.loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(4, 2)),
    ],
)
@pytest.mark.parametrize("private", [[], ["0.weight"]])
@pytest.mark.parametrize("count", [1, 128, 300])
def test_many_models_are_scored_as_each_alone(make: Callable[[], nn.Module], count: int, private: list[str]) -> None:
    modules = [make().double() for _ in range(5)]
    for module in modules:
        for part in module.state_dict().values():
            part.copy_(torch.rand_like(part, dtype=torch.float64))
    layout, on = Layout.of(modules[0], private), samples(count)
    states = [layout.pack(module) for module in modules]
    evaluator = BatchedEvaluator(modules[3], functional.cross_entropy, ACCURACY, Current.device, private)
    for _ in range(2):  # recorded, then replayed
        vectors_KV, integers_KI = (torch.stack(parts) for parts in zip(*states, strict=True))
        scores = evaluator.scores(vectors_KV, integers_KI, on)
        for score, module in zip(scores, modules, strict=True):
            alone = scored(module, functional.cross_entropy, ACCURACY, on)
            assert numbers(score) == pytest.approx(numbers(alone), rel=1e-12)
    assert len({score.loss for score in scores}) == 5


@pytest.mark.parametrize("metric", [parts.correlation, parts.concordance])
@pytest.mark.parametrize("loss", [parts.cox, functional.cross_entropy, cross_entropy])
def test_measures_are_of_all_outputs_at_once(loss: Loss, metric: Metric) -> None:
    """One or several models. In float64: within 1e-12, the rounding of forward passes in batches of another size."""
    modules, (inputs, _) = [nn.Linear(3, 2).double() for _ in range(3)], samples(300)
    targets = (4 * inputs[:, 0].sigmoid()).long() % 2
    states = [Layout.of(modules[0]).pack(module) for module in modules]
    vectors_KV, integers_KI = (torch.stack(tensors) for tensors in zip(*states, strict=True))
    together = BatchedEvaluator(modules[0], loss, {"own": metric}, Current.device).scores(
        vectors_KV, integers_KI, (inputs, targets)
    )
    for module, score in zip(modules, together, strict=True):
        output = module(inputs).detach()
        expected = pytest.approx((float(loss(output, targets)), float(metric(output, targets))), rel=1e-12)
        assert numbers(score) == expected
        assert numbers(scored(module, loss, {"own": metric}, (inputs, targets))) == expected


def test_outputs_of_several_tensors_are_joined_each() -> None:
    on = torch.randn(300, 3), torch.randn(300, 3)
    score = scored(Twice(), lambda output, target: (output[0] * output[1] - target).abs().max(), {}, on)
    assert score.loss == float((on[0] * 2 * on[0] - on[1]).abs().max())


class Twice(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, 2 * inputs


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int16, torch.bool])
def test_accuracy_takes_labels_of_any_integers(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert accuracy(scores, torch.tensor([1, 1, 1, 0]).to(dtype)) == 0.5


def test_nothing_of_a_graph_is_built() -> None:
    seen = []

    def watching(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.requires_grad)
        return functional.cross_entropy(output, target)

    scored(linear(), watching, {}, samples(3))
    assert seen == [False]


def test_samples_stay_unchanged_where_a_model_works_in_place() -> None:
    class Scaling(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.mul_(0.5)

    def forgetful(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target.clone()) + 0 * target.zero_().sum()

    on = samples(20)
    before = [part.clone() for part in on]
    scored(Scaling(), forgetful, {}, on)
    assert all(map(torch.equal, on, before))


def test_what_a_model_caches_in_evaluation_it_can_train_with() -> None:
    class Caching(nn.Linear):
        cache: Tensor | None = None

        def forward(self, inputs: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = inputs.new_full((2,), 3.0)
            scaled: Tensor = super().forward(inputs) * self.cache
            return scaled

    module, on = Caching(3, 2).double().to(Current.device), samples(5)
    evaluate(module, functional.cross_entropy, {}, on, Current.device)
    inputs, labels = (part.to(Current.device) for part in on)
    functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
    assert module.weight.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_scores_what_a_cpu_scores() -> None:
    module, on = linear(), samples(2500)
    on_cpu = scored(module, functional.cross_entropy, ACCURACY, on)
    on_gpu = evaluate(module.cuda(), functional.cross_entropy, ACCURACY, on, torch.device("cuda"))
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-12)
    assert on_gpu.metrics == on_cpu.metrics
