"""A base model's language by the files that it came with: conversations to tokens, and answers apart."""

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
from tinsmith_trainer.sampling.language import Delta, TextParser
from tinsmith_trainer.wire.unknown_fields import unknown_fields_of

log = structlog.get_logger(__name__)

RESPONSE_PARSER = "transformers.utils.chat_parsing"
"""The parser's module. transformers before 5.13, which the images of SGLang, NeMo RL and Miles have, lacks it."""

PREFIX_TOKENS = 4096
"""Of the prompt, which are enough to hold what a chat template begins an answer with."""

CHARACTERS_A_TOKEN = 32
"""More than any text has on average: in English there are 4 or 5."""


@dataclass(frozen=True)
class ModelLanguage:
    """The `Language` of a model; `directory` is that of its files, `context_tokens` what a prompt may have at most."""

    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    directory: Path
    context_tokens: int

    def render(self, request: worker_pb2.RenderPromptRequest) -> list[int]:
        if reason := unknown_fields_of(request):
            raise UserError(reason)
        if request.WhichOneof("prompt") == "text":
            return self._tokens(request.text, add_special_tokens=True)
        return self._conversation(
            _read("messages", request.conversation, list),
            _read("tools", request.tools or "[]", list),
            _read("chat_template_kwargs", request.variables or "{}", dict),
            continue_last=request.continue_last,
        )

    @cached_property
    def response_template(self) -> Mapping[str, Any] | None:
        """How an assistant's message is read, in transformers' form: as the model's files say, else as transformers
        knows it of the model's type; None: neither says, or this transformers cannot read messages."""
        if find_spec(RESPONSE_PARSER) is None:
            log.warning("transformers has no parser of answers: reasoning and tool calls stay in the content")
            return None
        own: Mapping[str, Any] | None = getattr(self.tokenizer, "response_template", None)
        return own if own is not None else _known_template(self._model_type)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Those that stand for no text."""
        return frozenset(token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special)

    def message_parser(self, prompt: NDArray[np.int32], tools: str) -> TextParser | None:
        if self.response_template is None:
            return None
        prefix = self.tokenizer.decode(prompt[-PREFIX_TOKENS:].tolist(), skip_special_tokens=False)
        return MessageParser(self.response_template, prefix, json.loads(tools or "[]"))

    @property
    def _model_type(self) -> str:
        return str(json.loads((self.directory / "config.json").read_text()).get("model_type", ""))

    def _conversation(
        self, messages: list[Any], tools: list[Any], variables: dict[str, Any], *, continue_last: bool
    ) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise UserError(
                "This model has no chat template, so a conversation cannot be put to it. Send a text as a completion."
            )
        if taken := sorted(_parameters(self.tokenizer.apply_chat_template) & variables.keys()):
            raise UserError(f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request.")
        options = {
            "tools": tools or None,
            "add_generation_prompt": not continue_last,
            "continue_final_message": continue_last,
            "tokenize": False,
            **variables,
        }
        return self._tokens(self._rendered(messages, options), add_special_tokens=False)

    def _rendered(self, messages: list[Any], options: dict[str, Any]) -> str:
        """Templates disagree on the arguments of a call: most take an object, DeepSeek's and some others a text."""
        refusals: list[Exception] = []
        for form in (messages, _with_arguments_as_texts(messages)):
            try:
                text: str = self.tokenizer.apply_chat_template(form, **options)
                return text
            except Exception as error:  # templates are programs: jinja2's own errors, and any that Python has
                refusals.append(error)
        first = refusals[0]
        raise UserError(
            f"The model's chat template refused the conversation: {first or type(first).__name__}."
        ) from first

    def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises UserError for what is far too long, without making tokens of it: that takes seconds for a few MB."""
        most = CHARACTERS_A_TOKEN * self.context_tokens
        if len(text) > most:
            raise UserError(
                f"The prompt has {len(text)} characters, and the model's context is {self.context_tokens} tokens; at "
                f"most {CHARACTERS_A_TOKEN} characters for each of them are looked at. Shorten the prompt."
            )
        # Twice its first token is a prompt that no model was trained on, and the answer does not show it.
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
    """transformers has them for its own server, under no public name: a test says that they are found there.

    transformers 5.13 and 5.14 have the parser and no such table.
    """
    from transformers.cli.serving import utils

    templates: Mapping[Sequence[str], Mapping[str, Any]] = getattr(utils, "_RESPONSE_TEMPLATE_FALLBACKS", {})
    return next((template for types, template in templates.items() if model_type in types), None)


REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})


class MessageParser(TextParser):
    """Texts of a region come without the white space around it. A call that cannot be read is content, as it is."""

    def __init__(self, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """`prefix` is the text of the prompt, which may have begun the message. Raises ValueError for a template that
        is none."""
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: Any = ResponseParser(dict(template), prefix, tools=[dict(tool) for tool in tools])
        self._edges: dict[str, _Edges] = {}
        # What was fed and not shown yet; None once the parser has given up.
        self._raw: str | None = ""
        self._body = ""  # of the region that is read only when it is whole

    @override
    def feed(self, text: str) -> list[Delta]:
        if self._raw is None:
            return [Delta(content=text)] if text else []
        self._raw += text
        try:
            return self._deltas(self._parser.feed(text))
        except Exception:  # of what a model writes, parsers have not met everything
            return self._give_up()

    @override
    def finish(self) -> list[Delta]:
        if self._raw is None:
            return []
        try:
            return self._deltas(self._parser.finalize()[1])
        except Exception:  # of what a model writes, parsers have not met everything
            return self._give_up()

    def _give_up(self) -> list[Delta]:
        """The model wrote something that is no call; whoever reads it shall see what."""
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
                case "region_close" if field != "content":  # which a call may just have closed, that is still open
                    self._raw = ""
                    if field == "tool_calls":
                        deltas.extend(_calls(event["value"]) or [Delta(content=self._body)])
        return [delta for delta in deltas if delta != Delta()]


class _Edges:
    """White space at the ends of a text is held back: between its pieces it comes with the next one."""

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
    """Fields that no dialect has are shown to nobody."""
    if field in REASONING_FIELDS:
        return Delta(reasoning=text)
    return Delta(content=text) if field == "content" else Delta()


def _arguments(value: Any) -> Any:
    """Return the object that some models write as a JSON string, as OpenAI's API has it; anything else as it is."""
    try:
        content = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return content if isinstance(content, dict) else value


def _calls(value: Any) -> list[Delta]:
    """None at all where one of them is no call: templates leave a JSON object as the model wrote it."""
    deltas = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            return []
        arguments = _arguments(function.get("arguments", {}))
        deltas.append(Delta(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
    return deltas
