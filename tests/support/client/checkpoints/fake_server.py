"""An in-memory server with states, and clients that save them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from safetensors.numpy import save_file
from tinsmith.training.errors import StateGone


def done(**fields: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(SimpleNamespace(**fields))
    return future


class FakeServer:
    """A stand-in for ServerStates and for a ServiceClient."""

    def __init__(self) -> None:
        self.states: dict[str, bytes] = {}
        """The trained content by the path of its state."""
        self.exports: dict[str, bytes] = {}
        self.failure: Exception | None = None
        """The error when an adapter is fetched."""

    def of(self, _service: object) -> Self:
        return self

    def require(self, state_path: str) -> None:
        if state_path not in self.states:
            raise StateGone(state_path)

    def delete(self, path: str) -> None:
        self.states.pop(path, None)
        self.exports.pop(path, None)

    def fetch_adapter(self, export_path: str, target: Path) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        target.write_bytes(self.exports.pop(export_path))
        return {"r": 8}

    def fetch_optimizer(self, state_path: str, target: Path) -> None:
        save_file({"moments": np.frombuffer(self.states[state_path], np.uint8)}, target)

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: object = None
    ) -> Future[FakeModel]:
        future: Future[FakeModel] = Future()
        future.set_result(FakeModel(self, self.states[path]))
        return future


class FakeTokenizer:
    """A fast tokenizer as in transformers."""

    @property
    def backend_tokenizer(self) -> Any:
        return SimpleNamespace(to_str=lambda: '{"version": "1.0"}')


class FakeModel:
    """A training client whose training adds a byte."""

    def __init__(self, server: FakeServer, weights: bytes = b"") -> None:
        self._server = server
        self.weights = weights
        self.tokenizer: object = FakeTokenizer()

    def train(self, step: int) -> None:
        self.weights += bytes([step])

    def save_state(self, name: str, ttl_seconds: int | None) -> Future[Any]:
        return self._saved("weights", name, self._server.states)

    def save_weights_external(self, name: str, ttl_seconds: int | None) -> Future[Any]:
        return self._saved("external_weights", name, self._server.exports)

    def _saved(self, kind: str, name: str, into: dict[str, bytes]) -> Future[Any]:
        path = f"tinker://run:train:0/{kind}/{name}"
        into[path] = self.weights
        return done(path=path)

    def get_info(self) -> Any:
        return SimpleNamespace(model_data=SimpleNamespace(model_name="org/tiny"))

    def get_tokenizer(self) -> object:
        return self.tokenizer
