"""Digest of an experiment: which of its keys change what a private simulation releases, and so its noise and ledger."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["BUDGET_KEY", "budget_only_ends", "experiment_sha256"]

BUDGET_KEY = "privacy.budget_epsilon"
"""Key with another value of which a simulation may go on, where :func:`budget_only_ends`."""

_BESIDE = ("name", "checkpoints", "tracking", "simulation")  # sections that change no sum


def experiment_sha256(experiment: Mapping[str, Any]) -> str:
    """Digest of an experiment without its name and what else changes no sum, in hexadecimal digits.

    Args:
        experiment: keys of the experiment.
    """
    named = {key: value for key, value in experiment.items() if key not in _BESIDE}
    if secure := named.get("secure_aggregation"):  # the protocol and its arithmetic alone have the same bits
        named["secure_aggregation"] = {key: value for key, value in secure.items() if key != "mode"}
    if budget_only_ends(named.get("privacy")):
        named["privacy"] = {**named["privacy"], "budget_epsilon": None}
    text = json.dumps(named, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def budget_only_ends(privacy: Any) -> bool:
    """True if the budget of a section ``privacy`` decides when a run ends, and nothing that is released before.

    Under ``unit: sample`` it decides who is asked as well, for each client has spent another part of it.

    Args:
        privacy: keys of the section, or None.
    """
    return isinstance(privacy, Mapping) and privacy.get("unit", "client") == "client"
