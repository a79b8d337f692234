"""A model's state as one vector and back: nothing is lost, nothing stands twice."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fed.errors import InvalidModel
from fed.vectors.fixed_part import fixed_state, packed, unpack
from fed.vectors.layout import Layout, Spec


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class _Tied(nn.Module):
    """An embedding that is read with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.read = nn.Linear(3, 5, bias=False)
        self.read.weight = self.embed.weight


class _Buffers(nn.Module):
    """One buffer of every sort, a scalar parameter, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.tensor([[0, 255]], dtype=torch.uint8))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mean", torch.tensor([0.1, 0.2], dtype=torch.float64))
        self.register_buffer("halves", torch.tensor([0.5, -65504.0], dtype=torch.float16))
        self.register_buffer("unsaved", torch.tensor([7.0]), persistent=False)


def batch_norm() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    module(torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(0)))  # statistics that are not the default
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    module[0].register_parameter("table", nn.Parameter(torch.tensor([3, 4]), requires_grad=False))
    return module


MODULES: list[Callable[[], nn.Module]] = [
    batch_norm,
    _Tied,
    frozen,
    _Buffers,
    lambda: nn.Linear(3, 2).double(),
    lambda: nn.Linear(3, 2).to(torch.bfloat16),
    lambda: nn.GRU(2, 3, 2),
    lambda: nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
]
each_module = pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)


def scrambled(module: nn.Module) -> nn.Module:
    """A copy with another state in every place."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
    return other


def copied(module: nn.Module, other: nn.Module) -> None:
    """Copy one module's vector, integers and fixed part to another."""
    layout = Layout.of(module)
    layout.unpack(*layout.pack(module), other)
    unpack(packed(fixed_state(module)), fixed_state(other))


def same_state(one: nn.Module, other: nn.Module) -> bool:
    state, expected = one.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(
        part.dtype == expected[name].dtype and torch.equal(part, expected[name]) for name, part in state.items()
    )


@each_module
def test_what_is_packed_is_unpacked_to_the_bit(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    layout = Layout.of(module)
    other = scrambled(module)
    assert not same_state(other, module)
    vector_V, integers_I = layout.pack(module)
    assert (vector_V.shape, vector_V.dtype) == ((layout.size,), layout.dtype)
    assert integers_I.dtype == torch.int64
    copied(module, other)
    assert same_state(other, module)


@each_module
def test_every_number_has_one_place_and_parameters_come_first(make: Callable[[], nn.Module]) -> None:
    module = make()
    layout = Layout.of(module)
    numbers = [range(part.offset, part.offset + part.size) for part in (*layout.trained, *layout.averaged)]
    assert [index for places in numbers for index in places] == list(range(layout.size))
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert layout.parameters == sum(parameter.numel() for parameter in trainable)
    saved = {tensor.data_ptr(): tensor for tensor in module.state_dict().values() if tensor.numel()}
    fixed = sum(row.numel() for row in packed(fixed_state(module)))
    assert layout.size + layout.integer_count + fixed == sum(map(torch.numel, saved.values()))
    numbers_P = torch.cat([parameter.detach().reshape(-1) for parameter in trainable])
    assert torch.equal(layout.pack(module)[0][: layout.parameters], numbers_P.to(layout.dtype))


@each_module
def test_names_and_shapes_alone_make_the_same_layout(make: Callable[[], nn.Module]) -> None:
    module = make()
    layout = Layout.of(module)
    names = {part.name for part in layout.parts}  # of tied weights the first
    specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    private = {(layout.averaged or layout.trained)[-1].name}
    first = {name: spec for name, spec in specs.items() if name in trained & names}
    others = {name: specs[name] for name in (part.name for part in (*layout.averaged, *layout.integers))}
    assert Layout.of_specs(first, others) == layout
    if layout.averaged:
        assert Layout.of_specs(first, others, private) == Layout.of(module, private)


def test_statistics_are_floats_counters_integers_tied_weights_single() -> None:
    normed = Layout.of(batch_norm())
    assert [part.name for part in normed.averaged] == ["1.running_mean", "1.running_var"]
    assert [part.name for part in normed.integers] == ["1.num_batches_tracked"]
    assert (Layout.of(_Tied()).size, [part.name for part in Layout.of(_Tied()).trained]) == (15, ["embed.weight"])


def test_what_is_not_trained_has_no_place() -> None:
    layout = Layout.of(frozen())
    assert [part.name for part in layout.parts] == ["1.weight", "1.bias"]
    assert layout.size == layout.parameters
    assert [*fixed_state(frozen())] == ["0.weight", "0.bias", "0.table"]


def test_what_is_not_saved_is_no_state() -> None:
    layout = Layout.of(_Buffers())
    assert [part.name for part in layout.averaged] == ["mean", "halves"]
    assert [part.name for part in layout.integers] == ["mask", "bytes", "count"]


def test_the_vector_is_as_wide_as_the_widest_part() -> None:
    assert Layout.of(_Buffers()).dtype == torch.float64
    mixed = nn.Linear(1, 1).half()
    mixed.register_buffer("wide", torch.tensor([2.0**-100], dtype=torch.bfloat16))
    assert Layout.of(mixed).dtype == torch.float32  # neither half type holds the other


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (nn.Flatten(), "must have parameters to train, got none"),
        (nn.Linear(1, 1).requires_grad_(False), "must have parameters to train, got none: .* requires_grad"),
        (nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()), r"got \['torch.float32', 'torch.float64'\]"),
        (nn.Linear(1, 1, dtype=torch.complex64), "a model's state must be real"),
    ],
    ids=["none", "all frozen", "mixed", "complex"],
)
def test_a_model_that_cannot_be_a_vector_is_refused(module: nn.Module, problem: str) -> None:
    with pytest.raises(InvalidModel, match=problem) as caught:
        Layout.of(module)
    assert ":" in str(caught.value), "the remedy"


def test_complex_buffers_are_refused() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
    with pytest.raises(InvalidModel, match="keep real and imaginary parts apart"):
        Layout.of(module)


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5), st.data())
def test_any_mix_of_shapes_types_and_roles_survives(shapes: list[list[int]], data: st.DataObject) -> None:
    module = nn.Module()
    module.register_parameter("trained", nn.Parameter(torch.arange(3.0)))
    wanted: list[Tensor] = []
    for index, shape in enumerate(shapes):
        dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]))
        wanted.append(torch.randn(shape, generator=torch.Generator().manual_seed(index)).mul(9).to(dtype))
        if dtype == torch.float32 and data.draw(st.booleans()):
            module.register_parameter(f"p{index}", nn.Parameter(wanted[-1], requires_grad=data.draw(st.booleans())))
        else:
            module.register_buffer(f"b{index}", wanted[-1])
    other = scrambled(module)
    copied(module, other)
    assert same_state(other, module)
