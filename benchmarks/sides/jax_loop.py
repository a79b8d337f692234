"""FedAvg as a compiled loop of JAX: ``scan`` over steps, clients and rounds, on one core.

Cohorts and orders are drawn within the compiled rounds. A call computes as many rounds as take some 50 ms, so that
calls cost nothing; rounds of one call count as equally long. Compilation is done before the first round that counts.
What JAX does best on a CPU was tried: ``vmap`` over the cohort is slower than one client after another (1.0 to 1.1
times with digits, 1.8 with MNIST, 1.9 with the CNN); a convolution is a product with patches, channels last, for XLA's
own take nearly five times as long; a maximum over views replaces ``reduce_window``.

Shapes: N clients, of which K are a cohort; S samples of a client, I numbers each; B samples of a step.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"
if hasattr(os, "sched_setaffinity"):  # JAX has threads beside those that its flags hold to one
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from side import Problem, Trained, main
from torch import nn

_CALL_S = 0.05

State = list[tuple[Array, ...]]
"""Parameters of each layer: none, or weights and biases."""


def train(problem: Problem, rounds: int) -> Trained:
    """Train so many rounds."""
    jax.config.update("jax_compilation_cache_dir", str(Path(problem.path).with_name("jax")))
    layers = list(problem.module())
    x_NSI = jnp.stack([_channels_last(inputs) for inputs, _ in problem.clients])
    y_NS = jnp.stack([jnp.asarray(targets.numpy()) for _, targets in problem.clients])
    state = [_parameters(layer) for layer in layers]

    def many_rounds(state: State, x_NSI: Array, y_NS: Array, keys: Array) -> State:
        return lax.scan(lambda state, key: (_round(problem, layers, state, x_NSI, y_NS, key), None), state, keys)[0]

    def compiled(count: int) -> Callable[..., State]:
        call = jax.jit(many_rounds).lower(state, x_NSI, y_NS, keys[:count]).compile()
        jax.block_until_ready(call(state, x_NSI, y_NS, keys[:count]))
        return call

    keys = jax.random.split(jax.random.key(0), rounds)
    one = compiled(1)
    began_s = time.perf_counter()
    jax.block_until_ready(one(state, x_NSI, y_NS, keys[:1]))
    together = max(1, min(rounds, round(_CALL_S / (time.perf_counter() - began_s))))
    several = compiled(together) if together > 1 else one
    ends_s = [time.perf_counter()]
    while len(ends_s) <= rounds:
        done = len(ends_s) - 1
        count = together if done + together <= rounds else 1
        call = several if count == together else one
        state = jax.block_until_ready(call(state, x_NSI, y_NS, keys[done : done + count]))
        took_s = time.perf_counter() - ends_s[-1]
        ends_s += [ends_s[-1] + took_s * (part + 1) / count for part in range(count)]
    return Trained(ends_s[1:], _module(problem, state))


def _round(problem: Problem, layers: list[nn.Module], state: State, x_NSI: Array, y_NS: Array, key: Array) -> State:
    """Train a cohort, and take the mean of its models: all clients hold as many samples."""
    of_cohort, *of_clients = jax.random.split(key, 1 + problem.cohort)
    cohort_K = jax.random.permutation(of_cohort, len(x_NSI))[: problem.cohort]

    def add(total: State, client: tuple[Array, Array]) -> tuple[State, None]:
        place, key = client
        trained = _client(problem, layers, state, x_NSI[place], y_NS[place], key)
        return jax.tree.map(lambda part, of_client: part + of_client / problem.cohort, total, trained), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, state), (cohort_K, jnp.stack(of_clients)))[0]


def _client(problem: Problem, layers: list[nn.Module], state: State, x_SI: Array, y_S: Array, key: Array) -> State:
    """One client's epochs."""
    samples = len(y_S)
    size = min(problem.batch_size, samples)
    if samples % size:
        raise SystemExit("the loop takes whole batches alone")
    orders = [jax.random.permutation(of_epoch, samples) for of_epoch in jax.random.split(key, problem.epochs)]

    def step(state: State, batch_B: Array) -> tuple[State, None]:
        gradient = jax.grad(_loss)(state, layers, x_SI[batch_B], y_S[batch_B])
        return jax.tree.map(lambda value, slope: value - problem.lr * slope, state, gradient), None

    return lax.scan(step, state, jnp.concatenate(orders).reshape(-1, size))[0]


def _loss(state: State, layers: list[nn.Module], x: Array, y_B: Array) -> Array:
    """The mean cross-entropy of a batch."""
    for layer, parameters in zip(layers, state, strict=True):
        x = _output(layer, parameters, x)
    return -jnp.take_along_axis(jax.nn.log_softmax(x), y_B[:, None], 1).mean()


def _output(layer: nn.Module, parameters: tuple[Array, ...], x: Array) -> Array:
    match layer:
        case nn.Linear():
            return x @ parameters[0] + parameters[1]
        case nn.Conv2d():
            return _patches(x, *layer.kernel_size) @ parameters[0].reshape(-1, layer.out_channels) + parameters[1]
        case nn.GroupNorm():
            groups = x.reshape(*x.shape[:-1], layer.num_groups, -1)
            groups = jax.nn.standardize(groups, axis=(1, 2, 4), epsilon=layer.eps)
            return groups.reshape(x.shape) * parameters[0] + parameters[1]
        case nn.ReLU():
            return jax.nn.relu(x)
        case nn.MaxPool2d():
            return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))
        case nn.Flatten():  # in PyTorch's order, which the weights of the next layer have
            return jnp.moveaxis(x, -1, 1).reshape(len(x), -1) if x.ndim == 4 else x.reshape(len(x), -1)
    raise SystemExit(f"the loop knows no {type(layer).__name__}")


def _patches(images: Array, height: int, width: int) -> Array:
    """Neighbourhood of each pixel that a convolution of this size reads, with zeros beyond the border."""
    rows, columns = images.shape[1:3]
    around = ((0, 0), (height // 2, height // 2), (width // 2, width // 2), (0, 0))
    padded = jnp.pad(images, around)
    shifted = [padded[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
    return jnp.concatenate(shifted, -1)


def _channels_last(inputs: torch.Tensor) -> Array:
    return jnp.asarray(inputs.movedim(1, -1).numpy() if inputs.ndim == 4 else inputs.flatten(1).numpy())


def _parameters(layer: nn.Module) -> tuple[Array, ...]:
    """A layer's weights and biases, as JAX has them."""
    return tuple(jnp.asarray(_turned(part.detach()).contiguous().numpy()) for part in layer.parameters())


def _turned(weights: torch.Tensor) -> torch.Tensor:
    """View of PyTorch's weights with the outputs last."""
    if weights.ndim == 4:
        return weights.permute(2, 3, 1, 0)
    return weights.mT if weights.ndim == 2 else weights


def _module(problem: Problem, state: State) -> nn.Module:
    """The trained model."""
    module = problem.module()
    with torch.no_grad():
        for layer, values in zip(module, state, strict=True):
            for part, value in zip(layer.parameters(), values, strict=True):
                _turned(part).copy_(torch.tensor(np.asarray(value)))
    return module


if __name__ == "__main__":
    main(train, packages=("jax", "jaxlib"))
