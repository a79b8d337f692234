"""Main table of a comparison as Markdown and as LaTeX (booktabs), for papers."""

import re
from collections.abc import Iterable

from fed.reports.conclusions import count_of_runs, final_text
from fed.reports.difference_texts import difference_notes
from fed.reports.private_runs import privacy_note
from fed.reports.summary import ComparisonResult
from fed.reports.tables import Column, difference_columns, epsilon_column

__all__ = ["latex", "markdown"]

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    **{letter: rf"\{letter}" for letter in "&%$#_{}"},
    "±": r"$\pm$",
    "–": "--",
    "²": r"\textsuperscript{2}",
    "δ": r"$\delta$",
    "ε": r"$\varepsilon$",
}


def markdown(result: ComparisonResult) -> str:
    r"""Table of the variants with the first metric and the differences to the baseline, and notes, as Markdown.

    Example:
        >>> print(_markdown_escaped("a|b_c & *d*"))
        a\|b\_c \& \*d\*
    """
    columns = _columns(result)
    lines = [
        _line(_markdown_escaped(column.heading) for column in columns),
        _line("---:" if column.is_number else ":---" for column in columns),
        *(_line(map(_markdown_escaped, row)) for row in zip(*(column.texts for column in columns), strict=True)),
    ]
    notes = [_markdown_escaped(note) for note in _notes(result)]
    return "\n".join([f"# {_markdown_escaped(result.comparison.name)}", "", *lines, "", " ".join(notes), ""])


def latex(result: ComparisonResult) -> str:
    r"""Same table as LaTeX, a ``table`` that needs the package ``booktabs``; notes are its caption.

    Example:
        >>> print(_latex_escaped("50 % of a_b & c|d"))
        50 \% of a\_b \& c\textbar{}d
    """
    columns = _columns(result)
    caption = " ".join(_latex_escaped(text) for text in (f"{result.comparison.name}.", *_notes(result)))
    body = [
        " & ".join(map(_latex_escaped, row)) + r" \\" for row in zip(*(column.texts for column in columns), strict=True)
    ]
    head = " & ".join(_latex_escaped(column.heading) for column in columns) + r" \\"
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in columns)}}}",
            *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _columns(result: ComparisonResult) -> list[Column]:
    """A row for each variant: the first metric, ε where there is one, and differences to the baseline."""
    metric = result.metrics()[0]
    names = [row["name"] for row in result.rows]
    shown = [
        Column("variant", names, is_number=False),
        Column(f"test {metric.words}", [final_text(row, metric) for row in result.rows]),
        *epsilon_column(result.rows),
    ]
    of, *others = difference_columns(result) or [Column("variant", [])]
    for column in others:
        # Found by name, since the baseline has no row among the differences.
        text_of = dict(zip(of.texts, column.texts, strict=True))
        shown.append(Column(column.heading, [text_of.get(name, "–") for name in names]))
    return shown


def _notes(result: ComparisonResult) -> list[str]:
    most = max(result.rows, key=lambda row: row["runs"])
    over = f"Mean ± sample standard deviation over {count_of_runs(most)}." if most["runs"] > 1 else "One run each."
    privacy = privacy_note(result.runs)
    return [over, *difference_notes(result), *([privacy] if privacy else [])]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_escaped(text: str) -> str:
    """Text as it stands: CommonMark takes a backslash before any punctuation of ASCII that could be markup."""
    return re.sub(r"([\\`*_{}\[\]<>()#|&~$!])", r"\\\1", _on_one_line(text))


def _latex_escaped(text: str) -> str:
    # Letter by letter: escapes bring letters that a second replacement would escape again.
    escaped = "".join(_LATEX.get(letter, letter) for letter in _on_one_line(text))
    return re.sub(r"(?<!\S)[+-](?=\d)", r"$\g<0>$", escaped)  # signs of numbers, not hyphens of names


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
