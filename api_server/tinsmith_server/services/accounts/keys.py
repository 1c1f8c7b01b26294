"""API keys: creation, storage as hashes, revocation, exchange for tokens, and lookup of tenants."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import jwt
from tinsmith_rpc.tenant_names import RULE, is_tenant_name

from tinsmith_server.errors import AuthenticationFailed, TokenRefused, Unprocessable
from tinsmith_server.services.rows import RowCache
from tinsmith_server.store.records import ApiKey, Clock, utc_now
from tinsmith_server.store.store import Store

DEFAULT_TENANT = "default"
KEY_PREFIX = "tml-"
SHOWN_CHARACTERS = len(KEY_PREFIX) + 6
# A replica that has just checked a key accepts it for this long after its revocation.
CACHE_SECONDS = 5.0
# The tenant of a key never changes.
OWNER_SECONDS = 3600.0


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
        self._tokens = Tokens(store, clock)
        self._static_hash = hash_key(static_key) if static_key else None
        self._clock = clock
        self._seen: RowCache[str, str] = RowCache(CACHE_SECONDS)
        self._owners: RowCache[str, str] = RowCache(OWNER_SECONDS)
        # The credentials by the digests of their tokens.
        self._read: RowCache[str, Credential] = RowCache(OWNER_SECONDS)

    async def authenticate(self, secret: str | None) -> str:
        """Return the tenant of a key or of a token. Raises AuthenticationFailed.

        If keys are not required, an unknown key belongs to the default tenant.
        """
        try:
            return await self._tenant_of(secret)
        except TokenRefused:
            raise
        except AuthenticationFailed:
            if self._required:
                raise
            return DEFAULT_TENANT

    async def _tenant_of(self, secret: str | None) -> str:
        digest = (await self._credential(secret)).key_hash
        if self._is_static(digest):
            return DEFAULT_TENANT
        return self._seen.get(digest) or await self._look_up(digest)

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

        Raises AuthenticationFailed.
        """
        tenant = await self.authenticate(secret)
        return await self._tokens.issue(await self._credential(secret), tenant)

    async def record_of(self, secret: str | None) -> ApiKey | None:
        """Return the stored key of the caller, or None for the static key. Raises AuthenticationFailed."""
        await self.authenticate(secret)
        return await self._store.find_key((await self._credential(secret)).key_hash)

    async def _credential(self, secret: str | None) -> Credential:
        """Return the credential of a key or a token. The key may be unknown. Raises AuthenticationFailed."""
        if not secret:
            raise AuthenticationFailed("no API key: set TINKER_API_KEY, which the SDK sends as X-API-Key")
        digest = hash_key(secret)
        if not secret.startswith(TOKEN_PREFIX):
            return Credential(digest)
        token = self._read.get(digest)
        if token is None or token.expires <= self._clock().timestamp():
            token = await self._tokens.read(secret)
            self._read.put(digest, token)
        return token

    def _is_static(self, digest: str) -> bool:
        return self._static_hash is not None and hmac.compare_digest(digest, self._static_hash)

    async def _look_up(self, digest: str) -> str:
        key = await self._store.find_key(digest)
        if key is None:
            raise AuthenticationFailed(
                "unknown or revoked API key; create one with `tinsmith keys create --data DIR`, with the server's DIR"
            )
        self._seen.put(digest, key.tenant)
        self._owners.put(digest, key.tenant)
        return key.tenant

    async def create(self, tenant: str, name: str) -> NewKey:
        """Create a key. Raises Unprocessable for an invalid tenant name."""
        check_tenant_name(tenant)
        secret = _new_secret()
        record = await self._store.add_key(tenant, name, _shown(secret), hash_key(secret), self._clock())
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

    async def revoke(self, key_id: int) -> bool:
        """Revoke a key.

        Returns False if the key does not exist. Other replicas notice the revocation within CACHE_SECONDS.
        """
        return await self._store.revoke_key(key_id, self._clock())

    async def revoke_own(self, secret: str | None) -> None:
        """Revoke the key of the caller. Raises Unprocessable for the static key and for a token."""
        if (await self._credential(secret)).is_token:
            raise Unprocessable("a token cannot revoke its key: use the key itself")
        record = await self.record_of(secret)
        if record is None:
            raise Unprocessable("this key is the server's static key: remove the setting api_key")
        await self.revoke(record.key_id)
        self._seen.forget((await self._credential(secret)).key_hash)


def check_tenant_name(tenant: str) -> None:
    """Raise Unprocessable for an invalid tenant name. Tenant names exist only in keys."""
    if not is_tenant_name(tenant):
        raise Unprocessable(f"{tenant[:80]!r} is not a valid tenant name: {RULE}")


def _new_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _shown(secret: str) -> str:
    return secret[:SHOWN_CHARACTERS]


SECRET_NAME = "tokens"
ISSUER = "tinsmith"
ALGORITHM = "HS256"
LIFE_SECONDS = 3600.0
TOKEN_PREFIX = "eyJ"
"""The beginning of every JSON object in base64. The SDK uses this prefix to tell tokens from keys."""
CLAIMS = ("iss", "sub", "key", "iat", "exp")


@dataclass(frozen=True, slots=True)
class Credential:
    """The digest of a key, and an expiry in seconds since 1970. A key itself never expires."""

    key_hash: str
    expires: float = math.inf

    @property
    def is_token(self) -> bool:
        return self.expires < math.inf


def tenant_urn(tenant: str) -> str:
    """Return the tenant as a URN, for the field in which the vendor's server names the user."""
    return f"{ISSUER}:tenant:{tenant}"


class Tokens:
    """Tokens that are signed with a secret from the store, so that every replica can check them."""

    def __init__(self, store: Store, clock: Clock = utc_now) -> None:
        self._store = store
        self._clock = clock
        self._drawn: bytes | None = None

    async def issue(self, credential: Credential, tenant: str) -> str:
        """Return a token that is valid for an hour, or until its credential expires.

        A stolen token must not outlive its key. The SDK's `whoami` shows `sub`, `org_id` and `email`. Here, `sub`,
        `org_id` and `email` are all the tenant.
        """
        now = self._clock().timestamp()
        claims = {
            "iss": ISSUER,
            "sub": tenant_urn(tenant),
            "org_id": tenant,
            "email": "",
            "key": credential.key_hash,
            "iat": int(now),
            "exp": int(min(now + LIFE_SECONDS, credential.expires)),
        }
        return jwt.encode(claims, await self._secret(), ALGORITHM)

    async def read(self, token: str) -> Credential:
        """Return the credential of a token.

        Raises TokenRefused for a token that this server did not issue, and for an expired token.
        """
        # Expiry is checked against this server's clock, which tests control.
        options: jwt.types.Options = {"require": list(CLAIMS), "verify_exp": False, "verify_iat": False}
        try:
            claims = jwt.decode(token, await self._secret(), [ALGORITHM], options, issuer=ISSUER)
            read = Credential(str(claims["key"]), float(claims["exp"]))
        except (jwt.InvalidTokenError, TypeError, ValueError) as error:
            raise TokenRefused(f"the token is not one of this server's ({error}); exchange your key again") from error
        if read.expires <= self._clock().timestamp():
            raise TokenRefused("the token has expired; exchange your key again")
        return read

    async def _secret(self) -> bytes:
        if self._drawn is None:
            self._drawn = await self._store.secret(SECRET_NAME)
        return self._drawn
