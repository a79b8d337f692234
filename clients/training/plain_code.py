"""Plain code: forward passes of a user's own classes whose operations follow from shapes alone, by their bytecode.

Such a pass may name nothing but its arguments and what it makes of them, operations of PyTorch, and modules, tensors
and constants that a module holds. It sets nothing and calls no other code, so that no state can change what it does
from one call to the next. A pass that looks at the numbers of tensors is plain, too: it fails where it is recorded.
"""

import dis
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn import functional

from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["has_plain_code"]

_NAMES = (
    "abs adaptive_avg_pool1d adaptive_avg_pool2d add addmm amax amin arange avg_pool1d avg_pool2d baddbmm bmm cat "
    "chunk clamp clone concat contiguous conv1d conv2d cos cosine_similarity cumsum device dim div dropout "
    "dropout1d dropout2d dtype einsum elu embedding exp expand expand_as flatten flip full_like gather gelu "
    "glu group_norm hardswish hardtanh layer_norm leaky_relu linear log log1p log_softmax long mT masked_fill "
    "matmul max max_pool1d max_pool2d mean min mish mm movedim mul narrow ndim neg new_ones new_zeros norm "
    "normalize numel ones_like outer pad permute pow prelu rand_like randn_like relu relu6 repeat reshape "
    "roll rsqrt scaled_dot_product_attention select selu shape sigmoid silu sin size softmax softplus split sqrt "
    "square squeeze stack std sub sum swapaxes T tanh transpose tril triu type_as unbind unflatten unsqueeze var "
    "view view_as where zeros_like"
)
_OPERATIONS = frozenset(_NAMES.split())
"""Methods and attributes of tensors, and functions of PyTorch under the same names.

None keeps or reads a state, but for draws from PyTorch's own generator, which a replay makes as well."""

_OTHER_NAMES = frozenset({"nn", "functional", "pi", "inf", "float16", "float32", "float64", "int64", "bool"})
_OF_MODULES = frozenset({"training", "forward", "get_buffer", "get_parameter", "get_submodule"})
_BUILTINS = frozenset(
    {"abs", "bool", "enumerate", "float", "int", "len", "max", "min", "range", "reversed", "sum", "zip"}
)
_HOLDERS = (torch, functional, Tensor)
_FUNCTIONS = [getattr(holder, name) for holder in _HOLDERS for name in _OPERATIONS if hasattr(holder, name)]
_NAMESPACES = (torch, nn, functional, math)
# Whatever these have beside the names above is not plain, also where a module holds something of that name.
_FOREIGN = frozenset(
    name for holder in (*_HOLDERS, nn, math, int, float, str, tuple, list, dict, range) for name in dir(holder)
)
_OF_A_CLASS = (
    "__module__ __qualname__ __doc__ __init__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__ "
    "__firstlineno__ __static_attributes__ forward extra_repr is_recordable"
)
_CLASS = frozenset(_OF_A_CLASS.split())
"""Attributes that a class may have of its own, beside methods that its forward pass calls."""

_BEGINNINGS = (
    "LOAD_FAST STORE_FAST LOAD_CONST LOAD_SMALL_INT LOAD_GLOBAL LOAD_ATTR LOAD_METHOD CALL PRECALL KW_NAMES BINARY_ "
    "COMPARE_OP CONTAINS_OP IS_OP UNARY_ TO_BOOL BUILD_TUPLE BUILD_LIST BUILD_SLICE BUILD_STRING UNPACK_SEQUENCE "
    "LIST_APPEND LIST_EXTEND LIST_TO_TUPLE GET_ITER FOR_ITER END_FOR POP_ JUMP_ COPY SWAP PUSH_NULL RETURN_VALUE "
    "RETURN_CONST RESUME NOP NOT_TAKEN CACHE EXTENDED_ARG FORMAT_ LOAD_ASSERTION_ERROR LOAD_COMMON_CONSTANT "
    "RAISE_VARARGS CALL_INTRINSIC_1"
)
_INSTRUCTIONS = tuple(_BEGINNINGS.split())
"""Beginnings of the names of instructions, of all versions of Python, that store nothing outside of a function."""

_NOT_INSTRUCTIONS = frozenset({"COPY_FREE_VARS", "POP_EXCEPT"})


def has_plain_code(module: "nn.Module", own: Sequence["nn.Module"]) -> bool:
    """True if some modules of a model have forward passes of plain code.

    Args:
        module: the model.
        own: modules of it that are looked at; calls of all others must always be the same operations.

    Example:
        >>> class Doubling(nn.Linear):
        ...     pass
        >>> has_plain_code(module := nn.Sequential(Doubling(2, 2)), [module[0]])
        False
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False
    if not all(_is_plain_class(type(part)) and _is_plain_instance(part) for part in own):
        return False
    names = _Names(module, own)
    waiting = [vars(type(part)).get("forward") for part in own]
    looked_at: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if function in looked_at:
            continue
        looked_at.add(function)
        if type(function) is not types.FunctionType or not _is_plain_function(function):
            return False
        for name in _attributes(function.__code__):
            if not names.holds(name):
                return False
            waiting += names.methods(name)
    return True


class _Names:
    """Attributes that code in a model may name.

    Args:
        module: the model.
        own: modules of classes that are not PyTorch's.
    """

    def __init__(self, module: "nn.Module", own: Sequence["nn.Module"]) -> None:
        parts = list(module.modules())
        self._own_classes = {type(part) for part in own}
        others = {type(part) for part in parts} - self._own_classes
        self._of_modules = frozenset().union(*(dir(kind) for kind in (nn.Module, *others)))
        self._registered: set[str] = set()
        for part in parts:
            self._registered.update(part._parameters, part._buffers, part._modules)
        self._values: dict[str, list[Any]] = {}
        for part in parts:
            for name, value in vars(part).items():
                self._values.setdefault(name, []).append(value)

    def methods(self, name: str) -> list[Any]:
        """All that classes of the user's have under a name."""
        return [vars(kind)[name] for kind in self._own_classes if name in vars(kind)]

    def holds(self, name: str) -> bool:
        """True if whatever has an attribute of that name has an operation there, or what never changes."""
        values = self._values.get(name, [])
        if not all(map(_is_constant, values)):
            return False
        if name in _OF_MODULES:
            return True
        if name in self._of_modules:  # such as to(), which changes a module, but not a tensor
            return False
        if name in _OPERATIONS or name in _OTHER_NAMES:
            return True
        is_held = bool(values) or name in self._registered or bool(self.methods(name))
        return is_held and name not in _FOREIGN


def _is_plain_class(kind: type) -> bool:
    """True if a class changes nothing of what a module does but its forward pass."""
    if type(kind) is not type or kind.__bases__ != (nn.Module,):
        return False
    changed = vars(kind).keys() - _CLASS
    return not any(name.startswith("__") or hasattr(nn.Module, name) for name in changed)


def _is_plain_instance(part: "nn.Module") -> bool:
    """True if a module hides no method of its class."""
    return not any(callable(getattr(type(part), name, None)) for name in vars(part))


def _is_plain_function(function: types.FunctionType) -> bool:
    code = function.__code__
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if code.co_freevars or code.co_cellvars or not all(map(_is_constant, defaults)):
        return False
    if any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        return False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _NOT_INSTRUCTIONS or not instruction.opname.startswith(_INSTRUCTIONS):
            return False
        if instruction.opname == "LOAD_GLOBAL" and not _is_plain_global(function, instruction.argval):
            return False
    return True


def _is_plain_global(function: types.FunctionType, name: str) -> bool:
    """True if a name of a function's module stands for operations, and not for what somebody may set."""
    if name not in function.__globals__:
        return name in _BUILTINS
    value = function.__globals__[name]
    return any(value is other for other in (*_NAMESPACES, *_FUNCTIONS))


def _attributes(code: types.CodeType) -> Iterator[str]:
    return (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_ATTR", "LOAD_METHOD"))


def _is_constant(value: Any) -> bool:
    if type(value) is tuple or type(value) is torch.Size:
        return all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)
