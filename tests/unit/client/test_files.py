"""Files that commands and the library write and read."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_disk import SmallDisk, on_small_disk
from tinsmith.cli import main
from tinsmith.files import NoJson, numbered_lines, parse_line, write_whole
from tinsmith.training.evaluation.results import Results, Row
from tinsmith.training.runs.json_lines import Text, parse_sft, read_examples

pytestmark = pytest.mark.pytorch

COMMANDS = {
    "demo --out": ["demo", "--out"],
    "eval compare --out": ["eval", "compare", "before", "after", "--out"],
    "make-tiny-model": ["make-tiny-model"],
    "train sft --example": ["train", "sft", "--example"],
}


@pytest.fixture(autouse=True)
def evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for name in ("before", "after"):
        with Results(tmp_path / name, {"sums": "f"}) as results:
            results.add(Row(f"tinker://{name}/sampler_weights/5", "step 5", 5, "sums", "0", {"score": 1}))


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none", "/sys/kernel"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_folder_is_reported(
    command: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        main([*COMMANDS[command], folder])
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert f"{folder} cannot be written: " in shown.err
    assert command.partition(" ")[0] in shown.err
    assert "Traceback" not in shown.err


# All that `str.splitlines` cuts at, besides the line feed.
CUT_BY_PYTHON = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from(CUT_BY_PYTHON), min_size=1), min_size=1),
    mark=st.sampled_from(["", "\ufeff"]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_text_comes_back_under_its_line(
    texts: list[str], mark: str, end: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    file.write_bytes((mark + "".join(json.dumps(text, ensure_ascii=False) + end for text in texts)).encode())
    assert [(number, parse_line(line)) for number, line in numbered_lines(file)] == list(enumerate(texts, 1))


@pytest.mark.parametrize("value", ["\ud83d", ["\udc00 a"], {"text": {"deep": ["\ud800"]}}, {"\udfff": 1}])
def test_half_a_character_is_refused_by_its_escape(value: Any) -> None:
    with pytest.raises(NoJson, match=r"half of a character beyond U\+FFFF"):
        parse_line(json.dumps(value))


@pytest.mark.parametrize("line", ["[" * 100_000, "{", "nul"])
def test_invalid_json_is_reported(line: str) -> None:
    with pytest.raises(NoJson, match="no JSON"):
        parse_line(line)


@pytest.mark.parametrize("depth", [100, 400, 900, 5_000, 100_000])
def test_any_depth_of_nesting_is_a_value_or_a_sentence(depth: int) -> None:
    with suppress(NoJson):
        assert parse_line("[" * depth + "]" * depth) is not None


def test_an_example_may_have_an_id_and_keys_without_a_value(tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    file.write_text(json.dumps({"id": 7, "text": "a", "tools": [], "source": None}))
    assert [placed.example for placed in read_examples(file, parse_sft)] == [Text("a")]


def test_on_a_full_disk_the_file_stays_unchanged_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        write_whole(tmp_path / "file", "as before")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "file", b"x" * 10_000)
        assert (tmp_path / "file").read_text() == "as before"
        assert sorted(os.listdir(tmp_path)) == ["ballast", "file"]

    on_small_disk(tmp_path, 1, scenario)
