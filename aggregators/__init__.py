"""Aggregation algorithms and peer rules: equations over ``mean`` and ``mix``, pure functions without I/O or clock.

Every built-in algorithm, the bases and the transforms can be imported from here; each is loaded when it is first used.

Example:
    >>> from fed.aggregators import FedProx
    >>> FedProx(mu=0.1)
    FedProx(mu=0.1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fed.config.registry import ALGORITHMS

if TYPE_CHECKING:
    from fed.aggregators.base import *  # noqa: F403  # for type checkers alone
    from fed.aggregators.peer_rule import *  # noqa: F403  # as above
    from fed.aggregators.transforms import *  # noqa: F403  # as above

_BASES = ("Aggregator", "Algorithm", "ClientWork", "LocalRule", "Phase", "Reduced", "Report")
_TRANSFORMS = (
    *("Adagrad", "Adam", "Chain", "Clip", "Composed", "Lookahead", "Messages", "Momentum", "Nesterov", "Reducer"),
    *("Scale", "Transform", "TrustRatio", "Weigh", "WeightDecay", "Yogi", "chain"),
)
_HOME_OF = {
    **{target.partition(":")[2]: target.partition(":")[0] for target in ALGORITHMS.builtin.values()},
    **dict.fromkeys(_BASES, "fed.aggregators.base"),
    "PeerRule": "fed.aggregators.peer_rule",
    **dict.fromkeys(_TRANSFORMS, "fed.aggregators.transforms"),
}

__all__ = sorted(_HOME_OF)  # the registry names the algorithms


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'fed.aggregators' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
