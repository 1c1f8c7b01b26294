"""A program that opens the playground and chats with a run in it: playground.py MODEL FOLDER STATE SAMPLER.

The playground finds runs by the files that tinker-cookbook writes. STATE and SAMPLER are the paths of a checkpoint.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

SCOPE = ["-c", "from tinkerscope.cli import app; app()"]
SAMPLES, MOST_TOKENS = 2, 16
START_SECONDS = 120.0


def main(model: str, folder: str, state: str, sampler: str) -> None:
    runs = _runs(Path(folder) / "runs", model, {"state_path": state, "sampler_path": sampler})
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    served = subprocess.Popen([sys.executable, *SCOPE, "serve", str(runs), "--port", port])
    try:
        listed = _wait_for_runs(port)
        chat = ["chat", "first", "How much is 2 + 2?", "--n", str(SAMPLES), "--max-tokens", str(MOST_TOKENS)]
        told = _asked(port, chat)
        print(told.stdout)
        print(json.dumps({"sampleable runs": listed.count("yes"), "failed": told.returncode}))
    finally:
        served.terminate()
        served.wait()


def _runs(folder: Path, model: str, paths: Mapping[str, str]) -> Path:
    run = folder / "first"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"model_name": model, "wandb_name": "first"}))
    (run / "checkpoints.jsonl").write_text(json.dumps({"name": "final", "batch": 1, **paths}) + "\n")
    return folder


def _wait_for_runs(port: str) -> str:
    until = time.monotonic() + START_SECONDS
    while (listed := _asked(port, ["ls"])).returncode != 0:
        assert time.monotonic() < until, listed.stderr
        time.sleep(0.5)
    return listed.stdout


def _asked(port: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *SCOPE, "--base-url", f"http://127.0.0.1:{port}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
