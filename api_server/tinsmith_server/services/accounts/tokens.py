"""Tokens: short-lived credentials that stand for a key, in programs and in the console."""

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
"""The beginning of every JSON object in base64. The SDK uses this prefix to tell tokens from keys."""
CLAIMS = ("iss", "sub", "key", "iat", "exp")


@dataclass(frozen=True, slots=True)
class Login:
    """A login of the console. Its tokens are renewed until `ends`, in seconds since 1970."""

    login_id: str
    ends: float


@dataclass(frozen=True, slots=True)
class Credential:
    """The digest of a key, and an expiry in seconds since 1970. A key itself never expires.

    Only a token of the console has a `login`.
    """

    key_hash: str
    expires: float = math.inf
    login: Login | None = None

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

    async def issue(self, credential: Credential, tenant: str, login: Login | None = None) -> str:
        """Return a token that is valid for an hour, but not longer than its credential or its login.

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
            "exp": int(min(now + LIFE_SECONDS, login.ends if login else credential.expires)),
        }
        if login is not None:
            claims |= {"login": login.login_id, "login_ends": login.ends}
        return jwt.encode(claims, await self._secret(), ALGORITHM)

    async def read(self, token: str) -> Credential:
        """Return the credential of a token.

        Raises TokenRefused for a token that this server did not issue, and for an expired token.
        """
        # Expiry is checked against this server's clock, which tests control.
        options: jwt.types.Options = {"require": list(CLAIMS), "verify_exp": False, "verify_iat": False}
        try:
            claims = jwt.decode(token, await self._secret(), [ALGORITHM], options, issuer=ISSUER)
            login = Login(str(claims["login"]), float(claims["login_ends"])) if "login" in claims else None
            read = Credential(str(claims["key"]), float(claims["exp"]), login)
        except (jwt.InvalidTokenError, KeyError, TypeError, ValueError) as error:
            raise TokenRefused(f"the token is not one of this server's ({error}); exchange your key again") from error
        if read.expires <= self._clock().timestamp():
            raise TokenRefused("the token has expired; exchange your key again")
        return read

    async def _secret(self) -> bytes:
        if self._drawn is None:
            self._drawn = await self._store.secret(SECRET_NAME)
        return self._drawn
