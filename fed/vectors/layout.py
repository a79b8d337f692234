"""Layout of a model's floating-point state as one flat tensor, and the legend of all shape letters.

The suffix of a name is the shape of its tensor: ``update_KP`` is [K, P]. A 1 is an axis of length 1. A letter has the
same meaning in every module:

    A: attackers of a round
    B: samples of a batch
    C: classes
    D: width of a hidden layer, or of what is kept from one position of a sequence to the next
    E: examples, the samples of a client or of a data set
    F: features of an example or of a representation
    G: groups of messages that a robust rule forms
    H: honest clients of a round
    I: integers of a model's state
    J: consecutive numbers of a longer vector, one piece of it
    K: clients that are computed with at once, or shown together
    L: optimizer steps of a local training
    M: numbers of a client's message
    N: all clients, or all peers, of a run
    O: bytes of an encoded vector
    P: trainable parameters
    Q: trainable parameters as they are computed with: P of them and alignment gaps
    R: floating-point state that is not trained, and travels: float buffers, and what a coordinator alone moves
    S: clients whose answers a round counts
    T: positions of a sequence, such as tokens of a text or rounds of a run
    U: batches of a local training
    V: floating-point state of a model, V = P + R
    W: places for examples in one optimizer step
    X: pairs of a peer and one of its neighbours
    Y: products of a vector that peers sent and one of its weights
    Z: clients that a robust rule chooses
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from types import MappingProxyType
from typing import NamedTuple

from fed.errors import InvalidModel
from fed.vectors.fixed_part import fixed_state
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Layout", "Part", "Spec", "leading", "names_held_by"]


class Spec(NamedTuple):
    """Shape and type of one tensor of a model.

    Args:
        shape: the tensor's shape; empty for a single number.
        dtype: the type of its numbers.
    """

    shape: Sequence[int]
    dtype: "torch.dtype"


@dataclass(frozen=True)
class Part:
    """One tensor of a model and its place in the vector: ``vector[offset : offset + size]``."""

    name: str
    shape: "torch.Size"
    offset: int
    dtype: "torch.dtype"

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def view(self, vector: Tensor) -> Tensor:
        """The tensor's numbers in one vector or in those of K, [..., ·], in its shape."""
        return vector[..., self.offset : self.offset + self.size].view((*vector.shape[:-1], *self.shape))


@dataclass(frozen=True)
class Layout:
    """Place of each tensor of a model's state in its vector.

    Trainable parameters come first: rules act on ``vector[:parameters]``. Float buffers (a BatchNorm's running
    statistics) follow: they take the plain weighted mean. Integer buffers (a count of batches) are a vector of their
    own; the largest of the clients' values counts. Tied weights stand once. Buffers that the module does not save are
    not part of the state, and neither is the fixed part (:mod:`fed.vectors.fixed_part`), but for parameters that the
    coordinator moves by itself: they end the vector, go out to clients, and never come back. Within each of the three
    kinds, private tensors, which never leave a client, come last.

    Args:
        parameters: P, the number of trainable parameters.
        size: V = P + R, the length of the vector.
        dtype: type of the vector, the widest of all floating types of the state.
        trained: places of the trainable parameters.
        averaged: places of all other floating-point state.
        integers: places of integer and boolean buffers, in an int64 vector of their own.
        private: names of the tensors that never leave a client.
        moved: names of the tensors that the coordinator alone moves.

    Example:
        >>> layout = Layout.of(nn.BatchNorm1d(3))
        >>> layout.parameters, layout.size, [part.name for part in layout.averaged]
        (6, 12, ['running_mean', 'running_var'])
        >>> layout = Layout.of(nn.Linear(3, 1), private={"weight"})
        >>> [part.name for part in layout.trained], layout.shared.parameters
        (['bias', 'weight'], 1)
    """

    parameters: int
    size: int
    dtype: "torch.dtype"
    trained: tuple[Part, ...]
    averaged: tuple[Part, ...]
    integers: tuple[Part, ...]
    private: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    @property
    def integer_count(self) -> int:
        """I, the number of integers."""
        return sum(part.size for part in self.integers)

    @cached_property
    def moved_size(self) -> int:
        """J, number of values at the end of the vector that the coordinator alone moves."""
        return sum(part.size for part in self.averaged if part.name in self.moved)

    @property
    def returned_size(self) -> int:
        """Number of values of the vector that come back from clients: all before those that the coordinator moves."""
        return self.size - self.moved_size

    @classmethod
    def of(cls, module: "nn.Module", private: Collection[str] = (), moved: Collection[str] = ()) -> "Layout":
        """The layout of a module.

        Args:
            module: the model.
            private: names of parameters and buffers that never leave a client; those of the fixed part do not anyway.
            moved: names of parameters of the fixed part that the coordinator alone moves; without private names.

        Raises:
            InvalidModel: if the model has no trainable parameters, they are of several types, or the state is complex;
                if a private name is no part of its state, or nothing trainable is shared; if a name to be moved is no
                floating-point parameter of the fixed part.
        """
        # A buffer with persistent=False is no part of the state: checkpoints and other frameworks would not have it.
        saved = set(module.state_dict().keys())
        fixed = fixed_state(module)
        buffers = {name: tensor for name, tensor in module.named_buffers() if name in saved and name not in fixed}
        trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        if not trained:
            raise InvalidModel(
                "a model must have parameters to train, got none: give it some, or set requires_grad of those it has"
            )
        dtypes = {tensor.dtype for tensor in trained.values()}
        if len(dtypes) > 1:
            raise InvalidModel(
                f"a model must have trainable parameters of one type, got {sorted(map(str, dtypes))}: "
                "convert it, for instance with model.float()"
            )
        state = {**trained, **buffers, **fixed}
        if any(tensor.is_complex() for tensor in state.values()):
            raise InvalidModel("a model's state must be real, got complex numbers: keep real and imaginary parts apart")
        if unknown := sorted(set(private) - state.keys()):
            raise InvalidModel(
                f"private names must be parameters or saved buffers of the model, got {unknown[0]!r}; known: "
                f"{', '.join(state)}"
            )
        # Without a shared parameter there is nothing to average, and every message would be empty.
        if trained.keys() <= set(private):
            raise InvalidModel(
                f"a model must have trainable parameters to share, got private ones alone: {', '.join(trained)}"
            )
        of_coordinator = _moved(fixed, moved, private)
        layout = cls.of_specs(
            {name: Spec(tensor.shape, tensor.dtype) for name, tensor in trained.items()},
            # Those of the coordinator last, so that what comes back from clients is one piece.
            {name: Spec(tensor.shape, tensor.dtype) for name, tensor in (buffers | of_coordinator).items()},
            {*private} - fixed.keys(),
        )
        return replace(layout, moved=frozenset(moved))

    @classmethod
    def of_specs(
        cls,
        trained: Mapping[str, "Spec"],
        others: Mapping[str, "Spec"] = MappingProxyType({}),
        private: Collection[str] = (),
    ) -> "Layout":
        """The layout of a state that is known by names, shapes and types alone, as of another framework's model.

        Args:
            trained: name → shape and type of each trainable parameter, at least one.
            others: name → shape and type of all other state: floating types are averaged, integers are not.
            private: names of the tensors that never leave a client.

        Example:
            >>> layout = Layout.of_specs({"weight": Spec((1, 3), torch.float32), "bias": Spec((1,), torch.float32)})
            >>> layout == Layout.of(nn.Linear(3, 1))
            True
        """
        averaged = {name: spec for name, spec in others.items() if spec.dtype.is_floating_point}
        whole = {name: spec for name, spec in others.items() if not spec.dtype.is_floating_point}
        trained_parts, parameters = _places(trained, private, 0)
        averaged_parts, size = _places(averaged, private, parameters)
        integer_parts, _ = _places(whole, private, 0)
        dtype = reduce(torch.promote_types, [spec.dtype for spec in (*trained.values(), *averaged.values())])
        return cls(
            parameters=parameters,
            size=size,
            dtype=dtype,
            trained=trained_parts,
            averaged=averaged_parts,
            integers=integer_parts,
            private=frozenset(private),
        )

    @cached_property
    def shared(self) -> "Layout":
        """Layout of the part that leaves a client."""
        if not self.private:
            return self
        kinds = (self.trained, self.averaged, self.integers)
        trained, averaged, integers = (tuple(part for part in kind if part.name not in self.private) for kind in kinds)
        parameters = sum(part.size for part in trained)
        # Private parts come last in each kind, so that only the averaged ones move: behind fewer parameters.
        moved = tuple(replace(part, offset=part.offset - self.parameters + parameters) for part in averaged)
        return Layout(
            parameters=parameters,
            size=parameters + sum(part.size for part in moved),
            dtype=self.dtype,
            trained=trained,
            averaged=moved,
            integers=integers,
        )

    def split(self, vectors: Tensor, integers: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The shared part and the private part of one state or of K: vectors [..., ·] and integers [..., ·] each."""
        if not self.private:
            return (vectors, integers), (vectors[..., :0], integers[..., :0])
        shared = self.shared
        count = shared.integer_count
        of_trained = vectors[..., : self.parameters]
        of_averaged = vectors[..., self.parameters :]
        cuts = ((of_trained, shared.parameters), (of_averaged, shared.size - shared.parameters))
        vector = torch.cat([part[..., :cut] for part, cut in cuts], -1)
        own = torch.cat([part[..., cut:] for part, cut in cuts], -1)
        return (vector, integers[..., :count]), (own, integers[..., count:])

    def joined(self, shared: tuple[Tensor, Tensor], private: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Reverse of :meth:`split`; K private parts and one shared part give K states."""
        if not self.private:
            return shared
        vectors, integers = shared
        own, own_integers = private
        rows = own.shape[:-1]
        vectors = vectors.expand(*rows, -1)
        integers = integers.expand(*rows, -1)
        # Private parts stand last in each kind, so that the parts alternate: shared, own, shared, own.
        cut = self.shared.parameters
        own_cut = self.parameters - cut
        parts = (vectors[..., :cut], own[..., :own_cut], vectors[..., cut:], own[..., own_cut:])
        return torch.cat(parts, -1), torch.cat([integers, own_integers], -1)

    def pack(self, module: "nn.Module") -> tuple[Tensor, Tensor]:
        """A module's state as (vector [V], integers [I]), on the device of its parameters."""
        state = _state(module)
        device = state[self.trained[0].name].device
        vector_V = torch.empty(self.size, dtype=self.dtype, device=device)
        integers_I = torch.empty(self.integer_count, dtype=torch.int64, device=device)
        for part, view in self._views(vector_V, integers_I):
            view.copy_(state[part.name])
        return vector_V, integers_I

    def unpack(self, vector_V: Tensor, integers_I: Tensor, module: "nn.Module") -> None:
        """Write a state into a module, in place.

        Args:
            vector_V: floating-point state.
            integers_I: integers of the state.
            module: module that the state is written into.
        """
        state = _state(module)
        for part, view in self._views(vector_V, integers_I):
            state[part.name].copy_(view)

    def _views(self, vectors: Tensor, integers: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each tensor's place and its numbers in one state or in K, in the order of ``parts``."""
        for part in (*self.trained, *self.averaged):
            yield part, part.view(vectors)
        for part in self.integers:
            yield part, part.view(integers)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All tensors: those to be trained, those to be averaged, integers."""
        return (*self.trained, *self.averaged, *self.integers)

    def tensors(self, vectors_KV: Tensor, integers_KI: Tensor) -> list[Tensor]:
        """Tensors of K states, each stacked over them, in the order of ``parts`` and in the model's types."""
        return [view.to(part.dtype) for part, view in self._views(vectors_KV, integers_KI)]


def leading(vector_V: Tensor, count: int) -> Tensor:
    """The first numbers of a vector; the vector itself where they are all, for a view takes as long as a small sum.

    Args:
        vector_V: vector of at least so many numbers.
        count: number of numbers.
    """
    return vector_V if vector_V.numel() == count else vector_V[:count]


def names_held_by(parts: "Collection[nn.Module]", module: "nn.Module") -> list[str]:
    """The names of a module's parameters and saved buffers that some of its modules hold themselves.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))
        >>> names_held_by([module[1]], module)
        ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    # By identity, for tied weights have several names.
    held = {id(tensor) for part in parts for tensor in (*part.parameters(False), *part.buffers(False))}
    saved = module.state_dict().keys()
    buffers = [(name, tensor) for name, tensor in module.named_buffers() if name in saved]
    return [name for name, tensor in (*module.named_parameters(), *buffers) if id(tensor) in held]


def _moved(fixed: Mapping[str, Tensor], moved: Collection[str], private: Collection[str]) -> dict[str, Tensor]:
    """Tensors of the fixed part that the coordinator moves, in the model's order."""
    wrong = [name for name in moved if name not in fixed or not fixed[name].is_floating_point()]
    if wrong:
        raise InvalidModel(
            f"what the coordinator moves by itself must be floating-point parameters that are not trained, got "
            f"{wrong[0]}: leave it out of what is trained"
        )
    if moved and private:
        raise InvalidModel(
            f"an algorithm must keep parts private or move what is not trained, got both: {sorted(private)[0]} and "
            f"{sorted(moved)[0]}"
        )
    return {name: part for name, part in fixed.items() if name in moved}


def _places(specs: Mapping[str, Spec], private: Collection[str], offset: int) -> tuple[tuple[Part, ...], int]:
    """Parts laid one after another from an offset, private ones last, and the offset behind them."""
    parts = []
    # Sorted is stable: the module's order stays otherwise.
    for name, spec in sorted(specs.items(), key=lambda item: item[0] in private):
        parts.append(Part(name=name, shape=torch.Size(spec.shape), offset=offset, dtype=spec.dtype))
        offset += math.prod(spec.shape)
    return tuple(parts), offset


def _state(module: "nn.Module") -> dict[str, Tensor]:
    # Detached, since a leaf with a gradient refuses changes in place.
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
