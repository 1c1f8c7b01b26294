"""A client of the Kubernetes API is closed for good."""

from __future__ import annotations

import pytest
from tinsmith_server.fleet.kubernetes.api import SESSIONS, KubernetesApi
from tinsmith_server.fleet.kubernetes.errors import ApiUnavailable


async def test_what_asks_after_the_end_opens_no_connection_that_nobody_would_close() -> None:
    api = KubernetesApi()
    await api.close()
    with pytest.raises(ApiUnavailable, match="stopping"):
        await api.list(SESSIONS, "team")
