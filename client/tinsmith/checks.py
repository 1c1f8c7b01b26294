"""What must be right before an SDK program can reach a server, and the cure for each thing that is not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tinsmith.addresses import find_mistake
from tinsmith.api import (
    API_KEY_VARIABLE,
    BASE_URL_VARIABLE,
    Api,
    ApiError,
    CertificateRefused,
    KeyRefused,
    SpeaksHttp,
    Unreachable,
)
from tinsmith.tokenizers import find_tokenizer, tokenizer_id

OLDEST_SDK = (0, 38)
"""Older ones send what this release of the server does not read yet."""

KEY_PREFIXES = ("tml-", "eyJ")
"""The SDK refuses every other key before it sends a request."""

MAKE_A_KEY = (
    "make one where the server runs, with `tinsmith keys create NAME` "
    "(on Kubernetes: kubectl exec deployment/RELEASE-api-server -- tinsmith keys create NAME)"
)
OFFER_A_MODEL = "apply a TrainingSession, or give the chart an entry of `models`"
"""A server without Kubernetes does not start without one."""

RETRY_SECONDS = 0.2


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A failure has a cure: what to type or change."""

    check: str
    status: Status
    detail: str
    cure: str | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a program would run with.

    `environment_url` is TINKER_BASE_URL, if it is set; if not, `base_url` is where a server would listen by default.
    """

    base_url: str
    environment_url: str | None
    api_key: str | None


def diagnose(surroundings: Surroundings, *, wait_seconds: float = 0.0) -> Iterator[Finding]:
    """Every check in the order in which a program would stumble; what cannot be judged is skipped.

    A server that does not answer is asked again for `wait_seconds`.
    """
    yield _check_address(surroundings)
    yield _check_sdk()
    if find_mistake(surroundings.base_url) is not None:
        yield Finding("server", Status.SKIPPED, "needs an address")
        return
    with Api(surroundings.base_url, surroundings.api_key) as api:
        server = _wait_for_server(api, wait_seconds)
        yield server if surroundings.environment_url is not None else _as_hint(server, api)
        if server.status is not Status.OK:
            yield Finding("key", Status.SKIPPED, "needs a server that answers")
            return
        yield (key := _check_key(api, surroundings.api_key))
        if key.status is not Status.OK:
            yield Finding("tokenizers", Status.SKIPPED, "the server lists its models only for a key that works")
            return
        yield from _check_tokenizers(api)


def _check_address(surroundings: Surroundings) -> Finding:
    url = surroundings.base_url
    if surroundings.environment_url is None:
        detail = f"{BASE_URL_VARIABLE} is not set: programs go to the vendor's service, not to a server of yours"
        cure = f"export {BASE_URL_VARIABLE}={url}, or the other URL that `tinsmith serve` printed"
        return Finding("address", Status.FAILED, detail, cure)
    if (mistake := find_mistake(url)) is not None:
        return Finding("address", Status.FAILED, mistake.detail, mistake.cure)
    return Finding("address", Status.OK, f"programs go to {surroundings.environment_url}")


def _check_sdk() -> Finding:
    wanted = ".".join(map(str, OLDEST_SDK))
    installed = _sdk_version()
    if installed is None:
        return Finding("SDK", Status.FAILED, "tinker is not installed", f"pip install 'tinker>={wanted}'")
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST_SDK:
        detail = f"tinker {installed} is older than what the server speaks ({wanted})"
        return Finding("SDK", Status.FAILED, detail, f"pip install 'tinker>={wanted}'")
    return Finding("SDK", Status.OK, f"tinker {installed}")


def _sdk_version() -> str | None:
    try:
        return version("tinker")
    except PackageNotFoundError:
        return None


def _wait_for_server(api: Api, wait_seconds: float) -> Finding:
    deadline = time.monotonic() + wait_seconds
    while (finding := _check_server(api)).status is Status.FAILED and time.monotonic() < deadline:
        time.sleep(RETRY_SECONDS)
    return finding


def _as_hint(server: Finding, api: Api) -> Finding:
    """Nobody named the default address, so its silence is not a failure."""
    if server.status is Status.OK:
        return server
    return Finding("server", Status.SKIPPED, f"needs an address; there is none at {api.base_url}, the default one")


def _check_server(api: Api) -> Finding:
    try:
        api.check_health()
    except CertificateRefused as error:
        cure = "export SSL_CERT_FILE=FILE with the authority that signed it, or give the server one that is known"
        return Finding("server", Status.FAILED, str(error), cure)
    except Unreachable as error:
        cure = f"start one with `tinsmith serve`, or correct {BASE_URL_VARIABLE}; behind a proxy, set NO_PROXY"
        return Finding("server", Status.FAILED, str(error), cure)
    except SpeaksHttp as error:
        cure = f"export {BASE_URL_VARIABLE}=http{api.base_url.removeprefix('https')}"
        return Finding("server", Status.FAILED, str(error), cure)
    except ApiError as error:
        return Finding(
            "server", Status.FAILED, str(error), f"correct {BASE_URL_VARIABLE}: another program has that port"
        )
    return Finding("server", Status.OK, f"{api.base_url} answers")


def _check_key(api: Api, api_key: str | None) -> Finding:
    if api_key is None:
        cure = f"{MAKE_A_KEY}, and export {API_KEY_VARIABLE}"
        return Finding("key", Status.FAILED, f"{API_KEY_VARIABLE} is not set", cure)
    if not api_key.startswith(KEY_PREFIXES):
        cure = "use a key of `tinsmith keys create --data DIR`; static ones (TINSMITH_API_KEY) must start with tml- too"
        return Finding("key", Status.FAILED, "the SDK refuses keys that do not start with tml-", cure)
    try:
        api.send_client_config(_sdk_version() or "none")
    except KeyRefused:
        cure = f"{MAKE_A_KEY}; `keys list` shows the living ones"
        return Finding("key", Status.FAILED, "the server does not know this key, or it was revoked", cure)
    except ApiError as error:
        return Finding("key", Status.FAILED, str(error), f"correct {BASE_URL_VARIABLE}: this is no Tinker server")
    return Finding("key", Status.OK, "the server knows it")


def _check_tokenizers(api: Api) -> Iterator[Finding]:
    try:
        served = api.served_models()
    except ApiError as error:
        yield Finding("tokenizers", Status.FAILED, str(error), "look into the server's log")
        return
    if not served:
        yield Finding("models", Status.FAILED, "the server has no base model to train", OFFER_A_MODEL)
    for model in served:
        yield _check_tokenizer(model.name)


def _check_tokenizer(model_name: str) -> Finding:
    check = f"tokenizer of {model_name}"
    identifier = tokenizer_id(model_name)
    found = find_tokenizer(identifier)
    if found is not None:
        return Finding(check, Status.OK, str(found))
    if Path(identifier).is_dir():
        detail = f"the directory {Path(identifier).resolve()} has no tokenizer.json"
        cure = f"put the model's tokenizer there: the SDK prefers a directory {identifier} to the hub's repository"
        return Finding(check, Status.FAILED, detail, cure)
    detail = f"{identifier} is neither a directory in {Path.cwd()} nor in the hub's cache"
    cure = (
        f"`hf download {identifier}` if it is on the hub; else copy the model's tokenizer files to ./{identifier}, or "
        "serve the model under a name that is on the hub"
    )
    return Finding(check, Status.FAILED, detail, cure)
