from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_trainer.errors import (
    ImageChanged,
    ModelCannotLoad,
    ModelChanged,
    ModelDirectoryInvalid,
    ModelNotFound,
    NumericsChanged,
    OutOfMemory,
    ServerError,
    TlsInvalid,
    VolumeUnsuitable,
)
from tinsmith_trainer.worker.termination_log import MAX_MESSAGE_BYTES, termination_record, write_termination_log


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelNotFound("…"), "ModelNotFound"),
        (ModelDirectoryInvalid("…"), "ModelInvalid"),
        (ModelCannotLoad("…"), "ModelCannotLoad"),
        (ModelChanged("…"), "ModelChanged"),
        (NumericsChanged("…"), "NumericsChanged"),
        (VolumeUnsuitable("…"), "VolumeUnsuitable"),
        (ImageChanged("…", "old"), "ImageChanged"),
        (TlsInvalid("…"), "TlsInvalid"),
        (OutOfMemory("…"), "OutOfMemory"),
        (ServerError("…"), "CannotStart"),
        (OSError("…"), "CannotStart"),
    ],
)
def test_every_error_has_its_reason(error: Exception, reason: str) -> None:
    assert termination_record(error)["reason"] == reason


def test_the_record_of_a_changed_image_names_the_required_image() -> None:
    assert termination_record(ImageChanged("…", "tinsmith/trainer@sha256:1"))["image"] == "tinsmith/trainer@sha256:1"


def test_a_long_message_is_cut_between_characters() -> None:
    message = termination_record(ServerError("é" * MAX_MESSAGE_BYTES))["message"]
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert set(message) == {"é", "…"}


def test_a_file_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    write_termination_log(tmp_path / "no-folder" / "log", ServerError("Mend it."))
