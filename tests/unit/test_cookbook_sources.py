"""Where the cookbook's own tests come from: the archive that the lock names, of which only they are kept."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from cookbook_sources import LOCK, download_command, locked_version, unpack

SHORT_LOCK = """\
tinker==0.38.0 \\
    --hash=sha256:aa
tinker-cookbook==0.6.1 \\
    --hash=sha256:bb \\
    --hash=sha256:cc
    # via tinsmith (pyproject.toml)
tokenizers==1.0 \\
    --hash=sha256:dd
"""


def test_the_version_is_the_locked_one_with_its_digests() -> None:
    assert locked_version(SHORT_LOCK) == ("tinker-cookbook==0.6.1 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n")
    assert locked_version(LOCK.read_text()).startswith("tinker-cookbook==")


def test_pip_is_asked_once_for_the_archive_and_holds_it_to_the_digests() -> None:
    command = download_command("/bin/uv", Path("wanted.txt"), "here")
    assert command[command.index("-m") :][:3] == ["-m", "pip", "download"]
    assert command.count("pip") == 2, "uv brings it, Python runs it"
    assert {"--require-hashes", "--no-deps"} <= {*command}
    assert command[command.index("--dest") + 1] == "here"
    assert command[-2:] == ["-r", "wanted.txt"]


def test_tests_are_unpacked_and_nothing_else(tmp_path: Path) -> None:
    archive = tmp_path / "sdist.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("tests/helpers.py", "tests/recipes/a.py", "pyproject.toml", "setup.py", "testsuite/b.py"):
            member = tarfile.TarInfo(f"tinker_cookbook-0.6.1/{name}")
            member.size = len(name)
            packed.addfile(member, io.BytesIO(name.encode()))
    unpack(archive, tmp_path / "sources")
    found = {
        str(path.relative_to(tmp_path / "sources")) for path in (tmp_path / "sources").rglob("*") if path.is_file()
    }
    assert found == {"tests/helpers.py", "tests/recipes/a.py", "pyproject.toml"}
