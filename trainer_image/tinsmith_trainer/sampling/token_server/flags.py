"""The flags of a sampler whose server is somebody else's."""

from __future__ import annotations

import argparse
from pathlib import Path

TOKEN_SERVERS = ("vllm", "sglang")
"""The engines of this kind."""
MEANING = (
    *("--logprobs-mode", "--generation-config", "--override-generation-config", "--sampling-defaults"),
    "--skip-tokenizer-init",
)
"""Words of servers that change what a sample or its logprobs mean, and no client would see it."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group("a sampler's vllm or sglang")
    flags.add_argument("--gpus", type=int, default=1, help="GPUs that the model is split over")
    flags.add_argument(
        "--server-argument", action="append", default=[], metavar="WORD", help="a word of its command line; many times"
    )
    flags.add_argument(
        "--server-start-timeout-seconds", type=float, default=1800.0, help="how long it may take until it serves"
    )
    flags.add_argument("--scratch", type=Path, help="folder for adapters while they are loaded; emptied at the start")


def refused_server_flags(engine: str, gpus: int, server_arguments: list[str], scratch: Path | None) -> str | None:
    """Why these flags do not go together, or None."""
    if gpus < 1:
        return "--gpus must be positive"
    if engine not in TOKEN_SERVERS and (gpus != 1 or server_arguments or scratch is not None):
        return f"--gpus, --server-argument and --scratch are for {' and '.join(TOKEN_SERVERS)}, and not for {engine}"
    word = next((word for word in server_arguments if _name(word) in MEANING), None)
    if word is not None:
        return (
            f"--server-argument {word}: {_name(word)} would change what samples and their logprobs mean; leave it out"
        )
    return None


def _name(word: str) -> str:
    """vLLM takes a flag with underscores, too."""
    return word.partition("=")[0].replace("_", "-")
