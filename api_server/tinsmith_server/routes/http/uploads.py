"""The reception of bodies: the size limit of each route, the minimum rate, and the wait for memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tinsmith_server.errors import BodyTooLarge
from tinsmith_server.routes.http.dependencies import ServicesDep, Tenant, path_of
from tinsmith_server.services.accounts.body_budget import Account
from tinsmith_server.settings import Settings

KIB = 2**10
MIB = 2**20

# The limit for bodies with little more than names.
SMALL_BYTES = 64 * KIB
# The limit for bodies with names and metadata.
LARGER_BYTES = 256 * KIB

BODY_BYTES: Mapping[str, int | str] = {
    "/telemetry": MIB,
    "/check_needs": SMALL_BYTES,
    "/create_session": LARGER_BYTES,
    "/session_heartbeat": SMALL_BYTES,
    "/sessions/{session_id}/finish": SMALL_BYTES,
    "/sessions/{session_id}/project": SMALL_BYTES,
    "/checkpoints/search": LARGER_BYTES,
    "/sessions/search": LARGER_BYTES,
    "/create_model": LARGER_BYTES,
    "/get_info": SMALL_BYTES,
    "/unload_model": SMALL_BYTES,
    "/delete_model": SMALL_BYTES,
    "/forward_backward": "max_body_bytes",
    "/forward": "max_body_bytes",
    "/create_custom_loss": LARGER_BYTES,
    "/optim_step": SMALL_BYTES,
    "/save_weights": LARGER_BYTES,
    "/save_weights_for_sampler": LARGER_BYTES,
    "/save_weights_external": LARGER_BYTES,
    "/load_weights": LARGER_BYTES,
    "/create_sampling_session": SMALL_BYTES,
    "/join_sampling_session": SMALL_BYTES,
    "/create_sampling_client": SMALL_BYTES,
    "/asample": "max_sample_bytes",
    "/sample": "max_sample_bytes",
    "/retrieve_future": SMALL_BYTES,
    # The body may name all samples that were fetched since the last poll.
    "/retrieve_futures": 4 * MIB,
    "/cancel_future": SMALL_BYTES,
    # 100 points with 64 names each.
    "/training_runs/{run_id}/metrics": MIB,
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": SMALL_BYTES,
    "/copy_weights": SMALL_BYTES,
    "/weights_info": SMALL_BYTES,
    "/promotions/{name}": SMALL_BYTES,
    "/recordings": SMALL_BYTES,
    "/keys": SMALL_BYTES,
    "/tenants/{tenant}/limits": SMALL_BYTES,
    "/external_weights_upload_start": SMALL_BYTES,
    "/external_weights_upload_finish": SMALL_BYTES,
    "/uploads/{token}/{name}": "max_upload_bytes",
    "/oai/api/v1/completions": "max_sample_bytes",
    "/oai/api/v1/chat/completions": "max_sample_bytes",
    "/oai/recordings/{recording_id}/v1/completions": "max_sample_bytes",
    "/oai/recordings/{recording_id}/v1/chat/completions": "max_sample_bytes",
    "/anthropic/api/v1/messages": "max_sample_bytes",
    "/anthropic/api/v1/messages/count_tokens": "max_sample_bytes",
}
"""The size limit of each route, or the name of the setting that holds the limit.

Routes that are not listed read no body.
"""

# A small body may take this long. A larger body must arrive at this rate on average, and end within the limit. The SDK
# itself gives up after 120 s.
GRACE_SECONDS = 15.0
LEAST_BYTES_PER_SECOND = 16 * KIB
LONGEST_SECONDS = 300.0

PIECE_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True)
class Body:
    """A received body. If the body is over the limit, `complete` is False and only the beginning was read."""

    content: bytes
    complete: bool


def limit_of(path: str, settings: Settings) -> int:
    """Return the limit of a route.

    `path` is the route's template, without the prefix.
    """
    limit = BODY_BYTES[path]
    return limit if isinstance(limit, int) else int(getattr(settings, limit))


def over(path: str, limit: int) -> str:
    named = BODY_BYTES[path]
    setting = f" (setting {named})" if isinstance(named, str) else ""
    return f"the body is over the limit of {limit} bytes of {path}{setting}"


async def body_account(tenant: Tenant, services: ServicesDep) -> AsyncIterator[Account]:
    """Return an account that stays open until the answer is sent, because the parsed body needs memory, too."""
    with services.admission.bodies.account(tenant) as account:
        yield account


AccountDep = Annotated[Account, Depends(body_account)]


async def receive(request: Request, limit: int, account: Account, beginning: int = 0, *, grows: bool = False) -> Body:
    """Return the body. If the body is over the limit, return its first `beginning` bytes.

    `grows` is True for a body that is unpacked after its reception. A body that `grows` keeps its priority in the
    memory budget until the caller calls `account.received()`. Without this priority, bodies that need memory for
    unpacking could wait for each other without end.

    The rest of a body over the limit is read and dropped, because a client that is disconnected while it sends would
    not see the answer. Raises TooBusy after a long wait for memory, and 408 if the sender is too slow.
    """
    declared = request.headers.get("content-length", "")
    kept_bytes = beginning if declared.isdecimal() and int(declared) > limit else limit
    content, size = _Content(kept_bytes), 0
    if kept_bytes:
        async for part in _in_time(request, account):
            size += len(part)
            content.add(part)
            if size > kept_bytes:
                break
    if not grows:
        account.received()
    complete = kept_bytes == limit and size <= limit
    gathered = content.whole()
    return Body(gathered if complete else gathered[:beginning], complete)


async def parts(request: Request, limit: int, account: Account) -> AsyncIterator[bytes]:
    """Yield the parts of a file's body. The memory of a part is released when the next part is requested.

    A body that arrives at the minimum rate may take any time. Raises BodyTooLarge, TooBusy, and 408 for a slower
    sender.
    """
    # This body may take hours, but does not delay other bodies, because it holds the memory of one part at most.
    account.received()
    size = 0
    async for part in _in_time(request, account, longest_seconds=math.inf):
        size += len(part)
        if size > limit:
            raise BodyTooLarge(over(path_of(request), limit))
        yield part
        account.give_back(len(part))


class _Content:
    """The first `most` bytes that were received, in pieces of one size.

    Pieces of one size avoid gaps in memory. The gaps between growing buffers would increase the use of memory by half.
    """

    def __init__(self, most: int) -> None:
        self._room = most
        self._pieces: list[bytes] = []
        self._last = bytearray()

    def add(self, part: bytes) -> None:
        kept = part[: self._room]
        self._room -= len(kept)
        self._last += kept
        if len(self._last) >= PIECE_BYTES:
            self._pieces.append(bytes(self._last))
            self._last.clear()

    def whole(self) -> bytes:
        return b"".join([*self._pieces, self._last])


async def _in_time(
    request: Request, account: Account, longest_seconds: float = LONGEST_SECONDS
) -> AsyncIterator[bytes]:
    """Wait for memory, and yield each part as it arrives. A small body has only one part."""
    loop = asyncio.get_running_loop()
    more, received, seconds = True, 0, 0.0
    while more:
        started = loop.time()
        allowed = min(GRACE_SECONDS + received / LEAST_BYTES_PER_SECOND, longest_seconds)
        try:
            async with asyncio.timeout(allowed - seconds):
                message = await request.receive()
        except TimeoutError:
            raise _too_slow(received, seconds + loop.time() - started, longest_seconds) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        seconds += loop.time() - started
        received += len(part)
        # The wait for memory does not count against the sender.
        await account.take(len(part))
        yield part


def _too_slow(received: int, seconds: float, longest_seconds: float) -> HTTPException:
    end = f", and within {longest_seconds:g} s" if math.isfinite(longest_seconds) else ""
    detail = (
        f"{received} bytes of the body arrived in {seconds:.0f} s: a body must arrive at {LEAST_BYTES_PER_SECOND} "
        f"bytes a second after {GRACE_SECONDS:g} s{end}"
    )
    return HTTPException(408, detail, headers={"connection": "close"})
