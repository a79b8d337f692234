"""Classes of a user's own that are recorded by themselves, and all that keeps one from it."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import relu

from fed.clients.training import plain_code
from fed.clients.training.recorded_gradients import is_recordable

COUNTS = [0]
SCALE = 2.0


def helper(inputs: Tensor) -> Tensor:
    return inputs * COUNTS[0]


def _init(self: Any) -> None:
    nn.Module.__init__(self)
    self.first = nn.Linear(4, 4)
    self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.1)])
    self.scale = 0.5
    self.sizes = (2, 2)
    self.counts = [1]
    self.act = relu
    self.item = 3
    self.register_buffer("shift", torch.ones(4))


def loops(self: Any, inputs: Tensor) -> Tensor:
    states = inputs
    for number, layer in enumerate(self.layers):
        states = relu(layer(states)) + number * self.shift[None, :4]
    if inputs.shape[0] > 2 and self.training:
        states = functional.gelu(states)
    return torch.cat([states, self.first(inputs) * self.scale], dim=-1).view(-1, *self.sizes, 2)


def turns(self: Any, inputs: Tensor) -> Tensor:
    return self.first(inputs).transpose(0, 1)  # type: ignore[no-any-return]


def asserting() -> nn.Module:
    """Compiled here, for pytest writes its own code in the place of assertions."""
    names: dict[str, Any] = {}
    exec("def forward(self, x):\n    assert x.ndim == 2, f'got {x.shape}'\n    return x", names)
    return own(names["forward"])


def calls_its_method(self: Any, inputs: Tensor) -> Tensor:
    return self.helped(inputs)  # type: ignore[no-any-return]


def counts_calls(self: Any, inputs: Tensor) -> Tensor:
    self.scale += 1
    return inputs * self.scale  # type: ignore[no-any-return]


def sets_an_item(self: Any, inputs: Tensor) -> Tensor:
    self.counts[0] = 3
    return inputs


def sets_a_global(self: Any, inputs: Tensor) -> Tensor:
    global SCALE
    SCALE = 3.0
    return inputs


def goes_without_gradients(self: Any, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return inputs * 2


def with_a_default(self: Any, inputs: Tensor, counts: list[int] = COUNTS) -> Tensor:
    return inputs * counts[0]


def closing(number: list[int]) -> Callable[..., Any]:
    return lambda self, inputs: inputs * number[0]


PLAIN: Mapping[str, Callable[[], nn.Module]] = {
    "loops": lambda: own(loops),
    "assertion": asserting,
    "method": lambda: own(calls_its_method, helped=turns),
    "buffer": lambda: own(lambda self, inputs: inputs + self.get_buffer("shift")),
    "operators": lambda: own(lambda self, inputs: (inputs @ self.first.weight.T - 1) ** 2 / len(inputs)),
    "numbers": lambda: own(lambda self, inputs: inputs * (2 if inputs.sum() > 0 else 1)),  # refused by the recorder
}
NOT_PLAIN: Mapping[str, Callable[[], nn.Module]] = {
    "counter": lambda: own(counts_calls),
    "item": lambda: own(sets_an_item),
    "setting a global": lambda: own(sets_a_global),
    "random": lambda: own(lambda self, inputs: inputs * random.random()),
    "global number": lambda: own(lambda self, inputs: inputs * SCALE),
    "global list": lambda: own(lambda self, inputs: inputs * COUNTS[0]),
    "global function": lambda: own(lambda self, inputs: helper(inputs)),
    "list of its own": lambda: own(lambda self, inputs: inputs * self.counts[0]),
    "list of a layer": lambda: with_a_list(own(lambda self, inputs: inputs * self.first.scale[0])),
    "function of its own": lambda: own(lambda self, inputs: self.act(inputs)),
    "closure": lambda: own(closing([1])),
    "default": lambda: own(with_a_default),
    "context": lambda: own(goes_without_gradients),
    "lambda": lambda: own(lambda self, inputs: (lambda x: x)(inputs)),
    "import": lambda: own(lambda self, inputs: inputs * __import__("random").random()),
    "print": lambda: own(lambda self, inputs: print(inputs)),
    "getattr": lambda: own(lambda self, inputs: getattr(self, "scale") * inputs),  # noqa: B009  # as users do
    "numbers by another way": lambda: own(lambda self, inputs: inputs * inputs.tolist()[0]),
    "held name of a tensor's": lambda: own(lambda self, inputs: inputs * inputs[0].item()),
    "seed": lambda: own(lambda self, inputs: torch.manual_seed(1) and inputs),
    "seed that is read": lambda: own(lambda self, inputs: inputs * torch.initial_seed()),
    "mode": lambda: own(lambda self, inputs: inputs if torch.is_grad_enabled() else -inputs),
    "change of a module": lambda: own(lambda self, inputs: self.first.to(torch.float64)(inputs)),
    "its dictionary": lambda: own(lambda self, inputs: inputs * self.__dict__["scale"]),
    "property": lambda: own(lambda self, inputs: self.helped, helped=property(lambda self: COUNTS[0])),
    "number of the class": lambda: own(lambda self, inputs: self.number * inputs, number=2.0),
    "impure method": lambda: own(calls_its_method, helped=counts_calls),
    "method instead of an operation": lambda: own(lambda self, inputs: self.relu(inputs), relu=counts_calls),
    "attribute access": lambda: own(loops, __getattribute__=lambda self, name: object.__getattribute__(self, name)),
    "call": lambda: own(loops, __call__=lambda self, inputs: inputs),
    "call within": lambda: own(loops, _call_impl=lambda self, inputs: inputs),
    "hook": lambda: hooked(own(loops)),
    "shadowed method": lambda: shadowing(own(loops)),
    "tensor of another class": lambda: with_odd_buffer(own(loops)),
}


def own(forward: Callable[..., Any], **names: Any) -> nn.Module:
    """A model with this forward pass, and further names in its class."""
    made: nn.Module = type("Own", (nn.Module,), {"__init__": _init, "forward": forward, **names})()
    return made


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def shadowing(module: nn.Module) -> nn.Module:
    vars(module)["get_buffer"] = lambda name: torch.rand(4)
    return module


def with_a_list(module: nn.Module) -> nn.Module:
    vars(module.get_submodule("first"))["scale"] = [1]
    return module


class _Odd(Tensor):
    pass


def with_odd_buffer(module: nn.Module) -> nn.Module:
    module.register_buffer("odd", torch.ones(2).as_subclass(_Odd))
    return module


@pytest.mark.parametrize("kind", PLAIN)
def test_classes_of_plain_code_are_recorded(kind: str) -> None:
    assert is_recordable(nn.Sequential(PLAIN[kind](), nn.ReLU()))


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_classes_whose_calls_may_differ_are_not_recorded(kind: str) -> None:
    assert not is_recordable(nn.Sequential(NOT_PLAIN[kind](), nn.ReLU()))


def test_no_plain_name_is_a_method_that_changes_modules() -> None:
    assert plain_code._OPERATIONS.isdisjoint(dir(nn.Module))
    assert plain_code._OTHER_NAMES.isdisjoint(dir(nn.Module))
