"""A flat working vector is the module's parameters, and lies in memory as parameters of their own would."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fed.clients.training.flat import FlatParameters
from fed.vectors.layout import Layout


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


def test_gaps_stay_zero_in_vector_and_gradient() -> None:
    module = odd()
    working = flat(module)
    count = Layout.of(module).parameters
    ones_Q = working.spread(torch.ones(count))
    assert float(ones_Q.sum()) == count
    total = torch.stack([p.sum() for p in module.parameters() if p.requires_grad]).sum()
    gradient_Q = working.joined(working.gradients(total))
    assert torch.equal(gradient_Q, ones_Q)
    assert not working.x_Q[ones_Q == 0].any()


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    module = nn.Module()
    module.embed, module.read = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    module.read.weight = module.embed.weight
    working = flat(module)
    assert module.read.weight is module.embed.weight
    total = module.read(module.embed(torch.tensor([1]))).sum()
    gradient_Q = working.joined(working.gradients(total))
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


def convolving() -> nn.Module:
    """Among its 4-dimensional parameters is one that is no convolution's, and one convolution is of images of one."""
    module = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 4, (2, 3), groups=2), nn.Conv2d(4, 3, 1), nn.PReLU(3))
    module.register_parameter("mask", nn.Parameter(torch.randn(2, 3, 4, 5)))
    return module.double()


def by_name(module: nn.Module) -> dict[str, Tensor]:
    return {name: part.detach().clone() for name, part in module.named_parameters()}


def test_weights_of_convolutions_are_arranged_and_keep_their_values() -> None:
    module = convolving()
    before, working = by_name(module), flat(module)
    assert working.has_convolutions
    assert not flat(odd()).has_convolutions
    for channels_last in (True, False, False, True):
        working.arrange(channels_last=channels_last)
        working.bind_again()
        for name, part in module.named_parameters():
            assert torch.equal(part, before[name])
            assert part.data_ptr() % 64 == 0
            if not (channels_last and part.ndim == 4 and name != "mask"):
                assert part.is_contiguous()
                continue
            _, i, h, w = part.shape
            assert part.stride() == (h * w * i, 1, w * i, i), "written out, as PyTorch goes by strides of a size of 1"
    working.x_Q.zero_()
    assert not any(part.any() for part in by_name(module).values())


@pytest.mark.parametrize("channels_last", [False, True])
def test_numbers_are_spread_to_where_arranged_parameters_are(channels_last: bool) -> None:
    module = convolving()
    working, layout = flat(module), Layout.of(module)
    working.arrange(channels_last=channels_last)
    vector_P = torch.arange(float(layout.parameters), dtype=torch.float64)
    working.x_Q.copy_(working.spread(vector_P))
    assert torch.equal(layout.pack(module)[0][: layout.parameters], vector_P)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_gradient_lies_where_its_parameter_does(channels_last: bool) -> None:
    """Of ½ ‖x‖², whose gradient is x, with and without a vector in between."""
    module = convolving()
    working = flat(module)
    working.arrange(channels_last=channels_last)

    def loss() -> Tensor:
        return torch.stack([part.square().sum() for part in module.parameters()]).sum() / 2

    assert torch.equal(working.joined(working.gradients(loss())), working.x_Q)
    before = by_name(module)
    working.descend(working.gradients(loss()), lr=0.25)
    assert all(torch.equal(part, 0.75 * before[name]) for name, part in module.named_parameters())


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_a_forward_pass_put_elsewhere_descends_from_there(channels_last: bool) -> None:
    module = convolving()
    working = flat(module)
    working.arrange(channels_last=channels_last)
    weight = module.get_parameter("1.weight")
    weight.data = moved = torch.randn_like(weight, memory_format=torch.contiguous_format)
    working.descend(working.gradients(weight.sum()), lr=2.0)
    assert torch.equal(weight, moved - 2)
    working.x_Q.zero_()
    assert not weight.any()


@pytest.mark.parametrize("take", [lambda loss: loss, lambda loss: loss.reshape(1)], ids=["scalar", "one number"])
def test_gradients_are_torchs(take: Callable[[Tensor], Tensor]) -> None:
    """Also of parameters that the loss does not reach, and of a sparse one."""
    module = nn.ModuleDict(
        {"embed": nn.Embedding(5, 3, sparse=True), "read": nn.Linear(3, 2), "unused": nn.Linear(2, 2)}
    )
    working = flat(module)

    def loss() -> Tensor:
        return take(module["read"](module["embed"](torch.tensor([1, 4, 1]))).square().sum())

    loss().backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros(p.shape) if p.grad is None else p.grad.to_dense() for p in module.parameters()]
    expected_P = torch.cat([part.reshape(-1) for part in gradients])
    assert torch.equal(working.joined(working.gradients(loss())), working.spread(expected_P))
    with pytest.raises(RuntimeError, match="scalar"):
        working.gradients(torch.cat([part.reshape(-1) for part in module.parameters()]))
