"""Free ports, for programs that bind them later."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 12_000, 29_999
"""The range of ports. It is below the ports that Linux gives to outgoing connections, and below the ports of nodes.

The system itself would choose a port in the range for outgoing connections. Before a program binds such a port, an
outgoing connection of another test could take it.
"""


def free_port() -> int:
    """Return a free port of the loopback address. It is chosen at random, so that parallel runs get different ports."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST + 1)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Return different free ports."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
