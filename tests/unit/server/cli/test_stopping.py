"""A server that gets a signal to stop before it serves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVE = [sys.executable, "-m", "tinsmith", "serve", "--port=0"]
NOTHING_LISTENS_YET = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


@contextmanager
def serving(data: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    settings = {
        "TINSMITH_FLEET": "kubernetes",
        "TINSMITH_FLEET_NAMESPACES": "ns",
        "TINSMITH_CHECKPOINT_ROOT": f"file://{data}/checkpoints",
        "TINSMITH_DATA": str(data),
    }
    with subprocess.Popen(SERVE, env=os.environ | settings | environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_stop_while_the_program_is_loaded_is_clean(tmp_path: Path) -> None:
    """Process 1 of a container never gets a signal that it does not handle, not even this one."""
    (tmp_path / "uvicorn.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)")
    with serving(tmp_path, PYTHONPATH=str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.terminate()
        assert process.wait() == 0


def test_a_stop_while_the_server_waits_for_its_cluster_is_quick(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(NOTHING_LISTENS_YET.format(port=silent.getsockname()[1]))
        with serving(tmp_path, KUBECONFIG=str(kubeconfig)) as process:
            silent.accept()[0].close()
            process.terminate()
            # It gives up waiting for its cluster after far longer.
            assert process.wait(60) == 0
