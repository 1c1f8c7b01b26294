"""The certificates of an installation.

The authority of the installation issues the certificates, and Secrets store them.

Only one operator can create the authority, by a POST; all other operators read the result. A new authority takes over
before the old authority expires, or on request (`rotation.py`). If an administrator replaces the authority, for example
from a backup, the operator adopts the new authority and issues all leaf certificates again.
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

# The longest time between two checks, even if the machine was suspended or its clock has changed.
LOOK_AGAIN_SECONDS = 3600.0

# The interval of checks during a rotation.
ROTATION_LOOK_SECONDS = 10.0
MOST_NAMED = 5
NOT_LISTED = "the certificates of namespaces that may not be listed; see /readyz"

Leaves = Callable[[], Iterable[tuple[str, str]] | None]

INSTANCE_LABEL = "app.kubernetes.io/instance"

log = get_logger(__name__)


class Issuer:
    """The issuer of certificates for the API server, the workers and the operator.

    `problem` is None, or a sentence that says why certificates cannot be issued or stored until a person acts.
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
        """Prepare the issuer.

        `leaves` is a function that returns each session and pool with a leaf certificate, and the fingerprint of the
        authorities that this owner trusts. The function returns None while the owners are not known. `pause_seconds` is
        the time within which every process reads its certificate files again.
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
        """The valid authority. Raises OperatorError if no authority has been read, or if the authority has expired."""
        if self._authority is None:
            raise OperatorError(self.problem or "The certificate authority has not been read yet.")
        self._authority.check(self._clock())
        return self._authority

    @property
    def known_fingerprint(self) -> str | None:
        """The fingerprint of the valid authority, or None without a valid authority."""
        try:
            return self.authority.fingerprint
        except OperatorError:
            return None

    @property
    def is_known(self) -> bool:
        """True if the authority was read, or if a problem prevents the reading."""
        return self._authority is not None or self.problem is not None

    async def refresh(self) -> float:
        """Update the Secrets of the authority and of the API server. Return the seconds until the next check.

        Raises AuthorityInvalid, SecretTaken and ClusterError. If the Secret cannot be read, the authority that was read
        last is used until it expires.
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
        """Return the operator's own client certificate. This certificate exists only in memory."""
        now = self._clock()
        leaf, authority = self._leaf, self.authority
        if leaf is None or leaf.authority != authority.bundle or now >= leaf.not_after - RENEWAL:
            leaf = self._leaf = authority.issue((OPERATOR_NAME,), Use.CLIENT, now)
        return leaf

    def issue_for_worker(self, dns_names: tuple[str, ...]) -> Leaf:
        """Issue the certificate of a worker.

        If the names include the name of samplers, the holder of the certificate may also call workers.
        """
        use = Use.BOTH if SAMPLER_DNS_NAME in dns_names else Use.SERVER
        return self.authority.issue(dns_names, use, self._clock())

    async def _read_or_make_authority(self) -> Stored:
        try:
            return await self._rotated(await self._get_authority())
        except NotFound:
            # A deleted authority is restored unchanged, so that every worker's certificate stays valid.
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
        """Take the next step of a rotation if a step is due. Return the authority."""
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
        """Return whether all leaf certificates have been up to date for `pause_seconds`.

        A new leader counts the time again from zero.
        """
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
        """Issue the API server's certificate if it is missing, outdated or due for renewal.

        Return the facts about the certificate.

        Raises SecretTaken.
        """
        names = (API_SERVER_NAME,)
        try:
            live = await self._cluster.get(SECRETS, self._namespace, self._api_server_secret)
        except NotFound:
            live = None
        facts = read_facts(live) if live is not None else None
        if facts is not None and is_fresh(facts, names, authority.fingerprint, self._clock()):
            return facts
        leaf = authority.issue(names, Use.CLIENT, self._clock())
        secret = {**self._secret(self._api_server_secret), "type": "kubernetes.io/tls", "data": leaf.secret_data()}
        await self._write(live, secret)
        log.info("client certificate issued", secret=self._api_server_secret, not_after=leaf.not_after.isoformat())
        issued = read_facts(secret)
        assert issued is not None
        return issued

    async def _write(self, live: Manifest | None, secret: Manifest) -> None:
        if live is None:
            await self._cluster.create(SECRETS, secret)
            return
        metadata = secret["metadata"]
        expected = {name: metadata["labels"][name] for name in (INSTANCE_LABEL, MANAGED_BY_LABEL)}
        if not expected.items() <= labels_of(live).items():
            labels = " ".join(f"{name}={value}" for name, value in expected.items())
            raise SecretTaken(
                f"The Secret {metadata['namespace']}/{metadata['name']} does not belong to this installation, but the "
                "API server's certificate needs its name. Delete it, so that its owner chooses another name; or, if it "
                f"does belong to this installation, restore its labels: {labels}."
            )
        guard = {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
        await self._cluster.apply(SECRETS, {**secret, "metadata": {**metadata, **guard}})

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
