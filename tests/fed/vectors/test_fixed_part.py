"""The fixed part of a model: which tensors it is, and that nobody changes them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fed.errors import InvalidExperiment, InvalidModel
from fed.vectors.fixed_part import TrainingModes, Untouched, fixed_state, in_training, packed, train_alone, unpack


def body_and_head() -> nn.Sequential:
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Dropout(0.5))
    return nn.Sequential(body.requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_an_untrained_layer_is_fixed_with_its_statistics() -> None:
    module = body_and_head()
    statistics = [f"0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert [*fixed_state(module)] == ["0.0.weight", "0.0.bias", *statistics]
    module.get_parameter("0.0.bias").requires_grad_(True)
    assert [*fixed_state(module)] == ["0.0.weight"], "the body is trained in part, and its statistics with it"


def test_fixed_layers_with_buffers_compute_as_in_evaluation() -> None:
    module = body_and_head()
    in_training(module)
    training = {name: layer.training for name, layer in module.named_modules()}
    assert [name for name, is_training in training.items() if not is_training] == ["0.1"]
    before = {name: part.clone() for name, part in fixed_state(module).items()}
    module(torch.randn(8, 3))
    assert all(torch.equal(part, before[name]) for name, part in fixed_state(module).items())
    assert module[1].num_batches_tracked == 1


def test_training_modes_are_set_again_after_each_evaluation() -> None:
    module = body_and_head()
    expected = [layer.training for layer in in_training(body_and_head()).modules()]
    modes = TrainingModes(module)
    for change in (module.eval, module.train, module[2].eval, lambda: None):
        change()
        modes.set()
        assert [layer.training for layer in module.modules()] == expected


def test_a_modules_own_train_is_called_each_time() -> None:
    class Counted(nn.Linear):
        calls = 0

        def train(self, mode: bool = True) -> "Counted":
            self.calls += 1
            return super().train(mode)

    layer = Counted(2, 2)
    modes = TrainingModes(nn.Sequential(layer))
    for number in range(1, 4):
        modes.set()
        assert layer.calls == number


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.read = nn.Linear(3, 5)
        self.read.weight = self.embed.weight


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["*"], ["embed.weight", "read.bias"]),
        (["read.*"], ["embed.weight", "read.bias"]),
        (["embed.weight"], ["embed.weight"]),
        (["*.bias"], ["read.bias"]),
    ],
)
def test_tied_weights_are_trained_by_each_of_their_names(patterns: list[str], trained: list[str]) -> None:
    module = _Tied()
    train_alone(module, patterns)
    assert [name for name, part in module.named_parameters() if part.requires_grad] == trained


def test_a_pattern_trains_what_the_model_had_frozen() -> None:
    module = body_and_head()
    train_alone(module, ["0.0.*"])
    assert [name for name, part in module.named_parameters() if part.requires_grad] == ["0.0.weight", "0.0.bias"]


def test_a_pattern_that_fits_no_name_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"got 'heads\.\*', which fits none of 0\.0\.weight, "):
        train_alone(body_and_head(), ["2.*", "heads.*"])


def test_rows_of_each_type_fill_the_tensors_again() -> None:
    state = {
        "a": torch.randn(2, 3),
        "b": torch.tensor([True, False]),
        "c": torch.randn(3, dtype=torch.float64),
        "d": torch.tensor(7.0),
        "e": torch.tensor([3, 200], dtype=torch.uint8),
    }
    rows = packed(state)
    assert [(row.dtype, row.numel()) for row in rows] == [(torch.float32, 7), (torch.float64, 3), (torch.uint8, 4)]
    others = {name: torch.zeros_like(part) for name, part in state.items()}
    unpack(rows, others)
    assert all(torch.equal(others[name], part) for name, part in state.items())


def add_in_place(fixed: Tensor) -> None:
    fixed.add_(1)


def add_to_data(fixed: Tensor) -> None:
    fixed.data.add_(1)


def set_data(fixed: Tensor) -> None:
    fixed.data = fixed.data + 1


@pytest.mark.parametrize("tasks", [0, 2], ids=["first task", "third task"])
@pytest.mark.parametrize("change", [add_in_place, add_to_data, set_data], ids=lambda change: change.__name__)
def test_a_change_of_the_fixed_part_is_found(change: Callable[[Tensor], None], tasks: int) -> None:
    """What bypasses PyTorch's counter of changes is found with the first task alone."""
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    untouched = Untouched(module)
    for _ in range(tasks):
        untouched.begin()
        untouched.check()
    untouched.begin()
    with torch.no_grad():
        change(module.get_parameter("0.bias"))
    if tasks and change is add_to_data:
        untouched.check()
        return
    with pytest.raises(InvalidModel, match=r"got a change of 0\.bias"):
        untouched.check()
