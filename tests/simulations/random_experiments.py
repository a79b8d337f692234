"""Random experiments over all kinds of the registry: a new kind, or a new section, is among them by itself."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from PIL import Image
from pydantic.fields import FieldInfo

import fed
from fed.config.components import Component, Family
from fed.config.validation import Section
from fed.errors import FedError

__all__ = ["TRIALS", "RandomExperiments", "families", "write_files"]

_LEFT = object()  # a key that keeps its default

_ALWAYS: dict[str, dict[str, Sequence[Any]]] = {
    "rounds": {"count": [2]},
    "data": {"clients": [8, 8, 8, 8, 8, 8, 2, 1]},
    "mlp": {"hidden": [[6]]},
    "cnn": {"channels": [[2, 3]], "hidden": [6]},
    "char_gru": {"embedding": [4], "hidden": [6]},
    "char_transformer": {"width": [8], "heads": [2], "layers": [1]},
    "fedrep": {"head_epochs": [1]},
    "local": {"steps": [1, 2], "batch_size": [4]},
    "fold": {"number": [1], "of": [3]},
    "checkpoints": {"every": [1]},
    "simulation": {"workers": [0], "group": [32, 3]},
    "algorithm": {"iterations": [3]},
}
"""Family, kind or section → key → the values that it always has one of, so that a run takes little time."""

_SOMETIMES: dict[str, dict[str, Sequence[Any]]] = {
    "rounds": {
        "cohort": [3, 5, 8],
        "over_selection": [1.5],
        "deadline_s": [0.15, 0.5],
        "quorum": [0.5],
        "backup_after_s": [0.1],
        "concurrency": [3, 8],
        "most_stale": [0, 1],
        "buffer": [1, 2],
        "bound": [0, "none"],
        "evaluate_every": [2],
    },
    "devices": {
        "failure": [0.2],
        "interruption": [0.3],
        "joining_s": [0.5],
        "staying_s": [2.0],
        "samples_per_s": [20.0],
    },
    "availability": {"on_s": [1.0], "off_s": [0.5], "hours": [20.0]},
    "algorithm": {"attackers": [0, 1], "bucketing": [2], "switch": [1], "axes": [2, 3], "personal_layers": [2]},
    "codec": {"fraction": [0.1, 0.5], "bits": [1, 2, 4], "rank": [1]},
    "partition": {"overlap": [0.5]},
    "topology": {
        "rows": [2],
        "degree": [2, 3],
    },
    "model": {"train": [["*weight*"], ["*bias*"]]},
    "adversaries": {"fraction": [0.25, 0.4]},
    "hierarchy": {"fan_out": [3]},
    "evaluation": {"peers": [2], "samples": [5], "fraction": [0.3]},
    "local": {"momentum": [0.9], "weight_decay": [0.01], "accumulate": [2], "lr": [0.02]},
    "secure_aggregation": {
        "minimum_cohort": [2, 3, 5],
        "max_weight": [10, 500],
        "clip": [1.0],
        "threshold": [3, 4],
        "max_drop_out": [0.0],
        "corrupt": [0.0],
    },
    "schedule": {"warm_up": [1], "every": [1]},
}
"""The same of values that it has now and then; keys of other families, choices and switches are found by themselves."""

TRIALS: dict[str, Sequence[str]] = {
    "stage": [f"python:tests.trial_stages:{name}" for name in ("Halves", "Shakes", "Drifts")],
}
"""Family → kinds on trial, where it has none by itself."""

_COMMON = {"data": "digits", "model": "logistic", "loss": "cross_entropy", "rounds": "synchronous"}
"""The kinds that go together most often; those of the others rarely fit each other."""

_SHARES = {"data": 0.12, "model": 0.2, "loss": 0.07, "metrics": 0.2, "rounds": 0.4}
_SHARES["fixed"] = 0.0  # a file of one model fits no other
_SHARES["table"] = 0.0  # a schema fits one file alone
_SHARES["app"] = 0.0  # its clients are code, and bring their own data and model
_SHARES["tracking"] = 0.0  # packages of trackers need not be installed
_SHARES |= dict.fromkeys(("algorithm", "local", "checkpoints", "simulation"), 1.0)
_SHARE = 0.35
"""Sections, or keys, that are drawn; the others keep their defaults."""

_MENDED = 0.98
"""Experiments that are refused, of which one section is drawn again."""


def families(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[Family[Any]]:
    """All families that a field chooses from."""
    yield from (part for part in metadata if isinstance(part, Family))
    if get_origin(annotation) is Annotated:
        inner, *beside = get_args(annotation)
        yield from families(inner, beside)
    elif get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from families(part)


class RandomExperiments:
    """Draws experiments from one seed.

    Args:
        seed: the seed of the generator.
        files: family or kind → keys without which a kind that reads files cannot be had.
    """

    def __init__(self, seed: int, files: Mapping[str, Mapping[str, Any]]) -> None:
        self._generator = np.random.default_rng(seed)
        self._files = files

    def draw(self) -> dict[str, Any]:
        """Keys of one experiment, of which some make no sense."""
        fields = fed.Experiment.model_fields
        keys = self.sections()
        while (reason := _refusal(keys)) and self._happens(_MENDED):
            name = self._one_of([name for name in keys if name in reason] or [*keys])
            value = self._drawn(name, fields[name])
            keys = {**keys, name: value} if value is not _LEFT else {of: keys[of] for of in keys if of != name}
        return {"seed": int(self._generator.integers(1000)), **keys}

    def sections(self) -> dict[str, Any]:
        """Sections that need not fit each other."""
        fields = {name: field for name, field in fed.Experiment.model_fields.items() if _is_drawn(field)}
        keys = {name: self._drawn(name, field) for name, field in fields.items()}
        return {name: value for name, value in keys.items() if value is not _LEFT}

    def _drawn(self, name: str, field: FieldInfo) -> Any:
        """A section, or none."""
        if self._happens(_SHARES.get(name, _SHARE)):
            return self._value(field.annotation, field.metadata, name)
        if name not in _COMMON:
            return _LEFT
        (family,) = families(field.annotation, field.metadata)
        return self._component(family, _COMMON[name])

    def _happens(self, share: float) -> bool:
        return bool(self._generator.random() < share)

    def _one_of(self, options: Sequence[Any]) -> Any:
        return options[int(self._generator.integers(len(options)))]

    def _value(self, annotation: Any, metadata: Sequence[Any], name: str) -> Any:
        """A value of this type, if one can be drawn."""
        if family := next((part for part in metadata if isinstance(part, Family)), None):
            return self._component(family, self._one_of(_kinds(family)))
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self._value(arguments[0], arguments[1:], name)
        if origin is Literal:
            return self._one_of(arguments)
        if annotation is bool:
            return self._happens(0.5)
        if origin is tuple and any(families(annotation)):
            return [self._value(arguments[0], (), name) for _ in range(self._one_of([1, 1, 2, 3]))]
        if origin in (Union, UnionType):
            values = [self._value(part, (), name) for part in arguments if part is not type(None)]
            return self._one_of(values)
        if (section := _section(annotation)) is not None:
            return self._keys(section.model_fields, [name])
        return _LEFT

    def _component(self, family: Family[Any], kind: str) -> dict[str, Any]:
        names = [kind, family.name, "algorithm" if family.name == "rule" else family.name]
        given = {**self._files.get(family.name, {}), **self._files.get(f"{family.name} {kind}", {})}
        fields = family.section(kind).model_fields
        drawn = self._keys({name: field for name, field in fields.items() if name != "kind"}, names)
        return {"kind": kind, **drawn, **{name: value for name, value in given.items() if name in fields}}

    def _keys(self, fields: Mapping[str, FieldInfo], names: Sequence[str]) -> dict[str, Any]:
        """Keys of a section.

        Args:
            fields: the keys that it has.
            names: by which the values are found that suit it: kind, family or section.
        """
        keys: dict[str, Any] = {}
        for name, field in fields.items():
            always = [_ALWAYS[of][name] for of in names if name in _ALWAYS.get(of, {})]
            sometimes = [_SOMETIMES[of][name] for of in names if name in _SOMETIMES.get(of, {})]
            value = _LEFT
            if always:
                value = self._one_of(always[0])
            elif self._happens(_SHARE):
                value = self._one_of(sometimes[0]) if sometimes else self._value(field.annotation, field.metadata, name)
            keys |= {} if value is _LEFT else {name: value}
        return keys


def _is_drawn(field: FieldInfo) -> bool:
    has_kinds = any(map(_kinds, families(field.annotation, field.metadata)))
    return has_kinds or _section(field.annotation) is not None


def _kinds(family: Family[Any]) -> Sequence[str]:
    return [*family.builtin, *TRIALS.get(family.name, [])]


def _refusal(keys: Mapping[str, Any]) -> str:
    """Reason why an experiment is refused, or "" where it is not."""
    try:
        fed.Experiment(**keys)
    except FedError as error:
        return str(error)
    except Exception:
        return ""  # whoever tries it finds out
    return ""


def _section(annotation: Any) -> type[Section] | None:
    """The section of fixed keys that a field holds, if it does."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, Section) and not issubclass(annotation, Component) else None
    return next(filter(None, map(_section, get_args(annotation))), None)


def write_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Tiny files for all kinds that read some; family and kind → the keys that name them."""
    generator = np.random.default_rng(0)
    rows = [[*generator.normal(size=3).round(3), row % 3, row % 8, row // 8 % 2] for row in range(64)]
    lines = [",".join(map(str, row)) for row in [["a", "b", "c", "label", "client", "split"], *rows]]
    (folder / "table.csv").write_text("\n".join(line.rsplit(",", 1)[0] for line in lines) + "\n")
    columns = {"x": np.array([row[:3] for row in rows], np.float32), "label": np.array([row[3] for row in rows])}
    np.savez(folder / "arrays.npz", allow_pickle=False, **columns)
    for part in ("train", "t10k"):
        images, labels = generator.integers(0, 256, (40, 6, 6), np.uint8), np.arange(40, dtype=np.uint8) % 4
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, 40, 6, 6) + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, 40) + labels.tobytes())
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 256, (6, 6, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    plays = [f"{speaker}:\n{'to be or not to be ' * 12}\n\n" for speaker in ("Hamlet", "Ophelia", "King", "Queen")]
    (folder / "play.txt").write_text("".join(plays * 2))
    (folder / "devices.csv").write_text(
        "client,samples_per_s,down_bytes_per_s,up_bytes_per_s,latency_s\n0,100,1e6,1e6,0.01\n1,20,1e5,1e5,0.1\n"
    )
    spells = "".join(f"{client},{client / 10},{100 + client}\n" for client in range(8))
    (folder / "spells.csv").write_text(f"client,begins_s,ends_s\n{spells}")
    (folder / "edges.txt").write_text("".join(f"{peer} {(peer + 1) % 8}\n" for peer in range(8)))
    return {
        "data csv": {"path": str(folder / "table.csv"), "label": "label"},
        "data npz": {"path": str(folder / "arrays.npz"), "label": "label"},
        "data idx": {"path": str(folder)},
        "data image_folder": {"path": str(folder / "images")},
        "data text": {"path": str(folder / "play.txt"), "sequence_length": 8},
        "devices trace": {"path": str(folder / "devices.csv")},
        "availability trace": {"path": str(folder / "spells.csv")},
        "topology edges": {"file": str(folder / "edges.txt")},
    }
