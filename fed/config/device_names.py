"""Names of devices that compute, as people write them."""

import re
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

__all__ = ["DeviceName"]

_NAMES = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d?))?|mps")


def _known(name: str) -> str:
    if not _NAMES.fullmatch(name):
        raise ValueError(f"must be auto, cpu, cuda, a GPU such as cuda:1, or mps, got {name!r}: choose one of them")
    return name


DeviceName: TypeAlias = Annotated[str, AfterValidator(_known)]
"""auto: GPUs where there are any, else the CPU; cuda: all GPUs; cuda:1: the second one; mps: Apple's."""
