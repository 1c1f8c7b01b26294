"""Free ports, for programs that bind a port later."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 12_000, 29_999
"""The range of ports for programs of a cluster.

The range is below the ports that Linux gives to outgoing connections, and below the node ports of Kubernetes.

The operating system would choose a port in the range for outgoing connections. An outgoing connection of another test
could take a port from the system before the program binds the port.
"""


def free_port() -> int:
    """Return a free port of the loopback address.

    The port is chosen at random, so that parallel runs get different ports.
    """
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST + 1)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Return this number of different free ports."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
