"""Training steps and samples on one GPU, as multiples of the same work with transformers and PEFT, without Tinsmith.

The benchmark reads no files: the model has the shape of Qwen3 and random weights, which are made on the device. The
steps of the bare loop, on all rows at once, run first. Then the engine's steps run, with a worker's configuration. The
share of products is the fraction of a step's time that its matrix products would take at the speed of large products.
Each frozen weight has two products, and each weight of the adapter has three.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from tinsmith_trainer.engines.base import (
    AdamParams,
    Datum,
    LoraProducts,
    LoraSpec,
    LossKernel,
    LossSpec,
    Recompute,
    Work,
)
from tinsmith_trainer.engines.peft import PeftEngine, build_peft_engine
from tinsmith_trainer.engines.peft.settings import device_settings, plan_memory
from tinsmith_trainer.parity.sides import compute
from tinsmith_trainer.process.output import configure_logs
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, SamplingParams
from tinsmith_trainer.sampling.builtin import BuiltinSampler, sampler_settings
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.torch_model.device import DTYPES, SharedDevice, choose_device
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import wrap_linears
from tinsmith_trainer.torch_model.norms import fuse_norms
from tinsmith_trainer.torch_model.rows import wrap_activations
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from workloads import ALPHA, BETAS, EPS, LEARNING_RATE, LINEAR_LAYERS, RANK

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}
LONGEST_TOKENS = 8192
ADAM = AdamParams(LEARNING_RATE, BETAS[0], BETAS[1], EPS)
SQUARE = {"cuda": 8192, "cpu": 512}
"""The number of rows of the matrices with which the device's rate is measured."""
WARM_UP = 2
GB = 10**9


@dataclass(frozen=True, slots=True)
class Side:
    """The figures of one side.

    `peak_gb`: the most memory that PyTorch took, weights included; None on a CPU. `error`: why the figures are missing.
    """

    tokens_per_second: float = 0.0
    share_of_products: float = 0.0
    peak_gb: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The results for one model on one device."""

    model: str
    device: str
    dtype: str
    rows: int
    tokens: int
    tera_flops_per_second: float
    bare: Side
    engine: Side
    samples_per_second: float
    sampled_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Steps:
    """The number of rows, tokens and repetitions for both sides."""

    rows: np.ndarray
    count: int
    device: torch.device
    flops_per_second: float

    @property
    def tokens(self) -> int:
        return self.rows[:, 1:].size

    def measured(self, prepare: Callable[[], Callable[[], None]], flops_per_token: float) -> Side:
        """Measure the step that `prepare` returns."""
        try:
            seconds = self._seconds(prepare())
        except torch.OutOfMemoryError:
            return Side(error="out of memory")
        rate = self.tokens / seconds
        peak = torch.cuda.max_memory_allocated() / GB if self.device.type == "cuda" else None
        return Side(rate, rate * flops_per_token / self.flops_per_second, peak)

    def _seconds(self, step: Callable[[], None]) -> float:
        for _ in range(WARM_UP):
            step()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return seconds_of(step, self.count, self.device)


def free_memory(device: torch.device) -> None:
    """Free the memory of unused models. PEFT's models hold references to themselves."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds_of(work: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds of one of `count` calls. The time ends when the device has finished."""
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        work()
    _synchronize(device)
    return (time.perf_counter() - started) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiplications and additions per second of large square matrices."""
    size = SQUARE[device.type]
    left, right = (torch.randn((size, size), device=device, dtype=dtype) for _ in range(2))
    for _ in range(WARM_UP):
        left @ right
    return 2 * size**3 / seconds_of(lambda: left @ right, 10, device)


def new_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    return model_of(Qwen3Config(**SHAPES[name], max_position_embeddings=LONGEST_TOKENS), device, dtype)


def model_of(config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Make a frozen model with random weights."""
    torch.manual_seed(0)
    config.eos_token_id, config.bos_token_id = 0, None
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def flops_per_token(model: PreTrainedModel) -> float:
    """Return the floating-point operations of a step's products: two for a frozen weight, three for an adapter's.

    Attention is not counted.
    """
    linears = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    frozen = sum(layer.weight.numel() for layer in linears)
    adapters = sum(RANK * sum(layer.weight.shape) for layer in linears)
    return 4.0 * frozen + 6.0 * adapters


def bare_step(model: PreTrainedModel, rows: np.ndarray) -> Callable[[], None]:
    """Return the plain step with transformers and PEFT. The step reads the loss, as a watched training loop does."""
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LINEAR_LAYERS))
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    adapted.train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
    tokens = torch.from_numpy(rows).to(model.device)

    def step() -> None:
        logits = adapted(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def torch_model(name: str, model: PreTrainedModel) -> TorchModel:
    """Return the model that would be loaded from a directory, but without files."""
    if model.device.type == "cpu":
        wrap_activations(model)
    else:
        fuse_norms(model)
    info = BaseModelInfo(name, type(model).__name__, "random", model.config.vocab_size, LONGEST_TOKENS)
    return TorchModel(model, None, Path(), info, wrap_linears(model), (), SharedDevice(model.device))


def engine_step(engine: PeftEngine, rows: np.ndarray) -> Callable[[], None]:
    engine.create_adapter("a", LoraSpec(RANK, ALPHA, seed=0))
    datums = [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:]}) for row in rows]

    def step() -> None:
        compute(engine, Work("a", datums, LossSpec("cross_entropy")))
        engine.optim_step("a", ADAM)

    return step


def sampled_per_second(
    loaded: TorchModel, engine: PeftEngine, prompts: np.ndarray, max_tokens: int, products: LoraProducts
) -> float:
    """Return samples per second of the trained adapter: one sample for each prompt, all submitted at once."""
    sampler = BuiltinSampler(loaded, sampler_settings(loaded.device.type, products))
    sampler.load_adapter("a", engine.state("a").weights_only())
    try:
        draw_samples(sampler, prompts[:1], ["a"], max_tokens)
        return len(prompts) / seconds_of(lambda: draw_samples(sampler, prompts, ["a"], max_tokens), 1, loaded.device)
    finally:
        sampler.close()


def draw_samples(
    sampler: BuiltinSampler, prompts: Sequence[np.ndarray], adapters: Sequence[str], max_tokens: int
) -> None:
    """Draw one sample of each prompt, all at the same time. The adapters take turns. Raises the error of a sample."""
    outcomes: list[SampleOutcome] = []
    left = threading.Semaphore(0)

    def done(outcome: SampleOutcome) -> None:
        outcomes.append(outcome)
        left.release()

    params = SamplingParams(max_tokens=max_tokens, seed=1, stop_tokens=())
    for number, prompt in enumerate(prompts):
        adapter = adapters[number % len(adapters)]
        sampler.submit(SampleJob(f"request-{number}", adapter, prompt.astype(np.int32), params), done)
    for _ in prompts:
        left.acquire()
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


def measure(options: argparse.Namespace) -> Report:
    device_name, dtype = choose_device(options.device, options.dtype)
    device = torch.device(device_name)
    rate = measured_rate(device, dtype)
    vocab_size = int(SHAPES[options.model]["vocab_size"])
    rows = np.random.default_rng(0).integers(0, vocab_size, (options.rows, options.tokens + 1))
    steps = Steps(rows, options.steps, device, rate)
    needed = flops_per_token(new_model(options.model, torch.device("meta"), dtype))
    bare = steps.measured(lambda: bare_step(new_model(options.model, device, dtype), rows), needed)
    free_memory(device)
    loaded = torch_model(options.model, new_model(options.model, device, dtype))
    plan = plan_memory(loaded, options.token_budget, options.recompute)
    defaults = device_settings(device.type, dtype, plan)
    products = options.lora_products or defaults.lora_products
    settings = replace(defaults, lora_products=products, loss_kernel=options.loss_kernel)
    engine = build_peft_engine(loaded, settings)
    tinsmith = steps.measured(lambda: engine_step(engine, rows), needed)
    samples = sampled_per_second(loaded, engine, rows[:, : options.prompt_tokens], options.sampled_tokens, products)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return Report(
        model=options.model,
        device=machine,
        dtype=str(dtype).removeprefix("torch."),
        rows=options.rows,
        tokens=options.tokens,
        tera_flops_per_second=rate / 1e12,
        bare=bare,
        engine=tinsmith,
        samples_per_second=samples,
        sampled_tokens_per_second=samples * options.sampled_tokens,
    )


def draw(report: Report) -> Table:
    title = f"{report.model} in {report.dtype} on {report.device}: a step of {report.rows} x {report.tokens} tokens"
    table = Table(title=title, caption=_caption(report))
    for heading in ("", "tokens per second", "share of products", "peak of memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, side in (("bare PEFT loop", report.bare), ("engine", report.engine)):
        peak = "" if side.peak_gb is None else f"{side.peak_gb:.1f} GB"
        table.add_row(name, side.error or f"{side.tokens_per_second:,.0f}", f"{side.share_of_products:.2f}", peak)
    return table


def _caption(report: Report) -> str:
    return (
        f"Products alone: {report.tera_flops_per_second:.2f} TFLOP/s. "
        f"Samples: {report.samples_per_second:.1f} per second, {report.sampled_tokens_per_second:,.0f} tokens."
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="8B", help="by its parameters")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--steps", type=int, default=10, help="after the first, which are not measured")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--sampled-tokens", type=int, default=32, help="of a sample; one for each row")
    parser.add_argument("--token-budget", type=int, help="as the worker's; so are the next three")
    parser.add_argument("--recompute", choices=get_args(Recompute), default="auto")
    parser.add_argument("--lora-products", choices=get_args(LoraProducts))
    parser.add_argument("--loss-kernel", choices=get_args(LossKernel), default="auto")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    configure_logs("console", "error")  # standard output is only for the figures
    report = measure(options)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        Console().print(draw(report))


if __name__ == "__main__":
    main()
