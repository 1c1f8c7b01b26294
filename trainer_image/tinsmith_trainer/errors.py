"""What goes wrong in a worker, one family. `server.py` turns it into futures and gRPC statuses."""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server"]


class TrainerError(Exception):
    """An operation failed. `str(error)` says what happened, to what, and what to do."""

    category: Category = "server"


class UserError(TrainerError):
    """The request cannot work as it is; repeating it unchanged will not help."""

    category: Category = "user"


class ServerError(TrainerError):
    """The request was fine; this worker failed at it."""


class Refused(TrainerError):
    """Failed before it ran: rejected by the server, or by what came before it."""

    def __init__(self, category: Category, message: str) -> None:
        super().__init__(message)
        self.category = category


class ModelDirectoryInvalid(TrainerError):
    """A base model's directory cannot be loaded. The message names the file."""


class ModelChanged(TrainerError):
    """The journal belongs to other base weights than those on disk now."""


class JournalFull(TrainerError):
    """The volume has no room for another operation; nothing was accepted."""


class CheckpointInvalid(UserError):
    """A checkpoint is missing, truncated, altered, or of another base model."""
