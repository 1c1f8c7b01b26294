"""Bodies that are made to keep a server busy: it answers them, and serves others meanwhile."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from support.server.attacked_server import MODEL, AttackedServer, Tenant, Uploads, Victim, p99

ROUNDS = 3
# Of CPU of the server, which other programs do not add to.
MOST_MORE_SECONDS = 0.1
REQUESTS_A_ROUND = 12
MIB = 2**20
MIB_OF_SOCKETS = 10
"""The bytes that the system takes of a connection before they are read, in its buffers for both ends."""


@dataclass(frozen=True)
class Attacker:
    """An attacker and its objects, as bodies name them."""

    tenant: Tenant
    session_id: str
    model_id: str
    sampler_id: str

    def sample(self, chunks: bytes) -> bytes:
        return b'{"sampling_session_id":"%b","seq_id":0,"prompt":{"chunks":%b}}' % (self.sampler_id.encode(), chunks)

    def forward(self, chunks: bytes) -> bytes:
        """One datum, in JSON."""
        data = b'[{"model_input":{"chunks":%b},"loss_fn_inputs":{}}]' % chunks
        head = b'"model_id":"%b","seq_id":1' % self.model_id.encode()
        return b'{"forward_input":{"data":%b,"loss_fn":"cross_entropy"},%b}' % (data, head)

    def optim_step(self, more: bytes) -> bytes:
        return b'{"model_id":"%b","seq_id":1,"adam_params":{}%b}' % (self.model_id.encode(), more)

    def session(self, more: bytes) -> bytes:
        return b'{"tags":[]%b}' % more


def repeated(item: bytes, times: int) -> bytes:
    return b"[" + (item + b",") * (times - 1) + item + b"]"


def prompt(tokens: int) -> bytes:
    numbers = b",".join(b"%d" % (number * 7919 % 151_000) for number in range(tokens))
    return b'[{"type":"encoded_text","tokens":[%b]}]' % numbers


def large_metadata(attacker: Attacker) -> bytes:
    metadata = {f"key-{number}": "" for number in range(1_000_000)}
    body = {"session_id": attacker.session_id, "model_seq_id": 9, "base_model": MODEL, "user_metadata": metadata}
    return json.dumps(body).encode()


@dataclass(frozen=True)
class Case:
    """A body, how it is answered, and a harmless one of the same size where the server takes as much."""

    path: str
    body: Callable[[Attacker], bytes]
    status: int
    says: str
    harmless: Callable[[Attacker], bytes]


EMPTY_CHUNKS = "bytes besides its lists of whole numbers"
PROMPT_OF_6_MB = 880_000
CASES = {
    "6 MB of empty chunks": Case(
        "/asample",
        lambda a: a.sample(repeated(b"{}", 2_000_000)),
        422,
        EMPTY_CHUNKS,
        lambda a: a.sample(prompt(PROMPT_OF_6_MB)),
    ),
    "48 MB of empty chunks": Case(
        "/asample",
        lambda a: a.sample(repeated(b"{}", 16_000_000)),
        413,
        "limit of 8388608 bytes of /asample (setting max_sample_bytes)",
        lambda a: a.sample(prompt(PROMPT_OF_6_MB)),
    ),
    "a prompt of short lists": Case(
        "/asample",
        lambda a: a.sample(repeated(repeated(b"1", 40), 70_000)),
        422,
        "more than 8192 values",
        lambda a: a.sample(prompt(PROMPT_OF_6_MB)),
    ),
    "a prompt of as many tokens as fit": Case(
        "/asample",
        lambda a: a.sample(b'[{"type":"encoded_text","tokens":%b}]' % repeated(b"1", 4_000_000)),
        200,
        "",
        lambda a: a.sample(prompt(PROMPT_OF_6_MB)),
    ),
    "wrong chunks": Case(
        "/asample",
        lambda a: a.sample(repeated(b'{"tokens":[null]}', 1500)),
        200,
        "",
        lambda a: a.sample(prompt(4_000)),
    ),
    "an optim_step of 200 MB": Case(
        "/optim_step",
        lambda a: a.optim_step(b',"more":' + repeated(b"0", 100_000_000)),
        413,
        "limit of 65536 bytes of /optim_step",
        lambda a: a.optim_step(b',"more":"%b"' % bytes(48 * 1024).replace(b"\0", b"x")),
    ),
    "a million keys of metadata": Case(
        "/create_model",
        large_metadata,
        413,
        "limit of 262144 bytes of /create_model",
        lambda a: a.optim_step(b""),
    ),
    "tags without end": Case(
        "/create_session",
        lambda a: a.session(b',"more":' + repeated(b"1", 120_000)),
        422,
        "more than 2048 values",
        lambda a: a.session(b',"more":"%b"' % bytes(240_000).replace(b"\0", b"x")),
    ),
    "depth": Case(
        "/create_session",
        lambda a: a.session(b',"user_metadata":' + b'{"a":' * 1000 + b"1" + b"}" * 1000),
        422,
        "more than 16 deep",
        lambda a: a.session(b',"display_name":"%b"' % (b"x" * 6000)),
    ),
    "training data in JSON of empty chunks": Case(
        "/forward",
        lambda a: a.forward(repeated(b"{}", 2_000_000)),
        422,
        "besides its",
        lambda a: a.forward(prompt(PROMPT_OF_6_MB)),
    ),
    "training data in JSON of short lists": Case(
        "/forward",
        lambda a: a.forward(repeated(b'{"tokens":%b}' % repeated(b"1", 20), 40_000)),
        422,
        "more than 262144 values",
        lambda a: a.forward(prompt(PROMPT_OF_6_MB // 3)),
    ),
    "training data in JSON of as many chunks as fit": Case(
        "/forward",
        lambda a: a.forward(repeated(b'{"tokens":[1]}', 80_000)),
        200,
        "",
        lambda a: a.forward(prompt(PROMPT_OF_6_MB // 5)),
    ),
    "training data in JSON of more numbers than a message holds": Case(
        "/forward",
        lambda a: a.forward(b'[{"tokens":%b}]' % repeated(b"1", 17_000_000)),
        422,
        "more than 16777216 numbers",
        lambda a: a.forward(prompt(4_800_000)),
    ),
    "training data of empty fields": Case(
        "/forward_backward",
        lambda _: b"\x38\x01" * 2_500_000,
        422,
        "more than 4096 fields",
        lambda a: b"\x0a%c%b\x10\x01\x3a\x80\x80\xb1\x02" % (len(a.model_id), a.model_id.encode()) + bytes(5_000_000),
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_no_body_keeps_another_tenant_waiting_longer_than_a_harmless_one(
    server: AttackedServer, name: str
) -> None:
    case = CASES[name]
    async with server.tenant("attacker") as tenant, Victim.of(server) as victim:
        session_id = await tenant.session()
        model_id, sampler_id = await tenant.model(session_id), await tenant.sampler(session_id)
        attacker = Attacker(tenant, session_id, model_id, sampler_id)
        hostile, harmless = case.body(attacker), case.harmless(attacker)
        harmless_path = "/optim_step" if case.path == "/create_model" else case.path
        more = []
        for _ in range(ROUNDS if len(hostile) < 10 * MIB else 1):
            waits_for_harmless, _ = await waits_during(victim, attacker, harmless_path, harmless)
            waits_for_hostile, answers = await waits_during(victim, attacker, case.path, hostile)
            more.append(p99(waits_for_hostile) - p99(waits_for_harmless))
            assert {status for status, _ in answers} == {case.status}
            assert all(case.says in text and len(text) < 400 for _, text in answers)
    assert statistics.median(more) < MOST_MORE_SECONDS, more


async def waits_during(
    victim: Victim, attacker: Attacker, path: str, body: bytes
) -> tuple[list[float], list[tuple[int, str]]]:
    """Return how long the victim's requests waited while these were answered."""
    await victim.seconds()
    waited: list[float] = []
    answers = []
    while len(waited) < REQUESTS_A_ROUND:
        response = await attacker.tenant.post(path, body)
        answers.append((response.status_code, response.text))
        waited += await victim.seconds()
    return waited, answers


async def test_metadata_within_the_limits_is_listed_whole(server: AttackedServer) -> None:
    async with server.tenant("attacker") as tenant:
        session_id = await tenant.session()
        metadata = {f"key-{number}": "x" * 40 for number in range(100)}
        for number in range(20):
            body = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL, "user_metadata": metadata}
            (await tenant.post("/create_model", body)).raise_for_status()
        runs = (await tenant.client.get("/training_runs", params={"limit": 1000})).raise_for_status().json()
        assert sum(run.get("user_metadata") == metadata for run in runs["training_runs"]) == 20


async def test_bodies_that_are_held_take_no_more_memory_than_the_budget(server: AttackedServer) -> None:
    """Twelve uploads of 60 MiB never end; 256 MiB are in flight, and whatever the first of them needs."""
    before = server.resident_bytes
    async with server.tenant("attacker") as tenant, server.tenant("victim") as victim:
        model_id = await tenant.model(await tenant.session())
        head = b"\x0a%c%b\x10\x01" % (len(model_id), model_id.encode())
        async with Uploads.held(server, 12, 60 * MIB, head) as uploads:
            await uploads.until_nothing_moves()
            assert (await victim.client.get("/get_server_capabilities")).status_code == 200
            assert uploads.sent < (256 + 60 + 12 * MIB_OF_SOCKETS) * MIB
            assert server.resident_bytes - before < 400 * MIB
