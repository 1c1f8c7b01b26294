"""How much of a body each route takes, how fast it must come, and where it waits for room."""

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
from tinsmith_server.routes.dependencies import ServicesDep, Tenant, path_of
from tinsmith_server.services.accounts.body_budget import Account
from tinsmith_server.settings import Settings

KIB = 2**10
MIB = 2**20

# What names things, and little else.
SMALL_BYTES = 64 * KIB
# What may hold metadata, and a name for everything.
LARGER_BYTES = 256 * KIB

BODY_BYTES: Mapping[str, int | str] = {
    "/telemetry": MIB,
    "/create_session": LARGER_BYTES,
    "/session_heartbeat": SMALL_BYTES,
    "/sessions/{session_id}/finish": SMALL_BYTES,
    "/sessions/{session_id}/project": SMALL_BYTES,
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
    # It may name every sample that was fetched since the last one.
    "/retrieve_futures": 4 * MIB,
    "/cancel_future": SMALL_BYTES,
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": SMALL_BYTES,
    "/copy_weights": SMALL_BYTES,
    "/weights_info": SMALL_BYTES,
    "/promotions/{name}": SMALL_BYTES,
    "/external_weights_upload_start": SMALL_BYTES,
    "/external_weights_upload_finish": SMALL_BYTES,
    "/uploads/{token}/{name}": "max_upload_bytes",
    "/oai/api/v1/completions": "max_sample_bytes",
    "/oai/api/v1/chat/completions": "max_sample_bytes",
    "/anthropic/api/v1/messages": "max_sample_bytes",
    "/anthropic/api/v1/messages/count_tokens": "max_sample_bytes",
}
"""By route: the number, or the setting that says it. Bodies of other routes are not read."""

# A body of a few packets may take this long; a longer one must come at this rate on average, and be over in the end.
# The SDK itself gives up after 120 s.
GRACE_SECONDS = 15.0
LEAST_BYTES_PER_SECOND = 16 * KIB
LONGEST_SECONDS = 300.0

PIECE_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True)
class Body:
    """`complete` is False where only the beginning was read: the whole is over the limit."""

    content: bytes
    complete: bool


def limit_of(path: str, settings: Settings) -> int:
    """`path` is a route's template, without the prefix."""
    limit = BODY_BYTES[path]
    return limit if isinstance(limit, int) else int(getattr(settings, limit))


def over(path: str, limit: int) -> str:
    named = BODY_BYTES[path]
    setting = f" (setting {named})" if isinstance(named, str) else ""
    return f"the body is over the limit of {limit} bytes of {path}{setting}"


async def body_account(tenant: Tenant, services: ServicesDep) -> AsyncIterator[Account]:
    """Until the answer is on its way: what was made of the body is as large."""
    with services.admission.bodies.account(tenant) as account:
        yield account


AccountDep = Annotated[Account, Depends(body_account)]


async def receive(request: Request, limit: int, account: Account, beginning: int = 0, *, grows: bool = False) -> Body:
    """The body, or `beginning` bytes of one that is over the limit.

    A body that `grows` is unpacked next, and keeps its place in the budget's order until the caller ends it by
    `account.received()`: bodies that wait for the room to be unpacked into could otherwise wait for each other.

    The rest is left to the connection, which takes it in and forgets it: a client that is cut off while it sends sees
    a broken connection, and not our answer. Raises TooBusy where there is no room for long, and 408 for a sender that
    is too slow.
    """
    declared = request.headers.get("content-length", "")
    wanted = beginning if declared.isdecimal() and int(declared) > limit else limit
    content, size = _Content(wanted), 0
    if wanted:
        async for part in _in_time(request, account):
            size += len(part)
            content.add(part)
            if size > wanted:
                break
    if not grows:
        account.received()
    complete = wanted == limit and size <= limit
    gathered = content.whole()
    return Body(gathered if complete else gathered[:beginning], complete)


async def parts(request: Request, limit: int, account: Account) -> AsyncIterator[bytes]:
    """A file's body as it comes, for who keeps none of it: a part leaves the account when the next one is asked for.

    It may take as long as it likes at the least rate. Raises BodyTooLarge, TooBusy, and 408 for a slower sender.
    """
    # No body that must come whole waits behind it: it holds one part at most, and may take for hours.
    account.received()
    size = 0
    async for part in _in_time(request, account, longest_seconds=math.inf):
        size += len(part)
        if size > limit:
            raise BodyTooLarge(over(path_of(request), limit))
        yield part
        account.give_back(len(part))


class _Content:
    """The first `most` bytes of what has come, in pieces of one size.

    Buffers that grow beside each other are moved again and again: the holes that they left took half as much memory.
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
    """The parts as they come, each with room for it. A small body is one."""
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
        # Waiting for room is not the sender's fault.
        await account.take(len(part))
        yield part


def _too_slow(received: int, seconds: float, longest_seconds: float) -> HTTPException:
    end = f", and within {longest_seconds:g} s" if math.isfinite(longest_seconds) else ""
    detail = (
        f"{received} bytes of the body have come in {seconds:.0f} s: it must come at {LEAST_BYTES_PER_SECOND} bytes a "
        f"second after {GRACE_SECONDS:g} s{end}"
    )
    return HTTPException(408, detail, headers={"connection": "close"})
