"""Digits by a network in JAX: pip install jax scikit-learn."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

digits = cache(load_digits)  # read once in each process, for a client is made anew for each task


@jax.jit  # outside the client, so that each process compiles it once
def measured(params, inputs, targets):
    hidden = jnp.tanh(inputs @ params[0] + params[1])
    scores = hidden @ params[2] + params[3]
    loss = -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[:, None], axis=1).mean()
    return loss, (scores.argmax(1) == targets).mean()


gradients = jax.jit(jax.grad(measured, has_aux=True))


class Client:
    """Owner of every tenth digit."""

    def __init__(self, client_id):
        self.inputs = digits().data[client_id::10].astype(np.float32) / 16
        self.targets = digits().target[client_id::10]

    def initial(self):
        keys = jax.random.split(jax.random.key(0))
        first = jax.random.normal(keys[0], (64, 32)) / 8
        second = jax.random.normal(keys[1], (32, 10)) / 6
        return [first, jnp.zeros(32), second, jnp.zeros(10)]

    def fit(self, params, config):
        draw = np.random.default_rng(config["seed"])
        size = config["batch_size"]
        for _ in range(config["epochs"]):
            order = draw.permutation(len(self.targets))
            for batch in order[: len(order) // size * size].reshape(-1, size):  # another shape compiles anew
                found, _ = gradients(params, self.inputs[batch], self.targets[batch])
                params = [param - config["lr"] * part for param, part in zip(params, found, strict=True)]
        return params, len(self.targets), {}

    def evaluate(self, params, config):
        loss, accuracy = measured(params, self.inputs, self.targets)
        return loss, len(self.targets), {"accuracy": accuracy}
