"""The few HTTP calls that the `tinsmith` command makes to a server, and the detection of a wrong server address."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar
from urllib.parse import quote

import httpx

from tinsmith.credentials import API_KEY_VARIABLE, UnusableKey, check_key

API_PATH = "/api/v1"
NO_SUCH_CALL = "Not Found"
"""The `detail` in a Tinsmith server's answer to an unknown path."""
BASE_PATHS = {
    "/oai/api/v1": "the base URL for clients of OpenAI",
    "/anthropic/api/v1": "which is for clients of Anthropic",
    "/anthropic/api": "the base URL for clients of Anthropic",
    API_PATH: "which the SDK adds",
    "/v1": "the base URL for clients of OpenAI",
}
"""Path endings that users append to a server's address by mistake. A longer ending comes before a shorter ending."""
TIMEOUT_SECONDS = 10.0
UPLOAD_SECONDS = 600.0
RETRY_SECONDS = 1.0
REFUSALS = (408, 413, 422, 429, 503, 507)
"""The statuses for which a Tinsmith server's answer contains a `detail` for people.

An answer without a `detail` comes from another kind of server.
"""

FROM_PROXIES = (502, 504)
"""The statuses of a proxy's answer when the proxy stops waiting for the server.

The server continues with the request.
"""

Returned = TypeVar("Returned")


class ApiError(Exception):
    """An error for a missing or unusable answer. `str(error)` names the server and quotes the answer."""


class Unreachable(ApiError):
    """An error for an address at which nothing answers."""


class SpeaksHttp(ApiError):
    """An error for an https URL of a server that speaks http."""


class CertificateRefused(ApiError):
    """An error for an https server with a certificate that this machine does not trust."""


class CallUnknown(ApiError):
    """An error for a call that the server does not have."""


class RequestRefused(ApiError):
    """An error for a request that the server understands and refuses."""


class NotYet(RequestRefused):
    """An error for a request that the server may accept later, for example after the base model is loaded."""


class KeyRefused(ApiError):
    """An error for a key that is missing, unknown or revoked."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model: the name for clients, and the longest sequence in tokens if the server reports this length."""

    name: str
    max_context_length: int | None


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model that waits for a worker, and the reason for the wait."""

    model_id: str
    seconds: float
    reason: str | None


@dataclass(frozen=True, slots=True)
class StartedUpload:
    """An upload, and the URL for each file name."""

    upload_id: str
    urls: dict[str, str]


@dataclass(frozen=True, slots=True)
class Mistake:
    detail: str
    cure: str


class ServerClient:
    """An HTTP client of the calls below `path`.

    Raises ApiError for an address or a key that cannot be valid for any server.
    """

    def __init__(self, base_url: str, api_key: str | None, path: str, timeout: float | httpx.Timeout) -> None:
        if (mistake := find_mistake(base_url)) is not None:
            raise ApiError(f"{mistake.detail}; {mistake.cure}")
        try:
            check_key(api_key)
        except UnusableKey as error:
            raise ApiError(str(error)) from error
        self.base_url = base_url.rstrip("/")
        self._has_key = bool(api_key)
        headers = {"X-API-Key": api_key} if api_key else {}
        self._http = httpx.Client(base_url=f"{self.base_url}{path}", headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._http.close()


class Api(ServerClient):
    """The server's Tinker API. Each call raises ApiError if the server cannot answer the call."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        super().__init__(base_url, api_key, API_PATH, TIMEOUT_SECONDS)

    def check_health(self) -> None:
        answer = self._call("GET", "/healthz")
        if answer.get("status") != "ok":
            raise ApiError(f"{self.base_url} reports that it is not healthy: {answer}")

    def send_client_config(self, sdk_version: str) -> None:
        """Send the first request that every SDK client sends.

        No earlier request of a client needs the key.
        """
        self._call("POST", "/client/config", {"sdk_version": sdk_version})

    def unmet_needs(self, needs: Mapping[str, object]) -> list[str]:
        """Return a sentence for each need that the named model does not meet. Raises RequestRefused."""
        return [str(sentence) for sentence in self._call("POST", "/check_needs", dict(needs))["unmet"]]

    def served_models(self) -> list[ServedModel]:
        models = self._call("GET", "/get_server_capabilities").get("supported_models", [])
        return [ServedModel(model["model_name"], model.get("max_context_length")) for model in models]

    def loading_models(self) -> list[str]:
        """Return the base models that no worker has described yet.

        A model that no worker has described is being loaded, or was never used.
        """
        models = self._call("GET", "/get_server_capabilities").get("supported_models", [])
        return [model["model_name"] for model in models if model.get("images") is None]

    def waiting_models(self) -> list[WaitingModel]:
        """Return the waiting models of the key's tenant."""
        waiting = self._call("GET", "/waiting_models").get("waiting_models", [])
        return [WaitingModel(model["model_id"], model["waiting_seconds"], model.get("reason")) for model in waiting]

    def training_runs(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest training runs of the key's tenant, newest first."""
        return list(self._call("GET", f"/training_runs?limit={limit}")["training_runs"])

    def training_run(self, run_id: str) -> dict[str, Any]:
        return self._call("GET", f"/training_runs/{quote(run_id)}")

    def run_series(self, run_id: str, after: int = 0, after_reported: int = 0) -> dict[str, Any]:
        """Return the part of a run's series after the cursors, with the cursors of the next call."""
        cursors = f"after={after}&after_reported={after_reported}&limit=10000"
        return self._call("GET", f"/training_runs/{quote(run_id)}/metrics?{cursors}")

    def tokenizer_archive(self, base_model: str) -> bytes:
        """Return the zip file of the base model's tokenizer. Wait while the base model is loaded."""
        path = f"/models/{quote(base_model)}/tokenizer"
        return _until_loaded(lambda: self._answer("GET", path, timeout=UPLOAD_SECONDS)).content

    def start_upload(self, base_model: str, rank: int) -> StartedUpload:
        """Start the upload of an adapter for this base model. The adapter may change any module of the base model."""
        body = {"base_model": base_model, "lora_config": {"rank": rank}}
        started = self._call("POST", "/external_weights_upload_start", body)
        return StartedUpload(started["upload_id"], started["urls"])

    def send_file(self, url: str, path: Path) -> None:
        with path.open("rb") as file:
            self._call("PUT", url, content=file, timeout=UPLOAD_SECONDS)

    def finish_upload(self, upload_id: str) -> str:
        """Return the path of the checkpoint that the server makes from the files.

        Wait while the base model is loaded.
        """
        path, body = "/external_weights_upload_finish", {"upload_id": upload_id}
        answer = _until_loaded(lambda: self._call("POST", path, body, timeout=UPLOAD_SECONDS))
        return str(answer["tinker_path"])

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        content: BinaryIO | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        response = self._answer(method, path, body, content=content, timeout=timeout)
        try:
            answer = response.json()
        except ValueError as error:
            raise ApiError(f"{self.base_url} does not speak the Tinker protocol: {_summary(response)}") from error
        if not isinstance(answer, dict):
            raise ApiError(f"{self.base_url} does not speak the Tinker protocol: {_summary(response)}")
        return answer

    def _answer(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        content: BinaryIO | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, content=content, timeout=timeout)
        except httpx.HTTPError as error:
            raise transport_error(self.base_url, error) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise KeyRefused(key_refusal(self.base_url, _sentence(response), has_key=self._has_key))
        if response.status_code in FROM_PROXIES:
            raise NotYet(f"{self.base_url} has not answered in time: {_summary(response)}")
        if response.status_code in REFUSALS and (detail := _detail(response)) is not None:
            refusal = NotYet if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else RequestRefused
            raise refusal(f"{self.base_url} refuses: {detail}")
        if response.status_code == httpx.codes.NOT_FOUND and (detail := _detail(response)) not in (None, NO_SUCH_CALL):
            raise RequestRefused(f"{self.base_url} refuses: {detail}")
        if response.status_code == httpx.codes.NOT_FOUND:
            raise CallUnknown(f"{self.base_url} does not speak the Tinker protocol: {_summary(response)}")
        try:
            return response.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise ApiError(f"{self.base_url} does not speak the Tinker protocol: {_summary(response)}") from error


def _until_loaded(call: Callable[[], Returned]) -> Returned:
    """Repeat the call while the server loads the base model.

    Raises NotYet if the base model is not loaded within UPLOAD_SECONDS.
    """
    deadline = time.monotonic() + UPLOAD_SECONDS
    while True:
        try:
            return call()
        except NotYet:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def transport_error(base_url: str, error: httpx.HTTPError) -> ApiError:
    """Return the error for a request that got no complete answer."""
    if "WRONG_VERSION_NUMBER" in str(error):
        return SpeaksHttp(f"the server at {base_url} speaks http, not https")
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return CertificateRefused(f"the certificate of {base_url} is not trusted: {error}")
    return Unreachable(f"nothing answers at {base_url}: {error or type(error).__name__}")


def key_refusal(base_url: str, reason: str, *, has_key: bool) -> str:
    """Return the message for a 401. `reason` is the server's own text."""
    if not has_key:
        return f"{base_url} requires a key, and {API_KEY_VARIABLE} is not set"
    return f"{base_url} refuses the key: {reason}"


def is_here(base_url: str) -> bool:
    """Return whether the address belongs to this machine."""
    host = httpx.URL(base_url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_mistake(url: str) -> Mistake | None:
    """Return what is wrong with the URL, or None if the URL is usable."""
    if "://" not in url:
        return Mistake(f"{url} has no http:// or https://", f"put http:// in front: http://{url}")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return Mistake(f"{url} is not a URL: {error}", "write it as http://HOST:PORT")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        return Mistake(f"{url} is not an http URL", "write it as http://HOST:PORT")
    bare = url.rstrip("/")
    for path, reason in BASE_PATHS.items():
        if bare.endswith(path):
            return Mistake(f"{url} ends in {path}", f"leave out {path}, {reason}: {bare.removesuffix(path)}")
    return None


def _sentence(response: httpx.Response) -> str:
    """Return the server's `detail`, or a summary of an answer that has no `detail`."""
    return _detail(response) or _summary(response)


def _detail(response: httpx.Response) -> str | None:
    try:
        return str(response.json()["detail"])
    except (ValueError, TypeError, KeyError):
        return None


def _summary(response: httpx.Response) -> str:
    first_line = next(iter(response.text.splitlines()), "")
    return f"{response.request.method} {response.request.url.path} answers {response.status_code} {first_line[:100]}"
