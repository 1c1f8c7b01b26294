"""The interface between a worker and samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.sampling.constraints.constraint import Constraint
from tinsmith_trainer.sampling.language import Language
from tinsmith_trainer.torch_model.base_model import Image

EMPTY_TOKEN = 0
EMPTY_LOGPROB = -99999.0
"""The values of an empty cell of `TopkLogprobs`. The SDK shows a row that begins with an empty cell as None."""
NO_TARGET = -1
"""The value of an empty cell of `SampleJob.target_prompt_logprobs`.

In the result, the logprob for an empty cell is 0.
"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of a draw.

    If `max_tokens` is None, a sequence may fill the context. A sequence ends at the model's end-of-sequence tokens,
    except if `stop_tokens` has IDs or if all given stop lists are empty. `stop_tokens` replace the end-of-sequence
    tokens. With empty lists, only `max_tokens` ends a sequence. If `seed` is None, the draws are random. `temperature`
    0 is greedy. `top_k` -1 and `top_p` 1 are off.

    Before temperature, top-k and top-p, the logit of a token changes: `logit_bias` adds a number, `frequency_penalty`
    subtracts a number for each earlier occurrence in the sequence, and `presence_penalty` subtracts a number if the
    sequence has the token. Tokens of the prompt do not count. `constraint` forbids tokens, and also ends a sequence.
    """

    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None

    @property
    def changes_logits(self) -> bool:
        return self.has_penalties or bool(self.logit_bias) or self.constraint is not None

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0


class Grammar(Protocol):
    """A compiled constraint. Methods are thread-safe. `lark` is the grammar in llguidance's form of Lark."""

    lark: str

    def begin(self) -> GrammarState:
        """Return the state before the first token of a sequence."""


class GrammarState(Protocol):
    """The position of one sequence in a grammar."""

    def allowed(self) -> NDArray[np.int32]:
        """Return the allowed tokens, one bit for each token, the lowest bit first.

        Raises UserError if the grammar is too complex.
        """

    def take(self, token: int) -> bool:
        """Take a drawn token. Return whether the text is complete, and only an end-of-sequence token may follow."""


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """The K most likely tokens of N positions. The arrays `token_ids` and `logprobs` are `[N, K]`.

    Tokens are in descending order of likelihood. If two tokens are equally likely, the lower ID comes first. At
    positions that were not scored, cells are `EMPTY_TOKEN` with `EMPTY_LOGPROB`.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def empty(cls, positions: int, k: int) -> TopkLogprobs:
        """Return arrays in which no position is scored."""
        return cls(np.full((positions, k), EMPTY_TOKEN, np.int32), np.full((positions, k), EMPTY_LOGPROB, np.float32))


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token that was drawn for a sequence. `top_logprobs` has one row, if the job requests the most likely tokens.

    `masked_logprobs`: the logprobs are those after the constraint (see `SampleOutcome`).
    """

    token: int
    logprob: float
    top_logprobs: TopkLogprobs | None = None
    masked_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class SampleJob:
    """The job of one `asample`.

    `adapter_key` is the key of a loaded adapter version; "" is the base model. Tenants share the sampler fairly. An
    empty tenant name counts as a tenant.

    Logprobs are always the model's logprobs at temperature 1 over the whole vocabulary, before top-k and top-p, and
    before biases, penalties and constraints (see `SampleOutcome.masked_logprobs`). `grammar` is the compiled constraint
    of the parameters; `Sampler.prepared` sets it, if the sampler uses one.
    `topk_*` is the number of most likely tokens for each prompt position or drawn position; 0 requests none.
    `target_prompt_logprobs` is `[len(prompt) - 1, K]`: row i has K tokens whose logprobs at prompt position i + 1 are
    requested; empty cells are `NO_TARGET`. `prompt_alt_tokens_k` is the number of tokens to draw for each prompt
    position after the first. The draws for prompt positions are independent, with replacement, at the job's temperature
    and from all tokens. `prompt_logprobs_last_n` limits `prompt_logprobs` and `topk_prompt_logprobs` to this many
    positions at the end of the prompt.

    The sampler inserts tokens for `images` into `prompt`, and prompt positions count these tokens. For each token of
    each sequence, the sampler calls `drawn` in the sampler's thread, with the index of the sequence. A sampler that
    gets all tokens at the end does not call `drawn`.
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
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class AltTokens:
    """The alternative draws for each prompt position after the first position. The arrays are `[len(prompt) - 1, k]`.

    Row i is for prompt position i + 1.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A drawn sequence. `tokens` includes the stop token, or the tokens that complete a stop string.

    `logprobs` has one value per token, and `topk_logprobs` has one row per token if the job requests the most likely
    tokens. `logprobs` and `topk_logprobs` are the model's logprobs at temperature 1, before top-k and top-p.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stopped: bool  # False: the sequence reached its maximum length
    topk_logprobs: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """The result of a job: an `error`, or `num_samples` sequences and all further requested values.

    `prompt_logprobs` is `[len(prompt)]`, with NaN at position 0 and at unscored positions. `topk_prompt_logprobs` is
    `[len(prompt), K]`, with empty cells at position 0 and at unscored positions. `target_prompt_logprobs` has the shape
    of the request, with 0 for `NO_TARGET`. `prompt_tokens` includes the tokens of images. `started_at` is the time at
    which the sampler began the job, in Unix seconds, or 0 if the job never began. With `masked_logprobs`, the logprobs
    of drawn tokens are those after the constraint, because the sampler's server knows no others.
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
    masked_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """The numbers of a sampler. `step_seconds` is the duration of the current step so far, which may hang."""

    active: int
    waiting: int
    sampled_tokens: int
    prefilled_tokens: int
    prefix_hit_tokens: int
    busy_seconds: float
    step_seconds: float = 0.0


class Sampler(Protocol):
    """A sampler of a base model with adapters. Methods are thread-safe."""

    @property
    def takes_images(self) -> bool:
        """Return whether prompts may have images.

        If a sampler takes no images, jobs with images fail with a UserError.
        """
        return False

    @property
    def language(self) -> Language | None:
        """The language of the base model, or None if the sampler knows only tokens."""
        return None

    @property
    def unready_reason(self) -> str | None:
        """The reason for which clients should send new jobs to another sampler, or None."""
        return None

    def load_adapter(self, adapter_key: str, state: AdapterState) -> None:
        """Load an immutable adapter version under a key. A key that is already loaded does not change."""

    def has_adapter(self, adapter_key: str) -> bool: ...

    def drop_adapter(self, adapter_key: str) -> None:
        """Drop a version and all cached prefixes of the version, as soon as no running job uses the version."""

    def prepared(self, job: SampleJob) -> SampleJob:
        """Check and compile the constraint of a job, before `submit`. This may take a second.

        Raises UserError if the sampler cannot compile the constraint.
        """
        return job

    def submit(self, job: SampleJob, done: Callable[[SampleOutcome], None]) -> None:
        """Queue a job of a tenant. The sampler's thread calls `done` once, with the result or an error."""

    def cancel(self, request_id: str) -> None:
        """End a job early with an error. Unknown IDs are ignored."""

    def stats(self) -> SamplerStats: ...

    def sequence_memory(self) -> str:
        """Describe how the memory of sequences is organized.

        The text is empty if another program manages this memory.
        """
        return ""

    def close(self) -> None:
        """End the sampler's thread. Running jobs end with an error."""
