"""Archives of pods and of packages are unpacked on each Python that a user may have, and nowhere else."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from testcluster.tar_files import extract_files


def archive_of(*members: tarfile.TarInfo) -> tarfile.TarFile:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as made:
        for member in members:
            member.size = 1 if member.isfile() else 0
            made.addfile(member, io.BytesIO(b"x"))
    content.seek(0)
    return tarfile.open(fileobj=content)


def link_to(target: str) -> tarfile.TarInfo:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, target
    return link


def test_files_have_their_content_and_permissions_and_links_are_left_out(tmp_path: Path) -> None:
    program = tarfile.TarInfo("bin/run")
    program.mode = 0o4755
    with archive_of(program, link_to("/etc/passwd")) as archive:
        extract_files(archive, tmp_path)
    [found] = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert (found.relative_to(tmp_path).as_posix(), found.read_bytes()) == ("bin/run", b"x")
    assert found.stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("name", ["/outside", "../outside", "in/../../outside"])
def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    with archive_of(tarfile.TarInfo(name)) as archive, pytest.raises(ValueError, match="leads out of"):
        extract_files(archive, tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_the_caller_renames_files_and_leaves_others_out(tmp_path: Path) -> None:
    with archive_of(tarfile.TarInfo("top/a"), tarfile.TarInfo("other/b")) as archive:
        extract_files(archive, tmp_path, {"top/a": "a"}.get)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
