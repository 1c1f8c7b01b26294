"""One operator as it is put together, over a cluster in memory and in simulated time."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

import pytest
import structlog
from support.operator.fake_cluster import FakeCluster
from support.operator.odd_certificates import odd_leaves
from support.operator.operators import pool_manifest, session_manifest, settings_for
from support.simulated_time import simulated_time
from tinsmith_operator.api.names import MANAGED_BY_LABEL, MANAGER, SESSION_LABEL, SNAPSHOT_REQUEST_ANNOTATION
from tinsmith_operator.ca.certificates import Use, new_authority, parse_facts
from tinsmith_operator.ca.issuer import LOOK_AGAIN_SECONDS
from tinsmith_operator.ca.rotation import ROTATE_ANNOTATION, State, read_stored
from tinsmith_operator.errors import Unavailable
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.resources import POOLS, SESSIONS, TEMPLATES, Ref, Resource
from tinsmith_operator.kube.watch_stream import ListAnswered
from tinsmith_operator.runtime import observe, running
from tinsmith_operator.runtime.running import UNWATCHED_LOOK_SECONDS, Operator
from tinsmith_operator.runtime.worker_client import Silent, Target
from tinsmith_operator.settings import Settings

AUTHORITY = Ref("Secret", "tin", "tinsmith-ca")
CLIENT = Ref("Secret", "tin", "tinsmith-api-server-tls")
FIRST_KEY = Ref("Secret", "tin", "first-key")
KEPT = "tinsmith_operator_certificates_kept"
UNKNOWN = "tinsmith_operator_kinds_unknown"
ENDS = "tinsmith_operator_certificate_expiry_timestamp_seconds"


class LeasingCluster(FakeCluster):
    """lease_is_away: the API server answers no renewal.

    slow_renewals_seconds: how long the first renewals take. first_lists_seconds: how long the first lists take.
    """

    lease_is_away = False
    slow_renewals_seconds: Sequence[float] = ()
    first_lists_seconds = 0.0

    async def write_lease(self, resource: Resource, manifest: dict[str, Any], _timeout_seconds: float) -> Any:
        if self.lease_is_away:
            raise Unavailable("away")
        if self.slow_renewals_seconds:
            seconds, *self.slow_renewals_seconds = self.slow_renewals_seconds
            await asyncio.sleep(seconds)
        return self.put(manifest)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class ListingWatch:
    """Lists each of its kinds once, and shows no event."""

    has_ended = False

    def __init__(
        self,
        cluster: LeasingCluster,
        scope: Scope,
        _deliver: object,
        on_list: ListAnswered,
        _observe: object,
        _turn: object,
        resources: Sequence[Resource],
    ) -> None:
        self._cluster = cluster
        self._scope = scope
        self._on_list = on_list
        self._resources = resources

    async def run(self) -> None:
        await asyncio.sleep(self._cluster.first_lists_seconds)
        for part in self._scope.parts:
            for resource in self._resources:
                if part in self._cluster.forbidden:
                    self._on_list(part, resource.plural, "403", None)
                else:
                    self._on_list(part, resource.plural, "200", await self._cluster.list_answer(resource, part))
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Do nothing: nothing runs any more."""


@asynccontextmanager
async def operator_over(
    cluster: LeasingCluster, settings: Settings, monkeypatch: pytest.MonkeyPatch, **asks: Any
) -> AsyncIterator[Operator]:
    """Yield a leading operator that has checked its certificates. asks: the function that queries workers."""
    monkeypatch.setattr(running, "Cluster", lambda *_: cluster)
    monkeypatch.setattr(running, "Watch", partial(ListingWatch, cluster))
    operator, stop = Operator(settings, **asks), asyncio.Event()
    task = asyncio.create_task(operator.run(stop))
    await asyncio.sleep(1)
    try:
        yield operator
    finally:
        stop.set()
        await task


def metric_lines(operator: Operator, metric: str) -> list[str]:
    page = operator.metrics.render().decode()
    return [line for line in page.splitlines() if line.startswith(metric)]


@pytest.fixture
def cluster() -> LeasingCluster:
    return LeasingCluster()


def test_a_former_leader_reports_no_certificates_of_the_installation(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former leader no longer reads them, so its metrics would never change."""
    settings = settings_for("tin", lease_seconds=15)

    @simulated_time
    async def live() -> None:
        async with operator_over(cluster, settings, monkeypatch) as operator:
            assert len(metric_lines(operator, ENDS)) == 2
            cluster.lease_is_away = True
            await asyncio.sleep(60)
            assert metric_lines(operator, ENDS) == []

    live()


def test_a_former_leader_reports_no_problem_with_certificates(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for("tin", lease_seconds=15)
    spoiled = {"kind": "Secret", "metadata": {"name": AUTHORITY.name, "namespace": "tin"}, "data": {"tls.crt": "eA=="}}

    @simulated_time
    async def live() -> None:
        cluster.put(spoiled)
        async with operator_over(cluster, settings, monkeypatch) as operator:
            assert metric_lines(operator, KEPT) == [f"{KEPT} 0.0"]
            cluster.lease_is_away = True
            await asyncio.sleep(60)
            assert metric_lines(operator, KEPT) == [f"{KEPT} 1.0"]

    live()


@pytest.mark.parametrize(
    ("namespaces", "seconds"),
    [("", LOOK_AGAIN_SECONDS), ("tin,research", LOOK_AGAIN_SECONDS), ("research", UNWATCHED_LOOK_SECONDS)],
    ids=["its own", "its own and another", "not its own"],
)
def test_the_installations_secrets_are_looked_at_every_minute_where_no_watch_tells_of_them(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch, namespaces: str, seconds: float
) -> None:
    settings = settings_for("tin", watch_namespaces=namespaces, first_key_secret=FIRST_KEY.name)

    @simulated_time
    async def live() -> None:
        async with operator_over(cluster, settings, monkeypatch):
            for lost in (CLIENT, FIRST_KEY):
                del cluster.objects[lost]
            await asyncio.sleep(seconds - 10)
            assert CLIENT not in cluster.objects
            assert FIRST_KEY not in cluster.objects
            await asyncio.sleep(20)
            assert CLIENT in cluster.objects
            assert FIRST_KEY in cluster.objects

    live()


MANY = 5000


def worker_secret(name: str, data: dict[str, str]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "tinsmith-operator"}
    metadata = {"name": name, "namespace": "tin", "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def leaf_data(now: datetime) -> dict[str, str]:
    return new_authority("tinsmith", now).issue(("uid.worker.tinsmith.internal",), Use.SERVER, now).secret_data()


def test_a_secret_of_thousands_is_parsed_once_and_not_at_every_scrape(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = leaf_data(datetime.now(UTC))
    # No two are alike, as in a cluster: no program reads the text before a PEM block.
    padded = [base64.b64encode(b"%d\n" % n + base64.b64decode(data["tls.crt"])).decode() for n in range(MANY)]
    parsed = 0

    def count(*arguments: Any) -> Any:
        nonlocal parsed
        parsed += 1
        return parse_facts(*arguments)

    monkeypatch.setattr(observe, "parse_facts", count)

    @simulated_time
    async def live() -> None:
        for n, certificate in enumerate(padded):
            cluster.put(worker_secret(f"worker-{n}", {**data, "tls.crt": certificate}))
        async with operator_over(cluster, settings_for("tin", lease_seconds=15), monkeypatch) as operator:
            for _ in range(3):
                assert len(metric_lines(operator, f'{ENDS}{{namespace="tin",secret="worker-')) == MANY

    live()
    assert parsed == MANY


def test_metrics_continue_in_spite_of_an_invalid_secret_that_the_log_names_once(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who may write Secrets in a namespace can give one the operator's label."""
    good, odd = leaf_data(datetime.now(UTC)), odd_leaves()

    @simulated_time
    async def live() -> None:
        cluster.put(worker_secret("good", good))
        for name, leaf in odd.items():
            cluster.put(worker_secret(name, leaf.secret_data()))
        async with operator_over(cluster, settings_for("tin", lease_seconds=15), monkeypatch) as operator:
            with structlog.testing.capture_logs() as logs:
                scrapes = [metric_lines(operator, f'{ENDS}{{namespace="tin",secret="') for _ in range(3)]
        assert [len(each) for each in scrapes] == [3, 3, 3], "its own two, and the good one"
        said = [str(entry["error"]) for entry in logs if entry["event"] == "certificate not read"]
        assert sorted(sentence.split()[2] for sentence in said) == sorted(f"tin/{name}" for name in odd)
        assert all("remove its label app.kubernetes.io/managed-by" in sentence for sentence in said)

    live()


def test_an_odd_authority_stops_no_operator_and_certificates_are_not_kept(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = odd_leaves()["twice-an-extension"].secret_data()

    @simulated_time
    async def live() -> None:
        cluster.put({"kind": "Secret", "metadata": {"name": AUTHORITY.name, "namespace": "tin"}, "data": spoiled})
        async with operator_over(cluster, settings_for("tin", lease_seconds=15), monkeypatch) as operator:
            await asyncio.sleep(60)
            assert metric_lines(operator, KEPT) == [f"{KEPT} 0.0"]

    live()


def a_started_worker(cluster: LeasingCluster) -> None:
    """Start a worker whose session has a pending snapshot request."""
    annotations = {SNAPSHOT_REQUEST_ANNOTATION: "2026-02-01T12:00:00Z"}
    session = session_manifest("tiny")
    cluster.put(
        {**session, "metadata": {"name": "tiny", "namespace": "tin", "generation": 1, "annotations": annotations}}
    )
    labels = {MANAGED_BY_LABEL: MANAGER, SESSION_LABEL: "tiny"}
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    claim = {"name": "tiny-journal", "namespace": "tin", "labels": labels}
    cluster.put({"kind": "PersistentVolumeClaim", "metadata": claim, "spec": size})
    started = {"containerStatuses": [{"name": "worker", "started": True}]}
    cluster.put(
        {"kind": "Pod", "metadata": {"name": "tiny-0", "namespace": "tin", "labels": labels}, "status": started}
    )


async def note_and_be_silent(calls: list[str], what: str, _target: Target) -> NoReturn:
    calls.append(what)
    raise Silent("busy")


def test_a_former_leader_calls_no_worker(cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader queries them; an old report or a second snapshot would do harm."""
    calls: list[str] = []
    describe, snapshot = (partial(note_and_be_silent, calls, what) for what in ("describe", "snapshot"))
    a_started_worker(cluster)
    settings = settings_for("tin", lease_seconds=15)

    @simulated_time
    async def live() -> None:
        async with operator_over(cluster, settings, monkeypatch, describe=describe, snapshot=snapshot):
            await asyncio.sleep(30)
            assert {"describe", "snapshot"} <= set(calls)
            cluster.lease_is_away = True
            await asyncio.sleep(15)
            calls.clear()
            await asyncio.sleep(600)
            assert calls == []
            cluster.lease_is_away = False
            await asyncio.sleep(60)
            assert {"describe", "snapshot"} <= set(calls)

    live()


def test_a_renewal_that_is_slow_at_the_start_keeps_no_leader_from_acting(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permit lapses while the first lists arrive, and the lead continues without a new term."""
    calls: list[str] = []
    describe = partial(note_and_be_silent, calls, "describe")
    a_started_worker(cluster)
    # The lease permits acting for 10 s; the renewal that is sent after 3 s is answered after 12 s.
    settings = settings_for("tin", lease_seconds=15)
    cluster.slow_renewals_seconds, cluster.first_lists_seconds = (0, 9), 11

    @simulated_time
    async def live() -> None:
        async with operator_over(cluster, settings, monkeypatch, describe=describe):
            await asyncio.sleep(30)
            assert calls

    live()


@pytest.mark.parametrize(("missing", "served"), [(POOLS, SESSIONS), (SESSIONS, POOLS)], ids=["pools", "sessions"])
def test_an_operator_without_one_crd_serves_the_other_kind_and_picks_it_up_when_it_is_installed(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch, missing: Resource, served: Resource
) -> None:
    settings = settings_for("tin", lease_seconds=15)
    manifests = {SESSIONS: session_manifest("tiny"), POOLS: pool_manifest("tiny")}

    def has_status(resource: Resource) -> bool:
        return "status" in cluster.objects.get(Ref(resource.kind, "tin", "tiny"), {})

    @simulated_time
    async def live() -> None:
        cluster.missing, cluster.discovered = {missing.plural}, {served.plural, TEMPLATES.plural}
        put_owner(cluster, manifests[served])
        async with operator_over(cluster, settings, monkeypatch) as operator:
            await asyncio.sleep(30)
            assert has_status(served)
            assert metric_lines(operator, UNKNOWN) == [f"{UNKNOWN} 1.0"]
            cluster.missing, cluster.discovered = set(), {missing.plural, served.plural, TEMPLATES.plural}
            put_owner(cluster, manifests[missing])
            await asyncio.sleep(30)
            assert has_status(missing)
            assert metric_lines(operator, UNKNOWN) == [f"{UNKNOWN} 0.0"]

    live()


def put_owner(cluster: LeasingCluster, manifest: dict[str, Any]) -> None:
    cluster.put({**manifest, "metadata": {**manifest["metadata"], "namespace": "tin", "generation": 1}})


def test_a_rotation_is_not_finished_without_the_sessions_of_a_namespace_that_may_not_be_listed(
    cluster: LeasingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for("tin", lease_seconds=15, watch_namespaces="tin,forbidden", ca_pause_seconds=1)

    @simulated_time
    async def live() -> None:
        cluster.forbidden = {"forbidden"}
        async with operator_over(cluster, settings, monkeypatch):
            secret = cluster.objects[AUTHORITY]
            metadata = {**secret["metadata"], "annotations": {ROTATE_ANNOTATION: "please"}}
            cluster.put({**secret, "metadata": metadata})
            await asyncio.sleep(LOOK_AGAIN_SECONDS * 2)
            assert read_stored(cluster.objects[AUTHORITY]).state is State.TRUSTING

    live()
