"""The interface of token servers, which take tokens and return tokens: start, requests and answers."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.sampling.base import DrawnToken, SampleJob, Sequence, TopkLogprobs

HOST = "127.0.0.1"
"""The address of a server.

A server's routes load files, so other pods and other users of the machine must not call the server.
"""
SOCKET_SCHEME = "unix:"
MOST_ADAPTERS_IN_A_BATCH = 8
"""The limit on adapters in a batch.

Each adapter takes memory for the highest rank on every GPU, which leaves less memory for sequences.
"""

MOST_DRAWS = 768
"""The limit on draws on a server. A single tenant may have half of these draws. Further draws wait in this process."""
MOST_ROWS = 512
"""The number of rows of a server's batch. Two tenants together may have this number of draws on a server.

So the draws of a single tenant leave rows for another tenant.
"""

MOST_CANDIDATES = 128
"""The limit on candidates in a request. The number of candidates is limited by vLLM."""

SEED_RANGE = 2**31
"""The upper limit of seeds for every server. Seeds are smaller than this limit."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server.

    `dtype` is float32 or bfloat16. `private` is a folder that only this user may enter. `key` protects a server that
    listens at a port. `extra` are arguments at the end of the command line, which override earlier arguments.
    `environment` is the virtual environment of the server. If `environment` is None, the server uses the environment of
    this process.
    """

    model: Path
    port: int
    gpus: int
    max_sequence_length: int
    max_rank: int
    max_loaded: int
    dtype: str
    private: Path
    extra: tuple[str, ...] = ()
    environment: Path | None = None
    key: str = field(default_factory=secrets.token_urlsafe, repr=False)

    @property
    def adapters_in_a_batch(self) -> int:
        return min(MOST_ADAPTERS_IN_A_BATCH, self.max_loaded)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def socket(self) -> Path:
        return self.private / "server.sock"

    @property
    def socket_address(self) -> str:
        return f"{SOCKET_SCHEME}{self.socket}"

    def program(self, name: str) -> str:
        """Return the path of a program of the environment, for a command line.

        If no environment is set, the system searches for the program.
        """
        return name if self.environment is None else str(self.environment / "bin" / name)

    def program_variables(self) -> dict[str, str]:
        """Return the environment variables with which the server finds other programs, such as compilers of kernels."""
        if self.environment is None:
            return {}
        return {"PATH": f"{self.environment / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command line, the additional environment variables, and the files to write before the start.

    `secret` is left out of the log.
    """

    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one sequence.

    `adapter` is a name that was given to `load_adapter`, or None for the base model. `max_tokens` is at least 1. Only
    `stop_token_ids` and `stop_strings` end the sequence earlier. `top_k` -1 and `top_p` 1 are off; `temperature` 0 is
    greedy. `seed` is a number from 0 to 2**31 - 1. Prompt positions from `scored_from` on are scored. `topk_prompt` is
    the number of most likely tokens for each scored position, and `topk` for each drawn position. `candidates` are at
    most `MOST_CANDIDATES` tokens; their logprobs at the first drawn position are requested. A request with candidates
    has no `topk`. `head`: the adapter changes the unembedding. Two requests share cached prefixes only if both have the
    same `cache_salt`; "" is no salt.
    `grammar` is in llguidance's form of Lark; "" is no grammar.
    """

    adapter: str | None
    prompt: NDArray[np.int32]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    scored_from: int | None = None
    topk_prompt: int = 0
    topk: int = 0
    candidates: tuple[int, ...] = ()
    head: bool = False
    cache_salt: str = ""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""

    @property
    def changes_logits(self) -> bool:
        penalties = self.frequency_penalty, self.presence_penalty
        return any(penalties) or bool(self.logit_bias or self.grammar)

    @property
    def can_be_streamed(self) -> bool:
        """True if the tokens may arrive one by one. Scores of the prompt and of candidates come with a whole answer."""
        return self.scored_from is None and not self.candidates


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a request.

    The sequence may continue for some tokens after a stop string. `topk_logprobs` is set if the request asks for the
    most likely tokens. `prompt_logprobs` is None, or `[len(prompt)]` with NaN for positions that were not scored.
    `topk_prompt` is None, or has a row for each token of the prompt, with empty cells for positions that were not
    scored. `candidates` are the logprobs of the request's candidates, in the same order. `cached_tokens` is the number
    of the prompt's tokens that were in the cache. `masked_logprobs`: the logprobs of drawn tokens are those after the
    constraint, or after other changes of the logits.
    """

    sequence: Sequence
    prompt_logprobs: NDArray[np.float32] | None
    cached_tokens: int
    topk_prompt: TopkLogprobs | None = None
    candidates: NDArray[np.float32] | None = None
    masked_logprobs: bool = False


OnToken = Callable[[DrawnToken], None]


class TokenServer(Protocol):
    """A running server.

    Used on one event loop. If a call is cancelled, the server stops the work of this call.

    All logprobs are the model's logprobs at temperature 1, before top-k and top-p, unless the answer has
    `masked_logprobs`. Calls raise UserError if the server
    finds the request invalid, ServerError if the server fails, and SamplerClosed if the server cannot be reached.
    """

    scores_heads: bool
    """True if the logprobs of prompts include an adapter's change of the unembedding.

    The logprobs of drawn tokens always include the change.
    """

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter. After the return, requests may use the name of the adapter.

        `folder` is in PEFT's layout, and stays until the adapter is unloaded.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses."""

    async def draw(self, request: GenerationRequest, drawn: OnToken | None = None) -> Generation:
        """Draw a sequence. `drawn` is called for each token as soon as it is known, if the server can tell.

        Tokens after a stop string are passed, too.
        """

    async def is_healthy(self) -> bool:
        """Return whether the server is healthy. A server that is starting is not healthy."""

    async def close(self) -> None:
        """Close the connections, not the server."""


def seed_of(job: SampleJob, index: int, purpose: str = "") -> int | None:
    """Return a seed. The seed differs for each index and each purpose.

    Similar job seeds give unrelated seeds.

    Greedy draws need no seed.
    """
    seed = job.params.seed
    if seed is None or job.params.temperature == 0:
        return None
    return (int.from_bytes(sha256(f"{purpose}{seed}".encode()).digest()[:8]) + index) % SEED_RANGE


def cache_salt_of(tenant: str) -> str:
    """Return the cache salt of a tenant's requests.

    Tenants have different salts. Answers report the number of cached tokens, so with one salt, a tenant could confirm a
    guess of another tenant's prompt.
    """
    return sha256(f"prefixes of {tenant}".encode()).hexdigest()[:32]


Row = Mapping[int, float | None]
"""Logprobs by token. None and NaN stand for a logprob that the server could not compute."""


def top_logprobs(rows: Items[Row | None], k: int) -> TopkLogprobs:
    """Return K logprobs for each row, the most likely first, with empty cells if the server lists fewer tokens.

    Of equally likely tokens, the lower ID comes first. Servers also list the prompt's token or the drawn token, even if
    this token is not among the most likely tokens.
    """
    found = TopkLogprobs.empty(len(rows), k)
    for position, row in enumerate(rows):
        known = [
            (-logprob, token)
            for token, logprob in (row or {}).items()
            if logprob is not None and not math.isnan(logprob)
        ]
        for column, (negative, token) in enumerate(sorted(known)[:k]):
            found.token_ids[position, column] = token
            found.logprobs[position, column] = -negative
    return found


def joined(first: TopkLogprobs, rest: TopkLogprobs) -> TopkLogprobs:
    """Return the rows of `first`, followed by the rows of `rest`."""
    return TopkLogprobs(
        np.concatenate([first.token_ids, rest.token_ids]), np.concatenate([first.logprobs, rest.logprobs])
    )
