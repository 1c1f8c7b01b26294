"""Temporary files of tests, which tests remove: a run names what is left, and removes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.temporary_files import OwnPlace

TESTS = Path(__file__).parents[2]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OwnPlace:
    """One within the folder of the test, as if its run began here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return OwnPlace.take()


IMPORTS = "import multiprocessing, os, tempfile\nfrom support.temporary_files import folder_of_whole_run"
LEAVES = "os.close(tempfile.mkstemp(suffix='.left')[0])"
LASTS = "folder_of_whole_run('x'), multiprocessing.get_context('forkserver').Process(target=print).start()"


@pytest.mark.parametrize(("body", "leaves"), [(LEAVES, True), (LASTS, False)])
def test_a_run_names_the_temporary_files_that_it_leaves_and_removes_them(
    body: str, leaves: bool, tmp_path: Path
) -> None:
    """The project's own hooks run on a test of one line."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text(f"{IMPORTS}\n\ndef test_one():\n    {body}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio", f"--rootdir={tmp_path}"]
    # In a short place: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="t") as temporary:
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": temporary}
        ended = subprocess.run(
            [*command, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ((".left\n" in ended.stdout), ended.stderr) == (leaves, "")
        assert os.listdir(temporary) == []
