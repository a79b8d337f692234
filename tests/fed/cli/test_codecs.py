"""``fed codecs``: the list, and all about one codec, from its docstring and its code."""

import re
from dataclasses import dataclass

import pytest

from fed.cli.main import main
from fed.compression.codec import Values
from fed.compression.quantisers import Sign
from fed.config.registry import CODECS


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def told(capsys: pytest.CaptureFixture[str], *kind: str) -> str:
    assert main(["codecs", *kind]) == 0
    return capsys.readouterr().out


def test_codecs_are_listed_with_bits_bound_and_paper(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split(maxsplit=2) for line in told(capsys).splitlines()]
    rows = {line[0]: line for line in lines if len(line) == 3 and line[0] in CODECS.builtin}
    assert rows.keys() == CODECS.builtin.keys()
    for kind, row in rows.items():
        assert CODECS.make(kind).make().bound in row[2]
        assert re.search(r"\d{4}.* *$", row[2]), "a paper"
    bits = {kind: float(row[1]) for kind, row in rows.items()}
    assert sorted(bits.values(), reverse=True) == [*bits.values()]
    assert (bits["int8"], bits["sign"], bits["natural"], bits["randomk"]) == (8.01, 1.0, 9.0, 0.32)
    assert bits["stc"] == pytest.approx(0.0911, rel=0.02)  # of its formula at p = 0.01


@pytest.mark.parametrize("kind", CODECS.builtin)
def test_everything_is_told_of_each_codec(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, kind)
    assert text.startswith(f"{kind}: ")
    assert not re.search(r"\\|:math:|``", text), "markup of a docstring"
    for key in CODECS.section(kind).model_fields:
        assert key == "kind" or re.search(rf"^ {key} ", text, re.MULTILINE)
    for name in ("bits a parameter", "properties", "bound", "client keeps", "before it", "behind it", "error feedback"):
        assert re.search(rf"^{name} ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("natural", ["bound ω ≤ 1/8", "goes around it, and scales each message", "behind it zstd error feedback"]),
        (
            "topk",
            ["properties contraction", "bound δ ≥ k/d", "before it randomk, powersgd, sketch, rotation behind it int8"],
        ),
        (
            "dgc",
            [
                "client keeps momentum (1,000,000 numbers), residual (1,000,000",
                "before it no codec",
                "downlink refused: downlink cannot",
            ],
        ),
        ("randomk", ["properties linear, unbiased", "bound ω = d/k − 1"]),
        ("sketch", ["before it no codec", "refused with what needs each client's own message"]),
        ("powersgd", ["0.128, 250 × fewer than 32", "client keeps factors (2,000 numbers)", "before it no codec"]),
        ("zstd", ["properties lossless", "behind it no codec", "error feedback goes around it downlink encodes what"]),
    ],
)
def test_what_is_told_of_a_codec_is_its_code(kind: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(told(capsys, kind).split())
    for line in lines:
        assert line in text


def test_an_unknown_codec_is_one_sentence_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "top-k"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: top-k: no such codec; did you mean topk? known: int8, ")
    assert error.count("\n") == 1


@dataclass(frozen=True, kw_only=True)
class Twice(Sign):
    """Sends every sign twice."""

    def size_bytes(self, values: Values) -> int:
        return 2 * super().size_bytes(values)


def letters(text: str = "abc") -> str:
    return text


@dataclass(frozen=True, kw_only=True)
class Endless(Sign):
    """Does not know its size."""

    def size_bytes(self, values: Values) -> int:
        raise OverflowError("too many")


def test_all_is_told_of_a_codec_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, f"python:{__name__}:Twice")
    assert "Sends every sign twice." in text
    assert re.search(r"^bits a parameter +2, 16 × fewer", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("letters", "must be a fed.compression.codec.Codec, not a str"),
        ("Endless", "got OverflowError: too many: correct it"),
    ],
)
def test_what_is_no_codec_is_one_sentence(name: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", f"python:{__name__}:{name}"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
