"""Three real nodes that all tests of one worker attack, since a process that trains takes seconds to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.hostile.nodes import Field


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests in one worker, which starts the nodes once."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("hostile coordinator"))


@pytest.fixture(scope="session")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """A hostile coordinator to which three nodes have come, whose state no test may break."""
    made = Field(tmp_path_factory.mktemp("hostile"))
    try:
        made.start_all()
        yield made
    finally:
        made.close()
