"""Documents of the command line: an experiment or a comparison, from a file and ``--set``, shown or written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import fed
from fed.cli.options import File, Settings
from fed.errors import InvalidInput, located

__all__ = ["changes", "flower_app", "read", "read_comparison", "read_experiment", "schema", "show"]

# No experiment has these keys, so that one of them tells a comparison from an experiment.
_OF_COMPARISONS = ("base", "compare", "grid", "random")


def show(
    file: File,
    settings: Settings = None,
    batching: Annotated[
        bool, typer.Option("--batching", help="Make the model too, and say how clients will train, and why.")
    ] = False,
) -> None:
    """Print every value in force, of an experiment or of a comparison, as YAML."""
    from fed.config import yaml

    document = read(file, settings)
    typer.echo(yaml.dump(_in_force(document)), nl=False)
    lines: Iterable[str] = _batching(document) if batching else ()
    if batching and not settings and (training := _training_of_the_run(file)):
        lines = [f"simulation: {training}; so the run has trained"]
    for line in lines:
        typer.echo(f"# {line}")


def schema(
    document: Annotated[
        Literal["experiment", "comparison"], typer.Argument(help="Document to print the schema of.")
    ] = "experiment",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a reference of both documents instead.")] = False,
) -> None:
    """Print the JSON schema by which editors complete and check the YAML, or a reference of all keys in Markdown."""
    from fed.config import reference
    from fed.config.schema import schema_text

    kind = fed.Experiment if document == "experiment" else fed.Comparison
    typer.echo(reference.markdown() if markdown else schema_text(kind), nl=False)


def flower_app(
    file: File,
    output: Annotated[Path, typer.Option(help="The folder to write the app into, a new one.", metavar="DIR")],
    settings: Settings = None,
) -> None:
    """Write an experiment as a Flower app, which flwr run starts on any Flower federation."""
    from fed.server.flower.app import write_app

    write_app(read_experiment(file, settings), output)
    typer.echo(f"{output}: a Flower app; start it with: flwr run {output} FEDERATION --stream")


def read(path: Path, settings: Sequence[str] | None) -> "fed.Experiment | fed.Comparison":
    """Read a file; the values of ``--set`` replace its own.

    Raises:
        InvalidInput: one line, which begins with the file, for each thing wrong.
    """
    from fed.config import yaml
    from fed.config.experiment import with_overrides

    values = changes(settings or ())
    keys = yaml.load(path)
    # Before it is checked, so that mistakes are told of the document that was meant.
    document = fed.Comparison if any(key in keys for key in _OF_COMPARISONS) else fed.Experiment
    if document is fed.Comparison:
        _refuse_keys_of_experiments(values, path)
    with located(f"{path} with --set" if settings else path):
        return document(**with_overrides(keys, values))


def _refuse_keys_of_experiments(values: Mapping[str, Any], path: Path) -> None:
    """Refuse ``--set`` of an experiment's key in a comparison, with the key that is meant."""
    for key, value in values.items():
        section = key.partition(".")[0]
        if section in fed.Comparison.model_fields or section not in fed.Experiment.model_fields:
            continue
        meant = f"--set 'seeds=[{value}]'" if key == "seed" else f"--set base.{key}=…"
        raise InvalidInput(
            f"--set {key}: {path} holds a comparison, whose experiments have their keys in base: write {meant}"
        )


def read_experiment(path: Path, settings: Sequence[str] | None) -> "fed.Experiment":
    """Read an experiment; a comparison is refused with the command that takes it."""
    document = read(path, settings)
    if not isinstance(document, fed.Experiment):
        raise InvalidInput(f"{path} holds a comparison, not an experiment: run it with fed compare {path}")
    return document


def read_comparison(path: Path, settings: Sequence[str] | None) -> "fed.Comparison":
    """Read a comparison; an experiment is refused with the command that takes it."""
    document = read(path, settings)
    if isinstance(document, fed.Experiment):
        raise InvalidInput(
            f"{path} holds an experiment, not a comparison (it has none of the keys {', '.join(_OF_COMPARISONS)}): "
            f"run it with fed simulate {path}"
        )
    return document


def changes(settings: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Path of a key → its value, from texts such as ``rounds.count=5``, given with an option.

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
            raise typer.BadParameter(problem, param_hint=option)
        with located(f"{option} {setting}"):
            value = yaml.parse(text)
        values.pop(path.strip(), None)  # the last one counts, and where it stands
        values[path.strip()] = value
    return values


def _in_force(document: "fed.Experiment | fed.Comparison") -> dict[str, Any]:
    """Every value in force; but where apps train, not those that they have no use for."""
    from fed.config.compatibility import without_use_for_apps

    if isinstance(document, fed.Experiment):
        values = document.dump()
        experiments = [document]
        parts = [values]
    else:
        values = document.in_force()
        experiments = [*document.variants().values()]
        parts = [values["base"], *values["compare"]]
    if all(experiment.app is not None for experiment in experiments):
        for path in without_use_for_apps(type(experiments[0].local)):
            for part in parts:
                _leave_out(path, part)
    return values


def _leave_out(path: str, values: dict[str, Any]) -> None:
    """Remove a section, or a key of one, where it is there."""
    section, _, key = path.partition(".")
    if not key:
        values.pop(section, None)
    elif values.get(section) is not None:
        values[section].pop(key, None)


def _training_of_the_run(file: Path) -> str | None:
    """Words on how the clients of a run have trained, where the file is of its folder; None where nothing says it."""
    from fed.storage.run_reader import summary_of

    if file.name != "experiment.yaml":
        return None
    training = (summary_of(file.parent) or {}).get("training")
    return training if isinstance(training, str) else None


def _batching(document: "fed.Experiment | fed.Comparison") -> Iterator[str]:
    """Sentence for each variant: whether its clients train in groups or one by one, and the reason."""
    from fed.simulations.simulation import Simulation

    variants = {"simulation": document} if isinstance(document, fed.Experiment) else document.variants()
    for name, experiment in variants.items():
        parts = {"data": experiment.data, "model": experiment.model, "loss": experiment.loss}
        given = [part for part, section in parts.items() if section is None and experiment.app is None]
        if given:
            yield (
                f"{name}: how clients will train is not known: {' and '.join(given)} must be given in Python, where "
                'fed.simulate says it, as run.summary["training"]'
            )
            continue
        try:
            chosen = Simulation(experiment).batching
        except Exception as error:  # whatever a user's model or data raise: the values are shown all the same
            reason = str(error) if isinstance(error, InvalidInput) else f"{type(error).__name__}: {error}"
            yield f"{name}: how clients will train is not known: {reason}".splitlines()[0]
            continue
        yield f"{name}: {chosen}"
