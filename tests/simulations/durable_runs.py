"""Experiments of every kind whose runs are broken off and gone on with, and what must then be as if they were not."""

import json
from pathlib import Path
from typing import Any

import fed

DEVICES = {
    "kind": "lognormal",
    "sigma": 1.0,
    "failure": 0.1,
    "interruption": 0.1,
    "availability": {"kind": "on_off", "on_s": 2.0, "off_s": 0.5},
}
BASE: dict[str, Any] = {
    "name": "durable",
    "data": {"kind": "digits", "clients": 12, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "logistic"},
    "local": {"batch_size": 16, "epochs": 1},
    "devices": DEVICES,
    "checkpoints": {"every": 2, "keep": 2},
    "simulation": {"workers": 0, "group": 3},
}


def _rounds(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rounds": {"kind": kind, **keys}}


def _algorithm(kind: str, rounds: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"algorithm": kind, **(rounds or _rounds("synchronous", cohort=5)), **more}


_MLP = {"model": {"kind": "mlp", "hidden": [12]}}
_TOLERANT = _rounds("synchronous", cohort=4, over_selection=1.5, deadline_s=1.0, quorum=0.5, backup_after_s=0.5)

CASES: dict[str, dict[str, Any]] = {
    "synchronous": _rounds("synchronous", cohort=5),
    "tolerant": _TOLERANT,
    "dropping": _rounds("synchronous", cohort=5, deadline_s=0.6, partial_work="drop"),
    "power_of_choice": _rounds("synchronous", cohort=3, sampling={"kind": "power_of_choice", "candidates": 8}),
    "round_robin": _rounds("synchronous", cohort=5, sampling="round_robin"),
    "buffered": _rounds("buffered", buffer=3, concurrency=8, most_stale=4),
    "asynchronous": _rounds("asynchronous", concurrency=6, staleness={"kind": "hinge"}),
    "bounded_staleness": _rounds("bounded_staleness", bound=1),
    "unbounded_staleness": _rounds("bounded_staleness", bound="none"),
    "gradient_tracking": {"algorithm": "gradient_tracking"},
    "choco": {"algorithm": "choco", "uplink": ["powersgd"]},
    "deepsqueeze": {"algorithm": "deepsqueeze", "uplink": ["qsgd"], "topology": "random_matching"},
    "d2": {"algorithm": "d2", "topology": {"kind": "ring", "lazy": True}},
    "sgp": {"algorithm": "sgp", "topology": "directed_ring"},
    **{kind: {"algorithm": kind} for kind in ("adpsgd", "moshpit", "noloco", "matcha", "clipped_gossip")},
    "scaffold": _algorithm("scaffold"),
    "scaffold_buffered": _algorithm("scaffold", _rounds("buffered", buffer=3, concurrency=8)),
    "scaffold_joining": _algorithm("scaffold", devices={**DEVICES, "joining_s": 1.0}),
    "ditto": _algorithm("ditto"),
    "ditto_buffered": _algorithm("ditto", _rounds("buffered", buffer=3, concurrency=8)),
    "fedper": _algorithm("fedper", **_MLP),
    "afl": _algorithm("afl"),
    "fedadam_by_clients": _algorithm("fedadam", _rounds("asynchronous", concurrency=6), evaluation="clients"),
    "feddyn": _algorithm("feddyn"),
    "post_local_sgd": _algorithm("post_local_sgd"),
    "moon": _algorithm("moon", **_MLP),
    "median_attacked": _algorithm("median", adversaries={"kind": "alie", "fraction": 0.25}),
    "mimic_buffered": _algorithm(
        "median", _rounds("buffered", buffer=4, concurrency=8), adversaries={"kind": "mimic", "fraction": 0.25}
    ),
    "krum_never_moves": _algorithm("krum", _rounds("bounded_staleness", bound=1)),
    "feedback_tolerant": {**_TOLERANT, "uplink": ["topk", "two_level"], "error_feedback": "ef"},
    "downlink": _algorithm("scaffold", downlink=["topk", "int8"]),
    "downlink_tolerant": {**_TOLERANT, "uplink": ["sign"], "error_feedback": "ef", "downlink": ["eden"]},
    "feedback_of_all": _algorithm("fedavg", {"rounds": {"deadline_s": 1.0}}, uplink=["topk"], error_feedback="ef21"),
    "feedback_buffered": _algorithm(
        "scaffold", _rounds("buffered", buffer=3, concurrency=8), uplink=["sign"], error_feedback="ef"
    ),
    "dgc": _algorithm("fedavg", uplink=[{"kind": "dgc", "warm_up_rounds": 2}]),
    "sketch": _algorithm("fedavg", uplink=["sketch"]),
    "centralized": _algorithm("centralized"),
    "local": {"algorithm": "local"},
}


def experiment(case: str, count: int, **more: Any) -> fed.Experiment:
    """The experiment of a case, of so many rounds."""
    keys = {**BASE, **CASES[case], **more}
    keys["rounds"] = {**keys.get("rounds", {}), "count": count}
    return fed.Experiment(**keys)


def left_in(folder: Path) -> dict[str, Any]:
    """What a run has left, but for the time that it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    walls = [line.pop("wall_s") for line in lines]
    assert walls == sorted(walls), "the time counts from the beginning"
    assert summary.pop("wall_s") >= walls[-1]
    summary.pop("uplink_pays_below_bytes_per_s", None)
    # At first "auto" has chosen, and where the run goes on its own experiment.
    summary["training"], _, _ = summary["training"].rpartition(", ")
    participation = _participation(folder, lines)
    models = {path.name: path.read_bytes() for path in folder.glob("model*.safetensors")}
    return {"metrics": lines, "participation": participation, "summary": summary, "models": models}


def _participation(folder: Path, metrics: list[dict[str, Any]]) -> bytes:
    """Who took part in each round: as many clients as the round's metrics count."""
    content = (folder / "participation.jsonl").read_bytes()
    who = [json.loads(line) for line in content.splitlines()]
    assert [line["round"] for line in who] == [line["round"] for line in metrics]
    for line, counts in zip(who, metrics, strict=True):
        for ids, count in {"asked": "selected", "replied": "replied", "late": "late", "failed": "failed"}.items():
            assert len(line.get(ids, [])) == counts[count], (line["round"], ids)
    return content


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = {"a bit": _flip, "its end": _truncate, "all": _empty}
