"""A stranger without a certificate of the authority, that connects again and again for a while, and says how often.

- ``garbage``: sends bytes that are no TLS and waits for the end; ``hasty``: the same without waiting;
- ``http``: asks by HTTP/1;
- ``bare``: speaks TLS and shows no certificate;
- ``foreign``: speaks TLS and shows the certificate of another authority;
- ``silent``: holds 500 connections open and says nothing;
- ``spinning``: touches no port and keeps one core busy, for comparison.
"""

import argparse
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

KINDS = ("garbage", "hasty", "http", "bare", "foreign", "silent", "spinning")

_WAITS_S = 5.0
_SILENT = 500
_GARBAGE = b"\xff" + os.urandom(63)  # the first byte of TLS would have been 22
_REQUEST = b"GET / HTTP/1.1\r\nHost: server\r\n\r\n"


def speaking(content: bytes, *, waits: bool) -> Callable[[socket.socket], None]:
    """A visit that sends these bytes.

    Args:
        content: the bytes to send.
        waits: True if the visit waits for the other side to end the connection.
    """

    def visit(connection: socket.socket) -> None:
        connection.sendall(content)
        while waits and connection.recv(4096):
            pass

    return visit


def encrypted(certificate: Path | None) -> Callable[[socket.socket], None]:
    """A visit by TLS, with the certificate and the key in a folder, if there is one."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate / "certificate.pem", certificate / "key.pem")

    def visit(connection: socket.socket) -> None:
        with context.wrap_socket(connection) as wrapped:
            while wrapped.recv(4096):
                pass

    return visit


def visits(kind: str, address: tuple[str, int], certificate: Path | None, until_s: float) -> int:
    """Come again and again; returns how often.

    Args:
        kind: the kind of stranger.
        address: host and port that it comes to.
        certificate: folder with a certificate from another authority.
        until_s: the end, by the monotonic clock.
    """
    visit = {
        "garbage": lambda: speaking(_GARBAGE, waits=True),
        "hasty": lambda: speaking(_GARBAGE, waits=False),
        "http": lambda: speaking(_REQUEST, waits=True),
        "bare": lambda: encrypted(None),
        "foreign": lambda: encrypted(certificate),
    }[kind]()
    count = 0
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(address, _WAITS_S) as connection:
            count += 1
            visit(connection)
    return count


def main() -> None:
    """Come, and say how often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--certificate", type=Path, help="a folder with the certificate of another authority")
    given = parser.parse_args()
    address = ("127.0.0.1", given.port)
    until_s = time.monotonic() + given.seconds
    count = 0
    if given.kind == "spinning":
        while time.monotonic() < until_s:
            pass
    elif given.kind == "silent":
        held = [socket.create_connection(address, _WAITS_S) for _ in range(_SILENT)]
        time.sleep(max(until_s - time.monotonic(), 0.0))
        count = len(held)
    else:
        count = visits(given.kind, address, given.certificate, until_s)
    print(count)


if __name__ == "__main__":
    main()
