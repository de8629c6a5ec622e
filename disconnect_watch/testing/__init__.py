"""For your own tests: clients that leave in every way, and assertions on the server they left.

Needs nothing beyond the standard library, except ``serving``, which needs uvicorn. The pytest
fixtures are in the plugin ``pytest_disconnect_watch``, which pytest finds by itself.
"""

from disconnect_watch.testing.check import NotCancelledError, assert_cancels, assert_survives
from disconnect_watch.testing.client import LeavingClient
from disconnect_watch.testing.http import Answer, http_request
from disconnect_watch.testing.probe import Probe
from disconnect_watch.testing.server import ThreadedServer, serving
from disconnect_watch.testing.target import Server
from disconnect_watch.testing.waiting import until, wait_until
from disconnect_watch.testing.ways import Way

__all__ = [
    "Answer",
    "LeavingClient",
    "NotCancelledError",
    "Probe",
    "Server",
    "ThreadedServer",
    "Way",
    "assert_cancels",
    "assert_survives",
    "http_request",
    "serving",
    "until",
    "wait_until",
]
