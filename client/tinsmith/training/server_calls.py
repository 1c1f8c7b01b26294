"""Calls that a Tinsmith server has and the SDK has no function for. They use the HTTP layer of the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

import httpx
import tinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from tinsmith.training.errors import NotOffered, TrainingError

NO_SUCH_CALL = ("Not Found", "Method Not Allowed")
"""Texts in the answers of servers without a call.

A server with the call answers with the missing name, not with these texts.
"""

Service = tinker.ServiceClient | tinker.RestClient
Explain = Callable[[int, object], TrainingError | None]
"""A function that returns the error for a status and a body, or None if the error of the SDK says enough."""


def send(
    service: Service | tinker.TrainingClient | None,
    method: str,
    address: str,
    body: Mapping[str, Any] | None = None,
    *,
    explain: Explain,
    **more: Any,
) -> Any:
    """Send a request and return the JSON of the answer.

    The default of `service` is a client with the server and key from the environment. Raises the error that `explain`
    returns, or the error of the SDK.
    """
    holder = (service or tinker.RestClient()).holder
    content = more if body is None else {"body": body, **more}

    async def call() -> Any:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            request: Any = getattr(client, method.lower())
            return (await request(address, cast_to=httpx.Response, **content)).json()

    request: Future[Any] = holder.run_coroutine_threadsafe(call()).future()
    try:
        return request.result()
    except tinker.APIStatusError as error:
        raise explain(error.status_code, error.body) or error from error


def refusal(status: int, body: object, *, refused: type[TrainingError], not_offered: str) -> TrainingError | None:
    """Return `refused` with the server's message, or NotOffered with `not_offered` if the server has no such call."""
    detail = str(body.get("detail", "")) if isinstance(body, Mapping) else ""
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and (
        not detail or any(words in detail for words in NO_SUCH_CALL)
    ):
        return NotOffered(not_offered)
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY):
        return refused(detail)
    return None
