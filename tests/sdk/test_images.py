"""Images through the unmodified SDK: a program trains on them, survives a kill, and samples from the result."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from support.client.sdk import adam, exact_logprobs, service_client
from support.server.serve_process import API_KEY, ServedInstallation
from support.tiny_vision import (
    VISION_END,
    VISION_START,
    encoded,
    make_tiny_vision_model,
    picture,
    vision_directory,
    vision_model,
)
from tinker import types
from tinker_cookbook.renderers.base import image_to_chunk
from tinsmith_trainer.torch_model.base_model import Image
from transformers import AutoImageProcessor, AutoTokenizer

MODEL = "tiny/sees"
IMAGE_TOKENS = 8
"""The tokens of an image of 72 x 40 pixels for the tiny model's processor."""
ANSWER = [11, 3, 8, 5]


CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The template of Qwen3-VL for conversations with images, without its other parts."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny_vision_model(folder / "model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    installation = ServedInstallation(folder / "data", {MODEL: model})
    installation.start()
    yield installation
    installation.stop()


def chunk(seed: int, expected_tokens: int | None = IMAGE_TOKENS) -> types.ImageChunk:
    return types.ImageChunk(data=encoded(picture(seed=seed)), format="png", expected_tokens=expected_tokens)


def prompt(seed: int) -> types.ModelInput:
    text = [types.EncodedTextChunk(tokens=tokens) for tokens in ([5, VISION_START], [VISION_END, 9])]
    return types.ModelInput(chunks=[text[0], chunk(seed), text[1]])


def datum(seed: int) -> types.Datum:
    """Make a datum of the prompt and the answer, as renderers do."""
    model_input = prompt(seed).append(types.EncodedTextChunk(tokens=ANSWER[:-1]))
    before = prompt(seed).length - 1
    targets = [0] * before + ANSWER
    return types.Datum(
        model_input=model_input,
        loss_fn_inputs={"target_tokens": targets, "weights": [0.0] * before + [1.0] * len(ANSWER)},  # type: ignore[dict-item]
    )


def train(model: tinker.TrainingClient) -> list[list[float]]:
    result = model.forward_backward([datum(0), datum(1)], "cross_entropy")
    model.optim_step(adam()).result()
    return exact_logprobs(result.result())


def test_a_program_trains_on_images_survives_a_kill_and_samples_its_adapter(server: ServedInstallation) -> None:
    with service_client(server) as client:
        undisturbed, model = (client.create_lora_training_client(MODEL, rank=4, seed=1).result() for _ in range(2))
        expected = [train(undisturbed) for _ in range(4)]

        found = [train(model) for _ in range(2)]
        server.kill_workers()
        found += [train(model) for _ in range(2)]

        assert found == expected
        assert sum(expected[-1][0][-4:]) > sum(expected[0][0][-4:])
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=3, seed=1, stop=[])
        sampled = sampler.sample(prompt(0), 1, params, include_prompt_logprobs=True).result()
        [sequence] = sampled.sequences
        trained = model.forward([_scored(0, list(sequence.tokens))], "cross_entropy").result()
        scored = trained.loss_fn_outputs[0]["logprobs"].data[-3:]
        np.testing.assert_allclose(sequence.logprobs, scored, atol=1e-4)
        assert sampled.prompt_logprobs is not None
        assert len(sampled.prompt_logprobs) == prompt(0).length
        [elsewhere] = sampler.sample(_as_asset(server, prompt(0)), 1, params).result().sequences
        assert elsewhere.tokens == sequence.tokens


def _as_asset(server: ServedInstallation, model_input: types.ModelInput) -> types.ModelInput:
    """Replace the image by a file that an administrator put on the checkpoint root."""
    folder = server.data / "checkpoints" / "assets" / "default" / "pictures"
    folder.mkdir(parents=True)
    chunks: list[types.ModelInputChunk] = []
    for one in model_input.chunks:
        if isinstance(one, types.ImageChunk):
            (folder / "noise.png").write_bytes(one.data)
            one = types.ImageAssetPointerChunk(location="pictures/noise.png", format="png")  # noqa: PLW2901
        chunks.append(one)
    return types.ModelInput(chunks=chunks)


def _scored(seed: int, tokens: list[int]) -> types.Datum:
    model_input = prompt(seed).append(types.EncodedTextChunk(tokens=tokens[:-1]))
    return types.Datum(
        model_input=model_input,
        loss_fn_inputs={"target_tokens": [0] * (prompt(seed).length - 1) + tokens},  # type: ignore[dict-item]
    )


def test_a_conversation_with_an_image_is_sampled_as_its_chunks_are(
    server: ServedInstallation, client: tinker.ServiceClient
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.models[MODEL])
    before = tokenizer("<|im_start|>user\n<|vision_start|>", add_special_tokens=False)["input_ids"]
    behind = tokenizer("<|vision_end|>Hi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    chunks = [types.EncodedTextChunk(tokens=before), chunk(3), types.EncodedTextChunk(tokens=behind)]
    sampler = client.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    [sequence] = sampler.sample(types.ModelInput(chunks=chunks), 1, params).result().sequences
    expected = tokenizer.decode(sequence.tokens, skip_special_tokens=True)

    data = base64.b64encode(encoded(picture(seed=3))).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    text = {"type": "text", "text": "Hi"}
    assert _said(server, "/v1/chat/completions", [image, text])["choices"][0]["message"]["content"] == expected
    answer = _said(server, "/v1/messages", [{"type": "image", "source": source}, text])
    assert "".join(block["text"] for block in answer["content"]) == expected

    for part, words in (
        ({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}, "the server fetches no URLs"),
        ({"type": "image_url", "image_url": {"url": "data:image/gif;base64,AA=="}}, "not 'image/gif'"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}, "not valid base64"),
        ({"type": "text", "text": "<|image_pad|>"}, "writes 2 tokens of images"),
    ):
        assert words in _said(server, "/v1/chat/completions", [image, part])["error"]["message"]


def _said(server: ServedInstallation, path: str, content: list[Any]) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{server.url}{path}", json=body, headers={"X-API-Key": API_KEY}, timeout=60).json()


def test_an_image_that_was_miscounted_fails_its_call_and_the_next_round_works(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
    good = datum(0)
    chunks = [chunk(0, 9) if isinstance(one, types.ImageChunk) else one for one in good.model_input.chunks]
    bad = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=good.loss_fn_inputs)
    failing, step = model.forward_backward([bad], "cross_entropy"), model.optim_step(adam())
    with pytest.raises(tinker.RequestFailedError, match="has 8 tokens, but expected_tokens is 9") as failure:
        failing.result()
    assert failure.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="forward_backward 1 failed"):
        step.result()
    assert train(model)


def test_the_cookbook_counts_as_many_tokens_as_the_server() -> None:
    vision = vision_model("qwen3-vl").vision
    assert vision is not None
    tokens = np.arange(2, dtype=np.int32)
    processor = AutoImageProcessor.from_pretrained(vision_directory("qwen3-vl"))
    for width, height in ((72, 40), (33, 210), (1, 1), (900, 700)):
        one = image_to_chunk(picture(width, height), processor)
        image = Image(1, one.data, one.format, one.expected_tokens)
        assert len(vision.placed("Datum 0", tokens, [image])) == len(tokens) + one.length
