from __future__ import annotations

from argparse import Namespace

from megatron.bridge.peft.canonical_lora import CanonicalLoRA


def create_lora_instance(args: Namespace) -> CanonicalLoRA:
    assert args.lora_type == "canonical_lora", "others have no place for PEFT's adapters"
    return CanonicalLoRA(
        target_modules=args.target_modules, dim=args.lora_rank, alpha=args.lora_alpha, dropout=args.lora_dropout
    )
