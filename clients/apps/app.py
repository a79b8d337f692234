"""App: what an experiment or a node names as its clients' own code, and the client that it makes for each task."""

import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from fed.clients.apps.arrays import Array, named_arrays, read_arrays
from fed.clients.apps.flower import (
    MessageClient,
    as_told_by_flower,
    context_of,
    is_client_app,
    is_message_client,
    of_message_client,
    unwrapped,
)
from fed.clients.data import ClientId
from fed.config.apps import AppSection
from fed.config.components import named
from fed.errors import AppFailed, FedError, InvalidExperiment, InvalidModel, first_line, place_of
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import torch

__all__ = ["App", "Made", "tried"]

_log = logging.getLogger(__name__)

_EARLIER_ID = "cid"
_CONTEXT = "context"


@dataclass(frozen=True)
class Made:
    """Client that an app has made.

    Args:
        client: object with ``fit``, and maybe ``evaluate``, ``initial`` or ``get_parameters``.
        is_of_flower: True if it was written for Flower, and is told Flower's names of settings too.
        context: Flower's context that it was made with; None where it took none.
    """

    client: Any
    is_of_flower: bool
    context: Any = None

    def call(self, name: str, owner: ClientId, *arguments: Any) -> Any:
        """Result of a method of the client.

        Args:
            name: name of the method.
            owner: id of the client, for the error.
            arguments: arguments of the method; a mapping of settings is the last.

        Raises:
            AppFailed: if it raises.
        """
        *others, config = arguments
        told = as_told_by_flower(config) if self.is_of_flower else dict(config)
        found = tried(f"{name} of client {owner!r}", getattr(self.client, name), *others, told)
        if self.context is not None and (kept := list(self.context.state)):
            raise AppFailed(
                f"{name} of client {owner!r} keeps {kept[0]!r} in context.state, and nothing is kept here from task to "
                "task: keep it in a file of the app's own, or run the app on Flower"
            )
        return found


@dataclass(frozen=True)
class App:
    """Clients with code of their own.

    A client is made anew for each task, as Flower does: it keeps nothing from task to task, so that it does not matter
    which process trains it. What takes long to load is the app's to keep, for instance with ``functools.cache``.

    Args:
        target: class of a client, function that makes one, or ``ClientApp``; or its name, python:package.module:Name.
        section: section ``app`` of the experiment.
        node_config: facts of the node, such as ``partition-id`` in place of the client's own number.

    Example:
        >>> class Client:
        ...     def __init__(self, client_id):
        ...         self.client_id = client_id
        ...
        ...     def fit(self, arrays, config):
        ...         return [array + self.client_id for array in arrays], 10, {}
        >>> app = App(Client, AppSection(clients=3))
        >>> app.client(2).call("fit", 2, [np.zeros(2)], {})
        ([array([2., 2.])], 10, {})
    """

    target: Any
    section: AppSection = field(default_factory=AppSection)
    node_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def callable(self) -> Callable[..., Any]:
        """The class, function or ``ClientApp`` itself.

        Raises:
            InvalidExperiment: if there is none, or it cannot be imported.
        """
        target = self.target
        if target is None:
            raise InvalidExperiment(
                "app.kind: null needs clients given in Python, fed.simulate(…, app=…), or at each node, fed client "
                "--app MODULE:NAME"
            )
        if isinstance(target, str):
            target = named(target)
        if not callable(target):
            raise InvalidExperiment(
                f"an app must be a class of a client, or a function that makes one, got {type(target).__name__}: give "
                "its class"
            )
        made: Callable[..., Any] = target
        return made

    @contextmanager
    def seeded(self, seed: int, device: "torch.device | None" = None) -> Iterator[None]:
        """Run the app's code with global generators of its own: Python's, NumPy's and PyTorch's.

        Args:
            seed: seed of the generators inside the block; they are restored afterwards.
            device: device whose generator is seeded beside the CPU's.
        """
        self._import()
        python = random.getstate()
        # The legacy generator, since it is the one that frameworks draw from.
        numpy = np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            with seeded_torch(seed, device or torch.device("cpu")):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

    def client(self, client: ClientId, names: Sequence[str] = ()) -> Made:
        """A new client.

        Args:
            client: id of the client.
            names: names of the model's arrays in order, where they are known.

        Raises:
            InvalidExperiment: if the app takes other arguments, or makes no client.
            AppFailed: if it raises.
        """
        target = self.callable
        if is_client_app(target):
            context = self._context(client)
            return Made(MessageClient(target, context, names), True, context)
        named_argument = _argument_of(target)
        what = f"making client {client!r} by {_name_of(target)}"
        context = self._context(client) if named_argument == _CONTEXT else None
        if context is not None:
            made = tried(what, target, context)
        elif named_argument is None:
            made = tried(what, target)
        else:
            made = tried(what, target, str(client) if named_argument == _EARLIER_ID else client)
        inner = unwrapped(made)
        if is_message_client(inner):
            context = context or self._context(client)
            return Made(MessageClient(of_message_client(inner), context, names), True, context)
        if not callable(getattr(inner, "fit", None)):
            raise InvalidExperiment(
                f"{_name_of(target)} must make a client with fit(arrays, config), got a {type(inner).__name__} without "
                "it: add that method, or derive the class from Flower's NumPyClient"
            )
        # Flower's clients have this method where those of this package have initial.
        has_its_shape = callable(getattr(inner, "get_parameters", None))
        is_of_flower = has_its_shape or inner is not made or named_argument in (_CONTEXT, _EARLIER_ID)
        bases = (kind.__module__.partition(".")[0] for kind in type(inner).__mro__)
        return Made(inner, is_of_flower or "flwr" in bases, context)

    def first_arrays(self, client: ClientId) -> dict[str, Array]:
        """Name → first numbers of each array of the model.

        Args:
            client: client that is asked for them where the section names no others.

        Raises:
            InvalidInput: if there are none, or they cannot be read.
        """
        initial = self.section.initial
        if initial is not None and not initial.startswith("python:"):
            return read_arrays(Path(initial).expanduser())
        try:
            if initial is not None:
                return named_arrays(tried(f"app.initial {initial}", named(initial)), f"app.initial {initial}")
            made = self.client(client)
            if not callable(getattr(made.client, "evaluate", None)):
                name = type(made.client).__name__
                _log.warning("nobody scores the model, for %s has no evaluate(arrays, config): add it for scores", name)
            if callable(getattr(made.client, "initial", None)):
                what = f"initial of client {client!r}"
                return named_arrays(tried(what, made.client.initial), what)
            if callable(getattr(made.client, "get_parameters", None)) and getattr(made.client, "has_initial", True):
                found = made.call("get_parameters", client, self.section.config)
                return named_arrays(found, f"get_parameters of client {client!r}")
        except AppFailed as error:
            raise InvalidModel(f"the first arrays cannot be made: {error}") from error
        raise InvalidExperiment(
            "an app must say its model's first arrays, got neither initial() nor get_parameters(config) of its "
            "clients: add one, or name a file or a function in app.initial"
        )

    def _import(self) -> None:
        """Import the app's modules, so that what they draw while they load is drawn before the seeds count."""
        for name in (self.target, self.section.initial):
            if isinstance(name, str) and name.startswith("python:"):
                # The error is raised where the code is needed: a server may do without it.
                with suppress(FedError):
                    named(name)

    def _context(self, client: ClientId) -> Any:
        numbers = {"partition-id": client} if isinstance(client, int) else {}
        clients = {} if self.section.clients is None else {"num-partitions": self.section.clients}
        return context_of({**numbers, **clients, **self.node_config}, self.section.config)


def tried(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a user's function; its errors become a sentence.

    The libraries below NumPy, SciPy and scikit-learn compute with as many threads as PyTorch meanwhile: one, in each
    process of a simulation. The last bits of a product depend on how many threads share it.

    Args:
        what: subject of the sentence.
        function: the user's function.
        arguments: values that the function is called with.

    Raises:
        AppFailed: if it raises.
    """
    try:
        with _libraries(len(sys.modules)).limit(limits=torch.get_num_threads()):
            return function(*arguments)
    except AppFailed as error:
        raise AppFailed(f"{what} {error}") from error
    except FedError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise AppFailed(f"{what} raises at {place_of(error)}: {problem}") from error


@lru_cache(maxsize=1)
def _libraries(loaded_modules: int) -> ThreadpoolController:
    """Libraries of this process that have threads of their own."""
    # Kept until further modules are loaded, since to find them takes longer than a small client's task.
    return ThreadpoolController()


def _argument_of(target: Callable[..., Any]) -> str | None:
    """Name of the argument that tells a client who it is; None where the app takes none.

    Raises:
        InvalidExperiment: if it needs others.
    """
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_place = [parameter for parameter in parameters.values() if parameter.kind in kinds]
    required = [parameter.name for parameter in by_place if parameter.default is parameter.empty]
    if len(required) > 1:
        raise InvalidExperiment(
            f"{_name_of(target)} must take a client's id alone, or Flower's context, got {', '.join(required)}: name "
            "a function of the id that makes the client"
        )
    if required:
        return required[0]
    known = ("client_id", _CONTEXT, _EARLIER_ID)
    return next(
        (parameter.name for parameter in by_place if parameter.name in known and by_place[0] == parameter), None
    )


def _name_of(target: Any) -> str:
    return str(getattr(target, "__qualname__", type(target).__qualname__))
