"""Forward pass of one stage: the model's own code, which has memory from the stage's beginning on, and ends behind it.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from fed.clients.training.parallel.without_memory import Spreading, spare_recurrent
from fed.clients.training.reading import called
from fed.errors import InvalidModel
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["StageRun"]


class _Reached(BaseException):
    """The next stage's beginning, which users' own handlers of errors let through."""


class StageRun:
    """Runs one stage of a module: earlier stages compute shapes alone, and later ones are not reached.

    All that the model computes beside its stages' modules, such as masks, each stage computes for itself. What goes
    from a stage to the next are the arguments of the module at which that begins.

    Args:
        module: the model; parameters of other stages have no memory.
        begin: name of the module at which the stage begins; None: with the model.
        end: name of the module at which the next stage begins; None: the stage ends with the model.
        device: device of the rank.
    """

    def __init__(self, module: "nn.Module", begin: str | None, end: str | None, device: "torch.device") -> None:
        self._module = module
        self._device = device
        self._begin = begin
        self._end = end
        self._given: list[Tensor] | None = None
        self._spreading: Spreading | None = None
        self._left: list[Tensor] = []
        if begin is not None:
            spare_recurrent(module, lambda: self._spreading)
            module.get_submodule(begin).register_forward_pre_hook(self._enter, with_kwargs=True)
        if end is not None:
            module.get_submodule(end).register_forward_pre_hook(self._leave, with_kwargs=True)

    def __call__(self, inputs: Tree, given: Sequence[Tensor] = ()) -> Any:
        """Run the stage.

        Args:
            inputs: inputs of the model.
            given: tensors among the arguments of the module at which the stage begins.

        Returns:
            The tensors among the arguments of the module at which the next stage begins; of the last stage the model's
            output.

        Raises:
            InvalidModel: if the stage needs what an earlier one has computed beside these tensors.
        """
        self._given = list(given)
        if self._begin is not None:
            self._spreading = Spreading(self._device)
            self._block = ExitStack()
            self._block.enter_context(self._spreading)
            torch.set_grad_enabled(False)
        try:
            output = called(self._module, inputs)
        except _Reached:
            left = self._left
            self._left = []
            if any(tensor.is_meta for tensor in left):
                raise InvalidModel(self._other_way()) from None
            return left
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error):  # PyTorch's word for a tensor without memory
                raise InvalidModel(self._other_way()) from error
            raise
        finally:
            self._stop_spreading()
            torch.set_grad_enabled(True)
        if self._end is not None:
            raise InvalidModel(f"the model has not called {self._end}, at which a stage of local.parallel begins")
        return output

    def _enter(self, layer: "nn.Module", args: Any, kwargs: Any) -> Any:
        if self._spreading is None:
            return None  # called once more in the same forward pass
        self._stop_spreading()
        torch.set_grad_enabled(True)
        leaves, form = tree_flatten((args, kwargs))
        assert self._given is not None
        if sum(isinstance(leaf, Tensor) for leaf in leaves) != len(self._given):
            raise InvalidModel(self._other_way())
        given = iter(self._given)
        return tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)

    def _leave(self, layer: "nn.Module", args: Any, kwargs: Any) -> None:
        if self._spreading is not None:
            return
        leaves, _ = tree_flatten((args, kwargs))
        self._left = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        raise _Reached

    def _stop_spreading(self) -> None:
        if self._spreading is not None:
            self._block.close()
            self._spreading = None

    def _other_way(self) -> str:
        return (
            f"a stage must need nothing of earlier ones but the arguments of the module at which it begins, got more "
            f"at {self._begin}: name modules that take all of the state in local.parallel.stages, or use another "
            "local.parallel"
        )
