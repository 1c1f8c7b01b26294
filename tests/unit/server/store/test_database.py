"""A store that cannot be opened, is closed, or gets a value that no row can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.server.store_records import a_session
from tinsmith_server.store.connection import StoreUnavailable, UnstorableValue
from tinsmith_server.store.store import open_store


async def test_a_store_in_a_folder_that_does_not_exist_is_refused_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=f"The directory {tmp_path}/absent for the store does not exist"):
        await open_store(f"sqlite:///{tmp_path}/absent/store.db")
    assert list(tmp_path.iterdir()) == []


async def test_a_store_refuses_what_no_row_can_hold_and_all_calls_after_its_end(tmp_path: Path) -> None:
    """A request may outlive the store, since uvicorn does not wait for every request when the server stops."""
    store = await open_store(f"sqlite:///{tmp_path}/store.db")
    for unstorable in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(UnstorableValue, match="This is not JSON"):
            await store.create_session(a_session(user_metadata=unstorable), None)
    assert await store.get_session("session-1") is None
    assert await store.remove_promotions("ada", "unknown") is False
    await store.close()
    with pytest.raises(StoreUnavailable, match="is closed, since the server is stopping"):
        await store.get_session("session-1")
