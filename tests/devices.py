"""Devices that tests run on: each test that asks for the fixture ``device`` runs once on each of them.

``--device NAME``, given once or more, names them: cpu, cuda, or pretended, the device of :mod:`tests.pretended_device`.
Without it they are the CPU, and CUDA where there is a GPU.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fed.clients.training import devices
from fed.config import device_names
from fed.simulations import choice

__all__ = ["NAMES", "Current", "found", "on"]

NAMES = ("cpu", "cuda", "pretended")


class Current:
    """Device of the test that runs, for helpers that make trainers."""

    device = torch.device("cpu")


def found() -> list[str]:
    """Names of the devices of this machine that tests run on."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@contextmanager
def on(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of a name, which is what ``auto`` means for as long as the context lasts.

    Args:
        name: one of ``NAMES``.
        monkeypatch: patches of the test.
    """
    if name == "pretended":
        from tests import pretended_device

        with pretended_device.pretended() as mode:
            # The line of an error is the user's, not that of the mode, which each operation goes through.
            monkeypatch.setitem(vars(pretended_device), "__name__", "torch.pretended")
            monkeypatch.setattr(devices, "memory_bytes", lambda _: 2**36)
            # A run writes the name of its device into its experiment.
            monkeypatch.setattr(device_names, "_NAMES", re.compile(f"{device_names._NAMES.pattern}|{name}"))
            yield _taken(mode.device, monkeypatch)
        return
    yield _taken(torch.device("cuda", 0) if name == "cuda" else torch.device("cpu"), monkeypatch)


def _taken(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    named = devices.devices_named
    names = ("auto",) if device.type in ("cpu", "cuda") else ("auto", device.type)
    for module in (devices, choice):
        monkeypatch.setattr(module, "devices_named", lambda name: [device] if name in names else named(name))
    monkeypatch.setattr(Current, "device", device)
    return device
