"""Trees of tensors: what inputs and targets are, tensors or dictionaries, tuples and named tuples of them.

A tree of samples has tensors [E, ...] and :class:`Ragged` as leaves, E samples in each; a tree of one sample or of a
batch has tensors alone. None is the tree without leaves. Leaves have an order: that of a tuple, and the sorted keys of
a dictionary. Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from fed.vectors.tensors import Tensor, torch

__all__ = [
    "Leaf",
    "Ragged",
    "Tree",
    "concatenated",
    "contiguous",
    "is_named_tuple",
    "leaves",
    "length",
    "mapped",
    "named_leaves",
    "outline",
    "sample",
    "shapes",
    "stacked",
    "take",
    "with_leaves",
]

Tree: TypeAlias = Any
"""Tensor | Ragged | dict[str, Tree] | tuple[Tree, ...] | None; Any, since most code knows which of them it has."""


class Ragged:
    """Samples of several lengths, [n_e, ...] each, in one tensor with the places where each begins.

    Args:
        values_T: [T, ...], the rows of all samples, one sample after another.
        begins_E: [E + 1], int64, the row at which each sample begins, from 0, and behind the last one T.

    Example:
        >>> words = Ragged.of([torch.tensor([3, 1]), torch.tensor([2]), torch.tensor([5, 5, 7])])
        >>> len(words), words[2].tolist(), words.take(torch.tensor([2, 0])).values_T.tolist()
        (3, [5, 5, 7], [5, 5, 7, 3, 1])
    """

    def __init__(self, values_T: Tensor, begins_E: Tensor) -> None:
        self.values_T = values_T
        self.begins_E = begins_E

    @classmethod
    def of(cls, samples: Sequence[Tensor]) -> "Ragged":
        """Samples [n_e, ...] of one type, alike in all dimensions but the first; at least one."""
        lengths = torch.tensor([0, *map(len, samples)])
        return cls(torch.cat(list(samples)), lengths.cumsum(0))

    @property
    def dtype(self) -> "torch.dtype":
        """Type of the numbers."""
        return self.values_T.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values_T.nbytes

    def __len__(self) -> int:
        return len(self.begins_E) - 1

    def __getitem__(self, place: int) -> Tensor:
        begin, end = self.begins_E[place : place + 2].tolist()
        return self.values_T[begin:end]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values_T.split_with_sizes(self.lengths().tolist()))

    def lengths(self) -> Tensor:
        """Number of rows of each sample, [E]."""
        return self.begins_E.diff()

    def take(self, places_E: Tensor) -> "Ragged":
        """Samples at these places, in that order."""
        lengths_E = self.lengths()[places_E]
        ends_E = lengths_E.cumsum(0)
        # Row r of the result stands as far behind its sample's first row as in the values.
        shifts_T = (self.begins_E[places_E] - ends_E + lengths_E).repeat_interleave(lengths_E)
        rows_T = torch.arange(len(shifts_T)) + shifts_T
        return Ragged(self.values_T.index_select(0, rows_T), torch.cat([ends_E.new_zeros(1), ends_E]))

    def slice(self, begin: int, end: int) -> "Ragged":
        """Samples ``begin`` … ``end`` − 1, as views."""
        begins_E = self.begins_E[begin : end + 1]
        if len(begins_E) == 0:
            return Ragged(self.values_T[:0], begins_E.new_zeros(1))
        return Ragged(self.values_T[int(begins_E[0]) : int(begins_E[-1])], begins_E - begins_E[0])

    def contiguous(self) -> "Ragged":
        """The same samples in contiguous memory."""
        return Ragged(self.values_T.contiguous(), self.begins_E.contiguous())


Leaf: TypeAlias = Tensor | Ragged
"""Values of one kind of all samples."""


def is_named_tuple(tree: object) -> bool:
    """True for an instance of a class that ``typing.NamedTuple`` makes."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def mapped(function: Callable[[Any], Any], tree: Tree) -> Any:
    """A tree of the same form, with the function's value in the place of each leaf.

    PyTorch's own ``tree_map`` takes ten times as long for a single tensor.

    Example:
        >>> mapped(len, {"a": torch.zeros(3), "b": (torch.zeros(4),)})
        {'a': 3, 'b': (4,)}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: mapped(function, part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        parts = [mapped(function, part) for part in tree]
        return type(tree)(*parts) if is_named_tuple(tree) else tuple(parts)
    return None if tree is None else function(tree)


def leaves(tree: Tree) -> list[Any]:
    """The leaves in order.

    Example:
        >>> [leaf.tolist() for leaf in leaves({"b": torch.tensor([2]), "a": torch.tensor([1])})]
        [[1], [2]]
    """
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for _, leaf in named_leaves(tree, "")]


def named_leaves(tree: Tree, name: str) -> list[tuple[str, Any]]:
    """The leaves in order, each with its path for messages.

    Args:
        tree: tree to walk.
        name: name of the whole.

    Example:
        >>> [path for path, _ in named_leaves({"ids": torch.zeros(1), "more": (torch.zeros(1),)}, "inputs")]
        ["inputs['ids']", "inputs['more'][0]"]
    """
    if isinstance(tree, dict):
        parts = [(f"{name}[{key!r}]", tree[key]) for key in sorted(tree)]
    elif is_named_tuple(tree):
        parts = [(f"{name}.{field}", part) for field, part in zip(tree._fields, tree, strict=True)]
    elif isinstance(tree, tuple):
        parts = [(f"{name}[{place}]", part) for place, part in enumerate(tree)]
    else:
        return [] if tree is None else [(name, tree)]
    return [leaf for path, part in parts for leaf in named_leaves(part, path)]


def with_leaves(tree: Tree, parts: Sequence[Any]) -> Any:
    """A tree of the same form with these leaves, given in order."""
    if isinstance(tree, Tensor):
        return parts[0]
    return _filled(tree, iter(parts))


def _filled(tree: Tree, parts: Iterator[Any]) -> Any:
    if isinstance(tree, dict):
        filled = {key: _filled(tree[key], parts) for key in sorted(tree)}
        return {key: filled[key] for key in tree}
    if isinstance(tree, tuple):
        held = [_filled(part, parts) for part in tree]
        return type(tree)(*held) if is_named_tuple(tree) else tuple(held)
    return None if tree is None else next(parts)


def outline(tree: Tree) -> str:
    """Form of a tree in words, the same for trees whose leaves can stand side by side.

    Example:
        >>> outline({"b": torch.zeros(1), "a": (torch.zeros(1), None)}), outline(torch.zeros(1))
        ("{'a': (tensor, None), 'b': tensor}", 'tensor')
    """
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {outline(tree[key])}" for key in sorted(tree)) + "}"
    if isinstance(tree, tuple):
        return (type(tree).__name__ if is_named_tuple(tree) else "") + "(" + ", ".join(map(outline, tree)) + ")"
    if isinstance(tree, Ragged):
        return "samples of several lengths"
    return "tensor" if isinstance(tree, Tensor) else repr(tree)


def length(tree: Tree) -> int:
    """Number of samples, by the first leaf; 0 without leaves."""
    if isinstance(tree, Tensor):
        return tree.shape[0]
    found = leaves(tree)
    return len(found[0]) if found else 0


def shapes(tree: Tree) -> tuple[Any, ...]:
    """Shapes of the leaves in order; None of a ragged one."""
    return tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves(tree))


def take(tree: Tree, places: "Tensor | slice") -> Any:
    """Samples at these places, in that order, as copies; with a slice of step 1, as views."""
    if isinstance(tree, Tensor):
        return _taken(tree, places)
    return mapped(lambda leaf: _taken(leaf, places), tree)


def _taken(leaf: Leaf, places: "Tensor | slice") -> Leaf:
    if isinstance(leaf, Tensor):
        if isinstance(places, slice):
            return leaf[places]
        # index_select is faster, but does not take single numbers of every type.
        is_usual = leaf.ndim > 1 or leaf.dtype in (torch.int64, torch.float32, torch.float64)
        return leaf.index_select(0, places) if is_usual else leaf[places]
    if isinstance(places, slice):
        begin, end, _ = places.indices(len(leaf))
        return leaf.slice(begin, max(begin, end))
    return leaf.take(places)


def sample(tree: Tree, place: int) -> Any:
    """One sample: a tree of tensors without the samples' dimension."""
    return mapped(lambda leaf: leaf[place], tree)


def stacked(samples: Sequence[Tree]) -> Any:
    """A batch of samples whose tensors have the same shapes; the inverse of :func:`sample`.

    Raises:
        RuntimeError: if shapes differ.
    """
    return _joined(samples, lambda parts: torch.stack(list(parts)))


def concatenated(trees: Sequence[Tree]) -> Any:
    """All samples of several trees of one form, one tree's after another's."""
    return _joined(trees, _concatenated)


def _joined(trees: Sequence[Tree], join: Callable[[Sequence[Any]], Any]) -> Any:
    if isinstance(trees[0], Tensor):
        return join(trees)
    columns = zip(*map(leaves, trees), strict=True)
    return with_leaves(trees[0], [join(column) for column in columns])


def _concatenated(parts: Sequence[Leaf]) -> Leaf:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))  # type: ignore[arg-type]  # all are like the first
    ragged: list[Any] = [*parts]
    lengths_E = torch.cat([part.lengths() for part in ragged])
    begins_E = torch.cat([lengths_E.new_zeros(1), lengths_E.cumsum(0)])
    return Ragged(torch.cat([part.values_T for part in ragged]), begins_E)


def contiguous(tree: Tree) -> Any:
    """The same samples in contiguous memory."""
    if isinstance(tree, Tensor):
        return tree.contiguous()
    return mapped(lambda leaf: leaf.contiguous(), tree)
