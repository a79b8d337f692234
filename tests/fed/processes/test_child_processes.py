"""Child processes are forks of one that is not this one: what they see, and how they end."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
def test_children_see_todays_environment_and_end_with_what_forked_them(tmp_path: Path) -> None:
    # A module of the user's with the name of one that children load: it must not be theirs.
    (tmp_path / "numpy.py").write_text("raise SystemExit('the working folder is not to be searched')\n")
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from tests.fed.processes.children import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr
