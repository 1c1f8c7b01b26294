"""The flags of a worker, typed. `python -m tinsmith_trainer.options FLAGS` checks them without starting a worker.

A server that starts its workers on demand uses this check, so that it can report wrong flags early. This module imports
no framework.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol, get_args

from typing_extensions import override

from tinsmith_trainer.engines.base import Engine, LoraProducts, LossKernel, Numerics, Recompute
from tinsmith_trainer.engines.megatron.flags import ENGINES as RANKS_ENGINES
from tinsmith_trainer.engines.megatron.flags import (
    NEMO_RL,
    RankFlags,
    RankRecompute,
    add_rank_flags,
    refused_rank_flags,
)
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.torch_model.base_model import BaseModelInfo, Quantization

TOKEN_SERVERS = ("vllm", "sglang")
"""The sampling engines that are third-party servers."""
MEANING = (
    *("--logprobs-mode", "--generation-config", "--override-generation-config", "--sampling-defaults"),
    "--skip-tokenizer-init",
)
"""Flags of these servers that are refused, because they would silently change the meaning of samples or logprobs."""

DEFAULT_ENGINES = {"worker": "peft", "sampler": "builtin"}
KNOWN_ENGINES = {"worker": ("peft", *RANKS_ENGINES), "sampler": ("builtin", *TOKEN_SERVERS)}

EXIT_USAGE = 2

OFFERED_SAVES_BYTES = 1024**3
"""The default for a worker that samplers reach over a network, in bytes.

On one machine, samplers use a socket instead.
"""

POSITIVE = (
    *("max_sequence_length", "adapter_slots", "model_places", "max_rank", "token_budget", "kv_cache_bytes"),
    *("attempts_per_operation", "hang_timeout_seconds"),
)

OF_PEFT = ("lora_products", "loss_kernel")
RANKS_RECOMPUTE = ("auto", *get_args(RankRecompute))
RECOMPUTE = {"peft": get_args(Recompute), **dict.fromkeys(RANKS_ENGINES, RANKS_RECOMPUTE)}


class UsageError(Exception):
    """An error for flags that contradict each other, or for an unknown flag."""


class WorkerOptions(RankFlags):
    model: str
    model_name: str
    model_revision: str | None
    max_sequence_length: int | None
    role: str
    worker_id: str
    volume: Path | None
    image: str | None
    socket: str | None
    listen: str | None
    tls_directory: Path | None
    health_address: str | None
    termination_log: Path | None
    checkpoint_root: str
    saves_socket: Path | None
    offered_saves_bytes: int | None
    parent_fd: int | None
    engine: str
    adapter_slots: int
    model_places: int | None
    max_rank: int
    sampling: bool
    map_stable_reinforce: bool
    report_co_batching: bool
    device: str
    dtype: str
    quantization: Quantization | None
    numerics: Numerics | None
    deterministic_sampling: bool
    token_budget: int | None
    lora_products: LoraProducts | None
    loss_kernel: LossKernel | None
    recompute: Recompute | RankRecompute | None
    kv_cache_bytes: int | None
    snapshot_replay_seconds: float
    snapshot_cost_factor: float
    reserved_bytes: int
    attempts_per_operation: int
    hang_timeout_seconds: float
    gpus: int
    server_argument: list[str]
    server_start_timeout_seconds: float
    scratch: Path | None
    server_environment: Path | None
    log_format: str
    log_level: str


class EngineFactory(Protocol):
    """A function that loads a base model, and returns its engine and a sampler with the same weights (or None).

    It respects `max_sequence_length`, and builds no sampler if `sampling` is off.
    """

    def __call__(self, options: WorkerOptions) -> tuple[Engine, Sampler | None]: ...


class SamplerFactory(Protocol):
    """A function that loads a base model for sampling only. It respects `max_sequence_length`."""

    def __call__(self, options: WorkerOptions) -> tuple[BaseModelInfo, Sampler]: ...


class FlagParser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_options(arguments: Sequence[str]) -> WorkerOptions:
    """Parse the flags of a worker. Raises UsageError."""
    parser = FlagParser(prog="tinsmith-trainer", description="One worker process.", allow_abbrev=False)
    add_model_flags(parser)
    _add_worker_flags(parser)
    _add_listen_flags(parser)
    for add in (_add_engine, _add_numerics, _add_computation, _add_durability):
        add(parser)
    add_server_flags(parser)
    add_rank_flags(parser)
    parser.add_argument("--log-format", choices=("json", "console"), default="json")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(arguments, namespace=WorkerOptions())
    options.engine = options.engine or DEFAULT_ENGINES[options.role]
    _check(parser, options)
    if options.offered_saves_bytes is None:
        options.offered_saves_bytes = OFFERED_SAVES_BYTES if options.listen is not None else 0
    return options


def termination_log_of(arguments: Sequence[str]) -> Path | None:
    """Return the path of the termination log.

    This flag is read first, so that errors in the other flags can be written to this log.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--termination-log", type=Path, nargs="?")
    found: Path | None = parser.parse_known_args(arguments)[0].termination_log
    return found


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="directory of the base model, or a hub repository")
    parser.add_argument("--model-name", default="", help="the name that clients know the model by")
    parser.add_argument("--model-revision", help="branch, tag or commit of the hub repository")
    parser.add_argument("--max-sequence-length", type=int, help="limit of a sequence, below the model's own")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group("a sampler's vllm or sglang")
    flags.add_argument("--gpus", type=int, default=1, help="GPUs that the model is split over")
    flags.add_argument(
        "--server-argument",
        action="append",
        default=[],
        metavar="WORD",
        help="word of its command line; repeatable",
    )
    flags.add_argument(
        "--server-start-timeout-seconds", type=float, default=1800.0, help="time limit of the server's start"
    )
    flags.add_argument("--scratch", type=Path, help="folder for adapters while they are loaded; emptied at the start")
    flags.add_argument(
        "--server-environment", type=Path, help="virtual environment of the server, if it is not this one"
    )


def refused_server_flags(options: WorkerOptions) -> str | None:
    """Return the reason why flags of a sampling server are refused, or None if all are allowed."""
    if options.gpus < 1:
        return "--gpus must be positive"
    others = (options.gpus != 1, options.server_argument, options.scratch, options.server_environment)
    if options.engine not in TOKEN_SERVERS and any(others):
        return (
            f"--gpus, --server-argument, --scratch and --server-environment are for {' and '.join(TOKEN_SERVERS)}, "
            f"and not for {options.engine}"
        )
    word = next((word for word in options.server_argument if _name(word) in MEANING), None)
    if word is not None:
        return (
            f"--server-argument {word}: {_name(word)} would change what samples and their logprobs mean; leave it out"
        )
    return None


def _add_worker_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=("worker", "sampler"), default="worker", help="sampler: trains nothing")
    parser.add_argument("--worker-id", default="", help="ID of this worker in the store; Describe returns it")
    parser.add_argument("--volume", type=Path, help="folder for the journal and the snapshots; a sampler has none")
    parser.add_argument("--image", help="image of this process; another image never replays its operations")
    parser.add_argument("--checkpoint-root", required=True, help="fsspec URL below which checkpoints live")
    parser.add_argument(
        "--saves-socket",
        type=Path,
        help="Unix socket by which a worker with --no-sampling hands its newest saves to the sampler of this machine",
    )
    parser.add_argument(
        "--offered-saves-bytes",
        type=int,
        help="memory for a worker's newest saves, from which samplers fetch them; by default 1 GiB with "
        "--listen, and else 0",
    )
    parser.add_argument("--parent-fd", type=int, help="end when this descriptor's other end closes")
    parser.add_argument("--termination-log", type=Path, help="file for the reason, as JSON, of a refusal to start")


def _add_listen_flags(parser: argparse.ArgumentParser) -> None:
    door = parser.add_mutually_exclusive_group(required=True)
    door.add_argument("--socket", help="path of the Unix socket to serve on")
    door.add_argument("--listen", type=_address, metavar="HOST:PORT", help="address to serve on, by mutual TLS only")
    parser.add_argument("--tls-directory", type=Path, help="folder of tls.crt, tls.key and ca.crt, for --listen")
    parser.add_argument(
        "--health-address", type=_address, metavar="HOST:PORT", help="address of gRPC's health service, in plain text"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        help="peft, nemo-rl or miles; for a sampler builtin, vllm or sglang; or your module:factory. "
        "The first is the default",
    )
    parser.add_argument("--adapter-slots", type=int, default=64, help="adapters in memory")
    parser.add_argument(
        "--model-places", type=int, help="models that a worker takes, in memory or parked; by default 8 for each slot"
    )
    parser.add_argument("--max-rank", type=int, default=128, help="highest rank of an adapter")
    parser.add_argument("--sampling", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--map-stable-reinforce", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--report-co-batching",
        action="store_true",
        help="add the metric co_batched_fb:max to training results: the most models in one forward of the call; "
        "results then depend on other clients",
    )


def _add_numerics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of base weights; auto: bfloat16 on a GPU",
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="bits of the frozen base weights; by default those of --dtype",
    )
    parser.add_argument(
        "--numerics",
        choices=get_args(Numerics),
        help="exact: a replay after a crash gives the same bits; fast: a replay may round differently, and calls of "
        "several models share forwards on a GPU; by default exact on a CPU in float32, else fast",
    )
    parser.add_argument("--deterministic-sampling", action=argparse.BooleanOptionalAction, default=True)


def _add_computation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-budget", type=int, help="tokens of a microbatch; by default 1024, on a GPU by its memory"
    )
    parser.add_argument(
        "--lora-products",
        choices=get_args(LoraProducts),
        help="what peft computes adapters' products in; by default bfloat16 on a GPU with base weights in "
        "bfloat16, else float32",
    )
    parser.add_argument(
        "--loss-kernel",
        choices=get_args(LossKernel),
        help="what makes peft's logprobs on a GPU; auto, the default: Liger's kernel where it runs and agrees",
    )
    parser.add_argument(
        "--recompute",
        choices=RANKS_RECOMPUTE,
        help="what engines compute again in backward, not to keep it: layers, or those with ranks their mlp alone; "
        "auto, the default: layers of what would not fit, of ranks all of them on GPUs",
    )
    parser.add_argument(
        "--kv-cache-bytes", type=int, help="of the built-in sampler's keys and values; by default by what is free"
    )


def _add_durability(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--snapshot-replay-seconds", type=float, default=10.0, help="longest replay after a crash")
    parser.add_argument("--snapshot-cost-factor", type=float, default=20.0, help="or as a multiple of a snapshot")
    parser.add_argument("--reserved-bytes", type=int, default=64 * 1024**2, help="kept free on the volume")
    parser.add_argument(
        "--attempts-per-operation", type=int, default=3, help="processes that may end at one operation before it fails"
    )
    parser.add_argument(
        "--hang-timeout-seconds",
        type=float,
        default=600.0,
        help="a microbatch, step or save that has taken longer when the worker is stopped counts as the reason; ranks "
        "on CPUs wait this long for each other",
    )


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def _check(parser: argparse.ArgumentParser, options: WorkerOptions) -> None:
    if (options.volume is None) != (options.role == "sampler"):
        parser.error("a worker needs --volume, and a sampler has none")
    if (options.listen is None) != (options.tls_directory is None):
        parser.error("--listen and --tls-directory belong together: a port is served by mutual TLS alone")
    _check_engine(parser, options)
    if options.role == "sampler" and not options.sampling:
        parser.error("a sampler with --no-sampling would do nothing")
    if options.role == "worker" and options.sampling and options.saves_socket is not None:
        parser.error("--saves-socket is for a worker with --no-sampling: its own sampler has what it saves")
    if options.role == "sampler" and options.offered_saves_bytes is not None:
        parser.error("--offered-saves-bytes is of a worker's saves, and a sampler makes none")
    if options.offered_saves_bytes is not None and options.offered_saves_bytes < 0:
        parser.error("--offered-saves-bytes must not be negative; 0 keeps none")
    if options.role == "sampler" and options.image is not None:
        parser.error("--image guards a journal, and a sampler has none")
    if options.role == "sampler" and options.model_places is not None:
        parser.error("--model-places is for models in training, and a sampler trains none")
    for flag in POSITIVE:
        value = getattr(options, flag)
        if value is not None and value <= 0:
            parser.error(f"--{flag.replace('_', '-')} must be positive")
    if options.model_places is not None and options.model_places < options.adapter_slots:
        parser.error("--model-places counts parked adapters too: give --adapter-slots or more")


def _check_engine(parser: argparse.ArgumentParser, options: WorkerOptions) -> None:
    known = KNOWN_ENGINES[options.role]
    module, colon, factory = options.engine.partition(":")
    if options.engine not in known and not (module and colon and factory):
        parser.error(f"a {options.role} knows no engine {options.engine!r}: {', '.join(known)}, or module:factory")
    _check_placement(parser, options)
    if options.token_budget is not None and options.role == "sampler":
        parser.error("--token-budget is for training, and a sampler does none")
    for name in OF_PEFT:
        if getattr(options, name) is not None and options.engine != "peft":
            parser.error(f"--{name.replace('_', '-')} is for --engine peft")
    if options.numerics is not None and options.role == "sampler":
        parser.error("--numerics is for training, and a sampler does none")
    if options.numerics == "exact" and options.engine == NEMO_RL and options.gpus_per_node:
        parser.error(
            "--numerics exact: kernels of NeMo RL on GPUs are not deterministic; omit it, or use miles or peft"
        )
    if options.recompute is not None and options.engine not in RECOMPUTE:
        parser.error(f"--recompute is for --engine {' and '.join(RECOMPUTE)}")
    if options.recompute not in (None, *RECOMPUTE.get(options.engine, ())):
        choices = ", ".join(RECOMPUTE[options.engine])
        parser.error(f"--recompute {options.recompute} is not for {options.engine}, which knows {choices}")
    if options.kv_cache_bytes is not None and (not options.sampling or options.engine in TOKEN_SERVERS):
        parser.error("--kv-cache-bytes is for the built-in sampler, and there is none")
    refusal = refused_server_flags(options)
    refusal = refusal or refused_rank_flags(options.engine, options, sampling=options.sampling)
    if refusal is not None:
        parser.error(refusal)


def _check_placement(parser: argparse.ArgumentParser, options: WorkerOptions) -> None:
    """Refuse flags for the placement of weights that this engine does not use."""
    ranks_alone = options.engine in RANKS_ENGINES and not options.sampling
    if (ranks_alone or options.engine in TOKEN_SERVERS) and options.device != "auto":
        parser.error(f"--device is for peft and the built-in sampler, and not for {options.engine}")
    if options.quantization is not None and options.engine in (*RANKS_ENGINES, *TOKEN_SERVERS):
        parser.error(f"--quantization is for peft and the built-in sampler, and not for {options.engine}")
    if ranks_alone and options.dtype != "auto":
        parser.error(f"--dtype is for peft and samplers, and not for {options.engine}")


def _name(word: str) -> str:
    """Normalise a flag. vLLM also accepts underscores."""
    return word.partition("=")[0].replace("_", "-")


def main() -> int:
    """Check the flags, and check that the sampler's server is installed.

    If a check fails, print the error with which the worker would end.
    """
    try:
        options = parse_options(sys.argv[1:])
    except UsageError as error:
        return _refused(str(error))
    if options.engine in TOKEN_SERVERS and not has_server(options.engine, options.server_environment):
        here = "on the PATH" if options.engine == "vllm" else "in this environment"
        where = here if options.server_environment is None else f"in {options.server_environment}"
        return _refused(
            f"{options.engine} is not installed {where}. Install it in a separate virtual environment, and set its path"
        )
    return 0


def has_server(engine: str, environment: Path | None) -> bool:
    """Return whether the server is installed. vLLM is a program, SGLang a module.

    If SGLang is in another environment, only the start shows whether its module exists.
    """
    if environment is not None:
        return shutil.which("vllm" if engine == "vllm" else "python", path=environment / "bin") is not None
    if engine == "vllm":
        return shutil.which("vllm") is not None
    return importlib.util.find_spec(engine) is not None


def _refused(sentence: str) -> int:
    print(f"tinsmith-trainer: {sentence}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
