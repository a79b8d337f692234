"""Losses of a batch, and of each of its samples alone.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PositiveFloat

from fed.clients.scoring.measures import IGNORED, Loss, alike, declared, risks_and_times, scores_of
from fed.errors import InvalidModel
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = [
    "bce",
    "counted",
    "counted_cross_entropy",
    "cox",
    "cross_entropy",
    "huber",
    "model_loss",
    "mse",
    "of_each_client",
    "of_each_sample",
    "outputs_for",
]


@declared(mean_over_samples=True, over_counted=True)
def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of scores [B, C, ...], or of logits [B, ..., C], against integer labels [B, ...].

    Labels of −100 do not count: the mean is over the others of the batch.
    """
    return nn.functional.cross_entropy(scores_of(output), target.long())


@declared(mean_over_samples=True, over_counted=True)
def counted_cross_entropy(output: Any, target: Tensor) -> Tensor:
    """:func:`cross_entropy` that is 0, rather than NaN, for a batch in which no label counts."""
    total = nn.functional.cross_entropy(scores_of(output), target.long(), reduction="sum", ignore_index=IGNORED)
    return total / counted(target).sum().clamp(min=1)


def counted(target: Tensor) -> Tensor:
    """True for each label that counts, [B, ...]."""
    return target != IGNORED


@declared(mean_over_samples=True, takes_scores=False)
def model_loss(output: Any, target: Any) -> Tensor:
    """Loss that the model itself has found and returned as ``loss``, alone or beside other outputs.

    Raises:
        InvalidModel: if the output has none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list):
        loss = next((part for part in output if isinstance(part, Tensor) and part.ndim == 0), None)
    if loss is None and isinstance(output, Tensor) and output.ndim == 0:
        loss = output
    if isinstance(loss, Tensor):
        return loss
    got = f"the keys {', '.join(map(str, output))}" if isinstance(output, Mapping) else type(output).__name__
    raise InvalidModel(
        f"loss: model takes the loss that the model returns, got {got} without one: give the inputs what it needs, "
        "such as labels, or give targets and another loss"
    )


def _values(targets: Tensor) -> int:
    """Number of outputs that a model needs for targets of this shape: one for each number."""
    return math.prod(targets.shape[1:])


@declared(mean_over_samples=True, outputs=_values)
def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of real targets [B] or [B, C]; an output [B, 1] fits targets [B]."""
    return nn.functional.mse_loss(*alike(output, target))


@declared(mean_over_samples=True, outputs=_values)
def huber(output: Tensor, target: Tensor, delta: PositiveFloat = 1.0) -> Tensor:
    """Mean of Huber's loss of real targets: squared for small errors, linear for large ones (Huber 1964).

    Args:
        output: [B], [B, 1] or [B, C].
        target: [B] or [B, C].
        delta: δ > 0, the error from which on the loss is linear.
    """
    return nn.functional.huber_loss(*alike(output, target), delta=delta)


def _are_shares(targets: Tensor) -> bool:
    return bool(((targets >= 0) & (targets <= 1)).all())


def _have_events(targets: Tensor) -> bool:
    return targets.ndim != 2 or targets.shape[1] != 2 or bool(((targets[:, 1] == 0) | (targets[:, 1] == 1)).all())


@declared(mean_over_samples=True, outputs=_values, targets=(_are_shares, "in [0, 1]"))
def bce(output: Tensor, target: Tensor) -> Tensor:
    """Mean binary cross-entropy of scores [B] or [B, C] before the sigmoid; targets in [0, 1], several a sample too."""
    return nn.functional.binary_cross_entropy_with_logits(*alike(output, target))


@declared(
    mean_over_samples=False, outputs=lambda targets: 1, targets=(_have_events, "(time, event) with events 0 or 1")
)
def cox(output: Tensor, target: Tensor) -> Tensor:
    r"""Cox's negative log partial likelihood of survival times, by Breslow where times are equal (Cox 1972).

    .. math::
        -\frac{1}{B} \sum_{i:\, e_i = 1} \Big( o_i - \log \sum_{j:\, t_j \geq t_i} e^{o_j} \Big)

    The samples at risk are those of the batch, so that it is no mean over samples. The sum is divided by the batch's
    size, as FLamby's baseline does (Ogier du Terrail et al. 2022, 2210.04620), which takes no account of equal times.

    Args:
        output: [B] or [B, 1], the logarithm of each sample's risk.
        target: [B, 2], each sample's time, and 1 where the event was seen then, 0 where the sample was censored.
    """
    risk_B, time_B, event_B = risks_and_times(output, target)
    # By falling time all samples at risk stand before a sample: one cumulative sum is enough.
    order = time_B.argsort(descending=True, stable=True)
    risk_B = risk_B[order]
    time_B = time_B[order]
    event_B = event_B[order]
    # Breslow: samples of one time share the sum up to the last of them, which has all samples at risk before it.
    last_B = torch.searchsorted(-time_B, -time_B, right=True) - 1
    # In logarithms, since exponentials of risks leave float32's range.
    at_risk_B = risk_B.logcumsumexp(0)[last_B]
    return -((risk_B - at_risk_B) * event_B.to(risk_B.dtype)).mean()


def outputs_for(loss: Loss, targets: Tree, classes: Callable[[], int | None]) -> int:
    """Number of outputs of a built-in model for a loss and such targets; at least 1.

    Args:
        loss: loss of the experiment.
        targets: targets of some client, [E, ...].
        classes: () → number of classes; None where targets are no labels.
    """
    of_targets: Callable[[Tensor], int] | None = getattr(loss, "outputs", None)
    if of_targets is None and isinstance(targets, Tensor) and (targets.is_floating_point() or targets.is_complex()):
        of_targets = _values
    # At least one: data of a single class, or of none, still have a model.
    return max(1, of_targets(targets) if of_targets else classes() or 1)


def of_each_client(output: Tensor, target: Tensor, weights_KB: Tensor) -> Tensor:
    r"""Cross-entropy [K] of each client's batch, over the labels that count.

    .. math::
        L_k = \sum_b w_{kb} \; \frac{S_k}{\max(1, N_k)}, \qquad
        S_k = \sum_{b:\, w_{kb} > 0} \sum_t c_{kbt} \, ℓ_{kbt}, \qquad
        N_k = \sum_{b:\, w_{kb} > 0} \sum_t c_{kbt}

    Args:
        output: [K · B, C, ...].
        target: [K · B, ...]; c is 0 for labels of −100, else 1.
        weights_KB: w ≥ 0; their sum is the batch's share of a step. 0 where a place is filled up.
    """
    counts = counted(target)
    # An ignored label is no place in the scores.
    losses = _cross_entropies(output, target.where(counts, 0)).where(counts, 0)
    is_real_KB = weights_KB > 0
    sums_KB = losses.flatten(1).sum(1).view(weights_KB.shape) if target.ndim > 1 else losses.view(weights_KB.shape)
    counts_KB = counts.flatten(1).sum(1).view(weights_KB.shape) if target.ndim > 1 else counts.view(weights_KB.shape)
    counted_K = (counts_KB * is_real_KB).sum(1).clamp(min=1)
    return weights_KB.sum(1) * sums_KB.where(is_real_KB, 0).sum(1) / counted_K


def of_each_sample(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    """Losses [B] of samples, each as if it were a batch of its own.

    Args:
        loss: (output, target) → a scalar.
        output: [B, ...].
        target: [B, ...].
    """
    if loss is not cross_entropy:
        losses_B: Tensor = torch.func.vmap(lambda one, its: loss(one.unsqueeze(0), its.unsqueeze(0)))(output, target)
        return losses_B
    losses = _cross_entropies(output, target)
    return losses.flatten(1).mean(1) if target.ndim > 1 else losses


def _cross_entropies(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each label, in the shape of the labels."""
    # Classes first, because PyTorch's softmax over the last of few numbers takes eight times as long.
    log_p_CE = output.movedim(1, 0).flatten(1).contiguous().log_softmax(0)
    losses_E = log_p_CE.gather(0, target.long().flatten().unsqueeze(0)).neg()
    return losses_E.view(target.shape) if target.ndim > 1 else losses_E.squeeze(0)
