"""Experiments of all kinds run, resume to the same bits, and agree with processes; or a sentence refuses them."""

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.config import registry
from fed.config.components import Family
from fed.errors import FedError
from fed.server.observer import Essential
from tests.devices import Current
from tests.simulations import users_parts as parts
from tests.simulations.durable_runs import left_in
from tests.simulations.random_experiments import TRIALS, RandomExperiments, write_files
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

_RAW = re.compile(r"Traceback|got \w*(Error|Exception)\b|<[\w.]+ object at|(?<!range in )\bself\b|Error\(\)")
"""Parts of messages that no user should read."""


def same_run(one: fed.Run, other: fed.Run) -> bool:
    """True if two runs ended with the same numbers, but for the time that they took."""
    lines = [[repr({**line, "wall_s": 0}) for line in run.metrics] for run in (one, other)]
    models = [{None: run.model, **run.models} for run in (one, other)]
    return (
        lines[0] == lines[1]
        and models[0].keys() == models[1].keys()
        and all(same_bits(model, models[1][client]) for client, model in models[0].items())
    )


def same_bits(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def hold_finite(run: fed.Run) -> None:
    """A run that ends without an error has finite losses and models."""
    for line in run.metrics:
        losses = {name: value for name, value in line.items() if name.endswith("loss") and value is not None}
        assert all(map(math.isfinite, losses.values())), losses
    for model in (run.model, *run.models.values()):
        assert all(bool(part.isfinite().all()) for part in model.state_dict().values())


def outcome(keys: Mapping[str, Any], folder: Path, *, workers: bool) -> str:
    """Reason why an experiment is refused, or "" for one that ran, resumed, and agreed with worker processes.

    Args:
        keys: the experiment's keys.
        folder: the folder in which its runs may be written.
        workers: compare with them, too.
    """

    def copy_after_round_1(number: int) -> None:
        if number == 2:  # the checkpoint of which is not written yet
            shutil.copytree(folder / "whole", folder / "broken")

    try:
        experiment = fed.Experiment(**keys)
        whole = fed.simulate(
            experiment, output=folder / "whole", observers=[Essential(parts.Watcher(copy_after_round_1))]
        )
    except FedError as error:
        return str(error) or repr(error)
    hold_finite(whole)
    assert len(whole.metrics) == 2
    again = fed.simulate(experiment, output=folder / "broken", resume=True)
    assert left_in(folder / "broken") == left_in(folder / "whole")
    assert same_run(whole, again)
    if workers:
        given = experiment.simulation.model_dump()
        for executor in (None, "python:tests.simulations.executors.trial:Pickled"):
            elsewhere = {**given, "workers": 2, "executor": executor}
            assert same_run(whole, fed.simulate(experiment.override({"simulation": elsewhere})))
    return ""


def hold(seed: int, count: int, folder: Path, *, workers_every: int = 0) -> dict[str, int]:
    """Try experiments of a seed.

    Args:
        seed: the seed of the draws.
        count: the number of experiments.
        folder: the folder of all files.
        workers_every: one in so many is compared with worker processes, if it runs; 0: none.

    Returns:
        How many ran, and how many were refused.
    """
    drawn = RandomExperiments(seed, write_files(folder))
    counts = {"ran": 0, "refused": 0}
    for number, keys in enumerate(islice(iter(drawn.draw, None), count)):
        place = folder / str(number)
        try:
            reason = outcome(keys, place, workers=workers_every > 0 and number % workers_every == 0)
        except Exception as error:
            error.add_note(f"experiment {number} of seed {seed}: fed.Experiment(**{keys})")
            raise
        assert not _RAW.search(reason), (reason, keys)
        counts["refused" if reason else "ran"] += 1
        shutil.rmtree(place, ignore_errors=True)
    return counts


@pytest.mark.parametrize("seed", thinned(range(6), quick=1))
def test_experiments_of_all_kinds_run_or_are_refused(seed: int, tmp_path: Path) -> None:
    counts = hold(seed, 50, tmp_path)
    assert min(counts.values()) >= 10


@pytest.mark.processes
def test_some_experiments_agree_with_worker_processes(tmp_path: Path) -> None:
    assert hold(11, 4, tmp_path, workers_every=1)["ran"] >= 2


FOUND: dict[str, dict[str, Any]] = {
    "step size of 0": {
        "local": {"schedule": "cosine", "steps": 2},
        "algorithm": "qfedavg",
        "rounds": {"kind": "bounded_staleness", "count": 2},
        "devices": {"kind": "lognormal", "failure": 0.2},
    },
    "cut steps of several batches": {
        "seed": 735,
        "local": {"momentum": 0.9, "batch_size": 4, "accumulate": 2, "steps": 2},
        "algorithm": "sign_majority",
        "rounds": {"count": 2, "sampling": "round_robin"},
        "devices": {"kind": "uniform", "interruption": 0.3},
        "simulation": {"group": 3, "workers": 0},
    },
    "attackers' messages from workers": {
        "local": {"batch_size": 4, "steps": 2},
        "algorithm": "slowmo",
        "rounds": {"count": 2},
        "adversaries": "alie",
        "simulation": {"group": 3, "workers": 2},
    },
    "edges' messages from workers": {
        "local": {"batch_size": 4, "steps": 2},
        "algorithm": "mimelite",
        "rounds": {"count": 2},
        "hierarchy": "edges",
        "simulation": {"group": 3, "workers": 2},
    },
}
"""Experiments that were drawn once and did not run."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.processes] if "workers" in name else []) for name in FOUND],
)
def test_experiments_that_failed_once_run(name: str) -> None:
    run = fed.simulate(fed.Experiment(**{"data": {"clients": 8}, "model": "logistic", **FOUND[name]}))
    assert run.summary["status"] == "finished"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_thousands_of_experiments_run_or_are_refused(seed: int, tmp_path: Path) -> None:
    counts = hold(seed, 250, tmp_path, workers_every=0 if Current.device.type == "pretended" else 40)
    assert min(counts.values()) >= 50


def kinds_in(keys: object) -> Iterator[str]:
    """The kinds that keys of an experiment name."""
    if isinstance(keys, Mapping):
        yield from [keys["kind"]] if "kind" in keys else []
        for value in keys.values():
            yield from kinds_in(value)
    elif isinstance(keys, list):
        for value in keys:
            yield from kinds_in(value)


def test_all_kinds_of_the_registry_are_drawn(tmp_path: Path) -> None:
    # Trackers' packages need not be installed.
    known = [made for made in vars(registry).values() if isinstance(made, Family) and made is not registry.TRACKERS]
    drawn = RandomExperiments(0, write_files(tmp_path))
    kinds = {kind for _ in range(1500) for kind in kinds_in(drawn.sections())}
    assert kinds == {kind for family in known for kind in (*family.builtin, *TRIALS.get(family.name, ()))}


def test_a_new_kind_is_drawn_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.CODECS.builtin, "new", "tests.simulations.test_codec_seam:EverySecond")
    drawn = RandomExperiments(0, write_files(tmp_path))
    assert "new" in {kind for _ in range(100) for kind in kinds_in(drawn.sections())}
