"""Local training and evaluation against PyTorch's own optimizers, whole batches and masks; all in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fed.clients.evaluation import accuracy, evaluate
from fed.clients.models import char_gru, char_transformer
from fed.clients.optimizers import optimizer_for
from fed.clients.training import Trained, Trainer
from fed.experiment import Local

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("adam", {"betas": (0.8, 0.95), "eps": 1e-3}),
        ("adamw", {"betas": (0.8, 0.95), "eps": 1e-3}),
    ],
)
def test_a_step_is_that_of_pytorchs_optimizer_of_the_same_name(
    optimizer: str, keys: dict[str, Any], weight_decay: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x_P = torch.randn(5, generator=generator, dtype=torch.float64)
    theirs = nn.Parameter(x_P.clone())
    their_steps = OPTIMIZERS[optimizer]([theirs], lr=0.05, weight_decay=weight_decay, **keys)  # type: ignore[call-arg]
    our_steps = optimizer_for(Local(optimizer=optimizer, lr=0.05, weight_decay=weight_decay, **keys))  # type: ignore[arg-type]
    for _ in range(6):
        gradient_P = torch.randn(5, generator=generator, dtype=torch.float64)
        theirs.grad = gradient_P.clone()
        their_steps.step()
        our_steps.step(x_P, gradient_P)
        torch.testing.assert_close(x_P, theirs.detach(), rtol=1e-13, atol=1e-13)  # a few roundings a step


def samples(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, (inputs.sum(1) > 0).long()


def linear() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Linear(3, 2).double()


def trained(count: int, **keys: Any) -> Trained:
    trainer = Trainer(linear(), functional.cross_entropy, Local(**keys), None, CPU)
    state = trainer.layout.pack(trainer.module)
    return trainer.train(*state, samples(count), order=np.random.default_rng(3), seed=0)


@pytest.mark.parametrize("count", [7, 8, 14, 20])
def test_batches_that_share_a_step_are_one_large_batch(count: int) -> None:
    apart, together = trained(count, batch_size=4, accumulate=2, epochs=3), trained(count, batch_size=8, epochs=3)
    torch.testing.assert_close(apart.vector_V, together.vector_V, rtol=1e-12, atol=1e-12)
    assert apart.train_loss == pytest.approx(together.train_loss, rel=1e-12)
    assert apart.samples_seen == together.samples_seen == 3 * count


def test_the_training_loss_is_the_mean_over_samples_whatever_the_last_batch() -> None:
    without_a_step = trained(10, batch_size=4, lr=1e-300)
    expected = functional.cross_entropy(linear()(samples(10)[0]), samples(10)[1])
    assert without_a_step.train_loss == pytest.approx(expected.item(), rel=1e-12)


def test_a_float16_loss_whose_scaled_gradient_overflows_is_scaled_down_and_no_step_is_lost() -> None:
    def large(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) * 30

    vectors = []
    for precision in ("float32", "float16"):
        module = linear().float()
        local = Local(batch_size=8, steps=2, lr=1e-3, precision=precision)
        trainer = Trainer(module, large, local, None, CPU)
        inputs, labels = samples(8)
        state = trainer.layout.pack(module)
        done = trainer.train(*state, (inputs.float() * 100, labels), order=np.random.default_rng(0), seed=0)
        vectors.append(done.vector_V - state[0])
    assert vectors[0].norm() > 0
    # float16 has 11 bits; a step that is skipped would leave half of the way.
    torch.testing.assert_close(vectors[1], vectors[0], rtol=0.02, atol=float(0.02 * vectors[0].norm()))


@pytest.mark.parametrize("count", [1, 1024, 1025, 2500])
def test_an_evaluation_in_batches_is_that_of_all_samples_at_once(count: int) -> None:
    module, (inputs, labels) = linear(), samples(count)
    score = evaluate(module, functional.cross_entropy, accuracy, (inputs, labels), CPU)
    assert score.loss == pytest.approx(functional.cross_entropy(module(inputs), labels).item(), rel=1e-12)
    assert score.accuracy == pytest.approx((module(inputs).argmax(1) == labels).double().mean().item(), rel=1e-12)


@pytest.mark.parametrize(
    "model",
    [char_gru(7, embedding=4, hidden=8), char_transformer((9,), 7, width=8, heads=2)],
    ids=["gru", "transformer"],
)
def test_a_model_of_characters_does_not_see_those_to_come(model: nn.Module) -> None:
    text_BT = torch.arange(9).remainder(7).unsqueeze(0)
    other_BT = text_BT.clone()
    other_BT[:, 5:] = 0
    model.eval()
    before, after = model(text_BT), model(other_BT)
    torch.testing.assert_close(before[:, :, :5], after[:, :, :5])
    assert not torch.allclose(before[:, :, 5:], after[:, :, 5:])
