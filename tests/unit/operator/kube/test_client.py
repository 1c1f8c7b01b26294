"""The client's requests, against a web server that records them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from support.kubernetes.api_proxy import write_kubeconfig
from tinsmith_operator.errors import (
    AlreadyExists,
    Conflict,
    NotFound,
    NotLeading,
    OperatorError,
    Refused,
    Throttled,
    Unavailable,
)
from tinsmith_operator.kube.client import Cluster, error_of
from tinsmith_operator.kube.connection import load_configuration, open_watch_session
from tinsmith_operator.kube.rate_limit import Priority, RateLimit
from tinsmith_operator.kube.resources import LEASES, SECRETS, SERVICES, SESSIONS, ApiCall, Resource, parse_call
from tinsmith_operator.kube.server_clock import ServerClock
from typing_extensions import override


class Wire:
    """Answers every request with `status` and `answer`, and remembers it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], str, Any]] = []
        self.status = 200
        self.answer: dict[str, Any] = {"metadata": {"resourceVersion": "7"}, "items": []}
        self.headers: dict[str, str] = {}
        self.tokens: list[str | None] = []
        self.answers: Callable[[web.Request], dict[str, Any]] = lambda _request: self.answer

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        sent = json.loads(body) if body else None
        self.requests.append((request.method, request.path, dict(request.query), request.content_type, sent))
        self.tokens.append(request.headers.get("Authorization"))
        return web.json_response(self.answers(request), status=self.status, headers=self.headers)


@pytest.fixture
async def wire(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    wire = Wire()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", wire.take)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, f"http://127.0.0.1:{runner.addresses[0][1]}")))
    yield wire
    await runner.cleanup()


class Permission:
    def __init__(self) -> None:
        self.granted = True
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        if not self.granted:
            raise NotLeading("no lease")
        return 10.0


@pytest.fixture
def permission() -> Permission:
    return Permission()


@pytest.fixture
def seen() -> list[tuple[ApiCall, str]]:
    return []


@pytest.fixture
async def cluster(wire: Wire, permission: Permission, seen: list[tuple[ApiCall, str]]) -> AsyncIterator[Cluster]:
    cluster = Cluster(RateLimit(1000, 1000), permission, lambda call, code: seen.append((call, code)))
    yield cluster
    await cluster.close()


SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "tiny", "namespace": "tin"}}
GUARD = {"uid": "u1", "resourceVersion": "5"}


async def test_a_create_is_a_post_under_our_name_of_which_no_field_may_be_dropped(cluster: Cluster, wire: Wire) -> None:
    await cluster.create(SERVICES, SERVICE)
    path = "/api/v1/namespaces/tin/services"
    query = {"fieldManager": "tinsmith-operator", "fieldValidation": "Strict"}
    assert wire.requests == [("POST", path, query, "application/json", SERVICE)]


async def test_an_apply_is_guarded_by_uid_and_version_and_forces_the_operators_fields(
    cluster: Cluster, wire: Wire
) -> None:
    manifest = {**SERVICE, "metadata": {**SERVICE["metadata"], **GUARD}}  # type: ignore[dict-item]
    await cluster.apply(SERVICES, manifest)
    [(method, path, query, content, body)] = wire.requests
    assert (method, path) == ("PATCH", "/api/v1/namespaces/tin/services/tiny")
    assert query == {"fieldManager": "tinsmith-operator", "force": "true"}
    assert content == "application/apply-patch+yaml"
    assert body == manifest


@pytest.mark.parametrize("missing", ["uid", "resourceVersion"])
async def test_an_apply_that_could_hit_another_object_is_not_sent(cluster: Cluster, wire: Wire, missing: str) -> None:
    guard = {name: value for name, value in GUARD.items() if name != missing}
    with pytest.raises(AssertionError, match="foreign object"):
        await cluster.apply(SERVICES, {**SERVICE, "metadata": {**SERVICE["metadata"], **guard}})  # type: ignore[dict-item]
    assert wire.requests == []


@pytest.mark.parametrize("sealed", [True, False])
async def test_fields_are_taken_over_from_this_very_version_and_break_its_seal(
    cluster: Cluster, wire: Wire, sealed: bool
) -> None:
    annotations = {"annotations": {"tinsmith.dev/configuration": "a hash"}} if sealed else {}
    await cluster.own_created_fields(SERVICES, {"metadata": {**SERVICE["metadata"], **GUARD, **annotations}}, [])  # type: ignore[dict-item]
    [(method, path, _, content, body)] = wire.requests
    assert (method, path, content) == (
        "PATCH",
        "/api/v1/namespaces/tin/services/tiny",
        "application/json-patch+json",
    )
    guard, managed, *seal = body
    assert guard == {"op": "replace", "path": "/metadata/resourceVersion", "value": "5"}
    assert managed == {"op": "replace", "path": "/metadata/managedFields", "value": []}
    assert seal == [{"op": "remove", "path": "/metadata/annotations/tinsmith.dev~1configuration"}] * sealed


async def test_finalizers_are_set_on_this_very_version(cluster: Cluster, wire: Wire) -> None:
    manifest = {"metadata": {"name": "tiny", "namespace": "tin", **GUARD}}
    await cluster.merge(SESSIONS, manifest, {"metadata": {"finalizers": ["tinsmith.dev/claim"]}})
    [(method, _, _, content, body)] = wire.requests
    assert (method, content) == ("PATCH", "application/merge-patch+json")
    assert body == {"metadata": {"finalizers": ["tinsmith.dev/claim"], **GUARD}}


async def test_a_list_requests_the_watched_objects_and_names_the_kind_of_each_item(
    cluster: Cluster, wire: Wire
) -> None:
    wire.answer = {"metadata": {"resourceVersion": "99"}, "items": [{"metadata": {"name": "a"}}]}
    items, version = await cluster.list_all(SECRETS, "tin")
    assert wire.requests[0][2] == {"labelSelector": "app.kubernetes.io/managed-by=tinsmith-operator", "limit": "100"}
    assert items == [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}]
    assert version == 99


async def test_a_list_is_read_page_by_page(cluster: Cluster, wire: Wire) -> None:
    def answer(request: web.Request) -> dict[str, Any]:
        number = int(request.query.get("continue", "0"))
        after = {"continue": str(number + 1)} if number < 2 else {}
        return {"metadata": {"resourceVersion": "99", **after}, "items": [{"metadata": {"name": f"s{number}"}}]}

    wire.answers = answer
    items, version = await cluster.list_all(SECRETS, "tin")
    assert ([item["metadata"]["name"] for item in items], version) == (["s0", "s1", "s2"], 99)
    assert [request[2].get("continue") for request in wire.requests] == [None, "1", "2"]


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda cluster: cluster.get(SECRETS, "tin", "one"), True),
        (lambda cluster: cluster.list_all(SECRETS, "tin"), True),
        (lambda cluster: cluster.try_list(SECRETS, "tin"), True),
        (lambda cluster: cluster.read_lease(LEASES, "tin", "lease"), False),
    ],
    ids=["get", "list", "try", "lease"],
)
async def test_a_read_waits_for_its_turn_like_a_write_and_the_lease_never_waits(
    wire: Wire, read: Callable[[Cluster], Awaitable[Any]], waits: bool
) -> None:
    limit = CountedLimit()
    cluster = Cluster(limit, lambda: 10.0, lambda *_: None)
    await read(cluster)
    assert limit.turns == (1 if waits else 0)
    await cluster.close()


async def test_a_read_that_is_throttled_delays_the_next_read(wire: Wire) -> None:
    limit = CountedLimit()
    cluster = Cluster(limit, lambda: 10.0, lambda *_: None)
    wire.status, wire.headers = 429, {"Retry-After": "36"}
    with pytest.raises(Throttled):
        await cluster.get(SECRETS, "tin", "one")
    assert limit.held == [36.0]
    await cluster.close()


@pytest.mark.parametrize("read", ["get", "read_lease"])
async def test_the_date_of_any_answer_tells_a_clock_that_is_two_hours_off(wire: Wire, read: str) -> None:
    clock = ServerClock(lambda: datetime.now(UTC) + timedelta(hours=2))
    cluster = Cluster(RateLimit(1000, 1000), lambda: 10.0, lambda *_: None, clock)
    await getattr(cluster, read)(SERVICES, "tin", "tiny")
    assert clock.problem is not None
    assert -7205 < clock.offset_seconds < -7190
    assert clock.now() < datetime.now(UTC) + timedelta(minutes=1)
    await cluster.close()


@pytest.mark.parametrize("resource", [SECRETS, SERVICES])
async def test_secrets_and_reads_take_an_earlier_turn_than_other_objects(wire: Wire, resource: Resource) -> None:
    limit = CountedLimit()
    cluster = Cluster(limit, lambda: 10.0, lambda *_: None)
    await cluster.create(resource, {**SERVICE, "apiVersion": resource.api_version, "kind": resource.kind})
    await cluster.get(resource, "tin", "tiny")
    ordinary = Priority.ESSENTIAL if resource is SECRETS else Priority.ORDINARY
    assert limit.priorities == [ordinary, Priority.ESSENTIAL]
    await cluster.close()


class CountedLimit(RateLimit):
    def __init__(self) -> None:
        super().__init__(per_second=1000.0, burst=10)
        self.turns = 0
        self.priorities: list[Priority] = []
        self.held: list[float] = []

    @override
    async def wait(self, priority: Priority = Priority.ORDINARY) -> None:
        self.turns += 1
        self.priorities.append(priority)
        await super().wait(priority)

    @override
    def hold(self, seconds: float) -> None:
        self.held.append(seconds)


async def test_without_permission_nothing_is_written(cluster: Cluster, wire: Wire, permission: Permission) -> None:
    permission.granted = False
    with pytest.raises(NotLeading):
        await cluster.create(SERVICES, SERVICE)
    assert wire.requests == []


async def test_reading_and_the_lease_itself_need_no_permission(
    cluster: Cluster, wire: Wire, permission: Permission
) -> None:
    permission.granted = False
    await cluster.get(SERVICES, "tin", "tiny")
    lease = {"metadata": {"name": "operator", "namespace": "tin"}}
    await cluster.write_lease(LEASES, lease, 5)
    await cluster.write_lease(LEASES, {"metadata": {**lease["metadata"], "resourceVersion": "3"}}, 5)
    assert [request[:2] for request in wire.requests[1:]] == [
        ("POST", "/apis/coordination.k8s.io/v1/namespaces/tin/leases"),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/tin/leases/operator"),
    ]


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (400, "BadRequest", Refused),
        (403, "Forbidden", Refused),
        (422, "Invalid", Refused),
        (429, "TooManyRequests", Throttled),
        (401, "Unauthorized", Unavailable),
        (410, "Expired", Unavailable),
        (500, "InternalError", Unavailable),
        (503, "ServiceUnavailable", Unavailable),
        (504, "Timeout", Unavailable),
    ],
)
async def test_each_status_becomes_an_error_of_the_client(
    cluster: Cluster, wire: Wire, status: int, reason: str, error: type[Exception]
) -> None:
    wire.status, wire.answer = status, {"kind": "Status", "reason": reason, "message": "what the server says"}
    with pytest.raises(error, match="what the server says") as raised:
        await cluster.get(SERVICES, "tin", "tiny")
    assert type(raised.value) is error


def test_a_refusal_is_the_message_of_the_server() -> None:
    """The text appears in the session's conditions."""
    body = json.dumps({"reason": "Forbidden", "message": "exceeded quota: small"}).encode()
    assert str(error_of(403, body, None, "POST /x")) == "exceeded quota: small"


def test_an_admission_webhook_that_does_not_answer_is_a_refusal_which_the_status_can_quote() -> None:
    words = 'Internal error occurred: failed calling webhook "a.example": failed to call webhook: connection refused'
    error = error_of(500, json.dumps({"reason": "InternalError", "message": words}).encode(), None, "POST /x")
    assert isinstance(error, Refused)
    assert str(error) == words


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            "failed to create typed patch object (tin/tiny; apps/v1, Kind=StatefulSet): "
            ".spec.template.spec.affinity.nodeAffinity.typo: field not declared in schema",
            Refused,
        ),
        ("failed to create typed live object (tin/tiny; apps/v1, Kind=StatefulSet): a bug of its own", Unavailable),
        ("etcdserver: request timed out", Unavailable),
    ],
    ids=["what was sent", "what is there", "its store"],
)
def test_an_apply_against_the_schema_is_a_refusal_though_the_server_calls_it_its_own_failure(
    message: str, error: type[Exception]
) -> None:
    body = json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": 500}).encode()
    answer = error_of(500, body, None, "PATCH /x")
    assert type(answer) is error
    assert message in str(answer)


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b"", b"[]"], ids=["html", "empty", "no object"])
def test_an_answer_that_is_not_a_status_is_understood_by_its_number(body: bytes) -> None:
    assert isinstance(error_of(502, body, None, "GET /x"), Unavailable)


async def test_the_pause_that_the_server_requests_is_returned(cluster: Cluster, wire: Wire) -> None:
    wire.status, wire.answer, wire.headers = 503, {"message": "later"}, {"Retry-After": "9"}
    with pytest.raises(Unavailable) as raised:
        await cluster.get(SERVICES, "tin", "tiny")
    assert raised.value.retry_after_seconds == 9


async def test_an_expired_token_is_read_again_for_the_next_request(cluster: Cluster, wire: Wire, tmp_path: Any) -> None:
    (tmp_path / "token").write_text("first")
    await cluster.get(SERVICES, "tin", "tiny")
    (tmp_path / "token").write_text("second")
    wire.status, wire.answer = 401, {"message": "expired"}
    with pytest.raises(Unavailable):
        await cluster.get(SERVICES, "tin", "tiny")
    wire.status = 200
    await cluster.get(SERVICES, "tin", "tiny")
    assert wire.tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_every_request_is_counted_with_its_code(
    cluster: Cluster, wire: Wire, seen: list[tuple[ApiCall, str]]
) -> None:
    wire.status = 404
    with pytest.raises(NotFound):
        await cluster.get(SERVICES, "tin", "tiny")
    assert seen == [(ApiCall("get", "services", "tiny"), "404")]


@pytest.mark.parametrize(
    ("method", "path", "watch", "call"),
    [
        ("GET", "/api/v1/namespaces/tin/pods", False, ApiCall("list", "pods", None)),
        ("GET", "/api/v1/namespaces/tin/pods", True, ApiCall("watch", "pods", None)),
        ("GET", "/api/v1/namespaces/tin/pods/tiny-0", False, ApiCall("get", "pods", "tiny-0")),
        ("POST", "/apis/apps/v1/namespaces/tin/statefulsets", False, ApiCall("create", "statefulsets", None)),
        (
            "PATCH",
            "/apis/tinsmith.dev/v1alpha1/namespaces/tin/trainingsessions/tiny/status",
            False,
            ApiCall("patch", "trainingsessions/status", "tiny"),
        ),
        ("DELETE", "/api/v1/namespaces/tin/pods/tiny-0", False, ApiCall("delete", "pods", "tiny-0")),
        ("GET", "/apis/apps/v1", False, ApiCall("get", "discovery", None)),
        ("GET", "/api", False, ApiCall("get", "discovery", None)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_path_names_the_action_and_its_object(method: str, path: str, watch: bool, call: ApiCall) -> None:
    assert parse_call(method, path, watch) == call


async def test_missing_credentials_are_reported_with_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(OperatorError, match="service account, or set KUBECONFIG"):
        await load_configuration()


async def test_a_list_for_the_watch_is_read_in_parallel(wire: Wire) -> None:
    """The operator therefore needs no second request."""
    heard: list[tuple[str | None, str, str, Any, bool]] = []
    turns: list[str] = []

    async def turn() -> None:
        turns.append("taken")

    session = await open_watch_session(lambda *_: None, lambda *page: heard.append(page), lambda *_: None, turn)
    async with session.http as http:
        for path in ("/api/v1/namespaces/tin/secrets", "/api/v1/pods", "/api/v1/namespaces/tin/secrets/one"):
            async with http.get(session.server + path) as response:
                assert await response.json() == wire.answer
        async with http.get(f"{session.server}/api/v1/pods?watch=true") as response:
            assert [part async for part in response.content] != []
        assert len(turns) == 2, "a watch waits for none, nor does what is asked once"
        async with http.get(f"{session.server}/api/v1/pods?limit=500&continue=next") as response:
            await response.json()
        wire.status = 403
        async with http.get(f"{session.server}/api/v1/pods") as response:
            await response.read()
    assert heard == [
        ("tin", "secrets", "200", wire.answer, True),
        (None, "pods", "200", wire.answer, True),
        (None, "pods", "200", wire.answer, False),
        (None, "pods", "403", None, True),
    ]


async def test_whether_a_kind_can_be_listed_is_asked_without_listing_it(cluster: Cluster, wire: Wire) -> None:
    await cluster.try_list(SECRETS, "tin")
    assert [request[:3] for request in wire.requests] == [("GET", "/api/v1/namespaces/tin/secrets", {"limit": "1"})]


async def test_a_delete_names_the_uid(cluster: Cluster, wire: Wire) -> None:
    await cluster.delete(SERVICES, "tin", "tiny", "u1", grace_period_seconds=7)
    [(method, path, _, _, body)] = wire.requests
    assert (method, path) == ("DELETE", "/api/v1/namespaces/tin/services/tiny")
    assert body == {"preconditions": {"uid": "u1"}, "propagationPolicy": "Background", "gracePeriodSeconds": 7}
