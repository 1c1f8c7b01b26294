"""`tinsmith chat`: a conversation with a model, streamed from the server's OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from tinsmith.api import ApiError, KeyRefused, RequestRefused, ServerClient, key_refusal, transport_error
from tinsmith.console import BaseUrl, fail, print_error
from tinsmith.credentials import api_key_from_environment, base_url_from_environment

OPENAI_PATH = "/oai/api/v1"
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""The longest wait for the next part of an answer. The first part may wait until the base model is loaded."""
DATA, DONE = "data:", "[DONE]"

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The parameters of an answer. For a parameter with the value None, the server uses the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer. `is_cut` is true for the last part of an answer that reached the token limit."""

    content: str = ""
    reasoning: str = ""
    is_cut: bool = False


class Completions(ServerClient):
    """The server's OpenAI-compatible endpoint. Each call raises ApiError if the server refuses the call."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        timeout = httpx.Timeout(CONNECT_SECONDS, read=ANSWER_SECONDS)
        super().__init__(base_url, api_key, OPENAI_PATH, timeout)

    def require_model(self, name: str) -> None:
        """Raise RequestRefused if the server has no base model, promoted name or sampler path with this name."""
        try:
            self._require_success(self._http.get(f"/models/{quote(name)}"))
        except httpx.HTTPError as error:
            raise transport_error(self.base_url, error) from error

    def stream(
        self, model: str, messages: Sequence[Message], options: SamplingOptions
    ) -> Generator[AnswerPart, None, None]:
        """Yield the parts of the answer while the server samples. Closing the iterator stops the sampling."""
        body = {"model": model, "messages": list(messages), "stream": True, **options.as_json()}
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                self._require_success(response)
                yield from self._parts(response)
        except httpx.HTTPError as error:
            raise transport_error(self.base_url, error) from error

    def _parts(self, response: httpx.Response) -> Iterator[AnswerPart]:
        for line in response.iter_lines():
            if not line.startswith(DATA):
                continue
            event = line.removeprefix(DATA).strip()
            if event == DONE:
                return
            yield self._part(event)
        raise ApiError(f"the answer from {self.base_url} ended early; try again")

    def _part(self, event: str) -> AnswerPart:
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise RequestRefused(f"{self.base_url} ended the answer: {chunk['error']['message']}")
            (choice, *_) = chunk["choices"]
            delta, is_cut = choice["delta"], choice["finish_reason"] == "length"
            return AnswerPart(delta.get("content") or "", delta.get("reasoning_content") or "", is_cut)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ApiError(f"{self.base_url} does not answer in OpenAI's format: {event[:100]}") from error

    def _require_success(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        message = _message_of(response)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise KeyRefused(key_refusal(self.base_url, message, has_key=self._has_key))
        raise RequestRefused(f"{self.base_url} refuses: {message}")


def _message_of(response: httpx.Response) -> str:
    """Return the message of an error in OpenAI's format.

    For a message in another format, return the status and the first line.
    """
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, TypeError, KeyError):
        first_line = next(iter(response.text.splitlines()), "")
        return (
            f"{response.request.method} {response.request.url.path} answers {response.status_code} {first_line[:100]}"
        )


INTERRUPTED = 130
PROMPT = "> "
LAYOUT = "\n\t"
"""Control characters that an answer may send to a terminal.

Other control characters could overwrite text on the screen.
"""


def chat(
    model: Annotated[str, typer.Argument(help="Base model, promoted name, or tinker:// path of a sampler.")],
    message: Annotated[
        str | None,
        typer.Option(help="Print the answer to this message and exit. Default: read a pipe, or chat in the terminal."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message, before the conversation.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens; default: the rest of the model's context.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="Sampling temperature; 0 always takes the most probable token. Default: the server's."
        ),
    ] = None,
    base_url: BaseUrl = None,
) -> None:
    """Chat with a base model, a promoted adapter or a saved sampler.

    Ctrl-C stops an answer, and Ctrl-D ends the chat.
    """
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read()
    if message is not None and not message.strip():
        raise typer.BadParameter("the message is empty: give --message, or write it to standard input")
    try:
        with Completions(base_url or base_url_from_environment(), api_key_from_environment()) as completions:
            talk = Conversation(completions, model, SamplingOptions(max_tokens, temperature))
            if system is not None:
                talk.messages.append({"role": "system", "content": system})
            if message is None:
                completions.require_model(model)
                _converse(talk)
            else:
                _answer_once(talk, message)
    except ApiError as error:
        fail("chat", str(error))


@dataclass(slots=True)
class Conversation:
    """The messages of the conversation so far. Each request contains all messages."""

    completions: Completions
    model: str
    options: SamplingOptions
    messages: list[Message] = field(default_factory=list)

    def answer(self, message: str) -> Generator[AnswerPart, None, None]:
        """Yield the answer in parts, and add the answer to the conversation.

        If no answer arrives, the user's message is removed from the conversation.
        """
        self.messages.append({"role": "user", "content": message})
        content = ""
        try:
            with closing(self.completions.stream(self.model, self.messages, self.options)) as parts:
                for part in parts:
                    content += part.content
                    yield part
        finally:
            if content:
                self.messages.append({"role": "assistant", "content": content})
            else:
                self.messages.pop()


def _answer_once(talk: Conversation, message: str) -> None:
    try:
        _print_answer(talk, message)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _converse(talk: Conversation) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  # line editing and history in input()
    print_error(f"{talk.model}: Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            message = input(PROMPT)
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if message.strip():
            _take_turn(talk, message)


def _take_turn(talk: Conversation, message: str) -> None:
    """Print one answer. An error ends only the present turn, not the conversation."""
    try:
        _print_answer(talk, message)
    except KeyboardInterrupt:
        print()
    except ApiError as error:
        print_error(f"tinsmith chat: {error}")


def _print_answer(talk: Conversation, message: str) -> None:
    on_terminal = sys.stdout.isatty()
    is_cut = False
    with closing(talk.answer(message)) as parts:
        for part in parts:
            print(shown(part.content, on_terminal=on_terminal), end="", flush=True)
            is_cut = part.is_cut or is_cut
    print()
    if is_cut:
        print_error("(the answer reached its token limit)")


def shown(text: str, *, on_terminal: bool) -> str:
    """Return the text in printable form. For a terminal, control characters are removed."""
    if not on_terminal:
        return text
    return "".join(character for character in text if character.isprintable() or character in LAYOUT)
