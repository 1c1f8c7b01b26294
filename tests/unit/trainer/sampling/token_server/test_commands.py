"""The servers' command lines and requests state every choice; no default applies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinsmith_trainer.errors import SamplerClosed, ServerError, UserError
from tinsmith_trainer.sampling.token_server.base import (
    MOST_DRAWS,
    MOST_ROWS,
    Generation,
    GenerationRequest,
    ServerCommand,
    ServerSettings,
)
from tinsmith_trainer.sampling.token_server.sglang import (
    BEYOND_VOCABULARY,
    StreamedAnswer,
    drawn_by_sglang,
    sglang_command,
    sglang_request,
)
from tinsmith_trainer.sampling.token_server.vllm import RANKS, allowed_rank, drawn_by_vllm, vllm_command, vllm_request

SETTINGS = ServerSettings(
    Path("/models/m"),
    1234,
    gpus=4,
    max_sequence_length=8192,
    max_rank=48,
    max_loaded=32,
    dtype="bfloat16",
    private=Path("/private"),
)
REQUEST = GenerationRequest(
    adapter="version",
    prompt=np.array([5, 6, 7], np.int32),
    max_tokens=9,
    temperature=0.5,
    top_k=-1,
    top_p=0.9,
    seed=3,
    stop_token_ids=(1, 2),
    stop_strings=("end",),
    scored_from=1,
)
NAMING = replace(REQUEST, topk=2, topk_prompt=1)
COMMANDS = pytest.mark.parametrize("command_of", [vllm_command, sglang_command], ids=["vllm", "sglang"])


def option(command: ServerCommand, name: str) -> str:
    return command.words[command.words.index(name) + 1]


def test_only_the_user_that_started_vllm_can_call_it() -> None:
    """Its API key would protect only the routes below /v1."""
    command = vllm_command(SETTINGS)
    assert option(command, "--uds") == "/private/server.sock"
    assert not {"--host", "--port"} & set(command.words)


def test_sglang_asks_for_a_key_that_no_command_line_shows() -> None:
    command = sglang_command(SETTINGS)
    assert (option(command, "--host"), option(command, "--port")) == ("127.0.0.1", "1234")
    assert command.files == {Path(option(command, "--config")): f"api-key: {SETTINGS.key}\n"}
    assert SETTINGS.key not in [*command.words, *command.environment.values()]
    assert SETTINGS.key not in repr(command.words) + repr(SETTINGS)


@COMMANDS
def test_a_server_may_be_installed_in_its_own_environment(
    command_of: Callable[[ServerSettings], ServerCommand], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search path includes the programs that it starts."""
    monkeypatch.setenv("PATH", "/usr/bin")
    command = command_of(replace(SETTINGS, environment=Path("/opt/theirs")))
    assert command.words[0].startswith("/opt/theirs/bin/")
    assert command.environment["PATH"] == "/opt/theirs/bin:/usr/bin"
    assert "PATH" not in command_of(SETTINGS).environment


@COMMANDS
def test_words_of_a_user_come_last_so_that_they_win(command_of: Callable[[ServerSettings], ServerCommand]) -> None:
    extra = ("--max-model-len", "17")
    assert tuple(command_of(replace(SETTINGS, extra=extra)).words[-2:]) == extra


@COMMANDS
def test_a_server_downloads_nothing(command_of: Callable[[ServerSettings], ServerCommand]) -> None:
    """It serves exactly the files that its sampler has read."""
    assert command_of(SETTINGS).environment["HF_HUB_OFFLINE"] == "1"


@COMMANDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_served_in_the_configured_type(
    command_of: Callable[[ServerSettings], ServerCommand], dtype: str
) -> None:
    """The server's default differs for float32 checkpoints, and between servers."""
    assert option(command_of(replace(SETTINGS, dtype=dtype)), "--dtype") == dtype


def test_replicas_of_vllm_are_not_of_one_seed() -> None:
    """Requests without a seed draw from the engine's stream, and would be alike in all replicas."""
    assert len({option(vllm_command(SETTINGS), "--seed") for _ in range(4)}) == 4


@pytest.mark.parametrize(("requested", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (64, 64), (129, 256), (512, 512)])
def test_vllm_is_started_for_the_lowest_rank_that_it_knows(requested: int, allowed: int) -> None:
    assert allowed_rank(requested) == allowed
    assert option(vllm_command(replace(SETTINGS, max_rank=requested)), "--max-lora-rank") == str(allowed)


def test_a_rank_beyond_vllms_is_refused() -> None:
    with pytest.raises(ServerError, match=r"up to rank 512, not 513; lower --max-rank"):
        allowed_rank(RANKS[-1] + 1)


@pytest.mark.parametrize(("max_loaded", "in_a_batch"), [(1, 1), (8, 8), (64, 8)])
def test_a_batch_never_has_more_adapters_than_are_kept(max_loaded: int, in_a_batch: int) -> None:
    command = vllm_command(replace(SETTINGS, max_loaded=max_loaded))
    assert (option(command, "--max-loras"), option(command, "--max-cpu-loras")) == (str(in_a_batch), str(max_loaded))


def test_a_tenant_alone_leaves_vllm_room_for_the_draws_of_another() -> None:
    alone, batch = MOST_DRAWS // 2, int(option(vllm_command(SETTINGS), "--max-num-seqs"))
    assert batch == MOST_ROWS > alone


def test_vllm_gets_only_token_ids() -> None:
    body = json.loads(json.dumps(vllm_request(REQUEST)))
    assert body["prompt"] == [5, 6, 7]
    assert (body["model"], body["seed"], body["n"], body["max_tokens"]) == ("version", 3, 1, 9)
    assert (body["temperature"], body["top_k"], body["top_p"], body["min_p"]) == (0.5, -1, 0.9, 0.0)
    assert (body["stop_token_ids"], body["stop"], body["ignore_eos"]) == ([1, 2], ["end"], True)
    assert (body["return_token_ids"], body["logprobs"], body["prompt_logprobs"]) == (True, 0, 0)


@pytest.mark.parametrize(("temperature", "sent"), [(0.0, 0.0), (1e-30, 0.0), (1e-5, 1e-5), (0.5, 0.5)])
def test_vllm_is_asked_for_the_likeliest_token_where_a_temperature_means_it(temperature: float, sent: float) -> None:
    """By default it would sample at temperature 0.01."""
    assert vllm_request(replace(REQUEST, temperature=temperature))["temperature"] == sent


def test_sglang_gets_only_token_ids() -> None:
    body = json.loads(json.dumps(sglang_request(REQUEST)))
    assert (body["input_ids"], body["lora_path"], body["logprob_start_len"]) == ([5, 6, 7], "version", 0)
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["sampling_seed"]) == (9, 3)
    assert (sampling["stop_token_ids"], sampling["stop"], sampling["ignore_eos"]) == ([1, 2], ["end"], False)


def test_sglang_stops_at_no_token_only_where_no_token_is_a_stop() -> None:
    request: Any = sglang_request(replace(REQUEST, stop_token_ids=()))
    assert request["sampling_params"]["ignore_eos"] is True


def test_candidates_are_requested_by_their_ids() -> None:
    request = replace(REQUEST, candidates=(8, 3), scored_from=None)
    assert vllm_request(request)["logprob_token_ids"] == [8, 3]
    assert sglang_request(request)["token_ids_logprob"] == [8, 3]
    assert "logprob_token_ids" not in vllm_request(REQUEST)


def test_every_scored_sglang_request_names_a_token_because_one_without_crashes_its_batch() -> None:
    assert sglang_request(REQUEST)["token_ids_logprob"] == [0]
    assert sglang_request(replace(REQUEST, scored_from=None))["token_ids_logprob"] is None


VLLM_ANSWER: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [8, 2],
            "logprobs": {
                "token_logprobs": [-0.5, -1.5],
                "top_logprobs": [
                    {"token_id:8": -0.5, "token_id:4": -0.5},
                    {"token_id:2": -1.5, "token_id:9": -0.25, "token_id:3": -1.0},
                ],
            },
            "finish_reason": "stop",
            "prompt_logprobs": [
                None,
                {"6": {"logprob": -2.0}, "9": {"logprob": -0.1}},
                {"7": {"logprob": -3.0}, "2": {"logprob": -3.0}},
            ],
        }
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
}
SGLANG_ANSWER: dict[str, Any] = {
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 8, None], [-1.5, 2, None]],
        "output_top_logprobs": [[[-0.5, 8, None], [-0.5, 4, None]], [[-0.25, 9, None], [-1.0, 3, None]]],
        "output_token_ids_logprobs": [[[-4.0, 3, None], [-0.5, 8, None]], [[-1.0, 3, None], [-5.0, 8, None]]],
        "input_token_logprobs": [[None, 5, None], [-2.0, 6, None], [-3.0, 7, None]],
        "input_top_logprobs": [None, [[-0.1, 9, None], [-2.0, 6, None]], [[-3.0, 7, None], [-3.0, 2, None]]],
        "cached_tokens": 2,
    }
}


@pytest.mark.parametrize(
    "drawn",
    [drawn_by_vllm(REQUEST, VLLM_ANSWER), drawn_by_sglang(REQUEST, SGLANG_ANSWER)[0]],
    ids=["vllm", "sglang"],
)
def test_an_answer_has_tokens_logprobs_scores_and_cached_tokens(drawn: Generation) -> None:
    assert (drawn.sequence.tokens.tolist(), drawn.sequence.logprobs.tolist()) == ([8, 2], [-0.5, -1.5])
    assert (drawn.sequence.stopped, drawn.cached_tokens) == (True, 2)
    assert drawn.prompt_logprobs is not None
    np.testing.assert_array_equal(drawn.prompt_logprobs, [np.nan, -2.0, -3.0])


@pytest.mark.parametrize(
    "drawn",
    [drawn_by_vllm(NAMING, VLLM_ANSWER), drawn_by_sglang(NAMING, SGLANG_ANSWER)[0]],
    ids=["vllm", "sglang"],
)
def test_the_likeliest_tokens_come_first_and_of_equals_the_lower_id(drawn: Generation) -> None:
    """The order does not depend on whether the server adds the drawn or prompted token."""
    assert drawn.sequence.topk_logprobs is not None
    assert drawn.sequence.topk_logprobs.token_ids.tolist() == [[4, 8], [9, 3]]
    assert drawn.sequence.topk_logprobs.logprobs.tolist() == [[-0.5, -0.5], [-0.25, -1.0]]
    assert drawn.topk_prompt is not None
    assert drawn.topk_prompt.token_ids.tolist() == [[0], [9], [2]]
    np.testing.assert_array_equal(drawn.topk_prompt.logprobs, np.array([[-99999.0], [-0.1], [-3.0]], np.float32))


@pytest.mark.parametrize("candidates", [(3,), (8, 3)])
def test_candidates_have_their_logprobs_in_the_place_of_the_first_token(candidates: tuple[int, ...]) -> None:
    request = replace(REQUEST, candidates=candidates, scored_from=None)
    choice = VLLM_ANSWER["choices"][0]
    named = {"token_logprobs": [-0.5, -1.5], "top_logprobs": [{"token_id:8": -0.5, "token_id:3": -4.0}, {}]}
    vllm = drawn_by_vllm(request, {**VLLM_ANSWER, "choices": [{**choice, "logprobs": named}]})
    sglang, _ = drawn_by_sglang(request, SGLANG_ANSWER)
    for drawn in (vllm, sglang):
        assert drawn.candidates is not None
        assert drawn.candidates.tolist() == [{3: -4.0, 8: -0.5}[token] for token in candidates]


def test_a_candidate_that_the_answer_leaves_out_is_an_error_of_the_server() -> None:
    request = replace(REQUEST, candidates=(77,), scored_from=None)
    with pytest.raises(ServerError, match="not in the form that is known"):
        drawn_by_vllm(request, VLLM_ANSWER)
    with pytest.raises(ServerError, match="not in the form that is known"):
        drawn_by_sglang(request, SGLANG_ANSWER)


@pytest.mark.parametrize("reason", ["abort", "repetition", None])
def test_a_sequence_that_vllm_did_not_finish_is_lost_and_not_short(reason: str | None) -> None:
    """A server that shuts down returns its partial text with status 200."""
    unfinished = {**VLLM_ANSWER["choices"][0], "finish_reason": reason}
    with pytest.raises(SamplerClosed, match="gave a request up"):
        drawn_by_vllm(REQUEST, {**VLLM_ANSWER, "choices": [unfinished]})


@pytest.mark.parametrize("answer", [None, {}, {"choices": []}, {"choices": [{}]}, {"choices": [None]}], ids=repr)
def test_an_answer_of_another_version_of_vllm_is_an_error_of_the_server(answer: Any) -> None:
    with pytest.raises(ServerError, match="vLLM's answer is not in the form that is known"):
        drawn_by_vllm(REQUEST, answer)


@pytest.mark.parametrize("answer", [None, {}, {"meta_info": {}}, {"meta_info": {"finish_reason": None}}], ids=repr)
def test_an_answer_of_another_version_of_sglang_is_an_error_of_the_server(answer: Any) -> None:
    with pytest.raises(ServerError, match="SGLang's answer is not in the form that is known"):
        drawn_by_sglang(REQUEST, answer)


def test_scores_of_another_prompt_are_refused() -> None:
    answer = {"meta_info": {**SGLANG_ANSWER["meta_info"], "input_token_logprobs": [[-1.0, 6, None], [-1.0, 8, None]]}}
    with pytest.raises(ServerError, match="position 2 of the prompt is 7, not 8"):
        drawn_by_sglang(REQUEST, answer)


def test_an_abort_of_sglang_is_an_error_with_its_message() -> None:
    aborted = {"meta_info": {"finish_reason": {"type": "abort", "message": "no memory"}, "output_token_logprobs": []}}
    with pytest.raises(ServerError, match=r"gave a request up: no memory\."):
        drawn_by_sglang(REQUEST, aborted)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ({"type": "abort", "message": "no memory"}, ServerError),
        ({"type": "stop", "matched": BEYOND_VOCABULARY}, UserError),
    ],
)
def test_the_last_event_of_a_failed_stream_of_sglang_shows_no_token(reason: dict[str, str], error: type) -> None:
    request = replace(REQUEST, topk=0, stop_strings=())
    streamed = StreamedAnswer()
    entry = {"output_token_logprobs": [[-0.5, 7, None]]}
    [shown] = streamed.add(request, {"meta_info": {"finish_reason": None, **entry}})
    assert (shown.token, shown.logprob) == (7, -0.5)
    with pytest.raises(error):
        streamed.add(request, {"meta_info": {"finish_reason": reason, **entry}})


@pytest.mark.parametrize("event", [None, {}, {"meta_info": {}}, {"meta_info": {"finish_reason": None}}], ids=repr)
def test_an_event_of_another_version_of_sglang_is_an_error_of_the_server(event: Any) -> None:
    with pytest.raises(ServerError, match="SGLang's event is not in the form that is known"):
        StreamedAnswer().add(REQUEST, event)


@pytest.mark.parametrize(("matched", "unasked"), [(2, False), ("end", False), (99, True)])
def test_an_end_that_was_not_requested_is_distinguished_from_a_stop(matched: int | str, unasked: bool) -> None:
    reason = {"type": "stop", "matched": matched}
    drawn, found = drawn_by_sglang(REQUEST, {"meta_info": {**SGLANG_ANSWER["meta_info"], "finish_reason": reason}})
    assert found is unasked
    assert drawn.sequence.stopped is not unasked
