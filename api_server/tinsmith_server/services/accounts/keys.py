"""API keys: creation, storage as hashes, revocation, exchange for tokens, and lookup of tenants."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tinsmith_rpc.tenant_names import RULE, is_tenant_name

from tinsmith_server.errors import AuthenticationFailed, Conflict, Forbidden, TokenRefused, Unprocessable
from tinsmith_server.services.accounts.callers import DEFAULT_TENANT, LOCAL_CALLER, STATIC_KEY, Caller, account_entry
from tinsmith_server.services.accounts.tokens import TOKEN_PREFIX, Credential, Login, Tokens
from tinsmith_server.services.rows import RowCache
from tinsmith_server.store.records import ApiKey, Clock, Role, utc_now
from tinsmith_server.store.store import Store

KEY_PREFIX = "tml-"
SHOWN_CHARACTERS = len(KEY_PREFIX) + 6
# A replica that has just checked a key accepts it for this long after its revocation.
CACHE_SECONDS = 5.0
# The tenant of a key never changes.
OWNER_SECONDS = 3600.0


LONGEST_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key and its secret. The secret is stored nowhere."""

    secret: str
    record: ApiKey


def hash_key(secret: str) -> str:
    """Return the digest of a key. A key has 256 random bits and cannot be guessed, so the digest needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Keys:
    """The keys of an installation."""

    def __init__(self, store: Store, static_key: str | None, clock: Clock = utc_now, *, required: bool = True) -> None:
        """Start, with or without a static key.

        If keys are not `required`, another part of the server limits access (`LoopbackOnly`).
        """
        self._store = store
        self._required = required
        self.tokens = Tokens(store, clock)
        self._static_hash = hash_key(static_key) if static_key else None
        self._clock = clock
        self._seen: RowCache[str, Caller] = RowCache(CACHE_SECONDS)
        self._owners: RowCache[str, str] = RowCache(OWNER_SECONDS)
        # Whether a login of the console has ended.
        self._ended: RowCache[str, bool] = RowCache(CACHE_SECONDS)
        # The credentials by the digests of their tokens.
        self._read: RowCache[str, Credential] = RowCache(OWNER_SECONDS)

    @property
    def required(self) -> bool:
        return self._required

    async def authenticate(self, secret: str | None) -> str:
        """Return the tenant of a key or of a token. Raises AuthenticationFailed."""
        return (await self.caller(secret)).tenant

    async def caller(self, secret: str | None) -> Caller:
        """Return the key that makes a request. Raises AuthenticationFailed.

        If keys are not required, an unknown key belongs to the default tenant.
        """
        try:
            return await self._known_caller(secret)
        except TokenRefused:
            raise
        except AuthenticationFailed:
            if self._required:
                raise
            return LOCAL_CALLER

    async def _known_caller(self, secret: str | None) -> Caller:
        credential = await self.credential(secret)
        digest = credential.key_hash
        if credential.login is not None and await self._is_ended(credential.login):
            raise TokenRefused("the session of the console has ended: log in again")
        if self._is_static(digest):
            return STATIC_KEY
        return self._seen.get(digest) or await self._look_up(digest)

    async def end_login(self, login: Login) -> None:
        """End a login of the console. Other replicas notice the end within CACHE_SECONDS."""
        await self._store.end_login(login.login_id, datetime.fromtimestamp(login.ends, UTC), self._clock())
        self._ended.put(login.login_id, True)

    async def _is_ended(self, login: Login) -> bool:
        ended = self._ended.get(login.login_id)
        if ended is None:
            ended = await self._store.is_login_ended(login.login_id)
            self._ended.put(login.login_id, ended)
        return ended

    def owner(self, secret: str) -> str | None:
        """Return the tenant of a key that was used recently.

        The key may be revoked by now, so the result is only for counting.
        """
        digest = self.counted_as(secret)
        return DEFAULT_TENANT if self._is_static(digest) else self._owners.get(digest)

    def counted_as(self, secret: str | None) -> str:
        """Return the name under which requests of a key are counted. A known token counts as its key."""
        digest = hash_key(secret or "")
        token = self._read.get(digest)
        return digest if token is None else token.key_hash

    async def token_for(self, secret: str | None) -> str:
        """Return a token that is valid for an hour. If `secret` is a token, the new token expires at the same time.

        Raises AuthenticationFailed, and Forbidden for a session of the console, whose tokens must end with a logout.
        """
        tenant, credential = await self.authenticate(secret), await self.credential(secret)
        if credential.login is not None:
            raise Forbidden("a session of the console gets no other tokens: exchange the key itself")
        return await self.tokens.issue(credential, tenant)

    async def record_of(self, secret: str | None) -> ApiKey | None:
        """Return the stored key of the caller, or None for the static key. Raises AuthenticationFailed."""
        await self.authenticate(secret)
        return await self._store.find_key((await self.credential(secret)).key_hash)

    async def credential(self, secret: str | None) -> Credential:
        """Return the credential of a key or a token. The key may be unknown. Raises AuthenticationFailed."""
        if not secret:
            raise AuthenticationFailed("no API key: set TINKER_API_KEY, which the SDK sends as X-API-Key")
        digest = hash_key(secret)
        if not secret.startswith(TOKEN_PREFIX):
            return Credential(digest)
        token = self._read.get(digest)
        if token is None or token.expires <= self._clock().timestamp():
            token = await self.tokens.read(secret)
            self._read.put(digest, token)
        return token

    def _is_static(self, digest: str) -> bool:
        return self._static_hash is not None and hmac.compare_digest(digest, self._static_hash)

    async def _look_up(self, digest: str) -> Caller:
        key = await self._store.find_key(digest)
        if key is None:
            raise AuthenticationFailed(
                "unknown or revoked API key; create one with `tinsmith keys create --data DIR`, with the server's DIR"
            )
        caller = Caller.of(key)
        self._seen.put(digest, caller)
        self._owners.put(digest, key.tenant)
        return caller

    async def create(self, tenant: str, name: str, role: Role = "member") -> NewKey:
        """Create a key. Raises Unprocessable for an invalid name of the key or of the tenant."""
        check_tenant_name(tenant)
        check_key_name(name)
        secret = _new_secret()
        now, shown = self._clock(), _shown(secret)
        created = account_entry(tenant, now, "key_created", name=name, prefix=shown, role=role)
        record = await self._store.add_key(tenant, name, shown, hash_key(secret), now, role, (created,))
        return NewKey(secret, record)

    async def create_first(self) -> NewKey | None:
        """Create the first key of an installation that requires keys and has none."""
        if not self._required or self._static_hash is not None or await self._store.list_keys():
            return None
        secret = _new_secret()
        record = await self._store.add_first_key(
            DEFAULT_TENANT, "made at first start", _shown(secret), hash_key(secret), self._clock()
        )
        return NewKey(secret, record) if record is not None else None

    async def list(self, tenant: str | None = None) -> Sequence[ApiKey]:
        return await self._store.list_keys(tenant)

    async def revoke(self, key_id: int) -> ApiKey | None:
        """Revoke a key, and return its row from before, or None if the key does not exist.

        Raises Conflict for the last key of an admin, unless the server has a static key. Other replicas notice the
        revocation within CACHE_SECONDS.
        """
        key = await self._store.get_key(key_id)
        if key is None:
            return None
        now = self._clock()
        revoked = account_entry(key.tenant, now, "key_revoked", name=key.name, prefix=key.prefix, role=key.role)
        spares = self._static_hash is None
        if not await self._store.revoke_key(key_id, now, (revoked,), spares_last_admin=spares):
            raise Conflict(
                f"key {key_id} is the last key with the role admin, and only such a key can manage tenants and keys: "
                "create another key with this role first"
            )
        self._seen.clear()
        return key

    async def check_lasting(self, secret: str | None) -> None:
        """Raise Forbidden for an exchanged token, which must not outlive itself in a key that it makes.

        The token of a session of the console is accepted, because its page has also sent the CSRF token.
        """
        credential = await self.credential(secret) if secret else None
        if credential is not None and credential.is_token and credential.login is None:
            raise Forbidden("a token cannot create or revoke keys: use the key itself, or the console")

    async def revoke_own(self, secret: str | None) -> None:
        """Revoke the key of the caller. Raises Unprocessable for the static key and for a token."""
        if (await self.credential(secret)).is_token:
            raise Unprocessable("a token cannot revoke its key: use the key itself")
        record = await self.record_of(secret)
        if record is None:
            raise Unprocessable("this key is the server's static key: remove the setting api_key")
        await self.revoke(record.key_id)


def check_tenant_name(tenant: str) -> None:
    """Raise Unprocessable for an invalid tenant name. Tenant names exist only in keys."""
    if not is_tenant_name(tenant):
        raise Unprocessable(f"{tenant[:80]!r} is not a valid tenant name: {RULE}")


def check_key_name(name: str) -> None:
    """Raise Unprocessable for a name that is too long, or that a terminal or a log would not show as one line."""
    if len(name) > LONGEST_NAME_CHARACTERS or not (name.isprintable() or not name):
        raise Unprocessable(f"the name of a key has at most {LONGEST_NAME_CHARACTERS} printable characters")


def _new_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _shown(secret: str) -> str:
    return secret[:SHOWN_CHARACTERS]
