"""Checks that a run to resume is the one that was begun, and finds the newest checkpoint that fits it."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fed.clients.fingerprint import EARLIER_MODULES, code_sha256, model_sha256
from fed.clients.setup import Preparation
from fed.config.experiment import Experiment
from fed.errors import InvalidCheckpoint, InvalidExperiment, InvalidInput, located
from fed.privacy.experiment_digest import BUDGET_KEY, budget_only_ends
from fed.storage.checkpoints import Checkpoints, Tree
from fed.storage.run_folder import RunFolder
from fed.storage.run_reader import summary_of
from fed.vectors.layout import Layout
from fed.wire.payloads import described

__all__ = [
    "MAY_DIFFER",
    "Parts",
    "check_alike",
    "check_given_parts",
    "check_parts",
    "newest_checkpoint",
    "run_fingerprint",
]

MAY_DIFFER = frozenset({"name", "checkpoints", "fixed", "tracking", "simulation.workers", "simulation.executor"})
"""Keys that change no bit of the results."""

_log = logging.getLogger(__name__)


def check_given_parts(given: Sequence[str], folder: RunFolder) -> None:
    """Refuse other parts given in Python beside the experiment than the run began with.

    Args:
        given: names of these parts.
        folder: folder of the run to resume.

    Raises:
        InvalidInput: if they are others.
    """
    begun = folder.given()
    if set(given) != set(begun):
        again = "".join(f"{name}=…, " for name in begun)
        raise InvalidInput(
            f"a run is resumed as it began: {folder.path} with {_listed(begun)} given in Python beside the "
            f"experiment, got {_listed(given)}: call fed.simulate(experiment, {again}output={str(folder.path)!r}, "
            "resume=True)"
        )


@dataclass(frozen=True)
class Parts:
    """Data and code of a run, whose hashes its folder keeps.

    Args:
        prepared: preparation of the run.
        data: SHA-256 of the samples that this process has; None where it has none.
    """

    prepared: Preparation
    data: str | None

    def kept(self) -> dict[str, Any]:
        """Facts for the run's folder: the hashes, as ``sha256``, and the ``inputs`` that its model is made with."""
        inputs = self.prepared.inputs
        return {"inputs": inputs._asdict() if inputs else {}, "sha256": self.sha256()}

    def sha256(self, modules: Mapping[str, str] | None = None) -> dict[str, str]:
        """Each part's name → its SHA-256.

        Args:
            modules: one of ``EARLIER_MODULES``, for the hashes that earlier code made; None: the hashes of today.
        """
        recipe = self.prepared.recipe
        code = {
            "model": model_sha256(self.prepared.module, modules),
            "loss": code_sha256(recipe.loss, modules),
            "metrics": code_sha256(recipe.metrics, modules),
        }
        if recipe.collate is not None:
            code["collate"] = code_sha256(recipe.collate.function, modules)
        # A server has no data of an app's, and the code of apps is the nodes' own.
        if self.prepared.app is not None and self.data is not None:
            code["app"] = code_sha256(self.prepared.app.callable, modules)
        data = {} if self.data is None else {"data": self.data}
        fixed = self.prepared.fixed_part()
        return {**data, **code, **({"fixed part": described(fixed).sha256} if fixed else {})}


def newest_checkpoint(
    fingerprint: Mapping[str, Any], folder: RunFolder, objects: Mapping[str, Any], parts: Parts
) -> tuple[int, Tree] | None:
    """The newest whole checkpoint whose rounds all have metrics; None where the run begins again.

    A run begins again only where it may have ended before its first checkpoint. Damaged files that are newer are named
    in a warning, with the rounds that are repeated.

    Args:
        fingerprint: fingerprint of the run, from :func:`run_fingerprint`.
        folder: folder of the run to resume.
        objects: section → object of the experiment, where no file can name it.
        parts: data and code of the run.

    Raises:
        InvalidExperiment: if the run began with another experiment, other clients or another model.
        InvalidInput: if it began on nodes and is to be simulated, or the other way round, or with other data or code,
            or its metrics cannot be read.
        InvalidCheckpoint: if no checkpoint fits, and the metrics of rounds would be lost.
    """
    experiment = fingerprint["experiment"]
    begun = folder.experiment(objects)
    file = str(folder.path / "experiment.yaml")
    may_differ = _may_differ(fingerprint)
    # Batching, where it is not given, follows from the model, which comes first.
    check_alike(experiment, begun.dump(), where=file, may_differ={*may_differ, "simulation"})
    rounds = folder.recorded_rounds()
    kept = Checkpoints(folder.checkpoints, 1).newest(rounds)
    if kept is None:
        _check_may_begin_again(begun.checkpoints.every, rounds, folder)
    else:
        number, state = kept
        written_by = state["fingerprint"]
        where = f"the checkpoint of round {number}"
        _check_place(fingerprint["shapes"]["clients"], written_by["shapes"]["clients"], folder)
        with located(where):
            written = _completed(written_by["experiment"], objects)
        check_alike(experiment, written, where=where, may_differ={*may_differ, "simulation"})
        check_alike(fingerprint["shapes"], written_by["shapes"], where=where)
    check_parts(parts, folder)
    # Compared once more, now with the batching: without a checkpoint nothing else has compared it.
    # A run of an earlier version has not written down on which device it was.
    free = {*may_differ, "simulation.device"} if begun.simulation.device == "auto" else may_differ
    check_alike(experiment, begun.dump(), where=file, may_differ=free)
    return kept


def _may_differ(fingerprint: Mapping[str, Any]) -> Collection[str]:
    """Keys in which a run that is resumed may differ from what it began with.

    Args:
        fingerprint: fingerprint of the run, from :func:`run_fingerprint`.
    """
    is_simulated = fingerprint["shapes"]["clients"] is not None
    if is_simulated and budget_only_ends(fingerprint["experiment"].get("privacy")):
        return MAY_DIFFER | {BUDGET_KEY}
    return MAY_DIFFER


def _check_may_begin_again(every: int | None, rounds: int, folder: RunFolder) -> None:
    """Refuse a run whose checkpoint is missing; one that ended before its first checkpoint may begin again."""
    summarised = (summary_of(folder.path) or {}).get("rounds")
    # Metrics may have been removed, and the summary still tells how far the run was.
    rounds = max(rounds, summarised) if isinstance(summarised, int) else rounds
    # A line of metrics is written before the checkpoint of its round.
    if rounds > (every or 0):
        why = "checkpoints.every is null" if every is None else f"{folder.checkpoints} holds none"
        raise InvalidCheckpoint(
            f"a run with metrics of {rounds} rounds needs a checkpoint to be resumed, but {why}: restore it, or run "
            "the experiment again with --overwrite or in another folder"
        )
    if rounds:
        _log.warning("%s ended before its first checkpoint: rounds 1 to %d are repeated", folder.path, rounds)


def run_fingerprint(experiment: Experiment, layout: Layout, clients: int | None) -> dict[str, Any]:
    """The experiment and the shapes that a run shares with its checkpoints.

    Args:
        experiment: experiment of the run.
        layout: layout of the model.
        clients: number of clients, where it must stay the same; None on real nodes.
    """
    parts = {part.name: list(part.shape) for part in (*layout.trained, *layout.averaged, *layout.integers)}
    return {"experiment": experiment.dump(), "shapes": {"clients": clients, "model": parts}}


def _check_place(clients: int | None, clients_begun: int | None, folder: RunFolder) -> None:
    """Refuse to simulate a run on real nodes, whose clients are not counted, and the other way round."""
    if (clients_begun is None) != (clients is None):
        was_real = clients_begun is None
        what = "a run on real nodes" if was_real else "a simulation"
        command = "server" if was_real else "simulate"
        raise InvalidInput(f"{folder.path} is {what}: resume it by fed {command} --resume {folder.path}")


def _completed(written: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Every value of a checkpoint's experiment: keys that are newer than the checkpoint have their defaults.

    Args:
        written: experiment as the checkpoint has it.
        objects: section → object of the experiment, where no file can name it.

    Raises:
        InvalidExperiment: if this code cannot read it.
    """
    # A checkpoint holds the text of an object, not the object: the texts are what is compared.
    texts = {name: written[name] for name in objects if name in written}
    return {**Experiment.of(written, objects).dump(), **texts}


def check_alike(
    now: Mapping[str, Any], begun: Mapping[str, Any], *, where: str, may_differ: Collection[str] = MAY_DIFFER
) -> None:
    """Refuse a run that does not go on as it began, but for keys that may differ.

    Args:
        now: experiment as it is given now, as :meth:`Experiment.dump` returns it.
        begun: experiment that the run began with.
        where: file or checkpoint that has it, for the error.
        may_differ: keys, and sections, that need not be alike.

    Raises:
        InvalidExperiment: if another key differs.
    """
    flat_now = _flat(now)
    flat_begun = _flat(begun)
    for key in {**flat_begun, **flat_now}:
        is_free = any(key == name or key.startswith(f"{name}.") for name in may_differ)
        if not is_free and flat_now.get(key) != flat_begun.get(key):
            raise InvalidExperiment(
                f"a run is resumed as it began, but {key} is {flat_begun.get(key)} in {where}, got "
                f"{flat_now.get(key)}: take that back, or run the experiment anew in another folder"
            )


def check_parts(parts: Parts, folder: RunFolder) -> None:
    """Refuse to go on with other data or code than the run began with.

    Args:
        parts: data and code as they are now.
        folder: folder of the run.

    Raises:
        InvalidInput: if they are others.
    """
    begun = folder.parts("sha256")
    # Runs of earlier versions have no hashes, and must be resumed all the same.
    if not begun:
        _log.warning("%s does not say which data and code it began with, so that these are not checked", folder.path)
    now = parts.sha256()
    differing = [name for name in begun if now.get(name) != begun[name]]
    earlier = [parts.sha256(modules) for modules in EARLIER_MODULES] if differing else []
    for name in differing:
        if all(hashes.get(name) != begun[name] for hashes in earlier):
            raise InvalidInput(
                f"a run is resumed with the {name} that it began with, but the SHA-256 of the {name} is "
                f"{begun[name][:12]}… in {folder.path / 'environment.json'}, got {(now.get(name) or 'none')[:12]}…: "
                "take that change back, or run the experiment anew in another folder"
            )


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted paths, with lists in place of tuples."""
    if isinstance(values, Mapping) and values:
        found = [_flat(inner, f"{path}.{key}" if path else str(key)) for key, inner in values.items()]
        return {key: value for part in found for key, value in part.items()}
    # YAML and checkpoints give lists where the experiment has tuples.
    return {path: list(values) if isinstance(values, tuple) else values}


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) or "nothing"
