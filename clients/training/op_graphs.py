"""Operation graphs: functions of tensors, recorded once for given shapes, simplified, and replayed.

A replay runs neither the user's Python nor PyTorch's dispatch to autograd and vmap, which cost a millisecond for a
small model. On a CPU, PyTorch's interpreter replays what draws nothing; Python replays the rest. PyTorch's own
``make_fx`` makes the same list, but imports its compiler first, which takes seconds.

Shapes: see :mod:`fed.vectors.layout`.
"""

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fed.clients.data import Pair
from fed.clients.training.dispatch_mode import DispatchMode
from fed.clients.training.draws import is_draw, is_in_place, tensors_of
from fed.clients.training.group_draws import GroupDraws
from fed.clients.training.interpreted import Function, interpreted
from fed.vectors import trees
from fed.vectors.tensors import torch

__all__ = ["Recording", "record", "record_batch", "told_of_recording"]

_ATEN = torch.ops.aten

_DRAWS = "draws"
"""Attribute of a program that holds the clients' draws."""

_WITH_BINDINGS = (
    "_log_softmax.default _log_softmax_backward_data.default add.Tensor add_.Tensor addmm.default baddbmm.default "
    "baddbmm_.default bmm.default cat.default clone.default convolution.default div.Tensor exp.default expand.default "
    "gather.default gelu.default mean.dim mm.default mul.Tensor native_dropout.default native_group_norm.default "
    "native_layer_norm.default neg.default new_zeros.default permute.default relu.default scatter_add.default "
    "sigmoid.default silu.default squeeze.dim sub.Tensor sum.dim_IntList t.default tanh.default transpose.int "
    "unsqueeze.default view.default"
)
# The same kernels behind Python bindings that take half the time of those of torch.ops.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    getattr(getattr(_ATEN, name), overload): next(
        getattr(holder, name) for holder in (torch, torch.Tensor, torch._C._nn) if hasattr(holder, name)
    )
    for name, overload in (operation.split(".") for operation in _WITH_BINDINGS.split())
}

# A tensor that changes its shape in place is another view of its memory from then on.
_VIEWS = {
    _ATEN.as_strided_.default: _ATEN.as_strided.default,
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
}

_OPERATIONS = {binding: operation for operation, binding in _BINDINGS.items()}


def record(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], draws: GroupDraws | None = None
) -> "Recording":
    """Record a function of tensors as a graph without operations that do nothing.

    Args:
        function: function of tensors. It may take gradients. Its operations must not depend on the tensors' numbers.
            Tensors that it does not make itself are constants.
        examples: tensors of the shapes, types and strides that it will be given, which share memory as those will; they
            are only read.
        draws: draws of the group's clients, if the function draws; each replay takes them anew.

    Raises:
        RuntimeError: if the function reads a number of a tensor, or changes a tensor's shape in place.
        UnlikeDraws: if it draws otherwise than the clients alone.
    """
    recorder = _Recorder(draws)
    inputs = recorder.inputs(examples)
    with recorder:
        results = function(*inputs)
    return recorder.recording(results)


def record_batch(
    function: Callable[[Sequence[Tensor], Pair, Tensor], Sequence[Tensor]],
    state: Sequence[Tensor],
    batch: Pair,
    weights_KB: Tensor,
    draws: GroupDraws | None = None,
) -> "Recording":
    """Record a function of states, a batch and its samples' weights.

    The recording takes the tensors of the states, the leaves of inputs and of targets, and the weights, in this order.

    Args:
        function: function as :func:`record` needs it.
        state: a tensor for each part of the layout.
        batch: inputs and targets.
        weights_KB: weight of each sample.
        draws: draws of the group's clients, if the function draws.
    """
    inputs, targets = batch
    first = len(state)
    middle = first + len(trees.leaves(inputs))

    def of_tensors(*tensors: Tensor) -> Sequence[Tensor]:
        own_inputs = trees.with_leaves(inputs, tensors[first:middle])
        own_targets = trees.with_leaves(targets, tensors[middle:-1])
        return function(tensors[:first], (own_inputs, own_targets), tensors[-1])

    return record(of_tensors, [*state, *trees.leaves(inputs), *trees.leaves(targets), weights_KB], draws)


@contextmanager
def told_of_recording() -> Iterator[None]:
    """Block in which ``torch.compiler.is_compiling()`` is true: models ask it before they look at numbers.

    Those of ``transformers`` leave a mask out where nothing is masked, unless they are told that this cannot be seen.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class Recording:
    """Recorded operations of a function, of which a replay is made once they are as they are to be.

    Attributes:
        graph: the operations.

    Args:
        graph: the operations.
        attributes: attribute of the graph → tensor that the function did not make itself, or the clients' draws.
        written: addresses of the memory that the operations write into.
    """

    def __init__(self, graph: fx.Graph, attributes: dict[str, Any], written: set[int]) -> None:
        self.graph = graph
        self._attributes = attributes
        self._written = written

    def keeps(self, inputs: int) -> bool:
        """True if the operations leave the first inputs, and the constants, as they are."""
        constants = [node for node in self.graph.nodes if node.op == "get_attr"]
        return not _memory(*self._inputs()[:inputs], *constants) & self._written

    def move_in_place(self, tensors: int) -> None:
        """Add ``step`` times the first outputs to the first inputs, instead of returning them.

        .. math:: x_i ← x_i + step · g_i

        The step is a further input, the last one, and a number. Where an output is a batched matrix product, product
        and sum are one operation, and the product is never stored.

        Args:
            tensors: number of these inputs, ≥ 1, and of the outputs, which have their shapes.
        """
        graph = self.graph
        written = self._written
        output = graph.output_node()
        results: list[fx.Node] = list(cast(Any, output.args[0]))
        moved = self._inputs()[:tensors]
        with graph.inserting_after(self._inputs()[-1]):
            step = graph.placeholder("step", type_expr=float)
        with graph.inserting_before(output):
            results = [_clone(graph, result) if _memory(result) & _memory(*moved) else result for result in results]
            for x, moved_by in zip(moved, results[:tensors], strict=True):
                factors = _factors_of(graph, moved_by)
                if not factors or _memory(*factors) & (_memory(*moved) | written) or _dtype(x) != _dtype(moved_by):
                    graph.call_function(_ATEN.add_.Tensor, (x, moved_by), {"alpha": step})
                else:
                    graph.call_function(_ATEN.baddbmm_.default, (x, *factors), {"alpha": step})
        output.args = (tuple(results[tensors:]),)
        _drop_unused(graph)

    def replay(self) -> Function:
        """The function that runs the operations soonest: its results may share memory with inputs and constants."""
        is_on_cpu = all(node.meta["form"][3].type == "cpu" for node in self.graph.nodes if "form" in node.meta)
        if is_on_cpu and self._attributes[_DRAWS] is None:
            try:
                return partial(_replayed, self.interpreted(), self)
            except RuntimeError:  # it does not know an operation, which Python does
                pass
        return self.program().forward

    def program(self) -> fx.GraphModule:
        """The program of Python, whose ``forward`` runs the operations.

        To write and compile its code takes as long as to record a small function: it is made once.
        """
        self._name_by(_BINDINGS)
        return fx.GraphModule(self._attributes, self.graph)

    def interpreted(self, moved: int = 0) -> Function:
        """The operations as :func:`fed.clients.training.interpreted.interpreted` runs them, with PyTorch's own draws.

        Args:
            moved: number of inputs that it moves.
        """
        self._name_by(_OPERATIONS)
        constants = [self._attributes[cast(str, node.target)] for node in self.graph.nodes if node.op == "get_attr"]
        return interpreted(self.graph, constants, moved)

    def _name_by(self, names: Mapping[Any, Any]) -> None:
        for node in self.graph.nodes:
            if node.target in names:
                node.target = names[node.target]

    def _inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]


class _Recorder(DispatchMode):
    """Records every operation as it runs.

    A tensor is identified by its memory and its form, for autograd and vmap pass on copies of the object. Of a
    node, ``meta["form"]`` is the form of its result, and ``meta["memory"]`` its memory.
    """

    def __init__(self, draws: GroupDraws | None) -> None:
        super().__init__()
        self._draws = draws
        self._graph = fx.Graph()
        self._nodes: dict[Hashable, fx.Node] = {}
        self._constants: dict[str, Tensor] = {}
        self._held: dict[int, torch.UntypedStorage] = {}  # all memory, so that no address is used twice
        self._written: set[int] = set()

    def inputs(self, examples: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the examples, each an input of the graph."""
        # One copy for all examples that share memory.
        copies: dict[int, Any] = {_place(example): example.untyped_storage() for example in examples}
        copies = {place: storage.clone() for place, storage in copies.items()}
        inputs = []
        for number, example in enumerate(examples):
            storage = copies[_place(example)]
            # With the example's offset and strides, which clone() would drop.
            copy = example.new_empty(0).set_(storage, example.storage_offset(), example.shape, example.stride())
            inputs.append(copy)
            self._note(self._graph.placeholder(f"input_{number}"), inputs[-1])
        return inputs

    def recording(self, results: Sequence[Tensor]) -> Recording:
        """The recorded operations, simplified, with these results."""
        self._graph.output(tuple(self._node_of(result) for result in results))
        _drop_renamings(self._graph, self._written)
        _join_products_and_sums(self._graph, self._written)
        _drop_unused(self._graph)
        attributes = {**self._constants, _DRAWS: self._draws}
        return Recording(self._graph, attributes, self._written)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("reading a tensor's numbers cannot be recorded: it is data-dependent control flow")
        if torch.Tag.inplace_view in func.tags and func not in _VIEWS:
            raise RuntimeError(f"changing a tensor's shape in place cannot be recorded, got {func}")
        if func is _ATEN.lift_fresh.default:  # a copy, so that the constant stays as it is
            func = _ATEN.lift_fresh_copy.default
        if self._draws is not None and is_draw(func):
            return self._drawn(self._draws, func, args, kwargs)
        named = {name: self._in_graph(value) for name, value in kwargs.items()}
        node = self._graph.call_function(_VIEWS.get(func, func), self._in_graph(args), named)
        if _has_shape_of_numbers(node):
            raise RuntimeError(f"a shape that depends on a tensor's numbers cannot be recorded, got that of {func}")
        self._written |= _memory(*_written_by(node))
        result = func(*args, **kwargs)
        self._note(node, result)
        return result

    def _drawn(self, draws: GroupDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a draw, and compute it."""
        number = draws.noted(func, args, func(*args, **kwargs))
        tensors = tensors_of(func, args)
        streams = self._graph.get_attr(_DRAWS)
        streams.meta["memory"] = 0
        node = self._graph.call_method("take", (streams, number, *self._in_graph(tensors)))
        numbers = draws.take(number, *tensors)
        self._note(node, numbers)
        if is_in_place(func):
            return self.__torch_dispatch__(_ATEN.copy_.default, (), (args[0], numbers))
        return numbers

    def _in_graph(self, value: Any) -> Any:
        """An operation's argument, with nodes in the place of tensors."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, list | tuple):  # PyTorch's tree_map takes a quarter of the time of a recording
            return type(value)([self._in_graph(part) for part in value])
        return value

    def _node_of(self, tensor: Tensor) -> fx.Node:
        key = _key(tensor)
        if key not in self._nodes:
            if _place(tensor) in self._held.keys() - {_place(constant) for constant in self._constants.values()}:
                raise RuntimeError("reading a tensor's memory past PyTorch's operations cannot be recorded")
            name = f"constant_{len(self._constants)}"
            self._constants[name] = tensor.detach()
            self._note(self._graph.get_attr(name), tensor)
        return self._nodes[key]

    def _note(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, Tensor):
            node.meta["form"] = result.shape, result.stride(), result.dtype, result.device
            node.meta["memory"] = _place(result)
            if result.untyped_storage().nbytes():
                self._held[_place(result)] = result.untyped_storage()
            self._nodes[_key(result)] = node
        elif isinstance(result, tuple | list):
            for number, part in enumerate(result):
                self._note(self._graph.call_function(operator.getitem, (node, number)), part)


def _replayed(run: Function, recording: Recording, *arguments: Any) -> tuple[Tensor, ...]:
    """Results of the interpreter, or the error that Python raises in its place."""
    try:
        return run(*arguments)
    except RuntimeError:
        # Every error of an operation is of this kind here.
        copies = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
        recording.program().forward(*copies)
        raise


def _key(tensor: Tensor) -> Hashable:
    # Lazy conjugation and negation: the same memory holds other numbers.
    form = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return _place(tensor), form


def _place(tensor: Tensor) -> int:
    """Address of a tensor's memory; 0 if it needs none."""
    return tensor.untyped_storage().data_ptr()


def _memory(*nodes: fx.Node) -> set[int]:
    return {node.meta["memory"] for node in nodes} - {0}


def _written_by(node: fx.Node) -> list[fx.Node]:
    """Nodes that an operation writes into."""
    values = []
    for place, argument in enumerate(cast(Any, node.target)._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    return [value for value in tree_leaves(values) if isinstance(value, fx.Node)]


def _drop_unused(graph: fx.Graph) -> None:
    # A draw moves its stream on, whether its numbers are used or not.
    kept = ("placeholder", "output", "call_method")
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in kept or _writes(node))


def _has_shape_of_numbers(node: fx.Node) -> bool:
    """True if the shape of an operation's results depends on its inputs' numbers."""
    target = cast(Any, node.target)
    if target is _ATEN.index.Tensor:  # a mask that is always the same picks as many
        indices = [index for index in cast(Any, node.args[1]) if isinstance(index, fx.Node) and index.op != "get_attr"]
        return any(_dtype(index) in (torch.bool, torch.uint8) for index in indices)
    return target is _ATEN._pack_padded_sequence.default or torch.Tag.dynamic_output_shape in target.tags


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _drop_renamings(graph: fx.Graph, written: set[int]) -> None:
    """Replace each node that only renames another tensor by that tensor."""
    sharing: dict[int | None, list[fx.Node]] = {}
    for node in graph.nodes:
        sharing.setdefault(node.meta.get("memory"), []).append(node)
    for node in list(graph.nodes):
        source = _same_tensor(node)
        if source is not None and not _memory(node, *node.all_input_nodes) & written:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            old = node.meta["memory"]
            new = source.meta["memory"]
            if old != new:
                for other in sharing.pop(old):
                    other.meta["memory"] = new
                    sharing.setdefault(new, []).append(other)


def _same_tensor(node: fx.Node) -> fx.Node | None:
    """Node whose result is the same tensor as this node's, in everything but identity."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    rest = node.args[1:]
    match node.target:
        case _ATEN.detach.default | _ATEN.alias.default | _ATEN.lift_fresh_copy.default:
            return source
        case _ATEN.view.default | _ATEN._unsafe_view.default | _ATEN.expand.default:
            return source if node.meta["form"] == source.meta["form"] else None
        case _ATEN.mul.Scalar | _ATEN.mul.Tensor | _ATEN.div.Scalar | _ATEN.div.Tensor if _is_one(rest[0]):
            return source if node.meta["form"] == source.meta["form"] else None
        case _ATEN.mul.Tensor if _is_one(source) and isinstance(rest[0], fx.Node):
            return rest[0] if node.meta["form"] == rest[0].meta["form"] else None
        case _ATEN.t.default if source.target is _ATEN.t.default:
            return cast(fx.Node, source.args[0])
        case _ATEN.transpose.int if source.target is _ATEN.transpose.int and {*rest} == {*source.args[1:]}:
            return cast(fx.Node, source.args[0])
    return None


def _is_one(value: Any) -> bool:
    """True if all of this is the number 1."""
    if not isinstance(value, fx.Node):
        return bool(value == 1)
    if value.target in (_ATEN.expand.default, _ATEN.view.default, _ATEN.unsqueeze.default):
        return _is_one(value.args[0])
    return value.target in (_ATEN.ones_like.default, _ATEN.ones.default)


def _join_products_and_sums(graph: fx.Graph, written: set[int]) -> None:
    """Replace A b + c by one operation, which adds where it stores the product."""
    for node in list(graph.nodes):
        if node.target is not _ATEN.add.Tensor or node.kwargs:
            continue
        for product, summand in (node.args, reversed(node.args)):
            if _is_product_to_add_to(product, summand) and not _memory(*product.args) & written:
                with graph.inserting_before(node):
                    joined = graph.call_function(_ATEN.baddbmm.default, (summand, *product.args))
                joined.meta = node.meta
                node.replace_all_uses_with(joined)
                graph.erase_node(node)
                break


def _is_product_to_add_to(product: Any, summand: Any) -> bool:
    """True for a batched matrix product with no other use, of one type with the summand."""
    if not (isinstance(product, fx.Node) and isinstance(summand, fx.Node)) or product is summand:
        return False
    return (
        product.target is _ATEN.bmm.default
        and len(product.users) == 1
        and _dtype(product) == _dtype(summand)
        and product.meta["form"] == next(iter(product.users)).meta["form"]
    )


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    clone = graph.call_function(_ATEN.clone.default, (node,))
    clone.meta = {**node.meta, "memory": 0}
    return clone


def _dtype(node: fx.Node) -> "torch.dtype":
    dtype: torch.dtype = node.meta["form"][2]
    return dtype


def _factors_of(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Factors of a batched matrix product, or of the transpose of one, that has no other use."""
    is_transposed = _is_transpose(node)
    product = cast(fx.Node, node.args[0]) if is_transposed else node
    if product.target is not _ATEN.bmm.default or len(product.users) > 1 or len(node.users) > 1:
        return None
    left, right = cast(tuple[fx.Node, fx.Node], product.args)
    return (_transposed(graph, right), _transposed(graph, left)) if is_transposed else (left, right)


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if _is_transpose(node):
        return cast(fx.Node, node.args[0])
    transposed = graph.call_function(_ATEN.transpose.int, (node, 1, 2))
    transposed.meta = node.meta
    return transposed


def _is_transpose(node: fx.Node) -> bool:
    return node.target is _ATEN.transpose.int and {*node.args[1:]} == {1, 2}
