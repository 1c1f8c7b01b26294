"""The command line by which Miles makes one of our ranks: LoRA by Megatron-Bridge, no rollout, no loss, no schedule.

Miles takes everything from one Namespace, which its `parse_args` alone makes right (`miles/utils/arguments.py`), for a
whole program of reinforcement learning. What such a program must say and no rank of ours ever reads is here too.
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
"""Every step brings its own; the optimizer itself is Adam, which Miles always divides among data-parallel ranks."""

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a dense model, as its configuration has them. Miles' parser wants them said again and compares.

    But for `dtype`, that of the weights and so of the ranks' computing: float32 takes twice the memory of bfloat16.
    """

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    norm_epsilon: float
    rotary_base: int
    dtype: str


def sizes_of(directory: Path) -> Sizes:
    """Raises ModelDirectoryInvalid for a configuration that says them otherwise than dense transformers do."""
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
            f"The configuration in {directory} has no {missing}, which Miles asks for: the engine miles trains dense "
            f"transformers with rotary positions. docs/reference/models.md says what the engine peft trains."
        ) from error


def _whole(directory: Path, rope_theta: float) -> int:
    """Megatron's flag takes no other."""
    if rope_theta != int(rope_theta):
        raise ModelDirectoryInvalid(
            f"The configuration in {directory} has rope_theta {rope_theta}, and Miles takes whole numbers alone. "
            f"Use the engine nemo-rl."
        )
    return int(rope_theta)


def check_dense(model: RankedModel) -> None:
    """Raises ModelDirectoryInvalid for a mixture of experts."""
    if model.experts:
        # Base weights are read into a model that has its adapters, and Megatron-Bridge finds experts under their own
        # names alone (`_load_checkpoint_hf` in `miles/backends/megatron_utils/checkpoint.py`).
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} is a mixture of {model.experts} experts, and the engine miles trains "
            f"dense transformers. Use the engine nemo-rl."
        )


def miles_arguments(model: RankedModel, sizes: Sizes, parallelism: Parallelism, *, nodes: int) -> list[str]:
    """Raises ModelDirectoryInvalid where such ranks could not hold such a model."""
    check_layout(model, parallelism)
    if sizes.dtype not in DTYPES:
        # Megatron-Bridge computes in the folder's own type, whatever Miles' flags say.
        raise ModelDirectoryInvalid(
            f"The configuration in {model.directory} says dtype {sizes.dtype}, and ranks of Miles compute in that: "
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
    """A datum on each data-parallel rank, which one rollout fills: Miles asserts that there is a step to schedule."""
    whole = str(parallelism.data)
    return [
        *("--num-rollout", "1", "--rollout-batch-size", whole, "--n-samples-per-prompt", "1"),
        *("--global-batch-size", whole, "--micro-batch-size", "1"),
    ]


def _architecture(model: RankedModel, sizes: Sizes) -> list[str]:
    """What Miles compares with the model's own configuration; Megatron-Bridge builds from that."""
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
    """An A and a B for each projection, as PEFT has them; of scale 1, until an adapter is switched in."""
    rank = str(model.max_rank)
    return [
        *("--lora-type", "canonical_lora", "--lora-rank", rank, "--lora-alpha", rank, "--lora-dropout", "0.0"),
        *("--target-modules", ",".join(model.lora_targets)),
        "--lora-train-only",  # no rollout engine, to which weights would be sent
    ]


def _gradients() -> list[str]:
    """As `check_setup` asks for: sums in float32, and nothing that is dropped by chance."""
    return [
        "--accumulate-allreduce-grads-in-fp32",
        "--no-gradient-accumulation-fusion",  # its kernels write gradients behind autograd's back
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
    """By Miles itself, on a rank: with tensor ranks it asks the GPU, which the driver must leave alone.

    Raises ServerError with what Miles says against them.
    """
    from miles.utils.arguments import parse_args

    said = io.StringIO()
    before, sys.argv = sys.argv, ["miles", *arguments]
    try:
        with contextlib.redirect_stderr(said):
            namespace: Namespace = parse_args()
    except (SystemExit, Exception) as error:
        why = said.getvalue().strip().rpartition("\n")[2] if isinstance(error, SystemExit) else str(error)
        raise ServerError(f"Miles refuses its arguments: {why or type(error).__name__}") from error
    finally:
        sys.argv = before
        sys.stderr.write(said.getvalue())
    return namespace
