"""``fed audit``: canaries in one run of an experiment, and the bound that they set its ε from below."""

from typing import TYPE_CHECKING, Annotated

import typer

from fed.cli.documents import read_experiment
from fed.cli.kinds import show_facts
from fed.cli.options import File, Settings
from fed.quantities import counted, epsilon_text

if TYPE_CHECKING:
    from fed.simulations.audit import Audit

__all__ = ["audit"]


def audit(
    file: File,
    settings: Settings = None,
    canaries: Annotated[
        int | None,
        typer.Option(
            help="Number of clients or samples that are put in; more can refute a larger ε.",
            min=20,
            show_default="1000 clients, or 200 samples",
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Probability with which the bound is true.")] = 0.95,
) -> int:
    """Put canaries into one run, and bound the ε that it really has from below; exit code 1 if it claims less."""
    if not 0 < confidence < 1:
        raise typer.BadParameter(f"must be between 0 and 1, got {confidence:g}", param_hint="--confidence")
    experiment = read_experiment(file, settings)
    from fed.simulations.audit import audit as audited  # it imports torch

    found = audited(experiment, canaries=canaries, confidence=confidence)
    show_facts(_told(found))
    typer.echo(f"\n{found.verdict}")
    return int(found.passes_claim)


def _told(found: "Audit") -> list[tuple[str, str]]:
    """Facts of an audit, with their names."""
    guesses = found.guesses
    return [
        ("canaries", f"{guesses.canaries}, of which coins put {found.included} into {counted(found.rounds, 'round')}"),
        ("guesses", f"{guesses.right} of {guesses.made} right"),
        ("bound", f"ε ≥ {guesses.epsilon:.3g} at {found.confidence * 100:.6g} %"),
        ("claimed", f"ε = {epsilon_text(found.claimed_epsilon)} at δ = {found.delta:g}"),
    ]
