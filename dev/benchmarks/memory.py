"""The memory of an idle API server in a cluster, compared with a bare server of the same web framework.

The Kubernetes API that the API server watches contains no objects. `start.py` measures a server with a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import web
from start import GOAL_MIB, SETTLED_SECONDS, resident_mib
from support.kubernetes.api_proxy import write_kubeconfig
from testcluster.ports import free_port
from tinsmith.local_server import tinsmith_command

BARE = """
import fastapi, uvicorn
app = fastapi.FastAPI()
app.get("/")(lambda: {})
print("ready", flush=True)
uvicorn.run(app, port=0, log_level="error")
"""


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory in MiB. `goal` is the upper limit for the server."""

    bare: float
    server: float
    ratio: float
    goal: int


async def kubernetes_api() -> tuple[web.AppRunner, str]:
    """Start a stand-in for the Kubernetes API, with empty lists and no events."""

    async def take(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") != "true":
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(3600)
        return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", take)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", free_port())
    await site.start()
    return runner, site.name


async def resident_once_ready(command: Sequence[str], environment: dict[str, str]) -> float:
    """Return the memory of a program that has printed its first line.

    The first line means that the program is ready.
    """
    program = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environment, stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    if not await program.stdout.readline():
        raise RuntimeError(f"{command[0]} ended with status {await program.wait()}")
    await asyncio.sleep(SETTLED_SECONDS)
    resident = resident_mib(program.pid)
    program.terminate()
    await program.wait()
    return resident


async def measure() -> Resident:
    runner, url = await kubernetes_api()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "KUBECONFIG": str(write_kubeconfig(Path(folder), url)),
            "TINSMITH_FLEET": "kubernetes",
            "TINSMITH_FLEET_NAMESPACES": "research",
            "TINSMITH_CHECKPOINT_ROOT": f"file://{folder}/checkpoints",
            "TINSMITH_API_KEY": "tml-benchmark",
        }
        command = [*tinsmith_command(), "serve", "--port=0", f"--data={folder}/data"]
        server = await resident_once_ready(command, environment)
    await runner.cleanup()
    bare = await resident_once_ready([sys.executable, "-c", BARE], {})
    return Resident(bare, server, server / bare, GOAL_MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    result = asyncio.run(measure())
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        print(
            f"{result.server:.0f} MiB, goal {result.goal} MiB; a bare server {result.bare:.0f} MiB, "
            f"ratio {result.ratio:.2f}"
        )


if __name__ == "__main__":
    main()
