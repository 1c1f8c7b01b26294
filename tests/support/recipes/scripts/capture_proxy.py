"""A program that asks the capture proxy by OpenAI's and Anthropic's clients: capture_proxy.py MODEL FOLDER."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anthropic
import openai

MOST_TOKENS = 16


def main(model: str, folder: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    serve = [sys.executable, "-u", "-m", "tinker_cookbook.capture.proxy.serve", "--port", port]
    serve += ["--base-model", model, "--store-data-dir", folder]
    proxy = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        # aiohttp says when it listens.
        while "Running on" not in (line := proxy.stdout.readline()):
            assert line, "the proxy ended before it listened"
        print(json.dumps({"answered": _ask(f"http://127.0.0.1:{port}", model)}))
    finally:
        proxy.terminate()
        proxy.wait()
        # What it captured is kept by a process that outlives it.
        os.kill(json.loads(Path(folder, "daemon.json").read_text())["pid"], signal.SIGTERM)


def _ask(url: str, model: str) -> int:
    """Return how many tokens both answers had."""
    messages = [{"role": "user", "content": "How much is 2 + 2?"}]
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions
    one = chat.create(model=model, messages=messages, max_tokens=MOST_TOKENS)  # type: ignore[arg-type]
    other = anthropic.Anthropic(base_url=url, api_key="none").messages.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=MOST_TOKENS,
    )
    assert one.usage is not None
    return min(one.usage.completion_tokens, other.usage.output_tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
