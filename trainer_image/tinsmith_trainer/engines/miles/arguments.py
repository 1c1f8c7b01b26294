"""The command line with which Miles builds Tinsmith's rank: LoRA by Megatron-Bridge, no rollout, loss or schedule.

Miles takes all settings from one Namespace. Only Miles' `parse_args` (`miles/utils/arguments.py`) can build the
Namespace, for a whole program of reinforcement learning. So the command line also has settings that a program of
reinforcement learning requires, but that Tinsmith's ranks never read.
"""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.megatron.model.ranked_model import RankedModel, check_layout
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError

_NEVER_USED = ("--optimizer", "adam", "--lr", "1e-4", "--weight-decay", "0.0", "--clip-grad", "0.0")
"""Optimizer settings that the parser requires. The settings have no effect, because every step sets new values.

The optimizer is Adam. Miles always divides Adam's state among data-parallel ranks.
"""

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a dense model, from the model's configuration.

    Miles' parser requires the sizes as flags, and compares the flags with the model's configuration.

    `dtype` is the dtype of the weights and of computation: float32 takes twice the memory of bfloat16.
    """

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    norm_epsilon: float
    rotary_base: int
    dtype: str


def sizes_of(directory: Path) -> Sizes:
    """Read the sizes. Raises ModelDirectoryInvalid if the configuration does not describe a dense transformer."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory)
    try:
        return Sizes(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            feed_forward=config.intermediate_size,
            heads=config.num_attention_heads,
            norm_epsilon=config.rms_norm_eps,
            rotary_base=_whole(directory, config.rope_parameters["rope_theta"]),
            dtype=str(config.dtype).removeprefix("torch."),
        )
    except (AttributeError, KeyError, TypeError) as error:
        missing = error.name if isinstance(error, AttributeError) else "rope_theta"
        raise ModelDirectoryInvalid(
            f"The configuration in {directory} has no {missing}, which Miles requires: the engine miles trains dense "
            f"transformers with rotary positions. docs/reference/models.md lists the models of the engine peft."
        ) from error


def _whole(directory: Path, rope_theta: float) -> int:
    """Return the value as an integer, which Megatron's flag requires."""
    if rope_theta != int(rope_theta):
        raise ModelDirectoryInvalid(
            f"The configuration in {directory} has rope_theta {rope_theta}, but Miles supports only integers. "
            f"Use the engine nemo-rl."
        )
    return int(rope_theta)


def check_dense(model: RankedModel) -> None:
    """Raise ModelDirectoryInvalid for a mixture of experts."""
    if model.experts:
        # Base weights are read into a model with adapters, and Megatron-Bridge finds experts only under their original
        # names (`_load_checkpoint_hf` in `miles/backends/megatron_utils/checkpoint.py`).
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} is a mixture of {model.experts} experts, but the engine miles trains "
            f"only dense transformers. Use the engine nemo-rl."
        )


def miles_arguments(model: RankedModel, sizes: Sizes, parallelism: Parallelism, *, nodes: int) -> list[str]:
    """Return the arguments. Raises ModelDirectoryInvalid if ranks with this parallelism cannot hold the model."""
    check_layout(model, parallelism)
    if sizes.dtype not in DTYPES:
        # Megatron-Bridge computes in the folder's dtype, and ignores Miles' flags.
        raise ModelDirectoryInvalid(
            f"The configuration in {model.directory} has dtype {sizes.dtype}, and ranks of Miles support "
            f"{' or '.join(DTYPES)}. Save the model in bfloat16, or use the engine nemo-rl, which converts it."
        )
    return [
        *("--train-backend", "megatron", "--megatron-to-hf-mode", "bridge", "--debug-train-only"),
        *("--hf-checkpoint", str(model.directory), "--load", str(model.directory)),
        *_architecture(model, sizes),
        *_layout(parallelism, nodes),
        *_lora(model),
        *_gradients(),
        *_recompute(model),
        *_NEVER_USED,
        *_one_batch(parallelism),
    ]


def _one_batch(parallelism: Parallelism) -> list[str]:
    """Return a batch of one datum per data-parallel rank, because Miles asserts that at least one step is scheduled."""
    whole = str(parallelism.data)
    return [
        *("--num-rollout", "1", "--rollout-batch-size", whole, "--n-samples-per-prompt", "1"),
        *("--global-batch-size", whole, "--micro-batch-size", "1"),
    ]


def _architecture(model: RankedModel, sizes: Sizes) -> list[str]:
    """Return the sizes as flags.

    Miles compares the flags with the model's configuration, from which Megatron-Bridge builds the model.
    """
    return [
        *("--num-layers", str(sizes.layers), "--hidden-size", str(sizes.hidden)),
        *("--ffn-hidden-size", str(sizes.feed_forward), "--num-attention-heads", str(sizes.heads)),
        *("--norm-epsilon", repr(sizes.norm_epsilon), "--rotary-base", str(sizes.rotary_base)),
        *("--vocab-size", str(model.vocab_size), "--make-vocab-size-divisible-by", "1"),
        *("--seq-length", str(model.max_tokens)),
        *(() if model.tied_embeddings else ("--untie-embeddings-and-output-weights",)),
    ]


def _layout(parallelism: Parallelism, nodes: int) -> list[str]:
    of_a_node = str(parallelism.world_size // nodes)
    return [
        *("--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", of_a_node, "--num-gpus-per-node", of_a_node),
        *("--tensor-model-parallel-size", str(parallelism.tensor)),
        *("--pipeline-model-parallel-size", str(parallelism.pipeline)),
        *(("--sequence-parallel",) if parallelism.tensor > 1 else ()),
    ]


def _lora(model: RankedModel) -> list[str]:
    """Return the settings for an A and a B per projection, as in PEFT. The scale is 1 until an adapter is set."""
    rank = str(model.max_rank)
    return [
        *("--lora-type", "canonical_lora", "--lora-rank", rank, "--lora-alpha", rank, "--lora-dropout", "0.0"),
        *("--target-modules", ",".join(model.lora_targets)),
        "--lora-train-only",  # there is no rollout engine to send weights to
    ]


def _gradients() -> list[str]:
    """Return the settings that `check_setup` requires: float32 sums of gradients, and no dropout."""
    return [
        "--accumulate-allreduce-grads-in-fp32",
        "--no-gradient-accumulation-fusion",  # its kernels bypass autograd
        *("--attention-dropout", "0.0", "--hidden-dropout", "0.0"),
    ]


def _recompute(model: RankedModel) -> list[str]:
    match model.recompute:
        case "layers":
            return ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
        case "mlp":
            return ["--recompute-granularity=selective", "--recompute-modules", "mlp"]
        case "none":
            return []


def parsed(arguments: Sequence[str]) -> Namespace:
    """Parse the arguments with Miles' own parser, on a rank.

    The parser queries the GPU if tensor ranks are requested, and the driver must not use a GPU.

    Raises ServerError with Miles' message.
    """
    from miles.utils.arguments import parse_args

    messages = io.StringIO()
    before, sys.argv = sys.argv, ["miles", *arguments]
    try:
        with contextlib.redirect_stderr(messages):
            namespace: Namespace = parse_args()
    except (SystemExit, Exception) as error:
        why = messages.getvalue().strip().rpartition("\n")[2] if isinstance(error, SystemExit) else str(error)
        raise ServerError(f"Miles refuses its arguments: {why or type(error).__name__}") from error
    finally:
        sys.argv = before
        sys.stderr.write(messages.getvalue())
    return namespace
