"""Models that real Tritons serve, asked over gRPC. Needs the ``gateway`` extra.

A request that is cancelled here cancels its call, and Triton tells its model of that within
milliseconds, whichever way the request came: Triton's own HTTP frontend tells it never, or
late.
"""

from disconnect_watch.backends.triton.endpoint import Connecting, Endpoint, parse_endpoints
from disconnect_watch.backends.triton.headers import HeaderPassing
from disconnect_watch.backends.triton.repository import TritonRepository

__all__ = ["Connecting", "Endpoint", "HeaderPassing", "TritonRepository", "parse_endpoints"]
