"""A request that comes through the user's proxy, and whether its client's leave does too."""

import time
from collections.abc import Callable

from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.doctor.patient import Means, Message, Patient, Visit
from disconnect_watch.ports import bind
from disconnect_watch.testing import serving

__all__ = ["listen_behind_proxy"]

_AREA = "proxy"
#: What proxies add. One that adds nothing can't be told from a client.
_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-proto", "x-real-ip")
_PERIOD = 0.01


class _AnyPath(Patient):
    """Takes the first request for its visit, whatever it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.visit = Visit(Means.TOKEN)

    def visit_of(self, scope: Message) -> Visit:
        """See ``Patient``."""
        return self.visit


def listen_behind_proxy(
    host: str, port: int, *, seconds: float, announce: Callable[[str], object]
) -> list[Finding]:
    """Serve until a client that came through the proxy left, or the time is over.

    Args:
        host, port: to listen on.
        seconds: to wait.
        announce: called with the URL once somebody can come.

    Raises:
        OSError: the port cannot be had.
    """
    patient = _AnyPath()
    visit = patient.visit
    deadline = time.monotonic() + seconds
    with serving(
        patient,
        sock=bind(host, port),
        lifespan="off",
        ws="none",
        log_level="critical",
    ) as server:
        announce(server.url)
        while visit.heard_at is None and time.monotonic() < deadline:
            time.sleep(_PERIOD)
        patient.is_over = True
    if not visit.has_begun:
        value = f"no request came within {seconds:g} s"
        return [Finding(_AREA, "request", Status.PROBLEM, value, "send one through the proxy")]
    return [_headers(visit), _version(visit), _leave(visit, seconds)]


def _headers(visit: Visit) -> Finding:
    added = [f"{name}: {value}" for name, value in visit.headers if name in _HEADERS]
    if added:
        return Finding(_AREA, "headers", Status.OK, "; ".join(added))
    return Finding(_AREA, "headers", Status.NOTE, "none that a proxy adds")


def _version(visit: Visit) -> Finding:
    if visit.http_version != "1.0":
        return Finding(_AREA, "to the server", Status.OK, f"HTTP/{visit.http_version}")
    advice = "no stream passes it piece by piece; nginx: proxy_http_version 1.1"
    return Finding(_AREA, "to the server", Status.NOTE, "HTTP/1.0", advice)


def _leave(visit: Visit, seconds: float) -> Finding:
    if visit.heard_at is not None:
        return Finding(_AREA, "a client's leave", Status.OK, "came through")
    advice = (
        "let the client leave (curl -m 1); nginx: proxy_ignore_client_abort off; "
        "HAProxy: option abortonclose"
    )
    value = f"did not come through within {seconds:g} s"
    return Finding(_AREA, "a client's leave", Status.PROBLEM, value, advice)
