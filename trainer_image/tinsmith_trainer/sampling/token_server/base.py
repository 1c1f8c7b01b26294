"""A server that turns tokens into tokens, whoever made it: how it is started, what it is asked, and what it answers."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.sampling.base import SampleJob, Sequence, TopkLogprobs

HOST = "127.0.0.1"
"""Its routes load files: no other pod may call it, and on a shared machine no other user."""
SOCKET_SCHEME = "unix:"
MOST_ADAPTERS_IN_A_BATCH = 8
"""Each takes memory of every GPU for the highest rank, so that more of them leave less room for sequences."""

MOST_DRAWS = 768
"""With a server at the same time; one tenant alone has half of them. Others wait in our own queue."""
MOST_ROWS = 512
"""Of a server's batch: what two tenants may have together, so that one alone leaves it room for another."""

MOST_CANDIDATES = 128
"""Of a request. What vLLM takes."""

SEED_RANGE = 2**31
"""Below it every server takes a seed."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`dtype` is float32 or bfloat16. `private` is a folder that this user alone may enter, and `key` is what a server
    asks for that listens at a port. `extra` are arguments that come last, and so win over ours. `environment` is the
    virtual environment that the server is installed in, or None for that of this process."""

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
        """For a command line. Without an environment the system finds it."""
        return name if self.environment is None else str(self.environment / "bin" / name)

    def program_variables(self) -> dict[str, str]:
        """By which programs of its environment find each other, as compilers of kernels."""
        if self.environment is None:
            return {}
        return {"PATH": f"{self.environment / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command line, variables in addition to those of this process, and files that are there before it starts.

    `secret` is left out of the log.
    """

    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to draw.

    `adapter` is a name given to `load_adapter`, or None for the base model. At most `max_tokens`, which is at least 1,
    are drawn; `stop_token_ids` and `stop_strings` are all that ends it before. `top_k` -1 and `top_p` 1 are off,
    `temperature` 0 is greedy. `seed` is 0 to 2**31 - 1. Prompt positions from `scored_from` on are scored, and
    `topk_prompt` is how many of the most likely tokens each of them names; `topk` each position that is drawn.
    `candidates`, at most `MOST_CANDIDATES`, are tokens whose logprobs in the place of the first one drawn are wanted;
    with them goes no `topk`. `head` is whether the adapter changes the unembedding. A prefix that the server has kept
    is found by requests of the same `cache_salt` alone; "" is none.
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


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of a request.

    The sequence may go on for some tokens behind a stop string; it has `topk_logprobs` if they were asked for.
    `prompt_logprobs` is `[len(prompt)]` with NaN where nothing was scored, or None; `topk_prompt` has a row for each
    token of the prompt, empty likewise, or is None. `candidates` are the logprobs of the request's, in their order.
    Of the prompt, `cached_tokens` were not computed.
    """

    sequence: Sequence
    prompt_logprobs: NDArray[np.float32] | None
    cached_tokens: int
    topk_prompt: TopkLogprobs | None = None
    candidates: NDArray[np.float32] | None = None


class TokenServer(Protocol):
    """A server that runs. One event loop's. Cancelling a call ends its work on the server, too.

    Logprobs are of the model at temperature 1, before top-k and top-p. Calls raise UserError where the server says
    that the request is wrong, ServerError where it fails, and SamplerClosed where it cannot be reached.
    """

    scores_heads: bool
    """Whether what an adapter adds to the unembedding is in the logprobs of prompts; in those of drawn tokens it is."""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Returns when requests may name it. `folder` is in PEFT's layout, and stays until it is unloaded."""

    async def unload_adapter(self, name: str) -> None:
        """Of an adapter that no request uses any more."""

    async def draw(self, request: GenerationRequest) -> Generation: ...

    async def is_healthy(self) -> bool:
        """False also while it starts."""

    async def close(self) -> None:
        """Ends the connections, not the server."""


def seed_of(job: SampleJob, index: int, purpose: str = "") -> int | None:
    """Unlike for each index of a purpose, and unrelated between jobs whose seeds are neighbours. Greedy needs none."""
    seed = job.params.seed
    if seed is None or job.params.temperature == 0:
        return None
    return (int.from_bytes(sha256(f"{purpose}{seed}".encode()).digest()[:8]) + index) % SEED_RANGE


def cache_salt_of(tenant: str) -> str:
    """Return the salt of a tenant's requests: answers count cached tokens, which would confirm a guess of another's."""
    return sha256(f"prefixes of {tenant}".encode()).hexdigest()[:32]


Row = Mapping[int, float | None]
"""Logprobs by tokens. None, and what is not a number, stand for a logprob that the server could not compute."""


def top_logprobs(rows: Items[Row | None], k: int) -> TopkLogprobs:
    """A row of K for each: the most likely first, of equals the lower id, and empty cells where a row has less.

    Servers add the token that is in the prompt or was drawn, which may be none of the most likely.
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
    """Rows of one behind those of the other."""
    return TopkLogprobs(
        np.concatenate([first.token_ids, rest.token_ids]), np.concatenate([first.logprobs, rest.logprobs])
    )
