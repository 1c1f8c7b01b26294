"""Chat completions of a server, streamed, by its OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from tinsmith.api import ApiError, KeyRefused, RequestRefused, http_client, key_refusal, transport_error

OPENAI_PATH = "/oai/api/v1"
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""Longest wait for the next part of an answer. The first one may wait for a base model that is being loaded."""
DATA, DONE = "data:", "[DONE]"

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Parameters of an answer; None leaves one to the server."""

    max_tokens: int | None = None
    temperature: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """`is_cut` is true for the last part of an answer that reached its largest number of tokens."""

    content: str = ""
    reasoning: str = ""
    is_cut: bool = False


class Completions:
    """The OpenAI-compatible endpoint of the server at `base_url`. Each call raises ApiError if the server refuses."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        timeout = httpx.Timeout(CONNECT_SECONDS, read=ANSWER_SECONDS)
        self._http = http_client(base_url, api_key, OPENAI_PATH, timeout)
        self.base_url = base_url.rstrip("/")
        self._has_key = bool(api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._http.close()

    def require_model(self, name: str) -> None:
        """Raise RequestRefused unless the server has a base model, a promoted name or a sampler path of this name."""
        try:
            self._require_success(self._http.get(f"/models/{quote(name)}"))
        except httpx.HTTPError as error:
            raise transport_error(self.base_url, error) from error

    def stream(
        self, model: str, messages: Sequence[Message], options: SamplingOptions
    ) -> Generator[AnswerPart, None, None]:
        """Yield the answer as it is sampled. Closing the iterator ends the sampling."""
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
        raise ApiError(f"the answer of {self.base_url} ended early; ask again")

    def _part(self, event: str) -> AnswerPart:
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise RequestRefused(f"{self.base_url} ended the answer: {chunk['error']['message']}")
            (choice, *_) = chunk["choices"]
            delta, is_cut = choice["delta"], choice["finish_reason"] == "length"
            return AnswerPart(delta.get("content") or "", delta.get("reasoning_content") or "", is_cut)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ApiError(f"{self.base_url} does not answer as OpenAI's API does: {event[:100]}") from error

    def _require_success(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        message = _message_of(response)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise KeyRefused(key_refusal(self.base_url, message, has_key=self._has_key))
        raise RequestRefused(f"{self.base_url} refuses: {message}")


def _message_of(response: httpx.Response) -> str:
    """Return the message of OpenAI's form of errors, or the status and the first line of anything else."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, TypeError, KeyError):
        first_line = next(iter(response.text.splitlines()), "")
        return (
            f"{response.request.method} {response.request.url.path} answers {response.status_code} {first_line[:100]}"
        )
