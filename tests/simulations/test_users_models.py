"""Whole runs with models, losses and data of a user's own that do what PyTorch allows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.errors import InvalidData, InvalidExperiment, InvalidModel
from fed.reports.summary import spread
from fed.simulations.simulate import simulate
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")


def samples(count: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return inputs, (inputs.sum(1) > 0).long()


def two_clients() -> fed.FederatedData:
    inputs, labels = samples()
    return fed.FederatedData({"a": (inputs[:6], labels[:6]), "b": (inputs[6:], labels[6:])}, samples())


def experiment(**keys: Any) -> fed.Experiment:
    return fed.Experiment(**{"rounds": {"count": 3}, "local": {"batch_size": 4}, **keys})


def state_of(run: fed.Run) -> list[Tensor]:
    return list(run.model.state_dict().values())


def equal(left: fed.Run, right: fed.Run) -> bool:
    return all(map(torch.equal, state_of(left), state_of(right)))


@pytest.mark.parametrize("batch_size", [4, 16])
def test_model_changing_inputs_in_place_leaves_the_data_unchanged(batch_size: int) -> None:
    class Scaling(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs.mul_(0.5))

    data, untouched = two_clients(), two_clients()
    simulate(experiment(local={"batch_size": batch_size}), data=data, model=lambda: Scaling(4, 2))
    assert data.test is not None
    assert untouched.test is not None
    assert torch.equal(data.test[0], untouched.test[0])
    assert all(torch.equal(data.train[client][0], untouched.train[client][0]) for client in data.train)


def test_a_model_that_keeps_what_it_computed_can_be_returned() -> None:
    class Keeping(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            self.scores = super().forward(inputs)
            return self.scores

    run = simulate(experiment(), data=fed.FederatedData({0: samples()}), model=lambda: Keeping(4, 2))
    assert run.summary["status"] == "finished"


def test_unsaved_buffers_do_not_leak_between_clients_or_evaluations() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("calls", torch.zeros(2), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            calls = self.get_buffer("calls").add_(torch.tensor([0.1, 0.0], device=inputs.device))
            return super().forward(inputs) + calls.clone()

    often, once = (
        simulate(experiment(rounds={"count": 4, "evaluate_every": every}), data=two_clients(), model=Counting)
        for every in (1, 4)
    )
    assert equal(often, once)
    assert often.metrics[-1]["test_loss"] == once.metrics[-1]["test_loss"]


class WithMask(nn.Linear):
    def __init__(self, persistent: bool) -> None:
        super().__init__(4, 2)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1), persistent=persistent)


def test_infinite_constant_is_refused_only_in_the_state() -> None:
    with pytest.raises(InvalidModel, match=r"got -inf in mask: .* persistent=False"):
        simulate(experiment(), data=two_clients(), model=lambda: WithMask(True))
    run = simulate(experiment(), data=two_clients(), model=lambda: WithMask(False))
    assert run.model.get_buffer("mask")[0, 1] == -math.inf


@pytest.mark.parametrize(("precision", "reason"), [("bfloat16", "autocast would"), ("tf32", "TF32 is for products")])
def test_another_precision_of_a_float64_model_is_refused(precision: str, reason: str) -> None:
    data = fed.FederatedData({0: samples(dtype=torch.float64)})
    refusal = rf"local.precision must be float32.* float64, got {precision}: .*{reason}"
    with pytest.raises(InvalidModel, match=refusal):
        simulate(experiment(local={"precision": precision}), data=data, model=lambda: nn.Linear(4, 2).double())


def test_batches_of_one_sample_under_batch_norm_are_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"local.batch_size must be 2 or more .*got 1"):
        simulate(
            experiment(local={"batch_size": 1}),
            data=two_clients(),
            model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
        )


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    def computed() -> nn.Module:
        module = nn.Linear(4, 2)
        module.scale = module.weight * 2  # as hooks of old do
        return module

    with pytest.raises(InvalidModel, match=r"copy\.deepcopy"):
        simulate(experiment(), data=two_clients(), model=computed)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int16])
def test_labels_may_be_any_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs, labels = samples()
    data = fed.FederatedData({0: (inputs, labels.to(dtype))})
    run = simulate(experiment(), data=data, output=tmp_path / "run")
    assert equal(run, simulate(experiment(), data=fed.FederatedData({0: samples()})))


def test_negative_integers_under_a_users_loss_are_no_classes() -> None:
    inputs, labels = samples()
    data = fed.FederatedData({0: (inputs, labels - 5)})
    run = simulate(experiment(), data=data, loss=lambda output, target: (output[:, 0] - target).square().mean())
    assert run.summary["status"] == "finished"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_measure_that_is_not_finite_is_no_error(value: float) -> None:
    run = simulate(
        experiment(algorithm={"kind": "local"}),
        data=two_clients(),
        model=lambda: nn.Linear(4, 2),
        metric=lambda output, target: value,
    )
    assert math.isnan(run.metrics[-1]["client_accuracy_std"])
    mean, deviation = spread([value, 1.0])
    assert mean == value or math.isnan(value)
    assert deviation is not None
    assert math.isnan(deviation)


def test_client_names_do_not_differ_from_run_to_run() -> None:
    with pytest.raises(InvalidData, match="integer or a text"):
        fed.FederatedData({object(): samples()})


def drawn_globally() -> tuple[Tensor, Tensor]:
    """A source that draws from PyTorch's global generator."""
    inputs = torch.rand(40, 4)
    return inputs, (inputs[:, 0] > 0.5).long()


def test_source_with_global_draws_repeats_in_every_run() -> None:
    keys = experiment(data={"kind": f"python:{__name__}:drawn_globally", "clients": 4})
    torch.manual_seed(1)
    first = simulate(keys)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert equal(first, simulate(keys))
    assert torch.equal(state, torch.get_rng_state())
    assert not equal(first, simulate(keys.override({"seed": 1})))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_loss_and_metric_with_tensors_move_to_the_device() -> None:
    loss, metric = (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])) for _ in range(2))
    run = simulate(experiment(), data=two_clients(), model=lambda: nn.Linear(4, 2).cuda(), loss=loss, metric=metric)
    assert run.summary["final_test_accuracy"] is not None
    assert loss.state_dict()["weight"].device.type == "cpu"


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameter_hooks_are_refused_because_training_ignores_them(register: str) -> None:
    module = parts.small()
    getattr(next(module.parameters()), register)(lambda gradient: None)
    with pytest.raises(InvalidModel, match=r"parameters must have no hooks, .* got one on 0\.weight"):
        simulate(fed.Experiment(rounds={"count": 1}), data=parts.unequal(), model=module)


def test_what_raises_while_a_client_is_read_names_it() -> None:
    def make(client: int) -> Any:
        if client == 3:
            raise OSError("no such shard")
        return parts.samples(9, client)

    data = fed.FederatedData(fed.ClientsOnDemand(range(5), make, lambda client: 9), parts.samples(9, 9), classes=3)
    with pytest.raises(OSError, match="no such shard") as caught:
        simulate(fed.Experiment(rounds={"count": 1}, simulation={"workers": 0}), data=data, model=parts.small)
    assert "while client 3 was made or read" in caught.value.__notes__


def test_a_factory_that_raises_is_answered_with_its_line() -> None:
    def broken() -> nn.Module:
        return nn.Linear(4, -1)

    with pytest.raises(InvalidModel, match=r"^the model's factory raised RuntimeError: .*test_users_models\.py:\d+"):
        simulate(experiment(), data=two_clients(), model=broken)
