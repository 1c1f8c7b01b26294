"""What the worker asks of a sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.sampling.language import Language
from tinsmith_trainer.torch_model.base_model import Image

EMPTY_TOKEN = 0
EMPTY_LOGPROB = -99999.0
"""Together: a cell of `TopkLogprobs` that holds nothing. The SDK shows a row that begins with one as None."""
NO_TARGET = -1
"""A cell of `SampleJob.target_prompt_logprobs` that asks for nothing, and is answered with 0."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw.

    `max_tokens` None is as many as the context allows. `stop_tokens` and `stop_strings` None
    both: the model's end-of-sequence tokens stop, as they do beside strings; ids stop instead of
    them, and where lists are empty nothing stops.
    `seed` None is drawn anew. `temperature` 0 is greedy. `top_k` -1 and `top_p` 1 are off.
    """

    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """The most likely tokens of N positions, the most likely first and of equals the lower id, `[N, K]` both.

    Cells of positions that were not scored are `EMPTY_TOKEN` with `EMPTY_LOGPROB`.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def empty(cls, positions: int, k: int) -> TopkLogprobs:
        """Nothing scored yet."""
        return cls(np.full((positions, k), EMPTY_TOKEN, np.int32), np.full((positions, k), EMPTY_LOGPROB, np.float32))


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token of a sequence as it was drawn; `top_logprobs` is of one position, if the job asked for it."""

    token: int
    logprob: float
    top_logprobs: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One `asample`. `adapter_key` "" is the base model; else the key of a loaded adapter version.

    Logprobs are the model's at temperature 1 over the whole vocabulary, before top-k and top-p, whatever is asked:
    `topk_*` are the K most likely tokens of each prompt or sampled position, 0 for none; `target_prompt_logprobs`,
    `[len(prompt) - 1, K]`, names tokens whose logprobs at prompt position i + 1 row i asks for, `NO_TARGET` for none;
    `prompt_alt_tokens_k` is how many tokens are drawn, independently, with replacement, at the job's temperature and
    from all tokens, for each prompt position after the first. `prompt_logprobs_last_n` is about `prompt_logprobs` and
    `topk_prompt_logprobs`: only so many positions at the prompt's end are scored for them.
    Tenants share the sampler fairly; "" is one, too.
    `images` stand between the tokens of `prompt`, whose own tokens are placed there by the sampler: all that is said
    of prompt positions counts them.
    `drawn` is told each token of each sequence, by its index, as soon as it is there; from the sampler's thread. A
    sampler that knows tokens only at the end does not call it.
    """

    request_id: str
    adapter_key: str
    prompt: NDArray[np.int32]
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: NDArray[np.int64] | None = None
    prompt_alt_tokens_k: int = 0
    tenant: str = ""
    images: tuple[Image, ...] = ()
    drawn: Callable[[int, DrawnToken], None] | None = None


@dataclass(frozen=True, slots=True)
class AltTokens:
    """Draws for each prompt position after the first, `[len(prompt) - 1, k]` both: row i is for position i + 1."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Stop tokens, and the tokens that completed a stop string, are part of `tokens`.

    `logprobs` are those of the model at temperature 1, before top-k and top-p; one per token. So are those of
    `topk_logprobs`, a row per token, which is there if the job asked for it.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stopped: bool  # else it ran to its length
    topk_logprobs: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """Either `error`, or `num_samples` sequences and whatever else the job asked for.

    `prompt_logprobs` is `[len(prompt)]`, NaN at 0 and where unscored, `topk_prompt_logprobs` `[len(prompt), K]`, empty
    likewise; `target_prompt_logprobs` has the shape of what was asked, 0 where that is `NO_TARGET`. `prompt_tokens` are
    those of the job, images included; `started_at`, in Unix seconds, is when the sampler began with it, 0 for never.
    """

    sequences: tuple[Sequence, ...] = ()
    prompt_logprobs: NDArray[np.float32] | None = None
    prompt_cache_hit_tokens: int = 0
    error: TrainerError | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: NDArray[np.float32] | None = None
    prompt_alt_tokens: AltTokens | None = None
    prompt_tokens: int = 0
    started_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplerStats:
    active: int
    waiting: int
    sampled_tokens: int
    prefilled_tokens: int
    prefix_hit_tokens: int
    busy_seconds: float


class Sampler(Protocol):
    """Draws sequences from a base model with adapters. Methods may be called from any thread."""

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have them. Jobs with images end with a UserError where they may not."""
        return False

    @property
    def language(self) -> Language | None:
        """Of its base model; None for a sampler that knows tokens alone."""
        return None

    def load_adapter(self, adapter_key: str, state: AdapterState) -> None:
        """Makes an immutable adapter version known under a key. Known keys are left alone."""

    def has_adapter(self, adapter_key: str) -> bool: ...

    def drop_adapter(self, adapter_key: str) -> None:
        """Forgets a version once its running jobs are done, with its cached prefixes."""

    def submit(self, job: SampleJob, done: Callable[[SampleOutcome], None]) -> None:
        """Queues a job among its tenant's. `done` is called once, from the sampler's thread, errors included."""

    def cancel(self, request_id: str) -> None:
        """Ends a job early with an error. Unknown ids are ignored."""

    def stats(self) -> SamplerStats: ...

    def sequence_memory(self) -> str:
        """How sequences are kept while they are drawn, in words; empty where that is another program's affair."""
        return ""

    def close(self) -> None:
        """Ends the sampler's thread; running jobs end with an error."""
