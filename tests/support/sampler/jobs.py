"""Builders for samplers: jobs, adapters, a plain transformers model to compare with."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.sampling.base import AltTokens, SampleJob, SampleOutcome, Sampler, SamplingParams, TopkLogprobs
from tinsmith_trainer.torch_model.experts import merge_into_experts
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import module_family
from transformers import AutoModelForCausalLM

ANSWER_SECONDS = 240.0
SMALL_SETTINGS = {"max_rows": 8, "prefill_block_tokens": 16}
"""Settings of a built-in sampler that short jobs can fill."""
NOTHING_STOPS: tuple[int, ...] = ()

_request_numbers = itertools.count()


def prompt_of(length: int, seed: int = 0, vocab_size: int = 512) -> np.ndarray:
    """Random token ids, the same for the same arguments."""
    return np.random.default_rng([seed, length]).integers(0, vocab_size, length, dtype=np.int32)


def job(
    prompt: Sequence[int] | np.ndarray,
    *,
    adapter: str = "",
    num_samples: int = 1,
    prompt_logprobs: bool = False,
    last_n: int | None = None,
    topk_prompt: int = 0,
    topk_sample: int = 0,
    targets: Sequence[Sequence[int]] | np.ndarray | None = None,
    alt_tokens: int = 0,
    request_id: str | None = None,
    **params: Any,
) -> SampleJob:
    """Return a job of 8 tokens with seed 1 and no stops, unless `params` say otherwise."""
    defaults = {"max_tokens": 8, "seed": 1, "stop_tokens": NOTHING_STOPS}
    return SampleJob(
        request_id=request_id or f"request-{next(_request_numbers)}",
        adapter_key=adapter,
        prompt=np.asarray(prompt, np.int32),
        params=SamplingParams(**(defaults | params)),
        num_samples=num_samples,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_last_n=last_n,
        topk_prompt_logprobs=topk_prompt,
        topk_sample_logprobs=topk_sample,
        target_prompt_logprobs=None if targets is None else np.asarray(targets, np.int64),
        prompt_alt_tokens_k=alt_tokens,
    )


class Answer:
    """The outcome of a submitted job, once it is there."""

    def __init__(self) -> None:
        self.outcomes: list[SampleOutcome] = []
        self._there = threading.Event()

    def __call__(self, outcome: SampleOutcome) -> None:
        self.outcomes.append(outcome)
        self._there.set()

    def get(self) -> SampleOutcome:
        assert self._there.wait(ANSWER_SECONDS), "the sampler did not answer"
        return self.outcomes[0]


def submit(sampler: Sampler, job: SampleJob) -> Answer:
    answer = Answer()
    sampler.submit(job, answer)
    return answer


def ask_all(sampler: Sampler, jobs: Sequence[SampleJob]) -> list[SampleOutcome]:
    """Submit all jobs at once, and return the outcomes in the jobs' order."""
    return [answer.get() for answer in [submit(sampler, job) for job in jobs]]


def ask(sampler: Sampler, job: SampleJob) -> SampleOutcome:
    """One job's outcome, which must not be an error."""
    outcome = submit(sampler, job).get()
    assert outcome.error is None, outcome.error
    return outcome


def bits(outcome: SampleOutcome) -> str:
    """All of a result that must not depend on company or caches."""
    assert outcome.error is None, outcome.error
    sequences = [
        (s.tokens.tolist(), s.logprobs.tolist(), s.stopped, _lists(s.topk_logprobs)) for s in outcome.sequences
    ]
    about_prompt = (outcome.prompt_logprobs, outcome.topk_prompt_logprobs, outcome.target_prompt_logprobs)
    return repr((sequences, [_lists(part) for part in (*about_prompt, outcome.prompt_alt_tokens)]))


def _lists(part: np.ndarray | TopkLogprobs | AltTokens | None) -> object:
    if isinstance(part, TopkLogprobs):
        return part.token_ids.tolist(), part.logprobs.tolist()
    if isinstance(part, AltTokens):
        return part.tokens.tolist(), part.logprobs.tolist()
    return None if part is None else part.tolist()


def random_adapter(
    model: TorchModel, *, rank: int = 8, seed: int = 0, families: Sequence[str] = ("attn", "mlp", "unembed")
) -> AdapterState:
    """Return an adapter with random A and B, large enough to change what is sampled."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, layer in model.layers.items():
        if module_family(name) in families:
            for part, shape in zip("AB", layer.lora_shapes(rank), strict=True):
                tensors[f"weights/{name}.lora_{part}"] = draw.normal(0, 0.1, shape).astype(np.float32)
    return AdapterState(LoraSpec(rank=rank, alpha=32.0, seed=seed), optimizer_step=0, tensors=tensors)


def plain_model(model: TorchModel, adapter: AdapterState | None = None) -> Any:
    """Load the same directory in plain transformers, with an adapter merged into its weights."""
    plain = AutoModelForCausalLM.from_pretrained(model.info.path, dtype=model.model.dtype).eval()
    return plain if adapter is None else merged_into(plain, adapter)


def merged_into(plain: Any, adapter: AdapterState) -> Any:
    """Merge an adapter into the plain model, whose weights change."""
    _untie(plain)
    experts: dict[str, dict[str, torch.Tensor]] = {}
    for name in {key.rpartition(".")[0].removeprefix("weights/") for key in adapter.tensors}:
        lora_A = torch.from_numpy(adapter.tensors[f"weights/{name}.lora_A"])
        lora_B = torch.from_numpy(adapter.tensors[f"weights/{name}.lora_B"])
        delta = lora_B @ lora_A * (adapter.lora.alpha / adapter.lora.rank)
        parent, _, part = name.rpartition(".")
        if delta.ndim == 3:
            experts.setdefault(parent, {})[part] = delta
        else:
            weight = plain.get_submodule(name).weight
            weight.data += delta.to(weight.dtype)
    for name, deltas in experts.items():
        merge_into_experts(plain.get_submodule(name), deltas)
    return plain


def _untie(plain: Any) -> None:
    plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.detach().clone(), requires_grad=False)


def full_logprobs(plain: Any, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the logprob of each token but the first, by one forward over all of them: `[len(tokens) - 1]`."""
    following = np.asarray(tokens, np.int64)[1:, None]
    return np.take_along_axis(all_logprobs(plain, tokens), following, axis=1)[:, 0]


@torch.no_grad()
def all_logprobs(plain: Any, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return all logprobs at each position but the first: `[len(tokens) - 1, vocab]`."""
    ids = torch.tensor(np.asarray(tokens, np.int64))[None]
    return torch.log_softmax(plain(input_ids=ids).logits[0].float(), -1)[:-1].numpy()
