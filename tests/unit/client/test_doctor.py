"""Doctor: it names each problem between a program and its server, with a fix."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.certificates import SERVER, Authority, mount_secret
from support.client.stub_server import GOOD_KEY, NOT_FOUND, WELL, Answer, stub_server
from tinsmith.api import is_here
from tinsmith.cli import main
from tinsmith.credentials import cure_of
from tinsmith.doctor import CheckResult, ClientEnvironment, Status, diagnose
from typing_extensions import override


@pytest.fixture
def tokenizer_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a directory with a tokenizer that has the served model's name."""
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def well_server() -> Iterator[str]:
    with stub_server() as url:
        yield url


def examine(url: str, api_key: str | None = GOOD_KEY, environment_url: str | None = "set") -> dict[str, CheckResult]:
    return {result.check: result for result in diagnose(ClientEnvironment(url, environment_url, api_key))}


def failures(results: dict[str, CheckResult]) -> list[str]:
    return [check for check, result in results.items() if result.status is Status.FAILED]


@pytest.mark.usefixtures("tokenizer_here")
def test_a_healthy_installation_passes_every_check(well_server: str) -> None:
    results = examine(well_server)
    assert list(results) == ["address", "SDK", "server", "key", "tokenizer of org/tiny"]
    assert {result.status for result in results.values()} == {Status.OK}


@pytest.mark.usefixtures("tokenizer_here")
def test_an_unset_address_fails_because_programs_would_use_the_vendors_service(well_server: str) -> None:
    results = examine(well_server, environment_url=None)
    assert failures(results) == ["address"]
    assert f"export TINKER_BASE_URL={well_server}" in (results["address"].cure or "")
    assert results["server"].status is Status.OK


def test_an_unreachable_default_address_is_skipped_and_no_second_failure() -> None:
    with stub_server() as url:
        pass
    results = examine(url, environment_url=None)
    assert failures(results) == ["address"]
    assert (results["server"].status, results["key"].status) == (Status.SKIPPED, Status.SKIPPED)
    assert f"no server answers at the default, {url}" in results["server"].detail


@pytest.mark.parametrize(
    ("written", "cure"),
    [
        ("127.0.0.1:18431", "put http:// in front: http://127.0.0.1:18431"),
        ("http://127.0.0.1:8000/api/v1", "leave out /api/v1, which the SDK adds: http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/api/v1/", "leave out /api/v1, which the SDK adds: http://127.0.0.1:8000"),
        ("http://127.0.0.1:eight", "http://HOST:PORT"),
        ("ftp://127.0.0.1:8000", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
    ],
    ids=["no scheme", "the API's path", "the API's path and a slash", "no port", "another scheme", "no host"],
)
def test_a_mistake_in_the_address_is_corrected(written: str, cure: str) -> None:
    results = examine(written)
    assert failures(results) == ["address"]
    assert cure in (results["address"].cure or "")
    assert results["server"].status is Status.SKIPPED


def test_an_https_address_of_a_server_that_speaks_http_is_corrected(well_server: str) -> None:
    results = examine(well_server.replace("http:", "https:"))
    assert failures(results) == ["server"]
    assert "speaks http, not https" in results["server"].detail
    assert results["server"].cure == f"export TINKER_BASE_URL={well_server}"


def test_an_untrusted_certificate_is_distinguished_from_an_unreachable_server(tmp_path: Path) -> None:
    authority = Authority()
    folder = mount_secret(tmp_path, authority.leaf("localhost", usages=(SERVER,)), authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    with stub_server(tls=context) as url:
        results = examine(url)
    assert failures(results) == ["server"]
    assert "is not trusted" in results["server"].detail
    assert "SSL_CERT_FILE" in (results["server"].cure or "")


class IllAtFirst(dict[str, Answer]):
    """Answers of which the first one to a health check is 503."""

    requests = 0

    @override
    def get(self, path: str, default: object = None) -> Any:
        if path.endswith("/healthz"):
            self.requests += 1
            return (503, {}) if self.requests == 1 else (200, {"status": "ok"})
        return super().get(path, default)


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize(("seconds", "failed"), [(0, ["server"]), (60, [])], ids=["at once", "waiting"])
def test_a_server_that_is_starting_is_waited_for_on_request(seconds: float, failed: list[str]) -> None:
    with stub_server(IllAtFirst(WELL)) as url:
        environment = ClientEnvironment(url, url, GOOD_KEY)
        found = {result.check: result for result in diagnose(environment, wait_seconds=seconds)}
    assert failures(found) == failed


def test_a_server_that_is_not_there_leaves_the_rest_unjudged() -> None:
    with stub_server() as url:
        pass
    results = examine(url)
    assert failures(results) == ["server"]
    assert "tinsmith serve" in (results["server"].cure or "")
    assert results["key"].status is Status.SKIPPED


@pytest.mark.parametrize(
    "answer",
    [NOT_FOUND, (200, "<html>A router</html>"), (200, ["ok"]), (200, {"status": "ill"}), (503, {})],
    ids=["404", "HTML", "a list", "an ill server", "503"],
)
def test_another_program_on_the_port_is_distinguished_from_a_server(answer: tuple[int, object]) -> None:
    with stub_server({"/api/v1/healthz": answer}) as url:
        assert failures(examine(url)) == ["server"]


@pytest.mark.parametrize(
    ("api_key", "cure"),
    [
        (None, "export TINKER_API_KEY"),
        ("sk-of-another-service", "must start with tml-"),
        ("tml-revoked", "tinsmith keys create"),
    ],
    ids=["no key", "a key without the prefix", "a key that the server refuses"],
)
def test_a_key_that_does_not_work_has_a_cure(well_server: str, api_key: str | None, cure: str) -> None:
    results = examine(well_server, api_key=api_key)
    assert failures(results) == ["key"]
    assert cure in (results["key"].cure or "")
    assert results["tokenizers"].status is Status.SKIPPED


@pytest.mark.usefixtures("elsewhere")
def test_a_tokenizer_that_programs_would_not_find_has_a_cure(well_server: str) -> None:
    results = examine(well_server)
    assert failures(results) == ["tokenizer of org/tiny"]
    assert "`tinsmith tokenizer org/tiny`" in (results["tokenizer of org/tiny"].cure or "")


@pytest.mark.usefixtures("elsewhere")
def test_a_directory_without_a_tokenizer_is_named_because_programs_would_prefer_it(well_server: str) -> None:
    Path("org/tiny").mkdir(parents=True)
    assert f"{Path('org/tiny').resolve()} has no tokenizer.json" in examine(well_server)["tokenizer of org/tiny"].detail


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize(
    ("installed", "status"), [("0.37.1", Status.FAILED), ("0.38.0", Status.OK), ("1.2.0", Status.OK)]
)
def test_an_sdk_older_than_the_server_speaks_is_named(
    well_server: str, monkeypatch: pytest.MonkeyPatch, installed: str, status: Status
) -> None:
    monkeypatch.setattr("tinsmith.doctor.version", lambda _package: installed)
    assert examine(well_server)["SDK"].status is status


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize(
    ("call", "answer", "failed", "cure"),
    [
        ("get_server_capabilities", (500, "oh"), ["tokenizers"], "see the server's log"),
        ("get_server_capabilities", (200, {"supported_models": []}), ["models"], "apply a TrainingSession"),
        ("waiting_models", (500, "oh"), ["waiting models"], "see the server's log"),
    ],
    ids=["no list of models", "no model", "no list of waiting models"],
)
def test_a_server_without_models_or_without_a_list_of_them_has_a_cure(
    call: str, answer: Answer, failed: list[str], cure: str
) -> None:
    with stub_server({**WELL, f"/api/v1/{call}": answer}) as url:
        results = examine(url)
    assert failures(results) == failed
    assert cure in (results[failed[0]].cure or "")


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize(
    ("text", "answer", "details"),
    [
        ("model: org/tiny\ncontext: 9", {"unmet": ["org/tiny has a context of 8"]}, {"org/tiny has a context of 8"}),
        ("model: org/tiny", {"unmet": []}, set()),
        ("- a", {}, {"the file has no fields"}),
    ],
    ids=["unmet", "met", "no needs"],
)
def test_the_needs_in_a_file_are_checked_by_the_server(
    tmp_path: Path, text: str, answer: dict[str, Any], details: set[str]
) -> None:
    (tmp_path / "needs.yaml").write_text(text)
    with stub_server({**WELL, "/api/v1/check_needs": (200, answer)}) as url:
        found = list(diagnose(ClientEnvironment(url, url, GOOD_KEY), needs=tmp_path / "needs.yaml"))
    (*others,) = [one for one in found if one.check == "needs of needs.yaml"]
    assert {one.detail for one in others if one.status is Status.FAILED} == details
    assert others


def model(**fields: object) -> Answer:
    return 200, {"supported_models": [{"model_name": "org/tiny", **fields}]}


class LoadsInTime(dict[str, Answer]):
    """Answers of a server whose model is loaded at the fourth request."""

    requests = 0

    @override
    def get(self, path: str, default: object = None) -> Any:
        if path.endswith("/get_server_capabilities"):
            self.requests += 1
            return model(images=False) if self.requests > 3 else model()
        return super().get(path, default)


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize(("seconds", "is_reported"), [(0, True), (60, False)], ids=["at once", "waiting"])
def test_a_model_that_loads_is_waited_for_on_request_and_told_otherwise(seconds: float, is_reported: bool) -> None:
    with stub_server(LoadsInTime(WELL)) as url:
        found = {one.check: one for one in diagnose(ClientEnvironment(url, url, GOOD_KEY), wait_seconds=seconds)}
    assert failures(found) == []
    assert ("model org/tiny" in found) is is_reported
    if is_reported:
        assert found["model org/tiny"].detail == "no worker has loaded it yet; requests wait until one has"


def test_the_cure_for_a_key_names_the_data_directory_where_it_is_known(
    well_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINSMITH_DATA", raising=False)

    def cure() -> str:
        return examine(well_server, api_key="tml-revoked")["key"].cure or ""

    assert "`tinsmith keys create NAME --data DIR`" in cure()
    for name in ("my server", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tinsmith.db").touch()
        known = name == "my server"
        assert (f"`tinsmith keys create NAME --data '{tmp_path}/my server'`" in cure()) is known
    monkeypatch.setenv("TINSMITH_DATA", "/srv/tinsmith")
    assert "`tinsmith keys create NAME --data /srv/tinsmith`" in cure()


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:1", True),
        ("https://localhost", True),
        ("http://10.0.0.1", False),
    ],
)
def test_a_directory_here_is_that_of_a_server_here_alone(url: str, here: bool) -> None:
    assert is_here(url) is here


WAITING = {
    "waiting_models": [
        {"model_id": "sess-1:train:0", "base_model": "org/tiny", "waiting_seconds": 63.2, "reason": "3rd of 7 waiting"},
        {"model_id": "sess-2:train:0", "base_model": "org/tiny", "waiting_seconds": 1, "reason": None},
    ]
}


@pytest.mark.usefixtures("tokenizer_here")
def test_waiting_models_are_shown_with_the_reason_and_are_no_failure() -> None:
    with stub_server({**WELL, "/api/v1/waiting_models": (200, WAITING)}) as url:
        results = examine(url)
    assert failures(results) == []
    assert results["model sess-1:train:0"].detail == "has been waiting for 63 s: 3rd of 7 waiting"
    assert results["model sess-2:train:0"].detail == "has been waiting for 1 s: being assigned to a worker"


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize(("api_key", "status"), [(GOOD_KEY, 0), ("tml-revoked", 1)], ids=["healthy", "a bad key"])
def test_the_exit_status_and_the_json_agree(
    well_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    api_key: str,
    status: int,
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", well_server)
    monkeypatch.setenv("TINKER_API_KEY", api_key)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert end.value.code == status
    assert report["healthy"] is (status == 0)


def test_the_report_for_people_shows_the_cure_and_never_the_key(
    well_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", well_server)
    monkeypatch.setenv("TINKER_API_KEY", "tml-a-secret-that-was-revoked")
    with pytest.raises(SystemExit):
        main(["doctor"])
    shown = capsys.readouterr().out
    assert "✗ key" in shown
    assert "cure:" in shown
    assert "a-secret" not in shown


@pytest.mark.usefixtures("tokenizer_here")
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (f"{GOOD_KEY}\n", "has a newline as character"),
        (f" {GOOD_KEY}", "has a space as character 1 of"),
        ("tml-a b", "has a space as character 6 of 7"),
        ("tml-\x00", "has a control character as character 5 of 5"),
        ("tml-\u00e9", "has a character that is not ASCII as character 5 of 5"),
        ("tml-\udce9", "has a character that is not ASCII as character 5 of 5"),
    ],
)
def test_a_key_that_no_header_can_carry_is_named_and_not_shown(well_server: str, key: str, message: str) -> None:
    results = examine(well_server, key)
    assert failures(results) == ["key"]
    assert message in results["key"].detail
    assert results["key"].cure
    assert key.strip() not in results["key"].detail + (results["key"].cure or "")


@pytest.mark.parametrize("key", ["tml-a\n", "tml-a\r", " tml-a\t\r\n", "\x0btml-a\x0c"])
@pytest.mark.parametrize("shell", [one for one in ("sh", "bash", "zsh") if shutil.which(one)])
def test_the_cure_of_a_key_with_white_space_around_it_works_in_a_shell(shell: str, key: str) -> None:
    cure = cure_of(key).partition(": ")[2]
    environment = {**os.environ, "TINKER_API_KEY": key}
    script = f"{cure}; printenv TINKER_API_KEY"
    shown = subprocess.run([shell, "-c", script], env=environment, capture_output=True, check=True)
    assert shown.stdout == b"tml-a\n"


@pytest.mark.parametrize("key", ["tml-a\n", "tml-a b", "tml-\u00e9"])
@pytest.mark.parametrize(
    "command",
    [
        ["models"],
        ["chat", "org/tiny", "--message", "Hi"],
        ["tokenizer", "org/tiny"],
        ["import", "adapter", "--base-model", "org/tiny"],
        ["promote", "prod", "tinker://x/sampler_weights/y"],
        pytest.param(
            ["export", "tinker://x/weights/y", "--to", "folder", "--layout", "peft"],
            marks=pytest.mark.skipif(find_spec("transformers") is None, reason="exports need transformers"),
        ),
    ],
    ids=lambda command: command[0],
)
def test_every_command_says_so_in_one_sentence(
    command: list[str], key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", key)
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as ended:
        main(command)
    captured = capsys.readouterr()
    assert ended.value.code == 1, captured
    assert "TINKER_API_KEY has a" in captured.err.replace("\n", " ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/oai/api/v1", "clients of OpenAI"),
        ("/anthropic/api/v1", "clients of Anthropic"),
        ("/anthropic/api", "clients of Anthropic"),
        ("/api/v1/", "which the SDK adds"),
        ("/v1", "clients of OpenAI"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_a_base_url_of_another_client_is_cured_as_a_whole(path: str, reason: str) -> None:
    address = examine(f"http://tin.example:81/team{path}")["address"]
    assert address.status is Status.FAILED
    assert reason in (address.cure or "")
    assert (address.cure or "").endswith(": http://tin.example:81/team")
