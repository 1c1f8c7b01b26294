"""Drawn tokens are shown, and searched for stop strings, as the text by which they extend the prompt's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.sampling.base import DrawnToken, SampleJob, SampleOutcome, SamplingParams
from tinsmith_trainer.sampling.base import Sequence as Drawn
from tinsmith_trainer.sampling.model_language import ModelLanguage
from tinsmith_trainer.sampling.readings import Reading
from tinsmith_trainer.sampling.stops import StopRule
from tinsmith_trainer.sampling.token_text import INCOMPLETE, IncrementalText
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{number:02X}>" for number in range(256)]
WORDS = ["a", "b", "hello", "the", "é", "x", "STOP", ".", ","]
SPECIAL = ["<s>", "</s>", "<|turn|>"]


def vocabulary(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def sentencepiece(decoder: Any) -> Tokenizer:
    """Return a tokenizer like Llama 2's: words begin with a space, and unknown text becomes bytes."""
    words = [start + word for start in ("▁", "") for word in WORDS]
    scored = [("<unk>", 0.0), *((byte, -20.0) for byte in BYTES), *((word, -1.0) for word in ("▁", "▁▁", *words))]
    new_tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    new_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    new_tokenizer.decoder = decoder
    return new_tokenizer


def llama2() -> Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(parts))


def metaspace(scheme: str) -> Tokenizer:
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", scheme)]))


def byte_level() -> Tokenizer:
    tokens = vocabulary("<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġx", "ST")
    new_tokenizer = Tokenizer(models.BPE(tokens, [("Ġ", "a"), ("Ġ", "x"), ("S", "T")]))
    new_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    new_tokenizer.decoder = decoders.ByteLevel()
    return new_tokenizer


def word_piece() -> Tokenizer:
    tokens = vocabulary("[UNK]", *WORDS, *(f"##{word}" for word in WORDS))
    new_tokenizer = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    new_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    new_tokenizer.decoder = decoders.WordPiece()
    return new_tokenizer


MAKERS = {
    "llama2": llama2,
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-never": lambda: metaspace("never"),
    "byte-level": byte_level,
    "word-piece": word_piece,
}


def new_tokenizer(kind: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=MAKERS[kind](), clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


TOKENIZERS = {kind: new_tokenizer(kind) for kind in MAKERS}
kinds = st.sampled_from(sorted(TOKENIZERS))
texts = st.text(st.sampled_from("ab x.é漢😀"), max_size=8)


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def language_of(tokenizer: Any) -> ModelLanguage:
    """Return a language without a model's files, which plain text does not need."""
    eos = tokenizer.convert_tokens_to_ids("</s>")
    return ModelLanguage(tokenizer, (eos,), None, 4096)  # type: ignore[arg-type]


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def whole_text(tokenizer: Any, prompt: Sequence[int], drawn: Sequence[int]) -> str:
    return decoded(tokenizer, [*prompt, *drawn]).removeprefix(decoded(tokenizer, prompt))


def end_of(tokenizer: Any, prompt: Sequence[int], drawn: Sequence[int], stops: Sequence[str]) -> int | None:
    watch = StopRule(frozenset(), tuple(stops)).watch(tokenizer, prompt)
    return next((at for at, token in enumerate(drawn) if watch.sees_end(token)), None)


async def read(
    tokenizer: Any,
    prompt: Sequence[int],
    drawn: Sequence[int],
    *stops: str,
    early_count: int = 0,
    logprobs: bool = False,
    echo: bool = False,
) -> list[worker_pb2.TextPiece]:
    """Return the pieces of one sequence, of which `told` tokens were sent before the end."""
    language = language_of(tokenizer)
    job = SampleJob(
        "r", "", np.array(prompt, np.int32), SamplingParams(stop_strings=tuple(stops)), prompt_logprobs=echo
    )
    reading = Reading()
    reading.begin(language, job, worker_pb2.Reading(logprobs=logprobs, echo=echo))
    for token in drawn[:early_count]:
        reading.drawn(0, DrawnToken(token, -1.0))
    sequence = Drawn(np.array(drawn, np.int32), np.full(len(drawn), -1.0, np.float32), stopped=False)
    scores = np.full(len(prompt), -2.0, np.float32) if echo else None
    await reading.finish(SampleOutcome((sequence,), prompt_logprobs=scores))
    return list(reading.behind(0))


def shown(pieces: Sequence[worker_pb2.TextPiece]) -> str:
    return "".join(piece.content for piece in pieces)


@given(kind=kinds, prompt=texts.filter(bool), drawn=texts)
def test_the_pieces_are_the_additions_to_the_text(kind: str, prompt: str, drawn: str) -> None:
    tokenizer = TOKENIZERS[kind]
    before, behind = tokens_of(tokenizer, prompt), tokens_of(tokenizer, drawn)
    text = IncrementalText(tokenizer, before)
    joined = "".join(text.push(token) for token in behind) + text.rest()
    if decoded(tokenizer, before):
        assert joined == whole_text(tokenizer, before, behind)


@given(kind=kinds, prompt=texts.filter(str.strip), cut=st.integers(0, 3), drawn=texts)
def test_a_character_that_a_prompt_begins_is_the_answers(kind: str, prompt: str, cut: int, drawn: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokens_of(tokenizer, f"a{prompt}{drawn}")
    at = max(1, len(tokens_of(tokenizer, f"a{prompt}")) - cut)
    before, behind = tokens[:at], tokens[at:]
    text = IncrementalText(tokenizer, before)
    joined = "".join(text.push(token) for token in behind) + text.rest()
    beginnings = (decoded(tokenizer, before[:end]) for end in range(at, 0, -1))
    closed = next(beginning for beginning in beginnings if INCOMPLETE not in beginning)
    assert joined == (decoded(tokenizer, tokens).removeprefix(closed) if behind else "")


async def test_a_space_that_the_answer_begins_with_is_in_text_tokens_and_stop_strings(tokenizer: Any) -> None:
    prompt, answer = tokens_of(tokenizer, "a b"), tokens_of(tokenizer, "b a x")[-2:]
    pieces = await read(tokenizer, prompt, answer, logprobs=True)
    assert shown(pieces) == " a x"
    texts = [token.text for piece in pieces for token in piece.tokens]
    assert "".join(texts) == shown(pieces)
    assert end_of(tokenizer, prompt, answer, [" a"]) == 0
    assert shown(await read(tokenizer, prompt, answer, " a")) == ""


@given(kind=kinds, prompt=texts.filter(str.strip), data=st.data())
async def test_sampler_and_reader_find_the_same_stop_at_the_same_token(
    kind: str, prompt: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[kind]
    parts = data.draw(st.lists(st.sampled_from(["a", " b", "x", "漢", "<|turn|>", "hello", " STOP"]), max_size=6))
    stops = data.draw(st.lists(st.sampled_from(["ab", " b", "<|turn|>", "x<|", "漢", "a x", "STOP"]), max_size=3))
    before = tokens_of(tokenizer, prompt)
    drawn = [token for part in parts for token in tokens_of(tokenizer, part)]
    end = end_of(tokenizer, before, drawn, stops)
    kept = drawn if end is None else drawn[: end + 1]
    *pieces, last = await read(tokenizer, before, kept, *stops)
    assert bool(last.end.stop_string) == (end is not None)
    full = whole_text(tokenizer, before, kept)
    assert (end is not None) == any(stop in full for stop in stops)
    visible = full if end is None else full[: min(at for stop in stops if (at := full.find(stop)) >= 0)]
    for special in SPECIAL:
        visible = visible.replace(f" {special}" if kind == "word-piece" else special, "")
    if kind == "word-piece":  # which writes a space before a special token, and hides it with the token
        pieces, visible = [worker_pb2.TextPiece(content=shown(pieces).rstrip(" "))], visible.rstrip(" ")
    assert shown(pieces) == visible


@pytest.mark.parametrize("stop", ["<|turn|>", "a<|turn|>", "<|turn|>b", "a<|turn|>b"])
async def test_a_stop_string_may_hold_special_tokens_that_are_not_shown(stop: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    drawn = [token for part in ("x", "a", "<|turn|>", "b") for token in tokens_of(tokenizer, part)]
    pieces = await read(tokenizer, tokens_of(tokenizer, "a"), drawn, stop)
    assert (shown(pieces), pieces[-1].end.stop_string) == ("xa<|turn|>b".partition(stop)[0], stop)
    assert end_of(tokenizer, [], drawn, [stop]) == (3 if stop.endswith("b") else 2)


def test_bytes_behind_a_character_that_make_none_do_not_take_its_text_away() -> None:
    tokenizer = TOKENIZERS["llama2"]
    bytes_of = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "漢".encode()]
    text = IncrementalText(tokenizer, tokens_of(tokenizer, "a"))
    (x,) = tokens_of(tokenizer, "x")[-1:]
    pieces = [text.push(token) for token in [*bytes_of, bytes_of[0], x]]
    assert pieces[2] == "漢"
    assert pieces[4].startswith(INCOMPLETE)
    assert pieces[4].endswith("x")
