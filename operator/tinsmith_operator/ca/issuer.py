"""The certificates of an installation, issued by its certificate authority and stored in Secrets of its namespace.

The authority is made once, by a POST that only one operator can win: whoever loses reads what is there. Before its end,
or when somebody asks for it, another one takes over (`rotation.py`). Where somebody puts another one in its place (a
backup), that one is adopted, and every leaf follows at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import MANAGED_BY_LABEL, MANAGER, SAMPLER_DNS_NAME
from tinsmith_operator.ca.certificates import (
    API_SERVER_NAME,
    OPERATOR_NAME,
    Authority,
    Leaf,
    Use,
    new_authority,
    read_facts,
)
from tinsmith_operator.ca.rotation import (
    State,
    Stored,
    begin_rotation,
    continue_rotation,
    is_requested,
    outdated_leaves,
    read_stored,
)
from tinsmith_operator.common.certificate import RENEWAL, is_fresh, renewal_time
from tinsmith_operator.common.observed import CertificateFacts
from tinsmith_operator.errors import AlreadyExists, AuthorityInvalid, NotFound, OperatorError, Refused, SecretTaken
from tinsmith_operator.kube.client import Cluster
from tinsmith_operator.kube.resources import SECRETS, labels_of
from tinsmith_operator.logs import get_logger

# The longest time between two looks. It also bounds what a machine that slept, or a clock that was set, can hide.
LOOK_AGAIN_SECONDS = 3600.0

# While one authority takes over from another.
ROTATION_LOOK_SECONDS = 10.0
MOST_NAMED = 5
NOT_LISTED = "the certificates of namespaces that may not be listed; see /readyz"

Leaves = Callable[[], Iterable[tuple[str, str]] | None]

INSTANCE_LABEL = "app.kubernetes.io/instance"

log = get_logger(__name__)


class Issuer:
    """What certifies API server, workers and operator to each other.

    problem: why certificates cannot be issued or stored, until somebody does something; None when they can.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        release: str,
        authority_secret: str,
        api_server_secret: str,
        leaves: Leaves = lambda: None,
        pause_seconds: float = 300.0,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """leaves: of all sessions and pools, whose and whom each trusts; None while they are not known.
        pause_seconds: in which every process has surely read its files anew.
        """
        self._cluster = cluster
        self._namespace = namespace
        self._release = release
        self._authority_secret = authority_secret
        self._api_server_secret = api_server_secret
        self._leaves = leaves
        self._pause_seconds = pause_seconds
        self._clock = clock
        self._stored: Stored | None = None
        self._client_trusts: str | None = None
        self._late: list[str] = []
        self._followed: tuple[str, float] | None = None
        self._authority: Authority | None = None
        self._leaf: Leaf | None = None
        self.problem: str | None = None
        self.ends: dict[str, datetime] = {}

    @property
    def secret_names(self) -> tuple[str, str]:
        return self._authority_secret, self._api_server_secret

    @property
    def authority(self) -> Authority:
        """Raises OperatorError when none has been read, or it has ended."""
        if self._authority is None:
            raise OperatorError(self.problem or "The certificate authority has not been read yet.")
        self._authority.check(self._clock())
        return self._authority

    @property
    def known_fingerprint(self) -> str | None:
        """Of the authority that can issue; None when there is none."""
        try:
            return self.authority.fingerprint
        except OperatorError:
            return None

    @property
    def is_known(self) -> bool:
        """Whether it has been found out how things are, be it well or not."""
        return self._authority is not None or self.problem is not None

    async def refresh(self) -> float:
        """Both Secrets as they should be. Returns the seconds after which to look again.

        Raises AuthorityInvalid, SecretTaken, ClusterError. An authority that was read before stays in use until its
        end.
        """
        try:
            seconds = await self._refresh()
        except (AuthorityInvalid, SecretTaken, Refused) as error:
            self.problem = str(error)
            raise
        self.problem = None
        return seconds

    async def _refresh(self) -> float:
        stored = await self._read_or_make_authority()
        authority = stored.current
        if self._authority is None or authority.fingerprint != self._authority.fingerprint:
            log.info("certificate authority", secret=self._authority_secret, fingerprint=authority.fingerprint)
        self._stored, self._authority = stored, authority
        self.ends[self._authority_secret] = authority.certificate.not_valid_after_utc
        authority.check(self._clock())
        facts = await self._ensure_api_server_certificate(authority)
        self.ends[self._api_server_secret] = facts.not_after
        self._client_trusts = facts.authority_fingerprint
        if stored.state is not State.AT_REST:
            return ROTATION_LOOK_SECONDS
        due = renewal_time(facts)
        seconds = (due - self._clock()).total_seconds() if due is not None else LOOK_AGAIN_SECONDS
        return min(LOOK_AGAIN_SECONDS, max(60.0, seconds))

    def operator_leaf(self) -> Leaf:
        """A client certificate of our own, in memory only."""
        now = self._clock()
        leaf, authority = self._leaf, self.authority
        if leaf is None or leaf.authority != authority.bundle or now >= leaf.not_after - RENEWAL:
            leaf = self._leaf = authority.issue((OPERATOR_NAME,), Use.CLIENT, now)
        return leaf

    def issue_for_worker(self, dns_names: tuple[str, ...]) -> Leaf:
        """For its port; with a sampler's name also to call workers."""
        use = Use.BOTH if SAMPLER_DNS_NAME in dns_names else Use.SERVER
        return self.authority.issue(dns_names, use, self._clock())

    async def _read_or_make_authority(self) -> Stored:
        try:
            return await self._rotated(await self._get_authority())
        except NotFound:
            # One that was deleted under us comes back as it was, so that no worker loses its certificate.
            stored = self._stored or Stored(new_authority(self._release, self._clock()))
            secret = {**self._secret(self._authority_secret), "type": "kubernetes.io/tls"}
            try:
                await self._cluster.create(SECRETS, {**secret, "data": stored.data})
            except AlreadyExists:
                return read_stored(await self._get_authority())
            return stored

    async def _get_authority(self) -> Manifest:
        return await self._cluster.get(SECRETS, self._namespace, self._authority_secret)

    async def _rotated(self, secret: Manifest) -> Stored:
        """One state further, where that is due."""
        stored = read_stored(secret)
        if stored.state is State.AT_REST:
            if not is_requested(secret, stored.current, self._clock()):
                return stored
            change = begin_rotation(secret, stored, new_authority(self._release, self._clock()))
        elif self._all_leaves_follow(stored):
            change = continue_rotation(stored)
        else:
            return stored
        after = read_stored(await self._cluster.merge(SECRETS, secret, change))
        log.info("certificate authority rotates", secret=self._authority_secret, state=after.state.value)
        return after

    def _all_leaves_follow(self, stored: Stored) -> bool:
        """Whether every leaf has been as it should be in this state for long enough. Who leads anew counts anew."""
        trust, leaves = stored.current.fingerprint, self._leaves()
        late = outdated_leaves(trust, leaves) if leaves is not None else [NOT_LISTED]
        if late or trust != self._client_trusts:
            if late != self._late:
                log.info(
                    "certificate authority waits", state=stored.state.value, count=len(late), late=late[:MOST_NAMED]
                )
            self._followed, self._late = None, late
            return False
        now = asyncio.get_running_loop().time()
        if self._followed is None or self._followed[0] != trust:
            self._followed = (trust, now)
        return now >= self._followed[1] + self._pause_seconds

    async def _ensure_api_server_certificate(self, authority: Authority) -> CertificateFacts:
        """Returns what is in the Secret then. Raises SecretTaken."""
        names = (API_SERVER_NAME,)
        try:
            live = await self._cluster.get(SECRETS, self._namespace, self._api_server_secret)
        except NotFound:
            live = None
        facts = read_facts(live) if live is not None else None
        if facts is not None and is_fresh(facts, names, authority.fingerprint, self._clock()):
            return facts
        leaf = authority.issue(names, Use.CLIENT, self._clock())
        wanted = {**self._secret(self._api_server_secret), "type": "kubernetes.io/tls", "data": leaf.secret_data()}
        await self._write(live, wanted)
        log.info("client certificate issued", secret=self._api_server_secret, not_after=leaf.not_after.isoformat())
        issued = read_facts(wanted)
        assert issued is not None
        return issued

    async def _write(self, live: Manifest | None, wanted: Manifest) -> None:
        if live is None:
            await self._cluster.create(SECRETS, wanted)
            return
        metadata = wanted["metadata"]
        ours = {name: metadata["labels"][name] for name in (INSTANCE_LABEL, MANAGED_BY_LABEL)}
        if not ours.items() <= labels_of(live).items():
            labels = " ".join(f"{name}={value}" for name, value in ours.items())
            raise SecretTaken(
                f"The Secret {metadata['namespace']}/{metadata['name']} is somebody else's, and is left alone; but the "
                "API server's certificate belongs there. Delete it, and let its writer choose another name; or, if it "
                f"is this installation's, give it its labels back: {labels}."
            )
        guard = {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
        await self._cluster.apply(SECRETS, {**wanted, "metadata": {**metadata, **guard}})

    def _secret(self, name: str) -> Manifest:
        labels = {
            "app.kubernetes.io/name": "tinsmith",
            INSTANCE_LABEL: self._release,
            MANAGED_BY_LABEL: MANAGER,
        }
        return {
            "apiVersion": SECRETS.api_version,
            "kind": SECRETS.kind,
            "metadata": {"name": name, "namespace": self._namespace, "labels": labels},
        }
