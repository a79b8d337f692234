"""Data of a node, described in a file that stays on the node."""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from fed.config.document import Document
from fed.config.registry import DATA, DataSection

__all__ = ["NodeData"]


class NodeData(Document):
    """Data of one node.

    Example:
        >>> NodeData(data={"kind": "npz", "path": "scans.npz"}).client is None
        True
    """

    data: Annotated[DataSection, DATA] = Field()
    """Where they are, as in an experiment."""
    client: NonNegativeInt | str | None = None
    """Which of that source's clients this node is; the whole source is this node's unless given."""
    seed: NonNegativeInt = 0
    """By which the source is dealt to its clients: the experiment's data_seed, to hold what that simulates."""
