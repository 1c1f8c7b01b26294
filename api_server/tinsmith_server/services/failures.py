"""The failures that futures return to clients, and the form of a failure in the table of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson
from tinsmith_rpc import worker_pb2

from tinsmith_server.wire.ids import TinkerPath

Category = Literal["user", "server", "unknown"]

_CATEGORIES: dict[int, Category] = {
    worker_pb2.USER: "user",
    worker_pb2.SERVER: "server",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why an operation failed, and whether the user or the server caused it."""

    category: Category
    message: str

    @classmethod
    def from_worker(cls, failure: worker_pb2.Failure) -> Failure:
        return cls(_CATEGORIES.get(failure.category, "unknown"), failure.message)

    @classmethod
    def from_row(cls, text: str | None) -> Failure:
        """Return the failure in a row. This method is the inverse of `to_row`."""
        return cls(**orjson.loads(text)) if text else cls("unknown", "the model failed without a reason")

    def to_row(self) -> str:
        return orjson.dumps({"category": self.category, "message": self.message}).decode()


def rejection(message: str) -> worker_pb2.Failure:
    """Return a failure that the user caused.

    The rejected operation keeps its number, and fails in the order of the model's operations.
    """
    return worker_pb2.Failure(category=worker_pb2.USER, message=message)


AUTOSAVE_NAME = "autosave"
"""The name of the checkpoint that is saved when the client or the worker of a model disappears."""


def why_evacuated(model_id: str, leaving: str) -> str:
    """Return the reason why a model was evacuated.

    `leaving` is a clause with the reason for the removal of the worker.
    """
    autosave = TinkerPath(model_id, "weights", AUTOSAVE_NAME)
    return f"{model_id} was released because {leaving}. It was saved before: resume from {autosave}."


def training_only(base_model: str) -> str:
    """Return the reason why a model that is served only for training cannot be sampled."""
    return f"{base_model} is served for training only; ask an administrator to add a SamplerPool for it"


def sampling_only(base_model: str) -> str:
    """Return the reason why a model that is served only for sampling cannot be trained."""
    return f"{base_model} is served for sampling only; ask an administrator to add a TrainingSession for it"
