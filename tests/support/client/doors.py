"""One question at each door of a server: the SDK, plain HTTP, OpenAI's API and Anthropic's.

Users of other servers got the base model at one door and the adapter at another, or samples at temperature 1.
"""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
import tinker
from support.client.sdk import service_client
from support.server.serve_process import API_KEY, HTTP_OPTIONS, ServedInstallation
from tinker import types
from transformers import PreTrainedTokenizerBase

MESSAGES: list[Any] = [{"role": "user", "content": "2+3"}]
MOST_TOKENS = 8
GREEDY = {"temperature": 0}


def check_doors(server: ServedInstallation, path: str, base_model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that all doors give the tokens of the adapter at temperature 0, and not those of the base model."""
    prompt: Any = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    with service_client(server) as client:
        adapter = _by_sdk(client.create_sampling_client(model_path=path).result(), prompt)
        base = _by_sdk(client.create_sampling_client(base_model=base_model).result(), prompt)
    text = tokenizer.decode(adapter.tokens, skip_special_tokens=True)
    assert list(adapter.tokens) != list(base.tokens)
    assert _by_plain_http(server, path, prompt) == list(adapter.tokens)
    for name in (path, f"{base_model};{path}"):
        completion, chat = _by_openai(server, name, prompt)
        assert completion.text == text
        assert completion.logprobs.token_logprobs == pytest.approx(adapter.logprobs, abs=1e-4)
        assert chat == text
        assert _by_anthropic(server, name) == text


def _by_sdk(sampler: tinker.SamplingClient, prompt: list[int]) -> types.SampledSequence:
    params = types.SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0)
    return sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]


def _by_plain_http(server: ServedInstallation, path: str, prompt: list[int]) -> list[int]:
    params = {"max_tokens": MOST_TOKENS, **GREEDY}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": API_KEY}, **HTTP_OPTIONS) as client:
        body = {"model_path": path, "prompt": prompt, "sampling_params": params}
        request_id = client.post("/sample", json=body).raise_for_status().json()["request_id"]
        while (answer := client.get(f"/retrieve_future/{request_id}")).status_code == 408:
            pass
    tokens: list[int] = answer.raise_for_status().json()["sequences"][0]["tokens"]
    return tokens


def _by_openai(server: ServedInstallation, model: str, prompt: list[int]) -> tuple[Any, str | None]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY) as client:
        options: dict[str, Any] = {"model": model, "max_tokens": MOST_TOKENS, **GREEDY}
        completion = client.completions.create(prompt=prompt, logprobs=1, **options).choices[0]
        chat = client.chat.completions.create(messages=MESSAGES, **options).choices[0]
    return completion, chat.message.content


def _by_anthropic(server: ServedInstallation, model: str) -> str:
    with anthropic.Anthropic(base_url=server.url, api_key=API_KEY) as client:
        options: dict[str, Any] = {"model": model, "max_tokens": MOST_TOKENS, "extra_body": GREEDY}
        answer = client.messages.create(messages=MESSAGES, **options)
    return "".join(block.text for block in answer.content if block.type == "text")
