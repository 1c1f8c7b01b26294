"""The reference: a training loop as one writes it with transformers and peft, and nothing around it.

A process of its own, so that it has the machine as the server's worker has it. Reads a number of
steps per line on standard input, answers each with the seconds they took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from workloads import ALPHA, BETAS, EPS, LEARNING_RATE, RANK, token_rows

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def build_step(directory: Path) -> Callable[[], float]:
    """A step returns the loss, as any loop that is watched does."""
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEAR_LAYERS))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
    rows = torch.tensor(token_rows(base.config.vocab_size))
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> float:
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    step = build_step(Path(sys.argv[1]))
    for line in sys.stdin:
        started = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
