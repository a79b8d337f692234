"""Documents of the command line: reads an experiment or a comparison from a file and ``--set``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fed.errors import InvalidExperiment, InvalidInput

if TYPE_CHECKING:
    from fed.config.comparison import Comparison
    from fed.config.experiment import Experiment

__all__ = ["changes", "in_force", "read", "read_comparison", "read_experiment"]

_OF_COMPARISONS = ("base", "compare", "grid", "random")


def read(path: Path, settings: Sequence[str]) -> "Experiment | Comparison":
    """Read a file; the values of ``--set`` replace its own.

    Raises:
        InvalidInput: one line, which begins with the file, for each thing wrong.
    """
    from fed.config import yaml

    values = changes(settings)
    keys = yaml.load(path)
    from fed.config.comparison import Comparison
    from fed.config.experiment import Experiment, with_overrides

    document = Comparison if any(key in keys for key in _OF_COMPARISONS) else Experiment
    try:
        return document(**with_overrides(keys, values))
    except InvalidExperiment as error:
        source = f"{path} with --set" if settings else f"{path}"
        raise InvalidExperiment("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from None


def read_experiment(path: Path, settings: Sequence[str]) -> "Experiment":
    """Read an experiment; a comparison is refused with the command that takes it."""
    from fed.config.experiment import Experiment

    document = read(path, settings)
    if not isinstance(document, Experiment):
        raise InvalidInput(f"{path} holds a comparison, not an experiment: run it with fed compare {path}")
    return document


def read_comparison(path: Path, settings: Sequence[str]) -> "Comparison":
    """Read a comparison; an experiment is refused with the command that takes it."""
    from fed.config.experiment import Experiment

    document = read(path, settings)
    if isinstance(document, Experiment):
        raise InvalidInput(
            f"{path} holds an experiment, not a comparison (it has none of the keys {', '.join(_OF_COMPARISONS)}): "
            f"run it with fed simulate {path}"
        )
    return document


def changes(settings: Sequence[str]) -> dict[str, Any]:
    """Path of a key → its value, from texts such as ``rounds.count=5``.

    Example:
        >>> changes(["rounds.count=5", "topology={kind: ring}"])
        {'rounds.count': 5, 'topology': {'kind': 'ring'}}
    """
    from fed.config import yaml

    values: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not all(part.strip() for part in path.split(".")):
            problem = f"must have the form key=value, as rounds.count=5, got {setting!r}"
            raise typer.BadParameter(problem, param_hint="--set")
        try:
            value = yaml.parse(text)
        except InvalidExperiment as error:
            raise InvalidExperiment(f"--set {setting}: {error}") from None
        values.pop(path.strip(), None)  # the last one counts, and where it stands
        values[path.strip()] = value
    return values


def in_force(document: "Experiment | Comparison") -> dict[str, Any]:
    """Every value in force, as a document that means the same.

    Of a comparison, ``base`` holds the sections that all variants share, and each variant the others, whole.
    """
    from fed.config.experiment import Experiment

    if isinstance(document, Experiment):
        return document.dump()
    variants = {name: experiment.dump() for name, experiment in document.variants().items()}
    first = next(iter(variants.values()))
    shared = [key for key in first if all(variant[key] == first[key] for variant in variants.values())]
    shared = [key for key in shared if key not in ("name", "seed")]
    return {
        "name": document.name,
        "base": {key: first[key] for key in shared},
        "compare": [
            {"name": name} | {key: value for key, value in variant.items() if key not in (*shared, "name", "seed")}
            for name, variant in variants.items()
        ],
        "seeds": document.seeds,
        "target_accuracy": document.target_accuracy,
    }
