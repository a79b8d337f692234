"""Documents name only files, modules and headings that exist; what they show runs; README and guide stay short."""

import dataclasses
import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from fed.cli.main import main
from fed.clients.training.private_costs import plans_of_clients
from fed.config import registry, yaml
from fed.config.components import Family
from fed.config.experiment import Experiment
from fed.privacy.accounting import epsilon
from fed.privacy.kinds import privacy_of
from fed.privacy.noise_for_epsilon import with_noise
from fed.quantities import bytes_text
from fed.simulations.devices import Device
from fed.simulations.simulate import simulate
from fed.tracking.tracker import TrackedRun

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "fed|aggregators|clients|server|simulations|tests|benchmarks|examples|docs"
NOT_MODULES = ("fed.v1", "fed.v2", "fed.example")  # packages of the protocol, and a host in the examples
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
FILE = re.compile(r"^```\w+\n(# ([\w-]+\.(?:py|yaml))\n.*?)^```", re.MULTILINE | re.DOTALL)
"""Block of a page that begins with ``# name.yaml`` or ``# name.py``, and so is that file."""

SHOWING = [page for page in PAGES if FILE.search(page.read_text(encoding="utf-8"))]
OF_THE_GUIDE = (
    *("algorithms", "comparisons", "compression", "data", "observers", "peers", "rounds", "runs"),
    *("secure-aggregation", "simulation", "your-own-algorithm", "your-own-kinds"),
)
"""Pages to which the guide leads, each with files to start from."""


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(text):
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
        assert found is not None, name


def test_the_reference_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--markdown"]) == 0
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, "run: make docs"
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(row.endswith("|") for row in rows), "a row of a table is one line"
    for family in (value for value in vars(registry).values() if isinstance(value, Family)):
        for kind in family.builtin:
            assert f"| **`{kind}`** |" in page
            assert all(f"`{key}`" in page for key in family.section(kind).model_fields if key != "kind")


def test_every_page_is_reached_from_the_readme_by_links() -> None:
    reached: set[Path] = set()
    found = [ROOT / "README.md"]
    while found:
        page = found.pop()
        if page in reached:
            continue
        reached.add(page)
        linked = [target for target, _ in LINK.findall(page.read_text(encoding="utf-8")) if target.endswith(".md")]
        found += [(page.parent / target).resolve() for target in linked]
    assert {page for page in PAGES if page.parent.name == "docs"} <= reached


def test_the_guide_is_short_and_leads_to_each_page() -> None:
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 12_000
    linked = {target for target, _ in LINK.findall(text)}
    assert {f"{page}.md" for page in OF_THE_GUIDE} <= linked
    assert {"experiments", *OF_THE_GUIDE} <= {page.stem for page in SHOWING}


def test_the_guide_names_each_section_and_key() -> None:
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert [key for key in Experiment.model_fields if f"`{key}`" not in text] == []


def test_pages_explain_counts_of_tasks_and_columns_of_traces() -> None:
    rounds = (ROOT / "docs" / "rounds.md").read_text(encoding="utf-8")
    for key in ("selected", "replied", "late", "failed", "diverged", "staleness_mean", "virtual_s"):
        assert f"| `{key}` |" in rounds
    simulation = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{field.name}`" for field in dataclasses.fields(Device)) in simulation


@pytest.mark.parametrize("page", ["security.md", "secure-aggregation.md"])
def test_pages_on_secrets_begin_with_what_is_protected(page: str) -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0].startswith("What is protected")


def test_the_readme_shows_its_picture_first_and_no_empty_cell() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("![") < text.index("\n- **")
    assert [line for line in text.splitlines() if re.search(r"\|\s*\|", line)] == []


def test_the_rules_name_each_folder_of_each_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = {row.split("`")[1]: row for row in re.findall(r"^\| `\w+/` \|.*$", text, re.MULTILINE)}
    missing = []
    for room in ("fed", "aggregators", "clients", "server", "simulations"):
        folders = {path.parent for path in (ROOT / room).rglob("__init__.py")} - {ROOT / room}
        missing += [str(folder.relative_to(ROOT)) for folder in folders if f"`{folder.name}`" not in rows[f"{room}/"]]
    assert missing == []


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


def test_the_readmes_figures_are_those_of_the_benchmarks() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")

    def cells(first: str) -> list[str]:
        return next(line for line in benchmarks.splitlines() if line.startswith(f"| {first} |")).split(" | ")

    _, _, ratio, points, *_ = cells("topk + two_level + ef")
    assert f"{ratio} times fewer bytes for {float(points):g} points of MNIST's accuracy" in readme
    kinds = ("`fed server`, nodes that answer at once", "`fed server` and `fed client`, each with its training process")
    idle, training = (round(1000 * float(cells(kind)[5].split()[0])) for kind in kinds)
    assert f"takes {idle} ms, and {training} ms with nodes that train" in readme

    models = benchmarks.partition("| model | loop, ms a round |")[2].partition("\n<!--")[0].splitlines()[2:]
    of_loop = [float(row.split(" | ")[3].split()[0]) for row in models]
    assert (
        f"are {min(of_loop):.1f} (residual CNNs) to {max(of_loop):.1f} times as fast as a lean PyTorch loop's" in readme
    )
    assert "residual CNN" in min(models, key=lambda row: float(row.split(" | ")[3].split()[0]))
    of_pfl, of_jax = (
        [float(cell.split()[0]) for cell in cells(f"fed, in one process : {side}")[1:]]
        for side in ("pfl-research, 1 process", "JAX, a compiled loop, 1 core")
    )
    assert f"{min(of_pfl):.1f} to {max(of_pfl):.1f} times as pfl-research's" in readme
    assert f"compiled JAX is up to {1 / min(of_jax):.0f} times as fast as ours" in readme


@pytest.mark.long
def test_the_page_on_compression_says_what_runs_print() -> None:
    page = " ".join((ROOT / "docs" / "compression.md").read_text(encoding="utf-8").split("\n"))
    written = FILE.search((ROOT / "docs" / "compression.md").read_text(encoding="utf-8"))
    assert written is not None
    sparse = Experiment(**yaml.parse(written[1]))
    dense = sparse.override({"uplink": [], "error_feedback": None})
    full, few = (simulate(experiment).summary["bytes_up"] for experiment in (dense, sparse))
    assert f"`{bytes_text(few)} up`" in page
    assert f"with `{bytes_text(full)} up`: {full / few:.0f} times as much" in page


def test_the_logger_shown_takes_the_table_of_a_comparison(tmp_path: Path) -> None:
    files = {name: text for text, name in FILE.findall((ROOT / "docs" / "trackers.md").read_text(encoding="utf-8"))}
    found: dict[str, Any] = {"__name__": "rounds_logger"}
    exec(files["rounds_logger.py"], found)
    logger = found["Logger"](str(tmp_path / "rounds.txt"))
    logger.begin(TrackedRun(name="two: the table", group="two", tags={"algorithm": "all"}))
    logger.end("finished", {"A/final_test_loss": 0.5})
    assert (tmp_path / "rounds.txt").read_text().startswith("two, two: the table, all, from 0\nfinished")


_PRIVATE = {name: text for text, name in FILE.findall((ROOT / "docs" / "privacy.md").read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", _PRIVATE)
def test_private_examples_promise_something(name: str) -> None:
    """An ε of 10 is weak, as the page says, and nobody should begin with more."""
    experiment = Experiment(**yaml.parse(_PRIVATE[name]))
    assert experiment.data is not None
    clients = experiment.data.clients
    assert clients is not None
    settings = privacy_of(with_noise(experiment, clients))
    assert settings is not None
    if settings.unit == "sample":
        (plan,) = plans_of_clients(experiment, [1797 * 8 // 10 // clients]).values()
        assert plan.sampling < 0.2
    else:
        plan = settings.plan(experiment.rounds.make(), clients)
    assert epsilon(plan.releases(), plan.delta) <= 10


@pytest.mark.parametrize("page", SHOWING, ids=lambda page: page.stem)
def test_files_that_a_page_shows_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read or run in the order in which the page shows them; tests in them are called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = FILE.findall(page.read_text(encoding="utf-8"))
    for text, name in blocks:
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
        (tmp_path / name).write_text(text)
    for _, name in blocks:
        if name.endswith(".yaml"):
            assert main(["show", name]) == 0, name
        else:
            made = runpy.run_path(name)
            [made[test]() for test in made if test.startswith("test_")]
