"""Copies that any tenants ask for, in any order: no two share a directory, and no source changes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.server.empty_stores import with_schema
from support.server.fake_worker import write_checkpoint
from support.server.store_records import NOW, a_checkpoint
from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.services.accounts.limits import Limits
from tinsmith_server.services.accounts.quotas import CheckpointQuota
from tinsmith_server.services.checkpoints.copies import Copies
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup
from tinsmith_server.services.checkpoints.retention import Retention
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Checkpoint
from tinsmith_server.store.store import Store, open_store
from tinsmith_server.wire.ids import parse_tinker_path
from tinsmith_server.wire.requests import CopyWeightsRequest

# Texts that are one text when they are joined, and paths.
TENANTS = ("a", "a b", "a:b", "a.b", "..")
KEYS = ("c", "b c", "../c", None)
NAMES = ("good", "bad")
CopyRequest = tuple[str, str | None, str]
REQUESTS = st.tuples(st.sampled_from(TENANTS), st.sampled_from(KEYS), st.sampled_from(NAMES))


async def sources_in(store: Store, root: Path) -> dict[str, Checkpoint]:
    """Return published checkpoints by name, each with weights of its own."""
    made = {}
    for name in NAMES:
        digest = write_checkpoint(root / "runs" / name, {"adapter_model.safetensors": name.encode()})
        made[name] = a_checkpoint(name, directory=f"runs/{name}", manifest_digest=digest, public=True)
        await store.put_checkpoint(made[name])
    return made


def content(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


async def check(copy_requests: Sequence[CopyRequest], place: Path) -> None:
    store, root = await open_store(with_schema(f"sqlite:///{place}/store.db")), place / "root"
    try:
        sources = await sources_in(store, root)
        files = CheckpointFiles(root.as_uri())
        settings = Settings(data=place)
        keys, retention = Keys(store, None), Retention(store, files, settings)
        lookup = CheckpointLookup(store, cast("Any", None), keys, lambda: NOW)
        quota = CheckpointQuota(store, Limits(store, settings).checkpoint_bytes)
        copies = Copies(store, files, lookup, retention, quota, lambda: NOW)
        first: dict[tuple[str, str], tuple[str, str]] = {}
        made: dict[str, str] = {}
        for tenant, key, name in copy_requests:
            path = f"tinker://{sources[name].run_id}/weights/{name}"
            copy = copies.copy(tenant, CopyWeightsRequest(source_path=path), None, key)
            if key is not None and first.get((tenant, key), (name, ""))[0] != name:
                with pytest.raises(Unprocessable, match="another request"):
                    await copy
                continue
            copied = await copy
            if key is not None:
                assert first.setdefault((tenant, key), (name, copied)) == (name, copied)
            made[copied] = name
        directories = {}
        for copied, name in made.items():
            at = parse_tinker_path(copied)
            found = await store.get_checkpoint(at.run_id, at.type, at.name)
            assert found is not None
            directories[found.directory] = content(root / found.directory)
            assert directories[found.directory] == name.encode()
        assert len(directories) == len(made) == len(first) + sum(key is None for _, key, _ in copy_requests)
        assert {name: content(root / "runs" / name) for name in NAMES} == {name: name.encode() for name in NAMES}
        assert {folder.name for folder in (root / "weights" / "copies").glob("*")} == {
            Path(directory).name for directory in directories
        }
    finally:
        await store.close()


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(REQUESTS, max_size=8))
@example([("a", "c", "good"), ("a", "c", "bad")])
@example([("a", "b c", "good"), ("a b", "c", "bad")])
@example([("a", None, "good"), ("a", None, "good")])
def test_two_requests_of_different_tenants_keys_or_sources_share_no_directory(copy_requests: list[CopyRequest]) -> None:
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(check(copy_requests, Path(place)))
