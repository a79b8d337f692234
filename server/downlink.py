"""The way out of models, where their differences travel: each client is sent the differences that it lacks.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fed.storage.checkpoints import Tree, plain
from fed.vectors.randomness import Streams
from fed.wire.format import MOST_DIFFERENCES, Format
from fed.wire.messages import Answer, Difference, GlobalModel, Task
from fed.wire.reference import Movement, Reference

if TYPE_CHECKING:
    from fed.compression.codec import CodecState
    from fed.vectors.tensors import Tensor

__all__ = ["Downlink"]


class Downlink:
    """The coordinator's side of :class:`fed.wire.reference.Reference`.

    A client is known to have the version of the last task that it has answered.

    Args:
        message: the format of messages, with codecs of differences, or with movements that travel as factors.
        streams: random streams of the run.
        movement: function from factors to the movement that they stand for.
    """

    def __init__(self, message: Format, streams: Streams, movement: Movement) -> None:
        self._message = message
        self._streams = streams
        self._movement = movement if message.is_factored else None
        self._version = -1
        self._reference: Reference | None = None
        self._state: CodecState = {}
        self._differences: tuple[Difference, ...] = ()
        self._missing: dict[str, tuple[Difference, ...]] = {}  # name of the version that a client has → what it lacks
        self._known: dict[int | str, str] = {}  # client → name of the version that it has

    def model(self, model: GlobalModel, factors: "Tensor | None" = None) -> GlobalModel:
        """The reference, moved towards this model, as it goes out with tasks; moved once for each version.

        Args:
            model: the coordinator's model.
            factors: factors of the movement that led to this version, where such travel.
        """
        numbers_KP, moved_J, beside = self._message.split_model(model.tensors)
        encoder = self._message.downlink_encoder
        # Factors are those of the last movement alone.
        lacks_factors = self._movement is not None and model.version > self._version + 1
        if self._reference is None or lacks_factors:
            self._reference = Reference.first(numbers_KP, moved_J)
            self._differences = ()
            first = encoder.chain.init() if encoder else {}
            self._state = {name: part.expand(len(numbers_KP), -1) for name, part in first.items()}
        elif model.version != self._version:
            self._reference, difference, self._state = self._reference.towards(
                numbers_KP,
                model.version,
                encoder,
                self._state,
                self._streams,
                factors=factors,
                movement=self._movement,
            )
            # Older versions get the whole model: memory stays bounded however long a client is away.
            self._differences = (*self._differences, difference)[-MOST_DIFFERENCES:]
        self._version = model.version
        self._find_missing()
        params_V, integers_I, *broadcast = self._message.join_model(
            self._reference.numbers_KP, self._reference.moved_J, beside
        )
        return GlobalModel(
            version=model.version,
            params_V=params_V,
            integers_I=integers_I,
            broadcast=tuple(broadcast),
            reference=self._reference.name,
            beside=beside,
        )

    def missing(self, client: int | str) -> tuple[Difference, ...] | None:
        """The differences between the version that a client has and the last one; None where all of it is shorter."""
        return self._missing.get(self._known.get(client, ""))

    def note(self, answer: Answer, open_tasks: Mapping[int, Task]) -> None:
        """Note that clients have the versions of the tasks that they answer."""
        for task in filter(None, map(open_tasks.get, answer.tasks)):
            self._known[task.client] = task.model.reference

    def state(self) -> Tree:
        """State for a checkpoint."""
        return {
            "version": self._version,
            "reference": plain(self._reference),
            "codecs": dict(self._state),
            "differences": plain(self._differences),
            "known": self._known,
        }

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self._version = state["version"]
        self._known = state["known"]
        self._state = state["codecs"]
        self._reference = Reference(**state["reference"]) if state["reference"] else None
        self._differences = tuple(Difference(**one) for one in state["differences"])

    def _find_missing(self) -> None:
        """Find the differences that clients of each version lack; forget versions for which the model is shorter."""
        assert self._reference is not None
        whole_bytes = self._reference.numbers_KP.nbytes + self._reference.moved_J.nbytes
        size_bytes = 0
        self._missing = {self._reference.name: ()}
        # From the newest back: each older version lacks one difference more.
        for place in reversed(range(len(self._differences))):
            size_bytes += self._differences[place].size_bytes
            if size_bytes >= whole_bytes:
                self._differences = self._differences[place + 1 :]
                break
            self._missing[self._differences[place].before] = self._differences[place:]
