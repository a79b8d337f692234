"""Data of a node, described in a file that stays on the node."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from fed.config.device_names import DeviceName
from fed.config.document import Document
from fed.config.registry import DATA, PRIVACIES, DataSection
from fed.config.sections import FixedSection
from fed.config.validation import Section
from fed.errors import InvalidInput

if TYPE_CHECKING:
    from fed.config.experiment import Experiment

__all__ = ["NodeData", "NodePrivacy"]

_KINDS_OF_FILES = ("csv", "parquet", "npz")
"""Kinds of data that are files with the kind's name for an ending."""


class NodePrivacy(Section):
    """Owner's limits on what may be learned of the node's data, in all runs that it takes part in.

    Example:
        >>> NodePrivacy(kinds=["local", "distributed"], least_noise_multiplier=1.0).budget_epsilon is None
        True
    """

    budget_epsilon: PositiveFloat | None = None
    """ε that all releases with messages of this node may cost together: the node refuses a task that would pass it.
    It counts no amplification by sampling, for it cannot rely on what others do not know. Null for no budget."""
    delta: Annotated[float, Field(ge=1e-30, lt=1)] = 1e-5
    """δ of that ε."""
    kinds: Annotated[list[str], Field(min_length=1)] | None = None
    """Kinds of privacy that the node takes part in, such as local and distributed, under which it need not trust the
    coordinator; null for all."""
    least_noise_multiplier: PositiveFloat | None = None
    """Smallest noise_multiplier of a plan that the node takes part in; null for any."""

    @field_validator("kinds")
    @classmethod
    def _hold_kinds(cls, kinds: list[str] | None) -> list[str] | None:
        for kind in kinds or ():
            if kind not in PRIVACIES.builtin and not kind.startswith("python:"):
                raise ValueError(f"each must be one of {', '.join(PRIVACIES.builtin)}, got {kind}: choose among these")
        return kinds

    @model_validator(mode="after")
    def _hold_delta(self) -> Self:
        if self.budget_epsilon is None and "delta" in self.model_fields_set:
            raise ValueError(
                f"delta is that of budget_epsilon, got delta {self.delta:g} and no budget: give both or neither"
            )
        return self


class NodeData(Document):
    """Data of one node.

    Example:
        >>> NodeData(data={"kind": "npz", "path": "scans.npz"}).client is None
        True
    """

    data: Annotated[DataSection, DATA] | None = None
    """Source of the samples, as in an experiment; null where an app has data of its own."""
    app: Annotated[str, Field(pattern="^python:[^:]+:[^:]+$")] | None = None
    """Code of this node's own client in the place of data, python:package.module:Name, as in an experiment's app."""
    node_config: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Facts of this node that its app is told, such as partition-id; Flower's node_config."""
    device: DeviceName = "auto"
    """Device of this node that trains and evaluates: auto, cpu, cuda, a GPU such as cuda:1, or mps; auto: the first GPU
    where there is one, else the CPU. The option --device comes before it."""
    deterministic: bool = True
    """True if this node's GPU computes by deterministic algorithms alone; an operation that has none is refused."""
    client: NonNegativeInt | str | None = None
    """Name or number of the source's client that this node is; unless given, the whole source is this node's."""
    seed: NonNegativeInt = 0
    """Seed by which the source is dealt to its clients; the experiment's data_seed gives a node the samples that its
    client has in a simulation."""
    fixed: FixedSection | None = None
    """File of this node with the parameters that are not trained; null: the server sends them once, where its own are
    others than the model makes."""
    privacy: NodePrivacy | None = None
    """Limits of this node's owner on privacy, over all runs; null for none. With some, if only {}, the node takes part
    in private runs alone."""

    @classmethod
    def load(cls, path: str | Path, objects: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Read a YAML file, as :meth:`Document.load`; a file of samples in its place is refused with what to write."""
        kind = Path(path).suffix.lower().removeprefix(".")
        if kind in _KINDS_OF_FILES:
            raise InvalidInput(
                f"{path} holds samples, and a node's data file describes them: write "
                f"`data: {{kind: {kind}, path: {path}}}` into a file such as data.yaml, and give that"
            )
        return super().load(path, objects)

    def on(self, device: str | None) -> Self:
        """The same node, which computes on another device.

        Args:
            device: name of the device; None: that of this description.

        Raises:
            InvalidExperiment: if there is no device of that name.
        """
        return self if device is None else type(self)(**{**self.given_keys(), "device": device})

    def experiment_of_node(self, experiment: "Experiment") -> "Experiment":
        """The experiment with what is this node's own to say: its fixed parameters, and how its GPU computes.

        Args:
            experiment: experiment as the server or the peers have it.
        """
        simulation = experiment.simulation.model_copy(update={"deterministic": self.deterministic})
        return experiment.model_copy(update={"fixed": self.fixed, "simulation": simulation})

    @model_validator(mode="after")
    def _hold_to_one_source(self) -> Self:
        if (self.data is None) == (self.app is None):
            got = "both" if self.data is not None else "neither"
            raise ValueError(f"a node has either data or an app, got {got}: give one of the keys data and app")
        return self

    @model_validator(mode="after")
    def _hold_to_one_client(self) -> Self:
        """Refuse a source that is dealt to several clients, of which none is this node."""
        if self.data is None or self.client is not None or self.data.clients == 1:
            return self
        dealing = sorted({"clients", "partition"} & self.data.model_fields_set)
        if dealing:
            keys = " and ".join(f"data.{key}" for key in dealing)
            raise ValueError(
                f"{keys}: the source is dealt to several clients, and no key says which of them this node is: add one "
                "such as client: 0, or remove what deals it, to give this node all samples"
            )
        return self
