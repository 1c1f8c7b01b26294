"""`tinsmith demo`: make a tiny model, start a server on this machine, and run an SDK program that trains the model."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tinsmith.console import fail, make_console
from tinsmith.files import make_output_folder
from tinsmith.local_server import ServerFailed, free_port, running_server, tinsmith_command

MODEL = "demo/tiny"
"""The name of the model.

The model's directory in the output folder has the name of the model, so that the SDK finds the tokenizer.
"""

PROGRAM = "first_steps.py"
DEFAULT_PORT = 8000
NEEDED_MODULES = ("fastapi", "torch", "tinker")
"""One module for each extra that the programs of the demo need."""

SERVE_SECONDS = 20
"""The time limit for the server's start.

Even on a slow machine, a server with the tiny model starts within this time.
"""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for all files of the demo; created if missing.")] = Path(
        "demo-output"
    ),
) -> None:
    """Train a tiny model through a server on this machine, in a minute and without downloads."""
    for module in NEEDED_MODULES:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
    started = time.monotonic()
    console = make_console()
    make_output_folder(out, "--out")
    try:
        _make_model(console, out)
        api_key = f"tml-{secrets.token_urlsafe(24)}"
        _say_step(console, "Starting", f"tinsmith serve --model {MODEL}")
        with running_server([f"--data={out / 'server'}", f"--model={MODEL}={out / MODEL}"], api_key, out) as base_url:
            console.print(f"  it answers at {base_url}; its log is {out / 'server.log'}")
            _run_program(console, out, base_url, api_key)
        port = free_port(DEFAULT_PORT)
        write_environment(out / "environment", api_key, port)
    except (ServerFailed, subprocess.CalledProcessError) as error:
        fail("demo", str(error))
    _say_what_next(console, out, port, time.monotonic() - started)


def find_program() -> Path:
    """Return the path of `examples/first_steps.py`.

    In a wheel, the file is next to this package; otherwise, in the checkout.
    """
    installed = Path(__file__).parent / "examples" / PROGRAM
    return installed if installed.exists() else Path(__file__).parents[2] / "examples" / PROGRAM


def _say_step(console: Console, verb: str, text: str) -> None:
    console.print(Text.assemble((verb, "bold"), f" {text}"))


def _make_model(console: Console, out: Path) -> None:
    _say_step(console, "Making", f"a random model of 0.2 million parameters in {out / MODEL}")
    subprocess.run([*tinsmith_command(), "make-tiny-model", out / MODEL], check=True, stdout=subprocess.DEVNULL)


def _run_program(console: Console, out: Path, base_url: str, api_key: str) -> None:
    program = find_program()
    _say_step(console, "Running", str(program))
    environment = os.environ | {
        "TINKER_BASE_URL": base_url,
        "TINKER_API_KEY": api_key,
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
    }
    arguments = ["--model", MODEL, "--base-model-dir", MODEL, "--out", str(out.absolute())]
    subprocess.run([sys.executable, program, *arguments], check=True, cwd=out, env=environment)


def write_environment(file: Path, api_key: str, port: int) -> None:
    """Write shell variables. A later server of the demo gets the same key from the file with the variables."""
    file.touch(mode=0o600)
    file.write_text(
        f"export PATH={Path(sys.executable).parent}:$PATH\n"
        f"export TINSMITH_API_KEY={api_key} TINKER_API_KEY={api_key} TINKER_BASE_URL=http://127.0.0.1:{port}\n"
    )


def _say_what_next(console: Console, out: Path, port: int, seconds: float) -> None:
    console.print(f"\nThat took {seconds:.0f} seconds. The server has stopped; what it keeps is in {out / 'server'}.")
    console.print("\nNext", style="bold")
    console.print(f"  cd {out} && source environment")
    console.print(f"  tinsmith serve --data server --model {MODEL} --port {port} --log-level warning &")
    console.print(f"  tinsmith doctor --wait {SERVE_SECONDS} && tinker checkpoint list")
    console.print(f"\nIts console is at http://127.0.0.1:{port}/console; log in with the key in `environment`.")
    console.print("`kill %1` stops that server; what it keeps is there when it starts again.")
