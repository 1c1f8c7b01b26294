"""Isolation: a tenant that knows another's IDs gets from every endpoint the answer for unknown IDs.

The cases come from the server's own OpenAPI document: an endpoint with a field that is not known here fails.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support.server.attacked_server import AttackedServer, Tenant
from support.server.every_endpoint import IDS, OTHERS, document, furnished
from tinsmith_rpc import wire_pb2

UNKNOWN_SESSION = "sess-" + "0" * 32
# A name of something new: no id of anything that is there.
NEW_NAMES = {"/save_weights", "/save_weights_for_sampler", "/save_weights_external"}
# Read before the body is understood: where it goes depends on which of them is there.
NOT_IN_THE_DOCUMENT = {"/load_weights": {"model_id", "session_id"}}
NUMBERS = {"seq_id", "model_seq_id"}
# Fields that hold one, which names something.
WRAPPED = {"target": "sampling_session_id"}
# What may be left out, and is said here: without a number, or a prompt, it would go another way.
SAID = NUMBERS | {"prompt"}
# They contain no ID of a tenant. A link for a download or an upload is its own permission.
WITHOUT_IDS = {
    "/health",
    "/healthz",
    "/readyz",
    "/client/config",
    "/client/dynamic_config",
    "/telemetry",
    "/create_session",
}
# An upload's id says whose it is, which tests/contract/http/test_adapter_imports.py tries out.
WITHOUT_IDS |= {"/external_weights_upload_start", "/external_weights_upload_finish"}
# What these say is about the key that they come with.
WITHOUT_IDS |= {"/auth/token", "/auth/apikey/me"}
# Base models are for all tenants, and so are their tokenizers and capabilities.
WITHOUT_IDS |= {"/models/{base_model}/tokenizer", "/check_needs"}
# It finds only the caller's checkpoints: tests/contract/http/test_checkpoint_search.py.
WITHOUT_IDS |= {"/checkpoints/search"}
# The answer of a search that finds nothing: a search is never refused.
FOUND_NOTHING = '{"sessions":[]}'
# Whose name it is says the key; tests/contract/http/test_promotions.py tries out that of another's there is no word.
WITHOUT_IDS |= {"/promotions/{name}/rollback"}
# The server draws its id; tests/contract/http/test_recordings.py tries out that of another tenant's.
WITHOUT_IDS |= {"/recordings/{recording_id}"}
# They are for admins alone: tests/contract/http/test_roles.py.
WITHOUT_IDS |= {"/keys", "/keys/{key_id}", "/tenants", "/tenants/{tenant}/limits", "/workers"}
WITH_A_LINK = {"/downloads/{token}/{path}", "/archives/{token}", "/uploads/{token}/{name}", "/traces/{token}"}
REPORTS = {"/audit", "/billing/usage/events", "/billing/usage/checkpoints/current"}


@dataclass(frozen=True)
class Case:
    """One id of one endpoint."""

    method: str
    path: str
    id_field: str
    body: frozenset[str] = field(default_factory=frozenset)
    protobuf: bool = False
    in_query: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.id_field}"


def operations(api: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in api["paths"].items():
        if path.startswith("/api/v1") and not path.endswith("/live"):  # streams: tests/contract/http/test_runs.py
            for method, operation in methods.items():
                yield method.upper(), path.removeprefix("/api/v1"), operation


def body_fields(api: dict[str, Any], operation: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the fields that a body must have, and those that name something."""
    content = operation.get("requestBody", {}).get("content", {})
    if "application/x-protobuf" in content:
        return {"model_id", "seq_id"}, {"model_id"}
    if "application/json" not in content:
        return set(), set()
    schema = api["components"]["schemas"][content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]]
    properties = schema["properties"]
    said = {name for name in SAID & properties.keys() if properties[name].get("type") != "null"}
    return set(schema.get("required", ())) | said, properties.keys() & (IDS.keys() | WRAPPED.keys())


def cases(api: dict[str, Any]) -> list[Case]:
    found = []
    for method, path, operation in operations(api):
        in_path = set(re.findall(r"{(\w+)}", path)) if path not in WITH_A_LINK else set()
        unknown = in_path - IDS.keys() - OTHERS.keys()
        assert not unknown, f"{method} {path} has {unknown}: say what it is in IDS or OTHERS"
        required, named = body_fields(api, operation)
        named -= {"path"} if path in NEW_NAMES else set()
        named |= NOT_IN_THE_DOCUMENT.get(path, set())
        protobuf = "application/x-protobuf" in operation.get("requestBody", {}).get("content", {})
        found += [
            Case(method, path, id_field, frozenset(required | ({id_field} & named)), protobuf)
            for id_field in sorted(in_path & IDS.keys() | named)
        ]
        in_query = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"}
        found += [Case(method, path, id_field, in_query=True) for id_field in sorted(in_query & IDS.keys())]
    return found


@dataclass
class Asking:
    """The stranger, with things of its own; and numbers that it has not used yet."""

    tenant: Tenant
    session: str
    last_number: int = 10

    def value(self, case: Case, name: str, session: str) -> Any:
        if name in NUMBERS:
            self.last_number += 1
            return self.last_number
        if name in WRAPPED:
            return {WRAPPED[name]: self.value(case, WRAPPED[name], session)}
        if name in IDS and not (name == "path" and case.path in NEW_NAMES):
            return IDS[name].format(session=session if case.id_field in (name, _wrapping(name)) else self.session)
        return OTHERS[name]

    async def ask(self, case: Case, session: str) -> tuple[int, str]:
        """Send the case with an ID of this session, and return the answer; a future is waited for."""
        path = case.path.format_map(_Values(self, case, session))
        fields = case.body | ({"seq_id"} if "model_id" in case.body and case.path == "/load_weights" else set())
        body = {
            name: self.value(case, name, session)
            for name in sorted(fields | ({case.id_field} if case.in_query else set()))
        }
        if case.path == "/load_weights" and case.id_field == "session_id":
            body["model_seq_id"] = self.value(case, "model_seq_id", session)
        elif case.path == "/load_weights" and "model_id" not in body:
            body |= {"model_id": IDS["model_id"].format(session=self.session)}
            body["seq_id"] = self.value(case, "seq_id", session)
        if case.path == "/save_weights_for_sampler":
            body["path"] = OTHERS["path"]
        response = await self._send(case, path, body)
        if response.status_code == httpx.codes.OK and "request_id" in (made := response.json()):
            response = await self.tenant.post("/retrieve_future", {"request_id": made["request_id"]})
        return response.status_code, self._without_ids(response.text, session)

    async def _send(self, case: Case, path: str, body: Mapping[str, Any]) -> httpx.Response:
        if case.protobuf:
            content = wire_pb2.ForwardBackwardRequest(**body).SerializeToString()
            return await self.tenant.client.request(case.method, path, content=content)
        if case.in_query:
            return await self.tenant.client.request(case.method, path, params=body)
        return await self.tenant.client.request(case.method, path, json=body if case.body else None)

    def _without_ids(self, text: str, session: str) -> str:
        return re.sub(r":(op|train|sample|asample):\d+", r":\1:N", text.replace(session, "ID"))


def _wrapping(name: str) -> str | None:
    return next((wrapping for wrapping, wrapped in WRAPPED.items() if wrapped == name), None)


class _Values(dict[str, Any]):
    """The values for the template of a path."""

    def __init__(self, asking: Asking, case: Case, session: str) -> None:
        super().__init__()
        self._of = asking, case, session

    def __missing__(self, name: str) -> Any:
        asking, case, session = self._of
        return asking.value(case, name, session)


@asynccontextmanager
async def owner_and_stranger(server: AttackedServer) -> AsyncIterator[tuple[str, Asking]]:
    """Return the session of the owner, with a model, checkpoints, a sampler and a sample, and the stranger who asks."""
    async with server.tenant("victim") as owner, server.tenant("attacker") as stranger:
        yield await furnished(owner), Asking(stranger, await furnished(stranger))


async def test_every_endpoint_answers_for_a_strangers_id_as_for_an_unknown_one(
    server: AttackedServer, tmp_path: Any
) -> None:
    asked = cases(document(tmp_path))
    assert len(asked) > 25
    wrong = []
    async with owner_and_stranger(server) as (session, stranger):
        for case in asked:
            for_unknown, for_others = await stranger.ask(case, UNKNOWN_SESSION), await stranger.ask(case, session)
            refused = for_others[0] in {403, 404, 422} or '"error"' in for_others[1] or for_others[1] == FOUND_NOTHING
            if for_others != for_unknown or not refused:
                wrong.append((str(case), for_others, for_unknown))
    assert wrong == []


async def test_the_owner_of_the_same_ids_gets_its_objects(server: AttackedServer, tmp_path: Any) -> None:
    """Otherwise the endpoints would be compared in how they refuse nonsense."""
    found = set()
    async with owner_and_stranger(server) as (_, stranger):
        # The model is over with the last but two, and the session with the last.
        ends = ("/delete_model", "/unload_model", "/sessions/{session_id}/finish")
        for case in sorted(cases(document(tmp_path)), key=lambda case: [case.path == end for end in reversed(ends)]):
            status, text = await stranger.ask(case, stranger.session)
            if status == httpx.codes.OK and '"error"' not in text:
                found.add(case.path)
    assert len(found) > 15, found


async def test_a_sample_of_another_tenant_is_reported_as_unknown(server: AttackedServer) -> None:
    async with server.tenant("victim") as owner, server.tenant("attacker") as stranger:
        session = await owner.session()
        sampler = await owner.sampler(session)
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": OTHERS["prompt"]}
        request_id = (await owner.post("/asample", body)).raise_for_status().json()["request_id"]
        for path in ("/retrieve_future", "/cancel_future"):
            answers = [
                await stranger.post(path, {"request_id": asked})
                for asked in (request_id, request_id.replace(session, UNKNOWN_SESSION))
            ]
            assert [answer.status_code for answer in answers] == [404, 404]
            assert answers[0].text.replace(session, UNKNOWN_SESSION) == answers[1].text
        assert (await owner.post("/retrieve_future", {"request_id": request_id})).status_code == 200


@pytest.mark.parametrize(
    "path", ["/sessions", "/training_runs", "/checkpoints", "/promotions", "/recordings", "/waiting_models", "/audit"]
)
async def test_no_list_holds_anything_of_another_tenants(server: AttackedServer, path: str) -> None:
    async with owner_and_stranger(server) as (session, stranger):
        listed = await stranger.tenant.client.get(path)
        assert listed.status_code == 200
        assert session not in listed.text


def test_endpoints_without_ids_are_known(tmp_path: Any) -> None:
    """A person must check that a new one shows nothing of a tenant."""
    api = document(tmp_path)
    with_ids = {case.path for case in cases(api)}
    lists = {
        "/sessions",
        "/training_runs",
        "/checkpoints",
        "/get_server_capabilities",
        "/waiting_models",
        "/promotions",
        "/recordings",
    } | REPORTS
    assert {path for _, path, _ in operations(api)} - with_ids - WITH_A_LINK - lists == WITHOUT_IDS
