"""Types of samples as a model and a loss take them: tried on two samples, cast everywhere, and said once.

People bring float64 where a model is of float32, labels of 8 bits, or labels that a table holds as 1.0. What model and
loss take stays as it is. A simulation, a server and every node of one experiment try the same model and loss, and so
come to the same types.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from fed.clients.data import ClientId, ClientsOnDemand, FederatedData, Held, Pair, SamplesOnDemand
from fed.clients.data.collate import Collating, batch_of
from fed.clients.data.held import samples_at, size_of
from fed.clients.data.on_demand import ByClient
from fed.clients.data.samples import pattern_of
from fed.clients.scoring.measures import Loss
from fed.clients.training.reading import called
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Ragged, Tree

__all__ = ["Casting", "fitted", "in_the_models_type", "in_type", "what_was_cast", "with_labels"]

_MOST_CLASSES = 1000

_Types: TypeAlias = tuple["torch.dtype", ...]


@dataclass(frozen=True)
class Casting:
    """Types that leaves of inputs and targets are cast to, in the order of leaves.

    Args:
        inputs: types of the inputs' leaves; empty: they stay as they are.
        targets: types of the targets' leaves; empty: they stay as they are.
    """

    inputs: _Types = ()
    targets: _Types = ()

    def of(self, pair: Pair, owner: str) -> Pair:
        """Samples of these types.

        Args:
            pair: (inputs, targets), of samples or of one sample.
            owner: name of the holder in errors, such as "client 3".

        Raises:
            InvalidData: if a number should become an integer and is none, or is too large for its type.
        """
        inputs, targets = pair
        cast_inputs = _as_types(inputs, self.inputs, f"inputs of {owner}")
        return cast_inputs, _as_types(targets, self.targets, f"targets of {owner}")


def with_labels(data: FederatedData) -> FederatedData:
    """The same data for a loss of class labels: floating targets become int64 where the first client's are whole.

    They must be of 0 … 999 there: of others it is likelier that a loss of real targets was forgotten.

    Raises:
        InvalidData: if they are whole there, but not elsewhere in memory.
    """
    held = data.read(data.clients[0])
    if isinstance(held, SamplesOnDemand):
        held = samples_at(held, [0])[0]
    _, targets = held
    return _cast_all(data, Casting(targets=(torch.int64,))) if _are_labels(targets) else data


def _are_labels(targets: Tree) -> bool:
    """True for floating numbers that are labels; a whole number of 250,000 is rather a real target."""
    if not isinstance(targets, Tensor) or not targets.is_floating_point() or not targets.numel():
        return False
    labels = _as_integers(targets)
    return labels is not None and int(labels.min()) >= 0 and int(labels.max()) < _MOST_CLASSES


def in_type(data: FederatedData, dtype: str) -> FederatedData:
    """The same data with inputs of a floating type, where they are one tensor; of another type they stay as they are.

    Args:
        data: a client's data.
        dtype: name of the type, such as ``float32``.

    Raises:
        InvalidData: if a number is too large for it.
    """
    inputs, _ = pattern_of(data.read(data.clients[0]))
    type_of_inputs: torch.dtype | None = getattr(torch, dtype, None) if "float" in dtype else None
    if type_of_inputs is None or not isinstance(inputs, Tensor):
        return data
    return _cast_all(data, Casting(inputs=(type_of_inputs,)))


def fitted(data: FederatedData, module: "nn.Module", loss: Loss, collate: Collating | None) -> FederatedData:
    """The same data in types that a model and a loss take, as two samples show; types that they take are left.

    Inputs are cast to the model's type of floating numbers: first those that are floating numbers too, then, if it does
    not take these either, whole numbers as well, for a layer may look integers up. Targets become int64, or of the type
    of the model's output. Batches that a ``collate`` makes have the types that it gives them.

    Args:
        data: data of the run.
        module: the model, which is left in evaluation.
        loss: (output, target) → scalar.
        collate: the run's collate, or None.

    Raises:
        InvalidData: if a number in memory has none of its type.
    """
    held = data.read(data.clients[0])
    if collate is not None or (not isinstance(held, SamplesOnDemand) and _are_ragged(held)):
        return data
    inputs, targets = batch_of(held, torch.arange(min(2, size_of(held))), None, training=False)
    module.eval()
    with torch.no_grad():
        types = _types_of_inputs(inputs, module)
        inputs = _as_types(inputs, types, "inputs")
        if _works(partial(called, module), inputs) and isinstance(targets, Tensor):
            score = partial(loss, called(module, trees.mapped(torch.clone, inputs)))
            return _cast_all(data, Casting(types, _types_of_targets(targets, score, module)))
    return _cast_all(data, Casting(types))


def what_was_cast(before: Pair, after: Pair) -> str:
    """A sentence for the log on types that differ; empty where none does.

    Args:
        before: pattern of the samples as they came.
        after: pattern of the samples as they are trained on.

    Example:
        >>> one = torch.zeros(0, 2)
        >>> what_was_cast((one.double(), one.bool()), (one, one.bool()))
        'samples are cast: inputs of float64 as float32, as model and loss take them'
    """
    said = []
    for name, tree, other in zip(("inputs", "targets"), before, after, strict=True):
        for (path, leaf), (_, cast_leaf) in zip(
            trees.named_leaves(tree, name), trees.named_leaves(other, name), strict=True
        ):
            if leaf.dtype != cast_leaf.dtype:
                said.append(f"{path} of {_word(leaf.dtype)} as {_word(cast_leaf.dtype)}")
    return f"samples are cast: {', '.join(said)}, as model and loss take them" if said else ""


def _cast_all(data: FederatedData, casting: Casting) -> FederatedData:
    """The same data in other types; those on demand are cast whenever they are read."""
    if not casting.inputs and not casting.targets:
        return data
    reader = _Reader(data, casting)
    train: Mapping[Any, Held] = {}
    if data.is_on_demand:
        size = data.train.size if isinstance(data.train, ClientsOnDemand) else None
        train = ClientsOnDemand(data.clients, reader.train, size)
    else:
        train = {client: reader.train(client) for client in data.clients}
    test = None if data.test is None else _cast(data.test, casting, "the test set")
    tests: Mapping[Any, Held] | None = data.client_tests
    if tests is not None:
        held_tests = ByClient(tuple(tests), reader.test)
        tests = dict(held_tests) if isinstance(tests, dict) else held_tests
    return replace(data, train=train, test=test, client_tests=tests)


@dataclass(frozen=True)
class _Reader:
    """Clients' data in other types."""

    data: FederatedData
    casting: Casting

    def train(self, client: ClientId) -> Held:
        return _cast(self.data.read(client), self.casting, f"client {client!r}")

    def test(self, client: ClientId) -> Held:
        return _cast(self.data.read_test(client), self.casting, f"the test set of client {client!r}")


@dataclass(frozen=True)
class _Cast(SamplesOnDemand):
    """Samples that are cast when they are read."""

    samples: SamplesOnDemand
    casting: Casting
    owner: str

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, place: int) -> Pair:
        return self.casting.of(self.samples.read(place), self.owner)


def _cast(held: Held, casting: Casting, owner: str) -> Held:
    return _Cast(held, casting, owner) if isinstance(held, SamplesOnDemand) else casting.of(held, owner)


def _are_ragged(held: Held) -> bool:
    return any(isinstance(leaf, Ragged) for tree in held for leaf in trees.leaves(tree))


def in_the_models_type(inputs: Tree, module: "nn.Module") -> Tree:
    """Inputs whose floating numbers are of the model's type, where it has one; all others stay as they are."""
    dtype = _type_of(module)
    return inputs if dtype is None else _as_types(inputs, _with_floats_of(dtype, inputs), "inputs")


def _type_of(module: "nn.Module") -> "torch.dtype | None":
    """Type of a model's floating numbers; None where it has several or none."""
    types = {part.dtype for part in module.parameters() if part.is_floating_point()}
    return types.pop() if len(types) == 1 else None


def _with_floats_of(dtype: "torch.dtype", inputs: Tree) -> _Types:
    """Types of the leaves, with this one in the place of each floating type."""
    return tuple(dtype if leaf.is_floating_point() else leaf.dtype for leaf in trees.leaves(inputs))


def _types_of_inputs(inputs: Tree, module: "nn.Module") -> _Types:
    """Types with which a model takes inputs; none where it takes them as they are, or not at all."""
    dtype = _type_of(module)
    if dtype is None or _works(partial(called, module), inputs):
        return ()
    for candidate in (_with_floats_of(dtype, inputs), (dtype,) * len(trees.leaves(inputs))):
        if _works(partial(called, module), _as_types(inputs, candidate, "inputs")):
            return candidate
    return ()


def _types_of_targets(targets: Tensor, score: Callable[[Tensor], Any], module: "nn.Module") -> _Types:
    """Type with which a loss takes targets; none where it takes them as they are, or not at all."""
    if _works(score, targets):
        return ()
    floats = [part.dtype for part in module.parameters() if part.is_floating_point()]
    for dtype in (torch.int64, *floats[:1]):
        if _can_become(targets, dtype) and _works(score, targets.to(dtype)):
            return (dtype,)
    return ()


def _works(function: Callable[[Tree], Any], tree: Tree) -> bool:
    """True if a user's model or loss takes samples."""
    try:
        function(trees.mapped(torch.clone, tree))  # a model may change its inputs in place
    except Exception:
        # What is wrong is said by the check of model and loss, in which it comes again.
        return False
    return True


def _as_types(tree: Tree, types: _Types, owner: str) -> Tree:
    if not types:
        return tree
    return trees.with_leaves(tree, [_as_type(leaf, dtype, owner) for leaf, dtype in _beside(tree, types)])


def _beside(tree: Tree, types: Sequence["torch.dtype"]) -> Iterator[tuple[Any, "torch.dtype"]]:
    return zip(trees.leaves(tree), types, strict=True)


def _as_type(leaf: Any, dtype: "torch.dtype", owner: str) -> Any:
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, Ragged):
        return Ragged(_as_type(leaf.values_T, dtype, owner), leaf.begins_E)
    if not dtype.is_floating_point and leaf.is_floating_point():
        if (integers := _as_integers(leaf)) is None:
            place = tuple(int(index) for index in torch.nonzero(leaf != leaf.round())[0])
            raise InvalidData(
                f"{owner} must be whole numbers, for the loss takes class labels, got {leaf[place].item()} at index "
                f"{place}: correct it, or use a loss of real targets, such as mse"
            )
        return integers
    if leaf.is_complex() and not dtype.is_complex:
        raise InvalidData(
            f"{owner} must be real numbers in {_word(dtype)}, got {_word(leaf.dtype)}: give .real and .imag as "
            "inputs of their own, or a model that takes complex numbers"
        )
    numbers = leaf.to(dtype)
    if dtype.is_floating_point and leaf.is_floating_point() and not torch.isfinite(numbers.sum()):
        wrong = torch.nonzero(~torch.isfinite(numbers) & torch.isfinite(leaf))
        if len(wrong):
            place = tuple(int(index) for index in wrong[0])
            raise InvalidData(
                f"{owner} must be finite in {_word(dtype)}, got {leaf[place].item()} at index {place}: scale them, or "
                "give a model of float64"
            )
    return numbers


def _can_become(targets: Tensor, dtype: "torch.dtype") -> bool:
    if targets.dtype == dtype:
        return False
    return dtype.is_floating_point or not targets.is_floating_point() or _as_integers(targets) is not None


def _as_integers(numbers: Tensor) -> Tensor | None:
    """The same numbers as int64; None where one of them is not whole."""
    integers = numbers.to(torch.int64)
    return integers if torch.equal(integers.to(numbers.dtype), numbers) else None


def _word(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")
