"""An object store that speaks S3, as a process on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from s3fs import S3FileSystem
from testcluster.ports import free_port

START_SECONDS = 180.0

_buckets = itertools.count()


class S3Server:
    """An S3 server that forgets everything when it stops, and starts again at the same address."""

    def __init__(self) -> None:
        self.endpoint = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which a program with an S3 driver finds it.

        An outage is noticed at the second attempt.
        """
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        port = self.endpoint.rpartition(":")[2]
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", port]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert time.monotonic() < deadline, "the S3 server does not answer"
            assert self._process.poll() is None, "the S3 server ended"
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def bucket(self) -> str:
        """Make a bucket, and return its URL."""
        name = f"bucket-{next(_buckets)}"
        self.make_bucket(name)
        return f"s3://{name}"

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/moto-api/"):
                return True
        except OSError:
            return False


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def used_here(server: S3Server) -> Iterator[None]:
    """Leads this process's driver to it. fsspec keeps what it has opened, whatever the environment says later."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        yield
        S3FileSystem.clear_instance_cache()
