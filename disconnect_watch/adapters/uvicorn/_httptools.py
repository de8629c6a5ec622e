"""uvicorn's httptools protocol, watched; the one module that needs httptools."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from disconnect_watch.adapters.uvicorn._exchange import UnchunkedExchange
from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol

__all__ = ["HttpTools"]


class HttpTools(WatchedProtocol, HttpToolsProtocol):
    """uvicorn's httptools protocol with a watch on the connection's socket.

    Requests that are queued behind a running one on a connection whose peer left
    are never started. Works on asyncio and uvloop, over TCP, TLS and AF_UNIX.

    Attributes:
        half_close: what a FIN means. "disconnect": the client left, as nginx, Triton
            and uvicorn take it. "ignore": it may still read (``nc -N``); its requests
            are answered, and only a reset cancels them. "probe": find out which, by
            keepalive and, to an HTTP/1.1 client, by 100 Continue before the response
            head or a comment line inside an event stream. Neither under TLS, where
            asyncio closes the transport at the FIN.
        vanish_after: seconds, see ``Connection.set_vanish_after``; None for the
            watcher's.
        unblind: bytes; while uvicorn reads no more of a connection, a FIN is seen
            behind so many. None leaves the receive buffer alone.
        on_disconnect: "cancel", or ``grace(seconds)``: a request whose client left may
            run on for so long before its token is set and its ``receive()`` tells; what
            is written meanwhile reaches a client that only half-closed.
        watcher: who watches; None for the process-wide one.
    """

    _exchange_of_1_0 = UnchunkedExchange
