"""vLLM's OpenAI server, which is called at the completions route. Requests and answers have token IDs."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tinsmith_trainer.errors import SamplerClosed, ServerError
from tinsmith_trainer.sampling.base import DrawnToken, Sequence, TopkLogprobs
from tinsmith_trainer.sampling.checks import MOST_TOPK
from tinsmith_trainer.sampling.token_server.base import (
    MOST_ROWS,
    Generation,
    GenerationRequest,
    OnToken,
    ServerCommand,
    ServerSettings,
    TokenServer,
    top_logprobs,
)
from tinsmith_trainer.sampling.token_server.http import LOAD_SECONDS, JsonCalls
from tinsmith_trainer.sampling.token_server.progress import StepWatch, steps_of

BASE_MODEL = "base"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that --max-lora-rank accepts. An adapter may have any rank up to the value of the flag."""
GREEDY_BELOW = 1e-5
"""The temperature below which draws are greedy.

vLLM raises a smaller positive temperature to 0.01, and a draw at 0.01 is not always the most likely token.
"""
TOKEN_ID = "token_id:"
STREAMED: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
"""The additional fields of a request whose tokens arrive one by one."""
SPOILS = {"candidates": "top_logprobs", "head": "scored"}
"""The kinds of requests that change the results of other requests in the same batch.

The reason is vLLM's older model runner, which mixtures of experts still use. The older model runner applies the
candidates of one request to the whole batch, and an adapter's change of the unembedding to the scores of every prompt.
"""

REFUSALS = re.compile(
    "is greater than max_lora_rank|expected target modules|is unsupported LoRA weight|embedding LoRA size"
)
"""The messages of vLLM's engine for an adapter that vLLM cannot serve.

The status of a refusal is the same as the status of an internal failure.
"""


def vllm_command(settings: ServerSettings) -> ServerCommand:
    """Return the command. Raises ServerError for a rank above vLLM's limit."""
    options = {
        "uds": settings.socket,  # a key would protect only the routes below /v1
        "served-model-name": BASE_MODEL,
        "tensor-parallel-size": settings.gpus,
        "dtype": settings.dtype,  # otherwise float32 is served in another dtype than that of training
        "max-model-len": settings.max_sequence_length,
        "max-num-seqs": MOST_ROWS,
        "max-loras": settings.adapters_in_a_batch,
        "max-cpu-loras": settings.max_loaded,
        "max-lora-rank": allowed_rank(settings.max_rank),
        "logprobs-mode": "raw_logprobs",  # before temperature, top-k and top-p
        "max-logprobs": MOST_TOPK,  # the limit of most likely tokens; costs nothing unless requested
        # vLLM's default is one fixed seed, with which all replicas would draw equal samples
        "seed": secrets.randbelow(2**31),
        "structured-outputs-config": '{"backend": "guidance"}',  # llguidance, which compiles this sampler's grammars
        "generation-config": "vllm",  # otherwise the model's own file changes the defaults of a request
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    switches = ["--enable-lora", "--enable-prompt-tokens-details"]
    return ServerCommand(
        [settings.program("vllm"), "serve", str(settings.model), *words, *switches, *settings.extra],
        {
            **settings.program_variables(),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def allowed_rank(max_rank: int) -> int:
    """Return the lowest value of --max-lora-rank that allows adapters of this rank."""
    allowed = next((rank for rank in RANKS if rank >= max_rank), None)
    if allowed is None:
        raise ServerError(f"vLLM takes adapters up to rank {RANKS[-1]}, not {max_rank}; lower --max-rank.")
    return allowed


class VllmServer(TokenServer):
    """A client of vLLM.

    The server needs VLLM_ALLOW_RUNTIME_LORA_UPDATING, --logprobs-mode raw_logprobs and --generation-config vllm.
    """

    scores_heads = False

    def __init__(self, address: str) -> None:
        self._calls = JsonCalls("vLLM", address)
        self._gate = ConflictGate(SPOILS)
        self._steps = StepWatch()

    @override
    async def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._calls.post("/v1/load_lora_adapter", body, _refuses_adapter, limit_seconds=LOAD_SECONDS)

    @override
    async def unload_adapter(self, name: str) -> None:
        await self._calls.post("/v1/unload_lora_adapter", {"lora_name": name}, limit_seconds=LOAD_SECONDS)

    @override
    async def draw(self, request: GenerationRequest, drawn: OnToken | None = None) -> Generation:
        async with self._gate.passing(_traits(request)):
            with self._steps.request():
                if drawn is None or not request.can_be_streamed:
                    answer = await self._calls.post("/v1/completions", vllm_request(request))
                else:
                    answer = await self._streamed(request, drawn)
            return drawn_by_vllm(request, answer)

    async def _streamed(self, request: GenerationRequest, drawn: OnToken) -> Any:
        """Return the answer, whose tokens arrive one by one."""
        answer = StreamedAnswer()
        async for event in self._calls.stream("/v1/completions", vllm_request(request) | STREAMED):
            for token in answer.add(request, event):
                drawn(token)
        return answer.whole()

    @override
    async def is_healthy(self) -> bool:
        is_alive = await self._calls.succeeds("/health")
        return is_alive and not self._steps.hangs(steps_of(await self._calls.text("/metrics")))

    @override
    async def close(self) -> None:
        await self._calls.close()


def _refuses_adapter(status: int, message: str) -> bool:
    """Return whether vLLM refuses the adapter.

    The error for a missing adapter is not a refusal, because this sampler itself writes the folder.
    """
    return status == 400 or REFUSALS.search(message) is not None


def _traits(request: GenerationRequest) -> list[str]:
    held = {
        "candidates": bool(request.candidates),
        "top_logprobs": request.topk > 0,
        "head": request.head,
        "scored": request.scored_from is not None,
    }
    return [trait for trait, holds in held.items() if holds]


def vllm_request(request: GenerationRequest) -> dict[str, object]:
    """Return the body. The body has every parameter, so that no default of a server or a model applies."""
    body: dict[str, object] = {
        "model": request.adapter or BASE_MODEL,
        "prompt": request.prompt.tolist(),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature if request.temperature >= GREEDY_BELOW else 0.0,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "n": 1,
        "stop": list(request.stop_strings),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # if end-of-sequence tokens stop the sequence, they are among the stop IDs
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": request.topk,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # otherwise tokens with equal texts share one entry
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.scored_from is not None:
        body["prompt_logprobs"] = request.topk_prompt
    if request.candidates:
        body["logprob_token_ids"] = list(request.candidates)
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias}
    if request.grammar:
        body["structured_outputs"] = {"grammar": request.grammar}
    return body


def drawn_by_vllm(request: GenerationRequest, answer: Any) -> Generation:
    """Return the answer.

    Raises ServerError if the answer does not have the form of the supported vLLM version, and SamplerClosed if vLLM
    aborted the sequence.
    """
    try:
        [choice] = answer["choices"]
        reason = choice["finish_reason"]
        tokens = np.array(choice["token_ids"], np.int32)
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        named = choice["logprobs"]["top_logprobs"] if request.topk or request.candidates else []
        details = answer["usage"].get("prompt_tokens_details") or {}
        drawn = Generation(
            Sequence(tokens, logprobs, reason == "stop", _topk(request, named)),
            _prompt_logprobs(request, choice),
            details.get("cached_tokens") or 0,
            _topk_prompt(request, choice),
            _candidates(request, named),
            # vLLM masks the logits before it computes raw logprobs, and adds biases and penalties after it.
            masked_logprobs=bool(request.grammar),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ServerError(f"vLLM's answer is not in the form that is known: {type(error).__name__}: {error}") from error
    if reason not in ("stop", "length"):
        raise SamplerClosed(f"vLLM gave a request up ({reason}); send it again.")
    return drawn


class StreamedAnswer:
    """An answer of vLLM that arrives in events. Each event has new tokens; the last one has the usage."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._named: list[dict[str, float]] = []
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}

    def add(self, request: GenerationRequest, event: Any) -> list[DrawnToken]:
        """Add an event, and return its tokens. Raises ServerError if the event has another form."""
        try:
            self._usage = event.get("usage") or self._usage
            found: list[DrawnToken] = []
            for choice in event["choices"]:
                self._reason = choice["finish_reason"] or self._reason
                found += self._add(request, choice)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerError(
                f"vLLM's event is not in the form that is known: {type(error).__name__}: {error}"
            ) from error
        return found

    def _add(self, request: GenerationRequest, choice: Any) -> list[DrawnToken]:
        tokens = choice["token_ids"] or []
        logprobs = choice["logprobs"]["token_logprobs"] if tokens else []
        named = choice["logprobs"]["top_logprobs"] if tokens and request.topk else [{}] * len(tokens)
        self._tokens += tokens
        self._logprobs += logprobs
        self._named += named
        drawn = zip(tokens, logprobs, named, strict=True)
        is_masked = bool(request.grammar)
        return [DrawnToken(token, logprob, _topk(request, [row]), is_masked) for token, logprob, row in drawn]

    def whole(self) -> Any:
        """Return the answer in the form of one that arrives at once."""
        logprobs = {"token_logprobs": self._logprobs, "top_logprobs": self._named}
        choice = {"finish_reason": self._reason, "token_ids": self._tokens, "logprobs": logprobs}
        return {"choices": [choice], "usage": self._usage}


def _prompt_logprobs(request: GenerationRequest, choice: Any) -> NDArray[np.float32] | None:
    """Return the logprobs. Each position has entries for one or more token IDs, including the prompt's token."""
    if request.scored_from is None:
        return None
    found = np.full(len(request.prompt), np.nan, np.float32)
    for position in range(request.scored_from, len(request.prompt)):
        found[position] = choice["prompt_logprobs"][position][str(request.prompt[position])]["logprob"]
    return found


def _topk_prompt(request: GenerationRequest, choice: Any) -> TopkLogprobs | None:
    if not request.topk_prompt or request.scored_from is None:
        return None
    rows = [None] * request.scored_from + choice["prompt_logprobs"][request.scored_from : len(request.prompt)]
    named = [row and {int(token): entry["logprob"] for token, entry in row.items()} for row in rows]
    return top_logprobs(named, request.topk_prompt)


def _topk(request: GenerationRequest, named: Any) -> TopkLogprobs | None:
    return top_logprobs([_by_token(row) for row in named], request.topk) if request.topk else None


def _candidates(request: GenerationRequest, named: Any) -> NDArray[np.float32] | None:
    if not request.candidates:
        return None
    found = _by_token(named[0])
    return np.array([found[token] for token in request.candidates], np.float32)


def _by_token(row: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix(TOKEN_ID)): logprob for name, logprob in row.items()}


class ConflictGate:
    """A gate that admits work in the order of arrival, but not while conflicting work runs.

    Used on one event loop. `conflicts` maps each trait to the conflicting trait, in both directions.
    """

    def __init__(self, conflicts: Mapping[str, str]) -> None:
        self._conflicts = {**conflicts, **{conflict: trait for trait, conflict in conflicts.items()}}
        self._inside: Counter[str] = Counter()
        self._waiting: deque[tuple[Collection[str], asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def passing(self, traits: Collection[str]) -> AsyncIterator[None]:
        await self._enter(traits)
        try:
            yield
        finally:
            self._leave(traits)

    async def _enter(self, traits: Collection[str]) -> None:
        if not traits or (not self._waiting and self._may_enter(traits)):
            self._inside.update(traits)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((traits, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # the work was admitted in the same moment as the cancellation
                self._leave(traits)
            else:
                self._admit()  # later work may have waited only for this waiter
            raise

    def _leave(self, traits: Collection[str]) -> None:
        self._inside.subtract(traits)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            traits, admitted = self._waiting[0]
            if admitted.done():  # otherwise the waiter was cancelled
                self._waiting.popleft()
            elif self._may_enter(traits):
                self._waiting.popleft()
                self._inside.update(traits)
                admitted.set_result(None)
            else:
                return

    def _may_enter(self, traits: Collection[str]) -> bool:
        return not any(self._inside[self._conflicts[trait]] for trait in traits)
