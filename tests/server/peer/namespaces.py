"""Network namespaces of peers, whose cables can be cut; they need ip, and the right to make them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["Cables", "cables", "ip", "skip_without_namespaces"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def skip_without_namespaces() -> None:
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("needs ip, and the right to make network namespaces")


class Cables:
    """Cables between peers and a hub, each in a namespace of its own."""

    def __init__(self, peers: int) -> None:
        self.namespaces = [f"fed-{os.getpid()}-{peer}" for peer in range(peers)]
        self._hub = f"fed-{os.getpid()}-hub"
        self.hosts = [f"10.78.0.{peer + 1}" for peer in range(peers)]

    def lay(self) -> None:
        ip("netns", "add", self._hub)
        ip("-n", self._hub, "link", "add", "hub", "type", "bridge")
        ip("-n", self._hub, "link", "set", "hub", "up")
        for peer, (namespace, host) in enumerate(zip(self.namespaces, self.hosts, strict=True)):
            ip("netns", "add", namespace)
            port = f"port{peer}"
            ip("link", "add", port, "netns", self._hub, "type", "veth", "peer", "name", "cable", "netns", namespace)
            ip("-n", self._hub, "link", "set", port, "master", "hub", "up")
            ip("-n", namespace, "addr", "add", f"{host}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", namespace, "link", "set", device, "up")

    def cut(self, peer: int) -> None:
        ip("-n", self._hub, "link", "set", f"port{peer}", "down")

    def heal(self, peer: int) -> None:
        ip("-n", self._hub, "link", "set", f"port{peer}", "up")

    def remove(self) -> None:
        for namespace in (*self.namespaces, self._hub):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


@contextmanager
def cables(peers: int) -> Iterator[Cables]:
    """Cables that are removed at the end; the test is skipped where there can be none."""
    skip_without_namespaces()
    made = Cables(peers)
    try:
        try:
            made.lay()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces: {error.stderr.decode()}")
        yield made
    finally:
        made.remove()
