"""`tinsmith doctor`: check everything that an SDK program needs to reach a server. Each failure has a remedy."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.text import Text

from tinsmith.api import (
    Api,
    ApiError,
    CallUnknown,
    CertificateRefused,
    KeyRefused,
    SpeaksHttp,
    Unreachable,
    find_mistake,
    is_here,
)
from tinsmith.base_models import find_tokenizer, tokenizer_id
from tinsmith.console import AsJson, BaseUrl, make_console
from tinsmith.credentials import (
    API_KEY_VARIABLE,
    BASE_URL_VARIABLE,
    base_url_from_environment,
    cure_of,
    find_key_mistake,
)

OLDEST_SDK = (0, 38)
"""The oldest version of the SDK that is supported.

Older versions of the SDK send requests that the server cannot read.
"""

KEY_PREFIXES = ("tml-", "eyJ")
"""The prefixes of keys that the SDK accepts. The SDK refuses other keys before the first request."""

MAKE_A_KEY = (
    "make one where the server runs, with `tinsmith keys create NAME --data DIR`; DIR is the server's data directory, "
    "by default tinsmith-data where it was started "
    "(on Kubernetes: kubectl exec deployment/RELEASE-api-server -- tinsmith keys create NAME)"
)
DATA_VARIABLE = "TINSMITH_DATA"
STORE_FILE = "tinsmith.db"
OFFER_A_MODEL = "apply a TrainingSession or a SessionTemplate"
"""The remedy for a server without a model. Outside Kubernetes, a server does not start without a model."""

RETRY_SECONDS = 0.2


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A line of the report. A failed check has a remedy: what to type or change."""

    check: str
    status: Status
    detail: str
    cure: str | None = None


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """The settings that an SDK program would use in this environment.

    `environment_url` is TINKER_BASE_URL if it is set. If TINKER_BASE_URL is not set, `base_url` is the default address
    of a server.
    """

    base_url: str
    environment_url: str | None
    api_key: str | None


def diagnose(
    environment: ClientEnvironment, *, wait_seconds: float = 0.0, needs: Path | None = None
) -> Iterator[CheckResult]:
    """Yield the result of each check, in the order in which a program depends on the checks.

    `needs` is a YAML file with what a program needs of a model.
    If a server does not answer or is loading models, retry for `wait_seconds`.
    """
    yield _check_address(environment)
    yield _check_sdk()
    if find_mistake(environment.base_url) is not None:
        yield CheckResult("server", Status.SKIPPED, "needs an address")
        return
    deadline = time.monotonic() + wait_seconds
    mistake = find_key_mistake(environment.api_key)
    with Api(environment.base_url, None if mistake else environment.api_key) as api:
        server = _wait_for_server(api, deadline)
        yield server if environment.environment_url is not None else _as_hint(server, api)
        if server.status is not Status.OK:
            yield CheckResult("key", Status.SKIPPED, "needs a server that answers")
            return
        if mistake is not None:
            yield CheckResult("key", Status.FAILED, mistake, cure_of(environment.api_key))
            return
        yield (key := _check_key(api, environment.api_key, _cure_for_a_key(environment.base_url)))
        if key.status is not Status.OK:
            yield CheckResult("tokenizers", Status.SKIPPED, "the server lists its models only for a key that works")
            return
        yield from _check_tokenizers(api)
        if needs is not None:
            yield from _check_needs(api, needs)
        yield from _list_loading(api, deadline)
        yield from _list_waiting(api)


def _check_address(environment: ClientEnvironment) -> CheckResult:
    url = environment.base_url
    if environment.environment_url is None:
        detail = f"{BASE_URL_VARIABLE} is not set: programs use the vendor's service, not your server"
        cure = f"export {BASE_URL_VARIABLE}={url}, or the other URL that `tinsmith serve` printed"
        return CheckResult("address", Status.FAILED, detail, cure)
    if (mistake := find_mistake(url)) is not None:
        return CheckResult("address", Status.FAILED, mistake.detail, mistake.cure)
    return CheckResult("address", Status.OK, f"programs use {environment.environment_url}")


def _check_sdk() -> CheckResult:
    oldest = ".".join(map(str, OLDEST_SDK))
    installed = _sdk_version()
    if installed is None:
        return CheckResult("SDK", Status.FAILED, "tinker is not installed", f"pip install 'tinker>={oldest}'")
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST_SDK:
        detail = f"tinker {installed} is older than the server supports ({oldest})"
        return CheckResult("SDK", Status.FAILED, detail, f"pip install 'tinker>={oldest}'")
    return CheckResult("SDK", Status.OK, f"tinker {installed}")


def _sdk_version() -> str | None:
    try:
        return version("tinker")
    except PackageNotFoundError:
        return None


def _wait_for_server(api: Api, deadline: float) -> CheckResult:
    while (result := _check_server(api)).status is Status.FAILED and time.monotonic() < deadline:
        time.sleep(RETRY_SECONDS)
    return result


def _as_hint(server: CheckResult, api: Api) -> CheckResult:
    """Return a skipped check if no server answers at the default address, because that is not a failure."""
    if server.status is Status.OK:
        return server
    return CheckResult(
        "server", Status.SKIPPED, f"no address is set, and no server answers at the default, {api.base_url}"
    )


def _check_server(api: Api) -> CheckResult:
    try:
        api.check_health()
    except CertificateRefused as error:
        cure = (
            "export SSL_CERT_FILE=FILE with the authority that signed it, or use a certificate from a known authority"
        )
        return CheckResult("server", Status.FAILED, str(error), cure)
    except Unreachable as error:
        cure = f"start one with `tinsmith serve`, or correct {BASE_URL_VARIABLE}; behind a proxy, set NO_PROXY"
        return CheckResult("server", Status.FAILED, str(error), cure)
    except SpeaksHttp as error:
        cure = f"export {BASE_URL_VARIABLE}=http{api.base_url.removeprefix('https')}"
        return CheckResult("server", Status.FAILED, str(error), cure)
    except ApiError as error:
        return CheckResult(
            "server", Status.FAILED, str(error), f"correct {BASE_URL_VARIABLE}: another program listens on that port"
        )
    return CheckResult("server", Status.OK, f"{api.base_url} answers")


def _cure_for_a_key(base_url: str) -> str:
    """Return how to make a key.

    Include the data directory if the directory is known and the server runs on this machine.
    """
    data = data_directory_here() if is_here(base_url) else None
    return MAKE_A_KEY if data is None else f"make one with `tinsmith keys create NAME --data {shlex.quote(str(data))}`"


def data_directory_here() -> Path | None:
    """Return the directory in TINSMITH_DATA, or the only subdirectory of this folder with a server's store."""
    if named := os.environ.get(DATA_VARIABLE):
        return Path(named)
    found = list(Path().glob(f"*/{STORE_FILE}"))
    return found[0].parent.absolute() if len(found) == 1 else None


def _check_key(api: Api, api_key: str | None, how_to_make_one: str) -> CheckResult:
    if api_key is None:
        cure = f"{how_to_make_one}, and export {API_KEY_VARIABLE}"
        return CheckResult("key", Status.FAILED, f"{API_KEY_VARIABLE} is not set", cure)
    if not api_key.startswith(KEY_PREFIXES):
        cure = "use a key of `tinsmith keys create --data DIR`; static keys (TINSMITH_API_KEY) must start with tml-"
        return CheckResult("key", Status.FAILED, "the SDK refuses keys that do not start with tml-", cure)
    try:
        api.send_client_config(_sdk_version() or "none")
    except KeyRefused:
        cure = f"{how_to_make_one}; `tinsmith keys list` with the same --data lists the active keys"
        return CheckResult("key", Status.FAILED, "the server does not know this key, or it was revoked", cure)
    except ApiError as error:
        return CheckResult("key", Status.FAILED, str(error), f"correct {BASE_URL_VARIABLE}: this is no Tinker server")
    return CheckResult("key", Status.OK, "the server accepts it")


def _check_tokenizers(api: Api) -> Iterator[CheckResult]:
    try:
        served = api.served_models()
    except ApiError as error:
        yield CheckResult("tokenizers", Status.FAILED, str(error), "see the server's log")
        return
    if not served:
        yield CheckResult("models", Status.FAILED, "the server has no base model to train", OFFER_A_MODEL)
    for model in served:
        yield _check_tokenizer(model.name)


def _check_tokenizer(model_name: str) -> CheckResult:
    check = f"tokenizer of {model_name}"
    identifier = tokenizer_id(model_name)
    found = find_tokenizer(identifier)
    if found is not None:
        return CheckResult(check, Status.OK, str(found))
    if Path(identifier).is_dir():
        detail = f"the directory {Path(identifier).resolve()} has no tokenizer.json"
        cure = f"put the model's tokenizer there: the SDK prefers a directory {identifier} to the hub's repository"
        return CheckResult(check, Status.FAILED, detail, cure)
    detail = f"{identifier} is neither a directory in {Path.cwd()} nor in the hub's cache"
    cure = (
        f"run `tinsmith tokenizer {model_name}` to fetch it from the server, or `hf download {identifier}` from the hub"
    )
    return CheckResult(check, Status.FAILED, detail, cure)


def _check_needs(api: Api, file: Path) -> Iterator[CheckResult]:
    check = f"needs of {file.name}"
    try:
        needs = yaml.safe_load(file.read_text())
        if not isinstance(needs, dict):
            raise ValueError("the file has no fields")
        unmet = api.unmet_needs(needs)
    except (ApiError, OSError, ValueError, yaml.YAMLError) as error:
        yield CheckResult(check, Status.FAILED, str(error), "correct the file: one `need: value` on each line")
        return
    cure = "use another model, or ask an administrator for one that meets the need"
    yield from (CheckResult(check, Status.FAILED, sentence, cure) for sentence in unmet)
    if not unmet:
        yield CheckResult(check, Status.OK, f"{needs['model']} meets them")


def _list_loading(api: Api, deadline: float) -> Iterator[CheckResult]:
    """Wait for models that no worker has loaded yet, and list the models that are still not loaded.

    A model that is not loaded is not a failure, because requests wait until the model is loaded.
    """
    try:
        while (loading := api.loading_models()) and time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS)
    except ApiError:
        return  # another check reports it
    for name in loading:
        yield CheckResult(f"model {name}", Status.SKIPPED, "no worker has loaded it yet; requests wait until one has")


def _list_waiting(api: Api) -> Iterator[CheckResult]:
    """List the models that wait for a worker.

    A waiting model is not a failure. The reason of each model says whether the user must do something.
    """
    try:
        waiting = api.waiting_models()
    except CallUnknown:
        return
    except ApiError as error:
        yield CheckResult("waiting models", Status.FAILED, str(error), "see the server's log")
        return
    for model in waiting:
        reason = model.reason or "being assigned to a worker"
        yield CheckResult(
            f"model {model.model_id}", Status.SKIPPED, f"has been waiting for {model.seconds:.0f} s: {reason}"
        )


MARKS = {Status.OK: ("✓", "green"), Status.FAILED: ("✗", "red"), Status.SKIPPED: ("-", "yellow")}


def doctor(
    base_url: BaseUrl = None,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to retry a server that does not answer.")
    ] = 0,
    needs: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A YAML file with what a program needs of a model."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the address, SDK, server, key and tokenizers; show remedies, and list waiting models.

    Exits with status 1 if a check fails.
    """
    environment = ClientEnvironment(
        base_url=base_url or base_url_from_environment(),
        environment_url=base_url or os.environ.get(BASE_URL_VARIABLE) or None,
        api_key=os.environ.get(API_KEY_VARIABLE) or None,
    )
    results = diagnose(environment, wait_seconds=wait, needs=needs)
    healthy = _print_json(results) if as_json else _print_lines(results)
    raise typer.Exit(0 if healthy else 1)


def _print_lines(results: Iterable[CheckResult]) -> bool:
    """Print each result immediately, because checks take time if the server cannot be reached."""
    console = make_console()
    healthy = True
    for result in results:
        console.print(Text.assemble(MARKS[result.status], f" {result.check}: {result.detail}"))
        if result.cure is not None:
            console.print(f"    cure: {result.cure}")
        healthy = healthy and result.status is not Status.FAILED
    return healthy


def _print_json(results: Iterable[CheckResult]) -> bool:
    listed = list(results)
    healthy = all(result.status is not Status.FAILED for result in listed)
    print(json.dumps({"healthy": healthy, "checks": [asdict(result) for result in listed]}))
    return healthy
