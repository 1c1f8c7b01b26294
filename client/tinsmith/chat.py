"""`tinsmith chat`: a conversation with a model of a server, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated, NoReturn

import typer

from tinsmith.api import ApiError, base_url_from_environment
from tinsmith.completions import AnswerPart, Completions, Message, SamplingOptions
from tinsmith.console import make_console
from tinsmith.credentials import api_key_from_environment

INTERRUPTED = 130
PROMPT = "> "
LAYOUT = "\n\t"
"""The control characters that an answer may send to a terminal. Others can rewrite what is on it."""


def chat(
    model: Annotated[str, typer.Argument(help="Base model, promoted name, or tinker:// path of a sampler.")],
    message: Annotated[
        str | None,
        typer.Option(help="Print the answer to this message and exit; else a pipe is read, or the terminal."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message, before the conversation.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens; default: what the model's context leaves.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the most probable token; default: the server's.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="The server; default: TINKER_BASE_URL.")] = None,
) -> None:
    """Chat with a base model, a promoted adapter or a saved sampler; Ctrl-C stops an answer, Ctrl-D ends."""
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
        _fail(str(error))


@dataclass(slots=True)
class Conversation:
    """The messages so far, which each request sends again."""

    completions: Completions
    model: str
    options: SamplingOptions
    messages: list[Message] = field(default_factory=list)

    def answer(self, message: str) -> Generator[AnswerPart, None, None]:
        """Yield the answer in parts, which join the conversation. A message without an answer leaves it."""
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
    _tell(f"{talk.model}: Ctrl-C stops an answer, Ctrl-D ends")
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
    """Print one answer. An error costs this turn only."""
    try:
        _print_answer(talk, message)
    except KeyboardInterrupt:
        print()
    except ApiError as error:
        _tell(f"tinsmith chat: {error}")


def _print_answer(talk: Conversation, message: str) -> None:
    on_terminal = sys.stdout.isatty()
    is_cut = False
    with closing(talk.answer(message)) as parts:
        for part in parts:
            print(shown(part.content, on_terminal=on_terminal), end="", flush=True)
            is_cut = part.is_cut or is_cut
    print()
    if is_cut:
        _tell("(the answer was cut at its largest number of tokens)")


def shown(text: str, *, on_terminal: bool) -> str:
    """Return the text without control characters if it goes to a terminal."""
    if not on_terminal:
        return text
    return "".join(character for character in text if character.isprintable() or character in LAYOUT)


def _tell(sentence: str) -> None:
    make_console(stderr=True).print(sentence)


def _fail(sentence: str) -> NoReturn:
    _tell(f"tinsmith chat: {sentence}")
    raise typer.Exit(1)
