"""Checkpoint roots of each kind that is supported: a folder, and a bucket of an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.server.s3 import S3Server, s3_server, used_here


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def s3(s3_process: S3Server) -> Iterator[S3Server]:
    """Run an S3 server. The environment, which belongs to the whole process, leads there for these tests alone."""
    with used_here(s3_process):
        yield s3_process


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """Return a checkpoint root in a bucket, below a prefix."""
    return f"{s3.bucket()}/some/prefix"


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a checkpoint root's URL."""
    roots: dict[str, Callable[[], str]] = {
        "folder": (tmp_path / "checkpoints").as_uri,
        "bucket": lambda: str(request.getfixturevalue("bucket")),
    }
    return roots[request.param]()
