"""Losses of each sample alone against loops over samples, and what the mean of such losses is not.

Shapes: B, samples of a batch; C, classes; T, positions of a sample.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fed.clients.scoring.losses import bce, cox, cross_entropy, huber, mse, of_each_sample, outputs_for
from fed.clients.scoring.measures import Loss, is_mean_over_samples
from fed.errors import InvalidModel


def scored(shape: tuple[int, ...], classes: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Scores [B, C, ...] and labels [B, ...]."""
    generator = torch.Generator().manual_seed(seed)
    output = scale * torch.randn(shape[0], classes, *shape[1:], generator=generator, dtype=torch.float64)
    return output, torch.randint(0, classes, shape, generator=generator)


def one_by_one(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    return torch.stack([loss(output[i : i + 1], target[i : i + 1]) for i in range(len(output))])


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(shapes, st.integers(1, 12), st.integers(0, 99))
def test_cross_entropy_is_pytorchs_and_the_mean_over_samples(shape: tuple[int, ...], classes: int, seed: int) -> None:
    output, target = scored(shape, classes, seed)
    expected = functional.cross_entropy(output, target)
    torch.testing.assert_close(cross_entropy(output, target), expected, rtol=1e-14, atol=1e-14)
    losses_B = of_each_sample(cross_entropy, output, target)
    assert losses_B.shape == shape[:1]
    torch.testing.assert_close(losses_B, one_by_one(functional.cross_entropy, output, target), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(losses_B.mean(), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2)])
def test_its_gradient_is_that_of_pytorchs(shape: tuple[int, ...]) -> None:
    output, target = scored(shape, 4)
    output.requires_grad_()
    (ours,) = torch.autograd.grad(of_each_sample(cross_entropy, output, target).mean(), output)
    (theirs,) = torch.autograd.grad(functional.cross_entropy(output, target), output)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_labels_are_whole_numbers_of_any_type(dtype: torch.dtype) -> None:
    output, target = scored((5, 3), 4)
    expected = cross_entropy(output, target)
    assert cross_entropy(output, target.to(dtype)) == expected
    assert torch.equal(
        of_each_sample(cross_entropy, output, target.to(dtype)), of_each_sample(cross_entropy, output, target)
    )


def test_scores_far_apart_overflow_nowhere() -> None:
    output, target = torch.tensor([[1e300, -1e300], [0.0, -800.0]], dtype=torch.float64), torch.tensor([0, 1])
    assert of_each_sample(cross_entropy, output, target).tolist() == [0.0, 800.0]


def test_scores_of_any_strides_give_the_same_numbers() -> None:
    output, target = scored((5, 3), 4)
    strided = output.movedim(1, 2).contiguous().movedim(2, 1)
    assert not strided.is_contiguous()
    assert torch.equal(of_each_sample(cross_entropy, strided, target), of_each_sample(cross_entropy, output, target))


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_of_no_class_is_refused(label: int) -> None:
    output, target = scored((5,), 4)
    target[2] = label
    for refusing in (cross_entropy, lambda *pair: of_each_sample(cross_entropy, *pair)):
        with pytest.raises((IndexError, RuntimeError)):
            refusing(output, target)


def quartic(output: Tensor, target: Tensor) -> Tensor:
    """A loss of a user's own."""
    return ((output - target) ** 4).mean() + 0.1 * output.abs().sum(1).mean()


MEANS: dict[str, Loss] = {
    "MSELoss": nn.MSELoss(),
    "SmoothL1Loss": nn.SmoothL1Loss(),
    "L1Loss": nn.L1Loss(),
    "binary": lambda output, target: functional.binary_cross_entropy_with_logits(output, target.sigmoid()),
    "function": quartic,
    "smoothed": lambda output, target: functional.cross_entropy(output, target.softmax(1), label_smoothing=0.1),
}


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2), (1, 1)])
def test_a_users_mean_is_taken_apart_into_its_samples(loss: Loss, shape: tuple[int, ...]) -> None:
    output, target = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    losses_B = of_each_sample(loss, output, target)
    torch.testing.assert_close(losses_B, one_by_one(loss, output, target), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(losses_B.mean(), loss(output, target), rtol=1e-12, atol=1e-14)


def test_a_loss_that_reads_numbers_is_refused() -> None:
    def hinge(output: Tensor, target: Tensor) -> Tensor:
        return output.mean() if output.sum() > target.sum() else target.mean()

    with pytest.raises(RuntimeError, match="data-dependent"):
        of_each_sample(hinge, torch.randn(3, 2), torch.randn(3, 2))


def survival(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Risks [B], and times and events [B, 2], with equal times among them."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.randint(1, 6, (count,), generator=generator).double()
    event = torch.randint(2, (count,), generator=generator).double()
    return torch.randn(count, generator=generator, dtype=torch.float64), torch.stack([time, event], 1)


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("seed", [0, 1])
def test_cox_is_the_loop_over_samples_at_risk(count: int, seed: int) -> None:
    risk, target = survival(count, seed)
    expected = 0.0
    for mine, (time, event) in zip(risk.tolist(), target.tolist(), strict=True):
        others = zip(risk.tolist(), target.tolist(), strict=True)
        at_risk = [math.exp(other) for other, (its, _) in others if its >= time]
        expected -= event * (mine - math.log(sum(at_risk)))
    assert float(cox(risk, target)) == pytest.approx(expected / count, abs=1e-13)
    assert float(cox(risk[:, None], target)) == float(cox(risk, target))


def test_cox_is_flambys_where_no_times_are_equal() -> None:
    """Theirs, with the columns (event, time), by its definition: the events' mean over the batch."""
    risk, target = survival(30)
    target[:, 0] += torch.arange(30) / 100
    order = torch.argsort(-target[:, 0])
    scores, events = risk[order] - risk.max(), target[order, 1]
    theirs = (-(scores - scores.exp().cumsum(0).log()) * events).mean()
    assert float(cox(risk, target)) == pytest.approx(float(theirs), abs=1e-14)


def test_cox_without_events_is_a_zero_that_has_a_gradient() -> None:
    risk, target = survival(5)
    target[:, 1] = 0
    loss = cox(risk.requires_grad_(), target)
    (gradient,) = torch.autograd.grad(loss, risk)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_cox_has_the_gradient_of_its_differences(scale: float) -> None:
    """Large risks overflow nowhere: exp(300) is no float32."""
    risk, target = survival(12)
    assert torch.autograd.gradcheck(lambda output: cox(output, target), scale * risk.requires_grad_())
    loss = cox(scale * risk.float(), target.float())
    assert torch.isfinite(loss)


@pytest.mark.parametrize("shapes", [((6,), (6, 1)), ((6, 1), (6,)), ((6,), (6,)), ((6, 3), (6, 3))])
@pytest.mark.parametrize(
    ("loss", "theirs"),
    [(mse, functional.mse_loss), (huber, functional.huber_loss), (bce, functional.binary_cross_entropy_with_logits)],
)
def test_losses_of_numbers_are_pytorchs_in_one_shape(loss: Loss, theirs: Loss, shapes: Any) -> None:
    """A dimension of one number in either is no reason to spread one over the other."""
    output, target = torch.randn(shapes[0]), torch.rand(shapes[1])
    assert torch.equal(loss(output, target), theirs(output.reshape(target.shape), target))
    assert is_mean_over_samples(loss)
    torch.testing.assert_close(of_each_sample(loss, output, target), one_by_one(loss, output, target))
    if loss is not bce:
        counts = (10 * target).long()
        assert torch.equal(loss(output, counts), loss(output, counts.float()))


@pytest.mark.parametrize("loss", [mse, huber, bce, cox])
def test_targets_of_another_shape_are_refused_in_a_sentence(loss: Loss) -> None:
    with pytest.raises(InvalidModel, match=r"got shapes \(6, 10\) and \(6,\)"):
        loss(torch.randn(6, 10), torch.zeros(6))


@pytest.mark.parametrize(
    ("loss", "targets", "outputs"),
    [
        (cross_entropy, torch.zeros(4).long(), 7),
        (mse, torch.zeros(4), 1),
        (mse, torch.zeros(4).long(), 1),
        (bce, torch.zeros(4, 3).long(), 3),
        (cox, torch.zeros(4, 2), 1),
        (functional.l1_loss, torch.zeros(4, 5), 5),
        (functional.l1_loss, torch.zeros(4).long(), 7),
    ],
)
def test_a_model_has_as_many_outputs_as_the_loss_needs(loss: Loss, targets: Tensor, outputs: int) -> None:
    assert outputs_for(loss, targets, lambda: 7) == outputs
