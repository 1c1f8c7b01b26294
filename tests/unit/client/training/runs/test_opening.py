"""One folder is one run, from its first checkpoint on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinsmith.training.errors import BadConfig, BadData
from tinsmith.training.runs.config import SftConfig
from tinsmith.training.runs.loop import StopRequest
from tinsmith.training.runs.opening import claim_folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def config(out: Path, **given: Any) -> SftConfig:
    return SftConfig(model="demo/tiny", data=Path("a.jsonl"), out=out, **given)


def with_checkpoint(out: Path) -> None:
    folder = out / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "metadata.json").touch()


def test_a_run_without_a_checkpoint_may_begin_again_with_other_settings_and_data(out: Path) -> None:
    claim_folder(config(out), "one")
    claim_folder(config(out, rank=4), "another")
    assert yaml.safe_load((out / "config.yaml").read_text())["rank"] == 4


def test_a_run_with_a_checkpoint_goes_on_with_its_settings_and_data(out: Path) -> None:
    claim_folder(config(out), "one")
    with_checkpoint(out)
    claim_folder(config(out, keep_last=5), "one")
    assert yaml.safe_load((out / "config.yaml").read_text())["keep_last"] == 5
    with pytest.raises(BadConfig, match="rank was 32 and is 4"):
        claim_folder(config(out, rank=4), "one")
    with pytest.raises(
        BadData, match=r"the data is not that which the run in .* began with: give this run another out"
    ):
        claim_folder(config(out), "another")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_does_as_ever(number: signal.Signals) -> None:
    def as_ever(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, as_ever)
    try:
        with StopRequest.listening() as stop:
            assert not stop.asked
            signal.raise_signal(number)
            assert stop.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert signal.getsignal(number) is as_ever
    finally:
        signal.signal(number, before)
