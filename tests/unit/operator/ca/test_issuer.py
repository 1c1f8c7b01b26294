from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from support.operator.fake_cluster import FakeCluster
from tinsmith_operator.ca.certificates import new_authority, read_authority, read_facts
from tinsmith_operator.ca.issuer import Issuer
from tinsmith_operator.errors import AlreadyExists, AuthorityInvalid, NotFound, SecretTaken
from tinsmith_operator.kube.resources import Ref

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
AUTHORITY = Ref("Secret", "tin", "tinsmith-ca")
CLIENT = Ref("Secret", "tin", "tinsmith-api-server-tls")


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def issuer(cluster: FakeCluster, clock: Clock) -> Issuer:
    return make_issuer(cluster, clock)


def make_issuer(cluster: FakeCluster, clock: Clock) -> Issuer:
    return Issuer(
        cast(Any, cluster),
        namespace="tin",
        release="tinsmith",
        authority_secret=AUTHORITY.name,
        api_server_secret=CLIENT.name,
        clock=clock,
    )


def decoded(secret: dict[str, Any], name: str) -> bytes:
    return base64.b64decode(secret["data"][name])


async def test_the_first_refresh_makes_both_secrets_and_the_next_one_writes_nothing(
    issuer: Issuer, cluster: FakeCluster
) -> None:
    await issuer.refresh()
    made = dict(cluster.objects)
    cluster.requests.clear()
    await issuer.refresh()
    assert cluster.objects == made
    assert {verb for verb, _, _ in cluster.requests} == {"get"}


async def test_the_authoritys_key_is_in_its_own_secret_and_in_no_other(issuer: Issuer, cluster: FakeCluster) -> None:
    await issuer.refresh()
    key = decoded(cluster.objects[AUTHORITY], "tls.key")
    assert b"PRIVATE KEY" in key
    assert key not in [decoded(cluster.objects[CLIENT], name) for name in cluster.objects[CLIENT]["data"]]
    assert decoded(cluster.objects[CLIENT], "ca.crt") == decoded(cluster.objects[AUTHORITY], "tls.crt")


async def test_an_authority_that_is_deleted_comes_back_as_it_was(issuer: Issuer, cluster: FakeCluster) -> None:
    await issuer.refresh()
    before = cluster.objects.pop(AUTHORITY)
    await issuer.refresh()
    assert cluster.objects[AUTHORITY]["data"] == before["data"]


async def test_an_authority_of_an_administrator_is_adopted_and_the_client_follows(
    issuer: Issuer, cluster: FakeCluster
) -> None:
    await issuer.refresh()
    rotated = new_authority("rotated", NOW)
    cluster.put({**cluster.objects[AUTHORITY], "data": rotated.secret_data()})
    await issuer.refresh()
    assert issuer.authority.fingerprint == rotated.fingerprint
    facts = read_facts(cluster.objects[CLIENT])
    assert facts is not None
    assert facts.authority_fingerprint == rotated.fingerprint


async def test_an_authority_that_cannot_be_read_is_not_replaced(issuer: Issuer, cluster: FakeCluster) -> None:
    spoiled = {"kind": "Secret", "metadata": {"name": AUTHORITY.name, "namespace": "tin"}, "data": {"tls.crt": "eA=="}}
    cluster.put(spoiled)
    with pytest.raises(AuthorityInvalid):
        await issuer.refresh()
    assert cluster.objects[AUTHORITY]["data"] == spoiled["data"]


@pytest.mark.parametrize(("days", "renewed"), [(19, False), (21, True), (40, True)])
async def test_the_api_servers_certificate_is_renewed_in_time(
    issuer: Issuer, cluster: FakeCluster, clock: Clock, days: int, renewed: bool
) -> None:
    await issuer.refresh()
    before = cluster.objects[CLIENT]["data"]
    clock.now += timedelta(days=days)
    await issuer.refresh()
    assert (cluster.objects[CLIENT]["data"] != before) is renewed
    read_authority(cluster.objects[AUTHORITY])


async def test_a_session_is_requeued_within_an_hour_and_earlier_if_something_is_due(
    issuer: Issuer, clock: Clock
) -> None:
    """A timer of twenty days stands still while its machine sleeps."""
    assert await issuer.refresh() == 3600
    clock.now += timedelta(days=20, minutes=-30)
    assert await issuer.refresh() == 1800


async def test_a_problem_is_reported_until_it_is_fixed(issuer: Issuer, cluster: FakeCluster) -> None:
    await issuer.refresh()
    good = cluster.objects[AUTHORITY]
    cluster.put({**good, "data": {}})
    with pytest.raises(AuthorityInvalid):
        await issuer.refresh()
    assert issuer.problem is not None
    assert "tin/tinsmith-ca" in issuer.problem
    assert issuer.known_fingerprint is not None, "what was read before is still good"
    cluster.put(good)
    await issuer.refresh()
    assert issuer.problem is None


async def test_an_expired_authority_is_a_problem_and_no_crash(
    issuer: Issuer, cluster: FakeCluster, clock: Clock
) -> None:
    await issuer.refresh()
    clock.now += timedelta(days=3651)
    with pytest.raises(AuthorityInvalid):
        await issuer.refresh()
    assert issuer.problem is not None
    assert issuer.known_fingerprint is None


async def test_the_last_days_of_an_authority_are_no_time_of_endless_renewals(
    issuer: Issuer, cluster: FakeCluster, clock: Clock
) -> None:
    await issuer.refresh()
    clock.now += timedelta(days=3645)
    await issuer.refresh()
    cluster.requests.clear()
    await issuer.refresh()
    assert {verb for verb, _, _ in cluster.requests} == {"get"}


async def test_a_spoiled_client_secret_is_written_again(issuer: Issuer, cluster: FakeCluster) -> None:
    await issuer.refresh()
    cluster.put({**cluster.objects[CLIENT], "data": {}})
    await issuer.refresh()
    assert read_facts(cluster.objects[CLIENT]) is not None


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"app.kubernetes.io/managed-by": "cert-manager", "app.kubernetes.io/instance": "tinsmith"},
        {"app.kubernetes.io/managed-by": "tinsmith-operator", "app.kubernetes.io/instance": "another"},
    ],
    ids=["without labels", "another writer's", "another release's"],
)
async def test_a_foreign_secret_with_the_name_of_the_client_secret_is_reported_and_kept(
    issuer: Issuer, cluster: FakeCluster, labels: dict[str, str]
) -> None:
    """An ingress has its certificate under such a name, and its owner would restore it after every write."""
    ingress_certificate = new_authority("an ingress", NOW).secret_data()
    metadata = {"name": CLIENT.name, "namespace": "tin", "labels": labels}
    foreign = cluster.put(
        {"kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": ingress_certificate}
    )
    with pytest.raises(SecretTaken):
        await issuer.refresh()
    assert cluster.objects[CLIENT] == foreign
    assert issuer.problem is not None
    assert "tin/tinsmith-api-server-tls does not belong to this installation" in issuer.problem
    assert issuer.known_fingerprint is not None, "workers get their certificates all the same"
    del cluster.objects[CLIENT]
    await issuer.refresh()
    assert issuer.problem is None
    assert read_facts(cluster.objects[CLIENT]) is not None


async def test_the_operators_own_leaf_stays_until_it_is_due_and_is_in_no_secret(
    issuer: Issuer, cluster: FakeCluster, clock: Clock
) -> None:
    await issuer.refresh()
    leaf = issuer.operator_leaf()
    assert issuer.operator_leaf() is leaf
    assert set(cluster.objects) == {AUTHORITY, CLIENT}
    clock.now += timedelta(days=21)
    assert issuer.operator_leaf() is not leaf


async def test_a_foreign_secret_that_comes_between_is_left_for_the_next_refresh(
    issuer: Issuer, cluster: FakeCluster
) -> None:
    cluster.failures["create"] = [AlreadyExists("created by another program")]
    cluster.failures["get"] = [NotFound("not yet")]
    with pytest.raises(NotFound):
        await issuer.refresh()
