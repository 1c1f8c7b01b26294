"""`tinsmith serve`, and the messages that it prints on a terminal."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinsmith_server.configuration import describe_settings, keep_files_private, load_settings, notes_on
from tinsmith_server.errors import StartupError, TinsmithError
from tinsmith_server.fleet import fleet_of
from tinsmith_server.logs import configure_logs
from tinsmith_server.settings import Settings

if TYPE_CHECKING:
    from tinsmith_server.cli.connections import StoppingServer
    from tinsmith_server.fleet.base import Fleet

import ipaddress
import shutil
from typing import TYPE_CHECKING

from tinsmith_server.settings import is_loopback

if TYPE_CHECKING:
    from tinsmith_server.services.accounts.keys import NewKey

# One client process may hold some 1400 connections.
OPEN_FILES_LIMIT = 65536
BACKLOG = 4096
STOP_SECONDS = 20
# The longest time for which a thread that reads a large body may block the other threads. Each write of the store hands
# over to a thread and back. With Python's default of 5 ms the two hand-overs took as long as reading a large body.
SWITCH_SECONDS = 0.0005


def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 selects a free one.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory for everything that the server keeps between starts.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="NAME[=PATH]: a hub id or directory, and its name. Repeatable.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="One worker of each model for each of these devices: 0,1 (GPUs), or cpu.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Bits of the frozen weights of base models: 8bit or 4bit.")
    ] = None,
    numerics: Annotated[
        str | None, typer.Option(help="Replays after a crash: exact (the same bits) or fast (within rounding).")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="Sampler: builtin, or vllm or sglang in a separate process.")
    ] = None,
    sampler_environment: Annotated[
        Path | None, typer.Option(help="Virtual environment in which vLLM or SGLang is installed.")
    ] = None,
    database_url: Annotated[str | None, typer.Option(help="Database: an SQLite file (default) or PostgreSQL.")] = None,
    checkpoint_root: Annotated[str | None, typer.Option(help="fsspec URL for checkpoints.")] = None,
    public_url: Annotated[
        str | None, typer.Option(help="URL by which clients reach this server, for download links.")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(help="Log level: debug, info, warning or error; default: warning on a terminal, else info."),
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="Log format: auto, json or console.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file of settings.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings in force and exit.")] = False,
) -> None:
    """Serve the Tinker API for one or more base models."""
    flags = {
        "host": host,
        "port": port,
        "data": data,
        "models": tuple(model) if model else None,
        "devices": devices,
        "quantization": quantization,
        "numerics": numerics,
        "sampler": sampler,
        "sampler_environment": sampler_environment,
        "database_url": database_url,
        "checkpoint_root": checkpoint_root,
        "public_url": public_url,
        "log_level": log_level,
        "log_format": log_format,
    }
    try:
        settings = load_settings(flags, config)
        for note in notes_on(settings, flags, config):
            typer.echo(f"tinsmith serve: {note}", err=True)
        if print_config:
            typer.echo(describe_settings(settings), nl=False)
            return
        run_server(quiet_on_a_terminal(settings))
    except TinsmithError as error:
        typer.echo(f"tinsmith serve: {error}", err=True)
        raise typer.Exit(2) from error


def quiet_on_a_terminal(settings: Settings) -> Settings:
    """Return the settings with the log level `warning` if a person reads the log and has not set another level."""
    if "log_level" in settings.model_fields_set or not on_terminal():
        return settings
    return settings.model_copy(update={"log_level": "warning"})


def run_server(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises TinsmithError if the server cannot start."""
    # The kernel drops signals that process 1 of a container does not handle, and the imports take a second.
    signal.signal(signal.SIGTERM, _leave)
    configure_logs(settings.log_level, settings.log_format)
    if settings.fleet == "local":
        # In a cluster, servers and workers run as different users and share the checkpoint root by its group.
        keep_files_private()
    _raise_open_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    fleet = fleet_of(settings, print_progress)
    listeners = [listen(settings.host, settings.port), *listen_for_metrics(settings)]
    asyncio.run(_serve(settings, fleet, listeners))
    print_stopped(settings.data)


async def _serve(settings: Settings, fleet: Fleet, listeners: list[socket.socket]) -> None:
    """Start the processes that load models first, because loading takes longer than the imports of this function."""
    signal.signal(signal.SIGINT, _leave)
    try:
        await fleet.begin()
        server = await asyncio.to_thread(_assemble, settings, fleet, listeners[0])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stopped)
        await server.serve(sockets=listeners)
    except Exception:
        await fleet.close()
        raise


def _assemble(settings: Settings, fleet: Fleet, listener: socket.socket) -> StoppingServer:
    """Import most of this program, and create the server.

    The garbage collector is off during the imports, and never scans the imported objects later.
    """
    gc.disable()
    import uvicorn

    from tinsmith_server.app import create_app
    from tinsmith_server.cli.connections import KEEP_ALIVE_SECONDS, Addresses, BoundedProtocol, StoppingServer

    app = create_app(settings, fleet)
    gc.freeze()
    gc.enable()
    addresses = Addresses(settings.connections_per_address, settings.trusted_proxies)
    return StoppingServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            http=partial(BoundedProtocol, addresses=addresses),  # type: ignore[arg-type]
            ws="none",
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(settings.trusted_proxies),
            timeout_keep_alive=int(KEEP_ALIVE_SECONDS),
            timeout_graceful_shutdown=STOP_SECONDS,
            server_header=False,
        ),
        announce=lambda: announce(listener, app.state.first_key, settings.public_url),
    )


def listen_for_metrics(settings: Settings) -> list[socket.socket]:
    """Return the sockets for `metrics_port`, or none if the port is not set. Raises the errors of `listen`."""
    if settings.metrics_port is None:
        return []
    return [listen(settings.host, settings.metrics_port, "set metrics_port to another")]


def listen(host: str, port: int, cure: str = "set --port (0 selects a free one)") -> socket.socket:
    """Return a listening socket. Raises StartupError if the address is in use, or does not belong to this machine.

    `cure` tells the user what to do if another program uses the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The socket must name the protocol, because asyncio turns Nagle's algorithm off only on sockets with the protocol
    # TCP. With the algorithm on, every answer on a kept-alive connection is 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use; stop the other program, or {cure}") from error
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def _leave(_number: int, _frame: object) -> None:
    """Exit immediately. The store is not open yet, and the workers end with this process."""
    os._exit(0)


def _stopped(_number: int, _frame: object) -> None:
    """Ignore the signal that uvicorn raises again after a clean stop.

    If the process raised this signal, the exit status would mean "killed".
    """


def _raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES_LIMIT if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


WIDEST_RULE = 100
ROUTED_TO = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are reserved for documentation. No packet is sent.

The route to a documentation address reveals this machine's own address.
"""
UNENCRYPTED = (
    "warning: keys and data travel unencrypted to this address; docs/how-to/ingress.md explains how to add TLS"
)


def on_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr.isatty()


def announce(listener: socket.socket, first_key: NewKey | None, public_url: str | None) -> None:
    """Print the URL when the server answers requests.

    Print a new key, too, because the server never shows the key again.
    """
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
    """Add a horizontal rule before and after the lines.

    The lines have no borders at the sides, so that a selection can be pasted.
    """
    rule = "─" * min(shutil.get_terminal_size().columns, WIDEST_RULE)
    lines = [f"Tinsmith answers at {url}", f"Console: {url.rstrip('/')}/console"]
    lines += [UNENCRYPTED] if is_exposed else []
    lines += [f"API key, shown only this once: {key}"] if key else []
    assigned = f"TINKER_BASE_URL={url}" + (f" TINKER_API_KEY={key}" if key else "")
    return [rule, *lines, "", "In the terminal of your programs:", f"export {assigned}", "tinsmith doctor", rule]


def url_at(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def reachable_host(host: str) -> str:
    """Return `host`, or this machine's own address if the server listens on all addresses."""
    if not ipaddress.ip_address(host).is_unspecified:
        return host
    families = (socket.AF_INET,) if "." in host else (socket.AF_INET, socket.AF_INET6)
    found = [address for family in families if (address := _own_address(family)) is not None]
    return found[0] if found else socket.gethostname()


def _own_address(family: socket.AddressFamily) -> str | None:
    """Return this machine's address in its network, or None if the machine has no route. No packet is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ROUTED_TO[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def print_progress(line: str) -> None:
    """Print the progress of the start on a terminal. Scripts read the progress in the log."""
    if on_terminal():
        _say(line)


def print_stopped(data: Path) -> None:
    """Print the data directory on a terminal after a clean stop."""
    if on_terminal():
        _say(f"stopped; all data are in {data}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
