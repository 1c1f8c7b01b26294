"""`parse_args`: the flags that Tinsmith gives, by their names, and what Miles makes of them."""

from __future__ import annotations

import argparse
import sys

FLAGS = ("debug-train-only", "sequence-parallel", "untie-embeddings-and-output-weights", "lora-train-only")
FLAGS_ALSO = ("accumulate-allreduce-grads-in-fp32", "no-gradient-accumulation-fusion")
WORDS = ("train-backend", "megatron-to-hf-mode", "hf-checkpoint", "load", "lora-type", "target-modules", "optimizer")
RECOMPUTE = ("recompute-granularity", "recompute-method", "recompute-modules")
COUNTS = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "rotary-base", "vocab-size", "seq-length"),
    *("make-vocab-size-divisible-by", "actor-num-nodes", "actor-num-gpus-per-node", "num-gpus-per-node"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "lora-rank", "lora-alpha", "recompute-num-layers"),
    *("num-rollout", "rollout-batch-size", "n-samples-per-prompt", "global-batch-size", "micro-batch-size"),
)
NUMBERS = ("norm-epsilon", "lora-dropout", "attention-dropout", "hidden-dropout", "lr", "weight-decay", "clip-grad")


def parse_args() -> argparse.Namespace:
    """Parse `sys.argv`. Ends the process for an unknown flag, as argparse does."""
    parser = argparse.ArgumentParser(prog=sys.argv[0], allow_abbrev=False)
    for name in (*FLAGS, *FLAGS_ALSO):
        parser.add_argument(f"--{name}", action="store_true")
    for names, kind in (((*WORDS, *RECOMPUTE), str), (COUNTS, int), (NUMBERS, float)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_args()
    assert args.num_rollout, "num_epoch is not set, but num_rollout is not set"
    args.target_modules = args.target_modules.split(",")
    args.use_distributed_optimizer = args.optimizer == "adam"
    return args
