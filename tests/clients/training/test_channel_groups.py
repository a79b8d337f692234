"""Channel-wise operations of a group of clients against PyTorch's rules, and against each client alone.

Shapes: K, clients; B, samples; C, channels.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fed.clients.models import cnn
from fed.clients.training.channel_groups import ChannelGroups
from fed.clients.training.op_graphs import record
from tests.clients.training.client_groups import CLIENTS, assert_computed_alike

SHAPES = {1: (4, 9), 2: (4, 8, 7), 3: (4, 5, 6, 4)}


class Calls(nn.Module):
    """A function of an input and two parameters."""

    def __init__(self, function: Callable[..., Tensor], weight: tuple[int, ...], bias: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(weight)), nn.Parameter(torch.randn(bias))
        self._function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(inputs, self.weight, self.bias)


def changed_after(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A ReLU whose input is changed before the maximum is taken."""
    x = x * weight
    rectified = torch.relu(x)
    x += bias[:, None, None]
    return functional.max_pool2d(rectified, 2) * x.mean()


def used_twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rectified = functional.relu(x * weight)
    return functional.max_pool2d(rectified, 3, stride=2, padding=1) + rectified.mean() * bias[:, None, None]


MODULES: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "conv1d": (1, lambda: nn.Conv1d(4, 6, 3, padding=1)),
    "conv2d": (2, lambda: nn.Conv2d(4, 6, 3)),
    "conv3d": (3, lambda: nn.Conv3d(4, 6, 2, stride=2)),
    "no bias": (2, lambda: nn.Conv2d(4, 6, (3, 2), bias=False, stride=(2, 1), dilation=2)),
    "depthwise": (2, lambda: nn.Conv2d(4, 8, 3, groups=4)),
    "two groups": (2, lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same")),
    "reflected": (2, lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")),
    "by keywords": (2, lambda: Calls(lambda x, w, b: functional.conv2d(x, weight=w, bias=b, padding=1), (4, 4, 3, 3))),
    "transposed": (2, lambda: nn.ConvTranspose2d(4, 6, 3)),
    "frozen": (2, lambda: nn.Sequential(nn.Conv2d(4, 6, 3).requires_grad_(False), nn.Conv2d(6, 2, 1))),
    "max_pool1d": (1, lambda: nn.Sequential(nn.Conv1d(4, 6, 1), nn.ReLU(), nn.MaxPool1d(2))),
    "max_pool2d": (2, lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True))),
    "max_pool3d": (3, lambda: nn.Sequential(nn.Conv3d(4, 6, 1), nn.ReLU(inplace=True), nn.MaxPool3d(2))),
    "avg_pool1d": (1, lambda: nn.Sequential(nn.Conv1d(4, 6, 1), nn.AvgPool1d(2))),
    "avg_pool2d": (2, lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(2, count_include_pad=False, padding=1))),
    "avg_pool3d": (3, lambda: nn.Sequential(nn.Conv3d(4, 6, 1), nn.AvgPool3d(2))),
    "adaptive pool1d": (1, lambda: nn.Sequential(nn.Conv1d(4, 6, 1), nn.AdaptiveAvgPool1d(3))),
    "adaptive pool2d": (2, lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.AdaptiveAvgPool2d((3, 2)))),
    "global pool": (2, lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.AdaptiveAvgPool2d(1))),
    "adaptive pool3d": (3, lambda: nn.Sequential(nn.Conv3d(4, 6, 1), nn.AdaptiveAvgPool3d(2))),
    "with indices": (
        2,
        lambda: Calls(lambda x, w, b: functional.max_pool2d(x * w, 2, return_indices=True)[0] * b[0], ()),
    ),
    "group norm": (2, lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.GroupNorm(2, 6))),
    "group norm of a volume": (3, lambda: nn.Sequential(nn.Conv3d(4, 6, 1), nn.GroupNorm(6, 6))),
    "no affine": (1, lambda: nn.Sequential(nn.Conv1d(4, 6, 1), nn.GroupNorm(3, 6, eps=0.1, affine=False))),
    "changed after a ReLU": (2, lambda: Calls(changed_after, ())),
    "used twice": (2, lambda: Calls(used_twice, ())),
    "all of it": (2, lambda: cnn((4, 8, 7), 3, (8, 16), 5)),
    "of every sample": (
        2,
        lambda: Calls(lambda x, w, b: torch.stack([functional.conv2d(one, w, b) for one in x]), (4, 4, 3, 3)),
    ),
    "within a vmap": (
        2,
        lambda: Calls(lambda x, w, b: vmap(lambda one: functional.conv2d(one[None], w, b)[0])(x), (4, 4, 3, 3)),
    ),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("is_common", [False, True], ids=["own samples", "common samples"])
@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients_are_those_of_each_client(name: str, is_common: bool) -> None:
    torch.manual_seed(0)
    dims, make = MODULES[name]
    assert_computed_alike(make().double(), SHAPES[dims], ChannelGroups(), is_common=is_common)


def test_maximum_before_relu_changes_no_bit() -> None:
    """With many zeros, equal numbers and NaN in the windows."""
    torch.manual_seed(0)
    x = torch.randn(CLIENTS, 4, 2, 12, 12).round()
    x[0, 0, 0, 3, 3], x[1, 1, 1, 5, 6] = torch.nan, -torch.inf
    x.requires_grad_()

    def pooled(x: Tensor) -> Tensor:
        return functional.max_pool2d(functional.relu(x), 3, padding=1)

    with ChannelGroups():
        together = vmap(pooled)(x)
    alone = pooled(x.flatten(0, 1)).view_as(together)
    weights = torch.randn(together.shape)
    gradients = [torch.autograd.grad(one, x, weights)[0] for one in (together, alone)]
    for ours, theirs in ((together, alone), gradients):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_images_are_copied_at_the_ends_alone() -> None:
    """Into the first convolution and out of the last one: [K, B, C, ...] ↔ [B, K·C, ...]."""
    module = cnn((4, 8, 8), 3, (8, 16), 5)
    parameters = {name: part.detach().expand(CLIENTS, *part.shape).clone() for name, part in module.named_parameters()}
    inputs = torch.randn(CLIENTS, 5, 4, 8, 8)

    def forward(x: Tensor, *parts: Tensor) -> tuple[Tensor]:
        with ChannelGroups():
            return (
                vmap(lambda own, x: functional_call(module, own, (x,)))(dict(zip(parameters, parts, strict=True)), x),
            )

    program = record(forward, [inputs, *parameters.values()]).program()
    copied = [node.meta["form"][0] for node in program.graph.nodes if node.target is torch.clone]
    images = [tuple(shape) for shape in copied if len(shape) == 5]
    assert images == [(5, 8, 8, CLIENTS, 4), (CLIENTS, 5, 16, 2, 2)]
