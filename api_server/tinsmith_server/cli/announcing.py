"""What `tinsmith serve` tells a person on a terminal, and the one line that a script reads."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith_server.settings import is_loopback

if TYPE_CHECKING:
    from tinsmith_server.services.accounts.keys import NewKey

WIDEST_RULE = 100
ROUTED_TO = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation, which nothing is sent to: the route to them names this machine's own address."""
UNENCRYPTED = "warning: keys and data travel unencrypted to this address; docs/how-to/ingress.md puts TLS in front"


def on_terminal() -> bool:
    """Return whether a person reads standard error."""
    return sys.stderr.isatty()


def announce(listener: socket.socket, first_key: NewKey | None, public_url: str | None) -> None:
    """Print the URL once the server answers, and a key that was just made, which is never shown again."""
    host, port = listener.getsockname()[:2]
    if not on_terminal():
        if first_key is not None:
            _say(f"API key, shown only this once: {first_key.secret}")
        print(url_at(host, port), flush=True)
        return
    reachable = public_url or url_at(reachable_host(host), port)
    if not sys.stdout.isatty():
        print(url_at(host, port), flush=True)
    is_exposed = not is_loopback(host) and not reachable.startswith("https://")
    for line in boxed(reachable, None if first_key is None else first_key.secret, is_exposed=is_exposed):
        _say(line)


def boxed(url: str, key: str | None, *, is_exposed: bool) -> list[str]:
    """Return the lines between two rules. They have no border, so that a terminal's selection can be pasted."""
    rule = "─" * min(shutil.get_terminal_size().columns, WIDEST_RULE)
    lines = [f"Tinsmith answers at {url}"]
    lines += [UNENCRYPTED] if is_exposed else []
    lines += [f"API key, shown only this once: {key}"] if key else []
    assigned = f"TINKER_BASE_URL={url}" + (f" TINKER_API_KEY={key}" if key else "")
    return [rule, *lines, "", "In the terminal of your programs:", f"export {assigned}", "tinsmith doctor", rule]


def url_at(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def reachable_host(host: str) -> str:
    """Return `host`, or this machine's own address if the server listens on all of them."""
    if not ipaddress.ip_address(host).is_unspecified:
        return host
    families = (socket.AF_INET,) if "." in host else (socket.AF_INET, socket.AF_INET6)
    found = [address for family in families if (address := _own_address(family)) is not None]
    return found[0] if found else socket.gethostname()


def _own_address(family: socket.AddressFamily) -> str | None:
    """Return the address that others see, or None without a route. No packet is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ROUTED_TO[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def print_progress(line: str) -> None:
    """Print how far the start is. A script reads it in the log."""
    if on_terminal():
        _say(line)


def print_stopped(data: Path) -> None:
    """Print where everything is kept, after a clean stop. A script does not wait for it."""
    if on_terminal():
        _say(f"stopped; everything is kept in {data}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
