"""``fed algorithms``: the list of algorithms, and all about one of them, taken from its docstring and its code.

Shapes: see :mod:`fed.vectors.layout`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from fed.cli.kinds import WHAT, show_all, tell
from fed.config.docstrings import summary
from fed.quantities import counted

__all__ = ["algorithms"]

# Two primes: the size of a message shows what it is made of.
_PARAMETERS = 1009
_POPULATION = 13


def algorithms(
    name: Annotated[str | None, typer.Argument(help="The one to describe; without it all are listed.")] = None,
) -> None:
    """List the built-in algorithms, or tell all about one: equation, hyper-parameters, state, what it sends."""
    from fed.config.registry import ALGORITHMS

    if name is not None:
        tell(ALGORITHMS, name, _facts)
        return

    def cells(kind: str, what: str, paper: str) -> tuple[str, ...]:
        return ALGORITHMS.make(kind).make().primitive or "–", what, paper or "–"

    show_all(ALGORITHMS, ("over", WHAT, "paper"), cells, ["fed algorithms NAME tells all about one of them"])


def _facts(algorithm: Any) -> Iterator[tuple[str, str]]:
    """State, messages, and permitted combinations of an algorithm."""
    import torch

    from fed.aggregators.base import Aggregator
    from fed.aggregators.client_side import format_of
    from fed.vectors.layout import Layout

    if not isinstance(algorithm, Aggregator):
        yield "peers keep", f"{_fields(algorithm.init(torch.zeros(1, _PARAMETERS, dtype=torch.float64)))} each"
        yield "moves", "a model to every neighbour and back, whenever it mixes" if algorithm.primitive else "nothing"
        local = "steps of sgd without momentum" if algorithm.needs_gradient else _clause(algorithm.check_local)
        yield "combines with", local + ("; any topology" if algorithm.primitive else "")
        return
    params_P = torch.zeros(_PARAMETERS, dtype=torch.float64)
    state = algorithm.init(params_P)
    algorithm.check_state(state, _PARAMETERS, "init")
    yield ("peers keep" if algorithm.is_replicated else "server keeps"), _fields(state)
    kept = [_fields(algorithm.init_client(params_P)), _clause(algorithm.private) if algorithm.keeps_private else ""]
    kept += ["a model of its own" for phase in algorithm.phases() if phase.is_personal]
    yield "client keeps", "; ".join(filter(None, kept)) or "nothing"
    model = "the shared part of the model" if algorithm.keeps_private else "the model"
    if algorithm.pools_data:
        yield "moves down", "nothing"
        yield "moves up", "nothing"
        yield "combines with", "any local training; any schedule of the step size"
        return
    if algorithm.is_replicated:
        yield "moves", "2(N − 1)/N of the sum of all messages from each of N peers to the next, 16 bytes a number"
        yield "combines with", f"{_clause(algorithm.check_local)}; all peers in each round"
        return
    down = [_PARAMETERS, *(part.numel() for part in algorithm.broadcast(state))]
    yield "moves down", f"{_sizes(down, model)} to each client of a round"
    # A layout of numbers alone: the size of a message depends on the model's length, not on its layers.
    layout = Layout(parameters=_PARAMETERS, size=_PARAMETERS, dtype=torch.float32, trained=(), averaged=(), integers=())
    message = format_of(algorithm, layout, _POPULATION)
    encoded = f", encoded by {' and '.join(algorithm.uplink)}" if algorithm.uplink else ""
    yield "moves up", f"{_sizes(message.parts, model)} from each client{encoded}"
    asks = {"loss": "the loss", "gradient": "the full gradient", "place": "its number"}
    # Numbers of steps are among what moves up.
    if asked := " and ".join(asks[name] for name in sorted(algorithm.asks & asks.keys())):
        yield "asks a client", f"for {asked}, at the model that it gets, on its own data"
    if algorithm.corrects:
        yield "local training", "corrects each step's gradient"
    if algorithm.contrasts:
        yield "local training", "adds a term to each batch's loss"
    if len(algorithm.phases()) > 1:
        yield "local training", _clause(algorithm.phases)
    if algorithm.personal:
        yield "evaluated", "by the clients, each its own model on its own data"
    needs = "needs only the mean" if algorithm.linear else "needs each client's message"
    rounds = "any cohort, sampling and schedule of the step size"
    if algorithm.default_rounds:
        given = ", ".join(f"{key}: {value}" for key, value in algorithm.default_rounds.items())
        rounds = f"rounds: {{{given}}} unless given; any schedule of the step size"
    yield "combines with", f"{_clause(algorithm.check_local)}; {rounds}; {needs}"


def _clause(method: Any) -> str:
    """The first line of a method's docstring, within a sentence."""
    line = summary(method).removesuffix(".")
    return line[0].lower() + line[1:]


def _fields(state: Any) -> str:
    """The names of a named tuple's values, those of its parts among them, without their shape suffixes."""
    # The suffixes are for readers of code, and mean nothing on a terminal.
    names: list[str] = []
    for name, part in ({} if state is None else state._asdict()).items():
        if isinstance(part, tuple):
            names += filter(None, [_fields(part)] if hasattr(part, "_fields") else map(_fields, part))
        elif part is not None:
            names.append(re.sub(r"_[A-Z0-9]+$", "", name))
    return ", ".join(names)


def _sizes(sizes: Sequence[int], model: str) -> str:
    """Sizes in multiples of the model's and the population's, and single numbers."""
    models = sum(size == _PARAMETERS for size in sizes)
    populations = sum(size == _POPULATION for size in sizes)
    numbers = sum(size for size in sizes if size not in (_PARAMETERS, _POPULATION))
    parts = [f"{models} × {model}"] if models != 1 else [model]
    parts += [f"{populations} × one number for each client of the population"] if populations else []
    if numbers:
        parts.append(counted(numbers, "number"))
    return " and ".join(parts)
