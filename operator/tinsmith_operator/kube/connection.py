"""Connections to the Kubernetes API: credentials, an HTTP session for Kopf's watches, and hooks for Kopf's requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException

from tinsmith_operator.api.names import MANAGER
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.resources import ApiCall, namespace_of, parse_call
from tinsmith_operator.kube.watch_stream import EventSeen, ListAnswered, ListBroken, watched_response

# Kopf reads the token once per login. The kubelet replaces the token file long before the token expires.
WATCH_LOGIN_SECONDS = 600.0
USER_AGENT = MANAGER
Observe = Callable[[ApiCall, str], None]
"""A function that is called for each finished request, with the status code of the answer or `error`."""

Turn = Callable[[], Coroutine[Any, Any, None]]
"""A function that waits until a read may be sent."""


async def load_configuration() -> Configuration:
    """Read $KUBECONFIG, the pod's service account, or the default kubeconfig. The first source that exists is used.

    Raises OperatorError.

    A service account's token is read again every minute, because the kubelet replaces the token.
    """
    configuration = Configuration()
    try:
        if "KUBECONFIG" not in os.environ:
            try:
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                return configuration
            except ConfigException:
                pass
        file = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=file, client_configuration=configuration
        )
    except (ConfigException, OSError) as error:
        raise OperatorError(
            f"No credentials for the Kubernetes API: {error}. Run the operator in a pod with a service account, or set "
            "KUBECONFIG."
        ) from error
    return configuration


def trace(observe: Observe, on_list: ListAnswered | None = None, turn: Turn | None = None) -> aiohttp.TraceConfig:
    """Return hooks for all requests of a session.

    - `on_list`: called for each failed list.
    - `turn`: awaited before each request for a list is sent.
    """

    def finished(url: Any, method: str, code: str) -> None:
        call = parse_call(method, url.path, url.query.get("watch") == "true")
        observe(call, code)
        if on_list is not None and call.verb == "list" and code != "200":
            on_list(namespace_of(url.path), call.resource, code, None, "continue" not in url.query)

    async def on_start(_session: Any, _context: SimpleNamespace, params: aiohttp.TraceRequestStartParams) -> None:
        is_watch = params.url.query.get("watch") == "true"
        if turn is not None and parse_call(params.method, params.url.path, is_watch).verb == "list":
            await turn()

    async def on_end(_session: Any, _context: SimpleNamespace, params: aiohttp.TraceRequestEndParams) -> None:
        status = getattr(params.response, "answered", params.response.status)
        finished(params.url, params.method, str(status))

    async def on_error(_session: Any, _context: SimpleNamespace, params: aiohttp.TraceRequestExceptionParams) -> None:
        broken = params.exception
        finished(params.url, params.method, str(broken.status) if isinstance(broken, ListBroken) else "error")

    hooks = aiohttp.TraceConfig()
    hooks.on_request_start.append(on_start)
    hooks.on_request_end.append(on_end)
    hooks.on_request_exception.append(on_error)
    return hooks


@dataclass(frozen=True)
class WatchSession:
    """An HTTP session for Kopf's watches.

    `expires_at` is the time to open the next session. If `expires_at` is None, the next session is opened when the API
    server refuses the login.
    """

    server: str
    http: aiohttp.ClientSession
    expires_at: datetime | None


async def open_watch_session(observe: Observe, on_list: ListAnswered, on_event: EventSeen, turn: Turn) -> WatchSession:
    """Open a session. Call this function in the event loop that uses the session. Kopf closes the session."""
    configuration = await load_configuration()
    token = await configuration.get_api_key_with_prefix("BearerToken")
    client = ApiClient(configuration)
    http = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=client.rest_client.ssl_context),
        headers={"User-Agent": f"{USER_AGENT}-watch", **({"Authorization": token} if token else {})},
        trust_env=True,
        response_class=watched_response(on_list, on_event),
        trace_configs=[trace(observe, on_list, turn)],
    )
    rotates: Final = configuration.refresh_api_key_hook is not None
    expires_at = datetime.now(UTC) + timedelta(seconds=WATCH_LOGIN_SECONDS) if rotates else None
    return WatchSession(configuration.host, http, expires_at)
