"""Trackers with the functions of wandb are told what their packages take: stand-ins refuse all else."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fed
from tests.server.test_tracking import experiment


@dataclass
class StandInRun:
    """A run of either package, with the methods that are used."""

    id: str
    name: str
    group: str | None
    rounds: list[tuple[int | None, Mapping[str, float]]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    is_finished: bool = False
    exit_code: int | None = None

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert not self.is_finished
        self.rounds.append((step, metrics))

    def save(self, glob_str: str, base_path: str, policy: str) -> None:
        self.files.append(Path(glob_str).name)

    def log_artifact(
        self,
        artifact_or_path: str,
        name: str | None = None,
        type: str | None = None,  # noqa: A002  # the package's own name, as those below
    ) -> None:
        self.files.append(Path(artifact_or_path).name)

    def finish(self, exit_code: int | None = None) -> None:
        self.is_finished = True
        self.exit_code = exit_code


class StandIn(ModuleType):
    """A package that is imported in place of the real one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.runs: list[StandInRun] = []
        self.given: list[Mapping[str, Any]] = []


class StandInWandB(StandIn):
    """As much of wandb 0.31 as is used."""

    @dataclass
    class Settings:
        silent: bool
        console: str
        disable_git: bool
        x_disable_stats: bool
        init_timeout: float
        finish_timeout: float

    def init(
        self,
        *,
        project: str,
        name: str,
        group: str | None,
        tags: list[str],
        config: Mapping[str, Any],
        dir: str,  # noqa: A002
        mode: str | None,
        id: str | None,  # noqa: A002
        resume: str,
        reinit: str,
        settings: Settings,
    ) -> StandInRun:
        self.given.append({"settings": settings, "mode": mode, "reinit": reinit, "config": config})
        self.runs.append(StandInRun(id or "made", name, group))
        return self.runs[-1]


class StandInTrackio(StandIn):
    """As much of trackio 0.43 as is used."""

    def init(
        self,
        project: str,
        name: str | None = None,
        group: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        auto_log_cpu: bool | None = None,
    ) -> StandInRun:
        assert not any(key.startswith("_") for key in config or {}), "trackio keeps these to itself"
        self.given.append({"resume": resume, "config": config})
        self.runs.append(StandInRun(str(len(self.runs)), name or "", group))
        return self.runs[-1]


def tracked_by(stand_in: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> fed.Run:
    """A run of three rounds, resumed once it has ended, with the report in one line."""
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr("fed.tracking.tracker.find_spec", lambda name: name)
    monkeypatch.setattr("fed.reports.html.write_run_report", lambda place: place / "report.html")
    one = experiment({"kind": stand_in.__name__, "report": True, **keys}, name="mine")
    run = fed.simulate(one, output=folder)
    fed.simulate(one, output=folder, resume=True)
    return run


def test_wandb_waits_half_of_wait_s_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandInWandB("wandb")
    run = tracked_by(stand_in, tmp_path / "run", monkeypatch, wait_s=12.0, mode="online")
    first, again = stand_in.runs
    settings = stand_in.given[0]["settings"]
    assert (settings.init_timeout, settings.finish_timeout) == (6.0, 6.0)
    assert [number for number, _ in first.rounds] == [1, 2, 3]
    assert first.rounds[-1][1]["test_accuracy"] == run.metrics[-1]["test_accuracy"]
    assert (first.files, first.exit_code, first.summary["status"]) == (["report.html"], 0, "finished")
    assert first.id == again.id == "made"


def test_trackio_takes_group_report_and_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandInTrackio("trackio")
    run = tracked_by(stand_in, tmp_path / "run", monkeypatch)
    first, again = stand_in.runs
    assert [given["resume"] for given in stand_in.given] == ["never", "allow"]
    assert stand_in.given[0]["config"]["local.lr"] == 0.1
    assert (first.name, first.group, again.name) == ("mine", None, "mine")
    assert [number for number, _ in first.rounds] == [1, 2, 3, None]
    assert first.rounds[-1][1]["summary/final_test_loss"] == run.summary["final_test_loss"]
    assert first.files == ["report.html"]
    assert first.is_finished
