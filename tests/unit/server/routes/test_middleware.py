"""What the log of requests says of them."""

from __future__ import annotations

import pytest
from tinsmith_server.routes.middleware import without_links


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/api/v1/uploads/dG9rZW4.c2ln/adapter_config.json", "/api/v1/uploads/…/adapter_config.json"),
        ("/api/v1/downloads/dG9rZW4.c2ln/a/b.safetensors", "/api/v1/downloads/…/a/b.safetensors"),
        ("/api/v1/sessions/sess-1", "/api/v1/sessions/sess-1"),
    ],
)
def test_links_that_are_a_permission_by_themselves_are_left_out(path: str, told: str) -> None:
    assert without_links(path) == told
