"""Pieces of a model's state: the parts of its tensors that one rank holds, and their places in the flat vector.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from fed.vectors.layout import Layout, Part
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Piece", "TrainedPiece", "filled", "trained_of", "whole_pieces"]


@dataclass(frozen=True)
class Piece:
    """Part of a parameter that a rank holds.

    Args:
        name: name of the parameter in the model.
        parameter: tensor that automatic differentiation gives a gradient.
        local: numbers that the rank holds, a view of the parameter's own.
        shape: shape of the whole parameter in which ``index`` counts; it may join or split dimensions.
        index: slice of each dimension that the rank holds; empty: all of them.
        is_written: True if this rank gives the trained numbers back; False where another one holds them, too.
    """

    name: str
    parameter: Tensor
    local: Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()
    is_written: bool = True

    def cut(self, whole: Tensor) -> Tensor:
        """The piece of a whole tensor, as a view."""
        return whole.view(self.shape)[self.index]

    def read(self, whole: Tensor) -> None:
        """Fill the rank's numbers from a whole tensor."""
        cut = self.cut(whole)
        self.local.view(cut.shape).copy_(cut)

    def write(self, whole: Tensor, numbers: Tensor) -> None:
        """Write numbers of the piece into a whole tensor.

        Args:
            whole: tensor of the parameter's size.
            numbers: numbers of the piece.
        """
        cut = self.cut(whole)
        cut.copy_(numbers.view(cut.shape))


@dataclass(frozen=True)
class TrainedPiece:
    """Piece of a parameter that is trained, as optimizers and rules see it.

    Args:
        piece: the piece.
        part: place of the whole parameter in the flat vector.
        numbers: the numbers of the piece as one vector, which shares their memory.
        is_shared: True if clients share the parameter, so that the algorithm's rule corrects it.
    """

    piece: Piece
    part: Part
    numbers: Tensor
    is_shared: bool

    def spread(self, parameters: int) -> Callable[[Tensor], Tensor]:
        """Function that cuts vectors of the shared parameters to this piece; other tensors stay as they are.

        Args:
            parameters: number of the shared parameters.
        """

        def spread(vector_P: Tensor) -> Tensor:
            if vector_P.shape != (parameters,):
                return vector_P.to(self.numbers.device, self.numbers.dtype)
            cut = self.piece.cut(self.part.view(vector_P))
            return cut.to(self.numbers.device, self.numbers.dtype).reshape(-1)

        return spread


def trained_of(pieces: Iterable[Piece], layout: Layout) -> list[TrainedPiece]:
    """Pieces that are trained, among others.

    Args:
        pieces: all pieces of the rank.
        layout: layout of the whole model.
    """
    parts = {part.name: part for part in layout.trained}
    shared = {part.name for part in layout.shared.trained}
    return [
        TrainedPiece(piece, parts[piece.name], piece.local.view(-1), piece.name in shared)
        for piece in pieces
        if piece.name in parts
    ]


def whole_pieces(module: "nn.Module", *, is_written: bool) -> list[Piece]:
    """Pieces of a rank that holds all of a module.

    Args:
        module: the module.
        is_written: True if this rank gives the trained numbers back.
    """
    return [
        Piece(
            name=name,
            parameter=parameter,
            local=parameter.detach(),
            shape=tuple(parameter.shape),
            is_written=is_written,
        )
        for name, parameter in module.named_parameters()
    ]


def filled(
    module: "nn.Module",
    device: "torch.device",
    made: dict[int, "nn.Parameter"] | None = None,
    held: Collection[str] | None = None,
) -> None:
    """Give a module's parameters that have no memory, those on the device "meta", some; tied ones stay tied.

    Args:
        module: the module.
        device: device of the memory.
        made: parameters that were made for others before, by the id of the one without memory.
        held: names of the parameters that get memory; None: all.
    """
    chosen = {id(part) for name, part in module.named_parameters() if held is None or name in held}
    made = {} if made is None else made
    for layer in module.modules():
        for name, parameter in [*layer.named_parameters(recurse=False, remove_duplicate=False)]:
            if not parameter.is_meta or id(parameter) not in chosen:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(layer, name, made[id(parameter)])  # not into _parameters: recurrent layers keep lists of them
