"""A base model's language, read from the model's files: conversations to tokens, and answers to messages."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.constraints.tool_formats import REASONING_FIELDS, call_tags, reasoning_end
from tinsmith_trainer.sampling.continuations import CannotExtend, continuation
from tinsmith_trainer.sampling.language import Delta, Tag, TextParser
from tinsmith_trainer.wire.unknown_fields import unknown_fields_of

log = structlog.get_logger(__name__)

RESPONSE_PARSER = "transformers.utils.chat_parsing"
"""The module of transformers with the parser of messages.

The module is missing before transformers 5.13, so it is missing in images with SGLang, NeMo RL and Miles.
"""

PREFIX_TOKENS = 4096
"""The maximum number of tokens at a prompt's end that are searched for the beginning of an answer."""

CHARACTERS_A_TOKEN = 32
"""A number of characters per token that is higher than the average of every text.

English text has 4 or 5 characters per token.
"""


@dataclass(frozen=True)
class ModelLanguage:
    """The `Language` of a model.

    `directory` holds the model's files. `context_tokens` limits the length of a prompt.
    """

    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    directory: Path
    context_tokens: int

    def render(self, request: worker_pb2.RenderPromptRequest) -> list[int]:
        if reason := unknown_fields_of(request):
            raise UserError(reason)
        if request.WhichOneof("prompt") == "text":
            return self._tokens(request.text, add_special_tokens=True)
        messages: list[Any] = _read("messages", request.conversation, list)
        return self._tokens(self._rendered(messages, self._options(request)), add_special_tokens=False)

    def extend(self, request: worker_pb2.RenderPromptRequest) -> list[int]:
        if reason := unknown_fields_of(request):
            raise UserError(reason)
        options = self._options(request)

        def rendered(messages: Sequence[Mapping[str, Any]], begins_answer: bool) -> str:
            try:
                return self._rendered(list(messages), {**options, "add_generation_prompt": begins_answer})
            except UserError as error:
                raise CannotExtend(worker_pb2.HISTORY_REWRITTEN) from error

        ends = {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in self.eos_token_ids}
        found = continuation(rendered, _read("messages", request.conversation, list), request.recorded, ends)
        tokens = self._tokens(found.text, add_special_tokens=False)
        if tokens[0] != found.end:
            raise CannotExtend(worker_pb2.ANSWER_NOT_CLOSED)
        return tokens[1:] if found.end_is_recorded else tokens

    @cached_property
    def response_template(self) -> Mapping[str, Any] | None:
        """The format of an assistant's message for transformers.

        The format comes from the model's files. If the model's files have no format, the format comes from
        transformers' table of model types. The value is None if both sources lack a format, or if this version of
        transformers cannot parse messages.
        """
        if find_spec(RESPONSE_PARSER) is None:
            log.warning("transformers has no parser of answers: reasoning and tool calls stay in the content")
            return None
        own: Mapping[str, Any] | None = getattr(self.tokenizer, "response_template", None)
        return own if own is not None else _known_template(self._model_type)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The tokens that have no text."""
        return frozenset(token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special)

    @cached_property
    def image_token(self) -> int | None:
        token = json.loads((self.directory / "config.json").read_text()).get("image_token_id")
        return token if isinstance(token, int) else None

    def message_parser(self, prompt: NDArray[np.int32], tools: str) -> TextParser | None:
        if self.response_template is None:
            return None
        return MessageParser(self.response_template, self._end_of(prompt), json.loads(tools or "[]"))

    def call_tags(self, tools: str, name: str) -> tuple[Tag, ...]:
        return call_tags(self.response_template, _read("tools", tools or "[]", list), name)

    def reasoning_end(self, prompt: NDArray[np.int32]) -> str:
        return reasoning_end(self.response_template, self._end_of(prompt))

    def _end_of(self, prompt: NDArray[np.int32]) -> str:
        text: str = self.tokenizer.decode(prompt[-PREFIX_TOKENS:].tolist(), skip_special_tokens=False)
        return text

    @property
    def _model_type(self) -> str:
        return str(json.loads((self.directory / "config.json").read_text()).get("model_type", ""))

    def _options(self, request: worker_pb2.RenderPromptRequest) -> dict[str, Any]:
        """Return the options of the chat template. Raises UserError."""
        tools = _read("tools", request.tools or "[]", list)
        variables = _read("chat_template_kwargs", request.variables or "{}", dict)
        if self.tokenizer.chat_template is None:
            raise UserError(
                "This model has no chat template, so a conversation cannot be put to it. Send a text as a completion."
            )
        if taken := sorted(_parameters(self.tokenizer.apply_chat_template) & variables.keys()):
            raise UserError(f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request.")
        return {
            "tools": tools or None,
            "add_generation_prompt": not request.continue_last,
            "continue_final_message": request.continue_last,
            "tokenize": False,
            **variables,
        }

    def _rendered(self, messages: list[Any], options: dict[str, Any]) -> str:
        """Render the messages.

        Templates differ in the form of a call's arguments: most templates expect an object, but some, such as
        DeepSeek's template, expect a text.
        """
        refusals: list[Exception] = []
        for form in (messages, _with_arguments_as_texts(messages)):
            try:
                text: str = self.tokenizer.apply_chat_template(form, **options)
                return text
            except Exception as error:  # templates are programs, which raise errors of jinja2 or any error of Python
                refusals.append(error)
        first = refusals[0]
        raise UserError(
            f"The model's chat template refused the conversation: {first or type(first).__name__}."
        ) from first

    def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text.

        Raises UserError for a text that is far too long. A text that is too long is not tokenized, because tokenization
        takes seconds for a few MB.
        """
        most = CHARACTERS_A_TOKEN * self.context_tokens
        if len(text) > most:
            raise UserError(
                f"The prompt has {len(text)} characters, and the model's context is {self.context_tokens} tokens; at "
                f"most {CHARACTERS_A_TOKEN} characters for each of them are looked at. Shorten the prompt."
            )
        # A prompt with its first token twice is unlike any training data, and the answer does not show the reason.
        has_first = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens and not has_first)["input_ids"]
        return tokens


def _with_arguments_as_texts(messages: list[Any]) -> list[Any]:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _read(what: str, text: str, kind: type[Any]) -> Any:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{what}: {error}.") from error
    if not isinstance(content, kind):
        raise UserError(f"{what} is no {kind.__name__}.")
    return content


def _known_template(model_type: str) -> Mapping[str, Any] | None:
    """Return the format from the table of transformers' own server.

    The table has no public name; a test checks that the table exists. transformers 5.13 and 5.14 have the parser but no
    such table.
    """
    from transformers.cli.serving import utils

    templates: Mapping[Sequence[str], Mapping[str, Any]] = getattr(utils, "_RESPONSE_TEMPLATE_FALLBACKS", {})
    return next((template for types, template in templates.items() if model_type in types), None)


class MessageParser(TextParser):
    """A parser that uses transformers' response templates.

    White space around a field of a message is removed. A tool call that cannot be parsed becomes content.
    """

    def __init__(self, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """Create a parser. `prefix` is the text of the prompt, which may already contain the beginning of the message.

        Raises ValueError for an invalid template.
        """
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: Any = ResponseParser(dict(template), prefix, tools=[dict(tool) for tool in tools])
        self._edges: dict[str, _Edges] = {}
        # The text that the parser received and has not shown; None after the parser has given up.
        self._raw: str | None = ""
        self._body = ""  # the text of a field that is parsed only when it is complete

    @override
    def feed(self, text: str) -> list[Delta]:
        if self._raw is None:
            return [Delta(content=text)] if text else []
        self._raw += text
        try:
            return self._deltas(self._parser.feed(text))
        except Exception:  # parsers do not expect every text that a model writes
            return self._give_up()

    @override
    def finish(self) -> list[Delta]:
        if self._raw is None:
            return []
        try:
            return self._deltas(self._parser.finalize()[1])
        except Exception:  # parsers do not expect every text that a model writes
            return self._give_up()

    def _give_up(self) -> list[Delta]:
        """Return the raw text of an invalid tool call as content, so that the reader sees the call."""
        raw, self._raw = self._raw or "", None
        return [Delta(content=raw)]

    def _deltas(self, events: Sequence[Mapping[str, Any]]) -> list[Delta]:
        deltas = []
        for event in events:
            field = event["field"]
            match event["type"]:
                case "region_chunk" if not event["dirty"]:
                    self._raw = (self._raw or "").partition(event["text"])[2]
                    deltas.append(_text(field, self._edges.setdefault(field, _Edges()).push(event["text"])))
                case "region_open":
                    self._body = ""
                case "region_chunk":
                    self._body += event["text"]
                # a call may have just closed the content, which the parser still reports as open
                case "region_close" if field != "content":
                    self._raw = ""
                    if field == "tool_calls":
                        deltas.extend(_calls(event["value"]) or [Delta(content=self._body)])
        return [delta for delta in deltas if delta != Delta()]


class _Edges:
    """A filter that removes white space at both ends of a text, which arrives in pieces.

    White space inside the text is returned with the next piece.
    """

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def push(self, piece: str) -> str:
        text = self._held + piece if self._begun else piece.lstrip()
        if not text:
            return ""
        self._begun = True
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown


def _text(field: str, text: str) -> Delta:
    """Return the text of a message's field. Fields that exist in no API dialect are left out."""
    if field in REASONING_FIELDS:
        return Delta(reasoning=text)
    return Delta(content=text) if field == "content" else Delta()


def _arguments(value: Any) -> Any:
    """Return the arguments of a tool call as an object.

    Some models write the object as a JSON string, as in OpenAI's API.

    Values that are neither objects nor texts are returned unchanged.
    """
    try:
        content = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return content if isinstance(content, dict) else value


def _calls(value: Any) -> list[Delta]:
    """Return the tool calls, or no calls if one call is invalid.

    Response templates return a JSON object as the model wrote it.
    """
    deltas = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            return []
        arguments = _arguments(function.get("arguments", {}))
        deltas.append(Delta(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
    return deltas
