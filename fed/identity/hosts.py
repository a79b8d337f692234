"""Hosts of a server: the names and addresses that its certificate has, so that nodes know whom they reach."""

import ipaddress
import re
import socket
from collections.abc import Sequence

from fed.errors import InvalidCredentials

__all__ = ["default_hosts", "valid_hosts"]

_HOST = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


def default_hosts() -> tuple[str, ...]:
    """Hosts under which a server is reached: its own machine's, and its host name."""
    own = socket.gethostname()
    # All three loopback names: which of them a resolver chooses differs between systems.
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", *([own] if _is_host(own) else ()))))


def valid_hosts(hosts: Sequence[str] | None) -> tuple[str, ...]:
    """Hosts that a certificate may name, each once; those of this machine where none are given.

    Raises:
        InvalidCredentials: if one is neither a name nor an address, or there is none.
    """
    if hosts is None:
        return default_hosts()
    for host in hosts:
        if not _is_host(host):
            raise InvalidCredentials(f"a host must be a name or an IP address, without a port, got {host!r}")
    if not hosts:
        raise InvalidCredentials("hosts must name at least one, got none: give those by which nodes reach the server")
    return tuple(dict.fromkeys(hosts))


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        last = host.rpartition(".")[2]
        return bool(_HOST.fullmatch(host)) and not last.isdigit()  # 1.2.3.4.5 is no host name, but a mistyped address
    return "%" not in host  # a zone such as fe80::1%eth0 means nothing to another machine
