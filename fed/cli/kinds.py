"""Kinds of a family, taken from their docstrings and their code: all in a table, or all about one of them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar

from fed.cli.formulas import plain
from fed.cli.tables import console, listed
from fed.config.docstrings import body, summary
from fed.errors import InvalidInput, located

if TYPE_CHECKING:
    from rich.table import Table

    from fed.config.components import Component, Family

__all__ = ["WHAT", "cited", "section_of", "show_all", "show_facts", "tell"]

WHAT = "what it does"
"""Heading of the column that tells what a kind does: the columns before it are never broken."""

_WIDEST = 60  # column

_Section = TypeVar("_Section", bound="Component")


def show_all(
    family: "Family[Any]",
    headings: Sequence[str],
    cells: Callable[[str, str, str], Sequence[str]],
    notes: Iterable[str],
    order: Callable[[str], float] | None = None,
) -> None:
    """Print a table of a family's kinds.

    Args:
        family: the kinds.
        headings: headings of the columns behind the kind's name, :data:`WHAT` among them.
        cells: texts of these columns, from a kind, what it does and its paper.
        notes: lines below the table.
        order: key by which the kinds are sorted; None: as the registry has them.
    """
    kinds = sorted(family.builtin, key=order) if order else family.builtin
    rows = [(kind, *cells(kind, *cited(plain(summary(family.section(kind).target))))) for kind in kinds]
    out = console()
    out.print(listed(("kind", *headings), rows, whole=headings.index(WHAT) + 1))
    for note in notes:
        out.print(note, markup=False)


def tell(family: "Family[Any]", kind: str, facts: Callable[[Any], Iterable[tuple[str, str]]]) -> None:
    """Print all about one kind: what it does, its equation, its hyper-parameters, and facts.

    Args:
        family: family that the kind belongs to.
        kind: name of the kind.
        facts: function from the kind, made with its defaults, to names and texts.

    Raises:
        InvalidInput: if there is no such kind, or it cannot be made.
    """
    from rich.padding import Padding
    from rich.text import Text

    section = section_of(family, {"kind": kind})
    made = section.make()
    what, paper = cited(plain(summary(section.target)))
    out = console()
    out.print(Text(f"{kind}: {what}" + (f" {paper}." if paper else "")))
    for paragraph in body(section.target):
        out.print()
        out.print(Padding(Text(plain(paragraph)), (0, 0, 0, 4 if paragraph.startswith(".. math::") else 0)))
    has_keys = len(type(section).model_fields) > 1  # beside its kind
    out.print(_hyperparameters(type(section)) if has_keys else "")
    show_facts(facts(made))


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and texts in two columns."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, show_header=False, pad_edge=False)
    for name, text in facts:
        shown.add_row(Text(name, style="bold"), Text(text))
    console().print(shown)


def section_of(family: "Family[_Section]", keys: Mapping[str, Any]) -> "_Section":
    """The section that these keys make, ``kind`` among them, with a mistake located in its kind."""
    from pydantic import ValidationError

    from fed.config.validation import sentences

    kind = keys["kind"]
    # Read before its keys: for an unknown kind the error names the nearest known one, and keys mean nothing.
    with located(kind):
        family.section(kind)
    try:
        return family.validate(dict(keys))
    except ValidationError as error:
        raise InvalidInput("\n".join(f"{kind}: {line}" for line in sentences(error))) from None


def _hyperparameters(section: type["Component"]) -> "Table":
    """A table of a kind's keys: default, range and meaning."""
    from fed.config.reference import values_of, written

    properties = section.model_json_schema()["properties"]
    rows = []
    for name, field in section.model_fields.items():
        if name != "kind":
            default = "–" if field.is_required() else written(field.get_default(call_default_factory=True))
            values = shorten(values_of(properties[name]), _WIDEST, placeholder=" …")
            rows.append((name, default, values, plain(field.description or "")))
    return listed(("hyper-parameter", "default", "range", "what it is"), rows, whole=3)


def cited(line: str) -> tuple[str, str]:
    """A sentence, and the paper in parentheses at its end.

    Example:
        >>> cited("The mean of models (McMahan et al. 2017, 1602.05629).")
        ('The mean of models.', 'McMahan et al. 2017, 1602.05629')
    """
    match = re.fullmatch(r"(?P<what>.*) \((?P<paper>[^()]*\d{4}[^()]*)\)\.", line)
    return (f"{match['what']}.", match["paper"]) if match else (line, "")
