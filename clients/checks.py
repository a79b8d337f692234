"""Checks that algorithm, model, data and loss fit each other, made before any training."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from fed.clients.casting import in_the_models_type
from fed.clients.data import FederatedData, Held, SamplesOnDemand
from fed.clients.data.collate import Collating, batch_of
from fed.clients.data.held import is_real, size_of
from fed.clients.data.samples import check_classes
from fed.clients.scoring.losses import bce, cox, cross_entropy, huber, mse
from fed.clients.scoring.measures import Loss, Metric, Metrics, as_number, scores_of
from fed.clients.training.reading import called
from fed.config.components import Component
from fed.errors import FedError, InvalidData, InvalidExperiment, InvalidModel, first_line, users_errors_as
from fed.vectors import trees
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Ragged, Tree

__all__ = [
    "check_batch_norm",
    "check_labels",
    "check_model",
    "check_state",
    "check_targets",
    "check_trained_part",
    "made_by",
    "module_of",
    "own_copy",
]

_NEED_TARGETS = (cross_entropy, mse, huber, bce, cox)


def module_of(model: "Callable[[], nn.Module] | nn.Module") -> Any:
    """Call a user's factory of modules; a module in its place is taken as it is.

    Raises:
        InvalidModel: if it cannot be called without arguments, or raises an error.
    """
    if isinstance(model, nn.Module):
        return model
    with users_errors_as(InvalidModel, "the model's factory"):
        try:
            return model()
        except TypeError as error:
            # The call itself has failed: no line of the factory was reached.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise InvalidModel(
                    "model must be a torch.nn.Module or a function without arguments that makes one, such as "
                    f"lambda: torch.nn.Linear(20, 2), got {model!r}, whose call raised TypeError: {first_line(error)}"
                ) from error
            raise


def own_copy(made: object) -> "nn.Module":
    """Copy a factory's module to the CPU: training changes it, and a factory may return one module every time.

    Raises:
        InvalidModel: if it is no module, or one that cannot be copied.
    """
    if not isinstance(made, nn.Module):
        raise InvalidModel(f"model must make a torch.nn.Module, got {type(made).__name__}")
    for name, part in made.named_parameters():
        if nn.parameter.is_lazy(part):
            raise InvalidModel(
                f"a model's parameters must have values before the first round, got {name} of a lazy module: give its "
                "layers their sizes, or send a batch through it in a factory that makes it"
            )
        # Each client trains a copy, and deepcopy drops hooks silently.
        if part._backward_hooks or getattr(part, "_post_accumulate_grad_hooks", None):
            raise InvalidModel(
                f"parameters must have no hooks, which copies lose and training does not call, got one on {name}: put "
                "what it does into the forward pass, the loss, or an algorithm's correct()"
            )
    try:
        return copy.deepcopy(made).cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidModel(
            "a model must be one that copy.deepcopy can copy, without lazy buffers and computed tensors, got: "
            f"{first_line(error)}: initialise lazy parts, and replace torch.nn.utils.weight_norm, which holds a "
            "computed tensor, by torch.nn.utils.parametrizations.weight_norm"
        ) from error


def check_model(
    module: "nn.Module", data: FederatedData, loss: Loss, metrics: Metrics, collate: Collating | None = None
) -> int:
    """Send two samples through a model, a loss and metrics.

    Args:
        module: the model.
        data: source of the two samples.
        loss: (output, target) → scalar; cross-entropy takes labels of classes.
        metrics: name → (output, target) → number.
        collate: the run's collate, or None.

    Returns:
        Number of classes of the model's output, where targets are labels; 0 otherwise.

    Raises:
        InvalidModel: if the model cannot take the data, the loss cannot take the model's output, or a metric gives no
            number.
        InvalidData: if targets should be labels and are none, or samples of several lengths have no collate.
    """
    inputs, targets = _two_samples(data.read(data.clients[0]), collate)
    if targets is None:
        _check_without_targets(loss, metrics)
    # In evaluation, since BatchNorm refuses a single sample when it trains.
    module.eval()
    _check_parameters(module, inputs, is_collated=collate is not None)
    what = f"the model cannot take the data's inputs, {_described(inputs)}"
    with torch.no_grad():
        output = _tried(what, _output, module, inputs, collate is None)
        classes = _classes(output, targets) if loss is cross_entropy else _no_classes(loss, output, targets)
        if loss is cross_entropy:  # here, for the loss of a label that no output stands for has no sentence
            _check_classes(targets, f"client {data.clients[0]!r}", classes)
        for name, metric in metrics.items():
            _check_metric(name, metric, output, targets)
    _check_gradient(module, loss, inputs, targets)
    return classes


def _check_parameters(module: "nn.Module", inputs: Tree, *, is_collated: bool) -> None:
    """Check that a dictionary of inputs has all that the model must be given."""
    if not isinstance(inputs, dict):
        return
    parameters = inspect.signature(module.forward).parameters
    if not parameters.keys() >= inputs.keys():  # a name that the model does not know is the mistake to tell of
        return
    for name, parameter in parameters.items():
        has_default = parameter.default is not parameter.empty
        if has_default or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in inputs:
            continue
        mask = f", or write collate: {{kind: pad, mask: {name}}} if it is the mask of padded places"
        raise InvalidModel(
            f"the model needs {name}, got inputs with {', '.join(inputs)} alone: give {name} in the inputs"
            f"{mask if is_collated else ''}"
        )


def _output(module: "nn.Module", inputs: Tree, is_cast: bool) -> Any:
    """Output of a model; where inputs are cast, its error is one that their type has no part in."""
    try:
        return called(module, inputs)
    except Exception:
        if is_cast:
            # PyTorch complains of the type first, though the shape is wrong, too.
            called(module, in_the_models_type(inputs, module))
        raise


def _check_gradient(module: "nn.Module", loss: Loss, inputs: Tree, targets: Tree) -> None:
    """Check that the loss depends on the parameters, where some of them are trained."""
    if not any(part.requires_grad for part in module.parameters()):
        return
    with torch.enable_grad():
        value = loss(called(module, inputs), targets)
    if isinstance(value, Tensor) and not value.requires_grad:
        raise InvalidModel(
            "the loss must have a gradient, got one that depends on no parameter of the model: leave .detach(), "
            ".item(), .numpy() and torch.no_grad() out of the model and the loss"
        )


def _two_samples(held: Held, collate: Collating | None) -> tuple[Tree, Tree]:
    """Batch of two samples on the CPU, or of the only one."""
    parts = [] if isinstance(held, SamplesOnDemand) or collate is not None else held
    names = zip(("inputs", "targets"), parts, strict=False)
    leaves = [leaf for name, part in names for leaf in trees.named_leaves(part, name)]
    ragged = [name for name, leaf in leaves if isinstance(leaf, Ragged)]
    if ragged:
        raise InvalidData(
            f"samples of several lengths need a collate that makes batches of them, got a list in {ragged[0]} and no "
            "collate: write collate: pad, or name a function of your own there; where all have one length, give a "
            "tensor"
        )
    batch = batch_of(held, torch.arange(min(2, size_of(held))), collate, training=False)
    # Copies, for a model may change its inputs in place.
    inputs, targets = (trees.mapped(lambda leaf: leaf.clone().cpu(), part) for part in batch)
    return inputs, targets


def _check_without_targets(loss: Loss, metrics: Metrics) -> None:
    if getattr(loss, "func", loss) in _NEED_TARGETS:
        raise InvalidData(
            f"the loss {_name_of(loss)} needs targets, got inputs alone: write loss: model where the model returns its "
            "own loss, or give (inputs, targets)"
        )
    if metrics:
        raise InvalidExperiment(
            f"metrics need targets, got inputs alone and the metric {next(iter(metrics))}: write metrics: [], or give "
            "(inputs, targets)"
        )


def _described(tree: Tree) -> str:
    """Types and shapes of the leaves."""
    parts = [f"{name} {leaf.dtype} of shape {tuple(leaf.shape)}" for name, leaf in trees.named_leaves(tree, "")]
    return ", ".join(parts).strip()


def _no_classes(loss: Loss, output: Any, targets: Tree) -> int:
    got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"type {type(output).__name__}"
    what = f"shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"form {trees.outline(targets)}"
    shapes = f"an output of {got} and a target of {what}"
    value = _tried(f"the loss cannot take {shapes}", loss, output, targets)
    if not isinstance(value, Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidModel(f"the loss must be a scalar tensor, got {got}: take its mean over the batch")
    return 0


def _check_metric(name: str, metric: Metric, output: Any, targets: Tree) -> None:
    """Check that a metric gives a number. One that raises may need more samples than two; evaluation will tell."""
    try:
        value = metric(output, targets)
    except FedError:
        raise
    except Exception:
        return
    as_number(name, value, torch.device("cpu"))


def _tried(failure: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a user's function; its errors become a sentence."""
    try:
        return function(*arguments)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, FedError):  # such as InvalidInput, which is a ValueError, too
            raise
        raise InvalidModel(f"{failure}: {first_line(error)}") from error


def _classes(output: Any, targets: Tree) -> int:
    if not isinstance(targets, Tensor):
        raise InvalidData(
            f"targets must be one tensor of integer labels for cross-entropy, got {trees.outline(targets)}: give that, "
            "or write a loss of your own"
        )
    if is_real(targets):
        raise InvalidData(
            f"targets must be integer labels for cross-entropy, got {targets.dtype}: write loss: mse, for example, or "
            "give loss= in Python"
        )
    scores: Tensor = scores_of(output)
    expected = (*scores.shape[:1], *scores.shape[2:])
    if scores.ndim >= 2 and targets.shape == (*expected, 1):
        raise InvalidData(
            f"targets must be labels of shape {expected} for cross-entropy, got {tuple(targets.shape)}: give them "
            "without the last dimension, labels.squeeze(-1)"
        )
    if scores.ndim < 2 or expected != targets.shape:
        form = "[batch, classes, ...]" if scores is output else "logits [batch, ..., classes]"
        shape = scores.shape if scores is output else (*scores.shape[:1], *scores.shape[2:], *scores.shape[1:2])
        raise InvalidModel(
            f"the model's output must be {form} for cross-entropy with labels of shape {tuple(targets.shape)}, got "
            f"{tuple(shape)}: change the model, or give loss="
        )
    return scores.shape[1]


def check_labels(data: FederatedData, classes: int) -> FederatedData:
    """Check that every label is one of the model's classes.

    Args:
        data: data with the labels.
        classes: number of classes of the model's output, ≥ 1.

    Returns:
        The data; those on demand hold each client that is read to these classes.

    Raises:
        InvalidData: if a label is negative or too large, in memory, in a test set or on the first client on demand;
            the message names the client or test set. Or if data on demand have more classes than the model.
    """
    for owner, targets in _targets(data):
        _check_classes(targets, owner, classes)
    if not data.is_on_demand:
        return data
    # Labels on demand are checked when they are read: here only the number of classes is known.
    if data.classes is not None and data.classes > classes:
        raise InvalidData(
            f"data on demand must have at most {classes} classes, for the model's output has no more, got "
            f"classes={data.classes}: give the model as many outputs as there are classes"
        )
    return data.labelled(classes)


def _check_classes(targets: Tree, owner: str, classes: int) -> None:
    check_classes(targets, owner, classes, why="for the model has as many outputs", are_labels=True)


def check_targets(data: FederatedData, loss: Loss) -> None:
    """Check that targets are in the range that a built-in loss takes.

    Args:
        data: data with the targets.
        loss: loss that may say which targets it takes.

    Raises:
        InvalidData: if some are not, in memory, in the test set or on the first client on demand.
    """
    # A loss of the user's own says nothing of the targets that it takes.
    fit, what = getattr(loss, "targets", (None, ""))
    if fit is None:
        return
    for owner, targets in _targets(data):
        if isinstance(targets, Tensor) and not fit(targets):
            raise InvalidData(
                f"targets of {owner} must be {what} for the loss {_name_of(loss)}, got others: correct them, or use "
                "another loss"
            )


def _name_of(loss: Loss) -> str:
    name: str = getattr(loss, "__name__", type(loss).__name__)
    return name


def _targets(data: FederatedData) -> Iterator[tuple[str, Tree]]:
    """The targets in memory, each with its owner's name; of clients on demand those of the first one."""
    clients = data.clients[:1] if data.is_on_demand else data.clients
    held = [*((f"client {client!r}", data.read(client)) for client in clients), *data.tests()]
    yield from ((owner, pair[1]) for owner, pair in held if not isinstance(pair, SamplesOnDemand))


def check_state(module: "nn.Module", precision: str) -> None:
    """Check that a model's first state can be averaged, and that its type fits the precision of training.

    Raises:
        InvalidModel: if a number is not finite, or a model of float64 should be trained in half precision.
    """
    for name, part in module.state_dict().items():
        if isinstance(part, Tensor) and part.is_floating_point() and not bool(torch.isfinite(part).all()):
            value = part[~torch.isfinite(part)][0].item()
            raise InvalidModel(
                f"a model's state must be finite, so that it can be averaged, got {value} in {name}: initialise it, or "
                "register a constant such as a mask with persistent=False"
            )
    if precision != "float32" and any(part.dtype == torch.float64 for part in module.parameters()):
        reason = "PyTorch's autocast would leave it in float64"
        if precision == "tf32":
            reason = "TF32 is for products of float32"
        raise InvalidModel(
            f"local.precision must be float32, which leaves a model in its own type, for a model of float64, got "
            f"{precision}: {reason}; convert model and data with .float()"
        )


def check_trained_part(module: "nn.Module", tried: "nn.Module") -> None:
    """Check that a forward pass leaves the choice of what is trained as it is.

    Args:
        module: the model.
        tried: a copy of it after forward passes.

    Raises:
        InvalidModel: if a parameter is trained in one of them alone.
    """
    before = dict(module.named_parameters())
    for name, part in tried.named_parameters():
        if name in before and part.requires_grad != before[name].requires_grad:
            now = "is" if part.requires_grad else "is not"
            raise InvalidModel(
                f"a model's forward pass must not change requires_grad, which says what is trained and travels, got "
                f"{name}, which {now} trained after one: set it where the model is made, or name model.train"
            )


def made_by(section: Component, key: str, *bases: type) -> Any:
    """Make the object of a section, and check that it is of a class that the section takes: it may be the user's own.

    Args:
        section: section of the experiment.
        key: name of that section, such as ``uplink``.
        bases: classes of which the product must be an instance.

    Returns:
        An instance of one of them.

    Raises:
        InvalidExperiment: if it is of none of them.
    """
    made = section.make()
    if not isinstance(made, bases):
        names = " or ".join(f"{base.__module__}.{base.__name__}" for base in bases)
        raise InvalidExperiment(
            f"{key} {section.kind} must make a {names}, got {type(made).__name__}: derive it from "
            f"{'that' if len(bases) == 1 else 'one of them'}"
        )
    return made


def check_batch_norm(module: "nn.Module", data: FederatedData, batch_size: int) -> None:
    """Check that clients (on demand: the first one) and batches have the two samples that BatchNorm needs.

    Args:
        module: the model.
        data: the clients' data.
        batch_size: samples in a batch.

    Raises:
        InvalidData: if a client has a single sample; the message names it.
        InvalidExperiment: if a batch has a single sample.
    """
    if not any(isinstance(part, nn.BatchNorm1d) for part in module.modules()):
        return
    if batch_size == 1:
        raise InvalidExperiment(
            "local.batch_size must be 2 or more for a model with BatchNorm1d, got 1: raise it (accumulate does not "
            "count), or use GroupNorm or LayerNorm"
        )
    clients = data.clients[:1] if data.is_on_demand else data.clients
    # A last single sample joins the batch before it, but a client's only one has none to join.
    lonely = [client for client in clients if data.size_of(client) == 1]
    if lonely:
        raise InvalidData(
            f"a model with BatchNorm1d needs 2 samples or more on every client, got 1 on client {lonely[0]!r} "
            f"({len(lonely)} such): use GroupNorm or LayerNorm, or a partition that gives each client more"
        )
