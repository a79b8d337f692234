"""``fed algorithms``: the list of algorithms, and all about one of them, taken from its docstring and its code.

Shapes: see :mod:`fed.layout`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fed.cli.tables import console, listed
from fed.config.docstrings import body, summary
from fed.errors import InvalidInput, located

if TYPE_CHECKING:
    from rich.table import Table

    from fed.config.components import Component

__all__ = ["algorithms"]

_PARAMETERS, _POPULATION = 1009, 13  # two primes: the sizes of what is sent show what they are made of


def algorithms(name: Annotated[str | None, typer.Argument(help="Of which all is told.")] = None) -> None:
    """List the built-in algorithms, or tell all about one: equation, hyper-parameters, state, what it sends."""
    if name is not None:
        _tell_all_about(name)
        return
    from fed.config.registry import ALGORITHMS

    rows = []
    for kind in ALGORITHMS.builtin:
        target: Any = ALGORITHMS.section(kind).target
        what, paper = _cited(summary(target))
        rows.append((kind, target.primitive or "–", what, paper or "–"))
    console().print(listed(("kind", "over", "what it does", "paper"), rows))
    console().print("fed algorithms NAME tells all about one of them", markup=False)


def _tell_all_about(kind: str) -> None:
    from pydantic import ValidationError
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from fed.config.registry import ALGORITHMS
    from fed.config.validation import sentences

    with located(kind):
        section = ALGORITHMS.section(kind)
    try:
        made = ALGORITHMS.make(kind).make()
    except ValidationError as error:
        raise InvalidInput("\n".join(f"{kind}: {line}" for line in sentences(error))) from None
    what, paper = _cited(summary(section.target))
    out = console()
    out.print(Text(f"{kind}: {what}" + (f" {paper}." if paper else "")))
    for paragraph in body(section.target):
        out.print()
        out.print(Padding(Text(_plain(paragraph)), (0, 0, 0, 4 if paragraph.startswith(".. math::") else 0)))
    has_keys = len(section.model_fields) > 1  # beside its kind
    out.print(_hyperparameters(section) if has_keys else "")
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _facts(made):
        facts.add_row(Text(name, style="bold"), Text(text))
    out.print(facts)


def _hyperparameters(section: type["Component"]) -> "Table":
    """A table of an algorithm's keys: default, range and meaning."""
    from fed.config.reference import values_of, written

    properties, rows = section.model_json_schema()["properties"], []
    for name, field in section.model_fields.items():
        if name != "kind":
            default = "–" if field.is_required() else written(field.get_default(call_default_factory=True))
            rows.append((name, default, values_of(properties[name]), field.description or ""))
    table = listed(("hyper-parameter", "default", "range", "what it is"), rows)
    for column in table.columns[:3]:
        column.no_wrap = True
    return table


def _facts(algorithm: Any) -> Iterator[tuple[str, str]]:
    """State, messages, and permitted combinations of an algorithm."""
    import torch

    from fed.aggregators.base import Aggregator
    from fed.aggregators.client_side import format_of
    from fed.layout import Layout

    if not isinstance(algorithm, Aggregator):
        yield "peers keep", f"{_fields(algorithm.init(torch.zeros(1, _PARAMETERS, dtype=torch.float64)))} each"
        yield "moves", "a model to every neighbour and back, whenever it mixes" if algorithm.primitive else "nothing"
        local = "steps of sgd without momentum" if algorithm.needs_gradient else _clause(algorithm.check_local)
        yield "combines with", local + ("; any topology" if algorithm.primitive else "")
        return
    params_P = torch.zeros(_PARAMETERS, dtype=torch.float64)
    state = algorithm.init(params_P)
    algorithm.check_state(state, _PARAMETERS, "init")
    yield "server keeps", _fields(state)
    kept = [_fields(algorithm.init_client(params_P)), _clause(algorithm.private) if algorithm.keeps_private else ""]
    kept += ["a model of its own" for phase in algorithm.phases() if phase.is_personal]
    yield "client keeps", "; ".join(filter(None, kept)) or "nothing"
    model = "the shared part of the model" if algorithm.keeps_private else "the model"
    if algorithm.pools_data:
        yield "moves down", "nothing"
        yield "moves up", "nothing"
        yield "combines with", "any local training; any schedule of the step size"
        return
    down = [_PARAMETERS, *(part.numel() for part in algorithm.broadcast(state))]
    yield "moves down", f"{_sizes(down, model)} to each client of a round"
    message = format_of(algorithm, Layout(_PARAMETERS, _PARAMETERS, torch.float32, (), (), ()), _POPULATION)
    yield "moves up", f"{_sizes(message.parts, model)} from each client"
    asks = {"loss": "the loss", "gradient": "the full gradient", "place": "its number"}
    if algorithm.asks:
        asked = " and ".join(asks[name] for name in sorted(algorithm.asks))
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
    yield "combines with", f"{_clause(algorithm.check_local)}; {rounds}; {needs}"


def _clause(method: Any) -> str:
    """The first line of a method's docstring, within a sentence."""
    line = summary(method).removesuffix(".")
    return line[0].lower() + line[1:]


def _fields(state: Any) -> str:
    """The names of a named tuple's values, those of its parts among them, without their shape suffixes."""
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
    parts += [f"{numbers} number{'s' if numbers > 1 else ''}"] if numbers else []
    return " and ".join(parts)


def _cited(line: str) -> tuple[str, str]:
    """A sentence, and the paper in parentheses at its end.

    Example:
        >>> _cited("The mean of models (McMahan et al. 2017, 1602.05629).")
        ('The mean of models.', 'McMahan et al. 2017, 1602.05629')
    """
    match = re.fullmatch(r"(?P<what>.*) \((?P<paper>[^()]*\d{4}[^()]*)\)\.", line)
    return (f"{match['what']}.", match["paper"]) if match else (line, "")


_SYMBOLS = {r"\qquad": "   ", r"\quad": "  ", r"\,": " ", r"\;": " ", r"\sum": "Σ", r"\sqrt": "√", r"\bar W": "W̄"}


def _plain(paragraph: str) -> str:
    r"""A paragraph of a docstring without its markup, formulas as a terminal can show them.

    Example:
        >>> _plain(r".. math:: v ← β v + Δ, \qquad x ← x + \frac{a}{b} \sum_{i} y_i")
        'v ← β v + Δ,     x ← x + a/b Σ_i y_i'
    """
    text = re.sub(r"^\.\. math::\s*", "", paragraph)
    text = re.sub(r":math:`([^`]*)`", r"\1", text).replace("``", "")
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    text = re.sub(r"\\(?:text|operatorname|mathrm)\{([^{}]*)\}", r"\1", text)
    fraction = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
    exponent = re.compile(r"([_^])\{([^{}]*)\}")
    while fraction.search(text) or exponent.search(text):  # from the innermost outwards
        text = fraction.sub(lambda match: "/".join(_grouped(part) for part in match.groups() if part), text)
        text = exponent.sub(lambda match: match[1] + _grouped(match[2]), text)
    for latex, plain in _SYMBOLS.items():
        text = text.replace(latex, plain)
    text = re.sub(r"\\(?:left|right)", "", text)
    return re.sub(r"\\([a-zA-Z]+|[{}&])", r"\1", text).replace("{", "").replace("}", "")


def _grouped(part: str) -> str:
    return f"({part})" if len(part) > 1 and not part.isalnum() else part
