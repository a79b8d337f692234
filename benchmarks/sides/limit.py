"""What no simulator in one thread can beat: a round's matrix products and convolutions, forward and backward, alone.

Each client's products have weights of its own, in memory that was allocated beforehand, and nothing else is computed:
no bias, activation, loss, update, mean or order of samples. Products are timed client by client and batched over the
cohort, convolutions in both memory formats, and the fastest arrangement counts.

Shapes: K clients of a cohort; B, samples of a step; I inputs and O outputs of a layer.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from side import Problem, Trained, main
from torch import nn

Product = Callable[[], object]


def train(problem: Problem, rounds: int) -> Trained:
    """Compute the products of so many rounds."""
    with torch.inference_mode():
        arrangements = product((False, True), (torch.contiguous_format, torch.channels_last))
        fastest = min((_products(problem, *arrangement) for arrangement in arrangements), key=_round_s)
        return Trained([_round_end_s(fastest) for _ in range(rounds)], None)


def _round_end_s(products: list[Product]) -> float:
    for compute in products:
        compute()
    return time.perf_counter()


def _round_s(products: list[Product]) -> float:
    begin_s = _round_end_s(products)  # the first time warms up
    return _round_end_s(products) - begin_s


def _products(problem: Problem, is_batched: bool, memory_format: torch.memory_format) -> list[Product]:
    """A round's, in order."""
    samples = len(problem.clients[0][1])
    whole, rest = divmod(samples, problem.batch_size)
    of_size = {size: _step(problem, size, is_batched, memory_format) for size in {problem.batch_size, rest} if size}
    epoch = of_size[problem.batch_size] * whole + (of_size[rest] if rest else [])
    return epoch * problem.epochs


def _step(problem: Problem, size: int, is_batched: bool, memory_format: torch.memory_format) -> list[Product]:
    layers: list[tuple[nn.Module, torch.Size]] = []
    module = problem.module()
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.register_forward_hook(lambda layer, given, output: layers.append((layer, given[0].shape)))
    module(problem.clients[0][0][:size])
    products: list[Product] = []
    for number, (layer, shape) in enumerate(layers):
        if isinstance(layer, nn.Linear):
            products += _linear(layer, problem.cohort, size, number > 0, is_batched)
        elif isinstance(layer, nn.Conv2d):
            products += _convolution(layer, problem.cohort, shape, number > 0, memory_format)
    return products


def _linear(layer: nn.Linear, clients: int, size: int, goes_on: bool, is_batched: bool) -> list[Product]:
    x_KBI, w_KIO = torch.randn(clients, size, layer.in_features), torch.randn(clients, *layer.weight.shape[::-1])
    g_KBO = torch.randn(clients, size, layer.out_features)
    x_KIB, w_KOI = x_KBI.transpose(1, 2), w_KIO.transpose(1, 2)
    factors = [(x_KBI, w_KIO), (x_KIB, g_KBO)] + [(g_KBO, w_KOI)] * goes_on
    products: list[Product] = []
    for left, right in factors:
        out = torch.empty(clients, left.shape[1], right.shape[2])
        if is_batched:
            products.append(partial(torch.bmm, left, right, out=out))
        else:
            products += [partial(torch.mm, left[k], right[k], out=out[k]) for k in range(clients)]
    return products


def _convolution(
    layer: nn.Conv2d, clients: int, shape: torch.Size, goes_on: bool, memory_format: torch.memory_format
) -> list[Product]:
    settings = (layer.stride, layer.padding, layer.dilation, False, [0, 0], 1)
    products: list[Product] = []
    for _ in range(clients):
        x = torch.randn(shape).to(memory_format=memory_format)
        w = torch.randn(layer.weight.shape).to(memory_format=memory_format)
        g = torch.randn_like(torch.convolution(x, w, None, *settings))
        mask = (goes_on, True, False)
        products += [
            partial(torch.convolution, x, w, None, *settings),
            partial(torch.ops.aten.convolution_backward, g, x, w, None, *settings, mask),
        ]
    return products


if __name__ == "__main__":
    main(train)
