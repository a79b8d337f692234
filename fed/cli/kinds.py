"""Kinds of a family, taken from their docstrings and their code: all in a table, or all about one of them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar

from fed.cli.tables import console, listed
from fed.config.docstrings import body, summary
from fed.errors import FedError, InvalidInput, located

if TYPE_CHECKING:
    from rich.table import Table

    from fed.config.components import Component, Family

__all__ = ["made_by_users", "section_of", "show_all", "show_facts", "show_head", "tell"]

_WIDEST = 60  # column

_Section = TypeVar("_Section", bound="Component")


def tell(family: "Family[Any]", kind: str, facts: Callable[[Any], Iterable[tuple[str, str]]]) -> None:
    """Print all about one kind: what it does, its equation, its hyper-parameters, and facts.

    Args:
        family: that it belongs to.
        kind: its name.
        facts: names and texts, from the kind as it is made with its defaults.

    Raises:
        InvalidInput: if there is no such kind, or it cannot be made.
    """
    from rich.padding import Padding
    from rich.text import Text

    section = section_of(family, kind)
    made = section.make()
    show_head(section)
    out = console()
    for paragraph in body(section.target):
        out.print()
        out.print(Padding(Text(_plain(paragraph)), (0, 0, 0, 4 if paragraph.startswith(".. math::") else 0)))
    has_keys = len(type(section).model_fields) > 1  # beside its kind
    out.print(_hyperparameters(type(section)) if has_keys else "")
    show_facts(facts(made))


def show_head(section: "Component") -> None:
    """Print a kind's name, what it does, and its paper."""
    what, paper = _cited(summary(section.target))
    console().print(f"{section.kind}: {what}" + (f" {paper}." if paper else ""), markup=False)


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and texts in two columns."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, show_header=False, pad_edge=False)
    for name, text in facts:
        shown.add_row(Text(name, style="bold"), Text(text))
    console().print(shown)


def section_of(family: "Family[_Section]", kind: str, keys: Mapping[str, Any] | None = None) -> "_Section":
    """The section of a kind with some of its keys, and its defaults for the others.

    Args:
        family: that it belongs to.
        kind: its name.
        keys: names and values; None for defaults alone.

    Raises:
        InvalidInput: if there is no such kind, or a key is wrong or missing.
    """
    from pydantic import ValidationError

    from fed.config.validation import sentences

    with located(kind):
        family.section(kind)
    try:
        return family.validate({**(keys or {}), "kind": kind})
    except ValidationError as error:
        raise InvalidInput("\n".join(f"{kind}: {line}" for line in sentences(error))) from None


@contextmanager
def made_by_users(duty: str) -> Iterator[None]:
    """Refuse with one sentence whatever a user's own kind raises within the block.

    Args:
        duty: clause that says what the kind must do.

    Raises:
        InvalidInput: in place of any error but ours.
    """
    try:
        yield
    except FedError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidInput(f"{duty}, got {problem}: correct it") from error


def show_all(
    family: "Family[Any]",
    headings: Sequence[str],
    cells: Callable[[str, str, str], Sequence[str]],
    notes: Sequence[str],
    *,
    kinds: Sequence[str] | None = None,
    narrow: int = 1,
) -> None:
    """Print a table of a family's kinds, one a line.

    Args:
        family: the kinds.
        headings: of the columns; the first one is for the kinds' names.
        cells: function of a kind, what it does and its paper, which gives the cells behind its name.
        notes: lines below the table.
        kinds: names of the kinds in their order; None: as the registry has them.
        narrow: number of columns, from the left, whose texts are never broken.
    """
    rows = [(kind, *cells(kind, *_cited(summary(family.section(kind).target)))) for kind in kinds or family.builtin]
    shown = listed(headings, rows)
    for column in shown.columns[:narrow]:
        column.no_wrap = True
    out = console()
    out.print(shown)
    for note in notes:
        out.print(note, markup=False)


def _hyperparameters(section: type["Component"]) -> "Table":
    """A table of a kind's keys: default, range and meaning."""
    from fed.config.reference import values_of, written

    properties, rows = section.model_json_schema()["properties"], []
    for name, field in section.model_fields.items():
        if name != "kind":
            default = "–" if field.is_required() else written(field.get_default(call_default_factory=True))
            values = shorten(values_of(properties[name]), _WIDEST, placeholder=" …")
            rows.append((name, default, values, field.description or ""))
    table = listed(("hyper-parameter", "default", "range", "what it is"), rows)
    for column in table.columns[:3]:
        column.no_wrap = True
    return table


def _cited(line: str) -> tuple[str, str]:
    """A sentence, and the paper in parentheses at its end.

    Example:
        >>> _cited("The mean of models (McMahan et al. 2017, 1602.05629).")
        ('The mean of models.', 'McMahan et al. 2017, 1602.05629')
    """
    match = re.fullmatch(r"(?P<what>.*) \((?P<paper>[^()]*\d{4}[^()]*)\)\.", line)
    return (f"{match['what']}.", match["paper"]) if match else (line, "")


_SYMBOLS = {
    r"\qquad": "   ",
    r"\quad": "  ",
    r"\,": " ",
    r"\;": " ",
    r"\sum": "Σ",
    r"\sqrt": "√",
    r"\bar W": "W̄",
    r"\hat x": "x̂",
}


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
