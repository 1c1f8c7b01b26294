"""An assistant's message apart, while it is drawn: its reasoning, its content and its tool calls.

What reads it is transformers' `ResponseParser`, by the response template of the model; here its events become what
clients of chat dialects are sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from tinsmith_trainer.sampling.language import Delta, TextParser

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
