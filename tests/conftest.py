"""What all tests share: the house's modules, and an environment in which they repeat to the bit."""

import gc
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fed", "aggregators", "clients", "server", "simulations")

# Before torch is imported, here and in every process that a test starts: workers share the cores, one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
# A test may load gRPC before fed, which would tell it to be quiet.
os.environ["GRPC_VERBOSITY"] = "NONE"

# Ledgers of privacy are no business of the user's, nor of another test's.
_STATE = tempfile.TemporaryDirectory(prefix="fed-state-", ignore_cleanup_errors=True)
os.environ["FED_STATE"] = _STATE.name

# Examples are drawn from a fixed seed, and a slow machine is no failure.
settings.register_profile("short", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("long", deadline=None, derandomize=True, max_examples=100)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the devices be named that tests run on."""
    parser.addoption("--device", action="append", choices=("cpu", "cuda", "pretended"), help="see tests/devices.py")


def pytest_configure(config: pytest.Config) -> None:
    """Draw many examples where the long tests run too, few where they are left out."""
    if "pretended" in (config.getoption("--device") or ()):
        from tests.pretended_device import register

        register()  # before the first gradient of this process
    settings.load_profile("short" if _leaves_out_long(config) else "long")
    gc.disable()  # until all is collected, which makes a million objects and no garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to load what processes need, where a test starts some; beside the long tests, commands start anew."""
    # The collector need not look at ten thousand tests again and again.
    gc.enable()
    gc.freeze()
    if "tests.programs" in sys.modules and not session.config.option.collectonly:
        sys.modules["tests.programs"].prepare(forks_commands=_leaves_out_long(session.config))


def _leaves_out_long(config: pytest.Config) -> bool:
    return "not long" in config.option.markexpr


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Forget what a command has done to the project's logger, as its process would."""
    logger = logging.getLogger("fed")
    before = logger.level, logger.handlers[:], logger.propagate
    yield
    level, logger.handlers[:], logger.propagate = before
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _state_of_its_own(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Give each test a folder of the user's state."""
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    monkeypatch.setenv("FED_STATE", f"{_STATE.name}/{name}")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, for tests of what stands beside them: to draw is most of the work."""
    from fed.reports import html

    monkeypatch.setattr(html, "_figure", lambda heading, note, _: html._Figure(heading, note, "<svg></svg>"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``module_name`` runs once for every module of the five rooms."""
    if "module_name" in metafunc.fixturenames:
        metafunc.parametrize("module_name", sorted(_modules()))
    if "device" in metafunc.fixturenames:
        from tests import devices

        names = metafunc.config.getoption("--device") or devices.found()
        if names != ["cpu"]:
            metafunc.parametrize("device", names, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Device that the test runs on, which is what ``auto`` means there."""
    from tests import devices

    name = getattr(request, "param", "cpu")
    if name == "pretended" and request.node.get_closest_marker("processes"):
        pytest.skip("other processes and threads know no pretended device")
    with devices.on(name, monkeypatch) as found:
        yield found


def _modules() -> Iterator[str]:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if room == "fed" else ("fed", *parts)
            yield ".".join(parts).removesuffix(".__init__")
