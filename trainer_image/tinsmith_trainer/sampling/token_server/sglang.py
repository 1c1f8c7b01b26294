"""SGLang's server, which is called at the native route."""

from __future__ import annotations

import secrets
import sys
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.sampling.base import DrawnToken, Sequence, TopkLogprobs
from tinsmith_trainer.sampling.token_server.base import (
    HOST,
    SEED_RANGE,
    Generation,
    GenerationRequest,
    OnToken,
    ServerCommand,
    ServerSettings,
    TokenServer,
    joined,
    top_logprobs,
)
from tinsmith_trainer.sampling.token_server.http import LOAD_SECONDS, JsonCalls

DETERMINISTIC = "--enable-deterministic-inference"
"""The flag for deterministic results. Without this flag, SGLang accepts a seed but ignores it."""
CONFIG = "sglang.yaml"
KEPT_BACK_TOKENS = 6
"""The number of tokens of the context that SGLang reserves.

A prompt must be shorter than the context by this number of tokens.

Prompt and sequence together must be shorter than the context by two tokens.
"""
BEYOND_VOCABULARY = "NaN happened"
"""SGLang's stop reason after a draw of a token that does not exist; SGLang replaces this token by a stop token."""
OUTPUT_PARTS = "output_token_logprobs", "output_top_logprobs"
"""The parts of a streamed answer of which each event has the new entries."""


def sglang_command(settings: ServerSettings) -> ServerCommand:
    options = {
        "model-path": settings.model,
        "config": settings.private / CONFIG,
        "host": HOST,
        "port": settings.port,
        "tp-size": settings.gpus,
        "dtype": settings.dtype,  # otherwise float32 is served in another dtype than that of training
        "context-length": settings.max_sequence_length + KEPT_BACK_TOKENS,
        "max-loras-per-batch": settings.adapters_in_a_batch,
        "max-loaded-loras": settings.max_loaded,
        "max-lora-rank": settings.max_rank,
        "lora-target-modules": "all",  # otherwise the first adapter decides which modules later adapters may have
        "grammar-backend": "llguidance",  # which compiles this sampler's grammars
        "sampling-defaults": "openai",  # otherwise the model's own file changes the defaults of a request
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # Without the second switch, each event of a stream repeats all tokens before it.
    switches = ["--enable-lora", "--incremental-streaming-output"]
    python = sys.executable if settings.environment is None else settings.program("python")
    return ServerCommand(
        [python, "-m", "sglang.launch_server", *words, *switches, *settings.extra],
        {
            **settings.program_variables(),
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # otherwise logprobs are those after the temperature
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # jobs are checked before, so no sequence is that long
            "HF_HUB_OFFLINE": "1",
        },
        # Any user of the machine may read a command line, and a web page may call a port of its reader's machine.
        {settings.private / CONFIG: f"api-key: {settings.key}\n"},
        settings.key,
    )


class SglangServer(TokenServer):
    """A client of SGLang.

    The server needs SGLANG_RETURN_ORIGINAL_LOGPROB. Seeds are refused unless the server was started `deterministic`.
    """

    scores_heads = True

    def __init__(self, address: str, key: str, *, deterministic: bool) -> None:
        self._calls = JsonCalls("SGLang", address, key)
        self._deterministic = deterministic

    @override
    async def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._calls.post("/load_lora_adapter", body, limit_seconds=LOAD_SECONDS)

    @override
    async def unload_adapter(self, name: str) -> None:
        await self._calls.post("/unload_lora_adapter", {"lora_name": name}, limit_seconds=LOAD_SECONDS)

    @override
    async def draw(self, request: GenerationRequest, drawn: OnToken | None = None) -> Generation:
        """Draw the sequence.

        SGLang stops either at the stop tokens of the request and at all end-of-sequence tokens of the model, or at no
        token. So the draw is continued if SGLang stops at a token that the request does not list.
        """
        if request.seed is not None and not self._deterministic:
            raise UserError(
                f"This sampler repeats no seed: its SGLang runs without {DETERMINISTIC}. "
                "Leave the seed out, or have it among the pool's server arguments."
            )
        if request.seed is None and self._deterministic and request.temperature > 0:
            # SGLang would use one seed for all requests without a seed, so that all draws would be equal.
            request = replace(request, seed=secrets.randbelow(SEED_RANGE))
        found, unasked = await self._draw_once(request, drawn)
        while unasked and len(found.sequence.tokens) < request.max_tokens:
            more, unasked = await self._draw_once(_rest(request, found.sequence), drawn)
            found = _joined(found, more)
        return found

    @override
    async def is_healthy(self) -> bool:
        return await self._calls.succeeds("/health")

    @override
    async def close(self) -> None:
        await self._calls.close()

    async def _draw_once(self, request: GenerationRequest, drawn: OnToken | None) -> tuple[Generation, bool]:
        if drawn is None or not request.can_be_streamed:
            answer = await self._calls.post("/generate", sglang_request(request))
        else:
            answer = await self._streamed(request, drawn)
        return drawn_by_sglang(request, answer)

    async def _streamed(self, request: GenerationRequest, drawn: OnToken) -> Any:
        """Return the answer, whose tokens arrive one by one."""
        answer = StreamedAnswer()
        body = sglang_request(request) | {"stream": True}
        # SGLang streams an error only where it refuses the request. A failure is an end with the reason "abort".
        async for event in self._calls.stream("/generate", body, error_status=HTTPStatus.BAD_REQUEST):
            for token in answer.add(request, event):
                drawn(token)
        return answer.whole()


def sglang_request(request: GenerationRequest) -> dict[str, object]:
    """Return the body. The body has every parameter, so that no default of a server or a model applies."""
    sampling: dict[str, object] = {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "stop": list(request.stop_strings),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": not request.stop_token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    if request.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in request.logit_bias}
    if request.grammar:
        sampling["ebnf"] = request.grammar
    return {
        "input_ids": request.prompt.tolist(),
        "lora_path": request.adapter,
        "extra_key": request.cache_salt or None,
        "sampling_params": sampling,
        "return_logprob": True,
        # The start position's own entry has no logprob, because no scored token comes before it.
        "logprob_start_len": -1 if request.scored_from is None else request.scored_from - 1,
        "top_logprobs_num": max(request.topk, request.topk_prompt),
        "token_ids_logprob": _token_ids(request),
        "stream": False,
    }


def _token_ids(request: GenerationRequest) -> list[int] | None:
    """Return the candidate tokens to send with each scored request.

    SGLang's scheduler fails if a batch has requests with candidates and requests without candidates.
    """
    if request.scored_from is not None and not request.candidates:
        return [0]
    return list(request.candidates) or None


def drawn_by_sglang(request: GenerationRequest, answer: Any) -> tuple[Generation, bool]:
    """Return the answer, and whether the sequence ended at a token that is not a stop of this request.

    Raises ServerError if the answer does not have the form of the supported SGLang version.
    """
    try:
        meta = answer["meta_info"]
        reason = dict(meta["finish_reason"])
        matched = reason.get("matched")
        _check_end(request, reason)
        unasked = isinstance(matched, int) and matched not in request.stop_token_ids and not request.grammar
        tokens = np.array([entry[1] for entry in meta["output_token_logprobs"]], np.int32)
        logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
        stopped = reason["type"] == "stop" and not unasked
        drawn = Generation(
            Sequence(tokens, logprobs, stopped, _topk(request, meta)),
            _prompt_logprobs(request, meta),
            meta.get("cached_tokens") or 0,
            _topk_prompt(request, meta),
            _candidates(request, meta),
            # SGLang changes the logits before it computes any logprob.
            masked_logprobs=request.changes_logits,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ServerError(
            f"SGLang's answer is not in the form that is known: {type(error).__name__}: {error}"
        ) from error
    return drawn, reason["type"] == "stop" and unasked


class StreamedAnswer:
    """An answer of SGLang that arrives in events. Each event has new tokens; the last one has the reason of the end."""

    def __init__(self) -> None:
        self._meta: dict[str, Any] = {}
        self._parts: dict[str, list[Any]] = {part: [] for part in OUTPUT_PARTS}

    def add(self, request: GenerationRequest, event: Any) -> list[DrawnToken]:
        """Add an event, and return its tokens. Raises ServerError if the event has another form."""
        try:
            self._meta = event["meta_info"]
            if self._meta["finish_reason"]:
                # Otherwise the token that replaces one beyond the vocabulary would be shown.
                _check_end(request, self._meta["finish_reason"])
            for part in OUTPUT_PARTS:
                self._parts[part] += self._meta.get(part) or []
            return [
                DrawnToken(token, logprob, top, request.changes_logits)
                for (logprob, token, *_), top in zip(
                    self._meta["output_token_logprobs"], self._top_logprobs(request), strict=True
                )
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerError(
                f"SGLang's event is not in the form that is known: {type(error).__name__}: {error}"
            ) from error

    def _top_logprobs(self, request: GenerationRequest) -> list[TopkLogprobs | None]:
        if not request.topk:
            return [None] * len(self._meta["output_token_logprobs"])
        return [top_logprobs([_by_token(row)], request.topk) for row in self._meta["output_top_logprobs"]]

    def whole(self) -> Any:
        """Return the answer in the form of one that arrives at once."""
        return {"meta_info": self._meta | self._parts}


def _check_end(request: GenerationRequest, reason: Any) -> None:
    if reason["type"] == "abort":
        raise ServerError(f"SGLang gave a request up: {reason.get('message', 'no reason given')}.")
    if reason.get("matched") == BEYOND_VOCABULARY and BEYOND_VOCABULARY not in request.stop_strings:
        raise UserError("SGLang drew a token that does not exist: the weights have diverged.")


def _rest(request: GenerationRequest, sequence: Sequence) -> GenerationRequest:
    """Return the request for the rest of the sequence.

    The seed does not change, because SGLang draws by seed and position.
    """
    return replace(
        request,
        prompt=np.concatenate([request.prompt, sequence.tokens]),
        max_tokens=request.max_tokens - len(sequence.tokens),
        scored_from=None,
        topk_prompt=0,
        candidates=(),
    )


def _joined(first: Generation, rest: Generation) -> Generation:
    topk, more = first.sequence.topk_logprobs, rest.sequence.topk_logprobs
    sequence = Sequence(
        np.concatenate([first.sequence.tokens, rest.sequence.tokens]),
        np.concatenate([first.sequence.logprobs, rest.sequence.logprobs]),
        rest.sequence.stopped,
        None if topk is None or more is None else joined(topk, more),
    )
    return replace(first, sequence=sequence)


def _prompt_logprobs(request: GenerationRequest, meta: Any) -> NDArray[np.float32] | None:
    """Return the logprobs. Entries are [logprob, token, text]. The last entry is for the prompt's last token."""
    if request.scored_from is None:
        return None
    found = np.full(len(request.prompt), np.nan, np.float32)
    entries = meta["input_token_logprobs"]
    for position in range(request.scored_from, len(request.prompt)):
        logprob, token, *_ = entries[position - len(request.prompt)]
        if token != request.prompt[position]:
            raise ValueError(
                f"the token at position {position} of the prompt is {request.prompt[position]}, not {token}"
            )
        found[position] = logprob
    return found


def _topk_prompt(request: GenerationRequest, meta: Any) -> TopkLogprobs | None:
    """Return the most likely tokens. The last entry is for the prompt's last token."""
    if not request.topk_prompt or request.scored_from is None:
        return None
    scored = len(request.prompt) - request.scored_from
    rows = meta["input_top_logprobs"][-scored:]
    if len(rows) < scored:
        raise ValueError(f"{len(rows)} positions of the prompt have their most likely tokens, not {scored}")
    return top_logprobs([None] * request.scored_from + [_by_token(row) for row in rows], request.topk_prompt)


def _topk(request: GenerationRequest, meta: Any) -> TopkLogprobs | None:
    if not request.topk:
        return None
    return top_logprobs([_by_token(row) for row in meta["output_top_logprobs"]], request.topk)


def _candidates(request: GenerationRequest, meta: Any) -> NDArray[np.float32] | None:
    if not request.candidates:
        return None
    found = _by_token(meta["output_token_ids_logprobs"][0])
    return np.array([found[token] for token in request.candidates], np.float32)


def _by_token(row: Any) -> dict[int, float | None]:
    return {token: logprob for logprob, token, *_ in row or ()}
