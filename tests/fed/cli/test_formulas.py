"""Formulas on a terminal: no TeX is left in what any kind of any family says of itself."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from fed.cli.formulas import plain
from fed.cli.main import main
from fed.config import registry
from fed.config.components import Family
from fed.config.docstrings import body, summary

FAMILIES = {name: family for name, family in vars(registry).items() if isinstance(family, Family)}
WORDS = {"arg", "log", "max", "min"}
"""Names of functions, which stay words."""


def paragraphs(family: Family[Any]) -> Iterator[str]:
    for kind in family.builtin:
        section = family.section(kind)
        yield from (summary(section.target), *body(section.target))
        yield from (field.description or "" for field in section.model_fields.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_terminal_shows_no_markup_of_any_kind(name: str) -> None:
    for paragraph in paragraphs(FAMILIES[name]):
        shown = plain(paragraph)
        assert not re.search(r"\\|:\w+:`|``|[{}] ?[_^]|\0", shown), paragraph
        commands = {*re.findall(r"\\([a-zA-Z]+)", re.sub(r"\\(?:text|operatorname|mathrm)", "", paragraph))}
        left = {command for command in commands if re.search(rf"\b{command}\b", shown)}
        assert left <= WORDS, f"{paragraph} shows names of TeX: {left}"


@pytest.mark.parametrize(
    ("tex", "shown"),
    [
        (r"\sum_{i ∈ S} p_i B_i A = \bar B A, \qquad \bar{B} ← 0", "Σ_(i ∈ S) p_i B_i A = B̄ A,    B̄ ← 0"),
        (r"s \Big( \hat x_i - \bar B \Big) \, \left(1\right)", "s (x̂_i - B̄) (1)"),
        (r"\frac{\sqrt d}{‖x‖} / \sqrt{1 + τ}", "√d/‖x‖ / √(1 + τ)"),
        (r"\frac{\sqrt d + 1}{2} \text{ for } x \geq \alpha", "(√d + 1)/2 for x ≥ α"),
        (r"a \\ b \;\text{at } c", "a    b at c"),
    ],
)
def test_formulas_are_read_as_they_are_meant(tex: str, shown: str) -> None:
    assert plain(f".. math:: {tex}") == shown
    assert plain(f"It is :math:`{tex}`.") == f"It is {shown}."


@pytest.mark.parametrize(
    "command",
    [["algorithms"], ["codecs"], ["topology"], ["codecs", "sketch"], ["topology", "matcha", "8"]],
    ids=" ".join,
)
def test_lists_and_pages_of_kinds_show_no_markup(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown
    assert not re.search(r"\\|:math:|``", shown)
