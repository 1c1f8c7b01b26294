"""A worker's certificate and key, and the authority for the worker's peers. The files may change while the worker runs.

The kubelet replaces the whole folder at once, by the symlink `..data`. gRPC reads the files at every handshake. Open
connections are not affected, and new connections use the new files.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog

from tinsmith_trainer.errors import TlsInvalid

log = structlog.get_logger(__name__)

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
SWAPPED = "..data"
"""The kubelet's name for the folder with the current files."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel opens a new connection, with the current certificate
]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM contents of all files, read at the same moment."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes


def read_tls_files(directory: Path) -> TlsFiles:
    """Read the files. Raises TlsInvalid if a file is missing, or if key and certificate do not match."""
    swapped = directory / SWAPPED
    # The symlink is resolved once. Three reads through the symlink could see files from before and after a change.
    folder = swapped.resolve() if swapped.exists() else directory
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        context.load_verify_locations(folder / AUTHORITY)
        return TlsFiles(*((folder / name).read_bytes() for name in (CERTIFICATE, KEY, AUTHORITY)))
    except OSError as error:  # including ssl.SSLError
        raise TlsInvalid(
            f"The TLS files in {directory} cannot be used: {error}. "
            f"It must hold {CERTIFICATE}, its {KEY}, and {AUTHORITY} of the authority that signs the clients."
        ) from error


class TlsDirectory:
    """The files of a server that admits only clients with a certificate of the authority.

    The server may also be a client of other workers, with the same files.
    """

    def __init__(self, directory: Path) -> None:
        """Read the files. Raises TlsInvalid."""
        self._directory = directory
        self._files = read_tls_files(directory)

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._files),
            self._replacement,  # type: ignore[arg-type]  # the stubs forget None, which means: unchanged
            require_client_authentication=True,
        )

    def channel(self, target: str, expected_name: str) -> grpc.Channel:
        """Open a channel to a server with this name in the certificate.

        The certificate of this process must be valid for clients, too. Raises TlsInvalid.
        """
        files = read_tls_files(self._directory)
        credentials = grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)
        return grpc.secure_channel(
            target, credentials, [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", expected_name)]
        )

    def _replacement(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new files if the files have changed.

        gRPC calls this before each handshake, in gRPC's threads, one call at a time.
        """
        try:
            files = read_tls_files(self._directory)
        except TlsInvalid as error:
            log.warning("keeping the TLS files of before", error=str(error))
            return None
        if files == self._files:
            return None
        self._files = files
        log.info("TLS files replaced", directory=str(self._directory))
        return _configuration(files)


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(files.key, files.certificate)], root_certificates=files.authority
    )
