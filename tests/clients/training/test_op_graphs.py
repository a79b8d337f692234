"""Programs against the functions they were recorded from, on numbers that they were not recorded on."""

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.func import vmap
from torch.nn import functional

from fed.clients.training.op_graphs import Recording, record

Function = Callable[..., Sequence[Tensor]]


def numbers(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """With the same strides."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in tensors]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal but for the last bits, which a product joined with a sum rounds otherwise."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


def assert_replays(function: Function, examples: Sequence[Tensor], others: Sequence[Tensor]) -> fx.GraphModule:
    """A program gives what the function gives, and leaves in its inputs what the function leaves there."""
    untouched = copies(examples)
    recording = record(function, examples)
    program = recording.program()
    assert_same(examples, untouched)
    interpreted = recording.interpreted()
    for replay, tensors in itertools.product((program.forward, interpreted), (examples, others, others)):
        ours, theirs = copies(tensors), copies(tensors)
        assert_same(replay(*ours), function(*theirs))
        assert_same(ours, theirs)
    return program


def with_gradients(function: Function) -> Function:
    """The function's results, and the gradients of the sum of their squares and of the inputs'."""

    def both(*tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        results = function(*leaves)
        total = torch.stack([result.square().sum() for result in (*leaves, *results)]).sum()
        return [*(result.detach() for result in results), *torch.autograd.grad(total, leaves)]

    return both


def targets(program: fx.GraphModule) -> list[str]:
    return [str(getattr(node.target, "__name__", node.target)) for node in program.graph.nodes]


Some = TypeVar("Some", Tensor, list[Tensor])


def after(change: Callable[[Some], object], x: Some) -> Some:
    change(x)
    return x


def overwritten_ones(x: Tensor) -> Tensor:
    ones = torch.ones(3, dtype=x.dtype)
    ones[1] = 5.0
    return x * ones


def conjugates(x: Tensor) -> list[Tensor]:
    numbers = torch.fft.fft(x)
    conjugated = numbers.conj()
    parts = [conjugated.imag + 1, numbers.imag + 1, conjugated.real + 1]
    return [*parts, (numbers * conjugated).real, (numbers + conjugated).real, (conjugated * 2).imag]


MASK = torch.tensor([True, False, True])
CONSTANT = torch.arange(3.0, dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {
    "an input": lambda x, y: [y, x, x],
    "nothing of the inputs": lambda x, y: [torch.ones(2), CONSTANT],
    "times 1": lambda x, y: [x * 1, x / 1, (x * 1.0) @ y],
    "times 1 changes the type": lambda x, y: [(x > 0) * 1, (x > 0) * 1.0, (x > 0).long() / 1],
    "times ones": lambda x, y: [x * torch.ones_like(x), torch.ones(3, dtype=x.dtype) * y, torch.ones(4, 3, 3) * x[0]],
    "times ones that are overwritten": lambda x, y: [overwritten_ones(x), overwritten_ones(x)],
    "times 1, then views": lambda x, y: [(x * 1).reshape(-1), (x.transpose(0, 1) * 1).reshape(3, 9)],
    "expanded": lambda x, y: [x[:1].expand(3, 3, 3), x.expand(3, 3, 3), x[:1].expand(2, 1, 3, 3)],
    "a view of the same shape": lambda x, y: [x.view(3, 3, 3) + y, x.transpose(0, 2).view(3, 3, 3)],
    "transposed twice": lambda x, y: [
        x.transpose(1, 2).transpose(1, 2),
        x.transpose(1, 2).transpose(2, 1),
        x.transpose(0, 1).transpose(1, 2),
        x.transpose(-1, -2).transpose(1, 2),
    ],
    "product and sum": lambda x, y: [torch.bmm(x, y) + x, x + torch.bmm(x, y), torch.bmm(x, y) + torch.bmm(y, x)],
    "product and sum that broadcasts": lambda x, y: [
        torch.bmm(x, y) + x[:, :1],
        torch.bmm(x, y) + y[0, 0],
        torch.bmm(x, y) + y[0, 0, 0],
        torch.bmm(x[:, :1], y) + x,
        torch.bmm(x, y) + x[None],
        torch.bmm(x, y) + 2.0,
        torch.add(torch.bmm(x, y), x, alpha=3),
    ],
    "product and sum of another type": lambda x, y: [
        torch.bmm(x.float(), y.float()) + x,
        torch.bmm(x, y) + y.float(),
        torch.bmm(x, y) + y[0, 0, 0].float(),
        torch.bmm(x.float(), y.float()) + x[0, 0, 0],
    ],
    "a product used twice": lambda x, y: [(product := torch.bmm(x, y)) + product, product + x, product],
    "a product added to itself": lambda x, y: [(product := torch.bmm(x, y)) + product],
    "in place": lambda x, y: [after(lambda z: z.add_(y), x * 2), after(lambda z: z.relu_(), x.clone())],
    "in place on a view": lambda x, y: [
        after(lambda z: z[0].mul_(3.0), x + y),
        after(lambda z: z[:, 1].zero_(), x * 1),
    ],
    "a factor overwritten after the product": lambda x, y: [
        (factor := x * 2, product := torch.bmm(factor, y), factor.zero_())[1] + product.sum(),
        factor,
    ],
    "a factor overwritten between product and sum": lambda x, y: [
        (factor := x * 2, product := torch.bmm(factor, y), factor.zero_(), product + y)[3]
    ],
    "a copy, overwritten": lambda x, y: [
        after(lambda z: z.add_(1), x.detach().clone()),
        after(lambda z: z.add_(1), x * 1),
        x,
    ],
    "an input, overwritten": lambda x, y: [after(lambda z: z.add_(y), x) * 2, x * 1],
    "an alias, overwritten": lambda x, y: [after(lambda z: z.detach().transpose(0, 2).add_(1), x), x * 1],
    "a constant, copied and overwritten": lambda x, y: [after(lambda z: z.mul_(2), torch.tensor([1.0, 2.0, 3.0])) * x],
    "a constant": lambda x, y: [x * CONSTANT, CONSTANT[1:] + x[0, 0, 0]],
    "many results": lambda x, y: [*x.unbind(), *torch.split(y, 2), *x.max(1), *x.sort(0)],
    "lists of tensors": lambda x, y: [torch.cat([x, y, x]), torch.stack([x, y]), *torch._foreach_add([x, y], [y, x])],
    "lists of tensors, in place": lambda x, y: after(
        lambda z: torch._foreach_add_(z, [y, x]),
        [x * 2, y * 1],
    ),
    "views in place": lambda x, y: [
        after(lambda z: z.transpose_(0, 2), x * 2),
        after(lambda z: z.unsqueeze_(1).squeeze_(1), x + y) * y,
        after(lambda z: z.unsqueeze_(0).squeeze_(), x + y) * y,
        after(lambda z: z.as_strided_((2, 2), (1, 3)), x * y) * 2,
        after(lambda z: z[0].t_().mul_(2), x * 2),
    ],
    "places of a constant mask": lambda x, y: [x[:, MASK] * 2],
    "indices": lambda x, y: [x[:, torch.tensor([2, 0])], x[x.shape[0] - 1], torch.where(x > 0, x, y)],
    "conjugates": lambda x, y: conjugates(x),
    "complex numbers": lambda x, y: [
        torch.fft.rfft(x).conj().imag + 1,
        torch.view_as_real(torch.fft.fft(y).conj().resolve_conj()),
    ],
    "nothing in it": lambda x, y: [x[:0], x[:0] * 1, torch.empty(0)],
    "of every client": lambda x, y: [vmap(functional.linear)(x, y, x[:, 0]), vmap(torch.mv)(x, y[:, 0])],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_is_the_function(name: str) -> None:
    assert_replays(FUNCTIONS[name], numbers((3, 3, 3), (3, 3, 3)), numbers((3, 3, 3), (3, 3, 3), seed=1))


_WITHOUT_GRADIENTS = {
    "times 1 changes the type",
    "a factor overwritten after the product",
    "a factor overwritten between product and sum",
    "an input, overwritten",
    "an alias, overwritten",
    "lists of tensors, in place",
}
DIFFERENTIABLE = [name for name in FUNCTIONS if name not in _WITHOUT_GRADIENTS]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_replay_of_gradients_is_the_gradients(name: str) -> None:
    assert_replays(
        with_gradients(FUNCTIONS[name]), numbers((3, 3, 3), (3, 3, 3)), numbers((3, 3, 3), (3, 3, 3), seed=1)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_are_those_of_the_examples(name: str) -> None:
    """Rows of a wider matrix, as clients' tensors lie: what is a view of the one is a copy of the other."""
    strided = [numbers((3, 20), seed=seed)[0] for seed in range(4)]
    x, y, a, b = (wide[:, 2:11].view(3, 3, 3).transpose(1, 2) for wide in strided)
    assert_replays(FUNCTIONS[name], [x, y], [a, b])


def test_operations_unknown_to_the_interpreter_are_replayed_by_python() -> None:
    (x,) = numbers((3, 3))
    recording = record(lambda x: [x + True], [x])
    with pytest.raises(RuntimeError, match="knows no aten::add of such arguments"):
        recording.interpreted()
    assert_same(recording.replay()(x), [x + 1])


def test_errors_of_a_replay_are_those_of_the_function() -> None:
    """The interpreter's are RuntimeErrors, and name it."""
    inputs = [torch.tensor([2]), torch.ones(3, 2)]
    replay = record(lambda places, table: [functional.embedding(places, table)], inputs).replay()
    assert_same(replay(*inputs), [torch.ones(1, 2)])
    with pytest.raises(IndexError, match=r"^index out of range in self$"):
        replay(torch.tensor([3]), inputs[1])


def test_inputs_may_share_memory() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x * 1 + y, x.add_(1), y * 2]

    program = record(function, numbers((3, 3))[0].unbind()[:2]).program()
    (mine, theirs) = (numbers((3, 3), seed=1)[0] for _ in range(2))
    assert_same(program.forward(mine[0], mine[1]), function(theirs[0], theirs[1]))
    shared = record(function, [(z := numbers((4,))[0])[:3], z[1:]]).program()
    (mine, theirs) = (numbers((4,), seed=1)[0] for _ in range(2))
    assert_same(shared.forward(mine[:3], mine[1:]), function(theirs[:3], theirs[1:]))
    assert_same([mine], [theirs])


# A program of random operations on cubes [3, 3, 3], so that everything can follow everything. Each takes one or two of
# the tensors made so far; those that write do so into tensors made here, for autograd holds leaves to be left alone.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": lambda a, b: a * b.tanh(),
    "product": lambda a, b: torch.bmm(a, b) / 3,
    "times 1": lambda a, _: a * 1,
    "times ones": lambda a, _: a * torch.ones(3, 1, dtype=a.dtype),
    "over 1": lambda a, _: a / 1,
    "times 2": lambda a, _: a * 0.5,
    "transpose 12": lambda a, _: a.transpose(1, 2),
    "transpose 01": lambda a, _: a.transpose(0, 1),
    "first row": lambda a, _: a[:, :1].expand(3, 3, 3),
    "row sums": lambda a, _: (a.sum(1, keepdim=True) / 3).expand(3, 3, 3),
    "add a row": lambda a, b: a + b[:, :1],
    "add a number": lambda a, b: a + b[0, 0, 0],
    "flat and back": lambda a, _: a.reshape(3, 9).reshape(3, 3, 3),
    "same view": lambda a, _: a.contiguous().view(3, 3, 3),
    "detach": lambda a, _: a.detach(),
    "clone": lambda a, _: a.clone(),
    "relu": lambda a, _: a.relu(),
    "add in place": lambda a, b: (a * 1).add_(b),
    "relu in place": lambda a, b: torch.relu_(a + b),
    "row in place": lambda a, b: after(lambda z: z[1].mul_(0.5), a - b),
    "copied in place": lambda a, b: torch.empty_like(a).copy_(b),
}
steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12
)
Steps = list[tuple[str, int, int]]


def chain(steps: Steps, results: int = 3) -> Function:
    def function(*tensors: Tensor) -> list[Tensor]:
        made = list(tensors)
        for name, one, other in steps:
            made.append(OPERATIONS[name](made[-1 - one % len(made)], made[-1 - other % len(made)]))
        return made[-results:]

    return function


CUBES = ((3, 3, 3), (3, 3, 3))


def gradients_of(function: Function) -> Function:
    """The inputs' gradients, then the function's results."""

    def reordered(x: Tensor, y: Tensor) -> list[Tensor]:
        *results, of_x, of_y = with_gradients(function)(x, y)
        return [of_x, of_y, *results]

    return reordered


def moving(function: Function, examples: Sequence[Tensor]) -> Recording:
    """Operations that move their first two inputs by the first two results of a function."""
    recording = record(function, examples)
    recording.move_in_place(2)
    return recording


def assert_moves(function: Function, examples: Sequence[Tensor], others: Sequence[Tensor], step: float = -0.25) -> None:
    """The first two results move the inputs, and the others are what they were before."""
    results = len(function(*copies(examples)))
    padded = function if results >= 2 else (lambda *tensors: [*function(*tensors)] * 2)
    recording = moving(padded, examples)
    forms = (recording.program().forward, recording.interpreted())
    for replay, tensors in itertools.product(forms, (examples, others)):
        ours, theirs = copies(tensors), copies(tensors)
        got = [result.clone() for result in replay(*ours, step)]
        by_x, by_y, *rest = (result.clone() for result in padded(*theirs))
        assert_same(got, rest)
        assert_same(ours, [theirs[0] + step * by_x, theirs[1] + step * by_y])


PROPERTIES: dict[str, Callable[[Function, Sequence[Tensor], Sequence[Tensor]], Any]] = {
    "replaying operations": assert_replays,
    "replaying gradients": lambda function, *tensors: assert_replays(with_gradients(function), *tensors),
    "moving by results": assert_moves,
    "moving by gradients": lambda function, *tensors: assert_moves(gradients_of(function), *tensors),
}


@pytest.mark.parametrize("name", PROPERTIES)
@given(steps)
def test_programs_of_any_operations_are_those_operations(name: str, steps: Steps) -> None:
    """Also where what one input moves by is computed from another, or is another."""
    PROPERTIES[name](chain(steps), numbers(*CUBES), numbers(*CUBES, seed=1))


MOVES: dict[str, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {
    "products": lambda x, y: [torch.bmm(x + 1, y + 1), torch.bmm(y + 1, x + 1).transpose(1, 2), x.sum()],
    "products of what moves": lambda x, y: [torch.bmm(x, y), torch.bmm(y, x)],
    "transposed products of what moves": lambda x, y: [
        torch.bmm(x.transpose(1, 2), y).transpose(1, 2),
        torch.bmm(y, x.transpose(1, 2)).transpose(1, 2),
    ],
    "products with themselves": lambda x, y: [torch.bmm(x, x), torch.bmm(y, y.transpose(1, 2))],
    "each other": lambda x, y: [y, x, x],
    "views of each other": lambda x, y: [y.transpose(0, 1), x[:1].expand(3, 3, 3), x[0], y.view(-1)],
    "each other, as copies that do nothing": lambda x, y: [y * 1, (x * 1).transpose(0, 2), y / 1],
    "one product for both": lambda x, y: [(product := torch.bmm(x + 1, y + 1)), product, product, product.sum()],
    "a product that is a result too": lambda x, y: [(product := torch.bmm(x + 1, y + 1)), x, product.transpose(1, 2)],
    "other transposes of products": lambda x, y: [
        torch.bmm(x + 1, y + 1).transpose(0, 1),
        torch.bmm(x + 1, y + 1).transpose(0, 2),
    ],
    "a product whose factor is overwritten": lambda x, y: [
        (factor := x + 1, torch.bmm(factor, y + 1), factor.zero_())[1],
        factor,
    ],
    "a constant": lambda x, y: [CONSTANT.expand(3, 3, 3), torch.ones(3, 3, 3, dtype=x.dtype)],
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_in_place_is_adding_the_results_afterwards(name: str) -> None:
    assert_moves(MOVES[name], numbers(*CUBES), numbers(*CUBES, seed=1))


def test_a_result_of_another_type_is_added_in_the_inputs() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.bmm(x.float(), y.float()), y.float()]

    x, y = numbers(*CUBES)
    by = function(x, y)
    mine = copies([x, y])
    moving(function, [x, y]).replay()(*mine, 0.5)
    assert_same(mine, [x + 0.5 * by[0].double(), y + 0.5 * by[1].double()])


def test_adjacent_inputs_are_moved_like_separate_ones() -> None:
    """As the tensors of a client stand in one row: memory is the same, and yet neither is the other."""

    def of(row: Tensor) -> list[Tensor]:
        return [row[:, :9].view(2, 3, 3), row[:, 9:].view(2, 3, 3)]

    ours, theirs = (numbers((2, 18))[0] for _ in range(2))
    moving(lambda x, y: [torch.bmm(x, y), torch.bmm(y, x)], of(ours)).replay()(*of(ours), 1.0)
    x, y = of(theirs)
    expected = torch.cat([(x + torch.bmm(x, y)).flatten(1), (y + torch.bmm(y, x)).flatten(1)], 1)
    assert_same([ours], [expected])


def perceptron(w: Tensor, b: Tensor, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Gradients of a layer of every client, as a step of training takes them."""
    w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
    losses = vmap(lambda w, b, x: functional.linear(x, w, b).relu().sum(1))(w, b, x)
    weighted = (losses * weights).sum(1)
    return [*torch.autograd.grad(weighted.sum(), (w, b)), weighted.detach()]


def test_useless_operations_are_dropped_and_products_fused() -> None:
    """Forwards a product with a sum, a ReLU, sums, and weights; backwards the ReLU's; two tensors that move."""
    program = moving(perceptron, numbers((4, 5, 3), (4, 5), (4, 2, 3), (4, 2))).program()
    views = {"transpose", "view", "unsqueeze", "expand"}
    calls = [
        name for node, name in zip(program.graph.nodes, targets(program), strict=True) if node.op == "call_function"
    ]
    assert [name for name in calls if name not in views] == [
        *("baddbmm", "relu", "sum", "mul", "sum"),
        *("threshold_backward.default", "sum", "baddbmm_", "add_"),
    ]


def test_a_program_holds_none_of_its_example_tensors() -> None:
    seen: list[weakref.ref[Any]] = []

    def function(x: Tensor) -> list[Tensor]:
        middle = x @ x
        seen.append(weakref.ref(middle.untyped_storage()))
        return [middle + 1]

    program = record(function, numbers((50, 50))).program()
    gc.collect()
    assert not any(isinstance(part, Tensor) for node in program.graph.nodes for part in node.meta.values())
    assert seen[0]() is None


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x, y: [x + y, (x * 1).add_(y)], True),
        (lambda x, y: [y.add_(1)], True),
        (lambda x, y: [x.add_(1)], False),
        (lambda x, y: [x.view(-1)[2:].zero_()], False),
        (lambda x, y: [torch.add(x, y, out=x)], False),
        (lambda x, y: [CONSTANT.add_(0)], False),
        (lambda x, y: [torch.tensor([1.0, 2.0]).add_(1)], True),
        (lambda x, y: [*after(lambda z: torch._foreach_add_(z, 1.0), [x])], False),
    ],
)
def test_what_a_program_writes_into_is_known(function: Function, kept: bool) -> None:
    """Whether its first input, and constants, stay as they are."""
    assert record(function, numbers(*CUBES)).keeps(1) is kept


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x if x.sum() > 0 else -x],
        lambda x: [x * x.max().item()],
        lambda x: [x * float(x[0, 0])],
        lambda x: [x[: int(x.abs().sum())]],
    ],
)
def test_what_reads_numbers_is_refused(function: Function) -> None:
    with pytest.raises(RuntimeError):
        record(function, numbers((3, 3)))


@pytest.mark.parametrize(
    "change", [lambda x: x.set_(x.detach()), lambda x: x.swapdims_(0, 1).squeeze_((0, 1)).resize_(2)]
)
def test_what_moves_a_tensor_in_place_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="shape in place"):
        record(lambda x: [change(x * 2)], numbers((3, 3)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x[x > 0]],
        lambda x: [x[:, x[0] > 0].mean()],
        lambda x: [x.masked_select(x > 0).sum()],
        lambda x: [x.nonzero().sum()],
        lambda x: [x.round().unique().sum()],
    ],
)
def test_a_shape_that_depends_on_numbers_is_refused(function: Function) -> None:
    """Else the number of places of the example would be a constant."""
    with pytest.raises(RuntimeError, match="depends on a tensor's numbers"):
        record(function, numbers((3, 3)))


def test_unrecorded_memory_views_are_refused() -> None:
    """Else it would be taken for a constant."""
    with pytest.raises(RuntimeError, match="past PyTorch's operations"):
        record(lambda x: [torch.from_numpy((x * 2).numpy()[:1]) + 1], numbers((3, 3)))
