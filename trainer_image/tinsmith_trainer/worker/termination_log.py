"""The reason why a worker did not start.

The reason is JSON in the container's termination log, and a line on standard error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import structlog

from tinsmith_trainer.errors import (
    ImageChanged,
    ModelCannotLoad,
    ModelChanged,
    ModelDirectoryInvalid,
    ModelNotFound,
    NumericsChanged,
    OutOfMemory,
    TlsInvalid,
    VolumeUnsuitable,
)

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 1024
CANNOT_START = "CannotStart"
REASONS: dict[type[Exception], str] = {
    ModelNotFound: "ModelNotFound",
    ModelDirectoryInvalid: "ModelInvalid",
    ModelCannotLoad: "ModelCannotLoad",
    ModelChanged: "ModelChanged",
    NumericsChanged: "NumericsChanged",
    VolumeUnsuitable: "VolumeUnsuitable",
    ImageChanged: "ImageChanged",
    TlsInvalid: "TlsInvalid",
    OutOfMemory: "OutOfMemory",
}


def termination_record(error: Exception) -> dict[str, str]:
    """Return `reason` and `message` of the error.

    For ImageChanged also return `image`, the image that can replay the journal.
    """
    record = {"reason": REASONS.get(type(error), CANNOT_START), "message": _cut(str(error) or type(error).__name__)}
    if isinstance(error, ImageChanged):
        record["image"] = error.image
    return record


def write_termination_log(path: Path | None, error: Exception) -> None:
    """Write the record to the file that the kubelet reads after the container's end."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(termination_record(error)))
    except OSError as failure:
        log.warning("the termination log cannot be written", path=str(path), error=str(failure))


def print_reason(error: Exception) -> None:
    """Print the reason in one line. The parent process shows this line to the user."""
    sentence = " ".join(str(error).split()) or type(error).__name__
    print(f"tinsmith-trainer: {sentence}", file=sys.stderr, flush=True)


def _cut(message: str) -> str:
    content = message.encode(errors="replace")
    if len(content) <= MAX_MESSAGE_BYTES:
        return message
    return content[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"
