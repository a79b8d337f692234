"""Digits by XGBoost's linear booster: pip install xgboost-cpu scikit-learn."""

import json
from functools import cache

import numpy as np
import xgboost
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss

BOOSTER = {"booster": "gblinear", "objective": "multi:softprob", "num_class": 10, "base_score": 0.5, "nthread": 1}
BOOSTER["updater"] = "coord_descent"  # unless given it is "shotgun", whose threads race for other bits in each run
digits = cache(load_digits)  # read once in each process, for a client is made anew for each task


def weights_of(model):
    return model["learner"]["gradient_booster"]["model"]


class Client:
    """Owner of every tenth digit."""

    def __init__(self, client_id):
        self.targets = digits().target[client_id::10]
        self.data = xgboost.DMatrix(digits().data[client_id::10] / 16, label=self.targets, nthread=1)

    def initial(self):
        return [np.zeros((65, 10), np.float32)]  # a row for each pixel, and the last one for the bias

    def booster(self, weights):
        model = json.loads(xgboost.train(BOOSTER, self.data, 1).save_raw("json"))
        weights_of(model)["weights"] = weights.ravel().tolist()
        return xgboost.Booster(BOOSTER, model_file=bytearray(json.dumps(model).encode()))

    def fit(self, arrays, config):
        settings = BOOSTER | {"eta": config["lr"]}
        booster = xgboost.train(settings, self.data, config["epochs"], xgb_model=self.booster(*arrays))
        weights = weights_of(json.loads(booster.save_raw("json")))["weights"]
        return [np.reshape(weights, (65, 10))], len(self.targets), {}

    def evaluate(self, arrays, config):
        chances = self.booster(*arrays).predict(self.data)
        loss = log_loss(self.targets, chances, labels=range(10))
        return loss, len(self.targets), {"accuracy": (chances.argmax(1) == self.targets).mean()}
