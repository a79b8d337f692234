"""Whether model, data and loss fit each other, found out before anything is trained."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed.clients.data import FederatedData
from fed.clients.training import Loss
from fed.errors import InvalidData, InvalidModel

__all__ = ["check_batch_norm", "check_labels", "check_model", "cross_entropy"]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of scores [B, C, ...] against integer labels [B, ...]."""
    return functional.cross_entropy(output, target.long())


def check_model(module: nn.Module, data: FederatedData, loss: Loss, labelled: bool) -> int:
    """Send two samples through a model and a loss.

    Args:
        module: the model.
        data: where the samples come from.
        loss: (output, target) → scalar.
        labelled: whether targets are labels of classes, as cross-entropy takes them.

    Returns:
        How many classes the model's output has, where targets are labels; 0 otherwise.

    Raises:
        InvalidModel: if the model cannot take the data, or the loss cannot take the model's output.
        InvalidData: if targets should be labels and are none.
    """
    if not isinstance(module, nn.Module):
        raise InvalidModel(f"model must make a torch.nn.Module, got {type(module).__name__}")
    inputs, targets = (part[:2] for part in next(iter(data.train.values())))
    module.eval()
    try:
        with torch.no_grad():
            output = module(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidModel(
            f"the model cannot take the data's inputs, {inputs.dtype} of shape {tuple(inputs.shape)}: "
            f"{_first_line(error)}"
        ) from error
    if labelled:
        return _classes(output, targets)
    try:
        value = loss(output, targets)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidModel(
            f"the loss cannot take an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(targets.shape)}: {_first_line(error)}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidModel(f"the loss must be a scalar tensor, got {got}: take its mean over the batch")
    return 0


def _classes(output: object, targets: Tensor) -> int:
    if targets.is_floating_point() or targets.is_complex():
        raise InvalidData(
            f"targets must be integer labels for cross-entropy, got {targets.dtype}: give loss= for others"
        )
    if not isinstance(output, Tensor) or output.ndim < 2 or (*output.shape[:1], *output.shape[2:]) != targets.shape:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InvalidModel(
            f"the model's output must be [batch, classes, ...] for cross-entropy with labels of shape "
            f"{tuple(targets.shape)}, got {shape}: change the model, or give loss="
        )
    return output.shape[1]


def check_labels(data: FederatedData, classes: int) -> None:
    """Hold every label to the model's classes.

    Raises:
        InvalidData: if a label is negative or too large; the message names whose it is.
    """
    held = [(f"client {client!r}", pair) for client, pair in data.train.items()]
    if data.test is not None:
        held.append(("the test set", data.test))
    for whose, (_, targets) in held:
        lowest, highest = int(targets.min()), int(targets.max())
        if lowest < 0 or highest >= classes:
            wrong = lowest if lowest < 0 else highest
            raise InvalidData(
                f"labels must be from 0 to {classes - 1}, for the model's output has {classes} classes, got {wrong} in "
                f"{whose}: number the labels from 0, or give the model as many outputs as there are classes"
            )


def check_batch_norm(module: nn.Module, data: FederatedData) -> None:
    """Hold every client to the two samples that BatchNorm needs to normalise over.

    Raises:
        InvalidData: if a client has one; the message names it.
    """
    lonely = [client for client, size in data.sizes.items() if size == 1]
    if lonely and any(isinstance(part, nn.BatchNorm1d) for part in module.modules()):
        raise InvalidData(
            f"a model with BatchNorm1d needs 2 samples or more on every client, got 1 on client {lonely[0]!r} "
            f"({len(lonely)} such): use GroupNorm or LayerNorm, or a partition that gives each client more"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
