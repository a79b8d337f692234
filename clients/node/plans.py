"""Server's plan, as a node takes it: an experiment that names no code unknown to the node."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fed.config.compatibility import check_deployment
from fed.config.evaluation import ByClients
from fed.config.experiment import Experiment
from fed.config.table import TableSection
from fed.errors import InvalidExperiment

__all__ = ["as_experiment", "as_table", "hold_to_allowed", "part_of_nodes", "table_text"]

_MOST_LETTERS = 1 << 20
_OF_NODES = (
    *("name", "seed", "data_seed", "model", "loss", "metrics", "local", "algorithm", "evaluation"),
    *("uplink", "error_feedback", "downlink", "secure_aggregation"),
)


def part_of_nodes(experiment: Experiment) -> dict[str, Any]:
    """Sections of an experiment that nodes need to know."""
    keys = experiment.dump()
    if not isinstance(experiment.evaluation.make(), ByClients):
        keys["metrics"] = []  # they score nothing, and need not know the code of any
    if keys["model"]["train"] is None:
        del keys["model"]["train"]  # nodes of an older version do not know it
    table = {} if keys["table"] is None else {"table": keys["table"]}  # likewise
    collate = {} if keys["collate"] is None else {"collate": keys["collate"]}  # likewise
    stages = {} if keys["stages"] is None else {"stages": keys["stages"]}  # nodes of an older version know none
    return {**{key: keys[key] for key in _OF_NODES}, **stages, **collate, **table, "data": None}


def as_experiment(plan: str, allowed: Sequence[str]) -> Experiment:
    """A plan's experiment, after a check that it names no code that is not accepted.

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
    known = {*_OF_NODES, "stages", "collate", "table", "data"}
    # An unknown section may ask for something that this version would not check.
    if others := sorted(keys.keys() - known) or (["data"] if keys.get("data") is not None else []):
        raise InvalidExperiment(f"the server's plan must hold only keys that nodes use, got {others[0][:40]!r}")
    hold_to_allowed(keys, allowed)  # before validation, which imports the code that is named
    try:
        experiment = Experiment(**keys)
    except RecursionError:
        raise InvalidExperiment("the server's plan must not be nested so deeply") from None
    check_deployment(experiment)
    return experiment


def table_text(experiment: Experiment) -> str:
    """The experiment's schema of tables as nodes are told it; empty where it has none."""
    return "" if experiment.table is None else json.dumps(experiment.table.model_dump(mode="json"))


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


def hold_to_allowed(experiment: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse an experiment that names code which this node does not accept; nothing is imported before.

    Args:
        experiment: keys of the experiment with their values.
        allowed: list of accepted names, such as ``python:package.module:Name``.

    Raises:
        InvalidExperiment: if it names others.
    """
    # A list in place of recursion: a nested plan must not end in a RecursionError here.
    named: list[Any] = [experiment]
    while named:
        part = named.pop()
        if isinstance(part, Mapping):
            named += part.values()
        elif isinstance(part, list | tuple):
            named += part
        elif isinstance(part, str) and part.startswith("python:") and part not in allowed:
            raise InvalidExperiment(
                f"this node runs only code that --allow names, got {part}: if you trust it, start fed client with "
                f"--allow {part}"
            )
