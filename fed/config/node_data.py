"""Data of a node, described in a file that stays on the node."""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from fed.config.document import Document
from fed.config.registry import DATA, DataSection
from fed.config.sections import FixedSection

__all__ = ["NodeData"]


class NodeData(Document):
    """Data of one node.

    Example:
        >>> NodeData(data={"kind": "npz", "path": "scans.npz"}).client is None
        True
    """

    data: Annotated[DataSection, DATA] = Field()
    """Source of the samples, as in an experiment."""
    client: NonNegativeInt | str | None = None
    """Name or number of the source's client that this node is; unless given, the whole source is this node's."""
    seed: NonNegativeInt = 0
    """Seed by which the source is dealt to its clients; the experiment's data_seed gives a node the samples that its
    client has in a simulation."""
    fixed: FixedSection | None = None
    """File of this node with the parameters that are not trained; null: the server sends them once, where its own are
    others than the model makes."""
