"""What is asked of a server that turns tokens into tokens, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.sampling.base import Sequence, TopkLogprobs

MOST_CANDIDATES = 128
"""What vLLM takes."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """One sequence to draw.

    `adapter` is a name given to `load_adapter`, or None for the base model. At most `max_tokens`, which is at least 1,
    are drawn; `stop_token_ids` and `stop_strings` are all that ends it before. `top_k` -1 and `top_p` 1 are off,
    `temperature` 0 is greedy. `seed` is 0 to 2**31 - 1. Prompt positions from `scored_from` on are scored, and
    `topk_prompt` is how many of the likeliest tokens each of them names; `topk` each position that is drawn.
    `candidates`, at most `MOST_CANDIDATES`, are tokens whose logprobs in the place of the first one drawn are wanted;
    with them goes no `topk`. `head` is whether the adapter changes the unembedding.
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """What became of a drawing.

    The sequence may go on for some tokens behind a stop string; it has `topk_logprobs` if they were asked for.
    `prompt_logprobs` is `[len(prompt)]` with NaN where nothing was scored, or None; `topk_prompt` has a row for each
    token of the prompt, empty likewise, or is None. `candidates` are the logprobs of the drawing's, in their order.
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
        """Returns when drawings may name it. `folder` is in PEFT's layout, and stays until it is unloaded."""

    async def unload_adapter(self, name: str) -> None:
        """Of an adapter that no drawing uses any more."""

    async def draw(self, drawing: Drawing) -> Drawn: ...

    async def is_healthy(self) -> bool:
        """False also while it starts."""

    async def close(self) -> None:
        """Ends the connections, not the server."""
