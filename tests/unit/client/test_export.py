"""`tinsmith export` uses a server or files, and names the extra that either needs."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tinsmith import export as export_module
from tinsmith.cli import main
from tinsmith.export import FROM_FILES

OPTIONS = ("--to", "out", "--layout", "peft")


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["export", *arguments])
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


def files_are_read_by(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    module = f"reading_{folder.name}"
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    reader = EntryPoint("export", f"{module}:read [trainer]", FROM_FILES)
    monkeypatch.setattr(export_module, "entry_points", lambda **_: [reader])


def test_files_are_read_by_the_package_that_registered_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files_are_read_by(tmp_path, monkeypatch, "def read(*given): print(*given)")
    code, out, _ = output_of(capsys, "s3://bucket/weights/run/1-1", *OPTIONS, "--base-model", "org/model")
    assert (code, out) == (0, "s3://bucket/weights/run/1-1 org/model out peft\nout\n")


def test_files_without_the_trainer_name_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files_are_read_by(tmp_path, monkeypatch, "def read(*_):\n    import brushes_of_hair")
    code, _, err = output_of(capsys, "weights/run/1-1", *OPTIONS, "--base-model", "org/model")
    assert code == 1
    assert "tinsmith export needs the module brushes_of_hair" in err
    assert "'.[trainer]'" in err


def test_a_tinker_path_without_the_library_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    code, _, err = output_of(capsys, "tinker://run:train:0/weights/a", *OPTIONS)
    assert code == 1
    assert "'.[training]'" in err
