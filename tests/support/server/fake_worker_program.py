"""A fake worker as a program: takes a worker's flags, and dies as its model directory says.

A file `refuse` in the model directory holds the sentence to end with, as the real worker does for a
directory that it cannot load; a file `contradict` has it refuse its flags; `slots` says how many it has, and
`idle` for how many seconds no client has used it, and `running` how long its operation has run.
Run with `python -m support.server.fake_worker_program`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from support.server.fake_worker import FakeWorker, serve_fake_worker


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    options, _ = parser.parse_known_args()
    if (options.model / "contradict").exists():
        print("tinsmith-trainer: the flags contradict each other", file=sys.stderr)
        return 2
    refusal = options.model / "refuse"
    if refusal.exists():
        print("loading", file=sys.stderr)
        print(f"tinsmith-trainer: {refusal.read_text()}", file=sys.stderr)
        return 3
    (options.model / "seen.json").write_text(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}))
    slots = options.model / "slots"
    fake = FakeWorker(adapter_slots=int(slots.read_text()) if slots.exists() else 0)
    idle = options.model / "idle"
    fake.idle_seconds = float(idle.read_text()) if idle.exists() else 0.0
    running = options.model / "running"
    fake.running_seconds = float(running.read_text()) if running.exists() else 0.0
    asyncio.run(serve(fake, options.socket, options.parent_fd))
    (options.model / "stopped").touch()
    return 0


async def serve(fake: FakeWorker, socket: Path, parent_fd: int) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    loop.add_reader(parent_fd, over.set)
    server = await serve_fake_worker(fake, socket)
    await over.wait()
    await server.stop(None)


if __name__ == "__main__":
    sys.exit(main())
