"""The batch script for SLURM, with stand-ins for SLURM's commands: cores of the allocation, and jobs that go on."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.simulations.executors import pure_work as work
from tests.simulations.executors.test_ray import those_called

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="cores are bound as Linux does it"),
]
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = "#!/bin/sh\necho 127.0.0.1\n"
COMPARISON = """
base:
  data: {kind: digits, clients: 6}
  rounds: {count: ROUNDS}
  checkpoints: {every: 1}
  simulation: {executor: {kind: ray, address: auto}}
compare: [{name: FedAvg}, {name: slower, local.lr: 0.01}]
seeds: [0, 1]
"""


@pytest.fixture
def commands(tmp_path: Path) -> str:
    """PATH with the environment's own commands, and stand-ins for SLURM's that run on this machine."""
    pytest.importorskip("ray")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def job(folder: Path, commands: str, number: int, core: int, rounds: int = 5) -> "subprocess.Popen[bytes]":
    """A job of one node with one core, as SLURM would begin it; what it says is in its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "compare.yaml").write_text(COMPARISON.replace("ROUNDS", str(rounds)))
    environment = {"SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    with (folder / "job.log").open("ab") as log:
        return subprocess.Popen(
            ["taskset", "-c", str(core), "sh", ROOT / "examples" / "slurm.sh", "compare.yaml", "out"],
            cwd=folder,
            env={**os.environ, **environment, "PATH": commands, "CUDA_VISIBLE_DEVICES": ""},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def ended(process: "subprocess.Popen[bytes]", number: int) -> int:
    """Exit code of a job, whose folder for Ray is removed."""
    code = process.wait(8 * work.BOUND_S)
    shutil.rmtree(f"/tmp/ray-{number}", ignore_errors=True)
    return code


def models(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.glob("out/runs/*/*/model.safetensors"))]


def test_two_jobs_at_once_keep_to_their_cores(commands: str, tmp_path: Path) -> None:
    first, second, *_ = [*sorted(os.sched_getaffinity(0)), None]
    if second is None:
        pytest.skip("this machine has one core")
    folders = [tmp_path / "first", tmp_path / "second"]
    jobs = [job(folder, commands, 100 + core, core, 200) for folder, core in zip(folders, (first, second), strict=True)]
    work.await_that(lambda: len(those_called("ray::RayRun")) == 2, "a run of each job", 4 * work.BOUND_S)
    bound = [os.sched_getaffinity(pid) for pid in those_called("ray::RayRun")]
    assert sorted(bound, key=min) == [{first}, {second}]
    assert [ended(process, 100 + core) for process, core in zip(jobs, (first, second), strict=True)] == [0, 0]
    assert len(models(folders[0])) == 4
    assert models(folders[0]) == models(folders[1])


def test_a_requeued_job_goes_on_to_the_same_models(commands: str, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    whole = tmp_path / "whole"
    requeued = tmp_path / "requeued"
    assert ended(job(whole, commands, 200, core, rounds=60), 200) == 0
    killed = job(requeued, commands, 201, core, rounds=60)
    work.await_that(lambda: any(requeued.glob("out/runs/*/*/checkpoints")), "a checkpoint", 4 * work.BOUND_S)
    os.killpg(killed.pid, signal.SIGKILL)  # as SLURM does at the end of its patience
    ended(killed, 201)
    assert len(models(requeued)) < 4
    assert ended(job(requeued, commands, 202, core, rounds=60), 202) == 0
    assert len(models(whole)) == 4
    assert models(requeued) == models(whole)
