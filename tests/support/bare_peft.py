"""A training step as one writes it with transformers and peft on a GPU, and nothing around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tinsmith_trainer.engines.base import LoraSpec
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def bare_step(
    model: Path, tokens: np.ndarray, lora: LoraSpec, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Callable[[], None]:
    """All rows in one forward. Reads the loss, as any loop that is watched does."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=LINEAR_LAYERS)
    adapted = get_peft_model(base, config)
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-4)
    rows = torch.from_numpy(tokens).to(device)

    def step() -> None:
        logits = adapted(input_ids=rows[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step
