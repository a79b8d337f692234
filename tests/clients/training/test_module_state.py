"""A module's state is read and written as its layout packs and unpacks it."""

import copy

import pytest
import torch
from torch import nn

from fed.clients.training.flat import FlatParameters
from fed.clients.training.module_state import ModuleState
from fed.vectors.layout import Layout


class Parts(nn.Module):
    """Tied weights, convolutions, statistics, a fixed layer, a buffer of another type, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
        self.second = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.second.weight
        self.fixed = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("wide", torch.arange(4, dtype=torch.float64))
        self.register_buffer("single", torch.tensor(True))
        self.register_buffer("mask", torch.ones(5), persistent=False)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("private", [(), ("tied.bias", "first.1.running_mean")])
def test_state_is_written_and_read_as_its_layout_says(channels_last: bool, private: tuple[str, ...]) -> None:
    module = Parts()
    other = copy.deepcopy(module)
    layout = Layout.of(module, private)
    flat = FlatParameters(module, layout)
    flat.arrange(channels_last=channels_last)
    state = ModuleState(module, layout, flat)
    vector_V = torch.randn(layout.size, dtype=layout.dtype, generator=torch.Generator().manual_seed(0))
    integers_I = torch.tensor([7, 0])
    module.mask = torch.zeros(5)
    module.get_parameter("second.weight").data = torch.zeros(3, 3)
    state.write(vector_V, integers_I)
    layout.unpack(vector_V, integers_I, other)
    expected = dict([*other.named_parameters(), *other.named_buffers()])
    for name, part in [*module.named_parameters(), *module.named_buffers()]:
        assert torch.equal(part, expected[name]), name
    module.wide = torch.full((4,), 3.0, dtype=torch.float64)
    flat.x_Q.mul_(2)
    for ours, packed in zip(state.read(), layout.pack(module), strict=True):
        assert torch.equal(ours, packed)
        assert ours.dtype is packed.dtype
