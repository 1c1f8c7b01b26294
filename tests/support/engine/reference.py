"""A real engine in numpy alone: one linear layer with LoRA, exact gradients, AdamW.

It starts in a tenth of a second, so grids of crashes can run it in subprocesses, and it keeps the
same contract suite as the torch engine. `TINSMITH_REFERENCE_DELAY_SECONDS` makes every microbatch last,
so that a test can kill a worker in the middle of one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tinsmith_trainer.engines import peft_layout
from tinsmith_trainer.engines.base import (
    AdamParams,
    AdapterState,
    AnnouncedAdapter,
    Call,
    Datum,
    Engine,
    EngineCapabilities,
    ExportLayout,
    LoraSpec,
    Outcome,
    Work,
)
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

VOCAB_SIZE = 32
HIDDEN_SIZE = 8
MAX_SEQUENCE_LENGTH = 64
LOSSES = ("cross_entropy", "importance_sampling")
MICROBATCH_DATUMS = 8
MODULE = "model.layers.0.self_attn.q_proj"

Floats = NDArray[np.float32]


@dataclass
class _Adapter:
    lora: LoraSpec
    weights: dict[str, Floats]
    exp_avg: dict[str, Floats]
    exp_avg_sq: dict[str, Floats]
    step: int = 0
    gradients: dict[str, Floats] = field(default_factory=dict)


@dataclass(eq=False)
class ReferenceCall(Call):
    work: Work
    scratch: dict[str, Floats]
    results: list[tuple[Floats, float]] = field(default_factory=list)

    @property
    def microbatch(self) -> Sequence[Datum]:
        """The next one."""
        return self.work.datums[len(self.results) : len(self.results) + MICROBATCH_DATUMS]

    @property
    def next_tokens(self) -> int:
        return max(1, sum(datum.length for datum in self.microbatch)) if self.microbatch else 0


class ReferenceEngine:
    """logits = U (h + s B A h), h = W E[token]."""

    def __init__(
        self,
        path: str = "reference",
        adapter_slots: int = 64,
        max_rank: int = 16,
        seed: int = 0,
        quantization: str = "",
    ) -> None:
        draw = np.random.default_rng(seed)
        self._embeddings = draw.normal(size=(VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
        self._weight = draw.normal(size=(HIDDEN_SIZE, HIDDEN_SIZE)).astype(np.float32) / np.float32(HIDDEN_SIZE**0.5)
        self._unembed = draw.normal(size=(VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
        revision = f"reference-{seed}"
        self._info = BaseModelInfo(path, "Reference", revision, VOCAB_SIZE, MAX_SEQUENCE_LENGTH, quantization)
        self._slots, self._max_rank = adapter_slots, max_rank
        self._adapters: dict[str, _Adapter] = {}

    def base_model(self) -> BaseModelInfo:
        return self._info

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine="reference",
            losses=LOSSES,
            max_rank=self._max_rank,
            adapter_slots=self._slots,
            batch_invariant=True,
            train_mlp=False,
            train_unembed=False,
        )

    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        if not 1 <= lora.rank <= self._max_rank:
            raise UserError(f"rank {lora.rank} is outside 1 to {self._max_rank}.")
        if len(self._adapters) >= self._slots:
            raise UserError(f"all {self._slots} adapter slots are taken.")
        draw = np.random.default_rng(lora.seed)
        bound = 1 / HIDDEN_SIZE**0.5
        weights = {
            "lora_A": draw.uniform(-bound, bound, size=(lora.rank, HIDDEN_SIZE)).astype(np.float32),
            "lora_B": np.zeros((HIDDEN_SIZE, lora.rank), np.float32),
        }
        self._adapters[adapter_id] = _Adapter(lora, weights, _zeros(weights), _zeros(weights))

    def clock_seconds(self) -> float:
        return time.perf_counter()

    def start(self, work: Work) -> Call:
        for index, datum in enumerate(work.datums):
            _check(index, datum, work.loss.name)
        return ReferenceCall(work, _zeros(self._adapters[work.adapter_id].weights))

    def cobatch_room(self, call: Call) -> int:
        return max(0, int(os.environ.get("TINSMITH_REFERENCE_SHARED_TOKENS", "0")) - call.next_tokens)

    def cobatch(self, calls: Sequence[Call]) -> Sequence[Call]:
        return calls if self.cobatch_room(calls[0]) else calls[:1]

    def advance(self, calls: Sequence[Call]) -> None:
        time.sleep(float(os.environ.get("TINSMITH_REFERENCE_DELAY_SECONDS", "0")))
        for call in cast("Sequence[ReferenceCall]", calls):
            work = call.work
            adapter = self._adapters[work.adapter_id]
            call.results += [self._datum(adapter, datum, work.loss.name, call.scratch) for datum in call.microbatch]

    def finish(self, call: Call) -> Outcome:
        mine = cast("ReferenceCall", call)
        work, results = mine.work, mine.results
        adapter = self._adapters[work.adapter_id]
        if not work.forward_only:
            gradients = adapter.gradients or _zeros(adapter.weights)
            adapter.gradients = {name: gradients[name] + mine.scratch[name] for name in mine.scratch}
        return Outcome(
            outputs=[{"logprobs": logprobs} for logprobs, _ in results],
            metrics={
                "loss:sum": float(sum(loss for _, loss in results)),
                "tokens:sum": float(sum(_active_tokens(datum) for datum in work.datums)),
            },
            trained_tokens=0 if work.forward_only else sum(datum.length for datum in work.datums),
            input_tokens=sum(datum.length for datum in work.datums),
        )

    def _datum(self, adapter: _Adapter, datum: Datum, loss: str, scratch: dict[str, Floats]) -> tuple[Floats, float]:
        targets = np.atleast_2d(datum.loss_inputs["target_tokens"].T).T  # [T, K]
        scale = np.float32(adapter.lora.alpha / adapter.lora.rank)
        hidden = self._embeddings[datum.tokens] @ self._weight.T  # [T, d]
        low = hidden @ adapter.weights["lora_A"].T * scale  # [T, r]
        outputs = hidden + low @ adapter.weights["lora_B"].T
        logits = outputs @ self._unembed.T  # [T, V]
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        logprobs = np.take_along_axis(log_probabilities, targets, axis=1)
        value, slope = _loss(loss, logprobs, datum)  # slope: dL/dlogprobs [T, K]
        d_logits = -np.exp(log_probabilities) * slope.sum(axis=1, keepdims=True)
        np.add.at(d_logits, (np.arange(len(targets))[:, None], targets), slope)
        d_outputs = d_logits @ self._unembed
        scratch["lora_B"] += d_outputs.T @ low
        scratch["lora_A"] += (d_outputs @ adapter.weights["lora_B"]).T @ hidden * scale
        return logprobs.reshape(datum.loss_inputs["target_tokens"].shape).astype(np.float32), value

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        adapter = self._adapters[adapter_id]
        gradients = adapter.gradients or _zeros(adapter.weights)
        adapter.gradients = {}
        norm = float(np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in gradients.values())))
        if not np.isfinite(norm):
            raise UserError(f"the gradient norm is {norm}; the step was not applied.")
        clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        adapter.step += 1
        for name in adapter.weights:
            _adam(adapter, name, gradients[name] * np.float32(clip), params)
        return {"grad_norm": norm, "step": float(adapter.step)}

    def clear_gradients(self, adapter_id: str) -> None:
        if adapter_id in self._adapters:
            self._adapters[adapter_id].gradients = {}

    def state(self, adapter_id: str) -> AdapterState:
        adapter = self._adapters[adapter_id]
        groups = {
            "weights": adapter.weights,
            "adam/exp_avg": adapter.exp_avg,
            "adam/exp_avg_sq": adapter.exp_avg_sq,
            "gradients": adapter.gradients,
        }
        tensors = {
            f"{group}/{MODULE}.{name}": value.copy() for group, part in groups.items() for name, value in part.items()
        }
        return AdapterState(adapter.lora, adapter.step, tensors)

    def weights(self, adapter_id: str) -> AdapterState:
        return Engine.weights(cast("Engine", self), adapter_id)

    def load_state(self, adapter_id: str, state: AdapterState, with_optimizer: bool) -> None:
        weights = _group(state.tensors, "weights")
        adapter = _Adapter(state.lora, weights, _zeros(weights), _zeros(weights))
        if with_optimizer:
            adapter.exp_avg |= _group(state.tensors, "adam/exp_avg")
            adapter.exp_avg_sq |= _group(state.tensors, "adam/exp_avg_sq")
            adapter.gradients = _group(state.tensors, "gradients")
            adapter.step = state.optimizer_step
        self._adapters[adapter_id] = adapter

    def export(self, state: AdapterState, target: Path, layout: ExportLayout) -> None:
        if layout != "peft":
            raise UserError("the reference engine has no merged layout.")
        peft_layout.write_adapter(target, state.lora, state.tensors, self._info.path)

    def adapter_shapes(self, lora: LoraSpec) -> dict[str, tuple[int, ...]]:
        return {f"{MODULE}.lora_A": (lora.rank, HIDDEN_SIZE), f"{MODULE}.lora_B": (HIDDEN_SIZE, lora.rank)}

    def embedding_shapes(self) -> list[tuple[int, ...]]:
        return []

    def read_adapter(self, config: bytes, weights: bytes, announced: AnnouncedAdapter) -> AdapterState:
        from tinsmith_trainer.engines.imports.files import read_adapter  # brings PyTorch, which takes seconds

        return read_adapter(config, weights, announced, self.adapter_shapes)

    def drop(self, adapter_id: str) -> None:
        self._adapters.pop(adapter_id, None)

    def close(self) -> None: ...


def build_reference(options: Any) -> tuple[ReferenceEngine, None]:
    """Build the engine for a worker's `--engine support.engine.reference:build_reference`."""
    return ReferenceEngine(options.model, options.adapter_slots, min(options.max_rank, 16)), None


def _check(index: int, datum: Datum, loss: str) -> None:
    if loss not in LOSSES:
        raise UserError(f"loss_fn {loss!r} is not known; use one of {', '.join(LOSSES)}.")
    if datum.length > MAX_SEQUENCE_LENGTH:
        raise UserError(f"datum {index} has {datum.length} tokens; at most {MAX_SEQUENCE_LENGTH} fit.")
    targets = datum.loss_inputs.get("target_tokens")
    if targets is None or len(targets) != datum.length:
        raise UserError(f"datum {index}: target_tokens must have the input's length {datum.length}.")
    for name, values in (("tokens", datum.tokens), ("target_tokens", targets)):
        if np.any((values < 0) | (values >= VOCAB_SIZE)):
            raise UserError(f"datum {index}: {name} holds ids outside 0 to {VOCAB_SIZE - 1}.")
    for name, values in datum.loss_inputs.items():
        if len(values) != datum.length:
            raise UserError(f"datum {index}: {name} has length {len(values)}, not {datum.length}.")


def _active_tokens(datum: Datum) -> int:
    """Return the number of targets with a weight or an advantage."""
    weights = datum.loss_inputs.get("weights", datum.loss_inputs.get("advantages"))
    return datum.loss_inputs["target_tokens"].size if weights is None else int(np.count_nonzero(weights))


def _loss(name: str, logprobs: Floats, datum: Datum) -> tuple[float, Floats]:
    """Return the loss and its slope in the logprobs, both `[T, K]` inside."""
    if name == "cross_entropy":
        weights = datum.loss_inputs.get("weights", np.ones(logprobs.shape, np.float32)).reshape(logprobs.shape)
        return float(-(weights * logprobs).sum()), (-weights).astype(np.float32)
    advantages = datum.loss_inputs["advantages"].reshape(logprobs.shape)
    ratio = np.exp(np.where(advantages == 0, 0, logprobs - datum.loss_inputs["logprobs"].reshape(logprobs.shape)))
    return float(-(ratio * advantages).sum()), (-ratio * advantages).astype(np.float32)


def _adam(adapter: _Adapter, name: str, gradient: Floats, params: AdamParams) -> None:
    """Decoupled weight decay (Loshchilov and Hutter), bias-corrected moments (Kingma and Ba)."""
    first, second = adapter.exp_avg[name], adapter.exp_avg_sq[name]
    adapter.exp_avg[name] = first = (params.beta1 * first + (1 - params.beta1) * gradient).astype(np.float32)
    adapter.exp_avg_sq[name] = second = (params.beta2 * second + (1 - params.beta2) * gradient**2).astype(np.float32)
    step_size = params.learning_rate / (1 - params.beta1**adapter.step)
    denominator = np.sqrt(second) / (1 - params.beta2**adapter.step) ** 0.5 + params.eps
    decayed = adapter.weights[name] * (1 - params.learning_rate * params.weight_decay)
    adapter.weights[name] = (decayed - step_size * first / denominator).astype(np.float32)


def _zeros(like: Mapping[str, Floats]) -> dict[str, Floats]:
    return {name: np.zeros_like(value) for name, value in like.items()}


def _group(tensors: Mapping[str, Floats], group: str) -> dict[str, Floats]:
    prefix = f"{group}/{MODULE}."
    return {name.removeprefix(prefix): value.copy() for name, value in tensors.items() if name.startswith(prefix)}
