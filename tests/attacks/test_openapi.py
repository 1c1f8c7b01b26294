"""The server's OpenAPI document against the server.

schemathesis makes requests that the document allows, and some that it forbids. Half of the IDs and names exist, so that
it reaches deeper than "not found".
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.server.attacked_server import ANSWER_SECONDS, AttackedServer
from support.server.every_endpoint import IDS, OTHERS, document, furnished

EXAMPLES = 10
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# It ends the key that asks, and the others would be strangers; tests/contract/http/test_keys.py has it.
ENDS_THE_KEY = {"DELETE /api/v1/auth/apikey/me"}
# Each request would wait for its time; tests/contract/http/test_runs.py has them.
WITHOUT_END = {"GET /api/v1/training_runs/live", "GET /api/v1/training_runs/{run_id}/metrics/live"}
THERE = {**IDS, **{name: value for name, value in OTHERS.items() if isinstance(value, str)}}


@schemathesis.serializer("application/x-protobuf")
def _as_it_is(_context: schemathesis.SerializationContext, value: Any) -> bytes:
    data = getattr(value, "data", value)
    return data if isinstance(data, bytes) else str(data).encode()


async def a_furnished_session(server: AttackedServer) -> str:
    async with server.tenant("fuzzer") as tenant:
        return await furnished(tenant)


def name_things_that_are_there(fields: Any, session_id: str, chosen: st.DataObject) -> None:
    if isinstance(fields, dict):
        for name in sorted(fields.keys() & THERE.keys()):
            if chosen.draw(st.booleans()):
                fields[name] = THERE[name].format(session=session_id)


def what_does_not_keep_to_it(
    server: AttackedServer,
    operation: Any,
    mode: GenerationMode,
    session_id: str,
    client: requests.Session,
    fulfilled: set[str],
) -> str | None:
    """`given_by` gets the operation's label when one of the requests is answered with what it asks for."""

    @given(case=operation.as_strategy(mode), chosen=st.data())
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case, chosen: st.DataObject) -> None:
        for fields in (case.path_parameters, case.body):
            name_things_that_are_there(fields, session_id, chosen)
        case.headers["X-API-Key"] = server.keys["fuzzer"]
        response = case.call(base_url=server.installation.url, session=client, timeout=ANSWER_SECONDS)
        case.validate_response(response, checks=CHECKS)
        if response.status_code < 300:
            fulfilled.add(operation.label)

    try:
        ask()
    except Unsatisfiable:
        # Nothing is forbidden where nothing is sent.
        assert mode == GenerationMode.NEGATIVE
    except BaseExceptionGroup as error:
        return f"{operation.label}, {mode.value}: {error}"
    return None


@pytest.mark.timeout(600)  # thousands of requests: two minutes alone, five when two other lanes run
def test_every_endpoint_keeps_to_the_document(server: AttackedServer, tmp_path: Path) -> None:
    api = schemathesis.openapi.from_dict(document(tmp_path))
    operations = [found.ok() for found in api.get_all_operations()]
    operations = [operation for operation in operations if operation.label not in ENDS_THE_KEY | WITHOUT_END]
    fulfilled: set[str] = set()
    with requests.Session() as client:
        client.trust_env = False
        wrong = [
            what_does_not_keep_to_it(server, operation, mode, session_id, client, fulfilled)
            for operation in operations
            for session_id in [asyncio.run(a_furnished_session(server))]
            for mode in GenerationMode
        ]
    assert [sentence for sentence in wrong if sentence] == []
    assert len(fulfilled) > 25, "most requests got no further than the door"
