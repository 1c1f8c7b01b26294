"""Sessions of the console: a key is exchanged for a token, which the browser keeps in a cookie.

A page cannot read the cookie. For each change, the page also sends a second secret, the CSRF token. Pages of other
sites do not know this secret, even if a browser sends their requests with the cookie. Only ended sessions are stored,
so every replica knows every session. A session ends with its key, at the latest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from tinsmith_server.errors import AuthenticationFailed, Unprocessable
from tinsmith_server.services.accounts.callers import LOCAL_CALLER, Caller
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.services.accounts.tokens import Login
from tinsmith_server.store.records import Clock, utc_now
from tinsmith_server.store.store import Store

LONGEST_LOGIN_SECONDS = 12 * 3600.0
_SECRET_NAME = "console"


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """A session of the console. `token` is for the cookie, and no page sees it."""

    caller: Caller
    csrf_token: str = ""
    expires_at: datetime | None = None
    token: str | None = None
    seconds_left: int = 0


class ConsoleSessions:
    """The sessions of the console."""

    def __init__(self, store: Store, keys: Keys, clock: Clock = utc_now) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._drawn: bytes | None = None

    @property
    def needs_login(self) -> bool:
        return self._keys.required

    async def log_in(self, key: str | None) -> ConsoleSession:
        """Open a session for a key. Raises AuthenticationFailed, and Unprocessable for a token.

        A token may be stolen from a log or a program, and must not be prolonged by a session.
        """
        if not self.needs_login:
            return ConsoleSession(LOCAL_CALLER)
        if (await self._keys.credential(key)).is_token:
            raise Unprocessable("a token cannot log in: use the key itself")
        login = Login(secrets.token_urlsafe(16), self._clock().timestamp() + LONGEST_LOGIN_SECONDS)
        return await self._issue(key, login)

    async def current(self, token: str | None) -> ConsoleSession:
        """Return the session of a cookie's token. Raises AuthenticationFailed."""
        if not self.needs_login:
            return ConsoleSession(LOCAL_CALLER)
        return await self._session(token, await self._login_of(token))

    async def renew(self, token: str | None) -> ConsoleSession:
        """Return the session with another hour, but not beyond the end of its login. Raises AuthenticationFailed."""
        if not self.needs_login:
            return ConsoleSession(LOCAL_CALLER)
        return await self._issue(token, await self._login_of(token))

    async def log_out(self, token: str | None) -> None:
        """End the session. A token of no session, or of a session that has ended, changes nothing."""
        with contextlib.suppress(AuthenticationFailed):
            await self._keys.end_login(await self._login_of(token))

    async def csrf_token_of(self, token: str) -> str:
        """Return the CSRF token of a session. Raises AuthenticationFailed if the token is not a session's."""
        return await self._csrf_token(await self._login_of(token))

    async def _issue(self, secret: str | None, login: Login) -> ConsoleSession:
        caller = await self._keys.caller(secret)
        token = await self._keys.tokens.issue(await self._keys.credential(secret), caller.tenant, login)
        return await self._session(token, login)

    async def _session(self, token: str | None, login: Login) -> ConsoleSession:
        caller, credential = await self._keys.caller(token), await self._keys.credential(token)
        seconds_left = math.ceil(credential.expires - self._clock().timestamp())
        expires_at = datetime.fromtimestamp(credential.expires, UTC)
        return ConsoleSession(caller, await self._csrf_token(login), expires_at, token, seconds_left)

    async def _login_of(self, token: str | None) -> Login:
        login = (await self._keys.credential(token)).login if token else None
        if login is None:
            raise AuthenticationFailed("there is no session of the console: log in with a key")
        return login

    async def _csrf_token(self, login: Login) -> str:
        if self._drawn is None:
            self._drawn = await self._store.secret(_SECRET_NAME)
        return hmac.new(self._drawn, login.login_id.encode(), hashlib.sha256).hexdigest()
