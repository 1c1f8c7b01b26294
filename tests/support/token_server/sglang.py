"""`python -m sglang.launch_server`, as far as it is used. Every flag and field is one of `assumptions.toml`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from .computing import Computed, Computer, NotAllowed, Rules, SequenceRequest, top_of
from .serving import Body, Hand, UnderWay, known_fields, run

REQUEST_FIELDS = {
    *("input_ids", "lora_path", "sampling_params", "return_logprob", "logprob_start_len", "stream"),
    *("top_logprobs_num", "token_ids_logprob", "extra_key"),
}
SAMPLING_FIELDS = {
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "sampling_seed"),
    *("stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "ebnf"),
}
DTYPES = {"auto": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""`auto` as of a model in float32, which the tests' are."""
GREEDY_BELOW = 1e-6
SEED_OF_NONE = 42


def main() -> None:
    options = _options()
    asyncio.set_event_loop(asyncio.new_event_loop())
    computer = Computer(Path(options.model_path), DTYPES[options.dtype])
    if options.context_length > computer.context and "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" not in os.environ:
        raise SystemExit(f"context_length {options.context_length} is greater than the model's {computer.context}")
    hand, server = Hand(computer), SglangStandIn(computer, options)
    routes = [
        web.post("/generate", hand.counted(server.generate)),
        web.post("/load_lora_adapter", hand.counted(server.load)),
        web.post("/unload_lora_adapter", server.unload),
        *hand.routes(),
    ]
    run(routes, options.host, options.port, key=_key_in(options.config))


def _key_in(config: Path) -> str:
    return config.read_text().removeprefix("api-key: ").strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras-per-batch", type=int, default=8)
    parser.add_argument("--max-loaded-loras", type=int)
    parser.add_argument("--max-lora-rank", type=int, required=True)
    parser.add_argument("--lora-target-modules", nargs="*")
    parser.add_argument("--grammar-backend", choices=["llguidance"], required=True)
    parser.add_argument("--sampling-defaults", choices=["model", "openai"], default="model")
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--incremental-streaming-output", action="store_true")
    return parser.parse_args()


class SglangStandIn:
    def __init__(self, computer: Computer, options: argparse.Namespace) -> None:
        self._computer = computer
        self._options = options
        self._engine_random = torch.Generator()
        self._engine_random.seed()
        self._under_way = UnderWay()
        self._raw_logprobs = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            await self._computer.load(body["lora_name"], Path(body["lora_path"]), self._options.max_lora_rank)
        except NotAllowed as refusal:
            return web.json_response({"success": False, "error_message": str(refusal)}, status=400)
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": {}})

    async def unload(self, request: web.Request) -> web.Response:
        try:
            self._computer.unload((await request.json())["lora_name"])
        except NotAllowed as refusal:
            return web.json_response({"success": False, "error_message": str(refusal)}, status=400)
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": {}})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        known_fields(body, REQUEST_FIELDS, "request")
        sampling = body["sampling_params"]
        known_fields(sampling, SAMPLING_FIELDS, "sampling_params")
        adapter = body["lora_path"]
        if adapter is not None and adapter not in self._computer.adapters:
            return _error(f"The following requested LoRA adapters are not loaded: {adapter}")
        length, context = len(body["input_ids"]), self._options.context_length
        if length + sampling["max_new_tokens"] > context:
            return _error("Requested token count exceeds the model's maximum context length.")
        if length >= context - 6:
            return _error(f"Input length ({length} tokens) exceeds the maximum allowed length ({context - 6} tokens).")
        sampling["max_new_tokens"] = min(sampling["max_new_tokens"], context - 2 - length)
        with self._under_way.having(body) as others:
            computed = await self._computer.compute(adapter, self._sequence_request(body, sampling))
        if any(_kill(body, other) or _kill(other, body) for other in others):
            return web.Response(status=500, text="the scheduler hit an exception: 'NoneType' object has no ids")
        answer = self._answer(body, computed)
        if body["stream"]:
            return await _streamed(request, answer, whole=not self._options.incremental_streaming_output)
        return web.json_response(answer)

    def _sequence_request(self, body: Body, sampling: dict[str, Any]) -> SequenceRequest:
        greedy = sampling["temperature"] < GREEDY_BELOW
        listed = frozenset(sampling["stop_token_ids"])
        return SequenceRequest(
            prompt=body["input_ids"],
            max_tokens=sampling["max_new_tokens"],
            temperature=0.0 if greedy else sampling["temperature"],
            top_k=sampling["top_k"],
            top_p=sampling["top_p"],
            # Either all of the model's and those that are listed, or none at all.
            stop_ids=frozenset() if sampling["ignore_eos"] else listed | self._computer.eos_ids,
            stop_strings=tuple(sampling["stop"]),
            generator_of=self._generators(sampling.get("sampling_seed")),
            cache_salt=body["extra_key"],
            rules=Rules.of(sampling, sampling.get("ebnf", ""), all_in_logprobs=True),
        )

    def _generators(self, seed: int | None) -> Any:
        """Return generators by seed and position, where the server is deterministic."""
        if not self._options.enable_deterministic_inference:
            return lambda position: self._engine_random
        seed = SEED_OF_NONE if seed is None else seed
        return lambda position: torch.Generator().manual_seed(seed * 1_000_003 + position)

    def _answer(self, body: Body, computed: Computed) -> Body:
        reason: dict[str, Any] = {"type": "length", "length": len(computed.tokens)}
        if computed.matched is not None and len(computed.tokens) < body["sampling_params"]["max_new_tokens"]:
            reason = {"type": "stop", "matched": computed.matched}
        logprobs = computed.logprobs if self._raw_logprobs else computed.temperature_logprobs
        meta = {
            "id": "1",
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(computed.tokens),
            "cached_tokens": computed.cached_tokens,
            "output_token_logprobs": [[*pair, None] for pair in zip(logprobs, computed.tokens, strict=True)],
        }
        _add_named(meta, "output", body, [_entries(body, row) for row in computed.rows])
        start = body["logprob_start_len"]
        if start >= 0:
            _add_named(meta, "input", body, [None, *(_entries(body, row) for row in computed.prompt_rows[start:])])
            scored = list(zip(computed.prompt_logprobs, body["input_ids"][1:], strict=True))[start:]
            meta["input_token_logprobs"] = [[None, body["input_ids"][start], None], *([*pair, None] for pair in scored)]
        return {"text": "", "output_ids": computed.tokens, "meta_info": meta}


async def _streamed(request: web.Request, answer: Body, *, whole: bool) -> web.StreamResponse:
    """Send the answer as an event for each token. If `whole`, each event repeats the tokens before."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    meta = answer["meta_info"]
    count = meta["completion_tokens"]
    for end in range(1, count + 1):
        part = slice(0 if whole else end - 1, end)
        sliced = {name: values[part] for name, values in meta.items() if name.startswith("output_")}
        reason = meta["finish_reason"] if end == count else None
        event = {"meta_info": meta | sliced | {"completion_tokens": end, "finish_reason": reason}}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _kill(scored: Body, other: Body) -> bool:
    """Return true if a batch of both ends the scheduler, which needs tokens of all scored requests if one names any."""
    return scored["logprob_start_len"] >= 0 and not scored["token_ids_logprob"] and bool(other["token_ids_logprob"])


def _entries(body: Body, row: torch.Tensor) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the likeliest tokens of a position, and the named ones, as [logprob, token, text]."""
    top = [[logprob, token, None] for token, logprob in top_of(row, body["top_logprobs_num"])]
    return top, [[float(row[token]), token, None] for token in body["token_ids_logprob"] or ()]


def _add_named(meta: Body, side: str, body: Body, positions: list[Any]) -> None:
    if body["top_logprobs_num"]:
        meta[f"{side}_top_logprobs"] = [position and position[0] for position in positions]
    if body["token_ids_logprob"]:
        meta[f"{side}_token_ids_logprobs"] = [position and position[1] for position in positions]


def _error(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


if __name__ == "__main__":
    main()
