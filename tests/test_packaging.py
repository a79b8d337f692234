"""What is installed: the package alone, whole, and at ease beside a user's own ``server.py`` and ``clients/``."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fed
from fed.cli.doctor import EXTRAS
from fed.wire.engines import FLOWER

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fed", "aggregators", "clients", "server", "simulations")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIP_WHEEL = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
EXPERIMENT = "{data: {kind: digits, clients: 4}, model: {kind: logistic}, rounds: {count: 1, cohort: 2}}\n"

# Everything that asks for the wheel runs in one worker, so that it is built once.
builds = pytest.mark.xdist_group("packaging")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that knows of no Python but its own; what it says on failure fails the test."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def house() -> Iterator[Path]:
    """Every file of the five rooms, from the root."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
                yield path.relative_to(ROOT)


def installed_as(path: Path) -> str:
    return str(path if path.parts[0] == "fed" else Path("fed") / path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built from, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "setup.cfg", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    run(*PIP_WHEEL, "dist", ".", cwd=source)
    return next((source / "dist").glob("*.whl"))


@pytest.fixture
def beside_their_own(tmp_path: Path) -> Path:
    """A user's folder, whose names are ours too."""
    folder = tmp_path / "work"
    (folder / "clients").mkdir(parents=True)
    (folder / "server.py").write_text("MINE = True\n")
    (folder / "clients" / "__init__.py").write_text("MINE = True\n")
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    return folder


def check(environment: Path, folder: Path) -> None:
    """Hold that an environment's own ``fed`` works in a user's folder."""
    code = (
        "import json, clients, server, fed.clients, fed.server\n"
        "assert clients.MINE and server.MINE\n"
        "print(json.dumps([fed.__file__, fed.clients.__file__, fed.server.__file__]))"
    )
    for file in json.loads(run(environment / "bin" / "python", "-c", code, cwd=folder)):
        assert Path(file).is_relative_to(environment), "the test must see the wheel, not the checkout"
    command = environment / "bin" / "fed"
    assert fed.__version__ in run(command, "--version", cwd=folder)
    assert "simulate" in run(command, "--help", cwd=folder)
    summary = json.loads(run(command, "simulate", "experiment.yaml", "--output", "run", "--json", cwd=folder))
    assert summary["rounds"] == 1
    assert (folder / "run" / "model.safetensors").is_file()


@builds
@pytest.mark.long
def test_the_wheel_holds_the_package_alone_and_whole(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {installed_as(path) for path in house()}


@builds
@pytest.mark.long
def test_a_wheel_built_from_the_source_distribution_is_the_same(source: Path, wheel: Path) -> None:
    code = "from setuptools import build_meta; build_meta.build_sdist('sdist')"
    run(sys.executable, "-c", code, cwd=source)
    run(*PIP_WHEEL, "again", next((source / "sdist").glob("*.tar.gz")), cwd=source)
    again = next((source / "again").glob("*.whl"))
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


@builds
@pytest.mark.long
def test_the_wheel_works_beside_a_users_own_modules(wheel: Path, tmp_path: Path, beside_their_own: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies are this environment's; its own .pth files, the editable install's among them, are not read.
    packages = next((environment / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    check(environment, beside_their_own)


@pytest.mark.long
@builds
def test_it_installs_into_an_empty_environment(source: Path, tmp_path: Path, beside_their_own: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    install = ["-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "."]
    # The variable reaches the isolated build, where the option does not.
    run(environment / "bin" / "python", *install, cwd=source, PIP_CONSTRAINT=str(source / "constraints.txt"))
    check(environment, beside_their_own)


def test_doctor_has_a_purpose_for_each_extra() -> None:
    for_developers = {"dev", "all-tests"}
    assert EXTRAS.keys() == PROJECT["project"]["optional-dependencies"].keys() - for_developers


def test_every_folder_of_modules_is_a_listed_package() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    folders = {path.parent for path in house() if path.suffix == ".py"}
    packages = {installed_as(folder).replace("/", "."): str(folder) for folder in folders}
    assert set(setuptools["packages"]) == set(packages)
    assert setuptools["package-dir"] == packages
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_what_the_rooms_import_is_what_the_package_requires() -> None:
    imported = {name for path in house() if path.suffix == ".py" for name in _imported(ROOT / path)}
    distributions = packages_distributions()
    theirs = imported - sys.stdlib_module_names - {"fed"}
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *extras["metrics"]]
    required = {canonicalize_name(Requirement(line).name) for line in lines}
    used = set[str]()
    for name in theirs:
        found = {str(canonicalize_name(distribution)) for distribution in distributions.get(name, [name])}
        used |= found & required or found  # several distributions share the name google
    assert used - {canonicalize_name(Requirement(line).name) for line in extras["privacy"]} == required


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name.partition(".")[0] for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


def test_constraints_pin_what_is_needed_and_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert [line for line in pinned if not re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line)] == []
    needed, pinned_by_theirs = _needed("dev")
    # What these need in turn is known only where they are installed, which is for the long tests alone.
    for_all_tests = {Requirement(line).name for line in PROJECT["project"]["optional-dependencies"]["all-tests"]}
    names = {line.partition("==")[0] for line in pinned}
    assert needed - pinned_by_theirs <= names
    assert for_all_tests <= names <= needed | for_all_tests


def test_the_extra_for_flower_is_the_documented_one() -> None:
    assert PROJECT["project"]["optional-dependencies"]["flower"] == [FLOWER]


def _needed(name: str) -> tuple[set[str], set[str]]:
    """Whatever the project needs with an extra, and of that what its own dependents pin (torch, its CUDA wheels)."""
    project = PROJECT["project"]
    todo = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"][name]]
    needed, pinned = set[tuple[str, frozenset[str]]](), set[str]()
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        if any(specifier.operator == "==" for specifier in requirement.specifier):
            pinned.add(name)
        if (name, extras) not in needed:
            needed.add((name, extras))
            todo += _required_by(name, extras)
    return {name for name, _ in needed}, pinned


def _required_by(name: str, extras: frozenset[str]) -> list[Requirement]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # a marker of ours may leave it out here
        return []
    required = [Requirement(line) for line in lines]
    return [one for one in required if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in extras)]


@pytest.mark.xdist_group("together")
def test_groups_of_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """They share what takes long to make; versions of pytest and of pytest-xdist exist in which they do not."""
    is_spread = hasattr(request.config, "workerinput")
    assert request.node.nodeid.endswith("@together") == is_spread
