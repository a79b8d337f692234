"""A flat working vector is the module's parameters, and lies in memory as parameters of their own would."""

import copy

import pytest
import torch
from torch import nn

from fed.clients.flat import FlatParameters
from fed.layout import Layout


def odd(dtype: torch.dtype = torch.float32) -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.Linear(3, 3)).to(dtype)
    module[1].bias.requires_grad_(False)
    return module


def flat(module: nn.Module) -> FlatParameters:
    return FlatParameters(module, Layout.of(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_are_aligned_views_and_keep_their_values(dtype: torch.dtype) -> None:
    module = odd(dtype)
    before = copy.deepcopy(module)
    working = flat(module)
    for ours, theirs in zip(module.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert all(parameter.data_ptr() % 64 == 0 for parameter in trained)
    working.x_Q.add_(1)
    for ours, theirs in zip(module.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, theirs + 1 if theirs.requires_grad else theirs)


def test_the_gaps_stay_zero_and_the_gradient_has_the_same_ones() -> None:
    module = odd()
    working = flat(module)
    count = Layout.of(module).parameters
    ones_Q = working.spread(torch.ones(count))
    assert float(ones_Q.sum()) == count
    gradient_Q = working.gradient(torch.stack([p.sum() for p in module.parameters() if p.requires_grad]).sum())
    assert torch.equal(gradient_Q, ones_Q)
    assert not working.x_Q[ones_Q == 0].any()


def test_spread_puts_each_number_where_its_parameter_is() -> None:
    module = odd()
    working, layout = flat(module), Layout.of(module)
    vector_P = torch.arange(float(layout.parameters))
    working.x_Q.copy_(working.spread(vector_P))
    assert torch.equal(layout.pack(module)[0][: layout.parameters], vector_P)


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    module = nn.Module()
    module.embed, module.read = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    module.read.weight = module.embed.weight
    working = flat(module)
    assert module.read.weight is module.embed.weight
    gradient_Q = working.gradient(module.read(module.embed(torch.tensor([1]))).sum())
    # d/dE of 1ᵀ E e₁: every row gets e₁, and row 1 the sum of all rows on top.
    rows = working.x_Q.view(5, 3)
    expected = rows[1].expand(5, 3) + torch.eye(5)[1][:, None] * rows.sum(0)
    torch.testing.assert_close(gradient_Q, expected.reshape(-1))


def test_what_a_forward_pass_put_elsewhere_comes_back() -> None:
    module = odd()
    working = flat(module)
    moved = torch.full_like(module[0].weight, 3.0)  # type: ignore[index]
    module[0].weight.data = moved  # type: ignore[index]
    working.bind_again()
    assert torch.equal(working.x_Q[: moved.numel()], moved.reshape(-1))
    working.x_Q.zero_()
    assert not module[0].weight.any()  # type: ignore[index]
