"""Digits by a network in Keras 3: pip install keras scikit-learn."""

import os
from functools import cache

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported, which reads it once

import keras
from sklearn.datasets import load_digits

digits = cache(load_digits)  # read once in each process, for a client is made anew for each task


def network(lr=0.1):
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.SGD(lr), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Client:
    """Owner of every tenth digit."""

    def __init__(self, client_id):
        self.data = digits().data[client_id::10] / 16, digits().target[client_id::10]

    def initial(self):
        keras.utils.set_random_seed(0)
        return network()

    def fit(self, weights, config):
        keras.utils.set_random_seed(config["seed"])
        model = network(config["lr"])  # anew, since one that is kept keeps its optimizer's state
        model.set_weights(weights)
        told = model.fit(*self.data, batch_size=config["batch_size"], epochs=config["epochs"], verbose=0)
        return model.get_weights(), len(self.data[1]), {"train_loss": told.history["loss"][-1]}

    def evaluate(self, weights, config):
        model = network()
        model.set_weights(weights)
        loss, accuracy = model.evaluate(*self.data, verbose=0)
        return loss, len(self.data[1]), {"accuracy": accuracy}
