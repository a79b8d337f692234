"""Door: the listening sockets of a port, at which the kernel can turn new connections away.

gRPC offers no limit on how often others may connect. On Linux a socket filter does that without gRPC: while a door is
shut, the first packet of each new connection is dropped, which its sender repeats after a second. Open connections, and
handshakes that have begun, go on as before.
"""

import array
import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

__all__ = ["Door"]

_OPEN_FILES = Path("/proc/self/fd")
_OF_PORTS = (socket.AF_INET, socket.AF_INET6)
# Options of Linux, of which Python does not name all.
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_SO_ACCEPTCONN = 30
# A program of the classic Berkeley packet filter, each instruction as (code, jump if true, jump if false, number).
_DROPS_FIRST_PACKETS = (
    (0x30, 0, 0, 13),  # load the flags of the TCP header
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone: the first packet of a connection
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # take all others
)


class Door:
    """The listening sockets of this process on a port; where the system has no such filter it stays open.

    Args:
        port: port on which something listens.
    """

    def __init__(self, port: int) -> None:
        self._sockets = _listening_on(port)
        self.is_shut = False

    def shut(self) -> None:
        """Turn new connections away."""
        if self.is_shut or not self._sockets:
            return
        program = array.array("B", b"".join(struct.pack("=HBBI", *one) for one in _DROPS_FIRST_PACKETS))
        address, _ = program.buffer_info()
        option = struct.pack("HP", len(_DROPS_FIRST_PACKETS), address)
        self.is_shut = True
        for one in self._sockets:
            with contextlib.suppress(OSError):  # where no filter is allowed the door stays open
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)

    def open(self) -> None:
        """Let new connections in."""
        if not self.is_shut:
            return
        self.is_shut = False
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Leave the sockets as they were; this object's copies of them would keep the port taken."""
        self.open()
        for one in self._sockets:
            one.close()
        self._sockets = []


def _listening_on(port: int) -> list[socket.socket]:
    """Copies of this process's sockets that listen on a port, one of each; none on another system than Linux."""
    if not _OPEN_FILES.is_dir():
        return []
    found: dict[int, socket.socket] = {}
    for entry in _OPEN_FILES.iterdir():
        if (copy := _copy_of(int(entry.name))) is None:
            continue
        number = os.fstat(copy.fileno()).st_ino  # the list may name one socket twice, as a copy
        if number not in found and copy.family in _OF_PORTS and _listens(copy) and copy.getsockname()[1] == port:
            found[number] = copy
        else:
            copy.close()
    return [*found.values()]


def _copy_of(descriptor: int) -> socket.socket | None:
    """A copy of a socket; None if it is none, or was closed meanwhile."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        return socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, _SO_ACCEPTCONN))
