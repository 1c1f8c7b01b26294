"""An agent of OpenAI's own client, recorded: its tokens are those that the sampler drew, with their logprobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from openai import OpenAI
from support.client.page_programs import PageProgram, example_program
from support.client.sdk import adam, next_token_datum
from support.server.serve_process import API_KEY, ServedInstallation
from tinker import types
from tinsmith.training import Recording, open_recording
from tinsmith.training.errors import RecordingRefused
from tinsmith.training.recording import RecordedSequence
from transformers import AutoTokenizer

from .conftest import MODEL

QUESTION = {"role": "user", "content": "2+3"}


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """Return a model whose adapter changes its answers."""
    model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    for _ in range(3):
        model.forward_backward([next_token_datum([5, 9, 2, 14, 7, 11])], "cross_entropy")
        model.optim_step(adam(2e-2)).result()
    return model


@pytest.fixture
def recording(client: tinker.ServiceClient, model: tinker.TrainingClient) -> Iterator[Recording]:
    path = model.save_weights_for_sampler("policy").result().path
    assert path
    with open_recording(path, service=client) as recording:
        yield recording
    with pytest.raises(RecordingRefused, match="it was deleted"):
        recording.sequences()


def converse(recording: Recording, *, turns: int) -> list[Any]:
    """Ask several questions, each with all that was said before. Every second answer is a stream."""
    messages: list[Any] = []
    with OpenAI(base_url=recording.base_url, api_key=API_KEY) as agent:
        for turn in range(turns):
            messages.append(QUESTION)
            asked: Any = {"model": "any", "messages": messages, "max_tokens": 12, "seed": turn}
            if turn % 2:
                chunks = agent.chat.completions.create(stream=True, **asked)
                text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            else:
                text = agent.chat.completions.create(**asked).choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
    return messages


def rendered_again(server: ServedInstallation, conversation: list[Any]) -> list[int]:
    """Return the tokens of the last prompt as the chat template renders them from texts."""
    tokenizer = AutoTokenizer.from_pretrained(server.models[MODEL])
    tokens: list[int] = tokenizer.apply_chat_template(conversation[:-1], add_generation_prompt=True, return_dict=False)
    return tokens


def test_a_conversation_becomes_one_datum_that_is_exact_and_on_policy(
    server: ServedInstallation, client: tinker.ServiceClient, model: tinker.TrainingClient, recording: Recording
) -> None:
    """The answers are random tokens, whose text becomes other tokens when it is tokenised again."""
    conversation = converse(recording, turns=4)
    (sequence,) = recording.sequences()
    assert len(sequence.turns) == 4
    assert rendered_again(server, conversation) != list(sequence.tokens[: sequence.turns[-1].start])
    assert {turn.model_path for turn in sequence.turns} == {recording.model}
    expected = prompt_logprobs(client, recording.model, sequence)
    sampled = [place for place, mask in enumerate(sequence.mask) if mask]
    assert len(sampled) == sum(turn.end - turn.start for turn in sequence.turns) > 4 * 6
    recorded = [sequence.logprobs[place] for place in sampled]
    assert recorded == pytest.approx([expected[place] for place in sampled], abs=1e-5)
    (datum,) = recording.datums(1.0)
    loss = model.forward_backward([datum], "importance_sampling").result().metrics["loss:sum"]
    assert loss == pytest.approx(-len(sampled), abs=1e-3), "each ratio of logprobs is 1"
    model.optim_step(adam(1e-3)).result()


def prompt_logprobs(client: tinker.ServiceClient, path: str, sequence: RecordedSequence) -> list[Any]:
    sampler = client.create_sampling_client(model_path=path).result()
    found: list[Any] = sampler.compute_logprobs(types.ModelInput.from_ints(list(sequence.tokens))).result()
    return found


def test_the_example_trains_an_agent_that_calls_a_tool(server: ServedInstallation, tmp_path: Path) -> None:
    life = PageProgram(server, tmp_path, example_program("recorded_agent.py"), MODEL).run()
    assert sorted(life.values) == [0, 1, 2]
    turns = [
        count
        for line in life.values.values()
        for count in re.findall(r"\d+", line.partition("turns")[2].partition("]")[0])
    ]
    assert max(map(int, turns)) >= 2, "the model called the tool, and read its result in the same sequence"
    assert any(not line.endswith("data 0") for line in life.values.values())
