"""Interpreted programs: recorded operations, run by PyTorch's own interpreter.

For Python to call a small operation takes as long as the operation itself. The interpreter of TorchScript calls the
same kernels in about half of that time. It is told to run them as they were recorded: what it would do to make them
faster may change bits.

Shapes: see :mod:`fed.vectors.layout`.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

from torch import fx

from fed.vectors.tensors import Tensor, torch

__all__ = ["Function", "interpreted"]

Function: TypeAlias = Callable[..., tuple[Tensor, ...]]

_ADD = torch.ops.aten._foreach_add_.List
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


def interpreted(graph: fx.Graph, constants: Sequence[Tensor], moved: int = 0) -> Function:
    """Function that runs recorded operations.

    Args:
        graph: operations of ``torch.ops``, with attributes for constants. Inputs of type float are numbers.
        constants: tensors of the attributes, in the graph's order.
        moved: number of first inputs, to which the function adds as many first outputs, times its last argument, and
            returns the outputs behind them; 0: it returns all, and has no such argument.

    Raises:
        RuntimeError: if there is an operation, or an argument of one, that the interpreter does not know.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> _ = graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)), x))
        >>> interpreted(graph, [])(torch.ones(2))
        (tensor([-1., -1.]), tensor([1., 1.]))
        >>> interpreted(graph, [], moved=1)(x := torch.ones(2), 0.25)
        (tensor([0.7500, 0.7500]),)
    """
    written = _Written()
    written.inputs([node for node in graph.nodes if node.op == "placeholder"])
    attributes = [node for node in graph.nodes if node.op == "get_attr"]
    step = written.number() if moved else None
    # As inputs, since the interpreter takes constants of equal numbers for one.
    written.inputs(attributes)
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            written.call(node)
    results: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]  # as the recorder writes it
    if step is not None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        written.add(inputs[:moved], results[:moved], step)
        results = results[moved:]
    return written.function(results, constants)


class _Argument(NamedTuple):
    """Argument of an operation: its name, its type where it is given, and its default."""

    name: str
    type: Any
    default: Any


@cache
def _arguments(operation: Any) -> list[_Argument]:
    # PyTorch makes these objects anew at each look.
    return [_Argument(one.name, _given(one.type), one.default_value) for one in operation._schema.arguments]


@cache
def _returns(operation: Any) -> list[Any]:
    return [one.type for one in operation._schema.returns]


def _given(kind: Any) -> Any:
    """A type, or that of what an optional one has."""
    return _given(kind.getElementType()) if kind.kind() == "OptionalType" else kind


class _Written:
    """A graph of TorchScript, written an operation at a time."""

    def __init__(self) -> None:
        self._graph: Any = torch._C.Graph()
        self._values: dict[fx.Node, Any] = {}
        self._constants: dict[Hashable, Any] = {}

    def inputs(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            self._values[node] = self.number() if node.type is float else self._graph.addInput()

    def number(self) -> Any:
        """Further input, a number with a fraction."""
        value = self._graph.addInput()
        value.setType(torch._C.FloatType.get())
        return value

    def call(self, node: fx.Node) -> None:
        """Write an operation; to take a part of its results is none here, unless they are a list."""
        target: Any = node.target
        if target is operator.getitem:
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise RuntimeError(f"PyTorch's interpreter knows no {target}")
        values = []
        for place, argument in enumerate(_arguments(target)):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default)
            values.append(self._value(given, argument.type))
        outputs = self._operation(target._schema.name, values, _returns(target))
        if len(outputs) == 1:
            self._values[node] = outputs[0]
        for part in [user for user in node.users if user.target is operator.getitem]:
            number = cast(int, part.args[1])
            if len(outputs) > 1:
                self._values[part] = outputs[number]
            else:
                place_in_list = self._constant(number)
                kinds = [torch._C.TensorType.get()]
                (self._values[part],) = self._operation("aten::__getitem__", [outputs[0], place_in_list], kinds)

    def add(self, sums: Sequence[fx.Node], summands: Sequence[fx.Node], factor: Any) -> None:
        """Write a sum in place, of each of these tensors and of another, times a number."""
        tensors = _arguments(_ADD)[0].type
        lists = [self._value(nodes, tensors) for nodes in (sums, summands)]
        self._operation(_ADD._schema.name, [*lists, factor], [])

    def function(self, results: Sequence[fx.Node], constants: Sequence[Tensor]) -> Function:
        """The function of what is written."""
        values = [self._values[node] for node in results]
        kind = torch._C.TupleType([value.type() for value in values])
        self._graph.registerOutput(*self._operation("prim::TupleConstruct", values, [kind]))
        self._graph.lint()
        return partial(_as_written, torch._C._create_function_from_graph("recorded", self._graph), tuple(constants))

    def _operation(self, name: str, arguments: Sequence[Any], returns: Sequence[Any]) -> list[Any]:
        node = self._graph.insertNode(self._graph.create(name, list(arguments), len(returns)))
        if not name.startswith("prim::") and node.schema() == "(no schema)":
            raise RuntimeError(f"PyTorch's interpreter knows no {name} of such arguments")
        outputs = list(node.outputs())
        for output, kind in zip(outputs, returns, strict=True):
            output.setType(kind)
        return outputs

    def _value(self, given: Any, kind: Any) -> Any:
        """Value of the graph for an argument.

        Args:
            given: node, number, list or constant of another kind.
            kind: type of the argument.
        """
        if isinstance(given, fx.Node):
            return self._values[given]
        if isinstance(given, list | tuple):
            parts = [self._value(part, _given(kind.getElementType())) for part in given]
            return self._operation("prim::ListConstruct", parts, [kind])[0]
        if type(given) is int and kind.kind() == "FloatType":
            given = float(given)
        return self._constant(_MEMORY_FORMATS[given] if isinstance(given, torch.memory_format) else given)

    def _constant(self, given: Any) -> Any:
        key = type(given), repr(given)  # 0.0 is not −0.0
        if key not in self._constants:
            try:
                self._constants[key] = self._graph.insertConstant(given)
            except TypeError:
                raise RuntimeError(f"PyTorch's interpreter knows no constant such as {given!r}") from None
        return self._constants[key]


def _as_written(run: Function, constants: tuple[Tensor, ...], *arguments: Any) -> tuple[Tensor, ...]:
    """Results of a function of TorchScript, as the operations stand in it, for further arguments.

    Args:
        run: the function.
        constants: tensors, its last arguments.
        arguments: tensors and numbers before them.
    """
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        return run(*arguments, *constants)
    finally:
        torch._C._set_graph_executor_optimize(before)
