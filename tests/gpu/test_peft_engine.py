"""The PEFT engine on one GPU, compared with itself on the CPU and with a plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.engine.contract import forward, parity, train
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import AdamParams, Datum, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.parity.sides import compute
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

# Kernels are compiled and servers start within a test; libraries warn about hardware that is not known here.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

# The same comparison on a CPU, of bfloat16 with float32, stays below half of it.
BFLOAT16_ATOL = 0.02
FLOAT32_ATOL = 1e-3

LORA = LoraSpec(rank=32, alpha=32.0, seed=1)
MEDIUM = TinyShape(hidden_size=1024, intermediate_size=2816, layers=16, heads=16, kv_heads=8, vocab_size=32000)
ROWS, TOKENS = 8, 1024
WARM_UP_STEPS, STEPS = 3, 10
SLOWEST_RATIO = 2.0


def test_in_float32_it_agrees_with_the_cpu_in_every_loss() -> None:
    parity("peft:device=cpu", "peft:device=cuda,dtype=float32", steps=6, atol=FLOAT32_ATOL)


def test_the_engine_agrees_with_the_cpu_within_the_rounding_of_bfloat16() -> None:
    parity("peft:device=cpu", "peft:device=cuda,dtype=bfloat16", steps=6, atol=BFLOAT16_ATOL)


def test_in_bfloat16_it_agrees_with_a_plain_peft_loop_on_the_same_gpu() -> None:
    parity("peft:device=cuda", "peft-reference:device=cuda", steps=6, atol=BFLOAT16_ATOL)


def test_an_adapter_trained_on_it_continues_on_the_cpu() -> None:
    directory = str(tiny_directory())
    datums = [Datum(np.arange(3, 40, dtype=np.int32), {"target_tokens": np.arange(4, 41, dtype=np.int64)})]
    on_gpu = build_peft_engine(load_torch_model(directory, dtype=torch.bfloat16, device="cuda"))
    on_gpu.create_adapter("a", LORA)
    train(on_gpu, datums, steps=3)

    on_cpu = build_peft_engine(load_torch_model(directory))
    on_cpu.load_state("a", on_gpu.state("a"), with_optimizer=True)

    expected = forward(on_gpu, datums).outputs[0]["logprobs"]
    np.testing.assert_allclose(forward(on_cpu, datums).outputs[0]["logprobs"], expected, atol=BFLOAT16_ATOL)
    assert on_cpu.optim_step("a", AdamParams(1e-3))["step"] == 4


def test_a_step_takes_no_more_than_twice_the_time_of_a_bare_peft_loop(tmp_path: Path) -> None:
    """Prints the ratio, for the benchmarks page."""
    model = make_tiny_model(tmp_path, shape=MEDIUM)
    tokens = np.random.default_rng(0).integers(0, MEDIUM.vocab_size, (ROWS, TOKENS + 1))
    bare = seconds_per_step(bare_step(model, tokens, LORA))
    torch.cuda.empty_cache()
    seconds = seconds_per_step(engine_step(model, tokens))
    print(
        f"\none step of {ROWS} x {TOKENS} tokens: bare {bare:.4f} s, engine {seconds:.4f} s, ratio {seconds / bare:.2f}"
    )
    assert seconds < SLOWEST_RATIO * bare


def engine_step(model: Path, tokens: np.ndarray) -> Callable[[], None]:
    engine = build_peft_engine(load_torch_model(str(model), dtype=torch.bfloat16, device="cuda"))
    engine.create_adapter("a", LORA)
    datums = [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:]}) for row in tokens]

    def step() -> None:
        compute(engine, Work("a", datums, LossSpec("cross_entropy")))
        engine.optim_step("a", AdamParams(1e-4))

    return step


def seconds_per_step(step: Callable[[], None]) -> float:
    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS


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
