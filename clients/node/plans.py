"""Server's plan, as a node takes it: an experiment that names no code unknown to the node."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fed.config.apps import ArraySpec
from fed.config.compatibility import check_deployment
from fed.config.components import named
from fed.config.evaluation import ByClients
from fed.config.experiment import Experiment
from fed.config.table import TableSection
from fed.errors import InvalidExperiment

__all__ = [
    "as_experiment",
    "as_table",
    "check_code",
    "check_schema",
    "code_of_nodes",
    "hold_to_allowed",
    "names_sha256",
    "part_of_nodes",
    "schema_text",
    "table_text",
]

_MOST_LETTERS = 1 << 20
_OF_NODES = (
    *("name", "seed", "data_seed", "model", "loss", "metrics", "local", "algorithm", "evaluation"),
    *("uplink", "error_feedback", "downlink", "secure_aggregation"),
)


def part_of_nodes(experiment: Experiment, arrays: Sequence[ArraySpec] | None = None) -> dict[str, Any]:
    """Sections of an experiment that nodes need to know.

    Args:
        experiment: experiment of the server.
        arrays: name, type and shape of each array of an app's model; None where no app trains.
    """
    keys = experiment.dump()
    if not isinstance(experiment.evaluation.make(), ByClients):
        keys["metrics"] = []  # they score nothing, and need not know the code of any
    if keys["model"] is not None and keys["model"]["train"] is None:
        del keys["model"]["train"]  # nodes of an older version do not know it
    table = {} if keys["table"] is None else {"table": keys["table"]}  # likewise
    collate = {} if keys["collate"] is None else {"collate": keys["collate"]}  # likewise
    stages = {} if keys["stages"] is None else {"stages": keys["stages"]}  # nodes of an older version know none
    private = {} if keys["privacy"] is None else {"privacy": keys["privacy"]}  # likewise
    if keys["privacy"] is not None and keys["privacy"]["bit_weight"] is None:
        del keys["privacy"]["bit_weight"]  # likewise
    if keys["privacy"] is not None and (keys["privacy"]["kind"] == "dp_ftrl" or keys["privacy"]["unit"] == "sample"):
        # What a message costs, or the noise of a client's steps, follows from it.
        private["rounds"] = {"count": experiment.rounds.make().count}
    found = {**{key: keys[key] for key in _OF_NODES}, **stages, **private, **collate, **table, "data": None}
    if arrays is None:
        return found
    # The first arrays are the server's business: nodes are told names, types and shapes.
    told = {**keys["app"], "initial": None, "arrays": [spec.model_dump(mode="json") for spec in arrays]}
    return {**found, "app": told}


def as_experiment(plan: str, allowed: Sequence[str], app: str | None = None) -> Experiment:
    """A plan's experiment, after a check that it names no code that is not accepted.

    Args:
        plan: experiment in JSON, as the server told it.
        allowed: list of accepted names, such as ``python:package.module:Name``.
        app: name of the node's own app, which takes the place of the server's; None: the node has none.

    Raises:
        InvalidExperiment: if it names such code, is no experiment, or is one that nodes cannot run.
    """
    # Before it is parsed, for a plan comes from a server that need not be honest.
    if len(plan) > _MOST_LETTERS:
        raise InvalidExperiment(f"the server's plan must have at most {_MOST_LETTERS} letters, got {len(plan)}")
    try:
        keys = json.loads(plan)
    except (ValueError, RecursionError) as error:
        raise InvalidExperiment(f"the server's plan must be JSON: {type(error).__name__}: {error}") from None
    if not isinstance(keys, dict):
        raise InvalidExperiment("the server's plan must be a mapping")
    known = {*_OF_NODES, "stages", "privacy", "rounds", "collate", "table", "data", "app"}
    # An unknown section may ask for something that this version would not check.
    if others := sorted(keys.keys() - known) or (["data"] if keys.get("data") is not None else []):
        raise InvalidExperiment(f"the server's plan must hold only keys that nodes use, got {others[0][:40]!r}")
    _take_own_app(keys, app)
    # Before validation, which imports the code that is named.
    hold_to_allowed(keys, allowed if app is None else [*allowed, app])
    try:
        experiment = Experiment(**keys)
    except RecursionError:
        raise InvalidExperiment("the server's plan must not be nested so deeply") from None
    check_deployment(experiment)
    return experiment


def table_text(table: TableSection | None) -> str:
    """A schema of tables as JSON; empty where there is none."""
    return "" if table is None else json.dumps(table.model_dump(mode="json"))


def schema_text(experiment: Experiment) -> str:
    """The schema by which nodes read their tables when they join, as JSON; empty where the experiment has none.

    It says nothing on standardizing, which may not be known by then and changes no shape.
    """
    return table_text(None if experiment.table is None else experiment.table.unscaled())


def check_schema(experiment: Experiment, told: str | None) -> None:
    """Check that a plan's tables are those by which the node has read its own when it joined.

    Another schema would be another question on the node's cells, which it answers by taking part or not.

    Args:
        experiment: experiment of the plan.
        told: schema by which the node has joined, as JSON; None: it has joined without one.

    Raises:
        InvalidExperiment: if they are others.
    """
    joined = None if told is None else as_table(told)
    planned = None if experiment.table is None else experiment.table.unscaled()
    if joined != planned:
        raise InvalidExperiment(
            "the server's plan must have the schema of tables by which this node has joined, got another: is it a "
            "server that you trust?"
        )


def as_table(text: str) -> TableSection:
    """A server's schema of tables, as a node takes it.

    Raises:
        InvalidExperiment: if it is none.
    """
    if len(text) > _MOST_LETTERS:
        raise InvalidExperiment(f"the server's schema must have at most {_MOST_LETTERS} letters, got {len(text)}")
    try:
        return TableSection(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise InvalidExperiment(f"the server's schema of tables is none: {problem}") from None


def _take_own_app(keys: dict[str, Any], app: str | None) -> None:
    """Put the node's own app in the place of the server's."""
    section = keys.get("app")
    if app is None and section is not None:
        raise InvalidExperiment("the run's clients are an app's: start fed client with --app MODULE:NAME")
    if app is not None:
        if not isinstance(section, dict) or not section.get("arrays"):
            raise InvalidExperiment("this node brings an app, and the server's experiment has no section app")
        keys["app"] = {**section, "kind": app}


def code_of_nodes(experiment: Experiment) -> list[str]:
    """Names of all code of users that a node needs for an experiment, sorted; an app is the node's own business."""
    section = experiment.dump()["app"] or {}
    of_app = {key: value for key, value in section.items() if key not in ("kind", "initial")}
    return sorted({*_code_named({**part_of_nodes(experiment), "app": of_app})})


def names_sha256(names: Sequence[str]) -> bytes:
    """Digest by which node and server know that they speak of the same names of code."""
    return hashlib.sha256(json.dumps([*names]).encode()).digest()


def check_code(names: Sequence[str], allowed: Sequence[str]) -> None:
    """Check, before a node joins, that it accepts a run's code, and that the code is there.

    Args:
        names: names of code that the server has told.
        allowed: list of accepted names, such as ``python:package.module:Name``.

    Raises:
        InvalidExperiment: if it does not accept one of them, or cannot import it.
    """
    _hold_names_to(allowed, names)  # whatever they look like: what is named is imported below
    for name in names:
        try:
            named(name)
        except InvalidExperiment as error:
            raise InvalidExperiment(f"{name}, which the run's experiment names: {error}") from None


def hold_to_allowed(experiment: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse an experiment that names code which this node does not accept; nothing is imported before.

    Args:
        experiment: keys of the experiment with their values.
        allowed: list of accepted names, such as ``python:package.module:Name``.

    Raises:
        InvalidExperiment: if it names others.
    """
    _hold_names_to(allowed, _code_named(experiment))


def _hold_names_to(allowed: Sequence[str], names: Iterable[str]) -> None:
    if refused := sorted({*names} - {*allowed}):
        asked = " ".join(f"--allow {name}" for name in refused)
        raise InvalidExperiment(
            f"this node runs only code that --allow names, got {', '.join(refused)}: if you trust it, start fed client "
            f"with {asked}"
        )


def _code_named(keys: Mapping[str, Any]) -> Iterator[str]:
    """Names of code of users in an experiment's keys, at any depth."""
    # A list in place of recursion: a nested plan must not end in a RecursionError here.
    waiting: list[Any] = [keys]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, str) and part.startswith("python:"):
            yield part
