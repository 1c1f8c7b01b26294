"""Answers to text requests: a whole answer, or a stream of events. If a client disconnects, its samples are stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import Request, Response
from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import get_logger, redact
from tinsmith_server.routes.http.event_stream import EventStream, while_connected
from tinsmith_server.services.assembly import Services
from tinsmith_server.services.polling.texts import Generation, stop_all
from tinsmith_server.wire.dialects.texts import Message, TextRequest, TokenUsage

log = get_logger(__name__)

T = TypeVar("T")

IndexedPiece = tuple[int, worker_pb2.TextPiece]


class EventWriter(Protocol):
    """A writer of the events in a dialect's stream."""

    def begin(self, usage: TokenUsage) -> Iterable[bytes]: ...
    def of(self, index: int, piece: worker_pb2.TextPiece) -> Iterable[bytes]: ...
    def end(self, usage: TokenUsage) -> Iterable[bytes]: ...
    def error_event(self, error: TinsmithError) -> bytes:
        """Return the event for an error that occurs after the answer has begun."""


class TextGeneration:
    """The samples of one text request. The owner of this object must call `end`."""

    def __init__(self, services: Services, key: str | None, request: TextRequest) -> None:
        self._services = services
        self._key = key
        self._request = request
        self._generations: Sequence[Generation] = ()

    async def begin(self, tenant: str) -> None:
        """Submit the samples. Raises the errors of `Texts.begin`."""
        self._generations = await self._services.texts.begin(tenant, self._request)

    @property
    def usage(self) -> TokenUsage:
        parts = [generation.usage for generation in self._generations]
        return TokenUsage(
            sum(part.prompt for part in parts), sum(part.sampled for part in parts), sum(part.cached for part in parts)
        )

    async def pieces(self) -> AsyncIterator[IndexedPiece]:
        """Yield pieces, each with the number of its choice. Choices are numbered across all prompts.

        All choices are sampled at the same time, but the pieces are yielded prompt by prompt.
        """
        for number, generation in enumerate(self._generations):
            async for pieces in generation.pieces():
                for piece in pieces:
                    yield number * self._request.choices + piece.sequence, piece

    async def messages(self) -> list[Message]:
        found = [Message() for _ in range(len(self._generations) * self._request.choices)]
        async for index, piece in self.pieces():
            found[index].add(piece)
        return found

    async def end(self) -> None:
        """Stop the samples that still run, and charge the sampled tokens."""
        await stop_all(self._generations)
        self._services.admission.charge_sampled(self._key, self.usage.sampled)


async def whole_answer(
    request: Request,
    drawing: TextGeneration,
    tenant: str,
    answer: Callable[[list[Message], TokenUsage], dict[str, Any]],
) -> Response:
    """Return the complete answer. Raises the error of a failed sample."""

    async def drawn() -> list[Message]:
        try:
            await drawing.begin(tenant)
            return await drawing.messages()
        finally:
            await drawing.end()

    messages = await while_connected(request.receive, drawn())
    return Response(orjson.dumps(answer(messages, drawing.usage)), media_type="application/json")


async def streamed_answer(request: Request, drawing: TextGeneration, tenant: str, writer: EventWriter) -> Response:
    """Return a stream after its first piece is known.

    Raises the error of a sample that fails before its first piece.
    """
    pieces = drawing.pieces()

    async def begun() -> IndexedPiece:
        try:
            await drawing.begin(tenant)
            return await anext(pieces)
        except BaseException:
            await drawing.end()
            raise

    first = await while_connected(request.receive, begun())
    return EventStream(_events(first, pieces, drawing, writer), drawing.end)


async def _events(
    first: IndexedPiece, pieces: AsyncIterator[IndexedPiece], drawing: TextGeneration, writer: EventWriter
) -> AsyncIterator[bytes]:
    for event in (*writer.begin(drawing.usage), *writer.of(*first)):
        yield event
    try:
        async for index, piece in pieces:
            for event in writer.of(index, piece):
                yield event
    except TinsmithError as error:
        log.warning("stream failed", reason=redact(str(error)))
        yield writer.error_event(error)
        return
    for event in writer.end(drawing.usage):
        yield event
