"""Fingerprint of a run's parts: the SHA-256 of its data, and of the code of its model, loss and metrics.

Code is the source of a function or a class, or its bytecode where there is no source, with the values that closures,
defaults and ``functools.partial`` hold. Of PyTorch's, Flower's and this package's own code it is the name, with the
arguments that differ from its defaults, so that a later version may have more of them; of this package's without the
module, so that its code may move from one module to another between a run's begin and its resumption.

Shapes: see :mod:`fed.vectors.layout`.
"""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from fed.clients.data import ClientId, FederatedData, Held, SamplesOnDemand
from fed.clients.data.held import samples_at
from fed.storage.serialization import bytes_of
from fed.vectors import trees
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, nn
from fed.vectors.trees import Ragged

__all__ = ["EARLIER_MODULES", "code_sha256", "data_sha256", "model_sha256", "pair_sha256"]

EARLIER_MODULES: tuple[Mapping[str, str], ...] = (
    {
        "fed.clients.scoring.losses": "fed.clients.training.losses",
        "fed.clients.scoring.measures": "fed.clients.measures",
        "fed.clients.scoring.metrics": "fed.clients.metrics",
        "fed.clients.training.evaluation": "fed.clients.evaluation",
        "fed.vectors.layout": "fed.layout",
        "fed.vectors.mixing": "fed.mixing",
        "fed.vectors.randomness": "fed.randomness",
        "fed.vectors.reduction": "fed.reduction",
    },
    {},
)
"""Names of this package's modules in the hashes that earlier code made, which named modules: module → its name then,
from the oldest code on; modules that are not listed have kept theirs. Later moves need no entry. These hashes have the
default arguments of named functions, too."""

_OURS = "fed"
_BY_NAME = {_OURS, "torch", "flwr", "builtins"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def data_sha256(data: FederatedData, held_out: Mapping[ClientId, Held] | None = None) -> str:
    """The SHA-256 of all clients' ids and samples and of the test set.

    Of clients on demand it covers the first one's samples, of samples on demand their number and the first of them.

    Args:
        data: data of the run.
        held_out: client → samples that it does not train on.
    """
    digest = hashlib.sha256()
    ids = data.clients
    digest.update(repr(ids if isinstance(ids, range) else [*ids]).encode())
    for client in ids[:1] if data.is_on_demand else ids:
        apart = [parts[client] for parts in (held_out, data.client_tests) if parts and client in parts]
        for pair in (data.train[client], *apart):
            _add_held(digest.update, pair)
    if data.test is not None:
        _add_held(digest.update, data.test)
    return digest.hexdigest()


def pair_sha256(held: Held) -> str:
    """The SHA-256 of samples; of those on demand, of their number and the first of them.

    Args:
        held: (inputs, targets), or samples on demand.
    """
    digest = hashlib.sha256()
    _add_held(digest.update, held)
    return digest.hexdigest()


def model_sha256(module: "nn.Module", modules: Mapping[str, str] | None = None) -> str:
    """The SHA-256 of a module's structure and of its classes' code, whatever its parameters.

    Args:
        module: the model.
        modules: one of ``EARLIER_MODULES``, for the hash that earlier code made; None: the hash of today.
    """
    digest = hashlib.sha256()
    layout = Layout.of(module)
    digest.update(_ADDRESS.sub("", repr(module)).encode())
    for part in (*layout.trained, *layout.averaged, *layout.integers):
        digest.update(f"{part.name} {tuple(part.shape)}".encode())
    code = _Code(digest.update, modules)
    code.add(str(layout.dtype))
    for kind in dict.fromkeys(type(inner) for inner in module.modules()):
        code.add(kind)
    return digest.hexdigest()


def code_sha256(
    measures: Callable[..., Any] | Mapping[str, Callable[..., Any]], modules: Mapping[str, str] | None = None
) -> str:
    """The SHA-256 of the code of a function or an object, or of several by name, and of the values that they hold.

    Args:
        measures: a loss, or metrics.
        modules: one of ``EARLIER_MODULES``, for the hash that earlier code made; None: the hash of today.

    Example:
        >>> from functools import partial
        >>> square = partial(pow, exp=2)
        >>> code_sha256(square) == code_sha256(partial(pow, exp=2)), code_sha256(square) == code_sha256(pow)
        (True, False)
    """
    digest = hashlib.sha256()
    _Code(digest.update, modules).add(measures)
    return digest.hexdigest()


def _add_held(update: Callable[[Any], None], held: Held) -> None:
    if isinstance(held, SamplesOnDemand):
        update(f"{len(held)} samples on demand".encode())
        held = samples_at(held, [0])[0]
    for part in held:
        if isinstance(part, Tensor):  # as earlier code, which knew no trees
            _add_tensors(update, [part])
            continue
        for path, leaf in trees.named_leaves(part, "tree"):
            update(path.encode())
            _add_tensors(update, [leaf.values_T, leaf.begins_E] if isinstance(leaf, Ragged) else [leaf])


def _add_tensors(update: Callable[[Any], None], tensors: Iterable[Tensor]) -> None:
    for part in tensors:
        update(f"{part.dtype} {tuple(part.shape)}".encode())
        update(bytes_of(part))


class _Code:
    """Walk over values and code.

    Args:
        update: function that takes the bytes, such as a digest's ``update``.
        modules: module of this package → its name in the hash; None: this package's modules are not in it.
    """

    def __init__(self, update: Callable[[Any], None], modules: Mapping[str, str] | None) -> None:
        self._update = update
        self._modules = modules
        self._within: set[int] = set()  # things that are being added: a closure may hold its own function

    def add(self, thing: Any) -> None:
        """Add a value, a function or a class."""
        if isinstance(thing, _PLAIN):
            self._write(f"{type(thing).__name__} {thing!r}")
        elif id(thing) not in self._within:
            self._within.add(id(thing))
            self._add_whole(thing)
            self._within.remove(id(thing))

    def _add_whole(self, thing: Any) -> None:
        match thing:
            case Tensor():
                _add_tensors(self._update, [thing])
            case np.ndarray():
                self._write(f"{thing.dtype} {thing.shape}")
                self._update(np.ascontiguousarray(thing).tobytes())
            case Mapping():
                self._add_all(part for item in thing.items() for part in item)
            case list() | tuple():
                self._add_all(thing)
            case Set():
                # The order of a set changes from process to process.
                self._add_all(sorted(map(repr, thing)))
            case partial():
                self._add_all((thing.func, thing.args, self._told_keywords(thing)))
            case MethodType():
                self._add_all((thing.__func__, thing.__self__))
            case FunctionType():
                self._add_function(thing)
            case type():
                self._add_class(thing)
            case CodeType():
                self._add_all((thing.co_code, thing.co_names, thing.co_consts))
            case ModuleType():
                self._write(thing.__name__)
            case _:
                self._add_all((getattr(thing, "__qualname__", ""), type(thing), object.__getstate__(thing)))

    def _add_all(self, things: Any) -> None:
        parts = [*things]
        self._write(str(len(parts)))
        for part in parts:
            self.add(part)

    def _add_function(self, function: FunctionType) -> None:
        self._add_source(function, function.__code__)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # it is still empty
                continue
        if self._is_known_by_name(function):
            self._add_all([cells])
        else:
            self._add_all((cells, function.__defaults__, function.__kwdefaults__))

    def _told_keywords(self, made: "partial[Any]") -> Mapping[str, Any]:
        """Keywords of a partial function; without its defaults where they belong to a version of a package."""
        if not isinstance(made.func, FunctionType) or not self._is_known_by_name(made.func):
            return made.keywords
        known = inspect.signature(made.func).parameters
        defaults = {name: parameter.default for name, parameter in known.items()}
        return {
            name: value
            for name, value in made.keywords.items()
            if not (isinstance(value, _PLAIN) and type(value) is type(defaults.get(name)) and value == defaults[name])
        }

    def _is_known_by_name(self, function: FunctionType) -> bool:
        """True if the hash of today has the function's name in place of its source."""
        return self._modules is None and (function.__module__ or "").partition(".")[0] in _BY_NAME

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            methods = [part for part in vars(base).values() if isinstance(part, FunctionType)]
            self._add_source(base, [method.__code__ for method in methods])

    def _add_source(self, thing: Any, code: Any) -> None:
        """The name of code that belongs to a version of a package, else its source, else its bytecode."""
        module = thing.__module__ or ""
        # The run folder names the versions of these packages, whose source changes with every release.
        package = module.partition(".")[0]
        if package in _BY_NAME:
            self._write(f"{self._home(package, module)}:{thing.__qualname__}")
            return
        try:
            # The code object, since getsource() of a decorated function gives the source of the function within.
            self._write(inspect.getsource(code if isinstance(thing, FunctionType) else thing))
        except (OSError, TypeError, SyntaxError):  # it was typed in, or its file is gone or another one
            self.add(code)

    def _home(self, package: str, module: str) -> str:
        """The package or module by which a name is known."""
        if package != _OURS:
            return module
        return package if self._modules is None else self._modules.get(module, module)

    def _write(self, text: str) -> None:
        # The length comes first: else "ab", "c" and "a", "bc" would be the same letters.
        self._update(f"{len(text)} {text}".encode(errors="surrogatepass"))
