"""Asynchronous rounds: every answer moves the model at once.

Xie et al., "Asynchronous federated optimization", 2019, arXiv 1903.03934, algorithm 1.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt

from fed.server.buffered import Buffered

__all__ = ["Asynchronous"]
