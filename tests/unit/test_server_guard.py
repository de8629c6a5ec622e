"""Keys, who may go where, and how often."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from disconnect_watch.keys import (
    ADMIN,
    ANONYMOUS,
    Caller,
    KeyRing,
    Role,
    digest_of,
    new_key,
)
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.server.errors import ForbiddenError, RequestError, UnauthorizedError
from disconnect_watch.server.guard import Access, Gatekeeper, access_to
from disconnect_watch.server.rate import RateLimit, TooManyError
from tests.support.backends import ScriptedBackend
from tests.support.serve import metrics_of

ALICE, ROOT = Caller("alice", Role.USER), Caller("root", Role.ADMIN)
PROXY = Caller("proxy", Role.SERVICE)


def ring(*callers: Caller) -> KeyRing:
    return KeyRing([(caller, digest_of(f"{caller.name}-key")) for caller in callers])


def test_a_file_has_a_key_a_line_and_several_for_one_name() -> None:
    text = f"""
    # who   role   hash
    alice  user   {digest_of("one")}
    alice  user   {digest_of("two").upper()}  # the next one
    root   admin  {digest_of("three")}; gw service {digest_of("four")}
    """
    keys = KeyRing.parse(text, source="keys")
    assert len(keys) == 4
    assert keys.find("one") == keys.find("two") == ALICE
    assert keys.find("three") == ROOT
    assert keys.find("four") == Caller("gw", Role.SERVICE)
    for wrong in ("", "One", "one ", digest_of("one"), "\udc80"):
        assert keys.find(wrong) is None


def test_a_key_is_kept_as_its_hash_alone() -> None:
    secret = new_key()
    assert digest_of(secret) == hashlib.sha256(secret.encode()).hexdigest()
    assert len({new_key() for _ in range(100)}) == 100
    assert len(secret) >= 3 + 43
    assert secret not in repr(vars(KeyRing([(ALICE, digest_of(secret))])))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("alice user", "line 1 has 2 fields"),
        (f"al/ice user {digest_of('x')}", "name 'al/ice' has other than"),
        (f"alice boss {digest_of('x')}", "role 'boss' is none, take one of user, service, admin"),
        (f"alice user {new_key()}", "is no SHA-256 in hex; the key itself must not stand here"),
    ],
)
def test_a_wrong_line_is_named_without_what_may_be_a_key(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="keys, line 1") as caught:
        KeyRing.parse(line, source="keys")
    assert complaint in str(caught.value)
    assert "dw-" not in str(caught.value)


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice user {digest_of('a')}\n")
    environment = {"DISCONNECT_WATCH_API_KEYS": f"root admin {digest_of('r')}"}
    keys = KeyRing.read(file, environment=environment)
    assert (keys.find("a"), keys.find("r")) == (ALICE, ROOT)
    assert len(KeyRing.read(None, environment={})) == 0
    file.write_text("# none yet\n")
    # Else everybody would be let in, though keys were asked for.
    with pytest.raises(ValueError, match="has no key, make one with"):
        KeyRing.read(file, environment=environment)
    with pytest.raises(ValueError, match="DISCONNECT_WATCH_API_KEYS has no key"):
        KeyRing.read(None, environment={"DISCONNECT_WATCH_API_KEYS": ""})


def may(gatekeeper: Gatekeeper, caller: Caller, access: Access) -> int:
    try:
        gatekeeper.let_in(caller, access)
    except RequestError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("access", "anonymous", "user", "admin"),
    [
        (Access.OPEN, 200, 200, 200),
        (Access.USE, 401, 200, 200),
        (Access.CANCEL, 401, 200, 200),
        (Access.MANAGE, 401, 403, 200),
        (Access.ADMIN, 401, 403, 200),
    ],
)
def test_with_keys_each_may_do_what_its_role_says(
    access: Access, anonymous: int, user: int, admin: int
) -> None:
    gatekeeper = Gatekeeper(ring(ALICE, PROXY, ROOT))
    assert gatekeeper.admin_token is None
    assert may(gatekeeper, ANONYMOUS, access) == anonymous
    assert may(gatekeeper, ALICE, access) == may(gatekeeper, PROXY, access) == user
    assert may(gatekeeper, ROOT, access) == admin


@pytest.mark.parametrize(
    ("access", "anonymous"),
    [
        (Access.OPEN, 200),
        (Access.USE, 200),
        (Access.MANAGE, 200),
        (Access.CANCEL, 401),
        (Access.ADMIN, 401),
    ],
)
def test_without_keys_nobody_cancels_but_the_admin(access: Access, anonymous: int) -> None:
    gatekeeper = Gatekeeper()
    assert may(gatekeeper, ANONYMOUS, access) == anonymous
    assert may(gatekeeper, ADMIN, access) == 200


def test_who_calls_is_told_by_a_key_in_either_header() -> None:
    gatekeeper = Gatekeeper(ring(ALICE))
    assert gatekeeper.identify({b"authorization": b"Bearer alice-key"}) == ALICE
    assert gatekeeper.identify({b"authorization": b"bearer  alice-key "}) == ALICE
    assert gatekeeper.identify({b"x-api-key": b"alice-key"}) == ALICE
    assert gatekeeper.identify({}) == ANONYMOUS
    assert gatekeeper.identify({b"authorization": b"Bearer "}) == ANONYMOUS
    for raw in (b"Bearer nope", b"Bearer alice-key\xff"):
        with pytest.raises(UnauthorizedError):
            gatekeeper.identify({b"authorization": raw})


def test_without_keys_a_key_is_the_admins_token_or_nothing() -> None:
    gatekeeper = Gatekeeper()
    assert gatekeeper.admin_token is not None
    token = gatekeeper.admin_token.encode()
    assert gatekeeper.identify({b"authorization": b"Bearer " + token}) == ADMIN
    assert gatekeeper.identify({b"authorization": b"Bearer none"}) == ANONYMOUS
    assert gatekeeper.identify({b"authorization": b"Bearer " + token[:-1]}) == ANONYMOUS
    assert Gatekeeper().admin_token != gatekeeper.admin_token


@pytest.mark.parametrize(
    ("path", "access"),
    [
        ("/v2/health/ready", Access.OPEN),
        ("/v2/models/m/infer", Access.USE),
        ("/v2/models/m/versions/3/generate_stream", Access.USE),
        ("/v2/models/m/stats", Access.MANAGE),
        ("/v2/models/stats", Access.MANAGE),
        ("/v2/models/m/trace/setting", Access.MANAGE),
        ("/v2/repository/models/m/load", Access.MANAGE),
        ("/v2/logging", Access.MANAGE),
        ("/v2/systemsharedmemory/status", Access.MANAGE),
        ("/metrics", Access.MANAGE),
        ("/", Access.OPEN),
        ("/live.js", Access.OPEN),
        ("/live", Access.MANAGE),
        ("/v1/chat/completions", Access.USE),
        ("/v1/models/a/b", Access.USE),
        ("/v1/requests/x/cancel", Access.CANCEL),
        ("/v1/requests/cancel", Access.CANCEL),
        ("/abort_request", Access.CANCEL),
        ("/abort_requests", Access.CANCEL),
        ("/v1/admin/cancel_all", Access.ADMIN),
        # What is not known, or not written as the routes want it, is the admin's.
        ("/v1/chat/completions/", Access.MANAGE),
        ("//v1/chat/completions", Access.MANAGE),
        ("/V1/completions", Access.MANAGE),
        ("/v1/completions\n", Access.MANAGE),
        ("/v2/models/m/infer/../../x", Access.MANAGE),
        ("/anything/else", Access.MANAGE),
    ],
)
def test_each_path_has_its_access_and_unknown_ones_the_strictest(path: str, access: Access) -> None:
    assert access_to(path) is access


async def status_of(app: Any, path: str, method: str, key: str | None) -> int:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": headers,
        "query_string": b"",
        "state": {},
    }
    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_with_keys_nobody_gets_further_than_health_without_one(method: str) -> None:
    frontend = Frontend(ScriptedBackend("a"))
    app = create_app(frontend, metrics_of(frontend), gatekeeper=Gatekeeper(ring(ALICE)))
    for path in (
        "/metrics",
        "/nowhere",
        "/v1/models",
        "/v1/completions",
        "/v1/requests/x/cancel",
        "/v1/requests/x",
        "/v1/admin/cancel_all",
        "/abort_request",
        "/abort_requests",
        "/v2/models/script",
        "/v2/models/script/generate",
        "/v2/repository/index",
        "/v2/logging",
    ):
        for key in (None, "wrong"):
            assert await status_of(app, path, method, key) == 401, (path, key)
    assert await status_of(app, "/v2/health/ready", "GET", None) == 200
    assert await status_of(app, "/v1/models", "GET", "alice-key") == 200
    assert await status_of(app, "/metrics", "GET", "alice-key") == 403
    assert await status_of(app, "/nowhere", method, "alice-key") == 403


def test_a_bucket_fills_and_is_the_callers_own() -> None:
    now = [0.0]
    limit = RateLimit(2.0, burst=4, clock=lambda: now[0])
    limit.take("a", 4)
    with pytest.raises(TooManyError) as caught:
        limit.take("a")
    assert caught.value.headers == {"retry-after": "1"}
    limit.take("b")
    now[0] = 0.5
    limit.take("a")
    with pytest.raises(TooManyError):
        limit.take("a")
    now[0] = 1000
    limit.take("a", 4)  # no more than a full bucket
    with pytest.raises(TooManyError):
        limit.take("a")
    limit.take("c", 40, weight=10)


def test_what_a_role_may_not_do_is_told_apart_from_no_key() -> None:
    gatekeeper = Gatekeeper(ring(ALICE))
    with pytest.raises(ForbiddenError, match="role user may not do this"):
        gatekeeper.let_in(ALICE, Access.ADMIN)
    with pytest.raises(UnauthorizedError, match="Authorization: Bearer"):
        gatekeeper.let_in(ANONYMOUS, Access.USE)
