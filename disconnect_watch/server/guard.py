"""Who is let in where: one table of paths, and what is not in it is the admin's.

| access | with keys | without |
|---|---|---|
| open | everybody | everybody |
| use | every key | everybody |
| cancel | every key, and its own requests only | the admin |
| manage | admin keys | everybody, as Triton has it |
| admin | admin keys | the admin |

Without keys, the admin is who has the token that was printed at the start, or comes by the
admin's Unix socket: behind a proxy on the same machine everybody has a loopback address.

The path is looked at as the client wrote it and matched whole, as the routes do it themselves.
"""

import hmac
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

from disconnect_watch.keys import ADMIN, ANONYMOUS, Caller, KeyRing, Role, new_key
from disconnect_watch.server.access import RECORD_KEY, App, Receive, Scope, Send
from disconnect_watch.server.answers import error_response
from disconnect_watch.server.errors import ForbiddenError, RequestError, UnauthorizedError

__all__ = [
    "ACCESS_KEY",
    "CALLER_KEY",
    "DOOR_KEY",
    "HEADERS_KEY",
    "Access",
    "AdminDoor",
    "AdminPort",
    "Gatekeeper",
    "Guard",
    "access_to",
]

#: Where in ``scope["state"]`` the caller of a request is.
CALLER_KEY = "disconnect_watch.caller"
#: Where its headers are, by their names in lower case; of several with one name the first.
HEADERS_KEY = "disconnect_watch.headers"
#: Where it is said who may go to its path.
ACCESS_KEY = "disconnect_watch.access"

#: Is in ``scope["state"]`` of what came by a port or socket of the admin's.
DOOR_KEY = "disconnect_watch.door"

#: Longer paths are looked up each time: what clients make up must not fill the memory.
MAX_KNOWN_PATH = 256
MAX_KNOWN_PATHS = 1024


class Access(StrEnum):
    """Who may go to a path, see the table above."""

    OPEN = "open"
    USE = "use"
    CANCEL = "cancel"
    MANAGE = "manage"
    ADMIN = "admin"


_MODEL = r"/v2/models/[^/]+(?:/versions/[0-9]+)?"
_TABLE: tuple[tuple[re.Pattern[str], Access], ...] = tuple(
    (re.compile(pattern), access)
    for pattern, access in (
        (r"/v2(?:/health/(?:live|ready))?", Access.OPEN),
        (r"/health", Access.OPEN),
        (r"/ping", Access.OPEN),
        (r"/openapi\.json", Access.OPEN),
        # The page itself tells nothing; /live, which fills it, shows everybody's requests.
        (r"/(?:live\.(?:js|css))?", Access.OPEN),
        (r"/live", Access.MANAGE),
        # Not /v2/models/stats, which counts everybody's requests.
        (r"/v2/models/stats", Access.MANAGE),
        (rf"{_MODEL}(?:/(?:infer|generate|generate_stream|ready|config))?", Access.USE),
        (r"/invocations", Access.USE),
        (r"/v1/models(?:/.*)?", Access.USE),
        (r"/v1/(?:completions|chat/completions|embeddings)", Access.USE),
        (r"/v1/responses(?:/.*)?", Access.USE),
        (r"/v1/requests/.*", Access.CANCEL),
        (r"/abort_requests?", Access.CANCEL),
        (r"/v1/kv/release", Access.CANCEL),
        (r"/v1/admin/.*", Access.ADMIN),
    )
)


def access_to(path: str) -> Access:
    """Who may go to a path; the admin alone where nothing is known of it."""
    return _known_access(path) if len(path) <= MAX_KNOWN_PATH else _look_up(path)


def _look_up(path: str) -> Access:
    for pattern, access in _TABLE:
        if pattern.fullmatch(path):
            return access
    return Access.MANAGE


_known_access = lru_cache(MAX_KNOWN_PATHS)(_look_up)


class Gatekeeper:
    """What is known of callers.

    Args:
        keys: without one, everybody may use the models.
        has_admin_port: whether what an admin may do is asked for on a port of its own, and
            nowhere else.
        admin_token: where there are no keys; None makes one.

    Attributes:
        admin_token: lets its holder do what an admin's key does, where there are no keys.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        *,
        has_admin_port: bool = False,
        admin_token: str | None = None,
    ) -> None:
        self._keys = keys or KeyRing()
        self.has_admin_port = has_admin_port
        self.admin_token = None if self.has_keys else admin_token or new_key()

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return len(self._keys) > 0

    def identify(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who calls, by what was sent along.

        Raises:
            UnauthorizedError: a key that is not known.
        """
        if b"authorization" not in headers and b"x-api-key" not in headers:
            return ANONYMOUS
        key = _key_of(headers)
        if not key:
            return ANONYMOUS
        if self.admin_token is not None:
            # Clients send some key always; without keys it is the admin's or nobody's.
            is_admin = hmac.compare_digest(key.encode(), self.admin_token.encode())
            return ADMIN if is_admin else ANONYMOUS
        caller = self._keys.find(key)
        if caller is None:
            raise UnauthorizedError("the API key is not known")
        return caller

    def let_in(self, caller: Caller, access: Access) -> None:
        """Return where the caller may go there.

        Raises:
            UnauthorizedError: a key is needed.
            ForbiddenError: another key is needed.
        """
        if access is Access.OPEN:
            return
        if (access is Access.USE or access is Access.MANAGE) and not self.has_keys:
            return
        if caller.is_admin:
            return
        if caller.role is None:
            raise UnauthorizedError(
                "an API key is needed, send it as 'Authorization: Bearer ...'"
                if self.has_keys
                else "the admin's token is needed, which was printed when the server started"
            )
        if access in (Access.MANAGE, Access.ADMIN):
            raise ForbiddenError(f"role {caller.role} may not do this, an admin may")

    def on_main_port(self, caller: Caller, access: Access) -> Caller:
        """Who an admin is on the main port where there is another: one as all others.

        Raises:
            ForbiddenError: this is asked for on the admin's port.
        """
        if access in (Access.MANAGE, Access.ADMIN):
            raise ForbiddenError("this is not served here, but on the port of --admin-port")
        if not caller.is_admin:
            return caller
        return Caller(caller.name, Role.USER) if self.has_keys else ANONYMOUS


class AdminPort:
    """ASGI middleware for the port on which an admin's paths are, for who has an admin's key."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[DOOR_KEY] = True
        await self._app(scope, receive, send)


class AdminDoor:
    """ASGI middleware for a socket that only the admin can connect to."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {}).update({CALLER_KEY: ADMIN, DOOR_KEY: True})
        await self._app(scope, receive, send)


class Guard:
    """ASGI middleware that lets nobody through who may not go there."""

    def __init__(self, app: App, gatekeeper: Gatekeeper) -> None:
        self._app = app
        self._gatekeeper = gatekeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope["state"]
        headers = state[HEADERS_KEY] = dict(reversed(scope["headers"]))
        access = state[ACCESS_KEY] = access_to(scope["path"])
        try:
            caller = state.get(CALLER_KEY)
            if caller is None:  # not by the admin's socket, which has said so
                caller = self._gatekeeper.identify(headers)
            if self._gatekeeper.has_admin_port and DOOR_KEY not in state:
                caller = self._gatekeeper.on_main_port(caller, access)
            self._gatekeeper.let_in(caller, access)
        except RequestError as error:
            answer = error_response(scope["path"], error.status, str(error), error)
            await answer(scope, receive, send)
            return
        state[CALLER_KEY] = caller
        state[RECORD_KEY].owner = caller.name
        await self._app(scope, receive, send)


def _key_of(headers: Mapping[bytes, bytes]) -> str:
    authorization = headers.get(b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            return key.strip().decode("latin-1")
    return headers.get(b"x-api-key", b"").strip().decode("latin-1")
