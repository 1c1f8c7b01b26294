"""Samples as text: the text is the same for tokens one by one and for all tokens at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import wire_pb2, worker_pb2
from tinsmith_trainer.sampling.base import DrawnToken, SampleJob, SampleOutcome, SamplingParams, Sequence, TopkLogprobs
from tinsmith_trainer.sampling.model_language import ModelLanguage
from tinsmith_trainer.sampling.readings import Reading
from tinsmith_trainer.sampling.stops import StopCut
from tinsmith_trainer.torch_model.loading import TorchModel

CHAT = worker_pb2.Reading(chat=True)
PLAIN = worker_pb2.Reading()
AT_THE_END = SamplingParams()
ANSWER = "<think>\nHm.\n</think>\n\nGrüße, 漢!"


@pytest.fixture(scope="module")
def language(model: TorchModel) -> ModelLanguage:
    return ModelLanguage(model.tokenizer, model.eos_token_ids, model.directory, model.info.max_sequence_length)


def tokens_of(language: ModelLanguage, text: str) -> list[int]:
    tokens: list[int] = language.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def begun(language: ModelLanguage, request: worker_pb2.Reading, *stops: str) -> Reading:
    prompt = np.array(tokens_of(language, "<|im_start|>assistant\n"), np.int32)
    params = SamplingParams(stop_strings=stops, stop_tokens=language.eos_token_ids)
    reading = Reading()
    reading.begin(language, SampleJob("r", "", prompt, params), request)
    return reading


def outcome(tokens: Items[int], *, stopped: bool = True) -> SampleOutcome:
    logprobs = np.full(len(tokens), -1.0, np.float32)
    return SampleOutcome((Sequence(np.array(tokens, np.int32), logprobs, stopped),))


def whole(pieces: Items[worker_pb2.TextPiece]) -> tuple[str, str, worker_pb2.SequenceEnd]:
    assert [piece.HasField("end") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return "".join(p.content for p in pieces), "".join(p.reasoning for p in pieces), pieces[-1].end


@pytest.mark.parametrize(
    ("bias", "masked", "stage"),
    [
        ((), False, worker_pb2.LOGPROB_STAGE_UNSPECIFIED),
        (((1, 1.0),), False, worker_pb2.BEFORE_MASK),
        (((1, 1.0),), True, worker_pb2.AFTER_MASK),
    ],
)
async def test_pieces_say_whether_their_logprobs_are_before_the_mask(
    language: ModelLanguage, bias: tuple[tuple[int, float], ...], masked: bool, stage: int
) -> None:
    tokens, reading = tokens_of(language, "Hi"), Reading()
    job = SampleJob("r", "", np.array([1], np.int32), SamplingParams(logit_bias=bias))
    reading.begin(language, job, worker_pb2.Reading(logprobs=True))
    reading.drawn(0, DrawnToken(tokens[0], -1.0, masked_logprobs=masked))
    await reading.finish(replace(outcome(tokens), masked_logprobs=masked))
    assert {piece.logprob_stage for piece in reading.behind(0) if piece.tokens or piece.HasField("end")} == {stage}


@pytest.mark.parametrize("early_count", [0, 5, 1000], ids=["at the end", "some before", "all before"])
async def test_a_text_is_the_same_however_its_tokens_were_told(language: ModelLanguage, early_count: int) -> None:
    tokens = tokens_of(language, ANSWER + "<|im_end|>")
    reading = begun(language, CHAT)
    for token in tokens[:early_count]:
        reading.drawn(0, DrawnToken(token, -1.0))
    await reading.finish(outcome(tokens))
    content, reasoning, end = whole(reading.behind(0))
    assert (content, reasoning) == ("Grüße, 漢!", "Hm.")
    assert (end.reason, end.stop_string, end.tokens) == (wire_pb2.STOP, "", len(tokens))


async def test_a_text_that_runs_to_its_length_in_the_middle_of_a_character_says_so(language: ModelLanguage) -> None:
    reading = begun(language, PLAIN)
    await reading.finish(outcome(tokens_of(language, "a漢")[:-1], stopped=False))
    content, _, end = whole(reading.behind(0))
    assert (content[0], end.reason) == ("a", wire_pb2.LENGTH)
    assert set(content[1:]) == {"\ufffd"}


async def test_a_stop_string_ends_the_text_and_is_named(language: ModelLanguage) -> None:
    reading = begun(language, PLAIN, "never", "STOP")
    await reading.finish(outcome(tokens_of(language, "one STOP and")))
    content, _, end = whole(reading.behind(0))
    assert (content, end.stop_string) == ("one ", "STOP")


async def test_logprobs_have_the_texts_of_their_tokens_except_the_stop_token(
    language: ModelLanguage,
) -> None:
    reading = begun(language, worker_pb2.Reading(logprobs=True))
    first, second = tokens_of(language, "ab")
    top = TopkLogprobs(np.array([[second, first]], np.int32), np.array([[-0.5, -1.0]], np.float32))
    reading.drawn(0, DrawnToken(first, -1.0, top))
    await reading.finish(outcome([first, second, *tokens_of(language, "<|im_end|>")]))
    scored = [token for piece in reading.behind(0) for token in piece.tokens]
    assert [(token.text, token.logprob) for token in scored] == [("a", -1.0), ("b", -1.0)]
    assert [one.text for one in scored[0].likeliest] == ["b", "a"]


def test_token_0_is_among_the_likeliest_like_any_other_and_an_empty_cell_is_not(language: ModelLanguage) -> None:
    reading = begun(language, worker_pb2.Reading(logprobs=True))
    top = TopkLogprobs.empty(1, 3)
    top.token_ids[0, :2], top.logprobs[0, :2] = [0, 1], [-0.25, -2.0]
    reading.drawn(0, DrawnToken(0, -0.25, top))
    (scored,) = (token for piece in reading.behind(0) for token in piece.tokens)
    texts = [language.tokenizer.decode([token]) for token in (0, 1)]
    assert [(one.text, one.logprob) for one in scored.likeliest] == [(texts[0], -0.25), (texts[1], -2.0)]


async def test_an_echo_is_the_prompt_with_its_logprobs_and_the_whole_completion(language: ModelLanguage) -> None:
    """The first token has no prefix; the end token is included, since readers of prompts count on it."""
    prompt, (drawn, end) = tokens_of(language, "ab"), tokens_of(language, "c<|im_end|>")
    rows = TopkLogprobs(np.array([[0], [7]], np.int32), np.array([[0.0], [-0.25]], np.float32))
    job = SampleJob("r", "", np.array(prompt, np.int32), AT_THE_END, prompt_logprobs=True)
    reading = Reading()
    reading.begin(language, job, worker_pb2.Reading(logprobs=True, echo=True))
    reading.drawn(0, DrawnToken(drawn, -1.0))
    assert reading.behind(0) == (), "the prompt's logprobs come with the end"
    scores = np.array([np.nan, -0.5], np.float32)
    await reading.finish(replace(outcome([drawn, end]), prompt_logprobs=scores, topk_prompt_logprobs=rows))
    pieces = reading.behind(0)
    assert whole(pieces)[0] == "abc"
    scored = [token for piece in pieces for token in piece.tokens]
    assert [(one.text, one.logprob if one.HasField("logprob") else None) for one in scored] == [
        ("a", None),
        ("b", -0.5),
        ("c", -1.0),
        ("<|im_end|>", -1.0),
    ]
    assert [one.logprob for one in scored[1].likeliest] == [-0.25]


async def test_the_text_of_an_echo_that_ends_within_a_character_is_its_last_tokens(language: ModelLanguage) -> None:
    prompt = tokens_of(language, "a漢")[:-1]
    job = SampleJob("r", "", np.array(prompt, np.int32), AT_THE_END, prompt_logprobs=True)
    reading = Reading()
    reading.begin(language, job, worker_pb2.Reading(logprobs=True, echo=True))
    await reading.finish(replace(outcome([]), prompt_logprobs=np.zeros(len(prompt), np.float32)))
    echo = reading.behind(0)[0]
    assert echo.content == language.tokenizer.decode(prompt)
    assert [token.width for token in echo.tokens] == [1, *[0] * (len(prompt) - 2), len(echo.content) - 1]


async def test_an_echo_is_counted_while_it_is_drawn_and_waiters_are_woken(language: ModelLanguage) -> None:
    """A client that leaves before its text has arrived is charged for what was drawn until then."""
    prompt, tokens = np.array(tokens_of(language, "ab"), np.int32), tokens_of(language, "cde")
    reading = Reading()
    reading.begin(language, SampleJob("r", "", prompt, AT_THE_END, num_samples=2), worker_pb2.Reading(echo=True))
    for drawn, token in enumerate(tokens, start=1):
        waiting = asyncio.create_task(reading.grown(0, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        reading.drawn(drawn % 2, DrawnToken(token, -1.0))
        await waiting
        assert (reading.tokens, reading.behind(0)) == (drawn, ())
    sequences = outcome(tokens[1:2]).sequences + outcome(tokens[::2]).sequences
    await reading.finish(SampleOutcome(sequences))
    assert reading.tokens == 3
    pieces = reading.behind(0)
    texts = ["".join(piece.content for piece in pieces if piece.sequence == index) for index in range(2)]
    assert texts == ["abd", "abce"]


async def test_pieces_that_were_seen_are_forgotten_and_waiters_are_woken_by_new_ones(language: ModelLanguage) -> None:
    reading = begun(language, PLAIN)
    for token in tokens_of(language, "ab"):
        reading.drawn(0, DrawnToken(token, -1.0))
    assert [piece.content for piece in reading.behind(0)] == ["a", "b"]
    assert [piece.content for piece in reading.behind(1)] == ["b"]
    waiting = asyncio.create_task(reading.grown(2, 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    reading.drawn(0, DrawnToken(tokens_of(language, "c")[0], -1.0))
    await waiting
    assert [piece.content for piece in reading.behind(2)] == ["c"]


@given(
    text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), data=st.data()
)
def test_a_cut_text_ends_before_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    cut, shown = StopCut(stops), ""
    at = 0
    while at < len(text):
        size = data.draw(st.integers(1, 3))
        shown += cut.push(text[at : at + size])
        at += size
    shown += cut.rest()
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (shown, cut.found) == (text, "")
    else:
        assert cut.found in stops
        assert text.startswith(shown + cut.found)
        assert not any(stop in shown for stop in stops)


def test_an_echo_with_logprobs_needs_the_logprobs_of_the_prompt(language: ModelLanguage) -> None:
    with pytest.raises(ValueError, match="an echo with logprobs needs prompt_logprobs"):
        begun(language, worker_pb2.Reading(echo=True, logprobs=True))
