"""Grammars of constraints, compiled by llguidance for the tokenizer of the model.

llguidance treats some added tokens, such as `<tool_call>`, as special: no text matches such a token, so a grammar must
name the token's ID.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import Grammar, GrammarState
from tinsmith_trainer.sampling.constraints.constraint import Constraint, JsonText, RegexText, TaggedTexts
from tinsmith_trainer.sampling.constraints.xml_parameters import xml_parameters
from tinsmith_trainer.sampling.language import Language, Tag

MOST_KEPT = 32
"""The number of compiled grammars that are kept for later jobs. A large schema takes some megabytes."""
FIRST_MASKS_SECONDS, MASK_SECONDS = 1.0, 0.002
"""The processor time for the masks of a sequence: one second, and some for each token.

Other sequences wait for a mask. With a vocabulary of 150,000 tokens, the masks of a schema take 0.06 ms on average, and
those of a hostile pattern 13 ms.
"""
LONGEST_REASON = 400
PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")
SHOWN_GRAMMAR = re.compile(r" *\d+ \| ")
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The layout of JSON: one line, as Python's `json.dumps` writes it, and chat templates write tool calls.

With any white space, a model that is unsure may write white space until `max_tokens`.
"""
FORM = "%llguidance {}"
REASONING = r"/(.|\n)*/"
AFTER_REASONING = r"/\n{0,2}/"


class Grammars:
    """The compiled grammars of a model. Thread-safe."""

    def __init__(self, language: Language, vocab_size: int) -> None:
        self._language = language
        self._vocab_size = vocab_size
        self._guard = threading.Lock()
        self._known: OrderedDict[Constraint, Grammar] = OrderedDict()

    def compiled(self, constraint: Constraint) -> Grammar:
        """Return the compiled grammar. This may take a second. Raises UserError for an unsupported constraint."""
        with self._guard:
            if constraint in self._known:
                self._known.move_to_end(constraint)
                return self._known[constraint]
        grammar = self._compile(constraint)
        with self._guard:
            self._known[constraint] = grammar
            while len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        return grammar

    def _compile(self, constraint: Constraint) -> Grammar:
        lark = lark_of(constraint, self._special_tokens)
        matcher = self.matcher(lark)
        if matcher.is_error():
            raise UserError(f"{_name_of(constraint)} is not supported: {_reason(matcher)}")
        return _Compiled(lark, matcher, self._language.eos_token_ids)

    def matcher(self, lark: str) -> Any:
        """Return llguidance's matcher of a grammar. It may be in an error state."""
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        backend = getattr(self._language.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("The model's tokenizer has no tokenizer.json, so texts cannot be forced.")
        eos = self._language.eos_token_ids[0] if self._language.eos_token_ids else None
        try:
            return LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=eos)
        except ValueError as error:
            raise UserError(f"Texts cannot be forced with this model's tokenizer: {error}") from error

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        added = self._language.tokenizer.added_tokens_decoder
        return {
            one.content: token
            for token, one in added.items()
            if one.special or (one.content.startswith("<") and one.content.endswith(">"))
        }


class _Compiled(Grammar):
    def __init__(self, lark: str, matcher: Any, end_tokens: Sequence[int]) -> None:
        self.lark = lark
        self._matcher = matcher
        self._end_tokens = tuple(end_tokens)

    @override
    def begin(self) -> GrammarState:
        return _State(self._matcher.deep_copy(), self._end_tokens)


class _State(GrammarState):
    def __init__(self, matcher: Any, end_tokens: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._budget_seconds = FIRST_MASKS_SECONDS

    @override
    def allowed(self) -> NDArray[np.int32]:
        started = time.thread_time()
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32).copy()
        self._budget_seconds -= time.thread_time() - started - MASK_SECONDS
        if self._budget_seconds < 0:
            raise UserError("The constraint is too slow: its masks take longer than the model. Simplify its patterns.")
        if self._matcher.is_error():
            raise UserError(f"The constraint is too complex: {_reason(self._matcher)}")
        bits = words.view(np.uint32)
        if self._end_tokens:
            is_end = bits[self._end_tokens[0] // 32] >> (self._end_tokens[0] % 32) & 1
            for token in self._end_tokens[1:]:  # llguidance knows one end-of-sequence token
                bits[token // 32] = bits[token // 32] & ~np.uint32(1 << token % 32) | is_end << token % 32
        if not bits.any():
            raise UserError("The constraint allows no further token. Check it for parts that exclude each other.")
        return words

    @override
    def take(self, token: int) -> bool:
        if token in self._end_tokens:
            return True
        if not self._matcher.consume_token(token):
            raise UserError(f"The constraint is too complex: {_reason(self._matcher)}")
        is_complete: bool = self._matcher.is_stopped()
        return is_complete


def lark_of(constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar in llguidance's form of Lark. By the first line vLLM and SGLang recognize the form."""
    rules = _rules_of("text", constraint.text, special_tokens)
    if constraint.calls is None:
        rules.append("body: text")
    else:
        rules += ["body: text | calls", *_rules_of("calls", constraint.calls, special_tokens)]
    if not constraint.reasoning_end:
        return "\n".join([FORM, "start: body", *rules])
    token = special_tokens.get(constraint.reasoning_end)
    if token is None:
        end = _regex(re.escape(constraint.reasoning_end))
        reasoning = f"reasoning[lazy]: {REASONING[:-1]}{end}/"
    else:
        reasoning = f"reasoning: {REASONING} <[{token}]>"
    return "\n".join([FORM, f"start: reasoning {AFTER_REASONING} body", reasoning, *rules])


def _rules_of(name: str, text: JsonText | RegexText | TaggedTexts, special_tokens: Mapping[str, int]) -> list[str]:
    match text:
        case JsonText(schema):
            return [f"{name}: {_json(schema)}"]
        case RegexText(regex):
            return [f"{name}: /{_regex(regex)}/"]
        case TaggedTexts(tags, single):
            each, names = f"{name}_tag", [f"{name}_tag{number}" for number in range(len(tags))]
            rules = [
                rule for one, tag in zip(names, tags, strict=True) for rule in _tag_rules(one, tag, special_tokens)
            ]
            return [
                f"{name}: {each}" if single else rf'{name}: {each} ("\n" {each})*',
                f"{each}: {' | '.join(names)}",
                *rules,
            ]


def _tag_rules(name: str, tag: Tag, special_tokens: Mapping[str, int]) -> list[str]:
    def literal(text: str) -> str:
        return _literal(text, special_tokens)

    if tag.form == "json":
        return [f"{name}: {literal(tag.begin)} {_json(tag.schema)} {literal(tag.end)}"]
    parameters = xml_parameters(f"{name}_parameters", json.loads(tag.schema), literal, _json)
    return [f"{name}: {literal(tag.begin)} {name}_parameters {literal(tag.end)}", *parameters]


def _json(schema: str) -> str:
    return "%json " + json.dumps({**json.loads(schema), "x-guidance": LAYOUT})


def _regex(regex: str) -> str:
    """Return the regular expression as it stands between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL).replace("\n", r"\n")


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return the parts of a fixed text: special tokens by ID, and the text between them."""
    if not special_tokens:
        return json.dumps(text, ensure_ascii=False)
    longest_first = sorted(special_tokens, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return " ".join(
        f"<[{special_tokens[part]}]>" if part in special_tokens else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def _name_of(constraint: Constraint) -> str:
    match constraint.text:
        case JsonText():
            return "The JSON schema"
        case RegexText():
            return "The regular expression"
        case TaggedTexts():
            return "The JSON schema of a tool"


def _reason(matcher: Any) -> str:
    """Return the library's reason in one line, without the grammar in which the library shows the place."""
    lines = itertools.takewhile(lambda line: not SHOWN_GRAMMAR.match(line), str(matcher.get_error()).splitlines())
    reason = " ".join(line.strip() for line in lines if line.strip(" ^"))
    return PLACE.sub("", reason)[:LONGEST_REASON]
