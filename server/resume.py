"""What a run that is gone on with must share with the one that was begun, held to before anything is changed."""

from collections.abc import Mapping, Sequence
from typing import Any

from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment, InvalidInput
from fed.layout import Layout
from fed.storage.checkpoints import Checkpoints, Tree
from fed.storage.run_folder import RunFolder

__all__ = ["begun_as", "hold_given", "last_kept"]

_MAY_DIFFER = {"name", "checkpoints", "simulation.workers"}


def hold_given(given: Sequence[str], folder: RunFolder) -> None:
    """Hold what is given in Python beside the experiment to what the run was begun with.

    Args:
        given: the names of these parts.
        folder: the run's.

    Raises:
        InvalidInput: if they are others.
    """
    begun = folder.given()
    if set(given) != set(begun):
        again = "".join(f"{name}=…, " for name in begun)
        raise InvalidInput(
            f"a run is gone on with as it was begun: {folder.path} with {_listed(begun)} given in Python beside the "
            f"experiment, got {_listed(given)}: call fed.simulate(experiment, {again}output={str(folder.path)!r}, "
            "resume=True)"
        )


def last_kept(begun: Mapping[str, Any], keep: int, folder: RunFolder) -> tuple[int, Tree] | None:
    """The last whole checkpoint of a run; None if it has none.

    Args:
        begun: what :func:`begun_as` says of the run as it is to go on.
        keep: how many checkpoints it keeps.
        folder: the run's.

    Raises:
        InvalidExperiment: if another experiment was begun, or one on other clients or with another model.
        InvalidInput: if it was begun on nodes and is to be simulated, or the other way round.
        InvalidCheckpoint: if there are checkpoints, and none is whole.
    """
    _hold_alike(begun["experiment"], folder.experiment().dump(), str(folder.path / "experiment.yaml"))
    kept = Checkpoints(folder.checkpoints, keep).newest()
    if kept is not None:
        _hold_to_place(begun["shapes"]["clients"], kept[1]["begun"]["shapes"]["clients"], folder)
        where = f"the checkpoint of round {kept[0]}"
        _hold_alike(begun["experiment"], kept[1]["begun"]["experiment"], where)
        _hold_alike(begun["shapes"], kept[1]["begun"]["shapes"], where)
    return kept


def begun_as(experiment: Experiment, layout: Layout, clients: int | None) -> dict[str, Any]:
    """What tells a run from others, for its checkpoints.

    Args:
        experiment: what is run.
        layout: the model's.
        clients: how many there are, if that must stay so.
    """
    parts = {part.name: list(part.shape) for part in (*layout.trained, *layout.averaged, *layout.integers)}
    return {"experiment": experiment.dump(), "shapes": {"clients": clients, "model": parts}}


def _hold_to_place(clients: int | None, clients_begun: int | None, folder: RunFolder) -> None:
    """Whether clients are simulated, which is to say counted, or nodes, stays as it was."""
    if clients_begun is None and clients is not None:
        raise InvalidInput(f"{folder.path} is a run on real nodes: go on with it by fed server --resume {folder.path}")
    if clients_begun is not None and clients is None:
        raise InvalidInput(f"{folder.path} is a simulation: go on with it by fed simulate --resume {folder.path}")


def _hold_alike(now: Mapping[str, Any], begun: Mapping[str, Any], where: str) -> None:
    flat_now, flat_begun = _flat(now), _flat(begun)
    for key in {**flat_begun, **flat_now}:
        is_free = any(key == name or key.startswith(f"{name}.") for name in _MAY_DIFFER)
        if not is_free and flat_now.get(key) != flat_begun.get(key):
            raise InvalidExperiment(
                f"a run is gone on with as it was begun, but {key} is {flat_begun.get(key)} in {where}, got "
                f"{flat_now.get(key)}: take that back, or run the experiment anew in another folder"
            )


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one, of dotted paths; tuples as lists."""
    if isinstance(values, Mapping) and values:
        found = [_flat(inner, f"{path}.{key}" if path else str(key)) for key, inner in values.items()]
        return {key: value for part in found for key, value in part.items()}
    return {path: list(values) if isinstance(values, tuple) else values}


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) or "nothing"
