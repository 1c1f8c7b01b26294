"""The archives of tokenizers that the server keeps."""

from __future__ import annotations

import io
import zipfile
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tinsmith_server.errors import NotFound, WorkerUnavailable
from tinsmith_server.services import tokenizers
from tinsmith_server.services.tokenizers import Tokenizers


class Worker:
    """A worker that sends the files of its tokenizer, unless the caller has them."""

    def __init__(self, base_model: str) -> None:
        self.digest, self.known_digests = f"digest of {base_model}", list[str]()

    def running(self) -> Worker:
        return self

    async def read_tokenizer(self, known_digest: str) -> Any:
        self.known_digests.append(known_digest)
        files = {} if known_digest == self.digest else {"tokenizer.json": self.digest.encode()}
        return SimpleNamespace(digest=self.digest, files=files)


class Fleet:
    """A fleet with one worker of each base model. The model `absent` has none."""

    def __init__(self) -> None:
        self.workers = {name: [Worker(name)] for name in ("a", "b")} | {"absent": []}

    def model(self, name: str) -> Any:
        return SimpleNamespace(name=name, training=True) if name in self.workers else None

    def trainers(self, base_model: str, *, rank: int) -> list[Worker]:
        return self.workers[base_model]

    def samplers(self, _base_model: str) -> list[Worker]:
        return []

    async def provide(self, base_model: str, *, sampling: bool) -> str:
        return f"a worker of {base_model} starts"


@pytest.mark.parametrize(("cache_bytes", "known_later"), [(2**20, "digest of a"), (1, "")], ids=["room", "no room"])
async def test_an_archive_is_read_again_only_after_newer_ones_took_its_room(
    cache_bytes: int, known_later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "CACHE_BYTES", cache_bytes)
    fleet = Fleet()
    kept = Tokenizers(cast(Any, fleet))
    first = await kept.archive("a")
    assert await kept.archive("a") is first
    await kept.archive("b")
    assert await kept.archive("a") == first
    (worker,) = fleet.workers["a"]
    assert worker.known_digests == ["", "digest of a", known_later]
    assert zipfile.ZipFile(io.BytesIO(first.content)).read("tokenizer.json") == b"digest of a"


async def test_a_model_without_a_worker_or_a_name_has_no_tokenizer_now() -> None:
    kept = Tokenizers(cast(Any, Fleet()))
    with pytest.raises(WorkerUnavailable, match="a worker of absent starts"):
        await kept.archive("absent")
    with pytest.raises(NotFound, match="there is no base model 'unknown'"):
        await kept.archive("unknown")
