"""Child processes are forks of one that is not this one: what they see, and how they end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
def test_children_see_todays_environment_and_end_with_what_forked_them(tmp_path: Path) -> None:
    # A module of the user's with the name of one that children load: it must not be theirs.
    (tmp_path / "numpy.py").write_text("raise SystemExit('the working folder is not to be searched')\n")
    code = "import sys; sys.path.pop(0); from tests.fed.processes.children import main; main()"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr
