"""The unmodified clients of OpenAI and Anthropic on base models and saved samplers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import tinker
from support.client.doors import check_doors
from support.client.sdk import adam, next_token_datum, service_client
from support.server.serve_process import API_KEY, HTTP_OPTIONS, ServedInstallation
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .conftest import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "openai.md"
QUESTION = [{"role": "user", "content": "2+3"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
ANSWER = '<think>\nHm\n</think>\n\nSo\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
CANCEL_SECONDS = 60.0
GREEDY = {"temperature": 0}
"""A parameter that the client no longer has, but the server does."""


@pytest.fixture(scope="module")
def oai(server: ServedInstallation) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ServedInstallation) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(server: ServedInstallation) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(server.models[MODEL])


@pytest.fixture(scope="module")
def taught(server: ServedInstallation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the path of a sampler that has learned to think, to answer and to call a tool."""
    prompt = tokenizer.apply_chat_template(QUESTION, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    answer = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    tokens, weights = [*prompt, *answer], [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    inputs: Any = {"target_tokens": tokens[1:], "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    with service_client(server) as client:
        model = client.create_lora_training_client(MODEL, rank=32, seed=1).result()
        for _ in range(80):
            model.forward_backward([datum], "cross_entropy")
            step = model.optim_step(adam(5e-3))
        step.result()
        path: str = model.save_weights_for_sampler("taught").result().path
    return path


def chunks_of(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))


def test_the_examples_of_the_page_run_as_they_stand(
    server: ServedInstallation, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for example in examples:
        exec(example.replace("http://127.0.0.1:8000", server.url).replace("tml-…", API_KEY), {})
    assert len(examples) == len(capsys.readouterr().out.split("\n", 1)) == 2


def test_all_doors_give_the_same_answer(
    server: ServedInstallation, client: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    for _ in range(5):
        model.forward_backward([next_token_datum([5, 9, 2, 14, 7, 11, 3, 8])] * 2, "cross_entropy")
        model.optim_step(adam(5e-3)).result()
    path = model.save_weights_for_sampler("doors").result().path
    check_doors(server, path, MODEL, tokenizer)


def test_a_completion_equals_a_sample_of_tinker(
    oai: openai.OpenAI, client: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokens = tokenizer("Ada has", add_special_tokens=False)["input_ids"]
    params = types.SamplingParams(max_tokens=12, seed=7)
    sampler = client.create_sampling_client(base_model=MODEL).result()
    expected = sampler.sample(types.ModelInput.from_ints(tokens), 2, params).result().sequences
    for prompt in ("Ada has", tokens):
        found = oai.completions.create(model=MODEL, prompt=prompt, max_tokens=12, seed=7, n=2, logprobs=1)
        for choice, sequence in zip(found.choices, expected, strict=True):
            assert choice.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == pytest.approx(sequence.logprobs)
            assert choice.finish_reason == "length"


def test_an_echo_has_the_prompts_logprobs_as_tinkers_own_call_does(
    oai: openai.OpenAI, client: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The request is that of lm-evaluation-harness to `local-completions` for the likelihood of a text."""
    tokens = tokenizer("Ada has a dog", add_special_tokens=False)["input_ids"]
    sampler = client.create_sampling_client(base_model=MODEL).result()
    expected = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    for prompt in ("Ada has a dog", [tokens]):
        asked = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
        (choice,) = oai.completions.create(model=MODEL, extra_body=GREEDY, **asked).choices  # type: ignore[call-overload]
        logprobs: Any = choice.logprobs
        assert choice.text.startswith("Ada has a dog")
        assert "".join(logprobs.tokens[: len(tokens)]) == "Ada has a dog"
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        assert logprobs.token_logprobs[1:-1] == pytest.approx(expected[1:], abs=1e-5)
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(tokens) + 1
        pairs = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
        assert all(logprob <= max(top.values()) for logprob, top in pairs)
        assert logprobs.text_offset[1] == len(logprobs.tokens[0])


@pytest.mark.parametrize("fills", [False, True], ids=["short", "as long as the context"])
def test_a_prompt_is_scored_without_a_token_behind_it(
    oai: openai.OpenAI,
    server: ServedInstallation,
    client: tinker.ServiceClient,
    tokenizer: PreTrainedTokenizerBase,
    fills: bool,
) -> None:
    context = json.loads((server.models[MODEL] / "config.json").read_text())["max_position_embeddings"]
    words = tokenizer("Ada has a dog. ", add_special_tokens=False)["input_ids"]
    tokens = (words * context)[: context if fills else 10]
    sampler = client.create_sampling_client(base_model=MODEL).result()
    expected = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    asked: dict[str, Any] = {"model": MODEL, "prompt": tokens, "logprobs": 1, "echo": True}
    whole = oai.completions.create(max_tokens=0, **asked)
    streamed = list(oai.completions.create(max_tokens=0, stream=True, **asked))
    for choices in (whole.choices, [choice for chunk in streamed for choice in chunk.choices if choice.logprobs]):
        ((choice,), logprobs) = (choices, choices[0].logprobs)
        assert choice.text == tokenizer.decode(tokens)
        assert logprobs is not None
        assert logprobs.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-5)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 0)  # type: ignore[union-attr]
    if fills:
        with pytest.raises(openai.BadRequestError, match="max_tokens: 0 to score it"):
            oai.completions.create(max_tokens=1, **asked)


def test_an_answer_comes_apart_and_its_stream_holds_the_same(oai: openai.OpenAI, taught: str) -> None:
    asked: dict[str, Any] = {"model": taught, "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 80}
    whole: Any = oai.chat.completions.create(**asked)
    (choice,) = whole.choices
    message: Any = choice.message
    assert (choice.finish_reason, message.content, message.reasoning_content) == ("tool_calls", "So", "Hm")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("add", '{"a": 2}')]
    *chunks, last = chunks_of(oai, **asked)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "So"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm"
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2}')
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_same_answer_in_anthropics_words(claude: anthropic.Anthropic, taught: str) -> None:
    tools: list[Any] = [{"name": "add", "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {"model": taught, "messages": QUESTION, "tools": tools}
    counted = claude.messages.count_tokens(**asked).input_tokens
    assert claude.messages.count_tokens(model=taught, messages=QUESTION).input_tokens < counted  # type: ignore[arg-type]
    with claude.messages.stream(max_tokens=80, extra_body=GREEDY, **asked) as stream:
        streamed = stream.get_final_message()
    for message in (claude.messages.create(max_tokens=80, extra_body=GREEDY, **asked), streamed):
        thought, said, call = message.content
        assert (thought.type, said.type, call.type) == ("thinking", "text", "tool_use")
        assert (thought.thinking, said.text, call.name, call.input) == ("Hm", "So", "add", {"a": 2})
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted


PERSON: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_PERSON: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def is_person(text: str | None) -> bool:
    read = json.loads(text or "")
    return sorted(read) == ["age", "name"] and read["name"] in ("Ada", "Bob") and 0 <= read["age"] <= 99


def test_a_random_model_answers_in_the_requested_format(oai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "response_format": AS_PERSON, "n": 4, "seed": 3}
    whole = oai.chat.completions.create(**asked, logprobs=True)
    assert [(is_person(one.message.content), one.finish_reason) for one in whole.choices] == [(True, "stop")] * 4
    assert {getattr(one.logprobs, "stage", None) for one in whole.choices} == {"before_mask"}
    *chunks, _ = chunks_of(oai, **asked)
    streamed = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in range(4)]
    assert streamed == [one.message.content for one in whole.choices]
    short = oai.chat.completions.create(**asked | {"n": 1}, max_tokens=3).choices[0]
    assert short.finish_reason == "length"
    message = claude.messages.create(
        model=MODEL,
        max_tokens=80,
        messages=QUESTION,  # type: ignore[arg-type]
        output_config={"format": {"type": "json_schema", "schema": PERSON}},
    )
    assert [is_person(getattr(block, "text", "")) for block in message.content] == [True]


def test_a_random_model_calls_the_tools_that_it_must_call(oai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    tools: Any = [{"type": "function", "function": {"name": "meet", "parameters": PERSON}}]
    for choice in ("required", {"type": "function", "function": {"name": "meet"}}):
        asked: Any = {"model": MODEL, "messages": QUESTION, "tools": tools, "tool_choice": choice}
        (answer,) = oai.chat.completions.create(**asked, parallel_tool_calls=False).choices
        calls: Any = answer.message.tool_calls
        assert [(call.function.name, is_person(call.function.arguments)) for call in calls] == [("meet", True)]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    for forced in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "meet"}):
        message = claude.messages.create(
            model=MODEL,
            max_tokens=80,
            messages=QUESTION,  # type: ignore[arg-type]
            tools=[{"name": "meet", "input_schema": PERSON}],
            tool_choice=forced,  # type: ignore[arg-type]
        )
        (block,) = message.content
        assert (block.type, message.stop_reason) == ("tool_use", "tool_use")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unsupported_schema_is_refused_at_the_request_by_its_keyword(oai: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "unevaluatedProperties": False}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="unevaluatedProperties"):
        oai.chat.completions.create(model=MODEL, messages=QUESTION, response_format=asked, stream=stream)  # type: ignore[call-overload]


def test_text_is_streamed_while_it_is_drawn_and_a_disconnected_client_frees_its_place(
    server: ServedInstallation, oai: openai.OpenAI
) -> None:
    """A random model ends a sequence after about 500 tokens."""
    before = server.metric("tinsmith_sampled_tokens_total")
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "n": 64}
    with oai.chat.completions.create(stream=True, **asked) as stream:
        next(iter(stream))
    deadline = time.monotonic() + CANCEL_SECONDS
    while (drawn := server.metric("tinsmith_sampled_tokens_total") - before) == 0 or samples_at_work(server):
        assert time.monotonic() < deadline, "the samples do not end"
        time.sleep(0.2)
    assert drawn < 64 * 250


def samples_at_work(server: ServedInstallation) -> float:
    """Return the running samples as of the server's last look at its worker."""
    lines = httpx.get(f"{server.url}/metrics", **HTTP_OPTIONS).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'state="sampling"' in line)
