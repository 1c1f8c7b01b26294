"""The flags of a worker, typed, and what an engine's factory gets of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.sampling.base import Sampler


class WorkerOptions(argparse.Namespace):
    """The flags of a worker, typed."""

    model: str
    role: str
    volume: Path | None
    socket: str
    checkpoint_root: str
    parent_fd: int | None
    engine: str
    adapter_slots: int
    max_rank: int
    map_stable_reinforce: bool
    deterministic_sampling: bool
    snapshot_replay_seconds: float
    snapshot_cost_factor: float
    reserved_bytes: int
    log_format: str
    log_level: str


class EngineFactory(Protocol):
    """Loads a base model; the sampler shares its weights, or is None."""

    def __call__(self, options: WorkerOptions) -> tuple[Engine, Sampler | None]: ...


def parse_options(arguments: Sequence[str]) -> WorkerOptions:
    parser = argparse.ArgumentParser(prog="tinsmith-trainer", description="One worker process.")
    parser.add_argument("--model", required=True, help="directory of the base model, or a hub repository")
    parser.add_argument("--role", choices=("worker", "sampler"), default="worker", help="sampler: trains nothing")
    parser.add_argument("--volume", type=Path, help="folder for the journal and the snapshots; a sampler has none")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to serve on")
    parser.add_argument("--checkpoint-root", required=True, help="fsspec URL below which checkpoints live")
    parser.add_argument("--parent-fd", type=int, help="end when this descriptor's other end closes")
    parser.add_argument("--engine", default="peft", help="peft, or module:factory of an engine of your own")
    parser.add_argument("--adapter-slots", type=int, default=64)
    parser.add_argument("--max-rank", type=int, default=128)
    parser.add_argument("--map-stable-reinforce", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--deterministic-sampling", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--snapshot-replay-seconds", type=float, default=10.0, help="a crash may cost this much")
    parser.add_argument("--snapshot-cost-factor", type=float, default=20.0, help="or this many snapshots' time")
    parser.add_argument("--reserved-bytes", type=int, default=64 * 1024**2, help="kept free on the volume")
    parser.add_argument("--log-format", choices=("json", "console"), default="json")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(arguments, namespace=WorkerOptions())
    if (options.volume is None) != (options.role == "sampler"):
        parser.error("a worker needs --volume, and a sampler has none")
    return options
