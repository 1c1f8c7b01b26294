"""The stand-in for vLLM answers as vLLM itself does, in numbers and in words: what it proves is true of both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sampler.jobs import prompt_of, random_adapter
from support.token_server.look_alikes import Refused, call
from support.token_server.shared import SharedServer
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders
from tinsmith_trainer.sampling.token_server.base import Generation, GenerationRequest
from tinsmith_trainer.sampling.token_server.served_model import read_model
from tinsmith_trainer.sampling.token_server.vllm import drawn_by_vllm, vllm_request
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import VLLM_ITSELF, shared_server

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-4
LOAD, UNLOAD, COMPLETE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


@dataclass(frozen=True)
class Both:
    stand_in: SharedServer
    itself: SharedServer

    def answers(self, path: str, body: dict[str, Any]) -> list[tuple[int, Any]]:
        return [answer(server, path, body) for server in (self.stand_in, self.itself)]


@pytest.fixture
def both(request: pytest.FixtureRequest) -> Both:
    return Both(shared_server(request, "vllm"), shared_server(request, VLLM_ITSELF))


def answer(server: SharedServer, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return the status, and the JSON's message or the text."""
    try:
        status, content = 200, call(server.address, path, json.dumps(body).encode())
    except Refused as error:
        status, content = error.status, error.content
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content.decode()


def generation_request(**changes: Any) -> GenerationRequest:
    greedy: dict[str, Any] = {
        "adapter": None,
        "prompt": prompt_of(20),
        "max_tokens": 8,
        "temperature": 0.0,
        "top_k": -1,
        "top_p": 1.0,
        "seed": None,
        "stop_token_ids": (),
        "stop_strings": (),
    }
    return GenerationRequest(**(greedy | changes))


def test_loading_and_unloading_an_adapter_get_the_same_answers(both: Both, model: TorchModel, tmp_path: Path) -> None:
    folders, served = AdapterFolders(tmp_path), read_model(str(model.directory))
    good = folders.write("good", random_adapter(model), served)
    wide = folders.write("wide", random_adapter(model, rank=65), served)
    missing = tmp_path / "missing"
    tried = [(LOAD, good.name, good.folder), (LOAD, good.name, good.folder), (LOAD, wide.name, wide.folder)]
    tried += [(LOAD, "gone", missing), (UNLOAD, good.name, missing), (UNLOAD, good.name, missing)]
    statuses = []
    for path, name, folder in tried:
        stand_in, itself = both.answers(path, {"lora_name": name, "lora_path": str(folder)})
        assert stand_in == itself
        statuses.append(itself[0])
    assert statuses == [200, 400, 500, 404, 200, 404]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 2000},
        {"logprobs": 1025},
        {"prompt_logprobs": 1025},
        {"logprob_token_ids": list(range(129))},
    ],
    ids=" ".join,
)
def test_a_request_that_is_refused_is_refused_in_the_same_words(both: Both, wrong: dict[str, Any]) -> None:
    stand_in, itself = both.answers(COMPLETE, vllm_request(generation_request()) | wrong)
    assert stand_in == itself
    assert 400 <= itself[0] < 500


def test_a_model_that_is_not_there_is_missed_in_the_same_words(both: Both) -> None:
    """The real one names those that are there behind it."""
    (_, stand_in), (status, itself) = both.answers(COMPLETE, vllm_request(generation_request(adapter="unknown")))
    assert itself["error"]["message"].startswith(stand_in["error"]["message"])
    assert (status, itself["error"]["type"]) == (404, stand_in["error"]["type"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"topk": 3},
        {"candidates": (5, 3, 500)},
        {"scored_from": 1},
        {"scored_from": 1, "topk_prompt": 4, "topk": 2},
        {"scored_from": 1, "topk_prompt": 2, "max_tokens": 1, "candidates": (7,)},
        {"max_tokens": 1},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_a_sequence_is_returned_in_the_same_form(both: Both, changes: dict[str, Any]) -> None:
    request = generation_request(**changes)
    stand_in, itself = (drawn_by_vllm(request, body) for _, body in both.answers(COMPLETE, vllm_request(request)))
    assert_equal(stand_in, itself)


def test_a_stop_token_is_returned_in_the_same_form(both: Both) -> None:
    [_, (_, body)] = both.answers(COMPLETE, vllm_request(generation_request()))
    said = drawn_by_vllm(generation_request(), body).sequence.tokens.tolist()
    request = generation_request(stop_token_ids=(said[5],))
    stand_in, itself = (drawn_by_vllm(request, body) for _, body in both.answers(COMPLETE, vllm_request(request)))
    assert_equal(stand_in, itself)
    assert itself.sequence.stopped


def test_a_prompt_that_ends_within_a_character_is_searched_for_stop_strings(both: Both, model: TorchModel) -> None:
    """If this fails, vLLM has been repaired, and every prompt can have them."""
    prompt = model.tokenizer.encode("Quartz \u20ac", add_special_tokens=False)
    for length, ended in ((len(prompt), False), (len(prompt) - 1, True)):
        request = generation_request(prompt=np.array(prompt[:length]), stop_strings=("Q",))
        stand_in, itself = (drawn_by_vllm(request, body) for _, body in both.answers(COMPLETE, vllm_request(request)))
        assert_equal(stand_in, itself)
        assert itself.sequence.stopped == ended


def assert_equal(one: Generation, other: Generation) -> None:
    """Compare two answers, except for prefix cache hits, which are the server's history."""
    assert one.sequence.tokens.tolist() == other.sequence.tokens.tolist()
    assert one.sequence.stopped == other.sequence.stopped
    topk = [(found.sequence.topk_logprobs, found.topk_prompt) for found in (one, other)]
    for mine, others in zip(*topk, strict=True):
        assert (mine is None) == (others is None)
        if mine is not None and others is not None:
            assert mine.token_ids.tolist() == others.token_ids.tolist()
            np.testing.assert_allclose(mine.logprobs, others.logprobs, atol=TOLERANCE)
    numbers = [(found.sequence.logprobs, found.prompt_logprobs, found.candidates) for found in (one, other)]
    for mine, others in zip(*numbers, strict=True):
        assert (mine is None) == (others is None)
        if mine is not None and others is not None:
            np.testing.assert_allclose(mine, others, atol=TOLERANCE)
