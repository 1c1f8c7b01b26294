"""`vllm serve`, as far as it is used. Every flag and field that it knows is one of `assumptions.toml`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from tinsmith_trainer.sampling.token_text import ends_within_character

from .computing import (
    Computed,
    Computer,
    FolderMissing,
    NameTaken,
    NotAllowed,
    Rules,
    SequenceRequest,
    top_of,
)
from .serving import Body, Hand, UnderWay, known_fields, run

REQUEST_FIELDS = {
    *("model", "prompt", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "n", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "logprob_token_ids"),
    *("cache_salt", "frequency_penalty", "presence_penalty", "logit_bias", "structured_outputs"),
    *("stream", "stream_options"),
}
LEAST_TEMPERATURE = 0.01
LEAST_LOGPROB = -9999.0
MOST_TOKEN_IDS = 128
DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""`auto` as of a model in float32, which the tests' are."""
PATH = re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+")
"""Is not told, as far as it looks like one of a machine."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def main() -> None:
    options = _options()
    asyncio.set_event_loop(asyncio.new_event_loop())
    computer = Computer(Path(options.model), DTYPES[options.dtype], scores_heads=False)
    hand, server = Hand(computer), VllmStandIn(computer, options)
    routes = [
        web.post("/v1/completions", hand.counted(server.complete)),
        web.get("/metrics", server.metrics),
        *hand.routes(),
    ]
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True":
        routes += [
            web.post("/v1/load_lora_adapter", hand.counted(server.load)),
            web.post("/v1/unload_lora_adapter", server.unload),
        ]
    run(routes, uds=options.uds)


async def _streamed(request: web.Request, answer: Body) -> web.StreamResponse:
    """Send the answer as an event for each token, and one for the usage."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    [whole] = answer["choices"]
    count, logprobs = len(whole["token_ids"]), whole["logprobs"]
    for index, token in enumerate(whole["token_ids"], 1):
        part = slice(index - 1, index)
        choice = {
            "index": 0,
            "token_ids": [token],
            "logprobs": {name: values[part] for name, values in logprobs.items()},
            "finish_reason": whole["finish_reason"] if index == count else None,
        }
        await _send(response, {"choices": [choice]})
    await _send(response, {"choices": [], "usage": answer["usage"]})
    await response.write(b"data: [DONE]\n\n")
    return response


async def _send(response: web.StreamResponse, event: Body) -> None:
    await response.write(f"data: {json.dumps(event, allow_nan=False)}\n\n".encode())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--max-cpu-loras", type=int, default=1)
    parser.add_argument("--max-lora-rank", type=int, choices=RANKS, default=16)
    parser.add_argument("--logprobs-mode", choices=["raw_logprobs", "processed_logprobs"], default="raw_logprobs")
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--structured-outputs-config", choices=['{"backend": "guidance"}'], required=True)
    parser.add_argument("--generation-config", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    return parser.parse_args()


class VllmStandIn:
    def __init__(self, computer: Computer, options: argparse.Namespace) -> None:
        self._computer = computer
        self._options = options
        self._engine_random = torch.Generator().manual_seed(options.seed)
        self._under_way = UnderWay()

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            await self._computer.load(body["lora_name"], Path(body["lora_path"]), self._options.max_lora_rank)
        except NameTaken as refusal:
            in_place = "If you want to load the adapter in place, set 'load_inplace' to True."
            return _error(400, "InvalidUserInput", f"{refusal} {in_place}")
        except FolderMissing as missing:
            return _error(404, "NotFoundError", PATH.sub("<path>", str(missing)))
        except NotAllowed as refusal:
            return _error(
                500,
                "InternalServerError",
                f"Call to add_lora method failed: Worker failed with error '{refusal}', please check the stack trace "
                "above for the root cause",
            )
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        try:
            self._computer.unload(name)
        except NotAllowed as refusal:
            return _error(404, "NotFoundError", str(refusal))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        known_fields(body, REQUEST_FIELDS, "request")
        adapter = None if body["model"] == self._options.served_model_name else body["model"]
        if adapter is not None and adapter not in self._computer.adapters:
            return _error(404, "NotFoundError", f"The model `{adapter}` does not exist.", "model")
        if refusal := self._refusal(body):
            field, sentence, value = refusal
            return _error(400, "BadRequestError", f"{sentence} (parameter={field}, value={value})", field)
        with self._under_way.having(body) as others:
            computed = await self._computer.compute(adapter, self._sequence_request(body))
        if computed.prompt_rows and any(other["model"] in self._computer.with_head for other in others):
            computed.prompt_rows[0] = computed.prompt_rows[0].roll(1)  # the unembedding of another's adapter is in it
        answer = self._answer(body, computed, harmed=any("logprob_token_ids" in other for other in others))
        if body.get("stream"):
            return await _streamed(request, answer)
        # NaN is no JSON: the real server fails at it, too.
        return web.json_response(answer, dumps=lambda value: json.dumps(value, allow_nan=False))

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:iteration_tokens_total_count{{engine="0"}} {float(self._computer.steps)}\n')

    def _refusal(self, body: Body) -> tuple[str, str, int] | None:
        """Return the refused field, the reason and the value, or None."""
        tokens, context = body["max_tokens"], self._options.max_model_len
        if tokens < 1:
            return "max_tokens", f"max_tokens must be at least 1, got {tokens}.", tokens
        if len(body["prompt"]) + tokens > context:
            sentence = f"max_tokens={tokens} cannot be greater than max_model_len={context}. Please request fewer"
            return "max_tokens", f"{sentence} output tokens.", tokens
        if not -(2**63) <= body.get("seed", 0) < 2**63:
            return "seed", "Input should be less than or equal to 9223372036854775807", body["seed"]
        for name, said in (("logprobs", "sample logprobs"), ("prompt_logprobs", "prompt logprobs")):
            if body.get(name, 0) > self._options.max_logprobs:
                most = self._options.max_logprobs
                return name, f"Requested {said} of {body[name]}, which is greater than max allowed: {most}", body[name]
        if (named := len(body.get("logprob_token_ids", ()))) > MOST_TOKEN_IDS:
            sentence = f"Requested logprob_token_ids of length {named}, which is greater than max allowed"
            return "logprob_token_ids", f"{sentence}: {MOST_TOKEN_IDS}", named
        return None

    def _sequence_request(self, body: Body) -> SequenceRequest:
        tokenizer, eos_ids = self._computer.tokenizer, frozenset() if body["ignore_eos"] else self._computer.eos_ids
        generator = torch.Generator().manual_seed(body["seed"]) if "seed" in body else self._engine_random
        return SequenceRequest(
            prompt=body["prompt"],
            max_tokens=body["max_tokens"],
            temperature=max(body["temperature"], LEAST_TEMPERATURE) if body["temperature"] > 0 else 0.0,
            top_k=body["top_k"],
            top_p=body["top_p"],
            stop_ids=frozenset(body["stop_token_ids"]) | eos_ids,
            stop_strings=tuple(body["stop"]),
            generator_of=lambda position: generator,
            taken_for_drawn=tuple(body["prompt"]) if ends_within_character(body["prompt"], tokenizer) else (),
            cache_salt=body.get("cache_salt"),
            rules=Rules.of(body, body.get("structured_outputs", {}).get("grammar", ""), all_in_logprobs=False),
        )

    def _answer(self, body: Body, computed: Computed, harmed: bool) -> Body:
        decode = self._computer.tokenizer.decode
        raw = self._options.logprobs_mode == "raw_logprobs"
        logprobs = computed.logprobs if raw else computed.temperature_logprobs
        choice = {
            "index": 0,
            "text": decode(computed.tokens),
            "logprobs": {
                "text_offset": [0] * len(computed.tokens),
                "token_logprobs": [max(logprob, LEAST_LOGPROB) for logprob in logprobs],
                "tokens": [self._name(body, token) for token in computed.tokens],
                "top_logprobs": [
                    {self._name(body, token): max(logprob, LEAST_LOGPROB) for token, logprob in entries}
                    for entries in _named(body, computed, harmed)
                ],
            },
            "finish_reason": "length" if computed.matched is None else "stop",
            "stop_reason": computed.matched,
            "token_ids": computed.tokens if body.get("return_token_ids") else None,
            "prompt_token_ids": body["prompt"] if body.get("return_token_ids") else None,
            "prompt_logprobs": self._prompt_logprobs(body, computed) if "prompt_logprobs" in body else None,
        }
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(computed.tokens)}
        if self._options.enable_prompt_tokens_details and computed.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": computed.cached_tokens}
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}

    def _name(self, body: Body, token: int) -> str:
        if body.get("return_tokens_as_token_ids"):
            return f"token_id:{token}"
        name: str = self._computer.tokenizer.decode([token])
        return name

    def _prompt_logprobs(self, body: Body, computed: Computed) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None]
        for token, row in zip(body["prompt"][1:], computed.prompt_rows, strict=True):
            entries = [(token, float(row[token])), *top_of(row, body["prompt_logprobs"])]
            found.append(
                {
                    str(each): {
                        "logprob": max(logprob, LEAST_LOGPROB),
                        "rank": int((row > logprob).sum()) + 1,
                        "decoded_token": self._computer.tokenizer.decode([each]),
                    }
                    for each, logprob in entries
                }
            )
        return found


def _named(body: Body, computed: Computed, harmed: bool) -> list[list[tuple[int, float]]]:
    """Return the drawn token, then the others; `harmed` as the older model runner harms them."""
    found = []
    for token, logprob, row in zip(computed.tokens, computed.logprobs, computed.rows, strict=True):
        if "logprob_token_ids" in body:
            others = [(each, float(row[each])) for each in body["logprob_token_ids"]]
        elif harmed:
            others = [(0, float("-inf"))] * body["logprobs"]
        else:
            others = top_of(row, body["logprobs"])
        found.append([(token, logprob), *others])
    return found


def _error(status: int, kind: str, message: str, field: str | None = None) -> web.Response:
    said = {"message": message, "type": kind, "param": field, "code": status}
    return web.json_response({"error": said}, status=status)


if __name__ == "__main__":
    main()
