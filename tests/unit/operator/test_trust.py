from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from support.fake_cluster import FakeCluster
from tinsmith_operator.certificates import new_authority, read_authority, read_facts
from tinsmith_operator.errors import AlreadyExists, AuthorityInvalid, NotFound, SecretTaken, Unavailable
from tinsmith_operator.resources import Ref
from tinsmith_operator.trust import Trust

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
def trust(cluster: FakeCluster, clock: Clock) -> Trust:
    return make_trust(cluster, clock)


def make_trust(cluster: FakeCluster, clock: Clock) -> Trust:
    return Trust(
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
    trust: Trust, cluster: FakeCluster
) -> None:
    await trust.refresh()
    made = dict(cluster.objects)
    cluster.requests.clear()
    await trust.refresh()
    assert cluster.objects == made
    assert {verb for verb, _, _ in cluster.requests} == {"get"}


async def test_the_authoritys_key_is_in_its_own_secret_and_in_no_other(trust: Trust, cluster: FakeCluster) -> None:
    await trust.refresh()
    key = decoded(cluster.objects[AUTHORITY], "tls.key")
    assert b"PRIVATE KEY" in key
    assert key not in [decoded(cluster.objects[CLIENT], name) for name in cluster.objects[CLIENT]["data"]]
    assert decoded(cluster.objects[CLIENT], "ca.crt") == decoded(cluster.objects[AUTHORITY], "tls.crt")


async def test_another_operator_reads_the_authority_that_is_there(cluster: FakeCluster, clock: Clock) -> None:
    first, second = make_trust(cluster, clock), make_trust(cluster, clock)
    await first.refresh()
    await second.refresh()
    assert second.authority.fingerprint == first.authority.fingerprint


async def test_who_loses_the_race_to_make_it_takes_the_winners(cluster: FakeCluster, clock: Clock) -> None:
    first, second = make_trust(cluster, clock), make_trust(cluster, clock)
    await first.refresh()
    # It looked before the other one wrote.
    cluster.failures["get"] = [NotFound("not yet")]
    await second.refresh()
    assert second.authority.fingerprint == first.authority.fingerprint


async def test_an_authority_that_is_deleted_comes_back_as_it_was(trust: Trust, cluster: FakeCluster) -> None:
    await trust.refresh()
    before = cluster.objects.pop(AUTHORITY)
    await trust.refresh()
    assert cluster.objects[AUTHORITY]["data"] == before["data"]


async def test_an_authority_that_somebody_put_there_is_adopted_and_the_client_follows(
    trust: Trust, cluster: FakeCluster
) -> None:
    await trust.refresh()
    rotated = new_authority("rotated", NOW)
    cluster.put({**cluster.objects[AUTHORITY], "data": rotated.secret_data()})
    await trust.refresh()
    assert trust.authority.fingerprint == rotated.fingerprint
    facts = read_facts(cluster.objects[CLIENT])
    assert facts is not None
    assert facts.authority_fingerprint == rotated.fingerprint


async def test_an_authority_that_cannot_be_read_is_not_replaced(trust: Trust, cluster: FakeCluster) -> None:
    spoiled = {"kind": "Secret", "metadata": {"name": AUTHORITY.name, "namespace": "tin"}, "data": {"tls.crt": "eA=="}}
    cluster.put(spoiled)
    with pytest.raises(AuthorityInvalid):
        await trust.refresh()
    assert cluster.objects[AUTHORITY]["data"] == spoiled["data"]


@pytest.mark.parametrize(("days", "renewed"), [(19, False), (21, True), (40, True)])
async def test_the_api_servers_certificate_is_renewed_in_time(
    trust: Trust, cluster: FakeCluster, clock: Clock, days: int, renewed: bool
) -> None:
    await trust.refresh()
    before = cluster.objects[CLIENT]["data"]
    clock.now += timedelta(days=days)
    await trust.refresh()
    assert (cluster.objects[CLIENT]["data"] != before) is renewed
    read_authority(cluster.objects[AUTHORITY])


async def test_it_looks_again_within_the_hour_and_sooner_when_something_is_due(trust: Trust, clock: Clock) -> None:
    """A timer of twenty days stands still while its machine sleeps."""
    assert await trust.refresh() == 3600
    clock.now += timedelta(days=20, minutes=-30)
    assert await trust.refresh() == 1800


async def test_what_is_wrong_is_known_until_it_is_mended(trust: Trust, cluster: FakeCluster) -> None:
    await trust.refresh()
    good = cluster.objects[AUTHORITY]
    cluster.put({**good, "data": {}})
    with pytest.raises(AuthorityInvalid):
        await trust.refresh()
    assert trust.problem is not None
    assert "tin/tinsmith-ca" in trust.problem
    assert trust.known_fingerprint is not None, "what was read before is still good"
    cluster.put(good)
    await trust.refresh()
    assert trust.problem is None


async def test_an_api_server_that_is_away_is_no_problem_of_the_certificates(trust: Trust, cluster: FakeCluster) -> None:
    cluster.failures["get"] = [Unavailable("away")]
    with pytest.raises(Unavailable):
        await trust.refresh()
    assert not trust.is_known


async def test_an_authority_whose_time_has_passed_is_a_problem_and_no_crash(
    trust: Trust, cluster: FakeCluster, clock: Clock
) -> None:
    await trust.refresh()
    clock.now += timedelta(days=3651)
    with pytest.raises(AuthorityInvalid):
        await trust.refresh()
    assert trust.problem is not None
    assert trust.known_fingerprint is None


async def test_the_last_days_of_an_authority_are_no_time_of_endless_renewals(
    trust: Trust, cluster: FakeCluster, clock: Clock
) -> None:
    await trust.refresh()
    clock.now += timedelta(days=3645)
    await trust.refresh()
    cluster.requests.clear()
    await trust.refresh()
    assert {verb for verb, _, _ in cluster.requests} == {"get"}


async def test_a_spoiled_client_secret_is_written_anew(trust: Trust, cluster: FakeCluster) -> None:
    await trust.refresh()
    cluster.put({**cluster.objects[CLIENT], "data": {}})
    await trust.refresh()
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
async def test_a_strangers_secret_in_the_clients_place_is_told_and_left_alone(
    trust: Trust, cluster: FakeCluster, labels: dict[str, str]
) -> None:
    """An ingress has its certificate under such a name, and its writer would write it back for ever."""
    theirs = new_authority("an ingress", NOW).secret_data()
    metadata = {"name": CLIENT.name, "namespace": "tin", "labels": labels}
    stranger = cluster.put({"kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": theirs})
    with pytest.raises(SecretTaken):
        await trust.refresh()
    assert cluster.objects[CLIENT] == stranger
    assert trust.problem is not None
    assert "tin/tinsmith-api-server-tls is somebody else's" in trust.problem
    assert trust.known_fingerprint is not None, "workers get their certificates all the same"
    del cluster.objects[CLIENT]
    await trust.refresh()
    assert trust.problem is None
    assert read_facts(cluster.objects[CLIENT]) is not None


async def test_the_operators_own_leaf_stays_until_it_is_due_and_is_in_no_secret(
    trust: Trust, cluster: FakeCluster, clock: Clock
) -> None:
    await trust.refresh()
    leaf = trust.operator_leaf()
    assert trust.operator_leaf() is leaf
    assert set(cluster.objects) == {AUTHORITY, CLIENT}
    clock.now += timedelta(days=21)
    assert trust.operator_leaf() is not leaf


async def test_a_stranger_that_comes_between_is_left_for_the_next_refresh(trust: Trust, cluster: FakeCluster) -> None:
    cluster.failures["create"] = [AlreadyExists("a stranger's")]
    cluster.failures["get"] = [NotFound("not yet")]
    with pytest.raises(NotFound):
        await trust.refresh()
