"""PyTorch's matrix products and convolutions of a round, forward and backward, alone in one thread.

Each client's products have weights of its own, in memory that was allocated beforehand, and nothing else is computed:
no bias, activation, loss, update, mean or order of samples. A layer's products are tried client by client and batched
over the cohort, with weights stored both ways, its convolutions in both memory formats; the fastest counts.

Shapes: K clients of a cohort; B, samples of a step; I inputs and O outputs of a layer.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import torch
from side import Problem, Trained, main
from torch import Size, Tensor, nn

Product = Callable[[], object]


def train(problem: Problem, rounds: int) -> Trained:
    """Compute the products of so many rounds."""
    samples = len(problem.clients[0][1])
    size = problem.batch_size
    ends_s = []
    with torch.inference_mode():
        steps = {part: _step(problem, part) for part in {min(size, samples), samples % size} if part}
        sizes = [size] * (samples // size) + [samples % size] * (samples % size > 0)
        for _ in range(rounds):
            for part in sizes * problem.epochs:
                _compute(steps[part])
            ends_s.append(time.perf_counter())
    return Trained(ends_s, None)


def _step(problem: Problem, size: int) -> list[Product]:
    """The products of one step of all clients of a cohort."""
    layers: list[tuple[nn.Module, Size]] = []
    module = problem.module()
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.register_forward_hook(lambda layer, given, output: layers.append((layer, given[0].shape)))
    module(problem.clients[0][0][:size])
    products: list[Product] = []
    for number, (layer, shape) in enumerate(layers):
        form = _linear if isinstance(layer, nn.Linear) else _convolution
        products += min(form(layer, problem.cohort, shape, number > 0), key=_least_s)
    return products


def _compute(products: Iterable[Product]) -> None:
    for compute in products:
        compute()


def _least_s(products: list[Product]) -> float:
    times_s = []
    for _ in range(20):
        begin_s = time.perf_counter()
        _compute(products)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)


def _linear(layer: nn.Linear, clients: int, shape: Size, goes_on: bool) -> Iterator[list[Product]]:
    """Output, gradient of the weights, and where the backward pass goes on that of the input."""
    inputs = layer.in_features
    outputs = layer.out_features
    x_KBI = torch.randn(clients, shape[0], inputs)
    g_KBO = torch.randn(clients, shape[0], outputs)
    for is_batched, is_transposed in product((False, True), (False, True)):
        w_KIO = torch.randn(clients, outputs, inputs).mT if is_transposed else torch.randn(clients, inputs, outputs)
        of_weights = (g_KBO.mT, x_KBI) if is_transposed else (x_KBI.mT, g_KBO)
        factors = [(x_KBI, w_KIO), of_weights] + [(g_KBO, w_KIO.mT)] * goes_on
        yield [one for left, right in factors for one in _matrix_products(left, right, is_batched)]


def _matrix_products(left: Tensor, right: Tensor, is_batched: bool) -> list[Product]:
    out = torch.empty(len(left), left.shape[1], right.shape[2])
    if is_batched:
        return [partial(torch.bmm, left, right, out=out)]
    return [partial(torch.mm, left[k], right[k], out=out[k]) for k in range(len(left))]


def _convolution(layer: nn.Conv2d, clients: int, shape: Size, goes_on: bool) -> Iterator[list[Product]]:
    """The same for convolutions, client by client."""
    settings = [layer.stride, layer.padding, layer.dilation, False, [0, 0], 1]
    for memory_format in (torch.contiguous_format, torch.channels_last):
        products: list[Product] = []
        for _ in range(clients):
            x = torch.randn(shape).to(memory_format=memory_format)
            w = torch.randn(layer.weight.shape).to(memory_format=memory_format)
            g = torch.randn_like(torch.convolution(x, w, None, *settings))
            products.append(partial(torch.convolution, x, w, None, *settings))
            backward = torch.ops.aten.convolution_backward
            products.append(partial(backward, g, x, w, None, *settings, (goes_on, True, False)))
        yield products


if __name__ == "__main__":
    main(train)
