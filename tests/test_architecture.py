"""The order of the rooms: each imports only from those above it, whatever the form of the import."""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from fed.config import registry
from fed.config.components import Family
from tests.trees import tree_of

pytestmark = pytest.mark.xdist_group("syntax trees")  # so that files are parsed once
ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "fed": {"fed"},
    "aggregators": {"fed", "aggregators"},
    "clients": {"fed", "aggregators", "clients"},
    "server": {"fed", "aggregators", "clients", "server"},
    "simulations": {"fed", "aggregators", "clients", "server", "simulations"},
}
FOLDERS = (
    *("fed", "fed/protocol", "fed/processes", "fed/tracking", "fed/vectors", "fed/topology", "fed/config"),
    *("fed/secure_aggregation", "fed/compression", "fed/storage", "fed/privacy"),
    *("fed/identity", "fed/reports", "fed/wire"),
    *("aggregators", "aggregators/robust"),
    *("clients/scoring", "clients/data", "clients/data/sources", "clients/training", "clients/training/parallel"),
    *("clients/apps", "clients"),
    "clients/node",
    *("server/peer/members", "server", "server/rounds", "server/mixing", "server/grpc", "server/flower"),
    *("server/peer/replica", "server/peer/gossip", "server/peer"),
    *("simulations/executors", "simulations"),
)
"""All folders from the lowest to the highest: a module imports from its own folder and from those before it."""

COMMAND_LINE = re.compile(r"fed/(cli(_\w+)?\.py|cli/.*|__main__\.py)")
NO_PLACE_IN_AN_EQUATION = {"datetime", "io", "os", "pathlib", "random", "socket", "subprocess", "threading", "time"}


def violations(root: Path) -> list[str]:
    """Every import that the order of the rooms forbids, as ``file:line: why``."""
    homes = _homes_of_lazy_names(root)
    found = []
    for path in _files(root):
        room = path.relative_to(root).parts[0]
        for line, target in _imports(path, root):
            verdict = _verdict(room, target, homes)
            if verdict:
                found.append(f"{path.relative_to(root)}:{line}: {verdict}")
    return found


class When(Enum):
    """Time at which an import takes place."""

    START = "when the module is imported"
    TYPES = "for type checkers alone"
    LATER = "when a function is called"


class Arrow(NamedTuple):
    """Import of a module from a folder other than its own."""

    when: When
    module: str
    folder: str
    imported_folder: str

    @property
    def is_upward(self) -> bool:
        return FOLDERS.index(self.folder) < FOLDERS.index(self.imported_folder)


@cache
def arrows(root: Path) -> list[Arrow]:
    """Every import that leaves a folder, in generated code too."""
    places = {_dotted(path, root): path for room in MAY_IMPORT for path in (root / room).rglob("*.py")}
    found = []
    for path in places.values():
        module = path.relative_to(root).as_posix()
        if COMMAND_LINE.fullmatch(module) or module == "fed/__init__.py":
            continue  # front doors
        for when, target in _timed_imports(tree_of(path).body, When.START):
            imported = places.get(target) or places.get(target.rpartition(".")[0])
            if imported is not None and imported.parent != path.parent:
                folder = path.parent.relative_to(root).as_posix()
                found.append(Arrow(when, module, folder, imported.parent.relative_to(root).as_posix()))
    return found


def _dotted(path: Path, root: Path) -> str:
    """Name under which a file is imported."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "fed" else ["fed", *parts])


def _timed_imports(body: Sequence[ast.stmt], when: When) -> Iterator[tuple[When, str]]:
    for node in body:
        inner = when
        if _is_type_checking(node):
            inner = When.TYPES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = When.LATER
        if isinstance(node, ast.ImportFrom):
            yield from ((when, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((when, alias.name) for alias in node.names)
        for part in ("body", "orelse", "handlers", "finalbody"):
            yield from _timed_imports(getattr(node, part, []), inner)


def _files(root: Path) -> Iterator[Path]:
    """All modules but the command line, which is a front door."""
    for room in MAY_IMPORT:
        for path in sorted((root / room).rglob("*.py")):
            if not COMMAND_LINE.fullmatch(path.relative_to(root).as_posix()):
                yield path


def _verdict(room: str, target: str, homes: dict[str, str]) -> str | None:
    first, second, *_ = (*target.split("."), "", "")
    if first in MAY_IMPORT and first != "fed":
        return f"import fed.{target}, not {target}, which may be a user's own"
    if first != "fed":
        return None
    if second in ("fed", "tests"):
        return f"{target} is importable in a checkout alone"
    home = homes.get(second, target).split(".")
    imported = home[1] if len(home) > 1 and home[1] in MAY_IMPORT else "fed"
    return None if imported in MAY_IMPORT[room] else f"{room} may not import {target}, which is of {imported}"


def _homes_of_lazy_names(root: Path) -> dict[str, str]:
    """Where the names live that the top of the package loads when they are used."""
    tree = ast.parse((root / "fed" / "__init__.py").read_text())
    nodes = [node for top in tree.body if _is_type_checking(top) for node in ast.walk(top)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """What a module imports, and the line; ``fed.name`` after a plain ``import fed`` counts, at any depth."""
    tree = tree_of(path)
    package = [*([] if path.is_relative_to(root / "fed") else ["fed"]), *path.relative_to(root).parent.parts]
    if path == root / "fed" / "__init__.py":
        body = [
            node
            for node in tree.body
            if not _is_type_checking(node) and not (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        ]
        tree = ast.Module(body, type_ignores=[])
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                targets = [alias.name for alias in node.names]
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                targets = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
            case ast.Attribute(value=ast.Name(id="fed")):
                targets = [f"fed.{node.attr}"]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(text)), *_]):
                targets = [text] if name in ("import_module", "__import__") else []
            case _:
                continue
        yield from ((node.lineno, target) for target in targets)


def test_rooms_import_only_from_the_rooms_above_them() -> None:
    assert violations(ROOT) == []


def test_every_folder_has_its_place() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")}
    assert found == {*FOLDERS, "fed/cli"}


@pytest.mark.parametrize("when", When)
def test_no_folder_imports_from_one_above_it(when: When) -> None:
    found = [arrow for arrow in arrows(ROOT) if arrow.when is when]
    assert [arrow for arrow in found if arrow.is_upward] == []
    assert found  # down, they are many


def test_the_protocol_imports_nothing() -> None:
    assert [arrow for arrow in arrows(ROOT) if arrow.folder == "fed/protocol"] == []


def test_a_planted_arrow_up_is_found(tmp_path: Path) -> None:
    for folder in ("fed/wire", "fed/vectors"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "fed/wire/format.py").touch()
    (tmp_path / "fed/vectors/planted.py").write_text(
        "import fed.wire.format\nif TYPE_CHECKING:\n    from fed.wire import format\n"
        "class Lazy:\n    def later(self):\n        from fed.wire.format import Format\n"
    )
    assert [(arrow.when, arrow.is_upward) for arrow in arrows(tmp_path)] == [(when, True) for when in When]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for room in MAY_IMPORT:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text('"""A room."""\n')
    (tmp_path / "fed" / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fed.simulations.simulate import simulate\n"
        "def __getattr__(name):\n    import fed.server\n"
    )
    (tmp_path / "fed" / "cli.py").write_text("from fed.simulations import simulate\n")
    return tmp_path


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fed/planted.py", "import fed.aggregators"),
        ("fed/planted.py", "from fed import server"),
        ("fed/planted.py", "if TYPE_CHECKING:\n    from fed.clients.data import FederatedData"),
        ("fed/planted.py", "import fed\nrun = fed.simulations.simulate"),
        ("fed/planted.py", "from fed import simulate"),
        ("fed/client.py", "import fed.server"),
        ("aggregators/planted.py", "def later():\n    from fed.clients import data"),
        ("aggregators/planted.py", "import importlib\nimportlib.import_module('fed.server.coordinator')"),
        ("clients/deep/planted.py", "from ...server import coordinator"),
        ("clients/planted.py", "import fed\nfed.simulate()"),
        ("server/planted.py", "from fed.simulations.fleet import SimulatedFleet"),
        ("simulations/planted.py", "import server"),
        ("simulations/planted.py", "from clients import data"),
        ("simulations/planted.py", "import fed.fed.errors"),
    ],
)
def test_a_planted_import_is_found(house: Path, module: str, source: str) -> None:
    assert violations(house) == []
    (house / module).parent.mkdir(exist_ok=True)
    (house / module).write_text(source)
    assert [found.split(":")[0] for found in violations(house)] == [module]


def test_equations_know_neither_clock_nor_input_nor_output() -> None:
    for path in (ROOT / "aggregators").rglob("*.py"):
        imported = {target.partition(".")[0] for _, target in _imports(path, ROOT)}
        assert imported.isdisjoint(NO_PLACE_IN_AN_EQUATION), path.name


def test_time_is_asked_of_the_clock_alone() -> None:
    timed = [path for folder in ("clients/node", "server", "fed/wire") for path in (ROOT / folder).rglob("*.py")]
    assert timed
    for path in timed:
        imported = {target.partition(".")[0] for _, target in _imports(path, ROOT)}
        assert "time" not in imported, f"{path}: ask the fed.processes.clock.Clock that it is given"


def test_flower_is_reached_through_its_public_modules_alone() -> None:
    modules = set()
    for path in (path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")):
        assert not [target for _, target in _imports(path, ROOT) if target.partition(".")[0] == "flwr"], path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "flower":
                modules.add(ast.literal_eval(node.args[0]))
    assert modules == {"app", "clientapp", "serverapp"}


def test_every_built_in_kind_resolves() -> None:
    tables = [table for table in vars(registry).values() if isinstance(table, Family)]
    assert tables
    for table in tables:
        for kind, place in table.builtin.items():
            module, _, name = place.partition(":")
            assert callable(getattr(importlib.import_module(module), name)), f"{table.name} {kind}"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import fed", {"torch", "numpy", "flwr", "grpc", "ray", "matplotlib", "pydantic"}),
        ("import fed; fed.Experiment; fed.simulate", {"flwr", "grpc", "ray", "matplotlib", "networkx", "pyarrow"}),
        (
            "import fed.cli.main",
            {"torch", "pydantic", "numpy", "sklearn", "yaml", "grpc", "cryptography", "matplotlib"},
        ),
        ("from fed.cli.main import main; main(['keys', '--help'])", {"cryptography", "grpc"}),
        ("from fed.cli.main import main; main(['runs'])", {"torch", "numpy", "matplotlib", "networkx"}),
        (
            "from fed.cli.main import main; main(['show', 'examples/secure.yaml'])",
            {"torch", "grpc", "matplotlib", "networkx", "scipy"},
        ),
    ],
)
def test_importing_is_cheap(code: str, heavy: set[str]) -> None:
    assert heavy.isdisjoint(_modules_after(code))


def test_kinds_are_read_without_torch() -> None:
    tables = [name for name, table in vars(registry).items() if isinstance(table, Family)]
    code = "from fed.config import experiment, registry\n"
    code += "\n".join(f"for kind in registry.{name}.builtin: registry.{name}.section(kind)" for name in tables)
    loaded = _modules_after(code)
    assert "fed.aggregators.fedavg" in loaded
    assert "torch" not in loaded


def _modules_after(code: str) -> list[str]:
    code = f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return list(json.loads(said.splitlines()[-1]))
