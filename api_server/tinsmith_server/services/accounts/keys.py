"""API keys: made, hashed at rest, revoked, exchanged for tokens, and turned into the tenant they speak for."""

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
# How long a revoked key may still work on a replica that has just seen it.
CACHE_SECONDS = 5.0
# Whose a key is never changes.
OWNER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class NewKey:
    """The only moment at which the secret exists outside its owner's hands."""

    secret: str
    record: ApiKey


def hash_key(secret: str) -> str:
    """Keys carry 256 random bits, so a plain digest cannot be searched and needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Keys:
    """Who may speak, and for which tenant."""

    def __init__(self, store: Store, static_key: str | None, clock: Clock = utc_now, *, required: bool = True) -> None:
        """Where keys are not `required`, somebody else sees to it who asks (`routes/doors.py`)."""
        self._store = store
        self._required = required
        self._tokens = Tokens(store, clock)
        self._static_hash = hash_key(static_key) if static_key else None
        self._clock = clock
        self._seen: RowCache[str, str] = RowCache(CACHE_SECONDS)
        self._owners: RowCache[str, str] = RowCache(OWNER_SECONDS)
        # By digests of tokens.
        self._read: RowCache[str, Credential] = RowCache(OWNER_SECONDS)

    async def authenticate(self, secret: str | None) -> str:
        """The tenant of a key, or of a token that stands for one. Raises AuthenticationFailed.

        Where none is required: the default tenant for whatever is no key of anybody's.
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
        """The tenant of a key that was used here of late, which may have been revoked since: for counting alone."""
        digest = self.counted_as(secret)
        return DEFAULT_TENANT if self._is_static(digest) else self._owners.get(digest)

    def counted_as(self, secret: str | None) -> str:
        """What a key is called where things are counted by keys; tokens that were used here are the key's."""
        digest = hash_key(secret or "")
        token = self._read.get(digest)
        return digest if token is None else token.key_hash

    async def token_for(self, secret: str | None) -> str:
        """An hour of what the key may do; of a token, what is left of its own. Raises AuthenticationFailed."""
        tenant = await self.authenticate(secret)
        return await self._tokens.issue(await self._credential(secret), tenant)

    async def record_of(self, secret: str | None) -> ApiKey | None:
        """What is known of the key that asks; None: it is the server's own. Raises AuthenticationFailed."""
        await self.authenticate(secret)
        return await self._store.find_key((await self._credential(secret)).key_hash)

    async def _credential(self, secret: str | None) -> Credential:
        """What a key or a token is good for, whether or not the key is known. Raises AuthenticationFailed."""
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
                "unknown or revoked API key; `tinsmith keys create --data DIR`, with the server's DIR, makes one"
            )
        self._seen.put(digest, key.tenant)
        self._owners.put(digest, key.tenant)
        return key.tenant

    async def create(self, tenant: str, name: str) -> NewKey:
        """Raises Unprocessable for what is no tenant's name."""
        check_tenant_name(tenant)
        secret = _new_secret()
        record = await self._store.add_key(tenant, name, _shown(secret), hash_key(secret), self._clock())
        return NewKey(secret, record)

    async def create_first(self) -> NewKey | None:
        """A key for an installation that has none at all, static or stored, and needs one."""
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
        """False when there is no such key. Other replicas notice within CACHE_SECONDS."""
        return await self._store.revoke_key(key_id, self._clock())

    async def revoke_own(self, secret: str | None) -> None:
        """The key that asks. Raises Unprocessable for the server's own, and for a token."""
        if (await self._credential(secret)).is_token:
            raise Unprocessable("a token cannot end the key that it stands for: ask with the key itself")
        record = await self.record_of(secret)
        if record is None:
            raise Unprocessable("this key is the server's own (setting api_key): it ends where it is set")
        await self.revoke(record.key_id)
        self._seen.forget((await self._credential(secret)).key_hash)


def check_tenant_name(tenant: str) -> None:
    """Raise Unprocessable for a name that no tenant may have. Keys are the only way in which a name comes here."""
    if not is_tenant_name(tenant):
        raise Unprocessable(f"{tenant[:80]!r} cannot be a tenant: {RULE}")


def _new_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _shown(secret: str) -> str:
    return secret[:SHOWN_CHARACTERS]


SECRET_NAME = "tokens"
ISSUER = "tinsmith"
ALGORITHM = "HS256"
LIFE_SECONDS = 3600.0
TOKEN_PREFIX = "eyJ"
"""Of every JSON object in base64: the SDK tells tokens from keys by it."""
CLAIMS = ("iss", "sub", "key", "iat", "exp")


@dataclass(frozen=True, slots=True)
class Credential:
    """Which key it is or stands for, and until when, in seconds since 1970: a key itself for ever."""

    key_hash: str
    expires: float = math.inf

    @property
    def is_token(self) -> bool:
        return self.expires < math.inf


def tenant_urn(tenant: str) -> str:
    """What a tenant is called where the vendor's have users."""
    return f"{ISSUER}:tenant:{tenant}"


class Tokens:
    """Signed with a secret of the store, so that any replica reads what another has issued."""

    def __init__(self, store: Store, clock: Clock = utc_now) -> None:
        self._store = store
        self._clock = clock
        self._drawn: bytes | None = None

    async def issue(self, credential: Credential, tenant: str) -> str:
        """For an hour, but no longer than what it is made of: one that is overheard would live as long as its key.

        `sub`, `org_id` and `email` are what the SDK's `whoami` shows: here all is the tenant.
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
        """Raises TokenRefused for one that was not issued here, or whose time is over."""
        # Whose time is over is asked of this server's clock, which tests have in hand.
        options: jwt.types.Options = {"require": list(CLAIMS), "verify_exp": False, "verify_iat": False}
        try:
            claims = jwt.decode(token, await self._secret(), [ALGORITHM], options, issuer=ISSUER)
            read = Credential(str(claims["key"]), float(claims["exp"]))
        except (jwt.InvalidTokenError, TypeError, ValueError) as error:
            raise TokenRefused(f"the token is not one of this server's ({error}); exchange your key again") from error
        if read.expires <= self._clock().timestamp():
            raise TokenRefused("the token's time is over; exchange your key again")
        return read

    async def _secret(self) -> bytes:
        if self._drawn is None:
            self._drawn = await self._store.secret(SECRET_NAME)
        return self._drawn
