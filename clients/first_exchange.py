r"""First exchange of a run whose tables are standardized over all clients, as an experiment of its own.

It is a round of FedAvg on the numbers z that :mod:`fed.clients.data.by_schema` reads. The model is the vector θ of the
means that are sought, 0 at first and in float64. The loss is

.. math:: -\frac{1}{E} \sum_e θ \cdot z_e, \qquad θ - η \nabla = \frac{1}{E} \sum_e z_e \quad (θ = 0, η = 1)

so that one step of size 1 on all of a client's samples leaves their mean there. The mean of the clients' models,
weighted by samples, is the mean over the samples of all clients. Means and deviations take one exchange each: a
deviation from x² and the mean would lose the digits that both share.

Shapes: see :mod:`fed.vectors.layout`.
"""

from typing import Any

from fed.clients.data.by_schema import found
from fed.config.experiment import Experiment
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["MOST_ATTEMPTS", "SoughtMeans", "as_begun", "exchange_of", "learned", "negative_output"]

MOST_ATTEMPTS = 3
"""Largest number of rounds of an exchange, of which the first that anybody answers is its last."""

_ALL = 2**31 - 1  # samples of a batch: all of them
_MOST_COUNTED = 2**16  # samples that a client may count with, where max_weight does not say it


class SoughtMeans(nn.Module):
    """Vector θ of the means that are sought, 0 at first.

    Args:
        features: F, number of means.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mean_F = nn.Parameter(torch.zeros(features, dtype=torch.float64))

    def forward(self, summands_EF: Tensor) -> Tensor:
        """θ·z of each sample, [E]."""
        return summands_EF @ self.mean_F


def negative_output(output_E: Tensor, target: Any) -> Tensor:
    """Mean of the outputs, negative: the step that makes it small adds the mean of the samples to θ."""
    return -output_E.mean()


def exchange_of(experiment: Experiment) -> Experiment:
    """The experiment of the next exchange, with the same clients, tables, held-out shares and secure sums.

    A sum in fixed point has 64 bits, numbers of at most 1, and clients that count with their samples: with
    ``secure_aggregation.max_weight`` at most, 65,536 where that is auto.

    Args:
        experiment: experiment whose table seeks means or deviations.
    """
    rounds: dict[str, Any] = {"count": MOST_ATTEMPTS}
    if deadline_s := getattr(experiment.rounds, "deadline_s", None):
        # A part of the step would be no mean.
        rounds |= {"deadline_s": deadline_s, "partial_work": "drop"}
    keys: dict[str, Any] = {"rounds": rounds}
    if experiment.secure_aggregation is not None:
        given = experiment.dump()["secure_aggregation"]
        heaviest = _MOST_COUNTED if given["max_weight"] == "auto" else given["max_weight"]
        keys["secure_aggregation"] = {**given, "clip": 1.0, "bits": 64, "max_weight": heaviest}
    made = Experiment(
        name=experiment.name,
        seed=experiment.seed,
        data_seed=experiment.data_seed,
        data=None,
        model={"kind": "logistic"},  # in place of which the preparation takes SoughtMeans
        metrics=[],
        local={"lr": 1.0, "epochs": 1, "batch_size": _ALL},
        algorithm={"kind": "fedavg"},
        checkpoints={"every": None},
        simulation={"batching": "off", "workers": 0},
        **keys,
    )
    # As they are: a section may be an object that no document can name.
    parts = {name: getattr(experiment, name) for name in ("data", "table", "evaluation")}
    return made.model_copy(update=parts)


def learned(experiment: Experiment, means_F: Tensor) -> Experiment:
    """The experiment with what an exchange has found.

    Args:
        experiment: experiment whose table seeks means or deviations.
        means_F: model of its exchange, θ after the round.
    """
    assert experiment.table is not None
    return experiment.model_copy(update={"table": found(experiment.table, means_F.tolist())})


def as_begun(experiment: Experiment, begun: Experiment) -> Experiment:
    """The experiment with what the run that it goes on with has found; as it is where their schemas differ otherwise.

    Args:
        experiment: experiment as it is given, which may seek means and deviations.
        begun: experiment in force of the run.
    """
    given = experiment.table
    kept = begun.table
    if given is None or kept is None or not given.sought or given.unscaled() != kept.unscaled():
        return experiment
    return experiment.model_copy(update={"table": kept})
