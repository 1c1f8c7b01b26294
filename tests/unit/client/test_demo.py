"""The demo's parts; the SDK tests run the whole demo."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

import pytest
from tinsmith import demo, local_server
from tinsmith.cli import main
from tinsmith.local_server import ServerFailed, free_port, running_server

READY = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print('http://127.0.0.1:1', flush=True)
signal.sigwait([signal.SIGTERM])
"""


def serve_with(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run a program in place of `tinsmith serve`."""
    monkeypatch.setattr(local_server, "tinsmith_command", lambda: [sys.executable, "-c", program])


def test_a_server_is_stopped_when_the_program_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with(monkeypatch, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))\n{READY}")
    with running_server([], "tml-key", tmp_path) as url:
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    assert url == "http://127.0.0.1:1"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_program_is_found_in_the_checkout() -> None:
    assert demo.find_program().name == "first_steps.py"
    assert demo.find_program().is_file()


def test_a_server_that_ends_with_an_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with(monkeypatch, f"{READY}sys.exit(3)")
    with pytest.raises(ServerFailed, match="status 3"), running_server([], "tml-key", tmp_path):
        pass


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with(monkeypatch, "import sys; sys.exit('the port is taken')")
    with pytest.raises(ServerFailed, match="the port is taken"), running_server([], "tml-key", tmp_path):
        pass


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with(monkeypatch, "import signal; signal.pause()")
    with (
        pytest.raises(ServerFailed, match=r"did not start within 0\.5 s"),
        running_server([], "tml-key", tmp_path, start_seconds=0.5),
    ):
        pass


def test_only_its_owner_reads_the_demos_key(tmp_path: Path) -> None:
    file = tmp_path / "environment"
    demo.write_environment(file, "tml-secret", 8001)
    assert file.stat().st_mode & 0o077 == 0
    assert "TINKER_API_KEY=tml-secret" in file.read_text()
    assert "TINKER_BASE_URL=http://127.0.0.1:8001" in file.read_text()


def test_a_port_where_something_listens_is_not_suggested() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert free_port(taken) != taken
    assert free_port(taken) == taken


@pytest.mark.parametrize("missing", demo.NEEDED_MODULES)
def test_missing_packages_are_reported_first_with_the_command_that_installs_them(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find_spec("json"))
    with pytest.raises(SystemExit) as end:
        main(["demo", "--out", str(tmp_path / "out")])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert missing in said
    assert "'.[server,trainer,client]'" in said
    assert not (tmp_path / "out").exists()
