"""Kubeconfig files for tests."""

from __future__ import annotations

import json
from pathlib import Path


def write_kubeconfig(folder: Path, server: str) -> Path:
    """For a server without TLS; the token is read from the file `token` beside it."""
    (folder / "token").touch()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"tokenFile": str(folder / "token")}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(document))
    return file
