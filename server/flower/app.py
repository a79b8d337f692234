"""An experiment as a Flower app: the files that ``flwr run`` takes, and the ``ServerApp`` that they name."""

import logging
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from fed.config import yaml
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment, InvalidInput, OutputExists, os_errors_as
from fed.quantities import score_text
from fed.server.flower.fleet import FlowerFleet
from fed.server.grpc.deployment import Deployment
from fed.server.observer import Essential, Event, Kinds, RoundEnded
from fed.server.rounds.synchronous import Synchronous
from fed.server.telling import Observers
from fed.server.tracking import tracked
from fed.storage.run_folder import RunFolder
from fed.storage.scores import score_of, words_of
from fed.wire.flower_records import flower

__all__ = ["server_app", "write_app"]

_log = logging.getLogger(__name__)
_MODULE = '''\
"""{summary}."""

from pathlib import Path

from {home} import {maker}

app = {maker}(Path(__file__).with_name("experiment.yaml"))
'''


def write_app(experiment: Experiment, folder: Path) -> None:
    """Write a Flower app that runs an experiment.

    Args:
        experiment: experiment to run.
        folder: folder of the app; it is made, and must be empty if it is there.

    Raises:
        InvalidInput: if the experiment cannot be deployed, or the folder cannot be written to.
        OutputExists: if it holds anything.
    """
    # For its errors: what nodes cannot run is refused before anything is written.
    _deployment(experiment)
    name = _name_of(experiment)
    package = f"fed_{name.replace('-', '_')}"
    policy = experiment.rounds.make()
    cohort = policy.cohort if isinstance(policy, Synchronous) else "all"
    clients = experiment.data.clients if experiment.data is not None else None
    project = files("fed.server.flower").joinpath("app.toml").read_text(encoding="utf-8")
    texts = {
        "pyproject.toml": project.format(
            name=name,
            package=package,
            min_nodes=cohort if isinstance(cohort, int) else clients or 1,
        ),
        f"{package}/__init__.py": f'"""The experiment {name}."""\n',
        f"{package}/server_app.py": _MODULE.format(
            summary="The coordinator", home="fed.server.flower.app", maker="server_app"
        ),
        f"{package}/client_app.py": _MODULE.format(
            summary="A node", home="fed.clients.node.flower", maker="client_app"
        ),
        f"{package}/experiment.yaml": yaml.dump(experiment.dump()),
    }
    # An app is a whole folder: what is in it already would travel to the nodes, too.
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputExists(f"{folder} must be a new or an empty folder: choose another")
    with os_errors_as(InvalidInput, f"{folder} cannot be written to", "choose another"):
        (folder / package).mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")


def server_app(path: Path) -> Any:
    """Flower's ``ServerApp`` for an experiment.

    Args:
        path: path of the experiment's file, which travels with the app.

    Raises:
        InvalidInput: if Flower is not installed.
    """
    app = flower("serverapp").ServerApp()

    def main(grid: Any, context: Any) -> None:
        _log_to_flower()
        _serve(Experiment.load(path), grid, context.run_config, context.run_id)

    app.main()(main)
    return app


def _serve(experiment: Experiment, grid: Any, config: Mapping[str, Any], run: int) -> None:
    resume = bool(config.get("resume", False))
    output = Path(str(config.get("output") or f"runs/{_name_of(experiment)}-{run}")).expanduser().absolute()
    deployment = _deployment(experiment)
    folder = RunFolder.existing(output) if resume else RunFolder(output)
    observers = Observers(tracked([Essential(_RoundLog())], experiment, output))
    fleet = FlowerFleet(grid, accepts=deployment.accepts)
    _log.info("the run's folder is %s", output)
    min_nodes = int(config.get("min-nodes", 1))
    with folder.held(), deployment.keeping_ledger(folder, None, resume=resume):
        deployment.run(fleet, min_nodes, folder, resume=resume, observers=observers)


def _deployment(experiment: Experiment) -> Deployment:
    """Check that Flower's nodes can run the experiment."""
    policy = experiment.rounds.make()
    if isinstance(policy, Synchronous) and policy.deadline_s is not None and policy.partial_work == "accept":
        raise InvalidExperiment(
            "rounds.partial_work must be drop where Flower's nodes have a deadline, for they cannot tell how much of "
            f"their work fits before it, got accept with a deadline of {policy.deadline_s:g} s: write "
            "partial_work: drop, or use fed server"
        )
    if experiment.table is not None and experiment.table.sought:
        raise InvalidExperiment(
            "table.standardize must be numbers where Flower carries the messages, for its nodes have the experiment "
            "before any are found, got federated: write means and deviations, as the experiment.yaml of a run on fed "
            "server has them"
        )
    return Deployment(experiment)


def _name_of(experiment: Experiment) -> str:
    """The experiment's name, in a form that packages and folders may have."""
    return re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-") or "experiment"


class _RoundLog:
    """Line of the log for each round; in line, so that the log is in order."""

    kinds: Kinds = (RoundEnded,)

    def observe(self, event: Event) -> None:
        """Log a finished round."""
        assert isinstance(event, RoundEnded)
        line = event.line
        score = score_of(line)
        found = "" if score is None else f", test {words_of(score[0])} {score_text(score[1])}"
        _log.info("round %d: %d of %d replied%s", line["round"], line["replied"], line["selected"], found)


def _log_to_flower() -> None:
    """Log to the process's standard error, which ``flwr run --stream`` shows."""
    ours = logging.getLogger("fed")
    # Called again in one process, a second handler would say each line twice.
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
