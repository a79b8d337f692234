"""Pretended device: the processor under another name, so that placement is tested where there is no GPU.

Its tensors hold others of the processor, compute as these do, and have the same bits. What would fail on a GPU, or wait
for one, shows: an operation on tensors of two devices, a generator of the wrong device, a value that is read.

PyTorch's engine of gradients counts devices when it first runs: a process registers this one before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from fed.clients.training.dispatch_mode import DispatchMode
from tests.pretended_recurrence import CELLS

__all__ = ["Misplaced", "PretendedDevice", "pretended", "register"]

_NAME = "pretended"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # not in stubs
_library: Any = torch.library  # without types
_LIBRARY = _library.Library("aten", "IMPL")
_FALLBACKS = _library.Library("_", "IMPL")
_HALVED = ("addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm")
_CAST = {**dict.fromkeys(_HALVED, True), "_log_softmax": False}
"""Operations that autocast computes in half precision; False: in float32."""
_READS = {"aten::_local_scalar_dense", "aten::bincount", "aten::equal", "aten::masked_select", "aten::nonzero"}
_READS |= {"aten::unique_consecutive", "aten::unique_dim", "aten::_unique2"}
"""Operations whose results need values of the device, which must have done all that was asked of it before."""
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"}


class Misplaced(AssertionError):
    """An operation that no GPU could do."""


@cache
def register() -> torch.device:
    """Tell PyTorch of the device, which it knows until the process ends."""
    _setup_privateuseone_for_python_backend(_NAME, _Module())
    _FALLBACKS.fallback(_library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, is_halved in _CAST.items():
        operation = getattr(torch.ops.aten, name).default
        _LIBRARY.impl(name, _under_autocast(operation, is_halved=is_halved), "AutocastPrivateUse1")
    return torch.device(_NAME, 0)


class _Module(_DummyBackendModule):
    """What PyTorch asks of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)  # nothing draws on it

    def set_rng_state(self, state: Tensor, device: object) -> None:
        pass


def _under_autocast(operation: Any, *, is_halved: bool) -> Callable[..., Any]:
    """An operation as a GPU computes it under autocast: in half precision, or in float32 what half would spoil."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(_NAME) if is_halved else torch.float32

        def cast(leaf: Any) -> Any:
            is_cast = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
            return leaf.to(dtype) if is_cast else leaf

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return computed


class PretendedDevice(DispatchMode):
    """Mode in which the pretended device is there.

    Attributes:
        device: the device.
        done: names of the operations that it has done, in their order.
        waits: number of operations that it had done whenever the program waited for it.
        read: number of numbers of each tensor that was copied to the processor.
    """

    current: "PretendedDevice | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.device = register()
        self.done: list[str] = []
        self.waits: list[int] = []
        self.read: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


@contextmanager
def pretended() -> Iterator[PretendedDevice]:
    """The pretended device, for as long as the context lasts; there is one at a time."""
    before = torch._C._only_lift_cpu_tensors(), torch.__future__.get_swap_module_params_on_conversion()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor copies by an operation that the mode sees
    torch.__future__.set_swap_module_params_on_conversion(True)  # layers that share a parameter share it there too
    with PretendedDevice() as mode:
        PretendedDevice.current = mode
        try:
            yield mode
        finally:
            PretendedDevice.current = None
            torch._C._set_only_lift_cpu_tensors(before[0])
            torch.__future__.set_swap_module_params_on_conversion(before[1])


class _OnDevice(Tensor):
    """Tensor of the pretended device, which holds one of the processor."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "_OnDevice":
        made: _OnDevice = Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=register()
        )
        made.raw = raw
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"pretended {self.raw!r}"

    @property
    def data(self) -> Tensor:
        return _OnDevice(self.raw)

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, _OnDevice)
        self.raw = other.raw  # PyTorch's own would leave the tensor that this one holds

    def tolist(self) -> Any:
        _wait()
        return self.raw.tolist()

    def set_(self, *arguments: Any) -> Tensor:
        return _OnDevice(torch.empty(0, dtype=self.dtype).set_(*arguments))  # a shape stays as it is here

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an operation, on the device that it belongs to."""
    name = func._schema.name
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    held = [tensor for tensor in tensors if isinstance(tensor, _OnDevice)]
    asked = kwargs.get("device")
    goes_to = torch.device(asked).type if asked is not None else (_NAME if held else "cpu")
    generator = kwargs.get("generator")
    if generator is not None and goes_to == _NAME:
        raise Misplaced(f"{name}: a generator of {generator.device} draws on the device")
    if held and name == "aten::embedding" and args[4:] == (True,):
        raise NotImplementedError("gradients of an embedding are not sparse on the pretended device")
    if name in _COPIES:
        _note_copy(func, args, kwargs, tensors, goes_to)
    else:
        # A GPU takes single numbers of the processor.
        if held and any(tensor.ndim for tensor in tensors if not isinstance(tensor, _OnDevice)):
            raise Misplaced(f"{name}: tensors of the device and of the processor")
        if held and PretendedDevice.current is not None:
            PretendedDevice.current.done.append(name)
        if held and (name in _READS or _chooses(name, args)):
            _wait()
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = CELLS.get(name, func)(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    if name == "aten::copy_":
        return args[0]
    if goes_to == "cpu" or name == "aten::_local_scalar_dense":
        return result
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the wrapper has a shape of its own
    wrappers = {id(tensor.raw): tensor for tensor in held}
    return tree_map(lambda leaf: _wrapped(leaf, wrappers), result)


def _chooses(name: str, args: Any) -> bool:
    """True if an operation chooses numbers by truth values, which the program must count for the result's shape."""
    return name == "aten::index" and any(
        leaf is not None and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1])
    )


def _note_copy(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], goes_to: str) -> None:
    """Note a copy from one device to the other, for which the program waits unless it says that it does not."""
    names = [argument.name for argument in func._schema.arguments]
    does_not_wait = {**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking", False)
    ends = {_NAME if isinstance(tensor, _OnDevice) else "cpu" for tensor in tensors if tensor.ndim}
    if func._schema.name == "aten::_to_copy":
        ends.add(goes_to)
    if len(ends) > 1 and not does_not_wait:
        _wait()
    if PretendedDevice.current is not None and len(ends) > 1:
        source = tensors[-1]
        if isinstance(source, _OnDevice):
            PretendedDevice.current.read.append(source.numel())


def _wait() -> None:
    if PretendedDevice.current is not None:
        PretendedDevice.current.waits.append(len(PretendedDevice.current.done))


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, _OnDevice) else leaf


def _wrapped(leaf: Any, wrappers: dict[int, "_OnDevice"]) -> Any:
    """A result on the device; an argument that was changed in place is returned as it is."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, _OnDevice):
        return leaf
    known = wrappers.get(id(leaf))
    return _OnDevice(leaf) if known is None else known
