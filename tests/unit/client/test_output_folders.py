"""An output folder that cannot be written is a sentence with the option's name, and status 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith.cli import main
from tinsmith.training.evaluation.results import Results, Row

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
def test_a_folder_that_cannot_be_written_is_told(
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
