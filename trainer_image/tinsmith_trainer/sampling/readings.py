"""The text of samples, while the samples are drawn. Each sequence grows in pieces.

A sampler passes tokens one by one, or all tokens at the end. If all tokens arrive at the end, the text is the same, but
in fewer pieces. If the prompt is echoed, all pieces are available at the end, when the prompt's logprobs are known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items

from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_trainer.sampling.base import (
    EMPTY_LOGPROB,
    EMPTY_TOKEN,
    DrawnToken,
    SampleJob,
    SampleOutcome,
    Sequence,
    TopkLogprobs,
)
from tinsmith_trainer.sampling.language import Delta, Language, PlainText, TextParser
from tinsmith_trainer.sampling.stops import StopCut, StopRule
from tinsmith_trainer.sampling.token_text import IncrementalText, Tokens, TokenTexts, last_characters, text_of


class Reading:
    """The text of one sample. Used on one event loop only, except for `begin`."""

    def __init__(self) -> None:
        self.tokens = 0  # drawn by all sequences together
        self.with_sequences = False
        self._sequences: Items[SequenceReading] = ()
        self._echo: PromptEcho | None = None
        self._pieces: list[worker_pb2.TextPiece] = []
        self._forgotten = 0
        self._logprob_stage = worker_pb2.LOGPROB_STAGE_UNSPECIFIED
        self._grown = asyncio.Event()

    def begin(self, language: Language, job: SampleJob, request: worker_pb2.Reading) -> None:
        """Prepare the text before the first draw. Thread-safe.

        Raises ValueError for invalid tools or an invalid template, and for an echo with logprobs if the request does
        not ask for the prompt's logprobs.
        """
        if request.echo and request.logprobs and not job.prompt_logprobs:
            raise ValueError("an echo with logprobs needs prompt_logprobs")
        self.with_sequences = request.sequences
        if job.params.changes_logits:
            self._logprob_stage = worker_pb2.BEFORE_MASK
        rule = StopRule.of(job.params, language.eos_token_ids)
        parsers = [_parser(language, job, request) for _ in range(job.num_samples)]
        self._sequences = [
            SequenceReading(language, rule, parser, job.prompt, logprobs=request.logprobs, echoed=request.echo)
            for parser in parsers
        ]
        self._echo = PromptEcho(language, job.prompt.tolist(), request.logprobs) if request.echo else None

    def drawn(self, index: int, token: DrawnToken) -> None:
        self.tokens += 1
        if token.masked_logprobs:
            self._logprob_stage = worker_pb2.AFTER_MASK
        if self._echo is None:
            self._add(index, self._sequences[index].push(token))
        else:
            self._grown.set()  # readers also see the number of tokens, which are charged even if no text follows

    async def finish(self, outcome: SampleOutcome) -> None:
        """Add the parts of the answer that are known only at the end of the sample. A failed sample has no more text.

        The method runs in a thread, because an echo of 131,072 texts takes two seconds and would block the event loop.
        """
        if outcome.masked_logprobs:
            self._logprob_stage = worker_pb2.AFTER_MASK
        for index, pieces in await asyncio.to_thread(self._unsaid, outcome):
            self._add(index, pieces)
        self.tokens = sum(sequence.tokens for sequence in self._sequences)

    def ended(self) -> None:
        """Wake all waiting readers, which then read why the sample ended."""
        self._grown.set()

    @property
    def nbytes(self) -> int:
        """The size of the pieces that no reader has fetched yet, in bytes."""
        return sum(piece.ByteSize() for piece in self._pieces)

    def behind(self, seen: int) -> Items[worker_pb2.TextPiece]:
        """Return the pieces after the first `seen` pieces, and forget earlier pieces."""
        del self._pieces[: max(0, seen - self._forgotten)]
        self._forgotten = max(self._forgotten, seen)
        return tuple(self._pieces)

    async def grown(self, seen: int, timeout_seconds: float) -> None:
        """Wait until more than `seen` pieces exist, until the text is complete, or until the timeout.

        If the prompt is echoed, also return after more tokens were drawn.
        """
        if self._forgotten + len(self._pieces) > seen:
            return
        self._grown.clear()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._grown.wait()
        except TimeoutError:
            return

    def _unsaid(self, outcome: SampleOutcome) -> list[tuple[int, list[worker_pb2.TextPiece]]]:
        found = []
        echo = self._echo.piece(outcome) if self._echo is not None and outcome.sequences else None
        for index, sequence in enumerate(outcome.sequences):
            reading = self._sequences[index]
            pieces = []
            if echo is not None and self._echo is not None:
                pieces.append(worker_pb2.TextPiece())  # each sequence has its own pieces
                pieces[0].CopyFrom(echo)
                if len(sequence.tokens) == 0:
                    self._echo.end(pieces[0])
            drawn = drawn_tokens(sequence.tokens.tolist(), sequence.logprobs.tolist(), sequence.topk_logprobs)
            for token in drawn[reading.tokens :]:
                pieces += reading.push(token)
            found.append((index, pieces + reading.finish(sequence)))
        return found

    def _add(self, index: int, pieces: Items[worker_pb2.TextPiece]) -> None:
        for piece in pieces:
            piece.sequence = index
            if piece.tokens or piece.HasField("end"):
                piece.logprob_stage = self._logprob_stage
            self._pieces.append(piece)
        if pieces:
            self._grown.set()


class PromptEcho:
    """The prompt, shown at the beginning of an answer."""

    def __init__(self, language: Language, prompt: Items[int], logprobs: bool) -> None:
        self._language = language
        self._prompt = prompt
        self._logprobs = logprobs

    def piece(self, outcome: SampleOutcome) -> worker_pb2.TextPiece:
        """Return the prompt's text.

        An incomplete last character is left out, because the drawn text may complete this character.
        """
        if not self._logprobs:
            _, rest = last_characters(self._prompt, self._language.tokenizer)
            whole = self._prompt[: len(self._prompt) - len(rest)]
            return worker_pb2.TextPiece(content=text_of(self._language.tokenizer, whole, special=False))
        tokens, texts = self._scored(outcome), self._texts()
        for token, text in zip(tokens, texts, strict=True):
            token.width = len(text)
        return worker_pb2.TextPiece(content="".join(texts), tokens=tokens)

    def end(self, piece: worker_pb2.TextPiece) -> None:
        """Add the incomplete character that `piece` leaves out, if no text is drawn."""
        context, rest = last_characters(self._prompt, self._language.tokenizer)
        left = text_of(self._language.tokenizer, context + rest)[len(text_of(self._language.tokenizer, context)) :]
        piece.content += left
        if piece.tokens:
            piece.tokens[-1].width += len(left)

    def _texts(self) -> list[str]:
        """Return the text that each token of the prompt adds."""
        text, hidden = IncrementalText(self._language.tokenizer), self._language.special_tokens
        return ["" if token in hidden else text.push(token) for token in self._prompt]

    def _scored(self, outcome: SampleOutcome) -> list[worker_pb2.TokenText]:
        assert outcome.prompt_logprobs is not None, "begin() has seen that they are asked for"
        texts, hidden = TokenTexts(self._language.tokenizer), self._language.special_tokens
        rest = drawn_tokens(
            self._prompt[1:], outcome.prompt_logprobs[1:].tolist(), _after_the_first(outcome.topk_prompt_logprobs)
        )
        scored = [worker_pb2.TokenText(text=texts(self._prompt[0])), *(scored_text(texts, token) for token in rest)]
        shown = next((at for at, token in enumerate(self._prompt) if token not in hidden), 0)
        scored[shown].text = texts.first(self._prompt[shown])
        return scored


class SequenceReading:
    """The conversion of a sequence's tokens to text, which ends at a stop and passes through the parser.

    Stop strings are searched in the text that the sampler uses, which includes the texts of special tokens. The texts
    of special tokens are then removed for readers of plain text. With `echoed`, the prompt is shown first, and the
    token that ends the sequence also has a logprob in the answer. Programs that read a prompt's logprobs, such as
    lm-evaluation-harness, expect one token after the prompt.
    """

    def __init__(
        self, language: Language, rule: StopRule, parser: TextParser, prompt: Tokens, *, logprobs: bool, echoed: bool
    ) -> None:
        self.tokens = 0
        self._rule = rule
        self._parser = parser
        self._texts = TokenTexts(language.tokenizer) if logprobs else None
        self._ends = echoed
        self._text = IncrementalText(language.tokenizer, prompt, echoed=echoed)
        self._cut = StopCut(rule.strings)
        # Readers of plain text do not see the special tokens that a response template uses.
        self._hidden = language.special_tokens if isinstance(parser, PlainText) else frozenset()

    def push(self, drawn: DrawnToken) -> list[worker_pb2.TextPiece]:
        self.tokens += 1
        is_end = drawn.token in self._rule.token_ids
        text, hidden = ("", "") if is_end else self._text_and_hidden(drawn.token)
        pieces = []
        if self._texts is not None and (self._ends or not is_end):
            scored = scored_text(self._texts, drawn)
            scored.width = len(text)
            pieces.append(worker_pb2.TextPiece(tokens=[scored]))
        shown = self._cut.push(text) + self._cut.push(hidden, hidden=True)
        return pieces + (_pieces(self._parser.feed(shown)) if shown else [])

    def _text_and_hidden(self, token: int) -> tuple[str, str]:
        if token in self._hidden:
            return self._text.rest(), self._text.push(token)
        return self._text.push(token), ""

    def finish(self, sequence: Sequence) -> list[worker_pb2.TextPiece]:
        rest = (self._cut.push(self._text.rest()) if self.tokens else "") + self._cut.rest()
        pieces = _pieces([*self._parser.feed(rest), *self._parser.finish()])
        reason = wire_pb2.STOP if sequence.stopped else wire_pb2.LENGTH
        end = worker_pb2.SequenceEnd(reason=reason, stop_string=self._cut.found, tokens=self.tokens)
        return [*pieces, worker_pb2.TextPiece(end=end)]


def scored_text(texts: TokenTexts, drawn: DrawnToken) -> worker_pb2.TokenText:
    scored = worker_pb2.TokenText(text=texts(drawn.token), logprob=drawn.logprob)
    if (top := drawn.top_logprobs) is not None:
        for token, logprob in zip(top.token_ids[0].tolist(), top.logprobs[0].tolist(), strict=True):
            if (token, logprob) != (EMPTY_TOKEN, EMPTY_LOGPROB):  # without the empty logprob, token 0 is a normal token
                scored.likeliest.append(worker_pb2.TokenText(text=texts(token), logprob=logprob))
    return scored


def drawn_tokens(tokens: Items[int], logprobs: Items[float], top: TopkLogprobs | None) -> list[DrawnToken]:
    """Return the tokens of a finished sequence as DrawnToken objects, the form of tokens that arrive one by one."""
    rows = [
        None if top is None else TopkLogprobs(top.token_ids[i : i + 1], top.logprobs[i : i + 1])
        for i in range(len(tokens))
    ]
    return [DrawnToken(*drawn) for drawn in zip(tokens, logprobs, rows, strict=True)]


def _after_the_first(top: TopkLogprobs | None) -> TopkLogprobs | None:
    return None if top is None else TopkLogprobs(top.token_ids[1:], top.logprobs[1:])


def _parser(language: Language, job: SampleJob, request: worker_pb2.Reading) -> TextParser:
    parser = language.message_parser(job.prompt, request.tools) if request.chat else None
    return PlainText() if parser is None else parser


def _pieces(deltas: Items[Delta]) -> list[worker_pb2.TextPiece]:
    return [
        worker_pb2.TextPiece(
            content=delta.content,
            reasoning=delta.reasoning,
            tool_call=worker_pb2.ToolCall(name=delta.name, arguments=delta.arguments) if delta.name else None,
        )
        for delta in deltas
    ]
