"""One certificate authority replaces another without a failed connection, however late each process reads its files."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import structlog
from support.operator.fake_cluster import FakeCluster
from support.simulated_time import simulated_time
from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.ca.certificates import Authority, Leaf, Use, new_authority, parse_facts, read_facts
from tinsmith_operator.ca.issuer import ROTATION_LOOK_SECONDS, Issuer
from tinsmith_operator.ca.rotation import BEFORE_ITS_END, ROTATE_ANNOTATION, State, read_stored
from tinsmith_operator.errors import AuthorityInvalid
from tinsmith_operator.kube.resources import Ref
from tinsmith_server.fleet.channels import TlsDirectory as ClientFiles
from tinsmith_server.fleet.channels import open_channel
from tinsmith_trainer.worker.tls import TlsDirectory as ServerFiles

NOW = datetime.now(UTC).replace(microsecond=0)
"""Handshakes go by the machine's clock."""
AUTHORITY = Ref("Secret", "tin", "tinsmith-ca")
CLIENT = Ref("Secret", "tin", "tinsmith-api-server-tls")
WORKER = "claim-uid"
PAUSE_SECONDS = 60.0

Files = dict[str, bytes]


class Installation:
    """An issuer, and a worker whose session is reconciled whenever `reconciles` is true."""

    def __init__(self, cluster: FakeCluster | None = None) -> None:
        self.cluster = cluster or FakeCluster()
        self.now = NOW
        self.reconciles = True
        self.worker: Leaf | None = None
        self.issuer = self.new_leader()

    def new_leader(self) -> Issuer:
        return Issuer(
            cast(Any, self.cluster),
            namespace="tin",
            release="tinsmith",
            authority_secret=AUTHORITY.name,
            api_server_secret=CLIENT.name,
            leaves=self.leaves,
            pause_seconds=PAUSE_SECONDS,
            clock=lambda: self.now,
        )

    def leaves(self) -> Iterable[tuple[str, str]]:
        if self.worker is None:
            return []
        facts = parse_facts({"metadata": {"namespace": "tin", "name": "tiny-tls"}, "data": self.worker.secret_data()})
        return [("tin/tiny-tls", facts.authority_fingerprint)]

    async def look(self) -> float:
        seconds = await self.issuer.refresh()
        known = [trust for _, trust in self.leaves()]
        if self.reconciles and known != [self.issuer.known_fingerprint]:
            self.worker = self.issuer.issue_for_worker((worker_dns_name(WORKER),))
        return seconds

    def ask(self, word: str = "please") -> None:
        live = self.cluster.objects[AUTHORITY]
        self.cluster.put({**live, "metadata": {**live["metadata"], "annotations": {ROTATE_ANNOTATION: word}}})

    @property
    def state(self) -> State:
        return read_stored(self.cluster.objects[AUTHORITY]).state

    @property
    def data(self) -> dict[str, str]:
        data: dict[str, str] = self.cluster.objects[AUTHORITY]["data"]
        return data

    @property
    def client_files(self) -> Files:
        data = self.cluster.objects[CLIENT]["data"]
        return {name: base64.b64decode(text) for name, text in data.items()}

    @property
    def worker_files(self) -> Files:
        assert self.worker is not None
        return {name: base64.b64decode(text) for name, text in self.worker.secret_data().items()}


async def rests() -> Installation:
    made = Installation()
    await made.look()
    return made


async def reaches(installation: Installation, state: State) -> None:
    """Refresh repeatedly, as the operator does, until this state."""
    for _ in range(200):
        if installation.state is state:
            await installation.look()
            return
        await asyncio.sleep(await installation.look())
    raise AssertionError(f"it stays {installation.state}")


async def all_states(installation: Installation) -> list[tuple[Files, Files]]:
    """Return the files of the worker and of the API server in each state."""
    installation.ask()
    files = [(installation.worker_files, installation.client_files)]
    for state in (State.TRUSTING, State.ISSUING, State.AT_REST):
        await reaches(installation, state)
        files.append((installation.worker_files, installation.client_files))
    return files


def in_simulated_time(live: Any) -> None:
    simulated_time(live)()


# ---- the handshake


def written(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


async def answer(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
    return b"yes"


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """Serve as a worker does."""
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Worker", {"Ask": handler})])
    port = server.add_secure_port("127.0.0.1:0", ServerFiles(folder).credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def speaks(worker: Files, client: Files, folder: Path) -> bool:
    """Return whether the API server and the worker accept each other's certificates."""
    async with serving(written(folder / "worker", worker)) as address:
        tls = ClientFiles(written(folder / "client", client)).for_worker(WORKER)
        async with open_channel(address, tls) as channel:
            try:
                return bool(await channel.unary_unary("/test.Worker/Ask")(b"", timeout=5) == b"yes")
            except grpc.aio.AioRpcError:
                return False


def test_every_handshake_holds_between_neighbouring_states_and_the_ends_do_not_know_each_other(tmp_path: Path) -> None:
    """A process may have read its files in this state or still have those of the one before; the other one likewise."""
    states: list[tuple[Files, Files]] = []

    async def rotate() -> None:
        states.extend(await all_states(await rests()))

    in_simulated_time(rotate)

    async def shake_hands() -> None:
        for number, (before, after) in enumerate(pairwise(states)):
            for one, worker in enumerate((before[0], after[0])):
                for other, client in enumerate((before[1], after[1])):
                    assert await speaks(worker, client, tmp_path / f"{number}-{one}-{other}"), (number, one, other)
        first, last = states[0], states[-1]
        assert not await speaks(first[0], last[1], tmp_path / "old worker")
        assert not await speaks(last[0], first[1], tmp_path / "old client")

    asyncio.run(shake_hands())


# ---- when the next step begins


def test_a_rotation_that_is_asked_for_ends_with_another_authority_that_alone_is_trusted() -> None:
    async def live() -> None:
        installation = await rests()
        before = installation.issuer.authority
        await all_states(installation)
        after = installation.issuer.authority
        assert after.certificate != before.certificate
        assert set(installation.data) == {"tls.crt", "tls.key"}
        assert installation.worker_files["ca.crt"] == installation.client_files["ca.crt"] == after.pem
        assert installation.issuer.operator_leaf().authority == after.pem

    in_simulated_time(live)


def test_nothing_is_issued_by_the_next_one_before_every_leaf_trusts_it_and_was_read() -> None:
    async def live() -> None:
        installation = await rests()
        before = installation.issuer.authority.certificate
        installation.reconciles = False
        installation.ask()
        for _ in range(100):
            await asyncio.sleep(await installation.look())
        assert installation.state is State.TRUSTING
        assert installation.issuer.authority.certificate == before
        installation.reconciles = True
        await installation.look()
        await asyncio.sleep(PAUSE_SECONDS - 2 * ROTATION_LOOK_SECONDS)
        await installation.look()
        assert installation.state is State.TRUSTING
        await reaches(installation, State.ISSUING)

    in_simulated_time(live)


def test_the_one_before_is_trusted_until_its_last_leaf_has_gone() -> None:
    async def live() -> None:
        installation = await rests()
        installation.ask()
        await reaches(installation, State.TRUSTING)
        while installation.state is State.TRUSTING:
            await asyncio.sleep(ROTATION_LOOK_SECONDS)
            await installation.issuer.refresh()
        for _ in range(100):
            await asyncio.sleep(await installation.issuer.refresh())
        assert installation.state is State.ISSUING
        await reaches(installation, State.AT_REST)

    in_simulated_time(live)


@pytest.mark.parametrize("state", [State.TRUSTING, State.ISSUING])
def test_the_next_leader_continues_where_the_last_one_stopped_and_waits_again(state: State) -> None:
    async def live() -> None:
        installation = await rests()
        installation.ask()
        await reaches(installation, state)
        await asyncio.sleep(PAUSE_SECONDS * 2)
        installation.issuer = installation.new_leader()
        for _ in range(3):
            await installation.look()
        assert installation.state is state
        await reaches(installation, State.AT_REST)

    in_simulated_time(live)


def test_an_administrators_authority_takes_over_in_the_same_way_when_it_is_added_as_the_next() -> None:
    async def live() -> None:
        installation, own = await rests(), new_authority("ours", NOW)
        data = own.secret_data()
        live = installation.cluster.objects[AUTHORITY]
        next_pair = {"next.crt": data["tls.crt"], "next.key": data["tls.key"]}
        installation.cluster.put({**live, "data": {**live["data"], **next_pair}})
        await reaches(installation, State.ISSUING)
        assert installation.issuer.authority.certificate == own.certificate
        await reaches(installation, State.AT_REST)

    in_simulated_time(live)


def test_another_one_takes_over_before_the_end_and_certificates_never_stop() -> None:
    async def live() -> None:
        installation = await rests()
        end = installation.issuer.authority.certificate.not_valid_after_utc
        installation.now = end - BEFORE_ITS_END - timedelta(days=1)
        await installation.look()
        assert installation.state is State.AT_REST
        installation.now = end - BEFORE_ITS_END
        await reaches(installation, State.TRUSTING)
        await reaches(installation, State.AT_REST)
        assert installation.issuer.authority.certificate.not_valid_after_utc > end + timedelta(days=3000)
        facts = read_facts(installation.cluster.objects[CLIENT])
        assert facts is not None
        assert facts.not_after >= installation.now + timedelta(days=29)

    in_simulated_time(live)


def test_a_foreign_authority_is_never_rotated() -> None:
    """cert-manager renews such an authority itself; it lacks the operator's label."""

    async def live() -> None:
        installation = await rests()
        installation.ask()
        live = installation.cluster.objects[AUTHORITY]
        installation.cluster.put({**live, "metadata": {**live["metadata"], "labels": {}}})
        for _ in range(5):
            await installation.look()
        assert installation.state is State.AT_REST

    in_simulated_time(live)


@pytest.mark.parametrize("field", ["next.crt", "previous.crt"])
def test_an_invalid_next_authority_is_reported_and_nothing_is_written(field: str) -> None:
    async def live() -> None:
        installation = await rests()
        live = installation.cluster.objects[AUTHORITY]
        spoiled = {**live["data"], field: "eA=="}
        installation.cluster.put({**live, "data": spoiled})
        with pytest.raises(AuthorityInvalid):
            await installation.issuer.refresh()
        assert installation.data == spoiled
        assert installation.issuer.issue_for_worker(("x",)).certificate

    in_simulated_time(live)


def test_a_leaf_from_before_there_were_rotations_is_not_issued_again() -> None:
    """The fingerprint of its trust anchor is unchanged."""
    authority: Authority = new_authority("tinsmith", NOW)
    leaf = authority.issue(("x",), Use.CLIENT, NOW)
    facts = parse_facts({"metadata": {"namespace": "tin", "name": "x"}, "data": leaf.secret_data()})
    assert facts.authority_fingerprint == authority.fingerprint
    assert "+" not in facts.authority_fingerprint


@simulated_time
async def test_while_the_certificates_of_a_namespace_cannot_be_seen_a_rotation_waits_and_the_log_says_for_what() -> (
    None
):
    installation = await rests()
    installation.ask()
    seen = installation.leaves
    installation.leaves = lambda: None  # type: ignore[assignment, method-assign, return-value]
    installation.issuer = installation.new_leader()
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            await asyncio.sleep(await installation.issuer.refresh())
    assert installation.state is State.TRUSTING
    [waits] = [entry for entry in logs if entry["event"] == "certificate authority waits"]
    assert "namespaces that may not be listed" in waits["late"][0]
    installation.leaves = seen  # type: ignore[method-assign]
    installation.issuer = installation.new_leader()
    await reaches(installation, State.AT_REST)
