"""Formulas of docstrings, which are TeX, as a terminal can show them."""

import re

__all__ = ["plain"]

_SYMBOLS = {
    "sum": "Σ",
    "prod": "Π",
    "cdot": "·",
    "times": "×",
    "sim": "∼",
    "approx": "≈",
    "leq": "≤",
    "geq": "≥",
    "neq": "≠",
    "in": "∈",
    "infty": "∞",
    "nabla": "∇",
    "ell": "ℓ",
    "top": "⊤",
    "lfloor": "⌊",
    "rfloor": "⌋",
    "lceil": "⌈",
    "rceil": "⌉",
    "Sigma": "Σ",
    "Delta": "Δ",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "eta": "η",
    "lambda": "λ",
    "mu": "μ",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "omega": "ω",
}
_ACCENTS = {"bar": "\u0304", "hat": "\u0302", "tilde": "\u0303"}  # each stands behind its letter
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])")
_WIDE = re.compile(r"\s*\\(?:\\|q?quad(?![a-zA-Z]))\s*")
_NARROW = re.compile(r"\\[,;:! ]")
_TEXT = re.compile(r"\\(?:text|operatorname|mathrm)\{([^{}]*)\}")
_ACCENTED = re.compile(rf"\\({'|'.join(_ACCENTS)})\s*(?:\{{(\w)\}}|(\w))")
_ROOT = re.compile(r"\\sqrt\s*(?:\{([^{}]*)\}|(\w))")
_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_SCRIPT = re.compile(r"([_^])\{([^{}]*)\}")
_GAP = "\0"  # between two formulas of a line, until other blanks are gathered


def plain(paragraph: str) -> str:
    r"""A paragraph of a docstring without its markup.

    Example:
        >>> plain(r".. math:: v ← β v + Δ, \qquad x ← x + \frac{a}{b} \sum_{i} y_i")
        'v ← β v + Δ,    x ← x + a/b Σ_i y_i'
        >>> plain(r".. math:: \bar B = \frac{1}{\sqrt{1 + τ}} \Big( \alpha \, B \Big)")
        'B̄ = 1/√(1 + τ) (α B)'
    """
    is_formula = paragraph.startswith(".. math::")
    text = re.sub(r"^\.\. math::\s*", "", paragraph)
    if is_formula:
        return _of_formula(text)
    text = re.sub(r":math:`([^`]*)`", lambda match: _of_formula(match[1]), text).replace("``", "")
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text)


def _of_formula(tex: str) -> str:
    text = _WIDE.sub(_GAP, tex)
    text = _NARROW.sub(" ", text)
    text = _SIZES.sub("", text)
    text = _TEXT.sub(r"\1", text)
    text = _ACCENTED.sub(lambda match: (match[2] or match[3]) + _ACCENTS[match[1]], text)
    text = _unfolded(text)
    text = re.sub(r"\\([a-zA-Z]+)", lambda match: _SYMBOLS.get(match[1], match[1]), text)
    text = re.sub(r"[\\{}]", "", text)
    text = re.sub(r"\s+", " ", text).replace("( ", "(").replace(" )", ")")
    return text.replace(_GAP, "    ").strip()


def _unfolded(text: str) -> str:
    """A formula whose roots, fractions, indices and exponents stand in one line."""
    before = ""
    while text != before:  # from the innermost outwards
        before = text
        text = _SCRIPT.sub(lambda match: match[1] + _grouped(match[2]), text)
        text = _ROOT.sub(lambda match: f"√{_grouped(match[1] or match[2])}", text)
        text = _FRACTION.sub(lambda match: "/".join(_grouped(part) for part in match.groups() if part), text)
    return text


def _grouped(part: str) -> str:
    """A part of a formula, in parentheses where it could else be read with what stands beside it."""
    part = part.strip()
    is_alone = len(part) <= 1 or part.isalnum() or re.fullmatch(r"√(?:\w+|\([^()]*\))|[|‖][^|‖]*[|‖]|\w+_\w+", part)
    return part if is_alone else f"({part})"
