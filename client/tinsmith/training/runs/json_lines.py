"""Examples in JSONL files. Each reported mistake names the file and the line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from tinsmith.files import NoJson, numbered_lines, parse_line, without_empty
from tinsmith.training.errors import BadData

Message: TypeAlias = dict[str, str]
"""A message with a role and content."""
ROLES = ("system", "user", "assistant", "tool")
EXAMPLE_KEYS = ("messages", "prompt", "completion", "text", "chosen", "rejected", "answer")
MAX_REPORTED = 10


class BadExample(ValueError):
    """An error for a line that is not an example. `str(error)` is the reason."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and a completion. Only the completion is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text in which every token is learned."""

    text: str


SftExample: TypeAlias = Conversation | Completion | Text


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt. Each answer is a whole conversation or a completion."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt, and the expected answer for a grader."""

    prompt: str | list[Message]
    answer: str


Example = TypeVar("Example")


@dataclass(frozen=True, slots=True)
class Located(Generic[Example]):
    """An example, and its source as `file:line`."""

    example: Example
    location: str


def read_examples(file: Path, parse: Callable[[Mapping[str, Any]], Example]) -> list[Located[Example]]:
    """Read all examples. Empty lines are skipped. Raises BadData. The message lists up to ten wrong lines."""
    found: list[Located[Example]] = []
    wrong: list[str] = []
    for number, line in _lines(file):
        try:
            found.append(Located(parse(_record(line)), f"{file}:{number}"))
        except BadExample as error:
            wrong.append(f"{file}:{number}: {error}")
    if wrong:
        more = f"\nand {len(wrong) - MAX_REPORTED} more lines" if len(wrong) > MAX_REPORTED else ""
        raise BadData("\n".join(wrong[:MAX_REPORTED]) + more)
    if not found:
        raise BadData(f"{file} has no examples")
    return found


def digest_of_files(files: Sequence[Path | None]) -> str:
    """Return a digest of the contents of the files.

    A resumed run compares this digest with the digest of the earlier run.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"" if file is None else hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def parse_sft(record: Mapping[str, Any]) -> SftExample:
    """Parse an example for supervised fine-tuning. Raises BadExample."""
    if "messages" in record:
        _only(record, "messages")
        return Conversation(_messages(record["messages"], "messages", ends_with_answer=True))
    if "prompt" in record and "completion" in record:
        _only(record, "prompt", "completion")
        return Completion(_string(record, "prompt"), _string(record, "completion"))
    if "text" in record:
        _only(record, "text")
        return Text(_string(record, "text"))
    raise BadExample(f"needs messages, prompt and completion, or text; it has {_names(record)}")


def parse_dpo(record: Mapping[str, Any]) -> Preference:
    """Parse a preference. Raises BadExample."""
    missing = [name for name in ("prompt", "chosen", "rejected") if name not in record]
    if missing:
        raise BadExample(f"no {missing[0]}; it has {_names(record)}")
    _only(record, "prompt", "chosen", "rejected")
    chosen, rejected = (_answered(record, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadExample("chosen and rejected are the same")
    return Preference(chosen, rejected)


def parse_answered(record: Mapping[str, Any]) -> AnsweredPrompt:
    """Parse a prompt with an expected answer. Raises BadExample."""
    missing = [name for name in ("prompt", "answer") if name not in record]
    if missing:
        raise BadExample(f"no {missing[0]}; it has {_names(record)}")
    _only(record, "prompt", "answer")
    answer = record["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadExample("answer must be a string or a number")
    prompt = record["prompt"]
    return AnsweredPrompt(prompt if isinstance(prompt, str) else _messages(prompt, "prompt"), str(answer))


def _answered(record: Mapping[str, Any], name: str) -> Conversation | Completion:
    prompt, answer = record["prompt"], record[name]
    if isinstance(prompt, str) and isinstance(answer, str):
        return Completion(_string(record, "prompt"), _string(record, name))
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, "prompt")
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _messages(answer, name)
    if [message["role"] for message in after] != ["assistant"]:
        raise BadExample(f"{name} must be a string, or one message of the assistant")
    return Conversation([*before, *after])


def _messages(value: Any, name: str, *, ends_with_answer: bool = False) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadExample(f"{name} must be a list of messages")
    messages = [_message(message, f"{name}[{number}]") for number, message in enumerate(value)]
    if ends_with_answer and messages[-1]["role"] != "assistant":
        raise BadExample(f"the last message of {name} has role {messages[-1]['role']}; it must be assistant")
    return messages


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        raise BadExample(f"{name} must have one of the roles {', '.join(ROLES)}")
    if not isinstance(value.get("content"), str):
        raise BadExample(f"the content of {name} is not a string; this command supports only text")
    if unknown := sorted(without_empty(value).keys() - {"role", "content"}):
        raise BadExample(f"{name} has {unknown[0]}, which this command does not support")
    return {"role": value["role"], "content": value["content"]}


def _string(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise BadExample(f"{name} is not a string")
    if not value and name != "prompt":
        raise BadExample(f"{name} is empty")
    return value


def _only(record: Mapping[str, Any], *names: str) -> None:
    if unknown := sorted(record.keys() - set(names)):
        raise BadExample(f"{unknown[0]} cannot be combined with {' and '.join(names)}")


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(sorted(record)) or "nothing"


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        return numbered_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _record(line: str) -> Mapping[str, Any]:
    """Return the keys of an example. `id` and keys with empty values are left out."""
    try:
        record = parse_line(line)
    except NoJson as error:
        raise BadExample(str(error)) from error
    if not isinstance(record, dict):
        raise BadExample("not a JSON object")
    record.pop("id", None)
    return without_empty(record, *EXAMPLE_KEYS)
