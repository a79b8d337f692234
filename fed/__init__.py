"""Federated and decentralised learning on PyTorch: simulate clients, deploy them, compare algorithms.

Importing this package is cheap: what it offers is loaded when it is first used.

Example:
    >>> import fed
    >>> experiment = fed.Experiment(rounds={"count": 2, "cohort": 5}, data={"clients": 20})
    >>> run = fed.simulate(experiment)
    >>> len(run.metrics)
    2
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.version import __version__ as __version__

# In a checkout the other rooms stand beside this folder, in an installed package inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "aggregators" / "__init__.py").is_file():
    __path__.insert(0, str(_checkout))

# Before gRPC is loaded, which reads it once: it would write a line of its own beside each of our sentences on a port or
# a certificate, and thousands of lines a second on what strangers do to a port.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from fed import aggregators as aggregators
    from fed import errors as errors
    from fed.aggregators.base import Aggregator as Aggregator
    from fed.aggregators.peer_rule import PeerRule as PeerRule
    from fed.clients.data import ClientsOnDemand as ClientsOnDemand
    from fed.clients.data import FederatedData as FederatedData
    from fed.clients.data.dealing import partition as partition
    from fed.config.comparison import Comparison as Comparison
    from fed.config.experiment import Experiment as Experiment
    from fed.reports.summary import ComparisonResult as ComparisonResult
    from fed.server.grpc.deploy import serve as serve
    from fed.server.parameter_store import ParameterStore as ParameterStore
    from fed.simulations.compare import compare as compare
    from fed.simulations.existing_runs import compare_runs as compare_runs
    from fed.simulations.simulate import simulate as simulate
    from fed.storage.run import Run as Run

_HOME_OF = {
    "Aggregator": "fed.aggregators.base",
    "ClientsOnDemand": "fed.clients.data",
    "Comparison": "fed.config.comparison",
    "ComparisonResult": "fed.reports.summary",
    "Experiment": "fed.config.experiment",
    "FederatedData": "fed.clients.data",
    "ParameterStore": "fed.server.parameter_store",
    "PeerRule": "fed.aggregators.peer_rule",
    "Run": "fed.storage.run",
    "compare": "fed.simulations.compare",
    "compare_runs": "fed.simulations.existing_runs",
    "partition": "fed.clients.data.dealing",
    "serve": "fed.server.grpc.deploy",
    "simulate": "fed.simulations.simulate",
}

__all__ = sorted([*_HOME_OF, "__version__", "aggregators", "errors"])


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if name in ("aggregators", "errors"):
        return import_module(f"fed.{name}")
    raise AttributeError(f"module 'fed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
