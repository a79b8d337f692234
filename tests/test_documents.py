"""Documents name only files, modules and headings that exist; the README runs FedAvg and stays short."""

import dataclasses
import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from fed.cli.main import main
from fed.config import registry
from fed.config.components import Family
from fed.simulations.devices import Device

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "fed|aggregators|clients|server|simulations|tests|benchmarks|examples|docs"
NOT_MODULES = ("fed.v1", "fed.v2", "fed.example")  # packages of the protocol, and a host in the examples


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_can_be_imported(page: Path) -> None:
    for name in set(re.findall(r"(?<![\w./@-])fed(?:\.[A-Za-z_]\w*)+", page.read_text(encoding="utf-8"))):
        if name.startswith(NOT_MODULES):
            continue
        found: object = importlib.import_module("fed")
        path = "fed"
        for part in name.split(".")[1:]:
            path = f"{path}.{part}"
            found = getattr(found, part, None) or importlib.import_module(path)


def test_the_reference_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--markdown"]) == 0
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, "run: make docs"
    for family in (value for value in vars(registry).values() if isinstance(value, Family)):
        for kind in family.builtin:
            assert f"| **`{kind}`** |" in page
            assert all(f"`{key}`" in page for key in family.section(kind).model_fields if key != "kind")


def test_guide_explains_metrics_and_columns_of_traces() -> None:
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    for key in ("selected", "replied", "late", "failed", "staleness_mean", "virtual_s"):
        assert f"| `{key}` |" in text
    assert ", ".join(f"`{field.name}`" for field in dataclasses.fields(Device)) in text


def test_the_readme_counts_the_kinds_of_algorithms() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(registry.ALGORITHMS.builtin)} kinds; `fed algorithms` lists them" in text


def test_the_readme_runs_fedavg_and_has_at_most_7000_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 7000
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(programs) == 1
    assert len(programs[0].splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(programs[0], "README.md", "exec"), namespace)
    assert namespace["run"].experiment.algorithm.kind == "fedavg"  # type: ignore[attr-defined]
    assert namespace["run"].summary["final_test_accuracy"] > 0.9  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", ["experiments.md", "observers.md", "your-own-algorithm.md"])
def test_files_that_a_page_shows_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that begins with ``# name.yaml`` or ``# name.py`` is that file; tests in it are called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(r"^```\w+\n(# ([\w-]+\.(?:py|yaml))\n.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    for text, name in blocks:
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
        (tmp_path / name).write_text(text)
    assert len(blocks) >= (1 if page == "observers.md" else 5)
    for _, name in blocks:
        if name.endswith(".yaml"):
            assert main(["show", name]) == 0, name
        else:
            made = runpy.run_path(name)
            [made[test]() for test in made if test.startswith("test_")]
