"""Confusion matrix of a run's model on the test set, where it classifies.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence

from fed.clients.data import SamplesOnDemand
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training.executor import Executor, Item
from fed.clients.training.work_items import CountClasses, Recipe
from fed.reports.population import Confusion
from fed.server.evaluation import parts_of
from fed.server.federation import State
from fed.vectors.tensors import Tensor

__all__ = ["confusion_of"]


def confusion_of(recipe: Recipe, state: State, executor: Executor, names: Sequence[object] = ()) -> Confusion | None:
    """Samples of the whole test set by true and by predicted class.

    Args:
        recipe: recipe with the test set.
        state: state of the model.
        executor: executor that does the work.
        names: names of the classes, in their order; empty where they have none.

    Returns:
        The matrix, or one without counts where there are too many classes; None without a test set, and where the model
        gives no class for each sample: the loss is not the cross-entropy, or a sample has several labels.
    """
    if recipe.test is None or recipe.loss is not cross_entropy or not _classifies_samples(recipe):
        return None
    tickets = []
    for first, end in parts_of(recipe):
        label = f"the confusion of test samples {first} to {end - 1}"
        tickets.append(executor.submit(Item(CountClasses(first, end), state, label, cost=end - first)))
    counts = [tensors[0] for _, _, tensors in executor.results(tickets) if tensors]
    if not counts:
        return Confusion(None, [])
    total_CC = sum(counts[1:], counts[0])
    # Names that are not as many as the model's outputs would be put to the wrong classes.
    labels: list[object] = list(names) if len(names) == len(total_CC) else list(range(len(total_CC)))
    return Confusion(total_CC.numpy(), labels)


def _classifies_samples(recipe: Recipe) -> bool:
    """True if each test sample has one label, as far as this is known without reading samples."""
    if recipe.collate is not None or isinstance(recipe.test, SamplesOnDemand):
        return True
    _, targets = recipe.test_samples
    return isinstance(targets, Tensor) and targets.ndim == 1
