"""Channels to workers: a Unix socket on this machine, or mutual TLS over the network.

A channel keeps the certificate with which it was opened. The certificate files are replaced while the server runs. So
the owner of a channel calls `TlsDirectory.shows` regularly, and opens a new channel when this method returns False.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc

from tinsmith_server.errors import WorkerUnavailable

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
SWAPPED = "..data"
"""The kubelet's name for the directory that holds the current files."""

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    # The HTTP side limits bodies; a result of 1024 long datums has tens of MB.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
NETWORK_OPTIONS: list[tuple[str, int | str]] = [
    # A node that fails does not close its connections. Without pings a call would wait until its deadline.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC also pings to measure the connection, and sends no second ping before the answer. By default it waits 60 s.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted worker has another address under the same name. By default gRPC resolves a name only every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A new channel must open a new connection with its own certificate.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class WorkerTls:
    """The client certificate of a channel, and the name that the peer's certificate must contain.

    The contents are PEM.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    worker_id: str

    @property
    def expected_name(self) -> str:
        return f"{self.worker_id}.worker.tinsmith.internal"


PemFiles: TypeAlias = tuple[bytes, bytes, bytes]


class TlsDirectory:
    """The directory with this server's client certificate, its private key, and the workers' certificate authority.

    Files are parsed only when they have changed. With a thousand connections that each check every 10 s, parsing took 8
    % of the event loop's time.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: tuple[object, PemFiles] | None = None

    def for_worker(self, worker_id: str) -> WorkerTls:
        """Return the certificate for a new channel.

        Raises WorkerUnavailable if files are missing or do not match each other.
        """
        certificate, key, authority = self._read()
        return WorkerTls(certificate, key, authority, worker_id)

    def shows(self, tls: WorkerTls) -> bool:
        """Return whether the channel's certificate is the certificate in the current files.

        Files that cannot be read count as unchanged.
        """
        try:
            return self._read() == (tls.certificate, tls.key, tls.authority)
        except WorkerUnavailable:
            return True

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server that admits only clients with a certificate of the authority.

        The files are read again at each handshake. Raises WorkerUnavailable if the files cannot be used.
        """
        self._read()
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), self._server_configuration, require_client_authentication=True
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        certificate, key, authority = self._read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority)

    def _read(self) -> PemFiles:
        swapped = self._directory / SWAPPED
        # The symlink is resolved once. Otherwise a swap between the reads could mix old and new files.
        folder = swapped.resolve() if swapped.exists() else self._directory
        try:
            # The state is taken before the files are read. A file that is replaced during the read is then read again.
            state = [folder, *(_state(folder / name) for name in (CERTIFICATE, KEY, AUTHORITY))]
            if self._known is None or self._known[0] != state:
                self._known = state, _parsed(folder)
        except OSError as error:  # includes ssl.SSLError
            raise WorkerUnavailable(
                f"no worker can be reached, since the TLS files in {self._directory} cannot be used: {error}; the "
                f"directory must contain {CERTIFICATE}, its {KEY}, and {AUTHORITY}"
            ) from error
        return self._known[1]


def _state(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _parsed(folder: Path) -> PemFiles:
    """Read and check the files.

    Raises OSError if a file cannot be read, or if the certificate and the private key do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.load_verify_locations(folder / AUTHORITY)
    return (folder / CERTIFICATE).read_bytes(), (folder / KEY).read_bytes(), (folder / AUTHORITY).read_bytes()


def open_channel(target: str, tls: WorkerTls | None) -> grpc.aio.Channel:
    """Open a channel to `unix:/path`, or to `host:port` with `tls`."""
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    named = [("grpc.ssl_target_name_override", tls.expected_name)]
    return grpc.aio.secure_channel(target, credentials, options=[*CHANNEL_OPTIONS, *NETWORK_OPTIONS, *named])
