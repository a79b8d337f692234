"""Digits by scikit-learn's SGDClassifier: pip install scikit-learn."""

from functools import cache

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

CLASSES = np.arange(10)
digits = cache(load_digits)  # read once in each process, for a client is made anew for each task


class Client:
    """Owner of every tenth digit."""

    def __init__(self, client_id):
        self.inputs = digits().data[client_id::10] / 16
        self.targets = digits().target[client_id::10]

    def initial(self):
        return {"coef": np.zeros((10, 64)), "intercept": np.zeros(10)}

    def fit(self, arrays, config):
        model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=config["lr"], random_state=config["seed"])
        model.coef_, model.intercept_ = arrays
        for _ in range(config["epochs"]):
            model.partial_fit(self.inputs, self.targets, classes=CLASSES)  # all, since a client may not have some
        return [model.coef_, model.intercept_], len(self.targets), {}

    def evaluate(self, arrays, config):
        model = SGDClassifier(loss="log_loss")
        model.coef_, model.intercept_ = arrays
        model.classes_ = CLASSES
        loss = log_loss(self.targets, model.predict_proba(self.inputs), labels=CLASSES)
        return loss, len(self.targets), {"accuracy": model.score(self.inputs, self.targets)}
