"""Functions of tensors, recorded once for given shapes as a list of operations, simplified, and replayed.

A replay runs neither the user's Python nor PyTorch's dispatch to autograd and vmap: what costs a millisecond where a
model is small.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["move_in_place", "record"]

_ATEN = torch.ops.aten

_IN_PLACE = frozenset({torch.Tensor.add_, torch.Tensor.baddbmm_})

# The same kernels behind Python bindings that take half the time of those of torch.ops.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.add_.Tensor: torch.Tensor.add_,
    _ATEN.baddbmm.default: torch.baddbmm,
    _ATEN.baddbmm_.default: torch.Tensor.baddbmm_,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.cat.default: torch.cat,
    _ATEN.clone.default: torch.clone,
    _ATEN.div.Tensor: torch.div,
    _ATEN.exp.default: torch.exp,
    _ATEN.expand.default: torch.Tensor.expand,
    _ATEN.gather.default: torch.gather,
    _ATEN.mean.dim: torch.mean,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.neg.default: torch.neg,
    _ATEN.new_zeros.default: torch.Tensor.new_zeros,
    _ATEN.permute.default: torch.permute,
    _ATEN.relu.default: torch.relu,
    _ATEN.scatter_add.default: torch.scatter_add,
    _ATEN.sigmoid.default: torch.sigmoid,
    _ATEN.squeeze.dim: torch.squeeze,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: torch.Tensor.view,
}


def record(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> fx.GraphModule:
    """What a function of tensors does, as a graph without operations that do nothing.

    Args:
        function: it may take gradients; what it does must not depend on the tensors' numbers.
        examples: tensors of the shapes, types and strides that it will be given.

    Returns:
        The graph, each node with its result on the examples in ``meta["result"]``; ``forward`` runs it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # of an operation that vmap takes one by one
        graph = make_fx(function)(*examples)
    _run_once(graph, examples)
    if not any(_writes(node) for node in graph.graph.nodes):  # else a tensor that looks like another may not be it
        _drop_what_does_nothing(graph.graph)
        _join_products_and_sums(graph.graph)
    return _finished(graph)


def move_in_place(program: fx.GraphModule, tensors: int, step: float) -> fx.GraphModule:
    """The same program, which adds ``step`` times its first outputs to its first inputs in place of returning them.

    .. math:: x_i ← x_i + step · g_i

    Where an output is a batched matrix product, product and sum are one operation, and the product is never stored.

    Args:
        program: of :func:`record`; its first outputs have the shapes of its first inputs.
        tensors: how many of them.
        step: a number.
    """
    graph = program.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for x, moved_by in zip(inputs[:tensors], results[:tensors], strict=True):
            factors = _factors_of(graph, moved_by)
            if factors is None:
                graph.call_function(_ATEN.add_.Tensor, (x, moved_by), {"alpha": step})
            else:
                graph.call_function(_ATEN.baddbmm_.default, (x, *factors), {"alpha": step})
    output.args = (results[tensors:],)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or _writes(node))
    return _finished(program)


def _run_once(program: fx.GraphModule, examples: Sequence[Tensor]) -> None:
    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["result"] = super().run_node(n)
            return n.meta["result"]

    with torch.no_grad():
        Run(program).run(*(example.clone() for example in examples))


def _finished(program: fx.GraphModule) -> fx.GraphModule:
    for node in program.graph.nodes:
        node.target = _BINDINGS.get(node.target, node.target)
    program.graph.lint()
    program.recompile()
    return program


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.target in _IN_PLACE or bool(schema is not None and schema.is_mutable)


def _drop_what_does_nothing(graph: fx.Graph) -> None:
    """Let uses of a node that only names another tensor use that tensor."""
    for node in list(graph.nodes):
        source = _same_tensor(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _same_tensor(node: fx.Node) -> fx.Node | None:
    """The node whose result this node's is, in everything but identity."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, rest = node.args[0], node.args[1:]
    match node.target:
        case _ATEN.detach.default | _ATEN.alias.default | _ATEN.lift_fresh_copy.default:
            return source
        case _ATEN.view.default | _ATEN._unsafe_view.default | _ATEN.expand.default | _ATEN.reshape.default:
            return source if _looks_alike(node, source) else None
        case _ATEN.mul.Scalar | _ATEN.mul.Tensor | _ATEN.div.Scalar | _ATEN.div.Tensor if rest == (1,):
            return source if _looks_alike(node, source) else None
        case _ATEN.transpose.int if source.target is _ATEN.transpose.int and {*rest} == {*source.args[1:]}:
            return source.args[0]  # type: ignore[return-value]  # a transpose's first argument is a node
    return None


def _looks_alike(node: fx.Node, other: fx.Node) -> bool:
    a, b = node.meta["result"], other.meta["result"]
    return (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def _join_products_and_sums(graph: fx.Graph) -> None:
    """A b + c as one operation, which adds where it stores the product."""
    for node in list(graph.nodes):
        if node.target is not _ATEN.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        for product, summand in (node.args, reversed(node.args)):
            if not (isinstance(product, fx.Node) and isinstance(summand, fx.Node)):
                continue
            if product.target is _ATEN.bmm.default and len(product.users) == 1 and _looks_alike(node, product):
                with graph.inserting_before(node):
                    joined = graph.call_function(_ATEN.baddbmm.default, (summand, *product.args))
                joined.meta = node.meta
                node.replace_all_uses_with(joined)
                graph.erase_node(node)
                graph.erase_node(product)
                break


def _factors_of(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Of a batched matrix product, or its transpose, that nobody else needs: the two factors."""
    product = node
    is_transposed = node.target is _BINDINGS[_ATEN.transpose.int] and {*node.args[1:]} == {1, 2} and node.args[0]
    if is_transposed:
        product = node.args[0]  # type: ignore[assignment]  # a transpose's first argument is a node
    if product.target is not _BINDINGS[_ATEN.bmm.default] or len(product.users) != 1 or len(node.users) != 1:
        return None
    left, right = product.args
    if not is_transposed:
        return left, right  # type: ignore[return-value]  # a product's arguments are nodes
    return tuple(_transposed(graph, factor) for factor in (right, left))  # type: ignore[arg-type,return-value]


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is _BINDINGS[_ATEN.transpose.int] and {*node.args[1:]} == {1, 2}:
        return node.args[0]  # type: ignore[return-value]  # a transpose's first argument is a node
    return graph.call_function(_BINDINGS[_ATEN.transpose.int], (node, 1, 2))
