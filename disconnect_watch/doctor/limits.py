"""What no watch can see with this set-up, and the setting that would change it."""

from disconnect_watch.doctor.finding import Finding, Status

__all__ = ["limit_findings"]

_AREA = "not seen"


def limit_findings(
    *, half_close: str, vanish_after: float | None, unblind: int | None
) -> list[Finding]:
    """What stays unseen under a protocol's options, see ``adapters.uvicorn.HttpTools``."""
    found = []

    def add(name: str, advice: str) -> None:
        found.append(Finding(_AREA, name, Status.NOTE, "", advice))

    if vanish_after is None:
        add("a client that vanished without a word", "http_tools(vanish_after=SECONDS)")
    if unblind is None:
        add("a FIN behind a full receive window", "http_tools(unblind=BYTES)")
    if half_close == "disconnect":
        add(
            "whether a half-closed client still reads (it is taken for gone)",
            'http_tools(half_close="probe") finds out, "ignore" serves it',
        )
    elif half_close == "ignore":
        add(
            "a FIN (taken for a half-close)",
            'http_tools(half_close="probe") finds out, "disconnect" takes it for a leave',
        )
    add("a stopped process (SIGSTOP)", "its kernel acknowledges for it: set a deadline")
    add("a TLS close_notify without a FIN", "the client's TLS has ended, its connection has not")
    add(
        "the end of one HTTP/2 stream, which the connection outlives",
        "the HTTP/2 server's own http.disconnect tells; behind a proxy it is a FIN",
    )
    return found
