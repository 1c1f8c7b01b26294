"""The reference: plain training and sampling loops with transformers and PEFT.

The loops run in a separate process, like the worker of a server. For each count on standard input, the program runs
this number of iterations and prints the duration in seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from workloads import (
    ALPHA,
    BETAS,
    EPS,
    LEARNING_RATE,
    LINEAR_LAYERS,
    PROMPT_TOKENS,
    RANK,
    ROWS,
    SAMPLED_TOKENS,
    TOKENS,
    token_rows,
)

Loop = Callable[[int], None]


def load(directory: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LINEAR_LAYERS)))


def train(model: PeftModel) -> Loop:
    """Run `count` training steps. Read each loss, as a training loop with a log does."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
    rows = torch.tensor(token_rows(ROWS, TOKENS + 1, model.config.vocab_size))
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def loop(count: int) -> None:
        for _ in range(count):
            logits = model(input_ids=inputs, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return loop


def sample_one_by_one(model: PeftModel) -> Loop:
    """Draw `count` samples, with one call of `generate` for each."""
    return lambda count: _generate(model, count, rows_per_call=1)


def sample_together(model: PeftModel) -> Loop:
    """Draw `count` samples in one call of `generate`.

    All prompts have the same length, and so have all samples, which is the best case for `generate`.
    """
    return lambda count: _generate(model, count, rows_per_call=count)


def sample_one_prompt(model: PeftModel) -> Loop:
    """Draw `count` samples of one prompt in one call of `generate`."""
    return lambda count: _generate(model, 1, rows_per_call=1, samples=count)


def _generate(model: PeftModel, count: int, *, rows_per_call: int, samples: int = 1) -> None:
    model.eval()
    # Every sample has the full length.
    model.generation_config.eos_token_id = None
    prompts = torch.tensor(token_rows(count, PROMPT_TOKENS, model.config.vocab_size))
    for rows in prompts.split(rows_per_call):
        model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            num_return_sequences=samples,
            top_k=0,
            max_new_tokens=SAMPLED_TOKENS,
            pad_token_id=0,
        )


LOOPS = {loop.__name__: loop for loop in (train, sample_one_by_one, sample_one_prompt, sample_together)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    loop = LOOPS[options.loop](load(options.model))
    for line in sys.stdin:
        started = time.perf_counter()
        loop(int(line))
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
