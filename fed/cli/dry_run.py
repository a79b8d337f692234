"""``fed client --dry-run``: all that would leave a node, in words."""

from typing import TYPE_CHECKING

import typer

from fed.quantities import counted

if TYPE_CHECKING:
    from fed.clients.node.training_process import TrainingProcess
    from fed.protocol.protocol_pb2 import Joining, Signature

__all__ = ["say_what_would_leave"]


def say_what_would_leave(training: "TrainingProcess", name: str, *, secure: bool, is_app: bool) -> None:
    """Print all that a node would send, without any connection.

    Args:
        training: training process of the node, which is closed.
        name: name of the node.
        secure: True if it takes part under secure aggregation alone.
        is_app: True if it trains with an app of its own.
    """
    from fed.clients.node.said import disclosed

    joining = training.describe()
    training.close()
    joining = disclosed(joining) if secure else joining
    needs_schema = not joining.signature.input_dtype
    begin = (
        _said_by_a_table(name, secure=secure)
        if needs_schema
        else _said_at_first(name, joining, secure=secure, is_app=is_app)
    )
    typer.echo(
        f"{begin}\n"
        f"{_MASKED if secure else _PLAIN}{_OF_AN_APP if is_app and not secure else ''}\n"
        "Where the run names code of users (python:…): that the node accepts it. "
        "Where it promises privacy: which state of the server's own ledger it was told last. "
        "All the while: the ids of the tasks that it holds. Where a task fails, or it takes no part in a run: "
        f"{_SECURE_SENTENCES if secure else _PLAIN_SENTENCES}; whether the model that differences are added to was "
        "lost; whether the fixed part of its model is another than the server's.\n"
        "Nothing else leaves, no sample among it. What a trained model tells of the samples is another matter: see "
        "docs/security.md."
    )


def _said_by_a_table(name: str, *, secure: bool) -> str:
    """Text on the joining of a node whose table can be read by a run's schema alone."""
    names = "the names of columns and classes, which the schema has"
    told = f"{names}, not how many samples it has" if secure else f"how many samples it trains on, and {names}"
    limits = ", that it takes part under secure aggregation alone" if secure else ""
    return (
        "The table can only be read by a run's schema, the section table of its experiment.\n"
        f"When it joins, {name} tells the server: its name, the version of fed, that its data are a table{limits}. "
        f"Once the server has sent the schema: whether the table fits it, and then {told}."
    )


def _said_at_first(name: str, joining: "Joining", *, secure: bool, is_app: bool) -> str:
    """Text on the joining of a node whose data can be read as they are."""
    signature = joining.signature
    shape = " × ".join(map(str, signature.input_shape)) or "a number"
    samples = f"samples of {shape}, not how many" if secure else f"{counted(joining.samples, 'sample')} of {shape}"
    samples += f" ({signature.input_dtype})"
    if is_app:
        samples = "data of its app's own, not which"
    limits = ", that it takes part under secure aggregation alone" if secure else ""
    return (
        f"When it joins, {name} tells the server: its name, the version of fed, that it trains on {samples}"
        f"{limits}{'' if is_app else _names_of(signature)}."
    )


def _names_of(signature: "Signature") -> str:
    """Description of a sample's targets, and of the names of columns and classes, as the node gives it."""
    names = f"the names of {_named(signature)} (of very many, only the hash)"
    return (
        f", that its targets are {_targets(signature)}, and {names}; whether its data are a table, and the names, "
        "shapes and types of a sample's tensors where there are several"
    )


def _targets(signature: "Signature") -> str:
    """Description of a sample's targets, as the node gives it."""
    shape = " × ".join(map(str, signature.target_shape)) or "a number"
    classes = f" up to {signature.classes} classes" if signature.classes else ""
    return f"{shape} each ({signature.target_dtype}){classes}"


def _named(signature: "Signature") -> str:
    """Number of names of each kind; those of columns are the features' and then the targets'."""
    columns = len(signature.columns)
    targets = min(columns, signature.target_shape[-1] if signature.target_shape else 1)
    counts = {"feature": columns - targets, "target": targets, "class": len(signature.labels)}
    said = [counted(number, name) for name, number in counts.items()]
    return f"{', '.join(said[:-1])} and {said[-1]}"


_OF_AN_APP = " The numbers among the metrics that its app returns go with them."
_PLAIN_SENTENCES = (
    "a sentence of why, which may name a folder of this node, the row and column of a table's cell, or a label that "
    "was out of range"
)
_SECURE_SENTENCES = "a sentence of why, from a closed list, without any number or name of this node"
_PLAIN = (
    "For each task it sends: the trained model, or what the algorithm reports in its place; how many samples it was "
    "trained on; the mean training loss; whether what it kept between tasks was lost. With evaluation by clients: how "
    "many samples it holds out, their mean loss and metrics."
)
_MASKED = (
    "For each task it sends: a masked message, of which the sum with others' alone can be read (what it has learnt, "
    "its weight, number of samples and training loss, how much was clipped and capped); for its mask keys, encrypted "
    "shares, signatures, shares of masks, or the reason why it ends the session; whether what it kept between tasks "
    "was lost."
)
