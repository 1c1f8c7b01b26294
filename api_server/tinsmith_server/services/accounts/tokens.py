"""Tokens that stand for a key for an hour, as the SDK exchanges them: they end by themselves, and with their key."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jwt

from tinsmith_server.errors import TokenRefused
from tinsmith_server.store.records import Clock, utc_now
from tinsmith_server.store.store import Store

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
