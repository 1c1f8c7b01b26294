"""Ports for programs that bind them later."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 12_000, 29_999
"""Below what Linux gives to outgoing connections, and below the ports of a cluster's nodes.

A port that the system chose would be one of the former: by the time that a program has started, an outgoing connection
of another test may hold it.
"""


def free_port() -> int:
    """Return a free port of the loopback address, chosen at random so that parallel runs differ."""
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
