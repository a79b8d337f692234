"""Tables of the documents that are made of the code: transitions, sentences, fields that are said."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from fed.clients.node.said import TOLD, WITHHELD
from fed.secure_aggregation.agreement import PLAN_APART, TASK_APART, TASK_OWN
from fed.secure_aggregation.client import TRANSITIONS
from fed.secure_aggregation.reasons import Reason

_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
DOCS = Path(__file__).resolve().parents[3] / "docs"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _fields() -> Iterable[tuple[str, str]]:
    for name, tells in TOLD.items():
        yield f"`{name}`", tells
    for name, constant in WITHHELD.items():
        yield f"`{name}`", f"nothing: it is {constant!r} for every node" if constant else "nothing: it is never given"


TABLES = {
    ("protocol.md", "transitions"): _table(
        ("phase", "the client waits for", "it answers", "then"),
        ((one.phase.name, one.event, one.answer, one.following.name) for one in TRANSITIONS),
    ),
    ("protocol.md", "reasons"): "\n".join(f"- “{reason}”" for reason in Reason),
    ("secure-aggregation.md", "said"): _table(("field", "it tells"), _fields()),
    ("secure-aggregation.md", "apart"): _table(
        ("field", "why it is in neither digest"),
        (
            (f"`{kind}.{name}`", why)
            for kind, fields in (("Plan", PLAN_APART), ("Assignment", TASK_OWN), ("Assignment", TASK_APART))
            for name, why in fields.items()
        ),
    ),
}


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_table_of_the_page_is_that_of_the_code(page: str, name: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(f"<!-- {name}: begin -->\n(.*?)\n?<!-- {name}: end -->", text, re.DOTALL)
    assert found is not None
    assert found.group(1) == TABLES[page, name]


def test_each_line_of_the_promises_names_tests_that_exist() -> None:
    text = (DOCS / "secure-aggregation.md").read_text(encoding="utf-8")
    promises = text[text.index("**Who learns what**") : text.index("**It can** refuse service")]
    promises = promises[: promises.index("**Phase by phase**")] + promises[promises.index("**A malicious") :]
    security = (DOCS / "security.md").read_text(encoding="utf-8")
    promises += security[security.index("## What is protected") : security.index("## What is not protected")]
    lines = [line for line in promises.splitlines() if line.startswith("| ") and not line.endswith("held by |")]
    tests = {name for path in DOCS.parent.glob("tests/**/test_*.py") for name in _TEST.findall(path.read_text())}
    assert len(lines) > 30
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line)
        assert named, f"no test holds {line!r}"
        assert set(named) <= tests
