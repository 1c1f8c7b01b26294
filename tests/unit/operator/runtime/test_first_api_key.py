from __future__ import annotations

import base64
from typing import Any, cast

import pytest
from support.operator.fake_cluster import FakeCluster
from tinsmith_operator.errors import NotFound
from tinsmith_operator.kube.resources import Ref
from tinsmith_operator.runtime.first_api_key import FirstApiKey, new_key

PLACE = Ref("Secret", "tin", "tinsmith-api-key")


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def first_key(cluster: FakeCluster, secret: str | None = PLACE.name, key: str = "tml-made") -> FirstApiKey:
    return FirstApiKey(cast(Any, cluster), namespace="tin", release="tinsmith", secret=secret, make=lambda: key)


def key_in(cluster: FakeCluster) -> str:
    return base64.b64decode(cluster.objects[PLACE]["data"]["key"]).decode()


async def test_a_key_is_made_once_and_stays(cluster: FakeCluster) -> None:
    await first_key(cluster).ensure()
    await first_key(cluster, key="tml-another").ensure()
    assert key_in(cluster) == "tml-made"


async def test_one_of_two_operators_that_create_the_key_at_once_wins(cluster: FakeCluster) -> None:
    await first_key(cluster).ensure()
    cluster.failures["get"] = [NotFound("it was not there yet when this one looked")]
    await first_key(cluster, key="tml-another").ensure()
    assert ("create", "Secret", PLACE.name) == cluster.requests[-1]
    assert key_in(cluster) == "tml-made"


async def test_an_installation_that_was_given_a_key_gets_no_other(cluster: FakeCluster) -> None:
    key = first_key(cluster, secret=None)
    await key.ensure()
    assert cluster.objects == {}
    assert key.secret_names == ()


def test_keys_have_the_sdks_form_and_cannot_be_guessed() -> None:
    keys = {new_key() for _ in range(8)}
    assert len(keys) == 8
    assert all(key.startswith("tml-") and len(key) > 40 for key in keys)
